//! An NCCL whose calls are written down, and whose answers a test chooses: machines without a GPU run what is around it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};

use super::super::*;

/// What the fake is asked for, and answers, in this thread.
#[derive(Debug, Default)]
pub(in crate::torch::process_group) struct FakeNccl {
    /// "ncclAllReduce of 1000", "abort 1000", …: of which communicator; they are numbered from 1000 on.
    pub(in crate::torch::process_group) calls: Vec<String>,
    /// The next answers of functions; then `ncclSuccess`.
    pub(in crate::torch::process_group) statuses: BTreeMap<&'static str, c_int>,
    /// The next states of `ncclCommGetAsyncError`; then `then`.
    pub(in crate::torch::process_group) states: VecDeque<c_int>,
    /// The state after those.
    pub(in crate::torch::process_group) then: c_int,
    device: c_int,
    communicators: usize,
}

thread_local! {
    static FAKE: RefCell<FakeNccl> = RefCell::default();
}

impl FakeNccl {
    /// Changes or reads the fake of this thread.
    pub(in crate::torch::process_group) fn with<T>(body: impl FnOnce(&mut Self) -> T) -> T {
        FAKE.with_borrow_mut(body)
    }

    /// What was called since the last time.
    pub(in crate::torch::process_group) fn calls() -> Vec<String> {
        Self::with(|fake| std::mem::take(&mut fake.calls))
    }

    fn called(name: &'static str, of: String) -> c_int {
        Self::with(|fake| {
            fake.calls.push(format!("{name}{of}"));
            fake.statuses.get(name).copied().unwrap_or(SUCCESS)
        })
    }
}

impl NcclFunctions {
    /// Those of the fake.
    pub(in crate::torch::process_group) fn fake() -> Self {
        Self {
            cuda: CudaFunctions::fake(set_device, get_device, stream_query),
            get_unique_id,
            init_rank,
            all_reduce,
            reduce_scatter,
            all_gather,
            broadcast,
            async_error,
            abort,
            error_string,
            last_error,
        }
    }
}

/// `ncclInternalError`, `ncclInProgress`, `ncclRemoteError`.
pub(in crate::torch::process_group) const FAILS: c_int = 3;
pub(in crate::torch::process_group) const IS_BUSY: c_int = IN_PROGRESS;
pub(in crate::torch::process_group) const IS_LOST: c_int = REMOTE_ERROR;

unsafe extern "C" fn set_device(device: c_int) -> c_int {
    FakeNccl::with(|fake| fake.device = device);
    SUCCESS
}

unsafe extern "C" fn get_device(device: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for the number.
    unsafe { *device = FakeNccl::with(|fake| fake.device) };
    SUCCESS
}

unsafe extern "C" fn stream_query(_: CudaStream) -> c_int {
    FakeNccl::called("cudaStreamQuery", String::new())
}

unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> c_int {
    // SAFETY: the caller passes a place for the id.
    unsafe { *id = UniqueId([7; ID_BYTES]) };
    FakeNccl::called("ncclGetUniqueId", String::new())
}

unsafe extern "C" fn init_rank(
    comm: *mut Comm,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut NcclConfig,
) -> c_int {
    // SAFETY: the caller passes a config, and a place for the communicator.
    let blocking = unsafe { (*config).blocking };
    let (device, number) = FakeNccl::with(|fake| {
        fake.communicators += 1;
        (fake.device, 999 + fake.communicators)
    });
    // SAFETY: as above; nothing is ever read there.
    unsafe { *comm = ptr::without_provenance_mut(number) };
    let arguments = format!(" {number} on {device}: rank {rank} of {ranks}, blocking {blocking}, id {}", id.0[0]);
    FakeNccl::called("ncclCommInitRankConfig", arguments)
}

unsafe extern "C" fn all_reduce(
    _: *const c_void,
    _: *mut c_void,
    count: usize,
    kind: c_int,
    operation: c_int,
    comm: Comm,
    _: CudaStream,
) -> c_int {
    FakeNccl::called("ncclAllReduce", format!(" of {}: {count} numbers, kind {kind}, {operation}", comm.addr()))
}

unsafe extern "C" fn reduce_scatter(
    _: *const c_void,
    _: *mut c_void,
    count: usize,
    _: c_int,
    _: c_int,
    comm: Comm,
    _: CudaStream,
) -> c_int {
    FakeNccl::called("ncclReduceScatter", format!(" of {}: {count} numbers", comm.addr()))
}

unsafe extern "C" fn all_gather(
    _: *const c_void,
    _: *mut c_void,
    count: usize,
    _: c_int,
    comm: Comm,
    _: CudaStream,
) -> c_int {
    FakeNccl::called("ncclAllGather", format!(" of {}: {count} numbers", comm.addr()))
}

unsafe extern "C" fn broadcast(
    _: *const c_void,
    _: *mut c_void,
    count: usize,
    _: c_int,
    root: c_int,
    comm: Comm,
    _: CudaStream,
) -> c_int {
    FakeNccl::called("ncclBroadcast", format!(" of {}: {count} numbers of rank {root}", comm.addr()))
}

unsafe extern "C" fn async_error(_: Comm, error: *mut c_int) -> c_int {
    let state = FakeNccl::with(|fake| fake.states.pop_front().unwrap_or(fake.then));
    // SAFETY: the caller passes a place for the state.
    unsafe { *error = state };
    FakeNccl::called("state", format!(" {state}"))
}

unsafe extern "C" fn abort(comm: Comm) -> c_int {
    FakeNccl::called("abort", format!(" {}", comm.addr()))
}

unsafe extern "C" fn error_string(_: c_int) -> *const c_char {
    c"the words of NCCL".as_ptr()
}

unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
    c"and its last ones\n".as_ptr()
}
