//! `--nproc N`: starts the processes of a run on this machine, and waits for them.

use std::env;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::{CommonFlags, end, interrupted_to_save};
use crate::torch::process_group::LocalStore;
use crate::torch::process_group::rendezvous::Rendezvous;

/// Processes notice at their next exchange that one has failed, which comes within `--process-timeout`, and then have so long to say so.
const TO_END: Duration = Duration::from_secs(5);
/// Those that still meet, or are in a long step, do not notice it for minutes: a run ends within half a minute of a failure.
const LONGEST_END: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// The process that started this one.
const STARTER: &str = "MEDUSA_STARTER";

/// A process of the run.
struct RankProcess {
    rank: usize,
    process: Child,
    ended: Option<ExitStatus>,
    was_killed: bool,
}

/// Starts `count` processes with the arguments of this one, and ends with their status. `timeout` is that of an exchange between them.
///
/// # Errors
/// If they cannot be started.
pub(super) fn run(count: NonZeroUsize, timeout: Duration, common: &CommonFlags) -> anyhow::Result<()> {
    let (stop, grace) = (interrupted_to_save(), grace(timeout)); // from here on the first signal is passed on
    let store = LocalStore::start().context("cannot open a port on 127.0.0.1 for the processes to meet")?;
    let workers = (0..count.get()).map(|rank| start(rank, count, store.port(), common)).collect::<Result<_, _>>()?;
    match wait(workers, stop, grace, &|line| common.say(line))? {
        0 => Ok(()),
        status => end(status),
    }
}

/// How long processes may go on after the first failure.
fn grace(timeout: Duration) -> Duration {
    timeout.saturating_add(TO_END).min(LONGEST_END)
}

/// Passes a signal on, and kills what has not ended `grace` after the first failure; returns the status of the run.
fn wait(mut workers: Vec<RankProcess>, stop: &AtomicBool, grace: Duration, say: &dyn Fn(String)) -> anyhow::Result<u8> {
    let (mut failed, mut asked) = (None, false); // when the first of them failed; whether a signal was passed on
    while workers.iter().any(|worker| worker.ended.is_none()) {
        for worker in &mut workers {
            let had_ended = worker.ended.is_some();
            worker.poll()?;
            if !had_ended && worker.ended.is_some_and(|status| !status.success()) {
                failed.get_or_insert_with(Instant::now);
            }
        }
        if stop.load(Ordering::Relaxed) && !asked {
            asked = true;
            workers.iter_mut().for_each(|worker| worker.signal(Signal::TERM));
        }
        if failed.is_some_and(|since| since.elapsed() > grace) {
            workers.iter_mut().for_each(|worker| worker.kill(grace, say));
        }
        thread::sleep(POLL);
    }
    // Ranks that end because of another have status 1; the other's says more.
    let own_ends = workers.iter().filter(|worker| !worker.was_killed);
    Ok(own_ends.map(RankProcess::status).max().unwrap_or(0))
}

/// In a process that [`run`] started: ends with the one that started it, at once if that was asked to stop before.
///
/// # Errors
/// If the system refuses.
pub(super) fn end_with_starter() -> anyhow::Result<()> {
    let Ok(starter) = env::var(STARTER) else { return Ok(()) };
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::INT)).context("cannot follow the end of --nproc")?;
    let parent = rustix::process::getppid().map(Pid::as_raw_nonzero);
    anyhow::ensure!(parent.is_some_and(|parent| parent.to_string() == starter), "the process of --nproc has ended");
    Ok(())
}

fn start(rank: usize, count: NonZeroUsize, port: u16, common: &CommonFlags) -> anyhow::Result<RankProcess> {
    let program = env::current_exe().context("cannot find this program")?;
    let mut arguments = env::args_os();
    let mut command = Command::new(&program);
    command.arg0(arguments.next().unwrap_or_else(|| program.clone().into()));
    let threads = common.threads.is_none().then(|| threads_each(count));
    command.args(arguments_of_worker(arguments, threads));
    command.envs(Rendezvous::variables_of_local(rank, count.get(), port));
    command.env(STARTER, std::process::id().to_string());
    command.process_group(0); // a terminal's Ctrl-C reaches this process, which passes it on once
    let process = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    Ok(RankProcess { rank, process, ended: None, was_killed: false })
}

/// This machine's cores, shared out.
fn threads_each(count: NonZeroUsize) -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    (cores / count).max(1)
}

