//! `--heads` of a run's folder: its `final/` is taken. And whether a calibration is of these heads.

use std::path::{Path, PathBuf};

use super::downloads::HubArgument;
use super::{CommonFlags, UsageError};
use crate::draft::heads::HEADS_FILE;
use crate::formats::calibration::Calibration;
use crate::formats::run_folder::{BEST, FINAL, is_run, step_of};
use crate::hub::Wanted;
use crate::session::opened::OpenedHeads;

/// Replaces each folder of a run among the heads by its `final/`.
///
/// # Errors
/// [`UsageError`] for a run that has none yet.
pub(super) fn enter(places: Vec<HubArgument<'_>>, common: &CommonFlags) -> Result<(), UsageError> {
    places.into_iter().try_for_each(|place| match place {
        HubArgument::Model(path, Wanted::Heads) if is_run(path) => enter_run(path, common),
        _ => Ok(()),
    })
}

fn enter_run(run: &mut PathBuf, common: &CommonFlags) -> Result<(), UsageError> {
    let heads = run.join(FINAL);
    if !heads.join(HEADS_FILE).is_file() {
        return Err(UsageError(unfinished(run)));
    }
    let best = if run.join(BEST).join(HEADS_FILE).is_file() { format!(" ({BEST}/ has others)") } else { String::new() };
    common.say(format_args!("{} is a run: taking the heads in its {FINAL}/{best}", run.display()));
    *run = heads;
    Ok(())
}

/// A calibration of other heads chooses a tree that is not the best of these.
///
/// # Errors
/// [`UsageError`] for other heads, and heads that cannot be read.
pub(super) fn check_calibration(calibration: &Calibration, path: &Path, heads: &OpenedHeads) -> anyhow::Result<()> {
    if heads.file.sha256()? == calibration.heads_sha256 {
        return Ok(());
    }
    Err(UsageError(format!(
        "{} is a calibration of other heads than {}; calibrate those with `medusa calibrate`",
        path.display(),
        heads.path.display()
    ))
    .into())
}

/// Which heads of an unfinished run could be taken.
fn unfinished(run: &Path) -> String {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let newest = names.filter(|name| step_of(name).is_some()).max_by_key(|name| step_of(name));
    let instead = match newest {
        Some(checkpoint) => format!("give a checkpoint, such as {}", run.join(checkpoint).display()),
        None => "train it first".into(),
    };
    format!("{} is a run that has no {FINAL}/ yet; {instead}", run.display())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use clap::{Args, Command, FromArgMatches};

    use super::*;

    fn entered(path: &Path) -> Result<PathBuf, UsageError> {
        let matches = CommonFlags::augment_args(Command::new("medusa")).get_matches_from(["medusa", "--quiet"]);
        let common = CommonFlags::from_arg_matches(&matches).unwrap();
        let mut path = path.to_owned();
        enter(vec![HubArgument::heads(&mut path)], &common).map(|()| path)
    }

    #[test]
    fn a_run_gives_its_final_heads_and_an_unfinished_one_names_its_newest_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let write = |name: &str| {
            let path = run.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            crate::files::write_atomic(&path, |out| out.write_all(b"")).unwrap();
        };
        ["recipe.toml", "provenance.json", "step-000020/x", "step-1000000/x"].into_iter().for_each(write);
        let refused = entered(&run).unwrap_err().to_string();
        let newest = run.join("step-1000000");
        assert!(
            refused.contains(&format!("no final/ yet; give a checkpoint, such as {}", newest.display())),
            "{refused}"
        );
        write("final/heads.safetensors");
        assert_eq!(entered(&run).unwrap(), run.join("final"));
        assert_eq!(entered(&run.join("final")).unwrap(), run.join("final"), "as it is");
    }
}
