//! What the libFuzzer targets share: the readers as functions of bytes, and what to do with a panic.

pub mod readers;

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

use readers::Reader;

/// Set by a panic that no reader expects, also on a thread whose panics become errors.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// The reader of this name, once its threads' panics are watched.
///
/// libFuzzer's hook ends the process at any panic, but a panic in a library is an error of a reader. The readers' hook silences those,
/// and passes on all others.
///
/// # Panics
/// For a name that no reader has.
pub fn reader(name: &str) -> Reader {
    panic::set_hook(Box::new(|info| {
        eprintln!("{info}");
        PANICKED.store(true, Ordering::Relaxed);
    }));
    *readers::READERS.iter().find(|reader| reader.name == name).expect("a reader of this name")
}

/// Runs a reader; a panic ends the process, so that libFuzzer keeps the input.
pub fn run(reader: Reader, input: &[u8]) {
    let result = panic::catch_unwind(AssertUnwindSafe(|| (reader.read)(input)));
    if result.is_err() || PANICKED.load(Ordering::Relaxed) {
        std::process::abort();
    }
}

/// A libFuzzer target for the reader of a name.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        static READER: std::sync::OnceLock<$crate::readers::Reader> = std::sync::OnceLock::new();
        libfuzzer_sys::fuzz_target!(
            init: { let _ = READER.set($crate::reader($name)); },
            |input: &[u8]| $crate::run(*READER.get().expect("set before the first input"), input)
        );
    };
}
