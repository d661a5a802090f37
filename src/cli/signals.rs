//! Ctrl-C and SIGTERM: the first asks a verb to stop, the second ends the process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
#[cfg(unix)]
use std::{io, thread};

use super::exit::INTERRUPTED;

/// Becomes true when the user asks to stop (Ctrl-C, SIGTERM). After calling this, a verb must check the flag and stop
/// by itself; a second Ctrl-C ends the process at once. Verbs that never call it end at the first signal.
pub fn interrupted() -> &'static AtomicBool {
    stop().store(false, Ordering::Relaxed);
    stop()
}

/// While true, the next signal ends the process; otherwise the signal sets it. It starts as true.
fn stop() -> &'static Arc<AtomicBool> {
    static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    STOP.get_or_init(|| Arc::new(AtomicBool::new(true)))
}

/// Whether SIGTERM arrived: then even a program that continues after Ctrl-C ends.
pub(super) fn terminated() -> bool {
    terminate().load(Ordering::Relaxed)
}

fn terminate() -> &'static Arc<AtomicBool> {
    static TERMINATE: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    TERMINATE.get_or_init(Arc::default)
}

pub(super) fn watch() -> anyhow::Result<()> {
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(terminate()))?;
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(stop()))?;
        signal_hook::flag::register(signal, Arc::clone(stop()))?;
    }
    Ok(())
}

/// Runs `restore` before a signal ends the program, while `is_on`: on a thread, because a handler may do next to nothing. Meanwhile
/// [`interrupted`]'s flag must be false.
///
/// # Errors
/// If the handlers cannot be installed.
#[cfg(unix)]
pub(super) fn before_the_end(is_on: Arc<AtomicBool>, restore: impl Fn() + Send + 'static) -> io::Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
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
