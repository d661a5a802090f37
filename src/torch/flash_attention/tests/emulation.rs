//! The operators of flash attention on the CPU, for tests: kernels that the dispatcher calls with the arguments of the schema.
#![expect(unsafe_code, reason = "kernels that libtorch calls")]

// N tokens of all segments, L tokens of one, Q query heads, G key/value heads, D head size
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::Once;

use tch::{Kind, Tensor};

use crate::torch::dispatcher::{Handle, Operand};

type Kernel = unsafe extern "C" fn(*mut u64, u64, u64);

unsafe extern "C" {
    fn aoti_torch_library_init_impl(
        namespace: *const c_char,
        key: *const c_char,
        file: *const c_char,
        line: u32,
        library: *mut Handle,
    ) -> i32;
    fn aoti_torch_library_impl(library: Handle, name: *const c_char, kernel: Kernel) -> i32;
    /// C++'s `operator delete`.
    #[link_name = "_ZdlPv"]
    fn operator_delete(boxed: *mut c_void);
}

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Whether [`runs_on`](super::super::runs_on) answers yes for every tensor, on this thread.
pub(in crate::torch::flash_attention) fn is_emulated() -> bool {
    IS_ON.get()
}

/// Runs `body` with flash attention on the CPU.
pub(crate) fn emulated<T>(body: impl FnOnce() -> T) -> T {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let mut library: Handle = ptr::null_mut();
        // SAFETY: the strings live for ever, and so does the library.
        let status = unsafe {
            aoti_torch_library_init_impl(
                c"aten".as_ptr(),
                c"CPU".as_ptr(),
                c"emulation.rs".as_ptr(),
                0,
                &raw mut library,
            )
        };
        assert_eq!(status, 0, "a library of kernels");
        let kernels: [(&CStr, Kernel); 2] =
            [(c"_flash_attention_forward", forward), (c"_flash_attention_backward", backward)];
        for (name, kernel) in kernels {
            // SAFETY: the kernel unpacks the arguments of the operator's schema.
            assert_eq!(unsafe { aoti_torch_library_impl(library, name.as_ptr(), kernel) }, 0, "{name:?}");
        }
    });
    IS_ON.set(true);
    let _off_again = OffAgain;
    body()
}

/// Ends the emulation when it is dropped, also by a panic.
struct OffAgain;

impl Drop for OffAgain {
    fn drop(&mut self) {
        IS_ON.set(false);
    }
}

/// The arguments of a kernel; each is read once.
struct Operands<'s>(std::slice::Iter<'s, u64>);

impl Operands<'_> {
    fn next(&mut self) -> u64 {
        *self.0.next().expect("as many arguments as the schema has")
    }

    fn tensors<const N: usize>(&mut self) -> [Tensor; N] {
        std::array::from_fn(|_| owned(self.next()))
    }

    fn int(&mut self) -> i64 {
        self.next().cast_signed()
    }

    fn float(&mut self) -> f64 {
        f64::from_bits(self.next())
    }

    fn bool(&mut self) -> bool {
        self.next() & 0xff != 0
    }

    fn optional(&mut self) -> Option<u64> {
        let boxed = self.next() as *mut u64;
        (!boxed.is_null()).then(|| {
            // SAFETY: a present optional argument is a u64 of operator new that belongs to the kernel.
            unsafe {
                let value = boxed.read();
                operator_delete(boxed.cast());
                value
            }
        })
    }
}

/// The tensor of a handle that belongs to the kernel.
fn owned(handle: u64) -> Tensor {
    // SAFETY: the schema says that the argument is a tensor.
    unsafe { Tensor::from_ptr(handle as *mut torch_sys::C_tensor) }
}

/// What both kernels read.
struct Segmented {
    /// Queries, keys and values.
    qkv: [Tensor; 3],
    bounds: Vec<i64>,
    scale: f64,
    /// Keys behind a query that it sees; below 0: all.
    behind: i64,
}

impl Segmented {
    fn new(
        qkv: [Tensor; 3],
        [query_bounds, key_bounds]: [&Tensor; 2],
        longest: [i64; 2],
        scale: Option<f64>,
        behind: Option<i64>,
    ) -> Self {
        assert_eq!([query_bounds.kind(), key_bounds.kind()], [Kind::Int; 2]);
        assert!(query_bounds.equal(key_bounds), "queries and keys have the same segments");
        let bounds = Vec::<i64>::try_from(&query_bounds.to_kind(Kind::Int64)).expect("bounds");
        let lengths = bounds.windows(2).map(|bounds| bounds[1] - bounds[0]);
        assert_eq!([lengths.max(), bounds.last().copied()], [Some(longest[0]), Some(qkv[0].size()[0])]);
        assert_eq!(longest[0], longest[1]);
        assert!(qkv.iter().all(|x| x.dim() == 3 && x.stride()[2] == 1), "[N, heads, D], D in one piece: {qkv:?}");
        Self { qkv, bounds, scale: scale.expect("a scale"), behind: behind.unwrap_or(-1) }
    }

