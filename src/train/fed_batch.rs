//! A micro batch with the tokens, targets and kept positions that its pass reads. All of them are one tensor: one copy takes them to the device,
//! where each list is a part of it. Where texts begin in packed rows is copied by the attention.

// B rows, T tokens of a row, N = B·T positions, M targets of a head or kept positions
use std::ops::Range;
use std::sync::mpsc::Receiver;

use tch::{Device, Tensor};

use crate::data::loader::{Batch, TargetTokens};
use crate::draft::loss::{SoftTargets, Targets};
use crate::torch::transfer::HostTensor;
use crate::train::hidden_states::ReadStates;
use crate::train::targets::{BatchTargets, PreviousTokens};

/// A micro batch in the host's memory.
#[derive(Debug)]
pub struct FedBatch {
    pub batch: Batch,
    pub targets: BatchTargets,
    integers: HostTensor,
    /// `[N]`: the tokens for another stage than the losses'.
    tokens: Option<HostTensor>,
    places: IntegerPlaces,
    /// Receives the stored hidden states, or `None` if some rows were not stored when they were asked for.
    read_ahead: Option<Receiver<ReadStates>>,
}

/// What a pass reads of its batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassShape {
    /// Where the losses are computed.
    pub(super) device: Device,
    /// Where the embedding is, if it is on another stage.
    pub(super) embeds_on: Option<Device>,
    /// The LM head is trained, too.
    pub(super) trains_lm_head: bool,
    /// The LM head teaches the drafter.
    pub(super) soft: bool,
    /// The drafter reads every position, whatever is stored.
    pub(super) reads_all: bool,
}

/// Where each list is among the integers.
#[derive(Debug)]
struct IntegerPlaces {
    tokens: Range<i64>,
    levels: Vec<LevelPlaces>,
    /// `None` if the LM head is frozen.
    lm_head: Option<TargetPlaces>,
    /// The positions whose hidden states are stored, in a cache or by a server, if any are.
    kept: Option<Range<i64>>,
}

#[derive(Debug)]
struct LevelPlaces {
    targets: TargetPlaces,
    /// With the tokens per position.
    previous: Option<(Range<i64>, i64)>,
    /// Of soft targets.
    teachers: Option<Range<i64>>,
}

/// Rows of the hidden states, and the tokens to predict from them.
#[derive(Debug)]
struct TargetPlaces {
    rows: Range<i64>,
    tokens: Range<i64>,
}

/// The lists one after another.
#[derive(Default)]
struct Integers {
    all: Vec<i64>,
}

impl Integers {
    fn push(&mut self, list: impl IntoIterator<Item = i64>) -> Range<i64> {
        let start = self.all.len() as i64;
        self.all.extend(list);
        start..self.all.len() as i64
    }
}

/// The row of each position's hidden state.
struct StateRows {
    /// `None`: every position has its own.
    row_of: Option<Vec<i64>>,
}

impl StateRows {
    /// The states of the positions `kept`, in this order, of `n`; all of them without a list.
    fn new(kept: Option<&[i64]>, n: usize) -> Self {
        let row_of = kept.map(|kept| {
            let mut row_of = vec![-1; n];
            (0..).zip(kept).for_each(|(row, &position)| row_of[position as usize] = row);
            row_of
        });
        Self { row_of }
    }

    fn of(&self, position: i64) -> i64 {
        let Some(row_of) = &self.row_of else { return position };
        let row = row_of[position as usize];
        assert!(row >= 0, "a loss reads position {position}, whose state is not kept");
        row
    }

    fn push_targets(&self, targets: &TargetTokens, into: &mut Integers) -> TargetPlaces {
        let rows = into.push(targets.positions.iter().map(|&position| self.of(position)));
        TargetPlaces { rows, tokens: into.push(targets.tokens.iter().copied()) }
    }
}

