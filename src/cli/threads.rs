//! CPU threads: how many, and how long they wait for each other before they sleep.

use std::num::NonZeroUsize;
use std::time::Duration;
use std::{env, fs, thread};

const COUNT: &str = "OMP_NUM_THREADS";
/// Turns of libgomp's waiting loop before a thread sleeps.
const SPINS: &str = "GOMP_SPINCOUNT";
/// The variable that decides if [`SPINS`] is not set.
const WAITING: &str = "OMP_WAIT_POLICY";

/// libgomp's default is 300,000 turns. Where other programs run, threads spin away the time that the thread they wait for needs:
/// a run took 105 s and 15 s with it, 11.6 s with this value (benches/results/cpu-2026-11-22-threads.md).
const DEFAULT_SPINS: &str = "10000";

/// Variables that libgomp and our own threads read when a program starts. What the user has set stays, except that
/// `--threads` wins over `OMP_NUM_THREADS`.
pub(super) fn environment(threads: Option<NonZeroUsize>) -> Vec<(&'static str, String)> {
    let is_set = |name: &str| env::var_os(name).is_some();
    let spins = (!is_set(SPINS) && !is_set(WAITING)).then(|| (SPINS, DEFAULT_SPINS.to_owned()));
    threads.map(|count| (COUNT, count.to_string())).into_iter().chain(spins).collect()
}

/// Limits the threads that tokenise.
///
/// # Panics
/// If some have tokenised before.
pub(super) fn limit_tokenisers(threads: Option<NonZeroUsize>) {
    if let Some(count) = threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count.get());
        pool.build_global().expect("nothing was tokenised before");
    }
}

/// Cores that ran something during `interval`, in which the caller sleeps; `None` where there is no /proc/stat.
pub(super) fn busy_cores(interval: Duration) -> Option<f64> {
    let before = CoreTimes::now()?;
    thread::sleep(interval);
    let after = CoreTimes::now()?;
    let (busy, all) = (after.busy - before.busy, after.all - before.all);
    (all > 0.0).then(|| busy / all * after.cores as f64)
}

/// Clock ticks of all cores since the machine started.
struct CoreTimes {
    cores: usize,
    busy: f64,
    all: f64,
}

impl CoreTimes {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// Reads the line `cpu user nice system idle iowait irq softirq steal …`, and counts the lines of single cores.
    fn parse(stat: &str) -> Option<Self> {
        let (first, others) = stat.split_once('\n')?;
        let numbers = first.strip_prefix("cpu ")?.split_whitespace().take(8);
        let ticks: Vec<f64> = numbers.map(str::parse).collect::<Result<_, _>>().ok()?;
        let (all, idle) = (ticks.iter().sum::<f64>(), ticks.get(3)? + ticks.get(4)?);
        Some(Self { cores: others.lines().filter(|line| line.starts_with("cpu")).count(), busy: all - idle, all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_cores_are_read_from_the_kernels_table() {
        let stat = "cpu  10 1 5 70 8 2 3 1 99 99\ncpu0 5 0 2 35 4 1 1 0 9 9\ncpu1 5 1 3 35 4 1 2 1 9 9\nintr 7\n";
        let times = CoreTimes::parse(stat).expect("a table");
        assert_eq!((times.cores, times.busy, times.all), (2, 22.0, 100.0));
        assert!(CoreTimes::parse("nothing like it\n").is_none());
    }

    #[test]
    fn the_number_of_threads_reaches_libgomp() {
        let variables = environment(NonZeroUsize::new(3));
        assert!(variables.contains(&(COUNT, "3".to_owned())));
        assert!(environment(None).iter().all(|(name, _)| *name != COUNT));
    }
}
