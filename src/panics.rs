//! Panics that a caller expects, as values. A file that breaks a library ends as an error that names the file; a panic of our own code is
//! a bug: it is printed with its file and line, and unwinds on.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

/// Whether a caller expects a panic, by the source file that raised it (`None` on another thread) and by its message.
type Expected = fn(file: Option<&str>, message: &str) -> bool;

thread_local! {
    static EXPECTED: Cell<Option<Expected>> = const { Cell::new(None) };
    static RAISED_IN: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs code of a library on a user's file.
///
/// # Errors
/// The message of a panic in the library.
///
/// # Panics
/// If our own code panics in `work`.
pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    expecting(|file, _| file.is_some_and(|file| !is_own(file)), work)
}

/// Runs `work` on a thread whose result others wait for.
///
/// # Errors
/// The message of a panic, which is printed as ever.
pub(crate) fn catch_worker<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| message(payload.as_ref()).to_owned())
}

/// Runs `work`; a panic that is `expected` is not printed, and its message is returned.
pub(crate) fn expecting<T>(expected: Expected, work: impl FnOnce() -> T) -> Result<T, String> {
    silence_expected();
    let before = EXPECTED.replace(Some(expected));
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    EXPECTED.set(before);
    result.map_err(|payload| {
        let text = message(payload.as_ref()).to_owned();
        if expected(RAISED_IN.take().as_deref(), &text) { text } else { panic::resume_unwind(payload) }
    })
}

fn silence_expected() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let file = info.location().map(|place| place.file().to_owned());
            let is_expected = |expected: Expected| expected(file.as_deref(), message(info.payload()));
            if !EXPECTED.get().is_some_and(is_expected) {
                default(info);
            }
            RAISED_IN.set(file);
        }));
    });
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

/// rustc names this package's files as it names this one, and those of libraries by their folders in cargo's registry.
fn is_own(file: &str) -> bool {
    file.starts_with(file!().trim_end_matches("panics.rs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_a_library_is_its_message() {
        let huge = usize::MAX;
        assert_eq!(catch(|| " ".repeat(huge)).unwrap_err(), "capacity overflow");
        assert_eq!(catch(|| 3), Ok(3));
    }

    #[test]
    fn a_panic_of_our_own_unwinds_through_every_boundary() {
        let bug = || catch(|| catch(|| panic!("a bug")));
        let payload = panic::catch_unwind(bug).map(|_| ()).unwrap_err();
        assert_eq!(message(payload.as_ref()), "a bug");
        let rows: [u8; 0] = [];
        assert!(panic::catch_unwind(|| catch(|| rows[rows.len()])).is_err(), "an index of our own");
    }
}