impl FedBatch {
    /// `kept`: the positions whose hidden states are stored, if the run has a cache or a server's states.
    pub(super) fn new(batch: Batch, targets: BatchTargets, kept: Option<&[i64]>, shape: PassShape) -> Self {
        let mut integers = Integers::default();
        let rows = StateRows::new(kept.filter(|_| !shape.reads_all), batch.input_ids.len());
        let tokens = integers.push(batch.input_ids.iter().copied());
        let mut level = |(level, (targets, previous)): (usize, (&TargetTokens, &PreviousTokens))| LevelPlaces {
            targets: rows.push_targets(targets, &mut integers),
            previous: (previous.width > 0)
                .then(|| (integers.push(previous.tokens.iter().copied()), previous.width as i64)),
            // Level l (0-based) at t predicts t + l + 2, the LM head at t + l + 1.
            teachers: shape
                .soft
                .then(|| integers.push(targets.positions.iter().map(|&position| rows.of(position + level as i64 + 1)))),
        };
        let levels = targets.by_level.iter().zip(&targets.previous).enumerate().map(&mut level).collect();
        let lm_head = shape.trains_lm_head.then(|| rows.push_targets(&targets.lm_head, &mut integers));
        let kept = kept.map(|kept| integers.push(kept.iter().copied()));
        let integers = HostTensor::from_integers(&integers.all, shape.device);
        let places = IntegerPlaces { tokens, levels, lm_head, kept };
        let tokens = shape.embeds_on.map(|device| HostTensor::from_integers(&batch.input_ids, device));
        Self { batch, targets, integers, tokens, places, read_ahead: None }
    }

    #[must_use]
    pub(super) fn with_read_ahead(self, read_ahead: Receiver<ReadStates>) -> Self {
        Self { read_ahead: Some(read_ahead), ..self }
    }

    /// The batch with its integers on the device: the copy is queued there before the work that reads it.
    pub fn on_device(&self) -> DeviceBatch<'_> {
        DeviceBatch {
            fed: self,
            integers: self.integers.on_device(),
            tokens: self.tokens.as_ref().map(HostTensor::on_device),
        }
    }
}

/// A micro batch whose integers are on the device.
#[derive(Debug)]
pub struct DeviceBatch<'f> {
    pub fed: &'f FedBatch,
    integers: Tensor,
    tokens: Option<Tensor>,
}

impl DeviceBatch<'_> {
    /// `[B, T]`, on the device of the backbone's embedding.
    pub fn tokens_bt(&self) -> Tensor {
        let Batch { rows, length, .. } = self.fed.batch;
        let tokens_n = self.tokens.as_ref().map_or_else(|| self.list(&self.fed.places.tokens), Tensor::shallow_clone);
        tokens_n.view([rows as i64, length as i64])
    }

    /// Targets of a level (0-based), as rows of the hidden states.
    pub fn level_targets(&self, level: usize) -> Targets {
        let LevelPlaces { targets, previous, .. } = &self.fed.places.levels[level];
        // A micro batch may have no position of a level: M = 0.
        let previous =
            previous.as_ref().map(|(place, width)| self.list(place).view([list_length(place) / width, *width]));
        Targets { previous_mj: previous, ..self.targets(targets) }
    }

    /// [`DeviceBatch::level_targets`] with the LM head's rows.
    ///
    /// # Panics
    /// If the LM head does not teach.
    pub fn soft_of_level(&self, level: usize) -> SoftTargets {
        let teachers = self.fed.places.levels[level].teachers.as_ref().expect("a run with soft targets");
        SoftTargets { targets: self.level_targets(level), teacher_m: self.list(teachers) }
    }

    /// Targets of the LM head, as rows of the hidden states.
    ///
    /// # Panics
    /// If the LM head is frozen.
    pub fn lm_head_targets(&self) -> Targets {
        self.targets(self.fed.places.lm_head.as_ref().expect("a trained LM head"))
    }

    /// The positions whose hidden states are stored, in a cache or by a server, if any are.
    pub fn kept_m(&self) -> Option<Tensor> {
        self.fed.places.kept.as_ref().map(|place| self.list(place))
    }

    /// The stored hidden states, if they were read ahead; waits for the reader.
    ///
    /// # Errors
    /// That of reading states of a server.
    pub fn read_ahead(&self) -> ReadStates {
        let reader = self.fed.read_ahead.as_ref();
        reader.map_or(Ok(None), |states| states.recv().unwrap_or(Ok(None)))
    }

    fn targets(&self, TargetPlaces { rows, tokens }: &TargetPlaces) -> Targets {
        Targets { positions_m: self.list(rows), tokens_m: self.list(tokens), previous_mj: None }
    }

    fn list(&self, place: &Range<i64>) -> Tensor {
        self.integers.narrow(0, place.start, list_length(place))
    }
}

fn list_length(place: &Range<i64>) -> i64 {
    place.end - place.start
}
