//! CPU threads: how many, and how long they wait for each other before they sleep.

use std::env;
use std::num::NonZeroUsize;

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

/// Whether the environment sets how long threads wait for each other.
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

/// Variables that set how many threads a library starts. None of them checks it.
const COUNTS: [&str; 3] = [COUNT, "MKL_NUM_THREADS", "RAYON_NUM_THREADS"];

/// Refuses a variable with more threads than any machine runs: the libraries abort where the system refuses a thread.
///
/// # Errors
/// The variable, and how many threads are expected.
pub(super) fn check_environment() -> Result<(), String> {
    check_counts(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
}

fn check_counts(variable: impl Fn(&str) -> Option<String>) -> Result<(), String> {
    for name in COUNTS {
        let Some(value) = variable(name) else { continue };
        // What is no number they ignore; OMP_NUM_THREADS may be a list, one number a level.
        let numbers = value.split(',').filter_map(|number| number.trim().parse::<u128>().ok());
        if numbers.max().is_some_and(|most| most > MOST_THREADS as u128) {
            return Err(format!("{name}={value}: expected at most {MOST_THREADS} threads"));
        }
    }
    Ok(())
}

/// Parses `--threads`.
pub(super) fn count(text: &str) -> Result<NonZeroUsize, String> {
    let count: NonZeroUsize = above_zero(text)?;
    if count.get() > MOST_THREADS { Err(format!("expected at most {MOST_THREADS}")) } else { Ok(count) }
}

/// Starts the threads that tokenise and hash: the number that was given, or one for each core. Started at their first use, rayon would panic if the
/// system refuses them.
///
/// # Errors
/// If the system refuses to start them.
pub(super) fn start_tokenisers(threads: Option<NonZeroUsize>) -> anyhow::Result<()> {
    let automatic = 0; // RAYON_NUM_THREADS, or the number of cores
    let started =
        rayon::ThreadPoolBuilder::new().num_threads(threads.map_or(automatic, NonZeroUsize::get)).build_global();
    let count = threads.map_or_else(String::new, |count| format!("{count} "));
    started.with_context(|| format!("cannot start {count}threads; use a smaller --threads"))
}

/// Limits the threads of libtorch, whose MKL reads `MKL_NUM_THREADS` before `OMP_NUM_THREADS`, and those of the CPU kernels.
pub(super) fn limit_libtorch(threads: Option<NonZeroUsize>) {
    if let Some(count) = threads.map(NonZeroUsize::get) {
        tch::set_num_threads(i32::try_from(count).expect("`count` refuses large numbers"));
        Team::limit_process(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_command_line_replace_omp_num_threads() {
        let variables = environment(NonZeroUsize::new(3));
        assert!(variables.contains(&(COUNT, "3".to_owned())));
        assert!(environment(None).iter().all(|(name, _)| *name != COUNT));
    }

    #[test]
    fn variables_with_more_threads_than_any_machine_has_are_refused() {
        let refused = |name: &'static str, value: &'static str| {
            check_counts(|asked| (asked == name).then(|| value.to_owned())).err()
        };
        let many = refused("OMP_NUM_THREADS", "100000").expect("too many");
        assert_eq!(many, "OMP_NUM_THREADS=100000: expected at most 1024 threads");
        for value in ["4,100000", "99999999999999999999"] {
            assert!(refused("OMP_NUM_THREADS", value).is_some(), "{value}");
        }
        assert!(refused("RAYON_NUM_THREADS", "4096").is_some());
        assert_eq!(["8", "4,2", "", "many"].map(|value| refused("OMP_NUM_THREADS", value)), [const { None }; 4]);
    }

    #[test]
    fn more_threads_than_any_machine_has_are_refused() {
        assert_eq!(count("1024"), Ok(NonZeroUsize::new(1024).unwrap()));
        assert_eq!(count("1025"), Err("expected at most 1024".into()));
        assert_eq!(count("0"), Err("expected a whole number above 0".into()));
    }
}
