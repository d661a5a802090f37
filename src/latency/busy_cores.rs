//! How many cores other programs use, which makes threads wait for each other and step times too long.

use std::time::Duration;
use std::{fs, thread};

/// Cores that others may use before it is reported.
const MIN_REPORTED: f64 = 0.3;

/// Watches the cores that this process may use.
pub struct CoreWatch {
    usable: Vec<usize>,
    before: CoreTimes,
    own_before: f64,
}

impl CoreWatch {
    /// `None` where the system does not say, and for a container that gets a part of the cores' time: other programs may run on the
    /// rest.
    pub fn start() -> Option<Self> {
        let usable = allowed_cores(&fs::read_to_string("/proc/self/status").ok()?)?;
        if thread::available_parallelism().ok()?.get() < usable.len() {
            return None;
        }
        Some(Self { before: CoreTimes::now(&usable)?, own_before: own_ticks()?, usable })
    }

    /// Cores that other programs used since the start, on average.
    pub fn others(&self) -> Option<f64> {
        let (after, own) = (CoreTimes::now(&self.usable)?, own_ticks()? - self.own_before);
        let (busy, all) = (after.busy - self.before.busy - own, after.all - self.before.all);
        (all > 0.0).then(|| busy.max(0.0) / all * self.usable.len() as f64)
    }
}

/// Cores that other programs use during `interval`, in which the caller sleeps.
pub fn busy_cores(interval: Duration) -> Option<f64> {
    let watch = CoreWatch::start()?;
    thread::sleep(interval);
    watch.others()
}

/// Cores that this process may use.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Whether programs that use `busy` of the cores leave too few for the threads.
pub fn disturb(busy: f64, threads: usize, cores: usize) -> bool {
    busy > MIN_REPORTED && busy + threads as f64 > cores as f64
}

/// Clock ticks of this process.
fn own_ticks() -> Option<f64> {
    process_ticks(&fs::read_to_string("/proc/self/stat").ok()?)
}

/// Adds up `utime` and `stime`, the 12th and 13th number behind the name in parentheses.
fn process_ticks(stat: &str) -> Option<f64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let ticks = behind_name.split_whitespace().skip(11).take(2).map(str::parse);
    ticks.collect::<Result<Vec<f64>, _>>().ok().map(|ticks| ticks.iter().sum())
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
    fn the_time_of_this_process_is_not_that_of_others() {
        assert_eq!(process_ticks("7 (a (b) c) R 1 2 3 4 5 6 7 8 9 10 30 4 0 0"), Some(34.0));
        assert_eq!(process_ticks("7 a"), None);
        if let Some(watch) = CoreWatch::start() {
            let tick = CoreWatch { own_before: watch.own_before - 1e9, ..watch };
            assert_eq!(tick.others().unwrap_or(0.0), 0.0);
        }
    }
}
