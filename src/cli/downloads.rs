//! Hub ids on the command line and in recipes: resolved to files of the cache before the verb runs, with a progress bar.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use super::progress::Progress;
use super::{CommonFlags, UsageError};
use crate::gguf;
use crate::hub::{DataSplit, Hub, Observer, TransferEvent, Wanted, id};
use crate::plural::{counted, gibibytes, mebibytes};
use crate::session::drafter::spec::{DrafterPart, DrafterWeights};

/// An argument that may be a Hub id.
pub(super) enum HubArgument<'a> {
    /// A folder.
    Model(&'a mut PathBuf, Wanted),
    /// One file of prompts.
    File(&'a mut PathBuf),
    /// Data files and globs, and where the local files of each go.
    Data(&'a [String], &'a mut Vec<Vec<String>>, DataSplit),
}

impl<'a> HubArgument<'a> {
    /// `--backbone`.
    pub(super) fn backbone(path: &'a mut PathBuf) -> Self {
        Self::Model(path, Wanted::Backbone)
    }

    /// `--heads`.
    pub(super) fn heads(path: &'a mut PathBuf) -> Self {
        Self::Model(path, Wanted::Heads)
    }

    /// The path of a drafter's own weights, if it has one.
    pub(super) fn drafter(part: &'a mut DrafterPart) -> Option<Self> {
        let wanted = match part.name.weights() {
            DrafterWeights::None => return None,
            DrafterWeights::Heads => Wanted::Heads,
            DrafterWeights::Backbone => Wanted::Backbone,
        };
        Some(Self::Model(part.path.as_mut()?, wanted))
    }

    fn is_id(&self) -> bool {
        match self {
            Self::Model(path, _) => path.to_str().is_some_and(|text| id::model(text).is_some()),
            Self::File(path) => path.to_str().is_some_and(|text| id::data(text).is_some()),
            Self::Data(entries, ..) => entries.iter().any(|entry| id::data(entry).is_some()),
        }
    }
}

/// Downloads the Hub repositories among the arguments and replaces their ids by paths.
///
/// # Errors
/// An error of the Hub.
pub(super) fn fetch(mut places: Vec<HubArgument<'_>>, common: &CommonFlags) -> anyhow::Result<()> {
    places.retain(HubArgument::is_id);
    if places.is_empty() {
        return Ok(()); // no ids: the Hub's settings are not needed
    }
    with_hub(common, |hub| places.into_iter().try_for_each(|place| fetch_one(hub, place)))
}

/// Replaces each backbone's folder that holds a GGUF file by that file, and reports the files beside one that take the place of what it says.
///
/// # Errors
/// A folder with several of them.
pub(super) fn find_gguf(places: Vec<HubArgument<'_>>, common: &CommonFlags) -> anyhow::Result<()> {
    for place in places {
        let HubArgument::Model(path, Wanted::Backbone) = place else { continue };
        if let Some(found) = gguf::file::in_folder(path)? {
            *path = found;
        }
        report_beside(path, common);
    }
    Ok(())
}

/// Reports the files beside a GGUF file that are read in its place.
pub(super) fn report_beside(backbone: &Path, common: &CommonFlags) {
    let beside = if gguf::file::is_gguf(backbone) { gguf::folder::beside(backbone) } else { vec![] };
    for file in beside {
        common.say(format_args!("{}: used in the place of what {} says", file.display(), backbone.display()));
    }
}

/// Runs `work` with a connection to the Hub and progress of its transfers.
pub(super) fn with_hub<T>(common: &CommonFlags, work: impl FnOnce(&Hub<'_>) -> anyhow::Result<T>) -> anyhow::Result<T> {
    observed(common, |observer| work(&Hub::from_env(observer)?))
}

/// Runs `work` with an observer that shows transfers.
pub(super) fn observed<T>(common: &CommonFlags, work: impl FnOnce(Observer<'_>) -> T) -> T {
    let bar = TransferBar::new(common);
    work(&|event| bar.observe(event))
}

fn fetch_one(hub: &Hub<'_>, place: HubArgument<'_>) -> anyhow::Result<()> {
    match place {
        HubArgument::Model(path, wanted) => {
            if let Some(fetched) = hub.fetch_model(path, wanted)? {
                *path = fetched.model().to_owned();
            }
        }
        HubArgument::File(path) => {
            let fetched = path.to_str().map_or(Ok(None), |text| hub.fetch_data(text, DataSplit::Any))?;
            if let Some(fetched) = fetched {
                *path = only(path, fetched.files)?;
            }
        }
        HubArgument::Data(entries, fetched, split) => *fetched = hub.fetch_all(entries, split)?.0,
    }
    Ok(())
}

fn only(id: &Path, files: Vec<PathBuf>) -> anyhow::Result<PathBuf> {
    match <[PathBuf; 1]>::try_from(files) {
        Ok([file]) => Ok(file),
        Err(files) => {
            let names: Vec<_> = files.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy())).collect();
            let (id, names) = (id.display(), names.join(", "));
            Err(UsageError(format!("{id} has several files ({names}); name one: owner/name/file")).into())
        }
    }
}

/// Prints the progress of transfers.
struct TransferBar<'c> {
    common: &'c CommonFlags,
    state: Mutex<Option<ShownTransfer>>,
}

struct ShownTransfer {
    progress: Progress,
    what: String,
    bytes: u64,
    moved: u64,
    began: Instant,
}

impl<'c> TransferBar<'c> {
    fn new(common: &'c CommonFlags) -> Self {
        Self { common, state: Mutex::new(None) }
    }

    fn observe(&self, event: TransferEvent) {
        let mut state = self.state.lock().expect("no thread panics with it");
        match (event, state.as_mut()) {
            (TransferEvent::Began { what, files, bytes }, _) => {
                self.common.say(format_args!("{what}: {}, {}", counted(files, "file"), amount(bytes)));
                *state = Some(ShownTransfer::new(what, bytes, self.common));
            }
            (TransferEvent::Moved(bytes), Some(transfer)) => transfer.moved(transfer.moved + bytes),
            (TransferEvent::Lost(bytes), Some(transfer)) => transfer.moved(transfer.moved.saturating_sub(bytes)),
            (TransferEvent::Waiting { seconds, why }, transfer) => {
                self.line(transfer, &format!("{why}; retrying in {seconds} s"));
            }
            (TransferEvent::Locked { file }, transfer) => {
                self.line(transfer, &format!("waiting for another process to download {file}"));
            }
            (TransferEvent::Ended, Some(_)) => *state = None,
            (TransferEvent::Moved(_) | TransferEvent::Lost(_) | TransferEvent::Ended, None) => {} // small responses are not shown
        }
    }

    /// Prints a line, above the bar if there is one.
    fn line(&self, transfer: Option<&mut ShownTransfer>, text: &str) {
        match transfer {
            Some(ShownTransfer { progress, .. }) => progress.say(text),
            None => self.common.say(text),
        }
    }
}

impl ShownTransfer {
    fn new(what: String, bytes: u64, common: &CommonFlags) -> Self {
        let progress = Progress::new(bytes, 0, what.clone(), common);
        Self { progress, what, bytes, moved: 0, began: Instant::now() }
    }

    fn moved(&mut self, moved: u64) {
        self.moved = moved;
        let speed = moved as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        let (have, all, speed) = (amount(moved), amount(self.bytes), amount(speed as u64));
        self.progress.set(moved, format!("{}: {have} of {all}, {speed}/s", self.what));
    }
}

fn amount(bytes: u64) -> String {
    if bytes < 1 << 30 { mebibytes(bytes) } else { gibibytes(bytes) }
}
