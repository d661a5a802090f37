//! Ranks that are threads of one process: the oracle of the process groups, and what several processes are tested with in milliseconds.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use medusa::torch::collective::{Collective, CollectiveError};
use medusa::train::ranks::Ranks;
use tch::{Device, Kind, Tensor};

/// How long a rank waits for the others.
const PATIENCE: Duration = Duration::from_secs(300);

/// Where the threads meet.
#[derive(Debug)]
struct Meeting {
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug)]
struct Round {
    number: usize,
    given: Vec<Option<Tensor>>,
    /// What was given in the last whole round.
    exchanged: Vec<Tensor>,
    /// A rank has ended.
    has_ended: bool,
}

/// A rank.
#[derive(Debug)]
struct ThreadRank {
    rank: usize,
    world_size: usize,
    meeting: Arc<Meeting>,
}

/// Runs `body` as each of `world_size` ranks; returns what each returned.
pub(crate) fn as_ranks<T: Send>(world_size: usize, body: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    let round = Round { number: 0, given: vec![], exchanged: vec![], has_ended: false };
    let meeting = Arc::new(Meeting { round: Mutex::new(round), changed: Condvar::new() });
    meeting.round.lock().expect("a new one").given.resize_with(world_size, || None);
    let as_rank = |rank: usize| {
        let own = ThreadRank { rank, world_size, meeting: Arc::clone(&meeting) };
        body(Ranks::new(&own, Device::Cpu))
    };
    thread::scope(|scope| {
        let as_rank = &as_rank;
        let threads: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || as_rank(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

impl ThreadRank {
    /// A copy of each rank's tensor.
    fn exchange(&self, operation: &'static str, own: &Tensor) -> Result<Vec<Tensor>, CollectiveError> {
        let Meeting { round, changed } = &*self.meeting;
        let mut round = round.lock().expect("no rank panics here");
        let number = round.number;
        round.given[self.rank] = Some(own.detach().copy());
        if round.given.iter().all(Option::is_some) {
            round.exchanged = round.given.iter_mut().flat_map(Option::take).collect();
            round.number += 1;
            changed.notify_all();
        }
        let is_open = |round: &mut Round| round.number == number && !round.has_ended;
        let (round, waited) = changed.wait_timeout_while(round, PATIENCE, is_open).expect("no rank panics here");
        if round.number > number {
            return Ok(round.exchanged.iter().map(Tensor::shallow_clone).collect());
        }
        Err(match waited.timed_out() {
            true => CollectiveError::TimedOut { operation, seconds: PATIENCE.as_secs() },
            false => CollectiveError::Lost { operation, reason: "a thread ended".into() },
        })
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        self.meeting.round.lock().unwrap_or_else(PoisonError::into_inner).has_ended = true;
        self.meeting.changed.notify_all();
    }
}

impl Collective for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce(&self, sum: &Tensor) -> Result<(), CollectiveError> {
        let all = self.exchange("all_reduce", sum)?;
        sum.shallow_clone().copy_(&all.iter().sum::<Tensor>());
        Ok(())
    }

    fn reduce_scatter(&self, shares_wn: &Tensor) -> Result<(), CollectiveError> {
        let all = self.exchange("reduce_scatter", shares_wn)?;
        let _ = shares_wn.shallow_clone().fill_(f64::NAN); // undefined
        self.share_of(shares_wn).copy_(&all.iter().map(|of_rank| self.share_of(of_rank)).sum::<Tensor>());
        Ok(())
    }

    fn all_gather(&self, shares_wn: &Tensor) -> Result<(), CollectiveError> {
        let all = self.exchange("all_gather", shares_wn)?;
        let n = shares_wn.size()[0] / self.world_size as i64;
        for (rank, of_rank) in (0..).zip(&all) {
            shares_wn.narrow(0, rank * n, n).copy_(&of_rank.narrow(0, rank * n, n));
        }
        Ok(())
    }

    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), CollectiveError> {
        let all = self.exchange("broadcast", tensor)?;
        tensor.shallow_clone().copy_(&all[root]);
        Ok(())
    }
}

#[test]
fn threads_compute_together_what_the_trait_says() {
    let seen = as_ranks(3, |ranks| {
        let (collective, rank) = (ranks.collective(), ranks.rank() as f64);
        let six = || Tensor::from_slice(&[0f32, 1.0, 2.0, 3.0, 4.0, 5.0]) + 10.0 * rank;
        let [sum, scattered, gathered, sent] = [(); 4].map(|()| six());
        collective.all_reduce(&sum).expect("a sum");
        collective.reduce_scatter(&scattered).expect("a share of the sum");
        collective.all_gather(&gathered).expect("all shares");
        collective.broadcast(&sent, 1).expect("rank 1's");
        let bytes = collective.all_gather_bytes(&vec![7; ranks.rank()]).expect("all bytes");
        assert_eq!(bytes, [vec![], vec![7], vec![7, 7]]);
        let own = collective.share_of(&scattered).to_kind(Kind::Float).copy();
        [sum, own, gathered, sent].map(|tensor| Vec::<f32>::try_from(tensor).expect("floats"))
    });
    for (rank, [sum, own, gathered, sent]) in seen.into_iter().enumerate() {
        assert_eq!(sum, [30.0, 33.0, 36.0, 39.0, 42.0, 45.0]);
        assert_eq!(own, sum[2 * rank..2 * rank + 2]);
        assert_eq!(gathered, [0.0, 1.0, 12.0, 13.0, 24.0, 25.0]);
        assert_eq!(sent, [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
    }
}

#[test]
fn an_error_of_one_rank_ends_all_in_the_same_phase() {
    use medusa::train::error::TrainError;
    let fails = |rank: usize| match rank {
        2 => Err(TrainError::Io { path: "disk".into(), source: std::io::Error::other("full\nand more") }),
        _ => Ok(rank),
    };
    let ended = as_ranks(4, |ranks| {
        let before =
            ranks.agree_and_sum(Ok::<_, TrainError>(ranks.rank()), vec![1.0, ranks.rank() as f64]).expect("no error");
        assert_eq!(before, (ranks.rank(), vec![4.0, 6.0]));
        let of_long_work = ranks.agree_after_long_work(fails(ranks.rank())).expect_err("one failed").to_string();
        [ranks.agree(fails(ranks.rank())).expect_err("one failed").to_string(), of_long_work]
    });
    let (own, other) = ("disk: full\nand more", "rank 2 failed: disk: full");
    assert_eq!(ended, [[other; 2], [other; 2], [own; 2], [other; 2]]);
}

#[test]
fn the_first_rank_of_a_machine_works_before_the_others() {
    use medusa::train::error::TrainError;
    let done = Mutex::new(vec![]);
    as_ranks(3, |ranks| {
        let work = || {
            thread::sleep(Duration::from_millis(if ranks.is_first() { 50 } else { 0 }));
            done.lock().expect("no panic").push(ranks.rank());
            Ok::<_, TrainError>(())
        };
        ranks.first_of_machine_first(work).expect("no error");
        assert_eq!(ranks.broadcast(ranks.is_first().then_some("told".to_owned())).expect("rank 0 tells"), "told");
    });
    let done = done.into_inner().expect("no panic");
    assert_eq!((done.len(), done[0]), (3, 0));
}
