//! Progress: a bar on a terminal, a line every ten seconds elsewhere.

use std::any::Any;
use std::cell::Cell;
use std::fmt::{Display, Write};
use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use console::{Term, measure_text_width};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::print::visible;
use super::{CommonFlags, wrap};
use crate::plural::duration;
use crate::session::reporter::Reporter;

/// Time between lines if stderr is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// Time between drawings of a bar whose work does not advance.
const REDRAWN: Duration = Duration::from_secs(1);

const BAR: &str = "{bar:12} {progress}";
/// Columns of the bar itself.
const BAR_WIDTH: usize = 13;

/// Progress of a piece of work. Dropped, it leaves the terminal as it was.
#[derive(Debug)]
pub(super) struct Progress {
    work: Arc<Mutex<Work>>,
    bar: ProgressBar,
    quiet: bool,
    /// Prints the lines.
    _lines: Option<Ticker>,
}

/// How far the work is. Its unit may be finer than that of the text.
#[derive(Debug, Clone)]
struct Work {
    text: String,
    done: u64,
    total: u64,
    /// What was done before `began`.
    before: u64,
    began: Instant,
    /// When `done` last changed, and how often it has.
    advanced: Instant,
    advances: u32,
    /// What was done when the last line was printed.
    printed: Option<u64>,
    /// Whether a line is printed again only after the work has advanced. Otherwise only the line about the end is not repeated, and the
    /// others show that the program is alive.
    prints_once: bool,
}

impl Work {
    fn advance(&mut self, done: u64, text: String) {
        if done < self.done {
            *self = Self { before: done, began: Instant::now(), advances: 0, ..self.clone() }; // another file, or parts that were lost
        }
        if done != self.done {
            self.advanced = Instant::now();
            self.advances += 1;
        }
        (self.done, self.text) = (done, text);
    }

    /// The line to print now; `None` if it would repeat the last one.
    fn next_line(&mut self, now: Instant) -> Option<String> {
        let is_end = self.total > 0 && self.done >= self.total;
        let was_printed = self.printed.replace(self.done) == Some(self.done);
        (!(was_printed && (is_end || self.prints_once))).then(|| self.line(now))
    }

    /// Estimated time left at `now`; `None` before the first result. It runs down until the next result is due, and grows while that is late.
    fn left(&self, now: Instant) -> Option<Duration> {
        let (made, to_make) = (self.done - self.before, self.total.saturating_sub(self.done));
        if made == 0 || to_make == 0 {
            return None;
        }
        let (took, since) = (self.advanced.duration_since(self.began), now.duration_since(self.advanced));
        let times = to_make as f64 / made as f64;
        let is_late = since > took / self.advances.max(1);
        Some(if is_late { (took + since).mul_f64(times) } else { took.mul_f64(times).saturating_sub(since) })
    }

    /// The time left; before the first result the time so far, and after the last one the time of all.
    fn times(&self, now: Instant) -> Option<String> {
        let elapsed = duration(now.duration_since(self.began).as_secs_f64());
        match self.left(now) {
            Some(left) if left < Duration::from_secs(1) => Some("less than 1 s left".into()),
            Some(left) => Some(format!("{} left", duration(left.as_secs_f64()))),
            None if elapsed == "0 s" => None,
            None if self.total > 0 && self.done >= self.total => Some(format!("in {elapsed}")),
            None => Some(format!("{elapsed} so far")),
        }
    }

    fn line(&self, now: Instant) -> String {
        self.times(now).map_or_else(|| self.text.clone(), |times| format!("{}, {times}", self.text))
    }
}

impl Progress {
    /// Progress of `total` units of which `before` are done.
    pub(super) fn new(total: u64, before: u64, text: impl Into<String>, common: &CommonFlags) -> Self {
        Self::drawn_as(BAR, [total, before], text, common)
    }

    /// Work of unknown length.
    pub(super) fn waiting(text: impl Into<String>, common: &CommonFlags) -> Self {
        Self::drawn_as("{progress}", [0, 0], text, common)
    }

    fn drawn_as(template: &str, [total, before]: [u64; 2], text: impl Into<String>, common: &CommonFlags) -> Self {
        let (now, text) = (Instant::now(), text.into());
        let work = Arc::new(Mutex::new(Work {
            text,
            done: before,
            total,
            before,
            began: now,
            advanced: now,
            advances: 0,
            printed: None,
            prints_once: false,
        }));
        let is_piped = !io::stderr().is_terminal() && !common.quiet;
        let lines = is_piped.then(|| {
            let (work, common) = (Arc::clone(&work), common.clone());
            Ticker::start(BETWEEN_LINES, move || {
                let line = locked(&work).next_line(Instant::now());
                line.iter().for_each(|line| common.say(line));
            })
        });
        Self { bar: bar(&work, template, common), work, quiet: common.quiet, _lines: lines }
    }

