//! The threads that share a step's work. A step has a hundred pieces of a few microseconds each: waking a sleeping thread for each
//! would take longer than the work, so idle threads spin for a moment before they sleep.
//!
//! rayon's `for_each` in place of [`Team::run`] decodes at 0.27 times the speed on the embedded default, 0.38 on stories260K and 0.69 on
//! a Llama of 512×8, all in float32 (benches/results/cpu-2026-11-22-doors.md).
#![expect(unsafe_code, reason = "the running job is lent to the threads as a pointer")]

use std::hint;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;

/// Looks at the ticket before a waiting thread sleeps; some 500 µs.
const LOOKS_BEFORE_SLEEP: u32 = 40_000;
/// Looks before a thread that waits for the others lets the machine run something else.
const LOOKS_BEFORE_YIELD: u32 = 10_000;

/// What [`Team::limit_process`] was given; 0 before.
static PROCESS_SIZE: AtomicUsize = AtomicUsize::new(0);

type TeamJob<'j> = &'j (dyn Fn(usize) + Sync);

/// This thread and its helpers. One piece of work at a time; whoever comes meanwhile works alone.
#[derive(Debug)]
pub struct Team {
    shared: Arc<TeamState>,
    busy: Mutex<()>,
    size: usize,
}

#[derive(Debug)]
struct TeamState {
    /// Counts jobs (32 bits), then the job's parts (16 bits), then the parts that were taken (16 bits). Taking a part is one
    /// exchange of the whole, so a thread that comes late cannot take a part of another job.
    ticket: AtomicU64,
    /// The running job; good to be read by whoever has taken a part that is not done yet.
    job: AtomicPtr<TeamJob<'static>>,
    done: AtomicUsize,
    panicked: AtomicBool,
    sleeping: AtomicUsize,
    bed: Mutex<()>,
    wake: Condvar,
}

impl Team {
    /// A team of this thread and `size` - 1 others, which stay to the process's end.
    pub fn new(size: usize) -> Self {
        let shared = Arc::new(TeamState {
            ticket: AtomicU64::new(0),
            job: AtomicPtr::new(ptr::null_mut()),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            bed: Mutex::new(()),
            wake: Condvar::new(),
        });
        let hire = |_| {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name("medusa-step".into()).spawn(move || shared.help()).is_ok()
        };
        let helpers = (1..size).filter(|&at| hire(at)).count();
        Self { shared, busy: Mutex::new(()), size: helpers + 1 }
    }

    /// The number of threads of [`Team::shared`], in place of `OMP_NUM_THREADS`. Has no effect on a team that runs.
    pub fn limit_process(size: usize) {
        PROCESS_SIZE.store(size, Ordering::Relaxed);
    }

