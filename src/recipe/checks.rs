//! Checks of a recipe's values against each other.

use super::Recipe;
use super::heads::HeadsTable;
use super::mistakes::Findings;
use super::stage::Stage;
use crate::bounds::{BATCH_ROWS, MEDUSA_HEADS, MEDUSA_LAYERS};
use crate::data::long_rows::LongRows;
use crate::dtype::Dtype;
use crate::numbers::Fraction;
use crate::plural::counted;
use crate::torch::optim::OptimizerName;
use crate::train::TrainConfig;
use crate::train::schedule::ScheduleName;

impl Recipe {
    /// Checks every combination of values that does not depend on files.
    pub(super) fn check_values(&self, findings: &mut Findings<'_>) {
        findings.exclusive("train.epochs", "train.max_steps");
        findings.exclusive("data.validation", "data.validation_fraction");
        findings.exclusive("schedule.warmup_steps", "schedule.warmup_ratio");
        self.check_stage(findings);
        self.check_targets(findings);
        self.check_schedule(findings);
        self.heads.check_keys(findings);
        check_w2(&self.heads, findings);
        self.check_validation(findings);
        self.check_mix(findings);
        self.check_hidden_states(findings);
        self.check_answers(findings);
        self.check_float64(findings);
        self.check_best(findings);
        self.check_batch(findings);
        self.check_sizes_of_heads(findings);
        if self.heads.init_from.is_none() || findings.text().key("heads.medusa_num_heads").is_some() {
            self.check_lengths(findings);
        }
        self.check_warmup(findings);
    }

    /// More would be a slip: their memory could not even be planned.
    fn check_sizes_of_heads(&self, findings: &mut Findings<'_>) {
        let HeadsTable { medusa_num_heads, medusa_num_layers, .. } = self.heads;
        for (key, count, most) in [
            ("heads.medusa_num_heads", medusa_num_heads, MEDUSA_HEADS),
            ("heads.medusa_num_layers", medusa_num_layers, MEDUSA_LAYERS),
        ] {
            if count.get() > most {
                findings.clash(key, count, format!("at most {most}"));
            }
        }
    }

    /// The rows per optimizer step must not overflow, nor their bytes in the plan of the memory.
    fn check_batch(&self, findings: &mut Findings<'_>) {
        let (rows, steps) = (self.train.micro_batch_size, self.train.gradient_accumulation_steps);
        if rows.get() > BATCH_ROWS {
            findings.clash("train.micro_batch_size", rows, format!("at most {BATCH_ROWS}"));
        } else if rows.checked_mul(steps).is_none() {
            let expected = format!("less: the product with train.gradient_accumulation_steps = {steps} overflows");
            findings.clash("train.micro_batch_size", rows, expected);
        }
    }

    /// Rejects keys that only the other stage supports.
    fn check_stage(&self, findings: &mut Findings<'_>) {
        if findings.are_as_written(&["stage.medusa2.lora", "train.recompute", "backbone.quantization"]) {
            match &self.stage {
                Stage::Medusa1(_) => self.check_medusa1(findings),
                Stage::Medusa2(_) => self.check_medusa2(findings),
            }
        }
    }

    fn check_medusa1(&self, findings: &mut Findings<'_>) {
        if self.optimizer.medusa_lr_multiplier.is_some() {
            findings.needs("optimizer.medusa_lr_multiplier", "[stage.medusa2]: in Medusa-1 only heads are trained");
        }
        if self.train.recompute {
            findings.needs("train.recompute", "[stage.medusa2]: Medusa-1 stores no activations of the backbone");
        }
    }

    fn check_medusa2(&self, findings: &mut Findings<'_>) {
        let (has_lora, is_quantized) = (self.stage.lora().is_some(), self.backbone.quantization.is_some());
        if self.train.hidden_state_cache.is_some() {
            findings.needs(
                "train.hidden_state_cache",
                "[stage.medusa1]: the hidden states of a backbone in training change at every step",
            );
        }
        if is_quantized && !has_lora {
            findings.needs(
                "backbone.quantization",
                "[stage.medusa2.lora]: quantised weights cannot be trained, only adapters on them",
            );
        } else if is_quantized && !self.train.recompute {
            findings.needs(
                "backbone.quantization",
                "train.recompute = true: without it every layer's dequantised weights stay in memory for the backward pass",
            );
        }
        if self.stage.distils_itself() && !has_lora {
            findings.needs(
                "stage.medusa2.self_distillation",
                "[stage.medusa2.lora]: the teacher is the backbone with its adapters off",
            );
        }
    }

