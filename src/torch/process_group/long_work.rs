//! How ranks wait for the long work of one of them: over the store and without a limit, as long as every process shows that it lives.
//!
//! A process shows it by counting up a key, on a thread of its own. A rank that waits watches all others, since those that work
//! watch none; if one is gone, it notifies the rest.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::c10d::{C10dError, Store};
use super::rendezvous::Rendezvous;
use crate::torch::collective::FailedRank;

/// Between two signs of life, and between two looks for them.
const BEAT: Duration = Duration::from_secs(1);
/// Looks without a sign of life after which a process counts as gone; fewer with a short `--process-timeout`. Looks and not a time: a machine
/// that was suspended has looked as rarely as it has shown life.
const SILENT_LOOKS: std::ops::RangeInclusive<u64> = 3..=30;
/// Between two questions whether all have come, at first and at last.
const QUESTIONS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];
/// How long a server of the store goes on after it failed, so that the others can read why.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Counts the failures. The words of the first are kept.
const FAILURES: &str = "failures";
const WORDS: &str = "failure";
/// Counts the ranks that need no more of the store.
const READERS: &str = "failure/readers";

/// The signs of life of this process, until it is dropped.
#[derive(Debug)]
struct Heartbeat {
    stop: Sender<()>,
    stopped: Receiver<()>,
}

/// How this process waits for the others.
#[derive(Debug)]
pub(super) struct LongWork {
    rank: usize,
    world_size: usize,
    serves_store: bool,
    /// See [`SILENT_LOOKS`].
    silent_looks: u64,
    /// How often the ranks have waited for each other.
    rounds: Cell<usize>,
    _heartbeat: Heartbeat,
}

/// The signs of life of another process.
struct WatchedRank {
    rank: usize,
    beats: i64,
    looked: Instant,
    /// Looks since the last sign.
    silent: u64,
}

impl LongWork {
    /// Shows signs of life from now on.
    pub(super) fn new(place: &Rendezvous, timeout: Duration) -> Result<Self, C10dError> {
        let &Rendezvous { rank, world_size, serves_store, .. } = place;
        // A connection of its own: a store is used by one thread at a time.
        let heartbeat = Heartbeat::start(Store::open(&place.host, place.port, None, &place.prefix, timeout)?, rank);
        let silent_looks = timeout.as_secs().clamp(*SILENT_LOOKS.start(), *SILENT_LOOKS.end());
        Ok(Self { rank, world_size, serves_store, silent_looks, rounds: Cell::new(0), _heartbeat: heartbeat })
    }

    /// Waits until all ranks have come here; returns the first one that failed. One that says why it failed does not wait.
    pub(super) fn wait(&self, store: &Store, failed: Option<&str>) -> Result<Option<FailedRank>, C10dError> {
        let came = format!("came/{}", self.rounds.replace(self.rounds.get() + 1));
        if let Some(why) = failed {
            notify(store, self.rank, why)?;
            self.wait_for_readers(store)?;
            return Ok(None);
        }
        let mut others: Vec<_> = (0..self.world_size).filter(|&rank| rank != self.rank).map(WatchedRank::new).collect();
        let mut pause = QUESTIONS[0];
        store.add(&came, 1)?;
        loop {
            let has_failed = store.add(FAILURES, 0)? > 0; // first: one that came may fail later
            if store.add(&came, 0)? >= self.world_size as i64 {
                return Ok(None);
            }
            if has_failed {
                store.add(&came, -1)?; // what comes later must not count this one, which goes
                let first = first_failure(store)?;
                self.wait_for_readers(store)?;
                return Ok(Some(first));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(QUESTIONS[1]);
            self.watch(store, &mut others)?;
        }
    }

    /// Notifies all if another one is gone.
    fn watch(&self, store: &Store, others: &mut [WatchedRank]) -> Result<(), C10dError> {
        for watched in others {
            if watched.silent_for(store)? > self.silent_looks {
                let seconds = self.silent_looks;
                let why = format!(
                    "it has given no sign of life for {seconds} s: it was killed or stopped, or its machine is not reached"
                );
                return notify(store, watched.rank, &why);
            }
        }
        Ok(())
    }

    /// Counts this rank among those that know of the failure. If it serves the store, waits for the others.
    fn wait_for_readers(&self, store: &Store) -> Result<(), C10dError> {
        let (since, mut readers) = (Instant::now(), store.add(READERS, 1)?);
        while self.serves_store && readers < self.world_size as i64 && since.elapsed() < LAST_WORDS {
            thread::sleep(QUESTIONS[0]);
            readers = store.add(READERS, 0)?;
        }
        Ok(())
    }
}

impl WatchedRank {
    fn new(rank: usize) -> Self {
        Self { rank, beats: 0, looked: Instant::now(), silent: 0 }
    }

    /// How many looks in a row found no new sign of life.
    fn silent_for(&mut self, store: &Store) -> Result<u64, C10dError> {
        if self.looked.elapsed() >= BEAT {
            self.looked = Instant::now();
            let beats = store.add(&beat(self.rank), 0)?;
            self.silent = if beats > self.beats { 0 } else { self.silent + 1 };
            self.beats = beats;
        }
        Ok(self.silent)
    }
}

impl Heartbeat {
    fn start(store: Store, rank: usize) -> Self {
        let ((stop, stops), (has_stopped, stopped)) = (channel(), channel());
        thread::spawn(move || {
            let lives = || stops.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout);
            while store.add(&beat(rank), 1).is_ok() && lives() {}
            let _ = notify(&store, rank, "it ended; its own messages say why"); // without a store nobody waits for it
            let _ = has_stopped.send(());
        });
        Self { stop, stopped }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        let _ = self.stopped.recv_timeout(BEAT); // a store that hangs must not keep the process
    }
}

fn beat(rank: usize) -> String {
    format!("beat/{rank}")
}

/// Notifies all ranks that wait why one of them failed, unless another failed before.
fn notify(store: &Store, rank: usize, why: &str) -> Result<(), C10dError> {
    if store.add(FAILURES, 1)? > 1 {
        return Ok(());
    }
    store.set(WORDS, &format!("{rank} {why}"))
}

fn first_failure(store: &Store) -> Result<FailedRank, C10dError> {
    let words = store.get(WORDS, LAST_WORDS)?;
    let (rank, why) = words.split_once(' ').unwrap_or(("0", &words));
    Ok(FailedRank { rank: rank.parse().unwrap_or(0), why: why.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::super::LocalStore;
    use super::*;

    #[test]
    fn a_look_without_a_sign_of_life_counts_once() {
        let server = LocalStore::start().expect("a store");
        let store = Store::open("127.0.0.1", server.port(), None, "test", Duration::from_secs(20)).expect("a store");
        let mut watched = WatchedRank::new(1);
        let look = |watched: &mut WatchedRank| {
            watched.looked = Instant::now().checked_sub(BEAT).expect("a clock that began earlier");
            watched.silent_for(&store).expect("a store")
        };
        assert_eq!([look(&mut watched), look(&mut watched)], [1, 2]);
        assert_eq!(watched.silent_for(&store).expect("a store"), 2, "it is too early to look again");
        store.add(&beat(1), 1).expect("a store");
        assert_eq!(look(&mut watched), 0);
    }
}
