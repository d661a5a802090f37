//! NCCL's communicators of this process, one for each of its GPUs, and what is left of them after an error: nothing but the error.

use std::cell::{OnceCell, RefCell};
use std::time::{Duration, Instant};

use super::nccl::{Communicator, NcclError, NcclFunctions, UniqueId};
use crate::torch::collective::CollectiveError;

/// Gives bytes to all ranks, and returns those of each.
pub(super) type Exchange<'e> = &'e dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>, CollectiveError>;

/// First byte of what a rank sends the others before they connect: NCCL is there, or why it is not.
const READY: u8 = 1;
const NOT_READY: u8 = 0;

#[derive(Debug)]
pub(super) struct Communicators {
    rank: usize,
    world_size: usize,
    /// How long an operation may take.
    timeout: Duration,
    /// Looked up for the first tensor on a GPU.
    functions: OnceCell<NcclFunctions>,
    open: RefCell<Vec<Communicator>>,
    /// Of the first operation that failed. No rank knows what the others did of it, so that none is tried after it.
    first_error: OnceCell<CollectiveError>,
}

impl Communicators {
    /// None yet.
    pub(super) fn new([rank, world_size]: [usize; 2], timeout: Duration) -> Self {
        Self {
            rank,
            world_size,
            timeout,
            functions: OnceCell::new(),
            open: RefCell::default(),
            first_error: OnceCell::new(),
        }
    }