    fn check_targets(&self, findings: &mut Findings<'_>) {
        let has_labels_only = self.loss.on_unlabelled && !self.loss.targets.are_soft();
        if has_labels_only && findings.are_as_written(&["loss.targets"]) {
            findings.needs(
                "loss.on_unlabelled",
                "loss.targets = \"backbone\" or a mix: without a label there is no other target",
            );
        }
    }

    /// A constant rate has no smallest one.
    fn check_schedule(&self, findings: &mut Findings<'_>) {
        if self.schedule.min_ratio != Fraction::ZERO && self.schedule.name == ScheduleName::Constant {
            findings.needs(
                "schedule.min_ratio",
                "schedule.name = \"cosine\" or \"linear\": a constant rate stays at its peak",
            );
        }
    }

    fn check_validation(&self, findings: &mut Findings<'_>) {
        let has_rows = self.data.hidden_states.is_some() && findings.text().key("data.train").is_none();
        if self.data.train.is_empty() && !has_rows && findings.are_as_written(&["data.train"]) {
            findings.clash("data.train", "[]", "at least one file or glob".into());
        }
        if !findings.are_as_written(&["data.validation", "data.validation_fraction"]) {
            return;
        }
        let empty = findings.text().key("data.validation").is_some() && self.data.validation.is_empty();
        if empty {
            findings.clash("data.validation", "[]", "at least one file or glob; or remove the key".into());
        }
        match (self.data.validation_fraction, self.train.eval_every) {
            (Some(fraction), _) if fraction.get() == 0.0 => {
                findings.clash("data.validation_fraction", 0, "a number above 0; or remove the key".into());
            }
            (None, Some(_)) if self.data.validation.is_empty() && !empty => {
                findings.needs("train.eval_every", "rows: data.validation or data.validation_fraction");
            }
            _ => {}
        }
    }

    /// Answers that a recipe asks for need prompts and a backbone that decodes.
    fn check_answers(&self, findings: &mut Findings<'_>) {
        if self.train.eval_answers.is_none_or(|answers| answers == 0) {
            return;
        }
        if self.data.validation.is_empty() && self.data.validation_fraction.is_none() {
            findings.needs("train.eval_answers", "rows: data.validation or data.validation_fraction");
        }
        findings.exclusive("train.eval_answers", "data.hidden_states");
        findings.exclusive("train.eval_answers", "backbone.device_map");
    }

    /// Only heads train on hidden states of a server. Their rows are whole.
    fn check_hidden_states(&self, findings: &mut Findings<'_>) {
        let keys = ["data.hidden_states", "data.long_rows", "backbone.quantization", "stage"];
        if self.data.hidden_states.is_none() || !findings.are_as_written(&keys) {
            return;
        }
        if matches!(self.stage, Stage::Medusa2(_)) {
            findings.needs(
                "data.hidden_states",
                "[stage.medusa1]: in Medusa-2 the backbone is trained, so it must compute its hidden states itself",
            );
        }
        findings.exclusive("data.hidden_states", "train.hidden_state_cache");
        findings.exclusive("data.hidden_states", "backbone.device_map");
        if let Some(quantization) = self.backbone.quantization {
            let expected = "no quantisation with data.hidden_states: the server computed them with its own weights";
            findings.clash("backbone.quantization", format!("\"{quantization}\""), expected.into());
        }
        let long_rows = self.data.long_rows;
        if findings.text().key("data.long_rows").is_some() && long_rows == LongRows::Truncate {
            let expected = "\"drop\" with data.hidden_states, whose rows are neither split nor cut; or remove the key";
            findings.clash("data.long_rows", "\"truncate\"", expected.into());
        }
        let is_alone = self.data.train.is_empty();
        if is_alone && !self.data.validation.is_empty() {
            findings.needs(
                "data.validation",
                "data.train: without it all files of data.hidden_states are trained on; or hold some out with data.validation_fraction",
            );
        }
    }

