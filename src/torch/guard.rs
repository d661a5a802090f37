//! libtorch's panics (out of memory, a shape clash) as values, around a whole piece of work.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

/// A panic caught by [`guard`].
#[derive(Debug, thiserror::Error)]
#[error("{}{work} failed: {reason}", if *.out_of_memory { "out of memory: " } else { "" })]
pub struct TorchPanic {
    /// What was being done.
    pub work: String,
    /// The first line of the panic.
    pub reason: String,
    /// Whether an allocator gave up.
    pub out_of_memory: bool,
}

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`; a panic in it becomes an error that names `work`.
///
/// # Errors
/// [`TorchPanic`] with the panic's first line (libtorch appends a C++ backtrace, which is dropped).
pub fn guard<T>(work: &str, body: impl FnOnce() -> T) -> Result<T, TorchPanic> {
    quiet_hook();
    let before = GUARDED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(body));
    GUARDED.set(before);
    result.map_err(|panic| {
        let text = message(panic.as_ref());
        let reason = first_line(&text);
        let out_of_memory = text.contains("out of memory") || text.contains("can't allocate memory");
        TorchPanic { work: work.into(), reason, out_of_memory }
    })
}

/// The default hook prints every panic to stderr; one that becomes an error would be told twice.
fn quiet_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                default(info);
            }
        }));
    });
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "a panic without text".into())
}

/// tch's panics read `called … value: Torch("words\nException raised from …`.
fn first_line(text: &str) -> String {
    let from = text.find("Torch(\"").map_or(0, |at| at + "Torch(\"".len());
    let line = text[from..].split("\\n").next().unwrap_or_default();
    line.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind, Tensor};

    #[test]
    fn a_shape_clash_becomes_one_line() {
        let (a, b) =
            (Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::ones([2, 3], (Kind::Float, Device::Cpu)));
        let error = guard("the product", || a.matmul(&b)).unwrap_err();
        assert!(error.reason.starts_with("mat1 and mat2 shapes cannot be multiplied"), "{error}");
        assert!(!error.to_string().contains('\n') && !error.out_of_memory);
    }

    #[test]
    fn running_out_of_memory_is_recognised() {
        let error = guard("a huge tensor", || Tensor::ones([1 << 55], (Kind::Float, Device::Cpu))).unwrap_err();
        assert!(error.out_of_memory, "{error:?}");
    }
}
