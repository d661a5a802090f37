//! Training: from a recipe's rows to heads, resumable from every checkpoint.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::formats::best::BestBy;

pub mod backbone_pass;
pub mod checked;
pub mod checkpoint;
pub mod device_room;
pub mod divergence;
pub mod draft_vocabulary;
pub mod duration;
pub mod error;
pub mod fed_batch;
pub mod feed;
mod finished;
pub mod gathered_texts;
pub mod hidden_states;
mod loading;
pub mod log;
pub mod memory_plan;
pub mod next_tokens;
pub mod own_answers;
pub mod patience;
pub mod plan;
pub mod provenance;
pub mod ranks;
mod recipe_changes;
pub mod run;
pub mod run_folder;
pub mod same_run;
pub mod schedule;
pub mod state;
pub mod step;
pub mod target_rule;
pub mod targets;
pub mod tensorboard;
pub mod token_pairs;
pub mod training_loop;

/// `[train]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    pub output_dir: PathBuf,
    /// Passes over the training rows. Exactly one of `epochs` and `max_steps` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<NonZeroUsize>,
    /// Optimizer steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<NonZeroUsize>,
    /// Sequences per forward pass.
    pub micro_batch_size: NonZeroUsize,
    /// Forward passes per optimizer step.
    #[serde(default = "count::<1>")]
    pub gradient_accumulation_steps: NonZeroUsize,
    /// Seeds the order of rows, the split of `data.validation_fraction`, and all other random draws.
    #[serde(default = "forty_two")]
    pub seed: u64,
    /// Optimizer steps between lines of metrics.jsonl.
    #[serde(default = "count::<1>")]
    pub log_every: NonZeroUsize,
    /// Optimizer steps between checkpoints.
    #[serde(default = "count::<200>")]
    pub save_every: NonZeroUsize,
    /// Optimizer steps between evaluations; absent: only at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_every: Option<NonZeroUsize>,
    /// Prompts of the validation rows that the backbone answers before the first step: evaluations measure `tokens_per_step` on the answers. 0: on the
    /// rows as they are. Absent: 40, or 0 where this backbone wrote the rows or cannot answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_answers: Option<usize>,
    /// Keeps the heads with the best evaluation so far in `best/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_best: Option<BestBy>,
    /// Stops after so many evaluations in a row that are no better than the best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<NonZeroUsize>,
    /// The number of newest checkpoints to keep; older ones are removed.
    #[serde(default = "count::<3>")]
    pub keep_checkpoints: NonZeroUsize,
    /// Medusa-2: keeps only the inputs of decoder layers for the backward pass and recomputes each layer there. Costs
    /// about a third more compute for a fraction of the memory; the results are bit-identical.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
    /// Folder of a cache of the backbone's hidden states, so that later epochs and later runs on the same rows need not
    /// run the backbone. It takes hidden_size × bytes of backbone.dtype for each token from which a head learns (4096 ×
    /// 2 = 8 KiB a token for a 7B model in bfloat16); `--check` prints the total. Files of other rows or backbones in
    /// the folder are not removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_state_cache: Option<PathBuf>,
}

fn count<const N: usize>() -> NonZeroUsize {
    NonZeroUsize::new(N).expect("a constant above 0")
}

fn forty_two() -> u64 {
    42
}
