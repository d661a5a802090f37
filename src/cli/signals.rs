//! Ctrl-C, SIGTERM and SIGHUP: the first asks a verb to stop, the second ends the process; while a run may save a checkpoint, only a second
//! Ctrl-C does. SIGHUP, which the end of a terminal or of a connection sends, counts as SIGTERM, unless nohup makes the program ignore it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{fs, io, thread};

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

use super::CommonFlags;
use super::exit::INTERRUPTED;

/// How long the last line may take: stderr may be a pipe that nobody reads.
const LAST_LINE: Duration = Duration::from_millis(500);

/// What signals came, and what the next one does.
#[derive(Debug)]
struct SignalState {
    /// While true, the next Ctrl-C ends the process; otherwise a signal sets it.
    stop: AtomicBool,
    /// As `stop`, for SIGTERM and SIGHUP.
    sigterm_ends: AtomicBool,
    sigterm_never_ends: AtomicBool,
    /// Whether SIGTERM or SIGHUP arrived.
    terminate: AtomicBool,
}

static STATE: SignalState = SignalState {
    stop: AtomicBool::new(true),
    sigterm_ends: AtomicBool::new(true),
    sigterm_never_ends: AtomicBool::new(false),
    terminate: AtomicBool::new(false),
};

/// What the process says where a signal ends it.
static LAST_WORDS: Mutex<&str> = Mutex::new(INTERRUPTED_WORD);
const INTERRUPTED_WORD: &str = "interrupted";

/// Becomes true when the user asks to stop (Ctrl-C, SIGTERM). After calling this, a verb must check the flag and stop
/// by itself; a second Ctrl-C ends the process at once. Verbs that never call it end at the first signal.
pub fn interrupted() -> &'static AtomicBool {
    let mut words = last_words();
    if !words.is_empty() {
        *words = INTERRUPTED_WORD;
    }
    STATE.sigterm_ends.store(false, Ordering::SeqCst);
    STATE.stop.store(false, Ordering::SeqCst);
    &STATE.stop
}

/// As [`interrupted`], but SIGTERM or SIGHUP never ends the process: service managers and schedulers send it to all processes of a run, and the one that
/// started the others passes it on, so that one request to stop comes as several signals.
pub fn interrupted_to_save() -> &'static AtomicBool {
    STATE.sigterm_never_ends.store(true, Ordering::SeqCst);
    interrupted()
}

/// What to say if a signal ends the process before [`interrupted`] is called; nothing for an empty text.
pub(super) fn set_last_words(words: &'static str) {
    *last_words() = words;
}

fn last_words() -> MutexGuard<'static, &'static str> {
    LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether SIGTERM or SIGHUP arrived: then even a program that continues after Ctrl-C ends.
pub(super) fn terminated() -> bool {
    STATE.terminate.load(Ordering::SeqCst)
}

/// Listens to signals, and installs a handler that does nothing for SIGXFSZ: a file that reaches `ulimit -f` is then an error of the call that
/// writes it. Call it before other threads are started.
///
/// Signals are left to a thread that computes nothing. The kernel writes a handler's frame behind the stack pointer of the thread that it interrupts,
/// and oneDNN's float32 products for AVX-512 have it in memory of the heap meanwhile: a Ctrl-C during a product would damage what lies there.
pub(super) fn watch() -> anyhow::Result<()> {
    const LEFT: [Signal; 6] =
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGWINCH, Signal::SIGCONT];
    const STACK: usize = 1 << 18; // bytes
    let left: SigSet = LEFT.into_iter().collect();
    left.thread_block()?; // here, and in all threads that are started from here
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let mut signals = Signals::new(ending_signals())?;
    let listen = move || {
        let _ = left.thread_unblock(); // fails for no mask of this thread
        if signals.forever().any(|signal| STATE.hear(signal)) {
            end();
        }
    };
    let thread = thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(listen);
    thread.context("cannot start a thread that takes signals")?;
    Ok(())
}

