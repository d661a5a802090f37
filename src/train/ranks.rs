//! The processes of a run, as the training sees them: which share of the work each has, what they sum, and how the error of one ends all.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};

use crate::data::loader::BatchShare;
use crate::torch::collective::{Collective, CollectiveError, FailedRank, OneProcess};
use crate::torch::process_group::machine_id;

/// The processes of a run ("ranks"), seen by one of them. All of them call the same methods in the same order.
#[derive(Debug, Clone, Copy)]
pub struct Ranks<'c> {
    collective: &'c dyn Collective,
    /// Where this process computes.
    device: Device,
}

/// Why this process stops though nothing is wrong with it.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Another process failed.
    #[error("rank {rank} failed: {why}")]
    Failed {
        rank: usize,
        /// The first line of its error.
        why: String,
    },
    /// Not all processes were started for the same run.
    #[error(
        "rank {rank} differs from rank 0 in {what}: it has {value}, rank 0 has {first}; start all processes with the same program, recipe, \
         data and backbone"
    )]
    Differs { rank: usize, what: String, value: String, first: String },
}

impl Ranks<'static> {
    /// A run of one process.
    pub fn alone() -> Self {
        Self { collective: &OneProcess, device: Device::Cpu }
    }
}

impl<'c> Ranks<'c> {
    /// The processes that `collective` connects; this one computes on `device`.
    pub fn new(collective: &'c dyn Collective, device: Device) -> Self {
        Self { collective, device }
    }

    /// This process, from 0.
    pub fn rank(self) -> usize {
        self.collective.rank()
    }

    /// The number of processes.
    pub fn world_size(self) -> usize {
        self.collective.world_size()
    }

    /// Where this process computes.
    pub fn device(self) -> Device {
        self.device
    }

    /// Whether there is no other process.
    pub fn is_alone(self) -> bool {
        self.world_size() == 1
    }

    /// Whether this is rank 0, which alone touches the run's folder.
    pub fn is_first(self) -> bool {
        self.rank() == 0
    }

    /// This process's share of the batches.
    pub fn share(self) -> BatchShare {
        BatchShare { rank: self.rank(), world_size: self.world_size() }
    }

