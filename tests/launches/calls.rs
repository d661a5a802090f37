//! Counts on this thread what a GPU would launch: the calls of libtorch's operators, through the hook of its profiler (`at::addThreadLocalCallback` in
//! ATen/record_function.h of libtorch 2.11.0).
#![expect(unsafe_code, reason = "calls C++ functions of libtorch")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;

use medusa::torch::rehearsal;

/// `at::RecordFunction`, which is asked for its name.
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

/// Launches so far, and the calls that are running.
#[derive(Default)]
struct Recorded {
    by_name: BTreeMap<String, usize>,
    /// For each of the running calls, outermost first, whether it is a launch.
    running: Vec<bool>,
}

thread_local! {
    static RECORDED: RefCell<Recorded> = RefCell::default();
}

extern "C" fn start(context: *mut *mut c_void, function: *const RecordFunction) -> *mut *mut c_void {
    // SAFETY: a function that starts has a name, which ends with 0.
    let name = unsafe { CStr::from_ptr(name_of(function)) }.to_string_lossy();
    RECORDED.with_borrow_mut(|recorded| {
        let launches = launches(&name) && !recorded.running.contains(&true) && !rehearsal::is_in_place();
        if launches {
            *recorded.by_name.entry(name.into_owned()).or_default() += 1;
        }
        recorded.running.push(launches);
    });
    // SAFETY: the address of the returned pointer, which owns nothing.
    unsafe { context.write(std::ptr::null_mut()) };
    context
}

extern "C" fn end(_: *const RecordFunction, _: *mut c_void) {
    RECORDED.with_borrow_mut(|recorded| recorded.running.pop());
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
        rehearsal::begin();
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

    /// What a GPU would have launched so far, by name: libtorch's operators, and the kernels whose place an oracle took.
    pub(crate) fn so_far(&self) -> BTreeMap<String, usize> {
        let mut by_name = RECORDED.with_borrow(|recorded| recorded.by_name.clone());
        for name in rehearsal::launches() {
            *by_name.entry(name.to_owned()).or_default() += 1;
        }
        by_name
    }
}

impl Drop for CallRecorder {
    fn drop(&mut self) {
        // SAFETY: the handle of a callback of this thread.
        unsafe { remove_callback(self.handle) };
    }
}

/// Operators that change sizes, strides or storage and compute nothing.
const WITHOUT_KERNEL: &str = "alias as_strided as_strided_ chunk detach detach_ empty empty_like empty_strided expand expand_as flatten \
    lift_fresh narrow new_empty numpy_T permute requires_grad_ reshape _reshape_alias resize_ resolve_conj resolve_neg result_type select \
    set_ slice split split_with_sizes squeeze squeeze_ t transpose unbind unflatten unfold unsafe_split _unsafe_view unsqueeze unsqueeze_ \
    view view_as movedim is_nonzero";

/// Operators that only call others.
const OF_OTHERS: &str = "clone contiguous dropout embedding full full_like gradient item linear matmul new_zeros ones ones_like \
    scaled_dot_product_attention softmax stack sum_to_size to _to_copy where zeros zeros_like";

/// Whether an operator launches a kernel, or a copy, on a GPU. What it calls in turn is then part of it: on the CPU it may convert numbers before
/// it computes.
fn launches(name: &str) -> bool {
    let Some((namespace, operator)) = name.split_once("::") else { return false };
    let is_in = |list: &str| list.split_whitespace().any(|other| other == operator);
    namespace != "autograd" && !is_in(WITHOUT_KERNEL) && !is_in(OF_OTHERS)
}
