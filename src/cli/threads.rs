//! CPU threads: how many, and how long they wait for each other before they sleep.

use std::num::NonZeroUsize;
use std::time::Duration;
use std::{env, fs, thread};

use anyhow::Context;

use super::numbers::above_zero;
use crate::cpu::team::Team;

const COUNT: &str = "OMP_NUM_THREADS";
/// Turns of libgomp's waiting loop before a thread sleeps.
const SPINS: &str = "GOMP_SPINCOUNT";
/// The variable that decides if [`SPINS`] is not set.
const WAITING: &str = "OMP_WAIT_POLICY";

/// libgomp's default is 300,000 turns. Where other programs run, threads spin away the time that the thread they wait for needs:
/// a run took 105 s and 15 s with it, 11.6 s with this value (benches/results/cpu-2026-11-22-threads.md).
const DEFAULT_SPINS: &str = "10000";

/// Whether the environment tells how long threads wait for each other.
pub(super) fn is_waiting_set() -> bool {
    [SPINS, WAITING].iter().any(|name| env::var_os(name).is_some())
}

/// Variables that libgomp and our own threads read when a program starts. What the user has set stays, except that
/// `--threads` wins over `OMP_NUM_THREADS`.
pub(super) fn environment(threads: Option<NonZeroUsize>) -> Vec<(&'static str, String)> {
    let spins = (!is_waiting_set()).then(|| (SPINS, DEFAULT_SPINS.to_owned()));
    threads.map(|count| (COUNT, count.to_string())).into_iter().chain(spins).collect()
}

/// No machine has more cores; the threads that tokenise are all started at once.
const MOST_THREADS: usize = 1024;

/// Parses `--threads`.
pub(super) fn count(text: &str) -> Result<NonZeroUsize, String> {
    let count: NonZeroUsize = above_zero(text)?;
    if count.get() > MOST_THREADS { Err(format!("expected at most {MOST_THREADS}")) } else { Ok(count) }
}

/// Starts the threads that tokenise, if their number was given.
///
/// # Errors
/// If the system refuses to start them.
pub(super) fn limit_tokenisers(threads: Option<NonZeroUsize>) -> anyhow::Result<()> {
    let Some(count) = threads else { return Ok(()) };
    let started = rayon::ThreadPoolBuilder::new().num_threads(count.get()).build_global();
    started.with_context(|| format!("cannot start {count} threads; use a smaller --threads"))
}

/// Limits the threads of libtorch, whose MKL reads `MKL_NUM_THREADS` before `OMP_NUM_THREADS`, and those of the CPU kernels.
pub(super) fn limit_libtorch(threads: Option<NonZeroUsize>) {
    if let Some(count) = threads.map(NonZeroUsize::get) {
        tch::set_num_threads(i32::try_from(count).expect("`count` refuses large numbers"));
        Team::limit_process(count);
    }
}

/// Cores that ran something during `interval`, in which the caller sleeps, of those that this process may use. `None` where the
/// system does not tell, and for a container that gets a part of the cores' time: other programs may run on the rest.
pub(super) fn busy_cores(interval: Duration) -> Option<f64> {
    let usable = allowed_cores(&fs::read_to_string("/proc/self/status").ok()?)?;
    if thread::available_parallelism().ok()?.get() < usable.len() {
        return None;
    }
    let before = CoreTimes::now(&usable)?;
    thread::sleep(interval);
    let after = CoreTimes::now(&usable)?;
    let (busy, all) = (after.busy - before.busy, after.all - before.all);
    (all > 0.0).then(|| busy / all * usable.len() as f64)
}

/// Reads the line `Cpus_allowed_list: 0-3,6` of /proc/self/status.
fn allowed_cores(status: &str) -> Option<Vec<usize>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cores.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cores)
}

/// Clock ticks of some cores since the machine started.
#[derive(Debug, PartialEq)]
struct CoreTimes {
    busy: f64,
    all: f64,
}

impl CoreTimes {
    fn now(cores: &[usize]) -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").ok()?, cores)
    }

    /// Adds up the lines `cpuN user nice system idle iowait irq softirq steal …` of the cores; `None` if one is missing.
    fn parse(stat: &str, cores: &[usize]) -> Option<Self> {
        let mut sum = Self { busy: 0.0, all: 0.0 };
        for core in cores {
            let numbers = stat.lines().find_map(|line| line.strip_prefix(&format!("cpu{core} ")))?;
            let numbers = numbers.split_whitespace().take(8).map(str::parse);
            let ticks: Vec<f64> = numbers.collect::<Result<_, _>>().ok()?;
            let (all, idle) = (ticks.iter().sum::<f64>(), ticks.get(3)? + ticks.get(4)?);
            sum = Self { busy: sum.busy + all - idle, all: sum.all + all };
        }
        Some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_cores_that_the_process_may_use_are_read() {
        let stat = "cpu  10 1 5 70 8 2 3 1 99 99\ncpu0 5 0 2 35 4 1 1 0 9 9\ncpu1 5 1 3 35 4 1 2 1 9 9\nintr 7\n";
        let parse = |cores: &[usize]| CoreTimes::parse(stat, cores);
        assert_eq!(parse(&[0, 1]), Some(CoreTimes { busy: 22.0, all: 100.0 }));
        assert_eq!(parse(&[1]), Some(CoreTimes { busy: 13.0, all: 52.0 }), "taskset -c 1");
        assert_eq!(parse(&[0, 2]), None);
        assert_eq!(allowed_cores("Name:\tx\nCpus_allowed_list:\t0-2,6\nThreads: 1\n"), Some(vec![0, 1, 2, 6]));
        assert_eq!(allowed_cores("Name:\tx\n"), None);
    }

    #[test]
    fn threads_of_the_command_line_replace_omp_num_threads() {
        let variables = environment(NonZeroUsize::new(3));
        assert!(variables.contains(&(COUNT, "3".to_owned())));
        assert!(environment(None).iter().all(|(name, _)| *name != COUNT));
    }

    #[test]
    fn more_threads_than_any_machine_has_are_refused() {
        assert_eq!(count("1024"), Ok(NonZeroUsize::new(1024).unwrap()));
        assert_eq!(count("1025"), Err("expected at most 1024".into()));
        assert_eq!(count("0"), Err("expected a whole number above 0".into()));
    }
}