    /// In float64 nothing is rounded to fewer bits on the way.
    fn check_float64(&self, findings: &mut Findings<'_>) {
        let rounding = [
            ("optimizer.name", self.optimizer.name == OptimizerName::AdamW8bit, "optimizer.name = \"adamw8bit\""),
            ("backbone.quantization", self.backbone.quantization.is_some(), "backbone.quantization"),
            ("data.hidden_states", self.data.hidden_states.is_some(), "data.hidden_states"),
        ];
        for (key, _, what) in rounding.into_iter().filter(|(_, rounds, _)| *rounds) {
            if self.backbone.dtype == Dtype::Float64 && findings.are_as_written(&["backbone.dtype", key]) {
                let expected = format!("\"float32\" or 16 bits with {what}, whose numbers have fewer bits");
                findings.clash("backbone.dtype", "\"float64\"", expected);
            }
        }
    }

    /// One weight for each entry, and an order in which to draw from them.
    fn check_mix(&self, findings: &mut Findings<'_>) {
        let Some(mix) = self.data.mix.as_ref().filter(|_| findings.are_as_written(&["data.train", "data.mix"])) else {
            return;
        };
        let (weights, entries) = (mix.len(), self.data.train.len());
        if weights != entries {
            let expected = format!("{}, one for each entry of data.train", counted(entries, "weight"));
            findings.clash("data.mix", counted(weights, "weight"), expected);
        }
        if !self.data.shuffle {
            findings.needs("data.mix", "data.shuffle = true: each epoch draws another part of the larger sets");
        }
    }

    /// What is kept, and when a run stops early, depends on evaluations during the run.
    fn check_best(&self, findings: &mut Findings<'_>) {
        if !findings.are_as_written(&["train.keep_best", "train.eval_every"]) {
            return;
        }
        let TrainConfig { keep_best, patience, eval_every, .. } = self.train;
        match (keep_best, patience, eval_every) {
            (None, Some(_), _) => {
                findings.needs("train.patience", "train.keep_best, which says what a better evaluation is");
            }
            (Some(_), _, None) => {
                findings.needs("train.keep_best", "train.eval_every, and data.validation or data.validation_fraction");
            }
            _ => {}
        }
    }

    /// Every head has a target. Checked again with the defaults that depend on files.
    pub(super) fn check_lengths(&self, findings: &mut Findings<'_>) {
        let (heads, length) = (self.heads.levels().get(), self.data.max_length.get());
        if length < heads + 2 && findings.are_as_written(&["heads.medusa_num_heads", "data.max_length"]) {
            // head k (1-based) at position 0 predicts token k + 1
            let expected = format!("at least {}, so that each of {heads} heads has a target", heads + 2);
            findings.clash("data.max_length", length, expected);
        }
    }

    fn check_warmup(&self, findings: &mut Findings<'_>) {
        if let (Some(steps), Some(warmup_steps)) = (self.train.max_steps, self.schedule.warmup_steps)
            && warmup_steps > steps.get()
        {
            let expected = format!(
                "at most {steps}, the steps of the run (train.max_steps); or raise train.max_steps, or remove schedule.warmup_steps"
            );
            findings.clash("schedule.warmup_steps", warmup_steps, expected);
        }
    }
}

/// Heads that use the LM head have no W2 that could be smaller.
fn check_w2(heads: &HeadsTable, findings: &mut Findings<'_>) {
    let none = "with heads.shared_lm_head = true heads have no W2";
    if !heads.shared_lm_head {
        return;
    }
    if let Some(rank) = heads.w2_rank {
        findings.clash("heads.w2_rank", rank, format!("no rank: {none}"));
    }
    if let Some(size) = heads.draft_vocab_size {
        findings.clash("heads.draft_vocab_size", size, format!("no size: {none}"));
    }
    if heads.shared_w2 {
        findings.clash("heads.shared_w2", true, format!("false: {none}"));
    }
}
