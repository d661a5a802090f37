//! Ids of the Hub where the command line or a recipe has paths: before a verb begins they become folders and files of the cache, with a bar
//! while they come.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CommonFlags, gibibytes, mebibytes};
use crate::hub::{self, Event, Hub, Observer, Split, Wanted, id};

/// Where there is no terminal, progress is told no more often than this.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
const BAR: &str = "{bar:24} {binary_bytes}/{binary_total_bytes}  {msg}  {binary_bytes_per_sec}  {eta} left";

/// A place in a verb's arguments that may be an id.
pub(super) enum Place<'a> {
    /// A folder.
    Model(&'a mut PathBuf, Wanted),
    /// One file of prompts.
    File(&'a mut PathBuf),
    /// Data files and patterns.
    Data(&'a mut Vec<String>, Split),
}

impl<'a> Place<'a> {
    /// `--backbone`.
    pub(super) fn backbone(path: &'a mut PathBuf) -> Self {
        Self::Model(path, Wanted::Backbone)
    }

    /// `--heads`.
    pub(super) fn heads(path: &'a mut PathBuf) -> Self {
        Self::Model(path, Wanted::Heads)
    }

    fn is_id(&self) -> bool {
        match self {
            Self::Model(path, _) => path.to_str().is_some_and(|text| id::model(text).is_some()),
            Self::File(path) => path.to_str().is_some_and(|text| id::data(text).is_some()),
            Self::Data(entries, _) => entries.iter().any(|entry| id::data(entry).is_some()),
        }
    }
}

/// Makes all places paths.
///
/// # Errors
/// What cannot be had from the Hub.
pub(super) fn fetch(mut places: Vec<Place<'_>>, common: &CommonFlags) -> anyhow::Result<()> {
    places.retain(Place::is_id);
    if places.is_empty() {
        return Ok(()); // whoever has all on this machine needs no settings of a Hub
    }
    with_hub(common, |hub| places.into_iter().try_for_each(|place| fetch_one(hub, place)))
}

/// Runs what asks the Hub, with its transfers told to the user.
pub(super) fn with_hub<T>(common: &CommonFlags, work: impl FnOnce(&Hub<'_>) -> anyhow::Result<T>) -> anyhow::Result<T> {
    told(common, |tell| work(&Hub::from_env(tell)?))
}

/// Runs what takes an observer of transfers.
pub(super) fn told<T>(common: &CommonFlags, work: impl FnOnce(Observer<'_>) -> T) -> T {
    let teller = Teller::new(common);
    work(&|event| teller.tell(event))
}

fn fetch_one(hub: &Hub<'_>, place: Place<'_>) -> anyhow::Result<()> {
    match place {
        Place::Model(path, wanted) => {
            if let Some(fetched) = hub.fetch_model(path, wanted)? {
                *path = fetched.folder;
            }
        }
        Place::File(path) => {
            let fetched = path.to_str().map_or(Ok(None), |text| hub.fetch_data(text, Split::Any))?;
            if let Some(fetched) = fetched {
                *path = only(path, fetched.files)?;
            }
        }
        Place::Data(entries, split) => *entries = hub.fetch_all(entries, split)?,
    }
    Ok(())
}

fn only(id: &Path, files: Vec<PathBuf>) -> anyhow::Result<PathBuf> {
    match <[PathBuf; 1]>::try_from(files) {
        Ok([file]) => Ok(file),
        Err(files) => {
            let names: Vec<_> = files.iter().filter_map(|file| Some(file.file_name()?.to_string_lossy())).collect();
            let (id, names) = (id.display(), names.join(", "));
            Err(super::UsageError(format!("{id} has several files ({names}); name one: owner/name/file")).into())
        }
    }
}

/// A folder as people know it: `owner/name@commit` for a snapshot of the Hub, else its path.
pub(super) fn shown(folder: &Path) -> String {
    match hub::origin(folder) {
        Some(origin) => format!("{}@{}", origin.id, origin.commit),
        None => folder.display().to_string(),
    }
}

/// Tells people how far a transfer is: a bar on a terminal, now and then a line elsewhere.
struct Teller<'c> {
    common: &'c CommonFlags,
    live: bool,
    state: Mutex<Option<Transfer>>,
}

struct Transfer {
    bar: ProgressBar,
    what: String,
    bytes: u64,
    moved: u64,
    began: Instant,
    last_line: Instant,
}

impl<'c> Teller<'c> {
    fn new(common: &'c CommonFlags) -> Self {
        Self { common, live: io::stderr().is_terminal() && !common.quiet, state: Mutex::new(None) }
    }

    fn tell(&self, event: Event) {
        let mut state = self.state.lock().expect("no thread panics with it");
        match (event, state.as_mut()) {
            (Event::Began { what, files, bytes }, _) => {
                self.common.say(format_args!("{what}: {files} files, {}", amount(bytes)));
                *state = Some(self.begin(what, bytes));
            }
            (Event::Moved(bytes), Some(transfer)) => self.moved(transfer, transfer.moved + bytes),
            (Event::Lost(bytes), Some(transfer)) => self.moved(transfer, transfer.moved.saturating_sub(bytes)),
            (Event::Waiting { seconds, why }, transfer) => {
                self.line(transfer, &format!("{why}; trying again in {seconds} s"));
            }
            (Event::Locked { file }, transfer) => {
                self.line(transfer, &format!("another process downloads {file}; waiting for it"));
            }
            (Event::Ended, Some(transfer)) => {
                transfer.bar.finish_and_clear();
                *state = None;
            }
            (Event::Moved(_) | Event::Lost(_) | Event::Ended, None) => {} // small answers are no transfer
        }
    }

    /// A line above the bar, or a plain one.
    fn line(&self, transfer: Option<&mut Transfer>, text: &str) {
        match transfer {
            Some(Transfer { bar, .. }) => bar.suspend(|| self.common.say(text)),
            None => self.common.say(text),
        }
    }

    fn begin(&self, what: String, bytes: u64) -> Transfer {
        let target = if self.live { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_style(style).with_message(what.clone());
        let now = Instant::now();
        Transfer { bar, what, bytes, moved: 0, began: now, last_line: now }
    }

    fn moved(&self, transfer: &mut Transfer, moved: u64) {
        transfer.moved = moved;
        transfer.bar.set_position(moved);
        if !self.live && transfer.last_line.elapsed() >= BETWEEN_LINES && moved > 0 {
            transfer.last_line = Instant::now();
            let left = transfer.bytes.saturating_sub(moved);
            let time = transfer.began.elapsed().mul_f64(left as f64 / moved as f64);
            let (have, all, time) = (amount(moved), amount(transfer.bytes), HumanDuration(time));
            self.common.say(format_args!("{}: {have} of {all}  {time} left", transfer.what));
        }
    }
}

fn amount(bytes: u64) -> String {
    if bytes < 1 << 30 { mebibytes(bytes) } else { gibibytes(bytes) }
}
