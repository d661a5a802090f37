//! Ranks as threads of this process: each has a connection of its own, as a process has.

use std::sync::Barrier;
use std::thread;

use tch::{Device, Kind};

use super::*;

/// For all ranks to come, on a machine that does other work, too.
const JOIN_TIME: Duration = Duration::from_secs(60);

/// Runs `body` as each of `world_size` ranks; returns what they return, by rank.
fn ranks<T: Send>(world_size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    ranks_within(Duration::from_secs(20), world_size, body)
}

/// As [`ranks`], with so much time for an exchange.
fn ranks_within<T: Send>(timeout: Duration, world_size: usize, body: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let server = LocalStore::start().expect("a store");
    let port = server.port();
    let all_connected = Barrier::new(world_size);
    thread::scope(|scope| {
        let start = |rank| {
            let (body, all_connected) = (&body, &all_connected);
            scope.spawn(move || {
                let variables = Rendezvous::variables_of_local(rank, world_size, port);
                let value = |name: &str| Some(variables.iter().find(|(known, _)| *known == name)?.1.clone());
                let place = Rendezvous::from(&value).expect("variables").expect("several processes");
                let group = ProcessGroup::join_within(JOIN_TIME, &place, timeout);
                // A rank that ends while others still connect is an error of theirs, not of this test.
                all_connected.wait();
                body(group.expect("all ranks come"))
            })
        };
        let threads: Vec<_> = (0..world_size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

fn floats(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double)).expect("a vector")
}

#[test]
fn sums_copies_and_shares_of_all_dtypes() {
    for world_size in [2, 3, 4] {
        ranks(world_size, |group| {
            let (rank, world_size) = (group.rank() as f64, group.world_size() as f64);
            for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Int64] {
                let own_tensor = || Tensor::full([5], rank + 1.0, (kind, Device::Cpu));
                let sum = own_tensor();
                group.all_reduce(&sum).unwrap();
                assert_eq!(floats(&sum), [world_size * (world_size + 1.0) / 2.0; 5], "{kind:?}");
                let copy = own_tensor();
                group.broadcast(&copy, 1).unwrap();
                assert_eq!(floats(&copy), [2.0; 5], "{kind:?}");
                let shares_wn = Tensor::full([2 * group.world_size() as i64], -1.0, (kind, Device::Cpu));
                let _ = group.share_of(&shares_wn).fill_(rank);
                group.all_gather(&shares_wn).unwrap();
                let expected: Vec<f64> = (0..2 * group.world_size()).map(|i| (i / 2) as f64).collect();
                assert_eq!(floats(&shares_wn), expected, "{kind:?}");
                group.reduce_scatter(&shares_wn).unwrap();
                assert_eq!(floats(&group.share_of(&shares_wn)), [rank * world_size; 2], "{kind:?}");
            }
        });
    }
}

#[test]
fn bytes_of_different_lengths_arrive() {
    let sent = [&b"first"[..], b"", b"the third is longer"];
    for received in ranks(3, |group| group.all_gather_bytes(sent[group.rank()]).unwrap()) {
        assert_eq!(received, sent);
    }
}

#[test]
fn processes_know_how_many_run_on_their_machine() {
    let locals = ranks(3, |group| group.local());
    assert_eq!(locals, [0, 1, 2].map(|rank| LocalRank { rank, world_size: 3 }));
}

#[test]
fn a_rank_that_ended_is_reported_to_the_others() {
    let errors = ranks(3, |group| {
        if group.rank() == 1 {
            return None;
        }
        let sum = Tensor::ones([1 << 16], (Kind::Float, Device::Cpu));
        (0..3).find_map(|_| group.all_reduce(&sum).err())
    });
    for error in [&errors[0], &errors[2]] {
        assert!(matches!(error, Some(CollectiveError::Lost { .. })), "{error:?}");
    }
}

/// Rank 1 takes no part in the first sum: whatever comes later would be summed with another one.
#[test]
fn after_an_error_no_rank_exchanges_anything() {
    let rank_0_has_its_error = Barrier::new(2);
    let errors = ranks_within(Duration::from_secs(2), 2, |group| {
        let sum = Tensor::ones([4], (Kind::Float, Device::Cpu));
        let error = |done: Result<(), CollectiveError>| done.err().map(|error| error.to_string());
        if group.rank() == 1 {
            rank_0_has_its_error.wait();
            return [error(group.all_reduce(&sum)), error(group.broadcast(&sum, 0))];
        }
        let first = error(group.all_reduce(&sum));
        rank_0_has_its_error.wait();
        [first, error(group.broadcast(&sum, 0))]
    });
    let [first, later] = &errors[0];
    assert!(first.as_ref().is_some_and(|error| error.contains("during a sum over all processes for 2 s")), "{first:?}");
    assert_eq!(first, later, "the second one is not tried");
    assert!(errors[1].iter().all(Option::is_some), "{errors:?}");
}

#[test]
fn long_work_of_a_rank_may_take_longer_than_an_exchange() {
    let waited = ranks_within(Duration::from_secs(2), 3, |group| {
        if group.rank() == 1 {
            thread::sleep(Duration::from_secs(3));
        }
        [group.wait_for_all(None).expect("all ranks come"), group.wait_for_all(None).expect("all ranks come")]
    });
    assert_eq!(waited, [[None, None], [None, None], [None, None]]);
}

#[test]
fn a_failure_before_or_in_long_work_is_reported_to_all_that_wait() {
    let failed = |rank: usize, why: &str| Some(FailedRank { rank, why: why.to_owned() });
    let failures = ranks(3, |group| {
        assert_eq!(group.wait_for_all(None).expect("all ranks come"), None);
        group.wait_for_all((group.rank() == 1).then_some("rows.jsonl: no rows, × 3")).expect("a store")
    });
    let expected = failed(1, "rows.jsonl: no rows, × 3");
    assert_eq!(failures, [expected.clone(), None, expected]);
    let failures = ranks(3, |group| if group.rank() == 2 { None } else { group.wait_for_all(None).expect("a store") });
    let expected = failed(2, "it ended; its own messages say why");
    assert_eq!(failures, [expected.clone(), expected, None]);
}

/// Rank 1 works, and so watches none.
#[test]
fn a_rank_that_gives_no_sign_of_life_is_given_up() {
    let server = LocalStore::start().expect("a store");
    let long_work = |rank| LongWork::new(&place(rank, 3, server.port()), Duration::from_secs(2)).expect("a store");
    let (waits, _works) = (long_work(0), long_work(1));
    let failed = waits.wait(&connected(server.port()), None).expect("a store").expect("no rank 2");
    let why = "it has given no sign of life for 3 s: it was killed or stopped, or its machine is not reached";
    assert_eq!((failed.rank, failed.why.as_str()), (2, why));
}

fn connected(port: u16) -> Store {
    Store::open("127.0.0.1", port, None, "test", JOIN_TIME).expect("a store")
}

/// Rank 0 serves the store and hears of the failure long before rank 2 asks.
#[test]
fn the_store_stays_until_all_have_read_a_failure() {
    let listener = join::listener("127.0.0.1", 0).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let wait = |rank: usize, store: Store, failed: Option<&str>| {
        let place = Rendezvous { serves_store: rank == 0, ..place(rank, 3, port) };
        let long_work = LongWork::new(&place, JOIN_TIME).expect("a store");
        thread::sleep(Duration::from_millis(if rank == 2 { 500 } else { 0 }));
        long_work.wait(&store, failed).expect("a store")
    };
    let server = Store::open("127.0.0.1", port, Some(listener), "test", JOIN_TIME).expect("a store");
    let failures = thread::scope(|scope| {
        let others = [(1, Some("no rows")), (2, None)].map(|(rank, failed)| {
            let store = connected(port);
            scope.spawn(move || wait(rank, store, failed))
        });
        let first = wait(0, server, None);
        let [failed, late] = others.map(|other| other.join().expect("a rank"));
        [first, failed, late]
    });
    let expected = Some(FailedRank { rank: 1, why: "no rows".to_owned() });
    assert_eq!(failures, [expected.clone(), None, expected]);
}

fn place(rank: usize, world_size: usize, port: u16) -> Rendezvous {
    let host = "127.0.0.1".to_owned();
    Rendezvous { rank, world_size, local: None, host, port, serves_store: false, prefix: "test".into() }
}

/// The error of a process that has this place, and two seconds.
fn refusal(place: &Rendezvous) -> String {
    ProcessGroup::join(place, Duration::from_secs(2)).expect_err("others are missing").to_string()
}

#[test]
fn missing_and_doubled_ranks_and_other_sizes_are_reported() {
    let server = LocalStore::start().expect("a store");
    let port = server.port();
    let missing = refusal(&place(0, 4, port));
    assert!(missing.contains("only 1 of 4 processes came within 2 s; missing: rank 1, rank 2, rank 3"), "{missing}");
    let doubled = refusal(&place(0, 4, port));
    assert!(doubled.contains("two processes have RANK=0"), "{doubled}");
    let other = refusal(&place(1, 2, port));
    assert!(other.contains("rank 0 was started with WORLD_SIZE=4, this process with 2"), "{other}");
}

/// Addresses of this machine, from the kernel's table of sockets that listen: "0100007F:1F90" is 127.0.0.1:8080.
#[cfg(target_os = "linux")]
fn listens_on(port: u16) -> Vec<String> {
    let contents = |table: &str| std::fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
    let lines = ["tcp", "tcp6"].map(contents).concat();
    let local = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (address, state) = (words.next()?.to_owned(), words.nth(1)?);
        (state == "0A" && address.ends_with(&format!(":{port:04X}"))).then_some(address)
    };
    lines.lines().filter_map(local).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn a_store_for_this_machine_is_not_reached_from_others() {
    let server = LocalStore::start().expect("a store");
    assert_eq!(listens_on(server.port()), [format!("0100007F:{:04X}", server.port())]);
    let port = join::listener("127.0.0.1", 0).and_then(|free| free.local_addr()).expect("a free port").port();
    let rank_0 = Rendezvous { serves_store: true, ..place(0, 2, port) };
    thread::scope(|scope| {
        let joined = scope.spawn(|| ProcessGroup::join(&rank_0, Duration::from_secs(20)).expect("both come"));
        drop(ProcessGroup::join(&place(1, 2, port), Duration::from_secs(20)).expect("both come"));
        let joined = joined.join().expect("rank 0");
        assert_eq!(listens_on(port), [format!("0100007F:{port:04X}")]);
        drop(joined);
    });
}

#[test]
fn a_name_is_listened_for_on_all_interfaces() {
    let bound = join::listener("node7", 0).and_then(|listener| listener.local_addr()).expect("a free port");
    assert!(bound.ip().is_unspecified(), "{bound}");
    let own = join::listener("127.0.0.1", 0).and_then(|listener| listener.local_addr()).expect("a free port");
    assert!(own.ip().is_loopback(), "{own}");
}

#[test]
fn a_taken_port_and_an_absent_rank_0_are_reported() {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let taken = refusal(&Rendezvous { serves_store: true, ..place(0, 2, port) });
    assert!(taken.contains(&format!("port {port} of this machine is taken")), "{taken}");
    drop(listener);
    let absent = refusal(&place(1, 2, port));
    assert!(absent.contains(&format!("rank 0 was not reached at 127.0.0.1:{port}")), "{absent}");
}
