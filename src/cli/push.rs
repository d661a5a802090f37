//! `medusa push`: uploads a folder to the Hugging Face Hub.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::downloads::with_hub;
use super::{CommonFlags, UsageError, print_json, print_line};
use crate::files::checksums;
use crate::hub::id::{MAIN, Repo, RepoKind};
use crate::hub::push::{Push, Pushed};
use crate::plural::counted;

const EXAMPLE: &str = "Example:
  medusa push checkpoints/first/final --repo me/first-medusa-heads --private

Needs a token with write access: HF_TOKEN, or the one saved by `hf auth login`. Only changed files are uploaded, and none are deleted \
from the repository. To continue an interrupted push, run it again. Hidden files and *.partial are skipped.";

/// Upload a folder to the Hugging Face Hub in one commit.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub struct PushArgs {
    /// Folder to upload, such as a run's final/ or an export.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Model repository; created if needed.
    #[arg(long, value_name = "OWNER/NAME", value_parser = repo)]
    pub repo: Repo,
    /// Create the repository as private; an error if a public one exists.
    #[arg(long)]
    pub private: bool,
    /// Commit message [default: "Add FOLDER with medusa"].
    #[arg(long, value_name = "TEXT")]
    pub message: Option<String>,
    /// Branch; created if needed.
    #[arg(long, value_name = "BRANCH", default_value = MAIN, value_parser = branch)]
    pub revision: String,
}

fn repo(text: &str) -> Result<Repo, String> {
    Repo::parse(RepoKind::Model, text).ok_or_else(|| "expected OWNER/NAME of letters, digits, '-', '_' and '.'".into())
}

fn branch(text: &str) -> Result<String, String> {
    let is_good = crate::hub::id::is_revision(text);
    if is_good { Ok(text.to_owned()) } else { Err("expected the name of a branch".into()) }
}

/// Pushes the folder and prints the commit's URL.
///
/// # Errors
/// A missing folder, or an error of the Hub.
pub fn run(args: &PushArgs, common: &CommonFlags) -> anyhow::Result<()> {
    if !args.folder.is_dir() {
        return Err(UsageError(format!("{} is not a folder", args.folder.display())).into());
    }
    checksums::verify(&args.folder)?;
    let message = args.message.clone().unwrap_or_else(|| format!("Add {} with medusa", name(&args.folder)));
    let PushArgs { folder, repo, private, revision, .. } = args;
    let push = Push { folder, repo, private: *private, message: &message, revision };
    let pushed = with_hub(common, |hub| Ok(hub.push(&push)?))?;
    print_pushed(&pushed, common)
}

fn name(folder: &Path) -> String {
    let path = folder.canonicalize().unwrap_or_else(|_| folder.to_owned()); // `.` has no name of its own
    path.file_name().map_or_else(|| "a folder".into(), |name| name.to_string_lossy().into_owned())
}

fn print_pushed(pushed: &Pushed, common: &CommonFlags) -> anyhow::Result<()> {
    let Pushed { commit, files, unchanged, left_out } = pushed;
    if common.json {
        return print_json(&json!({
            "commit": commit, "files": files, "unchanged": unchanged, "left_out": left_out,
        }));
    }
    if !left_out.is_empty() {
        common.say(format_args!("skipped: {}", left_out.join(", ")));
    }
    common.say(format_args!("{} committed, {unchanged} unchanged", counted(files.len(), "file")));
    match commit {
        Some(page) => print_line(page),
        None => print_line("nothing changed: no commit"),
    }
}
