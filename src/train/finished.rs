//! Whether a run that has finished goes on because its recipe asks for more, and whether a run can go on from its checkpoints.

use std::path::Path;

use crate::files::{failed, remove_folder};
use crate::formats::metrics::MetricsFile;
use crate::formats::run_folder::{BEST, FINAL, METRICS, finished_at};
use crate::train::checkpoint;
use crate::train::error::TrainError;
use crate::train::plan::TrainPlan;

/// What an existing run's folder says about its progress, and what the recipe asks for now.
#[derive(Debug)]
pub(super) struct RunProgress<'r> {
    plan: &'r TrainPlan,
    /// Optimizer steps that the recipe asks for.
    asked: usize,
    /// The newest checkpoint's step.
    saved: Option<usize>,
    /// The last step in metrics.jsonl; 0 if there is none.
    logged: usize,
}

impl<'r> RunProgress<'r> {
    pub(super) fn read(plan: &'r TrainPlan, asked: usize) -> Result<Self, TrainError> {
        let run = plan.train.output_dir.as_path();
        let logged = MetricsFile::read(&run.join(METRICS))?.lines;
        let logged = logged.iter().map(|(_, line)| line.step).max().unwrap_or(0);
        Ok(Self { plan, asked, saved: checkpoint::newest_step(run)?, logged })
    }

    /// The last step of a run that has finished and does not go on; `None` if there is no such run.
    pub(super) fn finished(&self) -> Result<Option<usize>, TrainError> {
        let made = self.made();
        let ends = self.run().join(FINAL).exists() && made <= self.asked;
        Ok((ends && (made == self.asked || !self.can_go_on(made, false)?)).then_some(made))
    }

    /// Steps made so far.
    fn made(&self) -> usize {
        self.logged.max(self.saved.unwrap_or(0))
    }

    /// Moves `final/` aside if the recipe asks for more steps than the run has made. Call it before recipe.toml is written: if we crash in
    /// between, the run goes on with either recipe.
    ///
    /// # Errors
    /// [`TrainError::OutputTaken`] if the run cannot go on as the recipe asks; nothing is changed then.
    pub(super) fn reopen(&self, length_changed: bool, saved_every: usize) -> Result<(), TrainError> {
        let finished = self.run().join(FINAL);
        if !finished.exists() {
            self.check_checkpoints(saved_every)?;
            return self.check_steps(self.saved.unwrap_or(0));
        }
        let made = self.made();
        self.check_steps(made)?;
        if made == self.asked || !self.can_go_on(made, length_changed)? {
            return Ok(());
        }
        checkpoint::verify_newest(self.run())?;
        let aside = self.run().join(finished_at(made));
        if aside.exists() {
            remove_folder(&aside).map_err(failed("remove", &aside))?;
        }
        Ok(std::fs::rename(&finished, &aside).map_err(failed("rename", &finished))?)
    }

    /// Whether more steps can follow the last one. An error if they cannot and the recipe was changed to have them.
    fn can_go_on(&self, made: usize, length_changed: bool) -> Result<bool, TrainError> {
        let no = |why: String| if length_changed { Err(self.taken(why)) } else { Ok(false) };
        if self.saved != Some(made) {
            return no(format!(
                "holds a finished run without a checkpoint of its last step, so it cannot go on; start another one from its heads: \
                 heads.init_from = {:?}",
                self.run().join(FINAL).display().to_string()
            ));
        }
        let best = checkpoint::newest_best(self.run())?;
        match best.filter(|so_far| so_far.exhausts(self.plan.train.patience)) {
            Some(so_far) => no(format!(
                "holds a run whose patience is used up: its last {} evaluations were no better than the one after step {}; raise or \
                 remove train.patience",
                so_far.evaluations_since, so_far.best.step
            )),
            None => Ok(true),
        }
    }

    fn check_steps(&self, made: usize) -> Result<(), TrainError> {
        match made > self.asked {
            true => Err(self.taken(format!(
                "holds a run of {made} optimizer steps, and the recipe now ends after {}; raise train.epochs or train.max_steps",
                self.asked
            ))),
            false => Ok(()),
        }
    }

    /// A run that saved checkpoints and lost them must not start from step 0 in the same folder.
    fn check_checkpoints(&self, saved_every: usize) -> Result<(), TrainError> {
        let has_saved = self.logged > saved_every || (self.logged == 0 && self.run().join(BEST).exists());
        match self.saved.is_none() && has_saved {
            true => Err(self.taken(format!(
                "holds a run of {} steps or more, and none of its checkpoints (step-*) is left: put one back, or train in another folder",
                self.logged.max(1)
            ))),
            false => Ok(()),
        }
    }

    fn run(&self) -> &'r Path {
        &self.plan.train.output_dir
    }

    fn taken(&self, why: String) -> TrainError {
        TrainError::OutputTaken { path: self.run().into(), why }
    }
}