    /// `[Q, L, D]` of each segment: of queries, and of keys and values repeated for the query heads of a group; with the attention
    /// weights `[Q, L, L]`.
    fn each(&self) -> impl Iterator<Item = ([Tensor; 3], Tensor)> {
        let r = self.qkv[0].size()[1] / self.qkv[1].size()[1];
        self.bounds.windows(2).map(move |bounds| {
            let segment = |x: &Tensor| x.narrow(0, bounds[0], bounds[1] - bounds[0]).transpose(0, 1);
            let [q, k, v] = self.qkv.each_ref().map(segment);
            let [k, v] = [k, v].map(|x| x.repeat_interleave_self_int(r, 0, None));
            let visible = Tensor::ones(q.size()[1..2].repeat(2), (Kind::Bool, q.device())).tril(0);
            let visible = if self.behind < 0 { visible } else { visible.triu(-self.behind) };
            let scores = q.matmul(&k.transpose(1, 2)) * self.scale;
            let weights = scores.masked_fill(&visible.logical_not(), f64::NEG_INFINITY).softmax(-1, q.kind());
            ([q, k, v], weights)
        })
    }
}

/// Parts `[heads, L, D]` of all segments as `[N, heads, D]`.
fn joined(parts: &[Tensor]) -> Tensor {
    Tensor::cat(parts, 1).transpose(0, 1).contiguous()
}

/// `_flash_attention_forward(q, k, v, bounds?, bounds?, longest, longest, dropout, causal, mask, scale?, behind?, ahead?, lengths?, alibi?)`.
unsafe extern "C" fn forward(stack: *mut u64, arguments: u64, results: u64) {
    assert_eq!([arguments, results], [15, 5]);
    // SAFETY: the stack holds the arguments, and has room for the results.
    let stack = unsafe { std::slice::from_raw_parts_mut(stack, 15) };
    let mut given = Operands(stack.iter());
    let qkv = given.tensors();
    let bounds = [(); 2].map(|()| owned(given.optional().expect("bounds")));
    let longest = [given.int(), given.int()];
    assert_eq!((given.float(), given.bool(), given.bool()), (0.0, true, false), "no dropout, causal, no mask");
    let (scale, behind) = (given.optional().map(f64::from_bits), given.optional().map(u64::cast_signed));
    assert!(given.optional().is_none(), "ahead");
    assert!([(); 2].map(|()| given.optional()).iter().all(Option::is_none), "lengths, ALiBi");
    let segmented = Segmented::new(qkv, bounds.each_ref(), longest, scale, behind);
    let parts: Vec<Tensor> = segmented.each().map(|([.., v], weights)| weights.matmul(&v)).collect();
    let nothing = || Tensor::zeros([2], (Kind::Int64, parts[0].device()));
    let returned = [joined(&parts), nothing(), nothing(), nothing(), nothing()];
    returned.iter().zip(stack).for_each(|(tensor, slot)| *slot = Operand::Tensor(tensor).packed());
}

/// `_flash_attention_backward(grad, q, k, v, out, logsumexp, bounds, bounds, longest, longest, dropout, causal, random state, unused, scale?,
/// behind?, ahead?)`.
unsafe extern "C" fn backward(stack: *mut u64, arguments: u64, results: u64) {
    assert_eq!([arguments, results], [17, 3]);
    // SAFETY: the stack holds the arguments, and has room for the results.
    let stack = unsafe { std::slice::from_raw_parts_mut(stack, 17) };
    let mut given = Operands(stack.iter());
    let [grad_nqd] = given.tensors();
    let qkv = given.tensors();
    let [_out, _logsumexp, query_bounds, key_bounds] = given.tensors();
    let longest = [given.int(), given.int()];
    assert_eq!((given.float(), given.bool()), (0.0, true), "no dropout, causal");
    let [_random_state, _unused] = given.tensors();
    let (scale, behind) = (given.optional().map(f64::from_bits), given.optional().map(u64::cast_signed));
    assert!(given.optional().is_none(), "ahead");
    let segmented = Segmented::new(qkv, [&query_bounds, &key_bounds], longest, scale, behind);
    let groups = segmented.qkv[1].size()[1];
    let sum_groups = |dx_qld: Tensor| dx_qld.unflatten(0, [groups, -1]).sum_dim_intlist(1, false, None::<Kind>);
    let mut gradients = [(); 3].map(|()| vec![]);
    for (([q, k, v], weights), bounds) in segmented.each().zip(segmented.bounds.windows(2)) {
        let grad = grad_nqd.narrow(0, bounds[0], bounds[1] - bounds[0]).transpose(0, 1);
        let dweights = grad.matmul(&v.transpose(1, 2));
        let along = (&dweights * &weights).sum_dim_intlist(-1, true, None::<Kind>);
        let dscores = &weights * (dweights - along) * segmented.scale;
        gradients[0].push(dscores.matmul(&k));
        gradients[1].push(sum_groups(dscores.transpose(1, 2).matmul(&q)));
        gradients[2].push(sum_groups(weights.transpose(1, 2).matmul(&grad)));
    }
    gradients.iter().zip(stack).for_each(|(parts, slot)| *slot = Operand::Tensor(&joined(parts)).packed());
}