    /// The work has come to `done` units; `text` says how far that is.
    pub(super) fn set(&self, done: u64, text: impl Into<String>) {
        locked(&self.work).advance(done, text.into());
        self.bar.set_position(done);
    }

    /// Work begins with `done` units done by an earlier run. From here on, each line is printed once.
    pub(super) fn begin_at(&self, done: u64) {
        let mut work = locked(&self.work);
        let now = Instant::now();
        *work = Work { done, before: done, began: now, advanced: now, advances: 0, prints_once: true, ..work.clone() };
    }

    /// Changes the number of units.
    pub(super) fn set_total(&self, total: u64) {
        locked(&self.work).total = total;
        self.bar.set_length(total);
    }

    /// Prints the present line, for callers that do so at moments of their own.
    pub(super) fn say_line(&self) {
        let line = locked(&self.work).next_line(Instant::now());
        line.iter().for_each(|line| self.say(line));
    }

    /// Prints a line to stderr, above the bar if there is one.
    pub(super) fn say(&self, line: impl Display) {
        if !self.quiet {
            self.above(|| CommonFlags::print(visible(&line.to_string())));
        }
    }

    /// Runs `print` while the bar is hidden.
    pub(super) fn above<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Reporter for CommonFlags {
    fn notice(&self, line: &dyn Display) {
        self.say(line);
    }

    fn begin(&self, work: String) -> Box<dyn Any> {
        Box::new(Progress::waiting(work, self))
    }
}

/// Nothing that holds the lock panics.
fn locked(work: &Mutex<Work>) -> MutexGuard<'_, Work> {
    work.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A bar on stderr; hidden with `--quiet` or if stderr is no terminal. Where the terminal is too narrow, the text loses its last parts.
fn bar(work: &Arc<Mutex<Work>>, template: &str, common: &CommonFlags) -> ProgressBar {
    let target = if common.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let shared = Arc::clone(work);
    let before = if template == BAR { BAR_WIDTH } else { 0 };
    let style = style.with_key("progress", move |_: &ProgressState, out: &mut dyn Write| {
        let columns = wrap::columns(&Term::stderr()).unwrap_or(usize::MAX);
        let work = locked(&shared);
        let times = work.times(Instant::now()).map_or_else(String::new, |times| format!("{times}: "));
        let text = format!("{times}{}", work.text);
        let _ = out.write_str(whole_parts(&text, columns.saturating_sub(before))); // a bar takes any text
    });
    let Work { total, done, .. } = *locked(work);
    let bar = ProgressBar::with_draw_target(Some(total), target).with_style(style);
    bar.set_position(done);
    if !bar.is_hidden() {
        bar.enable_steady_tick(REDRAWN);
    }
    bar
}

/// As many parts of `a, b, c` as fit, at least one.
fn whole_parts(text: &str, columns: usize) -> &str {
    let ends = text.match_indices(", ").map(|(at, _)| at).chain([text.len()]);
    let fits = |end: &usize| measure_text_width(&text[..*end]) <= columns;
    let ends: Vec<usize> = ends.collect();
    let last = ends.iter().rfind(|end| fits(end)).or(ends.first());
    last.map_or(text, |end| &text[..*end])
}

/// Calls a function at intervals, on a thread of its own, until it is dropped.
#[derive(Debug)]
struct Ticker {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(interval: Duration, tick: impl Fn() + Send + 'static) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                tick();
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it prints, and a panic there is no reason for another one
        }
    }
}

/// Progress through a known number of things, of which an earlier run may have done some.
#[derive(Debug)]
pub(super) struct Counter {
    progress: Progress,
    done: Cell<usize>,
    total: usize,
    things: &'static str,
}

impl Counter {
    pub(super) fn new(total: usize, before: usize, things: &'static str, common: &CommonFlags) -> Self {
        let text = format!("{before}/{total} {things}");
        let progress = Progress::new(total as u64, before as u64, text, common);
        Self { progress, done: Cell::new(before), total, things }
    }

    pub(super) fn inc(&self) {
        let done = self.done.get() + 1;
        self.set(done, "");
    }

    /// `done` things are done; `note` says more, if it is not empty.
    pub(super) fn set(&self, done: usize, note: &str) {
        self.done.set(done);
        let comma = if note.is_empty() { "" } else { ", " };
        self.progress.set(done as u64, format!("{done}/{} {}{comma}{note}", self.total, self.things));
    }

