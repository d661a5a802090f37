//! NCCL for tensors on GPUs: the library that libtorch_cuda needs and has loaded. An operation is queued on the stream on which libtorch
//! computes, and waited for: a rank that died would otherwise leave the others waiting in the GPU for ever.
#![expect(unsafe_code, reason = "C functions of libraries that libtorch_cuda has loaded")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use crate::torch::cuda_runtime::{self, CudaRuntimeError};

/// `ncclUniqueId`.
const ID_BYTES: usize = 128;
/// `ncclSuccess`, `ncclInProgress`, `ncclSum`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const SUM: c_int = 0;
const POLL: Duration = Duration::from_micros(50);

/// By which the ranks of a communicator know each other.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId([u8; ID_BYTES]);

type Comm = *mut c_void;
type CudaStream = *mut c_void;
type GetUniqueId = unsafe extern "C" fn(id: *mut UniqueId) -> c_int;
type CommInitRank = unsafe extern "C" fn(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int) -> c_int;
type Reduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CudaStream) -> c_int;
type Broadcast = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
type GetAsyncError = unsafe extern "C" fn(comm: Comm, error: *mut c_int) -> c_int;
type OfComm = unsafe extern "C" fn(comm: Comm) -> c_int;
type ErrorString = unsafe extern "C" fn(error: c_int) -> *const c_char;

/// The stream on which libtorch computes: CUDA's legacy default.
const STREAM: CudaStream = ptr::null_mut();

