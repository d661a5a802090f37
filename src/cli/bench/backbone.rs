//! How `bench` loads the backbone, which all drafters share: as the heads were trained.

use std::path::Path;

use super::args::BenchArgs;
use super::drafters::Rows;
use crate::cli::served::{ModelOptions, shown};
use crate::cli::{CommonFlags, UsageError};
use crate::draft::heads::import::folder_of;
use crate::model::peft::ADAPTER_CONFIG;

/// The heads whose adapter is merged into the backbone.
///
/// # Errors
/// [`UsageError`] if other heads have another adapter: they need another backbone.
pub(super) fn heads<'a>(args: &'a BenchArgs, rows: &'a Rows) -> Result<Option<&'a Path>, UsageError> {
    let all = of_all(args, rows);
    let adapted = |heads: &&Path| folder_of(heads).join(ADAPTER_CONFIG).exists();
    let Some(tuned) = all.iter().copied().find(adapted) else { return Ok(all.first().copied()) };
    match all.iter().find(|heads| folder_of(heads) != folder_of(tuned)) {
        Some(other) => Err(UsageError(format!(
            "{} has an adapter for the backbone, and {} was trained for another backbone: bench them one by one",
            tuned.display(),
            other.display()
        ))),
        None => Ok(Some(tuned)),
    }
}

/// Quantisation and chat template of the backbone.
///
/// # Errors
/// As [`crate::cli::served::ServedFlags::resolve`]; [`UsageError`] if heads were trained differently and no flag decides.
pub(super) fn served(
    args: &BenchArgs,
    rows: &Rows,
    heads: Option<&Path>,
    common: &CommonFlags,
) -> anyhow::Result<ModelOptions> {
    let served = args.served.resolve(args.backbone(), heads, common)?;
    for other in of_all(args, rows).into_iter().filter(|other| Some(*other) != heads) {
        let one = heads.unwrap_or(other).display();
        let others = args.served.resolve(args.backbone(), Some(other), common)?;
        if served.quantization != others.quantization {
            let [ours, theirs] = [&served, &others].map(|served| shown(served.quantization));
            let why = format!("{one} was trained with quantization {ours}, {} with {theirs}", other.display());
            return Err(UsageError(format!("{why}: choose one for all with --quantization")).into());
        }
        let template = |served: &ModelOptions| served.template.as_ref().map(|template| template.sha256().to_owned());
        if template(&served) != template(&others) {
            let why = format!("{one} and {} were trained with different chat templates", other.display());
            return Err(UsageError(format!("{why}: choose one for all with --chat-template")).into());
        }
    }
    Ok(served)
}

/// The heads of all drafters, each once; `--heads` decides for a drafter without heads too.
fn of_all<'a>(args: &'a BenchArgs, rows: &'a Rows) -> Vec<&'a Path> {
    let mut all: Vec<&Path> = args.heads.as_deref().into_iter().collect();
    let own = rows.iter().flatten().filter_map(|plan| plan.heads.as_deref());
    own.for_each(|heads| {
        if !all.contains(&heads) {
            all.push(heads)
        }
    });
    all
}
