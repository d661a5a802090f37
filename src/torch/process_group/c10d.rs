//! libtorch's c10d through c10d.cpp: the store over which ranks find each other, and gloo's operations on tensors on the CPU.

#![expect(unsafe_code, reason = "calls C functions over C++ objects of libtorch")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::ptr::{self, NonNull};
use std::time::Duration;

use tch::Tensor;
use torch_sys::C_tensor;

/// Longer reasons are cut.
const REASON_BYTES: usize = 1024;
/// Longer values of the store are cut.
const VALUE_BYTES: usize = 1024;

#[repr(C)]
struct RawStore {
    _private: [u8; 0],
}

#[repr(C)]
struct RawGroup {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn medusa_store_open(
        host: *const c_char,
        port: u16,
        listener: c_int,
        prefix: *const c_char,
        timeout_ms: i64,
        out: *mut *mut RawStore,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_store_port(store: *const RawStore) -> u16;
    fn medusa_store_set(
        store: *mut RawStore,
        key: *const c_char,
        bytes: *const u8,
        length: usize,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_store_add(
        store: *mut RawStore,
        key: *const c_char,
        amount: i64,
        sum: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_store_get(
        store: *mut RawStore,
        key: *const c_char,
        timeout_ms: i64,
        bytes: *mut u8,
        room: usize,
        length: *mut usize,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_store_close(store: *mut RawStore);
    fn medusa_group_open(
        store: *mut RawStore,
        rank: c_int,
        world_size: c_int,
        address: *const c_char,
        timeout_ms: i64,
        out: *mut *mut RawGroup,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_group_all_reduce(group: *mut RawGroup, sum: *const C_tensor, text: *mut c_char, capacity: usize)
    -> c_int;
    fn medusa_group_all_gather(
        group: *mut RawGroup,
        all: *const C_tensor,
        own: *const C_tensor,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_group_broadcast(
        group: *mut RawGroup,
        tensor: *const C_tensor,
        root: c_int,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    fn medusa_group_close(group: *mut RawGroup);
}

/// The words of libtorch for what failed, one line.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub(super) struct C10dError(pub(super) String);

/// c10d's `TCPStore`: small values by key, shared by all ranks.
#[derive(Debug)]
pub(super) struct Store(NonNull<RawStore>);

/// c10d's `ProcessGroupGloo`.
#[derive(Debug)]
pub(super) struct GlooGroup(NonNull<RawGroup>);

// SAFETY: the C++ objects belong to no thread; they are used by one at a time, since they are not `Sync`.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Send for GlooGroup {}

impl Store {
    /// Connects to the server of the store; with a `listener` on `port`, it is the server, too. Keys are below `prefix`.
    pub(super) fn open(
        host: &str,
        port: u16,
        listener: Option<TcpListener>,
        prefix: &str,
        timeout: Duration,
    ) -> Result<Self, C10dError> {
        let (host, prefix, mut store) = (c_string(host)?, c_string(prefix)?, ptr::null_mut());
        let listener = listener.map_or(-1, IntoRawFd::into_raw_fd);
        // SAFETY: the strings and `store` live during the call; the socket belongs to the server from now on.
        called(|text, capacity| unsafe {
            medusa_store_open(
                host.as_ptr(),
                port,
                listener,
                prefix.as_ptr(),
                milliseconds(timeout),
                &raw mut store,
                text,
                capacity,
            )
        })?;
        Ok(Self(NonNull::new(store).expect("a store was made")))
    }

    /// The port that the server listens on.
    pub(super) fn port(&self) -> u16 {
        // SAFETY: the store is open.
        unsafe { medusa_store_port(self.0.as_ptr()) }
    }

    pub(super) fn set(&self, key: &str, value: &str) -> Result<(), C10dError> {
        let key = c_string(key)?;
        // SAFETY: the store is open; key and value live during the call.
        called(|text, capacity| unsafe {
            medusa_store_set(self.0.as_ptr(), key.as_ptr(), value.as_ptr(), value.len(), text, capacity)
        })
    }

    /// Adds to a counter, which starts at 0, and returns the sum.
    pub(super) fn add(&self, key: &str, amount: i64) -> Result<i64, C10dError> {
        let (key, mut sum) = (c_string(key)?, 0);
        // SAFETY: the store is open; key and sum live during the call.
        called(|text, capacity| unsafe {
            medusa_store_add(self.0.as_ptr(), key.as_ptr(), amount, &raw mut sum, text, capacity)
        })?;
        Ok(sum)
    }

    /// Waits for a value.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<String, C10dError> {
        let (key, mut value, mut length) = (c_string(key)?, [0; VALUE_BYTES], 0);
        // SAFETY: the store is open; at most `VALUE_BYTES` bytes are written to `value`.
        called(|text, capacity| unsafe {
            medusa_store_get(
                self.0.as_ptr(),
                key.as_ptr(),
                milliseconds(timeout),
                value.as_mut_ptr(),
                VALUE_BYTES,
                &raw mut length,
                text,
                capacity,
            )
        })?;
        Ok(String::from_utf8_lossy(&value[..length]).into_owned())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: it was made by `medusa_store_open` and is not used afterwards; a group has references of its own.
        unsafe { medusa_store_close(self.0.as_ptr()) }
    }
}

impl GlooGroup {
    /// Connects each rank to each other. `address` chooses the network card; without one, the one that the machine's name resolves to.
    pub(super) fn open(
        store: &Store,
        rank: usize,
        world_size: usize,
        address: Option<&str>,
        timeout: Duration,
    ) -> Result<Self, C10dError> {
        let (address, mut group) = (address.map(c_string).transpose()?, ptr::null_mut());
        let address = address.as_ref().map_or(ptr::null(), |address| address.as_ptr());
        // SAFETY: the store is open; the address and `group` live during the call.
        called(|text, capacity| unsafe {
            let (rank, world_size) = (rank as c_int, world_size as c_int);
            medusa_group_open(
                store.0.as_ptr(),
                rank,
                world_size,
                address,
                milliseconds(timeout),
                &raw mut group,
                text,
                capacity,
            )
        })?;
        Ok(Self(NonNull::new(group).expect("a group was made")))
    }

    pub(super) fn all_reduce(&self, sum: &Tensor) -> Result<(), C10dError> {
        // SAFETY: the group is open, and the tensor lives until the operation is done.
        called(|text, capacity| unsafe { medusa_group_all_reduce(self.0.as_ptr(), sum.as_ptr(), text, capacity) })
    }

    /// `own` may be a part of `all`.
    pub(super) fn all_gather(&self, all: &Tensor, own: &Tensor) -> Result<(), C10dError> {
        // SAFETY: as in `all_reduce`.
        called(|text, capacity| unsafe {
            medusa_group_all_gather(self.0.as_ptr(), all.as_ptr(), own.as_ptr(), text, capacity)
        })
    }

    pub(super) fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), C10dError> {
        // SAFETY: as in `all_reduce`.
        called(|text, capacity| unsafe {
            medusa_group_broadcast(self.0.as_ptr(), tensor.as_ptr(), root as c_int, text, capacity)
        })
    }
}

impl Drop for GlooGroup {
    fn drop(&mut self) {
        // SAFETY: it was made by `medusa_group_open` and is not used afterwards.
        unsafe { medusa_group_close(self.0.as_ptr()) }
    }
}

/// Calls a function of c10d.cpp with a place for its reason.
fn called(function: impl FnOnce(*mut c_char, usize) -> c_int) -> Result<(), C10dError> {
    let mut text: [c_char; REASON_BYTES] = [0; REASON_BYTES];
    if function(text.as_mut_ptr(), text.len()) == 0 {
        return Ok(());
    }
    // SAFETY: the function ended the text with a 0 within `text`.
    let reason = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    Err(C10dError(reason.lines().next().unwrap_or_default().trim().to_owned()))
}

fn c_string(text: &str) -> Result<CString, C10dError> {
    CString::new(text).map_err(|_| C10dError(format!("{text:?} contains a 0 byte")))
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
