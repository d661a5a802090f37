//! Counts libtorch's operator calls on this thread, through the hook of its profiler (`at::addThreadLocalCallback` in
//! ATen/record_function.h of libtorch 2.11.0).

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;

/// `at::RecordFunction`, of which only the name is asked.
type RecordFunction = c_void;

/// `at::RecordFunctionCallback`.
#[repr(C)]
struct Callback {
    /// Returns a `std::unique_ptr`, through a hidden first argument.
    start: extern "C" fn(context: *mut *mut c_void, function: *const RecordFunction) -> *mut *mut c_void,
    end: extern "C" fn(function: *const RecordFunction, context: *mut c_void),
    sampling_probability: f64,
    scopes: [bool; 10],
    needs_inputs: bool,
    needs_outputs: bool,
    needs_ids: bool,
}

unsafe extern "C" {
    #[link_name = "_ZN2at22addThreadLocalCallbackENS_22RecordFunctionCallbackE"]
    fn add_thread_local_callback(callback: Callback) -> u64;
    #[link_name = "_ZN2at14removeCallbackEm"]
    fn remove_callback(handle: u64);
    #[link_name = "_ZNK2at14RecordFunction4nameEv"]
    fn name_of(function: *const RecordFunction) -> *const c_char;
}

/// Calls so far, and the calls that are running.
#[derive(Default)]
struct Recorded {
    by_name: BTreeMap<String, usize>,
    /// Whether each of the running calls, outermost first, has called another.
    called: Vec<bool>,
}

thread_local! {
    static RECORDED: RefCell<Recorded> = RefCell::default();
}

extern "C" fn start(context: *mut *mut c_void, _: *const RecordFunction) -> *mut *mut c_void {
    RECORDED.with_borrow_mut(|recorded| {
        if let Some(outer) = recorded.called.last_mut() {
            *outer = true;
        }
        recorded.called.push(false);
    });
    // SAFETY: the address of the returned pointer, which owns nothing.
    unsafe { context.write(std::ptr::null_mut()) };
    context
}

extern "C" fn end(function: *const RecordFunction, _: *mut c_void) {
    RECORDED.with_borrow_mut(|recorded| {
        if recorded.called.pop() == Some(false) {
            // SAFETY: a function that is ending has a name, which ends with 0.
            let name = unsafe { CStr::from_ptr(name_of(function)) }.to_string_lossy().into_owned();
            *recorded.by_name.entry(name).or_default() += 1;
        }
    });
}

/// Records the calls of this thread while it lives.
pub(crate) struct CallRecorder {
    handle: u64,
    /// The hook belongs to this thread.
    _stays: PhantomData<*const ()>,
}

impl CallRecorder {
    pub(crate) fn new() -> Self {
        RECORDED.take();
        let callback = Callback {
            start,
            end,
            sampling_probability: 1.0,
            scopes: [true; 10],
            needs_inputs: false,
            needs_outputs: false,
            needs_ids: false,
        };
        // SAFETY: the layout is that of libtorch 2.11.0, which tch pins; both functions live as long as the program.
        Self { handle: unsafe { add_thread_local_callback(callback) }, _stays: PhantomData }
    }

    /// Calls of operators that call no other, by name.
    pub(crate) fn so_far(&self) -> BTreeMap<String, usize> {
        RECORDED.with_borrow(|recorded| recorded.by_name.clone())
    }
}

impl Drop for CallRecorder {
    fn drop(&mut self) {
        // SAFETY: the handle of a callback of this thread.
        unsafe { remove_callback(self.handle) };
    }
}

/// Operators that change sizes, strides or storage and compute nothing.
const WITHOUT_KERNEL: &str = "alias as_strided chunk detach detach_ empty empty_like empty_strided expand narrow permute \
    reshape resize_ select set_ slice split split_with_sizes squeeze t transpose unbind unflatten unsafe_view \
    _unsafe_view unsqueeze view view_as _reshape_alias lift_fresh requires_grad_ is_nonzero result_type \
    resolve_conj resolve_neg new_empty unfold diagonal real movedim contiguous to size stride numel";

/// Whether a call of an operator that calls no other launches a kernel, or a copy, on a GPU.
pub(crate) fn launches(name: &str) -> bool {
    let Some((namespace, operator)) = name.split_once("::") else { return false };
    let operator = operator.split('.').next().unwrap_or(operator);
    namespace != "autograd" && WITHOUT_KERNEL.split_whitespace().all(|other| other != operator)
}