    /// Runs an operation on a GPU, whose communicator all ranks make at their first operation with this one. After an error all
    /// communicators are closed, and each later operation has the same error.
    pub(super) fn run(
        &self,
        operation: &'static str,
        device: usize,
        exchange: Exchange,
        body: impl FnOnce(&Communicator, Instant) -> Result<(), NcclError>,
    ) -> Result<(), CollectiveError> {
        if let Some(first) = self.first_error.get() {
            return Err(first.clone());
        }
        let connected = self.connect(operation, device, exchange);
        let done = connected.and_then(|()| {
            let open = self.open.borrow();
            let communicator = open.iter().find(|open| open.device() == device).expect("it was connected");
            body(communicator, self.deadline()).map_err(|error| self.collective_error(operation, &error))
        });
        done.inspect_err(|error| self.close(error))
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn connect(&self, operation: &'static str, device: usize, exchange: Exchange) -> Result<(), CollectiveError> {
        if self.open.borrow().iter().any(|open| open.device() == device) {
            return Ok(());
        }
        let offers = exchange(&self.offer())?;
        let id = id_of(&offers).map_err(|reason| CollectiveError::Failed { operation, reason })?;
        let as_collective = |error: NcclError| self.collective_error(operation, &error);
        let functions = *self.functions().map_err(as_collective)?;
        let place = [self.rank, self.world_size];
        let connected = Communicator::connect(functions, id, device, place, self.deadline()).map_err(as_collective)?;
        self.open.borrow_mut().push(connected);
        Ok(())
    }

    /// Whether NCCL is there; from rank 0 with a new id.
    fn offer(&self) -> Vec<u8> {
        let id = self.functions().and_then(|functions| match self.rank {
            0 => functions.unique_id().map(|id| id.bytes().to_vec()),
            _ => Ok(vec![]),
        });
        match id {
            Ok(id) => [&[READY], id.as_slice()].concat(),
            Err(error) => [&[NOT_READY], error.to_string().as_bytes()].concat(),
        }
    }

    fn functions(&self) -> Result<&NcclFunctions, NcclError> {
        if let Some(functions) = self.functions.get() {
            return Ok(functions);
        }
        let functions = NcclFunctions::load()?;
        Ok(self.functions.get_or_init(|| functions))
    }

    fn collective_error(&self, operation: &'static str, error: &NcclError) -> CollectiveError {
        let reason = error.to_string();
        match error {
            NcclError::TimedOut => CollectiveError::TimedOut { operation, seconds: self.timeout.as_secs() },
            NcclError::Remote { .. } => CollectiveError::Lost { operation, reason },
            NcclError::Runtime(_) | NcclError::Failed { .. } | NcclError::Kind(_) => {
                CollectiveError::Failed { operation, reason }
            }
        }
    }

    fn close(&self, error: &CollectiveError) {
        self.first_error.get_or_init(|| error.clone());
        self.open.take().into_iter().for_each(Communicator::abort);
    }
}

/// Rank 0's id, if NCCL is there in all ranks; else why not in the first without it.
fn id_of(offers: &[Vec<u8>]) -> Result<UniqueId, String> {
    for (rank, offer) in offers.iter().enumerate() {
        if let Some((&NOT_READY, reason)) = offer.split_first() {
            return Err(format!("rank {rank} has no NCCL: {}", String::from_utf8_lossy(reason)));
        }
    }
    let id = offers.first().and_then(|offer| UniqueId::from_bytes(offer.get(1..)?));
    id.ok_or_else(|| "rank 0 sent no id of NCCL: start all processes with the same program".to_owned())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::super::nccl::tests::fake::{FAILS, FakeNccl, IS_BUSY, IS_LOST};
    use super::*;

    /// Those of rank 0 of two, with the fake NCCL of this thread.
    fn communicators(timeout: Duration) -> Communicators {
        FakeNccl::with(|fake| *fake = FakeNccl::default());
        let made = Communicators::new([0, 2], timeout);
        made.functions.set(NcclFunctions::fake()).expect("none yet");
        made
    }

    /// Rank 1 is ready.
    fn with_rank_1(own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        Ok(vec![own.to_vec(), vec![READY]])
    }

    fn sum(communicators: &Communicators, device: usize) -> Result<(), CollectiveError> {
        let numbers = Tensor::zeros([5], (Kind::Float, Device::Cpu));
        communicators.run("a sum", device, &with_rank_1, |open, deadline| open.all_reduce(&numbers, deadline))
    }

    /// Without the questions about the state.
    fn calls() -> Vec<String> {
        FakeNccl::calls().into_iter().filter(|call| !call.starts_with("state")).collect()
    }

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn each_gpu_has_one_communicator() {
        let communicators = communicators(LONG);
        for device in [0, 2, 0, 2] {
            sum(&communicators, device).unwrap();
        }
        let init =
            |number, device| format!("ncclCommInitRankConfig {number} on {device}: rank 0 of 2, blocking 0, id 7");
        let sum = |number| format!("ncclAllReduce of {number}: 5 numbers, kind 7, 0");
        let [id, done] = ["ncclGetUniqueId", "cudaStreamQuery"].map(str::to_owned);
        let first = |number, device| [id.clone(), init(number, device), sum(number), done.clone()];
        let again = |number| [sum(number), done.clone()];
        let expected = [first(1000, 0).to_vec(), first(1001, 2).to_vec(), again(1000).to_vec(), again(1001).to_vec()];
        assert_eq!(calls(), expected.concat());
    }

    #[test]
    fn the_stream_is_asked_only_after_nccl_has_queued() {
        let communicators = communicators(LONG);
        sum(&communicators, 0).unwrap();
        FakeNccl::calls();
        FakeNccl::with(|fake| fake.states = [IS_BUSY, IS_BUSY, 0].into());
        sum(&communicators, 0).unwrap();
        let expected = [
            "ncclAllReduce of 1000: 5 numbers, kind 7, 0",
            "state 7",
            "state 7",
            "state 0",
            "state 0",
            "cudaStreamQuery",
        ];
        assert_eq!(FakeNccl::calls(), expected);
    }

    #[test]
    fn the_first_error_is_that_of_all_later_operations() {
        let communicators = communicators(LONG);
        sum(&communicators, 0).unwrap();
        sum(&communicators, 1).unwrap();
        FakeNccl::with(|fake| fake.statuses.insert("ncclAllReduce", FAILS));
        let first = sum(&communicators, 1).unwrap_err().to_string();
        let expected = "a sum failed: ncclAllReduce of NCCL failed: the words of NCCL: and its last ones";
        assert!(first.starts_with(expected), "{first}");
        assert!(FakeNccl::calls().ends_with(&["abort 1000".into(), "abort 1001".into()]), "both, and each once");
        FakeNccl::with(|fake| fake.statuses.clear());
        for device in [0, 1, 2] {
            assert_eq!(sum(&communicators, device).unwrap_err().to_string(), first);
        }
        assert!(FakeNccl::calls().is_empty(), "an aborted communicator is not used again");
    }

    #[test]
    fn a_state_that_cannot_be_asked_is_an_error() {
        let communicators = communicators(LONG);
        sum(&communicators, 0).unwrap();
        FakeNccl::with(|fake| fake.statuses.insert("state", FAILS));
        let error = sum(&communicators, 0).unwrap_err().to_string();
        assert!(error.starts_with("a sum failed: ncclCommGetAsyncError of NCCL failed"), "{error}");
    }

    #[test]
    fn a_rank_that_does_not_connect_is_waited_for_no_longer_than_the_timeout() {
        let communicators = communicators(SHORT);
        FakeNccl::with(|fake| fake.then = IS_BUSY);
        let error = sum(&communicators, 0).unwrap_err();
        assert!(matches!(error, CollectiveError::TimedOut { operation: "a sum", .. }), "{error:?}");
        assert_eq!(calls()[1..], ["ncclCommInitRankConfig 1000 on 0: rank 0 of 2, blocking 0, id 7", "abort 1000"]);
        FakeNccl::with(|fake| fake.then = 0);
        assert!(matches!(sum(&communicators, 0), Err(CollectiveError::TimedOut { .. })));
        assert!(FakeNccl::calls().is_empty());
    }

    #[test]
    fn an_operation_that_does_not_end_is_waited_for_no_longer_than_the_timeout() {
        let communicators = communicators(SHORT);
        sum(&communicators, 0).unwrap();
        FakeNccl::with(|fake| fake.statuses.insert("cudaStreamQuery", 600)); // cudaErrorNotReady
        assert!(matches!(sum(&communicators, 0), Err(CollectiveError::TimedOut { .. })));
        assert_eq!(calls().last().map(String::as_str), Some("abort 1000"));
    }

    #[test]
    fn only_a_lost_connection_is_reported_as_one() {
        let error_in = |state| {
            let communicators = communicators(LONG);
            sum(&communicators, 0).unwrap();
            FakeNccl::with(|fake| fake.states = [state].into());
            sum(&communicators, 0).unwrap_err()
        };
        let lost = error_in(IS_LOST);
        assert!(matches!(lost, CollectiveError::Lost { operation: "a sum", .. }), "{lost:?}");
        let failed = error_in(FAILS);
        assert!(matches!(failed, CollectiveError::Failed { operation: "a sum", .. }), "{failed:?}");
        assert!(!failed.to_string().contains("another process ended"), "{failed}");
    }

    #[test]
    fn a_rank_without_nccl_ends_all_before_they_connect() {
        let communicators = communicators(LONG);
        let numbers = Tensor::zeros([5], (Kind::Float, Device::Cpu));
        let absent = |own: &[u8]| Ok(vec![own.to_vec(), [&[NOT_READY], &b"no ncclAllReduce"[..]].concat()]);
        let body = |open: &Communicator, deadline| open.all_reduce(&numbers, deadline);
        let error = communicators.run("a sum", 0, &absent, body).unwrap_err().to_string();
        assert!(error.starts_with("a sum failed: rank 1 has no NCCL: no ncclAllReduce"), "{error}");
        assert_eq!(calls(), ["ncclGetUniqueId"]);
    }

    #[test]
    fn shares_and_copies_have_their_own_counts() {
        let communicators = communicators(LONG);
        let shares_wn = Tensor::zeros([6], (Kind::Float, Device::Cpu));
        let own_n = shares_wn.narrow(0, 0, 3);
        let body = |open: &Communicator, deadline| {
            open.reduce_scatter(&shares_wn, &own_n, deadline)?;
            open.all_gather(&shares_wn, &own_n, deadline)?;
            open.broadcast(&shares_wn, 1, deadline)
        };
        communicators.run("shares", 0, &with_rank_1, body).unwrap();
        let calls: Vec<String> = calls().into_iter().filter(|call| call.contains(" of 1000")).collect();
        let expected =
            ["Scatter of 1000: 3 numbers", "Gather of 1000: 3 numbers", "Broadcast of 1000: 6 numbers of rank 1"];
        assert!(calls.len() == 3 && calls.iter().zip(expected).all(|(call, end)| call.ends_with(end)), "{calls:?}");
    }
}
