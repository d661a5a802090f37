//! Ctrl-C and SIGTERM: the first asks a verb to stop, the second ends the process; while a run may save a checkpoint, only a second Ctrl-C does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
#[cfg(unix)]
use std::{io, thread};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::exit::INTERRUPTED;

/// Becomes true when the user asks to stop (Ctrl-C, SIGTERM). After calling this, a verb must check the flag and stop
/// by itself; a second Ctrl-C ends the process at once. Verbs that never call it end at the first signal.
pub fn interrupted() -> &'static AtomicBool {
    sigterm_ends().store(false, Ordering::Relaxed);
    stop().store(false, Ordering::Relaxed);
    stop()
}

/// As [`interrupted`], but SIGTERM never ends the process: service managers and schedulers send it to all processes of a run, and the one that
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

/// As [`stop`], for SIGTERM.
fn sigterm_ends() -> &'static Arc<AtomicBool> {
    static SIGTERM_ENDS: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    SIGTERM_ENDS.get_or_init(|| Arc::new(AtomicBool::new(true)))
}

/// What sets [`sigterm_ends`] at a signal.
static ARM_SIGTERM: OnceLock<[SigId; 2]> = OnceLock::new();

/// Whether SIGTERM arrived: then even a program that continues after Ctrl-C ends.
pub(super) fn terminated() -> bool {
    terminate().load(Ordering::Relaxed)
}

fn terminate() -> &'static Arc<AtomicBool> {
    static TERMINATE: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    TERMINATE.get_or_init(Arc::default)
}

pub(super) fn watch() -> anyhow::Result<()> {
    signal_hook::flag::register(SIGTERM, Arc::clone(terminate()))?;
    for (signal, ends) in [(SIGINT, stop()), (SIGTERM, sigterm_ends())] {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(ends))?;
        signal_hook::flag::register(signal, Arc::clone(stop()))?;
    }
    let arm = |signal| signal_hook::flag::register(signal, Arc::clone(sigterm_ends()));
    let _ = ARM_SIGTERM.set([arm(SIGINT)?, arm(SIGTERM)?]); // set before only if the handlers are installed twice
    Ok(())
}

/// Runs `restore` before a signal ends the program, while `is_on`: on a thread, because a handler may do next to nothing. Meanwhile
/// [`interrupted`]'s flag must be false.
///
/// # Errors
/// If the handlers cannot be installed.
#[cfg(unix)]
pub(super) fn before_the_end(is_on: Arc<AtomicBool>, restore: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
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
