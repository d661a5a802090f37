//! The training loop, from the newest checkpoint: steps, evaluations, checkpoints and finally `final/`.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use crate::data::DataError;
use crate::data::loader::Loader;
use crate::formats::best::BestEvaluation;
use crate::formats::metrics::{MetricsError, MetricsLine, MetricsSplit, UpdateLine};
use crate::torch::{guard, memory};
use crate::train::backbone_pass::TrainingBackbone;
use crate::train::checked::CheckedRun;
use crate::train::checkpoint::{Checkpoints, DamagedCheckpoint, newest_step};
use crate::train::divergence::{LossWatch, RisenLoss};
use crate::train::error::TrainError;
use crate::train::fed_batch::FedBatch;
use crate::train::feed::BatchMaker;
use crate::train::hidden_states::HiddenStatesError;
use crate::train::log::RunLog;
use crate::train::next_tokens::NextTokens;
use crate::train::patience::BestSoFar;
use crate::train::plan::TrainPlan;
use crate::train::ranks::Ranks;
use crate::train::state::TrainState;
use crate::train::step::{StepError, StepMetrics, StepShare, StepWeights, check_finite, evaluate, train_step};
use crate::train::targets::TargetCounts;

/// Progress of a run.
#[derive(Debug)]
pub enum RunEvent<'e> {
    /// Hashing the weight files of a local backbone, which no commit identifies.
    Hashing {
        /// Bytes of the files whose hash is not cached.
        bytes: u64,
    },
    /// The run goes on with a recipe that has changed.
    RecipeChanged {
        /// Each key in words.
        keys: &'e [String],
        /// The steps that it has now, if the recipe changed their number: the schedules span them.
        total_steps: Option<usize>,
        /// The loss has a λ0.
        is_joint: bool,
    },
    /// There is no checkpoint to resume from: the run starts at step 0.
    NoCheckpoint,
    /// A newer checkpoint than the one that the run goes on from is damaged.
    Damaged(&'e DamagedCheckpoint),
    /// The run resumed from this checkpoint.
    Resumed {
        checkpoint: &'e Path,
        /// It has checksums; those of earlier versions have none.
        is_verified: bool,
    },
    /// The log of a resumed run lacks these steps.
    LogLacks { path: &'e Path, steps: RangeInclusive<usize> },
    /// The run uses this cache of hidden states.
    HiddenStates {
        path: &'e Path,
        /// Rows whose states are cached.
        filled: usize,
        /// All training rows.
        rows: usize,
        /// States have checksums; in files of earlier versions they have none.
        are_verified: bool,
    },
    /// The backbone answers prompts of the validation rows.
    Answering { done: usize, prompts: usize },
    /// The run trains on hidden states of a server; what the LM head makes of them.
    CapturedStates(NextTokens),
    /// Several processes read only a complete cache of hidden states, and this file is not one: the states are computed.
    CacheIncomplete(&'e Path),
    /// The cache of the hidden states of these rows stores nothing more, because the disk is full, or has lost some to damage. States that it
    /// lacks are computed whenever they are read.
    CacheLacks(MetricsSplit, &'e HiddenStatesError),
    /// An optimizer step was made.
    Stepped(&'e MetricsLine),
    /// The run probably diverges; reported once.
    LossRisen {
        loss: RisenLoss,
        step: usize,
        /// `optimizer.learning_rate`.
        learning_rate: f64,
    },
    /// The validation rows were evaluated.
    Evaluated(&'e MetricsLine),
    /// A checkpoint was written.
    Saved(&'e Path),
    /// The best evaluation so far, and the folder in which its heads are kept.
    Best(BestEvaluation, &'e Path),
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum RunOutcome {
    /// All steps are done; the path of the finished heads.
    Finished(PathBuf),
    /// `train.patience` evaluations in a row were no better than the best.
    StoppedEarly {
        /// The finished heads.
        heads: PathBuf,
        /// Optimizer steps done.
        step: usize,
        so_far: BestSoFar,
    },
    /// All steps were done before; the path of the finished heads.
    FinishedBefore(PathBuf),
    /// Interrupted; the checkpoint to resume from.
    Interrupted(PathBuf),
    /// Interrupted before the first step: nothing was trained.
    InterruptedBefore,
}

/// A run in progress.
pub(super) struct TrainingLoop<'r, 't> {
    pub(super) checked: &'r CheckedRun,
    pub(super) ranks: Ranks<'r>,
    pub(super) backbone: TrainingBackbone<'r>,
    pub(super) checkpoints: Checkpoints<'r>,
    pub(super) state: TrainState,
    /// The backbone's answers to validation prompts, if tokens per step are measured on them.
    pub(super) answers: Option<Loader>,
    /// Of rank 0.
    pub(super) log: Option<RunLog>,
    pub(super) watch: LossWatch,
    pub(super) emit: &'t mut dyn FnMut(RunEvent),
}

impl<'r> TrainingLoop<'r, '_> {
    /// Trains to the end, or until `interrupted` is set.
    ///
    /// # Errors
    /// [`TrainError`]; earlier checkpoints stay.
    pub(super) fn run(mut self, interrupted: &AtomicBool) -> Result<RunOutcome, TrainError> {
        let (checked, steps) = (self.checked, self.state.step..self.checked.total_steps);
        let share = self.ranks.share();
        let batches = steps.map(|step| checked.batches(step, share));
        let maker = self.backbone.batch_maker(&*self.state.drafter, MetricsSplit::Train);
        let folder = self.log.as_ref().map(|log| Arc::clone(&log.folder));
        let ended = thread::scope(|scope| self.run_on(maker.feed(scope, batches), interrupted));
        // Says more than what failed in a folder that is gone.
        if let Some(Err(gone @ MetricsError::Gone { .. })) = folder.map(|folder| folder.check()) {
            return Err(gone.into());
        }
        ended
    }

    /// Trains on the batches of one step after another.
    fn run_on(
        mut self,
        mut batches: impl Iterator<Item = Result<Vec<FedBatch>, TrainError>>,
        interrupted: &AtomicBool,
    ) -> Result<RunOutcome, TrainError> {
        let (ranks, total_steps) = (self.ranks, self.checked.total_steps);
        if self.state.step == 0 && !self.plan().trained.is_frozen() {
            let evaluated = self.evaluate(); // perplexity before training, as the baseline
            ranks.agree(evaluated)?;
        }
        while self.state.step < total_steps && self.stopped_early().is_none() {
            let line = self.step(&mut batches)?;
            let after = self.after_step(&line);
            let interrupts = vec![f64::from(u8::from(interrupted.load(Ordering::Relaxed)))];
            let ((), interrupts) = ranks.agree_and_sum(after, interrupts)?;
            let saves = self.state.step.is_multiple_of(self.plan().train.save_every.get());
            let goes_on = self.state.step < total_steps && self.stopped_early().is_none();
            let stop = interrupts[0] > 0.0 && goes_on;
            if saves || stop {
                let saved = self.save()?;
                if stop {
                    return Ok(RunOutcome::Interrupted(saved));
                }
            }
        }
        self.finish()
    }

    /// Writes the last checkpoint and `final/`.
    fn finish(&mut self) -> Result<RunOutcome, TrainError> {
        // A finished run can go on from its last step if the recipe asks for more.
        let newest = self.ranks.is_first().then(|| newest_step(&self.plan().train.output_dir)).transpose();
        let newest = self.ranks.agree(newest.map_err(TrainError::from))?;
        if self.ranks.broadcast(newest)? != Some(self.state.step) {
            self.save()?;
        }
        let heads = self.sync().and_then(|()| match self.ranks.is_first() {
            true => Ok(self.checkpoints.save_final(&*self.state.drafter)?),
            false => Ok(self.checkpoints.final_folder()),
        });
        let heads = self.ranks.agree(heads)?;
        Ok(match self.stopped_early() {
            Some(so_far) => RunOutcome::StoppedEarly { heads, step: self.state.step, so_far },
            None => RunOutcome::Finished(heads),
        })
    }

    /// The best evaluation, if patience ran out before the last step.
    fn stopped_early(&self) -> Option<BestSoFar> {
        let so_far = self.state.best.filter(|so_far| so_far.exhausts(self.plan().train.patience));
        so_far.filter(|_| self.state.step < self.checked.total_steps)
    }

    fn plan(&self) -> &'r TrainPlan {
        &self.checked.plan
    }

    fn step(
        &mut self,
        batches: &mut impl Iterator<Item = Result<Vec<FedBatch>, TrainError>>,
    ) -> Result<MetricsLine, TrainError> {
        let (began, plan, step) = (Instant::now(), self.plan(), self.state.step);
        let (batches, counts) = self.counted(batches.next().expect("batches for every step"))?;
        // AdamW makes steps of one size, however few rows they have (linear scaling, arXiv 1706.02677 section 2.1).
        let factor = plan.schedule.factor(step, self.checked.total_steps) * self.checked.fraction_of_step(step);
        let weights = StepWeights {
            loss: &plan.loss,
            lambda0: self.lambda0(),
            rate: plan.learning_rate * factor,
            max_grad_norm: plan.max_grad_norm,
        };
        let work = format!("training step {}", step + 1);
        let share = StepShare { batches: &batches, counts: &counts, ranks: self.ranks };
        let outcome = guard(&work, || train_step(&mut self.backbone, &mut self.state, share, &weights))??;
        self.report_cache();
        let mut line = self.line(MetricsSplit::Train, self.state.tokens, &outcome.metrics);
        line.update = Some(UpdateLine {
            lr: weights.rate,
            heads_lr: weights.rate * plan.heads_rate_factor,
            lambda0: weights.lambda0,
            grad_norm: outcome.grad_norm,
            tokens_per_second: outcome.metrics.tokens as f64 / began.elapsed().as_secs_f64(),
            memory_bytes: self.checked.stages.devices().filter_map(memory::in_use).max(),
        });
        Ok(line)
    }

    /// This process's batches of a step, and the targets of all processes' batches.
    fn counted(&self, batches: Result<Vec<FedBatch>, TrainError>) -> Result<(Vec<FedBatch>, TargetCounts), TrainError> {
        let mut counts = TargetCounts::new(self.state.drafter.reads().levels);
        batches.iter().flatten().for_each(|batch| counts.add(&batch.batch, &batch.targets));
        let (batches, counts) = self.ranks.agree_and_sum(batches, counts.numbers())?;
        Ok((batches, TargetCounts::from_numbers(&counts)))
    }

    fn after_step(&mut self, line: &MetricsLine) -> Result<(), TrainError> {
        let (step, train) = (self.state.step, &self.plan().train);
        let last = step == self.checked.total_steps;
        let is_logged = last || step.is_multiple_of(train.log_every.get());
        let logged = if is_logged { self.append(line) } else { Ok(()) };
        (self.emit)(RunEvent::Stepped(line));
        if let Some(loss) = self.watch.after(line) {
            let learning_rate = self.plan().learning_rate;
            (self.emit)(RunEvent::LossRisen { loss, step, learning_rate });
        }
        let due = train.eval_every.is_some_and(|every| step.is_multiple_of(every.get()));
        // Rank 0 takes part in the evaluation also if it could not write the line: the others wait for it there.
        let evaluated = if due || last { self.evaluate() } else { Ok(()) };
        logged.and(evaluated)
    }

    /// Writes a line to the logs, if this is rank 0.
    fn append(&mut self, line: &MetricsLine) -> Result<(), TrainError> {
        Ok(self.log.iter_mut().try_for_each(|log| log.append(line))?)
    }

    /// Evaluates on the validation rows, if there are any. After the last thing that the processes do together here, rank 0 may fail alone.
    fn evaluate(&mut self) -> Result<(), TrainError> {
        let Some(validation) = &self.checked.validation else { return Ok(()) };
        let maker = self.backbone.batch_maker(&*self.state.drafter, MetricsSplit::Validation);
        let mut metrics = self.evaluate_on(validation, maker)?;
        self.report_cache();
        if !metrics.loss.is_finite() {
            return Err(StepError::EvaluationNotFinite { step: self.state.step, value: metrics.loss }.into());
        }
        if let Some(answers) = self.answers.take() {
            let maker = self.backbone.batch_maker_without_states(&*self.state.drafter);
            let on_answers = self.evaluate_on(&answers, maker);
            self.answers = Some(answers);
            metrics.tokens_per_step = on_answers?.tokens_per_step;
        }
        let mut line = self.line(MetricsSplit::Validation, metrics.tokens, &metrics);
        // The evaluation before training is a reference, not a candidate.
        let judged = self.plan().train.keep_best.filter(|_| line.step > 0).and_then(|by| by.judged(&line));
        if let Some(evaluation) = judged {
            self.state.best = Some(BestSoFar::after(self.state.best, evaluation));
        }
        line.stopped_early = self.stopped_early().is_some();
        self.append(&line)?;
        (self.emit)(RunEvent::Evaluated(&line));
        if judged.is_some() { self.keep_best() } else { Ok(()) }
    }

    /// Losses, accuracies and tokens per step on some rows.
    fn evaluate_on(&mut self, rows: &Loader, maker: BatchMaker) -> Result<StepMetrics, TrainError> {
        let batches = rows.eval_share(self.ranks.share()).map(|batch| Ok(vec![batch.map_err(DataError::from)?]));
        let (backbone, drafter, loss) = (&mut self.backbone, &*self.state.drafter, &self.checked.plan.loss);
        // The peak of λ0 at every step: with a rising λ0 the loss of better heads would be higher.
        let (lambda0, ranks) = (self.checked.plan.heads_coefficient.peak, self.ranks);
        thread::scope(|scope| {
            let batches = maker.feed(scope, batches);
            guard("the evaluation", || evaluate::<TrainError>(backbone, drafter, batches, loss, lambda0, ranks))?
        })
    }

    /// Writes `best/` if the last evaluation is the best.
    fn keep_best(&mut self) -> Result<(), TrainError> {
        let Some(BestSoFar { best, evaluations_since: 0 }) = self.state.best else { return Ok(()) };
        check_finite(&self.state)?;
        if self.ranks.is_first() {
            let saved = self.checkpoints.save_best(&*self.state.drafter, best)?;
            (self.emit)(RunEvent::Best(best, &saved));
        }
        Ok(())
    }

    fn save(&mut self) -> Result<PathBuf, TrainError> {
        let synced = self.sync();
        self.ranks.agree(synced)?;
        let saved = self.checkpoints.save_step(&self.state, self.ranks);
        let saved = self.ranks.agree(saved.map_err(TrainError::from))?;
        (self.emit)(RunEvent::Saved(&saved));
        Ok(saved)
    }

    /// Before a checkpoint: checks that the parameters are finite, and syncs the cache and the log.
    fn sync(&mut self) -> Result<(), TrainError> {
        check_finite(&self.state)?;
        self.backbone.commit()?;
        Ok(self.log.iter().try_for_each(RunLog::sync)?)
    }

    /// Reports once that the cache of hidden states stores nothing more, and each damage.
    fn report_cache(&mut self) {
        if let Some((split, why)) = self.backbone.take_notice() {
            (self.emit)(RunEvent::CacheLacks(split, &why));
        }
    }

    /// λ0 after the finished steps.
    fn lambda0(&self) -> f64 {
        self.plan().heads_coefficient.at(self.state.step, self.checked.total_steps)
    }

    fn line(&self, split: MetricsSplit, tokens: u64, metrics: &StepMetrics) -> MetricsLine {
        let epoch = self.state.step as f64 / self.checked.steps_per_epoch() as f64;
        MetricsLine::new(split, self.state.step, epoch, tokens, metrics)
    }
}