/// Why NCCL did not do something.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum NcclError {
    #[error(transparent)]
    Runtime(#[from] CudaRuntimeError),
    #[error("{function} of NCCL failed: {reason}")]
    Failed { function: &'static str, reason: String },
    #[error("NCCL has no sums of {0:?} numbers")]
    Kind(Kind),
    /// Other ranks take no part.
    #[error("NCCL waited too long")]
    TimedOut,
}

/// A communicator: this process's GPU among those of the other ranks.
#[derive(Debug)]
pub(super) struct Nccl {
    comm: Comm,
    device: usize,
    timeout: Duration,
    reduce: Reduce,
    scatter: Reduce,
    gather: Gather,
    broadcast: Broadcast,
    async_error: GetAsyncError,
    abort: OfComm,
}

// SAFETY: a communicator may be used by any thread, one at a time; it is not `Sync`.
unsafe impl Send for Nccl {}

impl UniqueId {
    /// A new one, for rank 0 to give to the others.
    pub(super) fn new() -> Result<Self, NcclError> {
        let mut id = Self([0; ID_BYTES]);
        // SAFETY: the type is that of NCCL 2; the id is written.
        unsafe { check("ncclGetUniqueId", cuda_runtime::function::<GetUniqueId>("ncclGetUniqueId")?(&raw mut id))? };
        Ok(id)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// From the bytes of rank 0's; `None` if rank 0 had none.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl Nccl {
    /// Connects GPU `device` of rank `rank` with those of the other `world_size` - 1 ranks, which do the same.
    pub(super) fn new(
        id: UniqueId,
        device: usize,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Self, NcclError> {
        let mut comm = ptr::null_mut();
        // SAFETY: the types are those of NCCL 2; the communicator is written. Each GPU has one thread that trains.
        unsafe {
            let init = cuda_runtime::function::<CommInitRank>("ncclCommInitRank")?;
            let made = cuda_runtime::on_device(device, || init(&raw mut comm, world_size as c_int, id, rank as c_int))?;
            check("ncclCommInitRank", made)?;
            Ok(Self {
                comm,
                device,
                timeout,
                reduce: cuda_runtime::function("ncclAllReduce")?,
                scatter: cuda_runtime::function("ncclReduceScatter")?,
                gather: cuda_runtime::function("ncclAllGather")?,
                broadcast: cuda_runtime::function("ncclBroadcast")?,
                async_error: cuda_runtime::function("ncclCommGetAsyncError")?,
                abort: cuda_runtime::function("ncclCommAbort")?,
            })
        }
    }

    pub(super) fn all_reduce(&self, sum: &Tensor) -> Result<(), NcclError> {
        let (at, count, kind) = (sum.data_ptr(), sum.numel(), kind_of(sum)?);
        // SAFETY: the tensor is contiguous on this GPU and lives until the operation is done.
        self.run("ncclAllReduce", || unsafe { (self.reduce)(at, at, count, kind, SUM, self.comm, STREAM) })
    }

    /// `own_n` is this rank's share of `shares_wn`, whose memory it shares.
    pub(super) fn reduce_scatter(&self, shares_wn: &Tensor, own_n: &Tensor) -> Result<(), NcclError> {
        let (from, to, count, kind) = (shares_wn.data_ptr(), own_n.data_ptr(), own_n.numel(), kind_of(own_n)?);
        // SAFETY: as in `all_reduce`; NCCL allows its own share as the place of the result.
        self.run("ncclReduceScatter", || unsafe { (self.scatter)(from, to, count, kind, SUM, self.comm, STREAM) })
    }

    /// As [`Nccl::reduce_scatter`].
    pub(super) fn all_gather(&self, shares_wn: &Tensor, own_n: &Tensor) -> Result<(), NcclError> {
        let (from, to, count, kind) = (own_n.data_ptr(), shares_wn.data_ptr(), own_n.numel(), kind_of(own_n)?);
        // SAFETY: as in `reduce_scatter`.
        self.run("ncclAllGather", || unsafe { (self.gather)(from, to, count, kind, self.comm, STREAM) })
    }

    pub(super) fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), NcclError> {
        let (at, count, kind) = (tensor.data_ptr(), tensor.numel(), kind_of(tensor)?);
        // SAFETY: as in `all_reduce`.
        self.run("ncclBroadcast", || unsafe { (self.broadcast)(at, at, count, kind, root as c_int, self.comm, STREAM) })
    }

    /// Queues an operation and waits until it, and what was queued before it, is done. After an error the communicator is not used again.
    fn run(&self, function: &'static str, queue: impl FnOnce() -> c_int) -> Result<(), NcclError> {
        let done = cuda_runtime::on_device(self.device, queue)
            .map_err(NcclError::from)
            .and_then(|status| check(function, status))
            .and_then(|()| self.wait(function));
        if done.is_err() {
            // SAFETY: the communicator is open. Only this ends the operation on the GPU, which would hold up the end of the process.
            unsafe { (self.abort)(self.comm) };
        }
        done
    }

    fn wait(&self, function: &'static str) -> Result<(), NcclError> {
        let deadline = Instant::now() + self.timeout;
        while !cuda_runtime::default_stream_is_done(self.device)? {
            let mut error = SUCCESS;
            // SAFETY: the communicator is open; the error is written.
            check("ncclCommGetAsyncError", unsafe { (self.async_error)(self.comm, &raw mut error) })?;
            check(function, error)?;
            if Instant::now() >= deadline {
                return Err(NcclError::TimedOut);
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

fn check(function: &'static str, status: c_int) -> Result<(), NcclError> {
    if [SUCCESS, IN_PROGRESS].contains(&status) {
        return Ok(());
    }
    // SAFETY: the type is that of NCCL 2; the text is one of its constants.
    let text =
        unsafe { cuda_runtime::function::<ErrorString>("ncclGetErrorString").map(|text| CStr::from_ptr(text(status))) };
    let reason = text.map_or_else(|_| format!("error {status}"), |text| text.to_string_lossy().into_owned());
    Err(NcclError::Failed { function, reason })
}

/// `ncclDataType_t`.
fn kind_of(tensor: &Tensor) -> Result<c_int, NcclError> {
    match tensor.kind() {
        Kind::Int8 => Ok(0),
        Kind::Uint8 => Ok(1),
        Kind::Int => Ok(2),
        Kind::Int64 => Ok(4),
        Kind::Half => Ok(6),
        Kind::Float => Ok(7),
        Kind::Double => Ok(8),
        Kind::BFloat16 => Ok(9),
        other => Err(NcclError::Kind(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The functions are those of the NCCL that libtorch_cuda loads; there is none here.
    #[test]
    fn without_libtorch_cuda_the_missing_function_is_named() {
        let error = UniqueId::new().expect_err("no GPU half of libtorch is loaded in tests").to_string();
        assert!(error.contains("ncclGetUniqueId"), "{error}");
    }

    #[test]
    fn an_id_is_what_rank_0_sent() {
        let id = UniqueId(std::array::from_fn(|at| at as u8));
        assert_eq!(UniqueId::from_bytes(id.bytes()).unwrap().0, id.0);
        assert!(UniqueId::from_bytes(&[]).is_none());
    }
}
