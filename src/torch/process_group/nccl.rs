//! NCCL for tensors on GPUs: the library that libtorch_cuda needs and has loaded. Communicators do not block: NCCL connects and queues in
//! threads of its own, and is asked until it is done, since a rank that died would otherwise leave the others waiting for ever. An operation
//! is queued on the stream on which libtorch computes, and waited for.
#![expect(unsafe_code, reason = "C functions of libraries that libtorch_cuda has loaded")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use crate::torch::cuda_runtime::{self, CudaFunctions, CudaRuntimeError};

/// `ncclUniqueId`.
const ID_BYTES: usize = 128;
/// `ncclSuccess`, `ncclRemoteError`, `ncclInProgress`, `ncclSum`.
const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
const SUM: c_int = 0;
const POLL: Duration = Duration::from_micros(50);

/// By which the ranks of a communicator know each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct UniqueId([u8; ID_BYTES]);

/// `ncclConfig_t` as of NCCL 2.17; later versions append to it, and take defaults for what a shorter one lacks.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
}

impl NcclConfig {
    /// `NCCL_CONFIG_INITIALIZER`, but for `blocking`.
    const WITHOUT_BLOCKING: Self = Self {
        size: size_of::<Self>(),
        magic: 0xcafe_beef,
        version: 21_700,
        blocking: 0,
        cga_cluster_size: c_int::MIN,
        min_ctas: c_int::MIN,
        max_ctas: c_int::MIN,
        net_name: ptr::null(),
    };
}

type Comm = *mut c_void;
type CudaStream = *mut c_void;
type GetUniqueId = unsafe extern "C" fn(id: *mut UniqueId) -> c_int;
type InitRank =
    unsafe extern "C" fn(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut NcclConfig) -> c_int;
type Reduce = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CudaStream) -> c_int;
type Broadcast = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
type GetAsyncError = unsafe extern "C" fn(comm: Comm, error: *mut c_int) -> c_int;
type OfComm = unsafe extern "C" fn(comm: Comm) -> c_int;
type ErrorString = unsafe extern "C" fn(error: c_int) -> *const c_char;
type LastError = unsafe extern "C" fn(comm: Comm) -> *const c_char;

/// The stream on which libtorch computes: CUDA's legacy default.
const STREAM: CudaStream = ptr::null_mut();