    /// Prints a line to stderr, above the bar if there is one.
    pub(super) fn say(&self, line: impl Display) {
        self.progress.say(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(done: u64, total: u64, seconds: u64) -> (Work, Instant) {
        let began = Instant::now();
        let advanced = began + Duration::from_secs(seconds);
        (
            Work {
                text: "5/60 rows".into(),
                done,
                total,
                before: 0,
                began,
                advanced,
                advances: done as u32,
                printed: None,
                prints_once: false,
            },
            advanced,
        )
    }

    fn line(work: &Work, after: Instant, seconds: u64) -> String {
        work.line(after + Duration::from_secs(seconds))
    }

    #[test]
    fn the_time_left_runs_down_until_the_next_result_is_late_and_grows_then() {
        let (some, now) = work(5, 60, 10);
        assert_eq!(line(&some, now, 0), "5/60 rows, 1 min 50 s left");
        assert_eq!(line(&some, now, 2), "5/60 rows, 1 min 48 s left");
        assert_eq!(line(&some, now, 10), "5/60 rows, 3 min 40 s left");
        assert_eq!(line(&some, now, 500), "5/60 rows, 1 h 33 min left");
        let (last, now) = work(59, 60, 59);
        assert_eq!(line(&last, now, 59), "5/60 rows, 2 s left");
        let by_bytes = Work { done: 1 << 20, total: 2 << 20, advances: 2, ..last };
        assert_eq!(line(&by_bytes, now, 20), "5/60 rows, 39 s left", "a portion takes 29.5 s");
        let resumed = Work { before: 3, ..some };
        let now = resumed.advanced;
        assert_eq!(line(&resumed, now, 0), "5/60 rows, 4 min 35 s left", "of the two that this run has done");
    }

    #[test]
    fn before_the_first_result_and_after_the_last_there_is_no_estimate() {
        let (none, began) = work(0, 60, 0);
        assert_eq!(
            (line(&none, began, 0), line(&none, began, 30)),
            ("5/60 rows".into(), "5/60 rows, 30 s so far".into())
        );
        let (all, now) = work(60, 60, 90);
        assert_eq!(line(&all, now, 0), "5/60 rows, in 1 min 30 s");
    }

    #[test]
    fn the_last_line_is_printed_once() {
        let (mut all, now) = work(59, 60, 90);
        assert_eq!((all.next_line(now).is_some(), all.next_line(now).is_some()), (true, true), "its time left changes");
        all.advance(60, "60/60 rows".into());
        assert_eq!((all.next_line(now).is_some(), all.next_line(now)), (true, None), "the heads are being saved");
        all.advance(3, "3/60 rows".into());
        assert!(all.next_line(now).is_some(), "another file");
    }

    #[test]
    fn a_line_that_is_printed_once_is_printed_again_after_an_advance() {
        let (mut step, now) = work(1, 60, 30);
        step.prints_once = true;
        assert_eq!((step.next_line(now).is_some(), step.next_line(now)), (true, None), "the next step takes long");
        step.advance(2, "2/60 rows".into());
        assert_eq!((step.next_line(now).is_some(), step.next_line(now)), (true, None), "and so does the evaluation");
    }

    #[test]
    fn a_bar_that_has_no_room_loses_its_last_parts_whole() {
        let text = "step 5/200, loss 3.21 (heads 3.21), head-1 accuracy 0.100, 215 tokens/s";
        assert_eq!(whole_parts(text, 80), text);
        assert_eq!(whole_parts(text, 40), "step 5/200, loss 3.21 (heads 3.21)");
        assert_eq!(whole_parts("loading models/zephyr", 10), "loading models/zephyr", "the terminal's edge cuts it");
    }

    #[test]
    fn estimates_start_anew_with_another_file() {
        let (mut work, _) = work(50, 60, 1000);
        work.advance(10, "b".into());
        assert_eq!((work.before, work.left(Instant::now())), (10, None));
    }

    #[test]
    fn a_line_comes_at_every_interval_also_where_nothing_advances() {
        let (send, lines) = mpsc::channel();
        let ticker = Ticker::start(Duration::from_millis(2), move || send.send(()).unwrap_or(()));
        for _ in 0..3 {
            lines.recv_timeout(Duration::from_secs(20)).expect("a line");
        }
        drop(ticker);
        while lines.try_recv().is_ok() {}
        assert!(lines.recv().is_err(), "the thread has ended");
    }
}
