//! Micro batches for training and evaluations, made on a thread while earlier ones are computed.

use std::sync::mpsc::{IntoIter, Sender, SyncSender, channel, sync_channel};
use std::thread::Scope;

use tch::Device;

use crate::data::loader::Batch;
use crate::draft::loss::LossConfig;
use crate::draft::token_map::TokenMap;
use crate::draft::trained::TrainedDrafter;
use crate::model::stages::Stages;
use crate::torch::{TorchPanic, guard};
use crate::train::fed_batch::{FedBatch, PassShape};
use crate::train::hidden_states::{ReadStates, RowPositions, StatesReader};
use crate::train::target_rule::TargetRule;
use crate::train::targets::BatchTargets;

/// Adds to batches what their passes read.
#[derive(Debug)]
pub struct BatchMaker {
    rule: TargetRule,
    /// Of a truncated vocabulary.
    map: Option<TokenMap>,
    shape: PassShape,
    /// Of stored hidden states.
    reader: Option<StatesReader>,
}

/// Rows to read, and where their states go.
struct ReadJob {
    rows: Vec<RowPositions>,
    to: SyncSender<ReadStates>,
}

impl BatchMaker {
    /// For a drafter on a backbone with these stages, which is frozen or not.
    pub fn new(
        loss: &LossConfig,
        drafter: &dyn TrainedDrafter,
        stages: &Stages,
        is_frozen: bool,
        reader: Option<StatesReader>,
    ) -> Self {
        let rule = TargetRule::new(loss, drafter.reads());
        let shape = PassShape {
            device: stages.last(),
            embeds_on: (stages.len() > 1).then(|| stages.first()),
            trains_lm_head: !is_frozen,
            soft: rule.soft,
            reads_all: rule.reads.whole_rows,
        };
        let map = drafter.token_map().map(|map| TokenMap::new(map.tokens().to_vec(), Device::Cpu));
        Self { rule, map, shape, reader }
    }

    /// Makes one batch.
    pub fn make(&self, batch: Batch) -> FedBatch {
        let targets = BatchTargets::new(&batch, self.rule, self.map.as_ref());
        let kept = self.reader.as_ref().map(|reader| reader.positions(&batch));
        FedBatch::new(batch, targets, kept.as_deref(), self.shape)
    }

    /// Makes groups of batches on a thread of `scope`, one group ahead of what is taken, and reads stored states on another, one batch ahead.
    pub fn feed<'scope, E: From<TorchPanic> + Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        mut groups: impl Iterator<Item = Result<Vec<Batch>, E>> + Send + 'scope,
    ) -> IntoIter<Result<Vec<FedBatch>, E>> {
        let (sender, receiver) = sync_channel(0);
        let jobs = self.reader.clone().map(|reader| read_ahead(scope, reader));
        scope.spawn(move || {
            let make = |batch| self.with_states(self.make(batch), jobs.as_ref());
            let make_all = |group: Vec<Batch>| guard("making batches", || group.into_iter().map(make).collect());
            // Ends when the last group is made, or nobody takes them any more.
            let _ = groups.try_for_each(|group| sender.send(group.and_then(|group| Ok(make_all(group)?))));
        });
        receiver.into_iter()
    }

    fn with_states(&self, batch: FedBatch, jobs: Option<&Sender<ReadJob>>) -> FedBatch {
        let (Some(jobs), Some(reader)) = (jobs, &self.reader) else { return batch };
        let (to, states) = sync_channel(0);
        let _ = jobs.send(ReadJob { rows: reader.rows(&batch.batch), to }); // without a reader, the run reads
        batch.with_read_ahead(states)
    }
}

/// Reads on a thread of `scope`; each job waits until its states are taken.
fn read_ahead<'scope>(scope: &'scope Scope<'scope, '_>, reader: StatesReader) -> Sender<ReadJob> {
    let (sender, jobs) = channel();
    scope.spawn(move || {
        for ReadJob { rows, to } in jobs {
            let _ = to.send(reader.read(&rows)); // a batch may have been dropped
        }
    });
    sender
}
