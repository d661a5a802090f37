//! How `bench` loads the backbone, which all drafters share: as the heads were trained.

use std::rc::Rc;

use super::args::BenchArgs;
use super::drafters::Rows;
use crate::cli::{CommonFlags, UsageError};
use crate::draft::error::DrafterError;
use crate::session::opened::{OpenedBackbone, OpenedHeads};
use crate::session::setup::{ModelSetup, quantization_name};

/// Quantisation, template and adapter of the backbone.
///
/// # Errors
/// As [`SetupOptions::resolve`](crate::session::setup::SetupOptions::resolve); [`UsageError`] if heads were trained differently and no flag
/// decides, or on another backbone.
pub(super) fn setup(args: &BenchArgs, rows: &Rows, common: &CommonFlags) -> anyhow::Result<ModelSetup> {
    let all = all_heads(args, rows)?;
    let deciding = deciding_heads(&all)?;
    let (options, backbone) = (args.served.options(), OpenedBackbone::open(args.backbone())?);
    let setup = options.resolve(backbone.clone(), deciding.cloned(), common)?;
    for other in all.iter().filter(|other| deciding.is_none_or(|heads| heads.path != other.path)) {
        let one = deciding.unwrap_or(other).path.display();
        let others = options.resolve(backbone.clone(), Some(other.clone()), common)?;
        let other = other.path.display();
        if setup.quantization != others.quantization {
            let [ours, theirs] = [&setup, &others].map(|setup| quantization_name(setup.quantization));
            let why = format!("{one} was trained with quantization {ours}, {other} with {theirs}");
            return Err(UsageError(format!("{why}: choose one for all with --quantization")).into());
        }
        let template = |setup: &ModelSetup| setup.template.as_ref().map(|template| template.sha256().to_owned());
        if template(&setup) != template(&others) {
            let why = format!("{one} and {other} were trained with different chat templates");
            return Err(UsageError(format!("{why}: choose one for all with --chat-template")).into());
        }
    }
    Ok(setup)
}

/// The heads whose adapter is merged into the backbone, else the first.
///
/// # Errors
/// [`UsageError`] if other heads have another adapter: they need another backbone.
fn deciding_heads(all: &[Rc<OpenedHeads>]) -> Result<Option<&Rc<OpenedHeads>>, UsageError> {
    let adapted = |heads: &&Rc<OpenedHeads>| heads.adapter().is_ok_and(|adapter| adapter.is_some());
    let Some(tuned) = all.iter().find(adapted) else { return Ok(all.first()) };
    match all.iter().find(|heads| heads.folder() != tuned.folder()) {
        Some(other) => Err(UsageError(format!(
            "{} has an adapter for the backbone, and {} was trained for another backbone: bench them one by one",
            tuned.path.display(),
            other.path.display()
        ))),
        None => Ok(Some(tuned)),
    }
}

/// The heads of all drafters, each once; `--heads` decides for a drafter without heads too.
fn all_heads(args: &BenchArgs, rows: &Rows) -> Result<Vec<Rc<OpenedHeads>>, DrafterError> {
    let own = || rows.iter().flatten().filter_map(|plan| plan.heads.as_ref());
    let mut all: Vec<Rc<OpenedHeads>> = Vec::new();
    if let Some(path) = args.heads.as_deref() {
        let opened = own().find(|heads| heads.path == path).cloned();
        all.push(opened.map_or_else(|| OpenedHeads::open(path), Ok)?);
    }
    for heads in own() {
        if all.iter().all(|known| known.path != heads.path) {
            all.push(heads.clone());
        }
    }
    Ok(all)
}