    /// The process's team: as many threads as [`Team::limit_process`] says, else `OMP_NUM_THREADS`, else one a processor that the
    /// system shows.
    pub fn shared() -> &'static Self {
        static TEAM: OnceLock<Team> = OnceLock::new();
        let limit = NonZeroUsize::new(PROCESS_SIZE.load(Ordering::Relaxed)).map(NonZeroUsize::get);
        let asked = || limit.or_else(|| std::env::var("OMP_NUM_THREADS").ok()?.parse().ok());
        let cores = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
        TEAM.get_or_init(|| Self::new(asked().unwrap_or_else(cores).max(1)))
    }

    /// Threads.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Runs `work(0)`, …, `work(parts - 1)`, each once, and returns when all are done.
    ///
    /// # Panics
    /// If a part panicked.
    pub fn run(&self, parts: usize, work: impl Fn(usize) + Sync) {
        let lead = if self.size == 1 || parts < 2 { None } else { self.free() };
        if lead.is_none() || parts > usize::from(u16::MAX) {
            return (0..parts).for_each(work);
        }
        let work: TeamJob = &work;
        // Only the lifetime changes: `lead` returns after the last part is done, and nobody reads it later.
        let job: *const TeamJob<'static> = ptr::from_ref(&work).cast();
        self.shared.lead(job, parts as u64);
    }
    /// The right to lead, if nobody else has it.
    fn free(&self) -> Option<MutexGuard<'_, ()>> {
        match self.busy.try_lock() {
            Ok(free) => Some(free),
            Err(TryLockError::Poisoned(free)) => Some(free.into_inner()), // a part panicked: all are done, nothing is half-written here
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl TeamState {
    fn lead(&self, job: *const TeamJob<'static>, parts: u64) {
        self.job.store(job.cast_mut(), Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        let jobs = (self.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        self.ticket.store(jobs << 32 | parts << 16, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.bed.lock().unwrap_or_else(PoisonError::into_inner)); // who is about to sleep sleeps by now, and hears it
            self.wake.notify_all();
        }
        while self.take_part() {}
        let mut looks = 0;
        while self.done.load(Ordering::Acquire) < parts as usize {
            looks += 1;
            if looks % LOOKS_BEFORE_YIELD == 0 { thread::yield_now() } else { hint::spin_loop() }
        }
        if self.panicked.swap(false, Ordering::Relaxed) {
            resume_unwind(Box::new("a part of a step panicked"));
        }
    }

    /// Takes one part of the running job and does it; false if there is none.
    fn take_part(&self) -> bool {
        let ticket = self.ticket.load(Ordering::Acquire);
        let (parts, taken) = (ticket >> 16 & 0xffff, ticket & 0xffff);
        if taken >= parts {
            return false;
        }
        if self.ticket.compare_exchange_weak(ticket, ticket + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            // SAFETY: a part of this job is taken and not done, so `lead` has not returned and the job is alive.
            let job = unsafe { *self.job.load(Ordering::Acquire) };
            if catch_unwind(AssertUnwindSafe(|| job(taken as usize))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.done.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// A helper's life.
    fn help(&self) {
        let mut looks = 0;
        loop {
            if self.take_part() {
                looks = 0;
                continue;
            }
            looks += 1;
            hint::spin_loop();
            if looks > LOOKS_BEFORE_SLEEP {
                self.sleep();
                looks = 0;
            }
        }
    }

    fn sleep(&self) {
        let ticket = self.ticket.load(Ordering::SeqCst);
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        while self.ticket.load(Ordering::SeqCst) == ticket && (ticket & 0xffff) >= (ticket >> 16 & 0xffff) {
            bed = self.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        drop(bed);
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_part_runs_once(team: &Team, rounds: usize) {
        for round in 0..rounds {
            let parts = round % 19 + 1;
            let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            team.run(parts, |part| _ = counts[part].fetch_add(1, Ordering::Relaxed));
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn every_part_runs_once_however_many_and_whoever_calls() {
        // Eight threads: more than many machines have cores.
        for (size, rounds) in [(3, 2_000), (8, 500)] {
            let team = Team::new(size);
            thread::scope(|scope| (0..3).for_each(|_| _ = scope.spawn(|| every_part_runs_once(&team, rounds))));
        }
    }

    #[test]
    fn sleeping_helpers_wake_up_and_a_panic_reaches_the_caller() {
        let team = Team::new(2);
        for _ in 0..3 {
            thread::sleep(std::time::Duration::from_millis(20)); // far longer than they wait awake
            let sum = AtomicUsize::new(0);
            team.run(100, |part| _ = sum.fetch_add(part, Ordering::Relaxed));
            assert_eq!(sum.into_inner(), 4950);
        }
        let caught = catch_unwind(AssertUnwindSafe(|| team.run(4, |part| assert_ne!(part, 2))));
        assert!(caught.is_err());
        let others = AtomicUsize::new(0);
        let here = thread::current().id();
        team.run(200, |_| {
            thread::sleep(std::time::Duration::from_micros(100));
            others.fetch_add(usize::from(thread::current().id() != here), Ordering::Relaxed);
        });
        assert!(others.into_inner() > 0, "the helpers still help");
    }
}
