//! How processes meet: each leaves its numbers in the store and reads those of the others.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};
use std::{fs, io};

use super::c10d::{C10dError, Store};
use super::rendezvous::{LocalRank, Rendezvous};

/// The longest wait for processes to start. A cluster starts those of a job within seconds of each other.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// Why the processes of a run did not come together.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JoinError {
    /// Another program listens on the port of the store.
    #[error(
        "port {port} of this machine is taken by another program: set MASTER_PORT to a free one, the same for all processes"
    )]
    PortTaken { port: u16 },
    /// The store does not answer.
    #[error(
        "rank 0 was not reached at {host}:{port} ({reason}): check MASTER_ADDR and MASTER_PORT, and that the process with RANK=0 was started there"
    )]
    NoStore {
        host: String,
        port: u16,
        /// The words of libtorch.
        reason: String,
    },
    /// Two processes have one rank.
    #[error("two processes have RANK={rank}: give each of the {world_size} processes its own, from 0 to {}", world_size - 1)]
    RankTaken { rank: usize, world_size: usize },
    /// Ranks that did not come.
    #[error(
        "only {} of {world_size} processes came within {seconds} s; missing: {}; start them, or correct WORLD_SIZE",
        world_size - missing.len(),
        ranks(missing)
    )]
    Missing { missing: Vec<usize>, world_size: usize, seconds: u64 },
    /// Another rank expects another number of processes.
    #[error("rank {rank} was started with WORLD_SIZE={theirs}, this process with {ours}: all need the same")]
    OtherWorldSize { rank: usize, theirs: String, ours: usize },
    /// gloo could not connect the processes.
    #[error(
        "the processes cannot connect to each other ({reason}): set GLOO_SOCKET_IFNAME to the network interface that joins the machines"
    )]
    Unconnected {
        /// The words of gloo.
        reason: String,
    },
}

impl JoinError {
    pub(super) fn connecting(C10dError(reason): C10dError) -> Self {
        Self::Unconnected { reason }
    }
}

fn ranks(missing: &[usize]) -> String {
    let listed: Vec<String> = missing.iter().take(8).map(|rank| format!("rank {rank}")).collect();
    let more = if missing.len() > listed.len() { ", …" } else { "" };
    format!("{}{more}", listed.join(", "))
}

/// Waits so long for all processes; returns the store, and which of its machine's processes this is.
pub(super) fn meet(rendezvous: &Rendezvous, wait: Duration) -> Result<(Store, LocalRank), JoinError> {
    let deadline = Instant::now() + wait;
    let store = open(rendezvous, wait)?;
    let lost = |C10dError(reason)| no_store(rendezvous, reason);
    let &Rendezvous { rank, world_size, .. } = rendezvous;
    if store.add(&format!("count/{rank}"), 1).map_err(lost)? > 1 {
        return Err(JoinError::RankTaken { rank, world_size });
    }
    let machine = machine_id();
    store.set(&key(rank), &format!("{world_size} {machine}")).map_err(lost)?;
    let mut machines = BTreeMap::new();
    let mut missing = vec![];
    for other in 0..world_size {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
        let Ok(value) = store.get(&key(other), left) else {
            missing.push(other);
            continue;
        };
        let (theirs, machine) = value.split_once(' ').unwrap_or((&value, ""));
        if theirs != world_size.to_string() {
            return Err(JoinError::OtherWorldSize { rank: other, theirs: theirs.to_owned(), ours: world_size });
        }
        machines.insert(other, machine.to_owned());
    }
    if !missing.is_empty() {
        return Err(JoinError::Missing { missing, world_size, seconds: wait.as_secs() });
    }
    let is_local = |other: &&usize| machines[*other] == machine;
    let world_size = machines.keys().filter(is_local).count();
    let before = machines.keys().filter(is_local).filter(|other| **other < rank).count();
    Ok((store, rendezvous.local.unwrap_or(LocalRank { rank: before, world_size })))
}

/// The same in all processes of a machine, and in no other machine's: several may have one name.
pub fn machine_id() -> String {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned());
    boot_id.unwrap_or_else(|_| rustix::system::uname().nodename().to_string_lossy().into_owned())
}

fn key(rank: usize) -> String {
    format!("joined/{rank}")
}

fn open(rendezvous: &Rendezvous, wait: Duration) -> Result<Store, JoinError> {
    let Rendezvous { host, port, serves_store, prefix, .. } = rendezvous;
    let listener = serves_store.then(|| listener(host, *port)).transpose().map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => JoinError::PortTaken { port: *port },
        _ => no_store(rendezvous, error.to_string()),
    })?;
    Store::open(host, *port, listener, prefix, wait).map_err(|C10dError(reason)| no_store(rendezvous, reason))
}

/// The socket of the store: c10d itself listens on all interfaces of the machine. The address of `MASTER_ADDR` is enough if it is one; a
/// name may stand for other addresses on other machines, and an address that is not this machine's is translated on the way to it.
pub(super) fn listener(host: &str, port: u16) -> io::Result<TcpListener> {
    let host = if host == "localhost" { "127.0.0.1" } else { host };
    if let Ok(address) = host.parse::<IpAddr>() {
        match TcpListener::bind((address, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => (),
            bound => return bound,
        }
    }
    let all: [SocketAddr; 2] = [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    TcpListener::bind(&all[..])
}

fn no_store(rendezvous: &Rendezvous, reason: String) -> JoinError {
    JoinError::NoStore { host: rendezvous.host.clone(), port: rendezvous.port, reason }
}