/// Why NCCL did not do something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NcclError {
    #[error(transparent)]
    Runtime(#[from] CudaRuntimeError),
    #[error("{function} of NCCL failed: {reason}")]
    Failed { function: &'static str, reason: String },
    /// The connection to another rank broke.
    #[error("{function} of NCCL: {reason}")]
    Remote { function: &'static str, reason: String },
    #[error("NCCL has no sums of {0:?} numbers")]
    Kind(Kind),
    /// Other ranks take no part.
    #[error("NCCL waited too long")]
    TimedOut,
}

/// NCCL's functions and CUDA's, looked up once.
#[derive(Debug, Clone, Copy)]
pub(super) struct NcclFunctions {
    cuda: CudaFunctions,
    get_unique_id: GetUniqueId,
    init_rank: InitRank,
    all_reduce: Reduce,
    reduce_scatter: Reduce,
    all_gather: Gather,
    broadcast: Broadcast,
    async_error: GetAsyncError,
    abort: OfComm,
    error_string: ErrorString,
    last_error: LastError,
}

/// A GPU of this process among those of the other ranks.
#[derive(Debug)]
pub(super) struct Communicator {
    functions: NcclFunctions,
    comm: Comm,
    device: usize,
}

// SAFETY: a communicator may be used by any thread, one at a time; it is not `Sync`.
unsafe impl Send for Communicator {}

impl UniqueId {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// From the bytes of rank 0's.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

impl NcclFunctions {
    /// Those of the libraries that libtorch_cuda has loaded.
    ///
    /// # Errors
    /// The one that is missing.
    pub(super) fn load() -> Result<Self, NcclError> {
        // SAFETY: the types are those of NCCL 2.17 and later.
        unsafe {
            Ok(Self {
                get_unique_id: cuda_runtime::function("ncclGetUniqueId")?,
                init_rank: cuda_runtime::function("ncclCommInitRankConfig")?,
                all_reduce: cuda_runtime::function("ncclAllReduce")?,
                reduce_scatter: cuda_runtime::function("ncclReduceScatter")?,
                all_gather: cuda_runtime::function("ncclAllGather")?,
                broadcast: cuda_runtime::function("ncclBroadcast")?,
                async_error: cuda_runtime::function("ncclCommGetAsyncError")?,
                abort: cuda_runtime::function("ncclCommAbort")?,
                error_string: cuda_runtime::function("ncclGetErrorString")?,
                last_error: cuda_runtime::function("ncclGetLastError")?,
                cuda: CudaFunctions::load()?,
            })
        }
    }

    /// A new id, for rank 0 to give to the others.
    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the id is written.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    fn check(&self, function: &'static str, status: c_int) -> Result<(), NcclError> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            REMOTE_ERROR => Err(NcclError::Remote { function, reason: self.words(status) }),
            _ => Err(NcclError::Failed { function, reason: self.words(status) }),
        }
    }

    /// What the status means, and what NCCL wrote last about it.
    fn words(&self, status: c_int) -> String {
        // SAFETY: the texts are NCCL's own; the second function makes no use of a communicator.
        let texts = unsafe { [(self.error_string)(status), (self.last_error)(ptr::null_mut())] };
        // SAFETY: they end with a 0, and are copied at once.
        let copied = |text: *const c_char| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned();
        let texts: Vec<String> = texts.into_iter().filter(|text| !text.is_null()).map(copied).collect();
        texts.iter().filter(|text| !text.is_empty()).map(String::as_str).collect::<Vec<_>>().join(": ")
    }
}

impl Communicator {
    /// Connects GPU `device` of rank `rank` with those of the other `world_size` - 1 ranks, which do the same before `deadline`.
    pub(super) fn connect(
        functions: NcclFunctions,
        id: UniqueId,
        device: usize,
        [rank, world_size]: [usize; 2],
        deadline: Instant,
    ) -> Result<Self, NcclError> {
        let (function, mut comm, mut config) =
            ("ncclCommInitRankConfig", ptr::null_mut(), NcclConfig::WITHOUT_BLOCKING);
        let [rank, world_size] = [rank, world_size].map(|number| number as c_int);
        let begin = || {
            // SAFETY: the communicator is written; the config is copied. A process that trains has one thread that calls NCCL.
            unsafe { (functions.init_rank)(&raw mut comm, world_size, id, rank, &raw mut config) }
        };
        let begun = functions.cuda.on_device(device, begin).map_err(NcclError::from);
        let begun = begun.and_then(|status| functions.check(function, status));
        let made = Self { functions, comm, device };
        match begun.and_then(|()| poll_until(deadline, || made.is_ready(function))) {
            Ok(()) => Ok(made),
            Err(error) => {
                made.abort();
                Err(error)
            }
        }
    }

    pub(super) fn device(&self) -> usize {
        self.device
    }

    pub(super) fn all_reduce(&self, sum: &Tensor, deadline: Instant) -> Result<(), NcclError> {
        let (at, count, kind) = (sum.data_ptr(), sum.numel(), kind_of(sum)?);
        let Self { functions, comm, .. } = *self;
        // SAFETY: the tensor is contiguous on this GPU and lives until the operation is done.
        let queue = || unsafe { (functions.all_reduce)(at, at, count, kind, SUM, comm, STREAM) };
        self.run("ncclAllReduce", queue, deadline)
    }

    /// `own_n` is this rank's share of `shares_wn`, whose memory it shares.
    pub(super) fn reduce_scatter(
        &self,
        shares_wn: &Tensor,
        own_n: &Tensor,
        deadline: Instant,
    ) -> Result<(), NcclError> {
        let (from, to, count, kind) = (shares_wn.data_ptr(), own_n.data_ptr(), own_n.numel(), kind_of(own_n)?);
        let Self { functions, comm, .. } = *self;
        // SAFETY: as in `all_reduce`; NCCL allows its own share as the place of the result.
        let queue = || unsafe { (functions.reduce_scatter)(from, to, count, kind, SUM, comm, STREAM) };
        self.run("ncclReduceScatter", queue, deadline)
    }

    /// As [`Communicator::reduce_scatter`].
    pub(super) fn all_gather(&self, shares_wn: &Tensor, own_n: &Tensor, deadline: Instant) -> Result<(), NcclError> {
        let (from, to, count, kind) = (own_n.data_ptr(), shares_wn.data_ptr(), own_n.numel(), kind_of(own_n)?);
        let Self { functions, comm, .. } = *self;
        // SAFETY: as in `reduce_scatter`.
        let queue = || unsafe { (functions.all_gather)(from, to, count, kind, comm, STREAM) };
        self.run("ncclAllGather", queue, deadline)
    }

    pub(super) fn broadcast(&self, tensor: &Tensor, root: usize, deadline: Instant) -> Result<(), NcclError> {
        let (at, count, kind) = (tensor.data_ptr(), tensor.numel(), kind_of(tensor)?);
        let Self { functions, comm, .. } = *self;
        // SAFETY: as in `all_reduce`.
        let queue = || unsafe { (functions.broadcast)(at, at, count, kind, root as c_int, comm, STREAM) };
        self.run("ncclBroadcast", queue, deadline)
    }

    /// Ends what runs on the GPU, which would hold up the end of the process.
    pub(super) fn abort(self) {
        if !self.comm.is_null() {
            // SAFETY: the communicator is open, and used no more: `self` is gone. Its status would say nothing that the first error does not.
            unsafe { (self.functions.abort)(self.comm) };
        }
    }

    /// Queues an operation and waits until it, and what was queued before it, is done.
    fn run(&self, function: &'static str, queue: impl FnOnce() -> c_int, deadline: Instant) -> Result<(), NcclError> {
        let Self { functions, device, .. } = self;
        functions.check(function, functions.cuda.on_device(*device, queue)?)?;
        // NCCL queues it in a thread: before that the stream is done without it.
        poll_until(deadline, || self.is_ready(function))?;
        poll_until(deadline, || {
            self.is_ready(function)?;
            Ok(functions.cuda.default_stream_is_done(*device)?)
        })
    }

    /// Whether NCCL has done what was last asked of it.
    fn is_ready(&self, function: &'static str) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is open; the state is written.
        let asked = unsafe { (self.functions.async_error)(self.comm, &raw mut state) };
        self.functions.check("ncclCommGetAsyncError", asked)?;
        self.functions.check(function, state).map(|()| state != IN_PROGRESS)
    }
}

fn poll_until(deadline: Instant, mut is_done: impl FnMut() -> Result<bool, NcclError>) -> Result<(), NcclError> {
    while !is_done()? {
        if Instant::now() >= deadline {
            return Err(NcclError::TimedOut);
        }
        thread::sleep(POLL);
    }
    Ok(())
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
pub(super) mod tests;