/// Without `--nproc`, and with `--threads` if it is not given. What follows `--` is no flag.
fn arguments_of_worker(arguments: impl Iterator<Item = OsString>, threads: Option<usize>) -> Vec<OsString> {
    let (mut is_value, mut are_flags) = (false, true);
    let keep = |argument: &OsString| {
        are_flags &= argument != "--";
        if std::mem::take(&mut is_value) || !are_flags {
            return !are_flags;
        }
        is_value = argument == "--nproc";
        !is_value && !argument.to_string_lossy().starts_with("--nproc=")
    };
    let threads = threads.map(|threads| format!("--threads={threads}").into());
    threads.into_iter().chain(arguments.filter(keep)).collect()
}

impl RankProcess {
    fn poll(&mut self) -> anyhow::Result<()> {
        if self.ended.is_none() {
            self.ended = self.process.try_wait().with_context(|| format!("cannot wait for rank {}", self.rank))?;
            if let Some(signal) = self.ended.and_then(|status| status.signal()).filter(|_| !self.was_killed) {
                CommonFlags::print(format_args!("rank {} was ended by signal {signal}", self.rank));
            }
        }
        Ok(())
    }

    fn signal(&mut self, signal: Signal) {
        if self.ended.is_none() {
            let pid = Pid::from_child(&self.process);
            let _ = kill_process(pid, signal); // it may just have ended
        }
    }

    fn kill(&mut self, grace: Duration, say: &dyn Fn(String)) {
        if self.ended.is_none() && !self.was_killed {
            self.was_killed = true;
            say(format!(
                "rank {} did not end within {} s after another rank failed: killing it",
                self.rank,
                grace.as_secs()
            ));
            let _ = self.process.kill();
        }
    }

    /// As a shell reports it.
    fn status(&self) -> u8 {
        let status = self.ended.unwrap_or_default();
        let signal_code = status.signal().map(|signal| 128 + signal);
        status.code().or(signal_code).and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn workers_do_not_start_workers() {
        let left = |arguments: &[&str]| given(arguments, None);
        assert_eq!(left(&["r.toml", "--nproc", "4", "--resume"]), ["r.toml", "--resume"]);
        assert_eq!(left(&["--nproc=4", "r.toml"]), ["r.toml"]);
        assert_eq!(left(&["r.toml", "--nproc", "--nproc", "--json"]), ["r.toml", "--json"]);
        assert_eq!(left(&["--nproc", "2", "--", "--nproc"]), ["--", "--nproc"], "a recipe of this name");
    }

    #[test]
    fn threads_are_a_flag_also_before_a_recipe_behind_two_dashes() {
        assert_eq!(given(&["--nproc=2", "--", "r.toml"], Some(3)), ["--threads=3", "--", "r.toml"]);
        assert_eq!(given(&["train", "r.toml", "--nproc=2"], Some(1)), ["--threads=1", "train", "r.toml"]);
    }

    fn given(arguments: &[&str], threads: Option<usize>) -> Vec<String> {
        let given = arguments_of_worker(arguments.iter().map(Into::into), threads);
        given.iter().map(|argument| argument.to_string_lossy().into_owned()).collect()
    }

    fn program(rank: usize, [name, argument]: [&str; 2]) -> RankProcess {
        let process = Command::new(name).arg(argument).spawn().expect("a program of the system");
        RankProcess { rank, process, ended: None, was_killed: false }
    }

    #[test]
    fn a_run_ends_soon_after_a_failure_however_long_its_exchanges_may_take() {
        assert_eq!([1, 600].map(|seconds| grace(Duration::from_secs(seconds)).as_secs()), [6, 20]);
    }

    /// What a rank with a stopped neighbour looks like: it neither ends nor says anything.
    #[test]
    fn what_hangs_after_a_failure_is_killed() {
        let (began, grace) = (Instant::now(), Duration::from_millis(300));
        let (said, never) = (RefCell::new(vec![]), AtomicBool::new(false));
        let say = |line| said.borrow_mut().push(line);
        let workers = vec![program(0, ["false", ""]), program(1, ["sleep", "600"])];
        assert_eq!(wait(workers, &never, grace, &say).expect("two programs"), 1, "the status of what failed");
        assert!((grace..Duration::from_secs(300)).contains(&began.elapsed()), "{:?}", began.elapsed());
        assert_eq!(said.take(), ["rank 1 did not end within 0 s after another rank failed: killing it"]);
        let ended = wait(vec![program(0, ["true", ""])], &never, grace, &say);
        assert_eq!((ended.expect("a program"), said.take()), (0, vec![]));
    }
}