impl SignalState {
    /// Whether the signal ends the process.
    fn hear(&self, signal: i32) -> bool {
        let ends = if signal == SIGINT { &self.stop } else { &self.sigterm_ends };
        self.terminate.fetch_or(signal != SIGINT, Ordering::SeqCst);
        let is_the_end = ends.load(Ordering::SeqCst);
        self.sigterm_ends
            .fetch_or(signal != SIGINT && !self.sigterm_never_ends.load(Ordering::SeqCst), Ordering::SeqCst);
        self.stop.store(true, Ordering::SeqCst);
        is_the_end
    }
}

/// Ends the process with its last words, on a thread of their own.
fn end() -> ! {
    let (said, is_said) = channel();
    let say = move || {
        let words = *last_words();
        if !words.is_empty() {
            CommonFlags::print(words);
        }
        let _ = said.send(());
    };
    if thread::Builder::new().spawn(say).is_ok() {
        let _ = is_said.recv_timeout(LAST_LINE);
    }
    signal_hook::low_level::exit(INTERRUPTED.into())
}

fn ending_signals() -> Vec<i32> {
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| signal != SIGHUP || hangup_ends()).collect()
}

/// Whether SIGHUP counts as SIGTERM: on Linux, unless nohup makes the program ignore it. Elsewhere it ends the program, or is ignored.
pub(super) fn hangup_ends() -> bool {
    static ENDS: OnceLock<bool> = OnceLock::new();
    let is_ignored = || is_ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default(), SIGHUP);
    *ENDS.get_or_init(|| cfg!(target_os = "linux") && !is_ignored())
}

/// Whether a process, of which this is `/proc/PID/status`, was started with a signal ignored.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Runs `restore` before a signal ends the program, while `is_on`: on a thread, because a handler may do next to nothing. Meanwhile
/// [`interrupted`]'s flag must be false.
///
/// # Errors
/// If the handlers cannot be installed.
pub(super) fn before_the_end(is_on: Arc<AtomicBool>, restore: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new(ending_signals())?;
    thread::spawn(move || {
        for _ in signals.forever() {
            if is_on.load(Ordering::SeqCst) {
                restore();
                signal_hook::low_level::exit(INTERRUPTED.into());
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(stop: bool, sigterm_never_ends: bool) -> SignalState {
        SignalState {
            stop: AtomicBool::new(stop),
            sigterm_ends: AtomicBool::new(stop),
            sigterm_never_ends: AtomicBool::new(sigterm_never_ends),
            terminate: AtomicBool::new(false),
        }
    }

    #[test]
    fn the_second_signal_ends_and_sigterm_never_does_while_a_run_is_saved() {
        let ends =
            |state: &SignalState, signals: &[i32]| signals.iter().map(|&signal| state.hear(signal)).collect::<Vec<_>>();
        assert_eq!(ends(&state(true, false), &[SIGTERM]), [true], "before the verb listens");
        assert_eq!(ends(&state(false, false), &[SIGINT, SIGINT]), [false, true]);
        assert_eq!(ends(&state(false, false), &[SIGTERM, SIGHUP]), [false, true]);
        assert_eq!(ends(&state(false, false), &[SIGINT, SIGTERM, SIGTERM]), [false, false, true]);
        let saving = state(false, true);
        assert_eq!(ends(&saving, &[SIGTERM, SIGTERM, SIGHUP, SIGINT]), [false, false, false, true]);
        assert!(saving.terminate.load(Ordering::SeqCst));
    }

    #[test]
    fn a_signal_that_nohup_ignores_is_known() {
        let status = |mask: &str| format!("Name:\tmedusa\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t0\n");
        assert!(is_ignored(&status("0000000000001001"), SIGHUP));
        assert!(!is_ignored(&status("0000000000001000"), SIGHUP));
        assert!(!is_ignored("", SIGHUP) && !is_ignored(&status("x"), SIGHUP));
    }
}
