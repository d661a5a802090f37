//! Ctrl-C and SIGTERM: the first asks a verb to stop, the second ends the process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::exit::INTERRUPTED;

/// True once the user asked to stop (Ctrl-C, SIGTERM). From the first call on, the caller has to look at it and stop by
/// itself; a second Ctrl-C ends the process at once. Verbs that never call this end at the first.
pub fn interrupted() -> &'static AtomicBool {
    stop().store(false, Ordering::Relaxed);
    stop()
}

/// The next signal ends the process if this is true, and sets it if not; so it starts as true.
fn stop() -> &'static Arc<AtomicBool> {
    static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    STOP.get_or_init(|| Arc::new(AtomicBool::new(true)))
}

/// Whether SIGTERM came: then a program that goes on after Ctrl-C ends, too.
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