    /// How the processes exchange tensors.
    pub fn collective(self) -> &'c dyn Collective {
        self.collective
    }

    /// Ends a phase that can fail in one process alone: an error of another process becomes an error of this one.
    ///
    /// # Errors
    /// This process's own error, else [`RanksError`].
    pub fn agree<T, E: Display + From<RanksError>>(self, outcome: Result<T, E>) -> Result<T, E> {
        Ok(self.agree_and_sum(outcome, vec![])?.0)
    }

    /// As [`Ranks::agree`], and sums numbers over all processes, each of which passes as many.
    ///
    /// # Errors
    /// This process's own error, else [`RanksError`].
    pub fn agree_and_sum<T, E: Display + From<RanksError>>(
        self,
        outcome: Result<T, E>,
        numbers: Vec<f64>,
    ) -> Result<(T, Vec<f64>), E> {
        if self.is_alone() {
            return Ok((outcome?, numbers));
        }
        let failed = outcome.as_ref().err().map(first_line);
        let summed = self.sum_unless_failed(numbers, failed); // an own error takes part, too: it is what the others wait for
        let value = outcome?;
        Ok((value, summed?))
    }

    /// As [`Ranks::agree`], after a phase that may take longer than an exchange between the processes: the others wait as long as this one lives.
    ///
    /// # Errors
    /// This process's own error, else [`RanksError`].
    pub fn agree_after_long_work<T, E: Display + From<RanksError>>(self, outcome: Result<T, E>) -> Result<T, E> {
        if self.is_alone() {
            return outcome;
        }
        let failed = outcome.as_ref().err().map(first_line);
        let first = self.collective.wait_for_all(failed.as_deref());
        let value = outcome?; // an own error says more
        match first.map_err(RanksError::from)? {
            None => Ok(value),
            Some(FailedRank { rank, why }) => Err(RanksError::Failed { rank, why }.into()),
        }
    }

    fn sum_unless_failed(self, mut numbers: Vec<f64>, failed: Option<String>) -> Result<Vec<f64>, RanksError> {
        numbers.push(f64::from(u8::from(failed.is_some())));
        let mut sums = self.sum(&numbers)?;
        if sums.pop() == Some(0.0) {
            return Ok(sums);
        }
        let errors = self.collective.all_gather_bytes(failed.unwrap_or_default().as_bytes())?;
        let first = errors.iter().enumerate().find(|(_, why)| !why.is_empty());
        let (rank, why) = first.map_or((0, &[][..]), |(rank, why)| (rank, why));
        Err(RanksError::Failed { rank, why: String::from_utf8_lossy(why).into_owned() })
    }

    fn sum(self, numbers: &[f64]) -> Result<Vec<f64>, CollectiveError> {
        // On the CPU: an error of a device must be reported, too.
        let sum = Tensor::from_slice(numbers);
        self.collective.all_reduce(&sum)?;
        Ok(Vec::try_from(&sum).expect("a float64 vector"))
    }

    /// What rank 0 says; the others pass `None`.
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    ///
    /// # Panics
    /// If rank 0 passes `None`, or a value that JSON does not hold.
    pub fn broadcast<T: Serialize + DeserializeOwned>(self, value: Option<T>) -> Result<T, RanksError> {
        if self.is_alone() {
            return Ok(value.expect("rank 0 says it"));
        }
        let own = value.map_or_else(Vec::new, |value| serde_json::to_vec(&value).expect("JSON holds it"));
        let all = self.gather(&own)?;
        Ok(serde_json::from_slice(&all[0]).expect("rank 0 says it, in the same program"))
    }

    /// Rank 0's tensor on all processes' devices; the others pass `None`.
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    ///
    /// # Panics
    /// If rank 0 passes `None`.
    pub fn tensor_of_first(self, tensor: Option<Tensor>, shape: &[i64], kind: Kind) -> Result<Tensor, RanksError> {
        if self.is_alone() {
            return Ok(tensor.expect("rank 0 has it"));
        }
        let received = Tensor::zeros(shape, (kind, self.device));
        if self.is_first() {
            received.shallow_clone().copy_(&tensor.expect("rank 0 has it"));
        }
        self.collective.broadcast(&received, 0)?;
        Ok(received)
    }

    /// What each process passes, by rank.
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    pub fn gather(self, own: &[u8]) -> Result<Vec<Vec<u8>>, RanksError> {
        Ok(self.collective.all_gather_bytes(own)?)
    }

    /// Work whose results on disk the processes of a machine share: the first process of each machine does it, then the others.
    ///
    /// # Errors
    /// This process's own error, else [`RanksError`].
    pub fn first_of_machine_first<T, E: Display + From<RanksError>>(
        self,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        if self.is_alone() {
            return work();
        }
        let is_first = self.is_first_of_machine()?;
        let (mut work, mut done) = (Some(work), None);
        for mine in [true, false] {
            let now = if mine == is_first { work.take() } else { None };
            let outcome = self.agree_after_long_work(now.map(|work| work()).transpose())?;
            done = done.or(outcome);
        }
        Ok(done.expect("every process does it once"))
    }

    /// Whether no process with a lower rank runs on the same machine.
    fn is_first_of_machine(self) -> Result<bool, RanksError> {
        let own = machine_id();
        let all = self.gather(own.as_bytes())?;
        Ok(all.iter().position(|machine| *machine == own.as_bytes()) == Some(self.rank()))
    }
}

/// In place of an error's first line, if it is empty.
const NO_WORDS: &str = "an error without a message";

fn first_line(error: impl Display) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    if line.is_empty() { NO_WORDS.to_owned() } else { line.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_reported_by_its_first_line() {
        assert_eq!(["one", "one\ntwo", "", "\ntwo"].map(first_line), ["one", "one", NO_WORDS, NO_WORDS]);
    }
}
