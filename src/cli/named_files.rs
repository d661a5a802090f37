//! The files that each verb reads and writes, checked before the work.

use std::path::{Path, PathBuf};

use super::outputs;
use super::reading::check_data;
use super::{CommonFlags, UsageError, Verb};
use crate::data::prompts::STDIN;
use crate::files::{self, Claim};
use crate::session::drafter::plan::PlannedTree;
use crate::session::drafter::spec::DrafterSpec;

/// A file or folder with the flag that names it.
type NamedFile<'a> = (&'static str, Option<&'a PathBuf>);

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
                ("--api-key-file", args.server.api_key_file.as_ref()),
            ],
            Verb::Calibrate(args) => {
                let mut inputs = vec![("--prompts", args.prompts.as_ref()), ("--heads", args.heads.as_ref())];
                inputs.extend(args.merge.iter().map(|file| ("--merge", Some(file))));
                inputs
            }
            Verb::Tree(args) => {
                let measured = args.latency.as_ref().filter(|path| path.exists());
                vec![
                    ("--calibration", Some(&args.calibration)),
                    ("--heads", args.heads.as_ref()),
                    ("--latency", measured),
                ]
            }
            Verb::Generate(args) => {
                let mut inputs = decoding_files(&args.heads, &args.tree, args.drafter.drafter.iter());
                inputs.push(("--prompts", args.prompts.as_ref()));
                inputs
            }
            Verb::Chat(args) => decoding_files(&args.heads, &args.tree, args.drafter.drafter.iter()),
            Verb::Serve(args) => decoding_files(&args.heads, &args.tree, args.drafter.drafter.iter()),
            Verb::Bench(args) => {
                let mut inputs = decoding_files(&args.heads, &args.tree, args.specs());
                inputs.extend([("--prompts", args.prompts.as_ref()), ("--calibration", args.calibration.as_ref())]);
                inputs.push(("--api-key-file", args.load.api_key_file.as_ref()));
                inputs
            }
            Verb::Export(args) => vec![
                ("--heads", args.heads.as_ref()),
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

    /// Rows that the verb reads: files, folders, globs and Hub ids.
    fn data(&self) -> &[String] {
        match self {
            Verb::Calibrate(args) => &args.data,
            Verb::Data(args) => &args.files,
            _ => &[],
        }
    }

    /// Checks and claims every file that the verb will write.
    ///
    /// # Errors
    /// [`UsageError`], or who else writes a file.
    pub(super) fn claim_outputs(&self, common: &CommonFlags) -> anyhow::Result<Vec<Claim>> {
        let outputs: Vec<_> = self.outputs().into_iter().filter_map(|(flag, path)| Some((flag, path?))).collect();
        self.check_distinct(&outputs)?;
        outputs.iter().map(|(flag, path)| outputs::claim(flag, path, common)).collect()
    }

    /// Refuses an output that is another output or an input.
    fn check_distinct(&self, outputs: &[(&str, &PathBuf)]) -> Result<(), UsageError> {
        let inputs: Vec<_> = self.inputs().into_iter().filter_map(|(flag, path)| Some((flag, path?))).collect();
        for (at, (flag, path)) in outputs.iter().enumerate() {
            if let Some((other, _)) =
                outputs[..at].iter().find(|(_, other)| outputs::location(other) == outputs::location(path))
            {
                return Err(UsageError(format!("{other} and {flag} name the same file, {}", path.display())));
            }
            if let Some((input, _)) =
                inputs.iter().find(|(_, input)| outputs::location(input) == outputs::location(path))
            {
                return Err(outputs::would_replace(flag, path, input));
            }
            outputs::check_is_no_data(flag, path, self.data())?;
        }
        Ok(())
    }

    /// Refuses a path that does not exist, and data files that cannot be found.
    ///
    /// # Errors
    /// [`UsageError`].
    pub(super) fn check_inputs(&self) -> Result<(), UsageError> {
        let is_elsewhere = |flag: &str, path: &Path| match flag {
            "--tree" => PlannedTree::is_inline(path),
            "--prompts" => path == Path::new(STDIN),
            _ => false,
        };
        let inputs = || self.inputs().into_iter().filter_map(|(flag, path)| Some((flag, path?)));
        // The shell hands keys over in pipes: `--api-key-file <(…)`.
        for (flag, path) in inputs().filter(|(flag, path)| *flag != "--api-key-file" && path.exists() && !path.is_dir())
        {
            files::check_regular(path).map_err(|why| UsageError(format!("{flag} {}: {why}", path.display())))?;
        }
        match inputs().find(|(flag, path)| !path.exists() && !is_elsewhere(flag, path)) {
            Some((flag, path)) => Err(UsageError(format!("{flag} {} does not exist", path.display()))),
            None => check_data(if let Verb::Calibrate(_) = self { "--data: " } else { "" }, self.data()),
        }
    }
}

fn decoding_files<'a>(
    heads: &'a Option<PathBuf>,
    tree: &'a Option<PathBuf>,
    drafters: impl Iterator<Item = &'a DrafterSpec>,
) -> Vec<NamedFile<'a>> {
    let own = drafters.flat_map(DrafterSpec::parts).map(|part| ("--drafter", part.path.as_ref()));
    let named = [("--heads", heads.as_ref()), ("--tree", tree.as_ref())];
    named.into_iter().chain(own).collect()
}
