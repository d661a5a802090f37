//! Ctrl-C, SIGTERM and SIGHUP: the first asks a verb to stop, the second ends the process; while a run may save a checkpoint, only a second
//! Ctrl-C does. SIGHUP, which the end of a terminal or of a connection sends, counts as SIGTERM, unless nohup makes the program ignore it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fs, io, thread};

#[cfg(unix)]
use anyhow::Context;
#[cfg(unix)]
use nix::sys::signal::{SigSet, Signal};
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use super::exit::INTERRUPTED;

/// Becomes true when the user asks to stop (Ctrl-C, SIGTERM). After calling this, a verb must check the flag and stop
/// by itself; a second Ctrl-C ends the process at once. Verbs that never call it end at the first signal.
pub fn interrupted() -> &'static AtomicBool {
    sigterm_ends().store(false, Ordering::Relaxed);
    stop().store(false, Ordering::Relaxed);
    stop()
}

/// As [`interrupted`], but SIGTERM or SIGHUP never ends the process: service managers and schedulers send it to all processes of a run, and the one that
/// started the others passes it on, so that one request to stop comes as several signals.
pub fn interrupted_to_save() -> &'static AtomicBool {
    ARM_SIGTERM.get().into_iter().flatten().for_each(|&id| {
        signal_hook::low_level::unregister(id);
    });
    interrupted()
}

/// While true, the next Ctrl-C ends the process; otherwise a signal sets it. It starts as true.
fn stop() -> &'static Arc<AtomicBool> {
    static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    STOP.get_or_init(|| Arc::new(AtomicBool::new(true)))
}

/// As [`stop`], for SIGTERM and SIGHUP.
fn sigterm_ends() -> &'static Arc<AtomicBool> {
    static SIGTERM_ENDS: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    SIGTERM_ENDS.get_or_init(|| Arc::new(AtomicBool::new(true)))
}

/// What sets [`sigterm_ends`] at a signal.
static ARM_SIGTERM: OnceLock<Vec<SigId>> = OnceLock::new();

/// Whether SIGTERM or SIGHUP arrived: then even a program that continues after Ctrl-C ends.
pub(super) fn terminated() -> bool {
    terminate().load(Ordering::Relaxed)
}

fn terminate() -> &'static Arc<AtomicBool> {
    static TERMINATE: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    TERMINATE.get_or_init(Arc::default)
}

/// Installs the handlers, also one that does nothing for SIGXFSZ: a file that reaches `ulimit -f` is then an error of the call that writes it.
/// Call it before other threads are started.
pub(super) fn watch() -> anyhow::Result<()> {
    #[cfg(unix)]
    handle_on_own_thread()?;
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let ending = ending_signals();
    for &signal in &ending {
        let ends = if signal == SIGINT { stop() } else { sigterm_ends() };
        if signal != SIGINT {
            signal_hook::flag::register(signal, Arc::clone(terminate()))?;
        }
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(ends))?;
        signal_hook::flag::register(signal, Arc::clone(stop()))?;
    }
    let arm = |&signal: &i32| signal_hook::flag::register(signal, Arc::clone(sigterm_ends()));
    let _ = ARM_SIGTERM.set(ending.iter().map(arm).collect::<io::Result<_>>()?); // set before only if the handlers are installed twice
    Ok(())
}

/// Leaves signals to a thread that computes nothing. The kernel writes a handler's frame behind the stack pointer of the thread that it interrupts,
/// and oneDNN's float32 products for AVX-512 have it in memory of the heap meanwhile: a Ctrl-C during a product would damage what lies there.
#[cfg(unix)]
fn handle_on_own_thread() -> anyhow::Result<()> {
    const LEFT: [Signal; 6] =
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGWINCH, Signal::SIGCONT];
    const STACK: usize = 1 << 18; // bytes
    let left: SigSet = LEFT.into_iter().collect();
    left.thread_block()?; // here, and in all threads that are started from here
    let handle = move || {
        let _ = left.thread_unblock(); // fails for no mask of this thread
        loop {
            thread::park();
        }
    };
    let thread = thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(handle);
    thread.context("cannot start a thread that takes signals")?;
    Ok(())
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
#[cfg(unix)]
pub(super) fn before_the_end(is_on: Arc<AtomicBool>, restore: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new(ending_signals())?;
    thread::spawn(move || {
        for _ in signals.forever() {
            if is_on.load(Ordering::Relaxed) {
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

    #[test]
    fn a_signal_that_nohup_ignores_is_known() {
        let status = |mask: &str| format!("Name:\tmedusa\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t0\n");
        assert!(is_ignored(&status("0000000000001001"), SIGHUP));
        assert!(!is_ignored(&status("0000000000001000"), SIGHUP));
        assert!(!is_ignored("", SIGHUP) && !is_ignored(&status("x"), SIGHUP));
    }
}
