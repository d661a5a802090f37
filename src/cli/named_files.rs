//! The files that each verb reads and writes, checked before the work.

use std::path::{Path, PathBuf};

use super::drafter::plan::PlannedTree;
use super::drafter::spec::DrafterSpec;
use super::outputs;
use super::{CommonFlags, UsageError, Verb};

/// A file or folder with the flag that names it.
type NamedFile<'a> = (&'static str, Option<&'a PathBuf>);

/// `--prompts -` is stdin.
const STDIN: &str = "-";

impl Verb {
    /// Files that the verb will write.
    fn outputs(&self) -> Vec<NamedFile<'_>> {
        match self {
            Verb::Calibrate(args) => vec![("--out", Some(&args.out))],
            Verb::Report(args) => vec![("--out", args.out.as_ref())],
            Verb::Tree(args) => {
                let measured = args.latency.as_ref().filter(|path| !path.exists());
                vec![("--out", args.out.as_ref()), ("--svg", args.svg.as_ref()), ("--latency", measured)]
            }
            Verb::Bench(args) => vec![("--csv", args.csv.as_ref()), ("--svg", args.svg.as_ref())],
            Verb::Data(args) => vec![("--svg", args.svg.as_ref())],
            _ => Vec::new(),
        }
    }

    /// Files and folders that the verb reads, once Hub ids have become paths. The backbone is checked by what reads its config.
    fn inputs(&self) -> Vec<NamedFile<'_>> {
        match self {
            Verb::Distill(args) => vec![
                ("--prompts", Some(&args.prompts)),
                ("--heads", args.heads.as_ref()),
                ("--tree", args.tree.as_ref()),
            ],
            Verb::Calibrate(args) => vec![("--prompts", args.prompts.as_ref()), ("--heads", Some(&args.heads))],
            Verb::Tree(args) => vec![("--calibration", Some(&args.calibration)), ("--heads", args.heads.as_ref())],
            Verb::Generate(args) => {
                let mut inputs = of_decoding(&args.heads, &args.tree, args.drafter.drafter.iter());
                inputs.push(("--prompts", args.prompts.as_ref()));
                inputs
            }
            Verb::Chat(args) => of_decoding(&args.heads, &args.tree, args.drafter.drafter.iter()),
            Verb::Bench(args) => {
                let mut inputs = of_decoding(&args.heads, &args.tree, args.specs());
                inputs.extend([("--prompts", Some(&args.prompts)), ("--calibration", args.calibration.as_ref())]);
                inputs
            }
            Verb::Export(args) => vec![
                ("--heads", Some(&args.heads)),
                ("--calibration", args.calibration.as_ref()),
                ("--tree", args.tree.as_ref()),
                ("--bench", args.bench.as_ref()),
            ],
            Verb::Init(_)
            | Verb::Data(_)
            | Verb::Train(_)
            | Verb::Inspect(_)
            | Verb::Push(_)
            | Verb::Report(_)
            | Verb::Doctor(_) => Vec::new(),
        }
    }

    /// Checks every file that the verb will write.
    ///
    /// # Errors
    /// [`UsageError`].
    pub(super) fn check_outputs(&self, common: &CommonFlags) -> Result<(), UsageError> {
        let mut outputs = self.outputs().into_iter().filter_map(|(flag, path)| Some((flag, path?)));
        outputs.try_for_each(|(flag, path)| outputs::check(flag, path, common))
    }

    /// Refuses a path that does not exist.
    ///
    /// # Errors
    /// [`UsageError`].
    pub(super) fn check_inputs(&self) -> Result<(), UsageError> {
        let is_elsewhere = |path: &Path| PlannedTree::is_inline(path) || path.as_os_str() == STDIN;
        let mut inputs = self.inputs().into_iter().filter_map(|(flag, path)| Some((flag, path?)));
        match inputs.find(|(_, path)| !path.exists() && !is_elsewhere(path)) {
            Some((flag, path)) => Err(UsageError(format!("{flag} {} does not exist", path.display()))),
            None => Ok(()),
        }
    }
}

fn of_decoding<'a>(
    heads: &'a Option<PathBuf>,
    tree: &'a Option<PathBuf>,
    drafters: impl Iterator<Item = &'a DrafterSpec>,
) -> Vec<NamedFile<'a>> {
    let own = drafters.flat_map(DrafterSpec::parts).map(|part| ("--drafter", part.path.as_ref()));
    let named = [("--heads", heads.as_ref()), ("--tree", tree.as_ref())];
    named.into_iter().chain(own).collect()
}
