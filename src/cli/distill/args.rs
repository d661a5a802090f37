//! The command line of `medusa distill`, and what does not depend on who answers.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;

use clap::Args;

use super::server_flags::ServerFlags;
use crate::cli::engine::EngineFlags;
use crate::cli::numbers::{above_zero, probability, temperature};
use crate::cli::prompts::{self, FitFlags, TooLong};
use crate::cli::served::ServedFlags;
use crate::cli::{CommonFlags, Interrupted};
use crate::data::prompts::{Dialogue, PromptFile};
use crate::distill::output::{CONVERSATIONS_PER_SHARD, Output};
use crate::distill::provenance;
use crate::distill::render::Renderer;
use crate::distill::{self, DialogueTokens, DistillEnd, DistillSettings};
use crate::formats::provenance::{DistillProvenance, SHARD_FORMAT};
use crate::formats::share::Share;
use crate::hub;
use crate::numbers::{NonNegative, Probability};
use crate::plural::counted;

/// Default answers per conversation with --self-talk.
const SELF_TALK_TURNS: usize = 4;

/// Generate training data: the backbone's answers to prompts, as Parquet.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa distill --backbone B --prompts prompts.jsonl --out distilled \\\n    --max-new-tokens 500\n  medusa distill --endpoint http://127.0.0.1:8000 --model NAME --backbone B \\\n    --prompts prompts.jsonl --out distilled\n\nTrain on the output with [data] train = [\"distilled/*.parquet\"]; only the backbone's own tokens carry loss. --resume continues an interrupted run: the files are those of a run without interruption, with --endpoint as far as the server gives the same answers. Several machines can write to one folder with --shard 1/4, 2/4, …"
)]
pub struct DistillArgs {
    /// Backbone: a folder, a GGUF file or a Hugging Face Hub id (owner/name, owner/name@revision or owner/name:Q4_K_M). With --endpoint only its tokenizer, chat template and
    /// config are read; without it conversations have no tokens until training tokenises them.
    #[arg(long, value_name = "B", required_unless_present = "endpoint")]
    pub backbone: Option<PathBuf>,
    /// Prompts, as JSONL or a JSON array: text, messages, turns or token ids; - is stdin.
    #[arg(long, value_name = "F")]
    pub prompts: PathBuf,
    #[command(flatten)]
    pub(super) fit: FitFlags,
    /// Output folder.
    #[arg(long, help_heading = "Output", value_name = "DIR")]
    pub out: PathBuf,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, help_heading = "Answers", value_name = "T", default_value = "0.3", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: NonNegative,
    /// Nucleus sampling: draw from the smallest set of tokens whose probability reaches P.
    #[arg(long, help_heading = "Answers", value_name = "P", default_value = "1", value_parser = probability)]
    pub top_p: Probability,
    /// Maximum number of new tokens per answer.
    #[arg(long, help_heading = "Answers", value_name = "N", default_value = "1024", value_parser = above_zero::<NonZeroUsize>)]
    pub max_new_tokens: NonZeroUsize,
    /// Maximum number of answers per conversation [default: one per user turn; 4 with --self-talk].
    #[arg(long, help_heading = "Answers", value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub turns: Option<NonZeroUsize>,
    /// Let the backbone also write the user turns after the first, for models trained on both roles.
    #[arg(long, help_heading = "Answers", conflicts_with = "endpoint")]
    pub self_talk: bool,
    /// Decode with these heads, each conversation with its tree of guesses. The answers are sampled as without heads (rejection).
    #[arg(long, value_name = "H", conflicts_with = "endpoint")]
    pub heads: Option<PathBuf>,
    /// Tree of guesses: a file from `medusa tree`, or dynamic:N for the N likeliest guesses of each step [default: a chain of each
    /// head's best guess].
    #[arg(long, value_name = "T", requires = "heads")]
    pub tree: Option<PathBuf>,
    /// Conversations decoded together [default: as many as the free memory holds, at most 32 on a CPU and 256 on a GPU]. On a CPU the
    /// answers do not depend on the batch size, with --engine tch up to 64.
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>, conflicts_with = "endpoint")]
    pub batch_size: Option<NonZeroUsize>,
    /// Process only this share of the prompts: every N-th one, starting with the I-th (1-based).
    #[arg(long, help_heading = "Output", value_name = "I/N", default_value = "1/1")]
    pub shard: Share,
    /// Continue an interrupted run in --out.
    #[arg(long, help_heading = "Output")]
    pub resume: bool,
    #[command(flatten)]
    pub(in crate::cli) server: ServerFlags,
    #[command(flatten)]
    pub(super) engine: EngineFlags,
    #[command(flatten)]
    pub(super) served: ServedFlags,
}

/// Reports what a resumed run continues.
pub(super) fn say_resumed(output: &Output, common: &CommonFlags) {
    if output.kept() > 0 {
        common.say(format_args!("resuming after {} of {} conversations", output.kept(), output.conversations()));
    }
    if output.damaged() > 0 {
        let lines = counted(output.damaged(), "line");
        common.say(format_args!("{lines} of the journal cannot be read: their conversations are decoded again"));
    }
}

/// The prompts of `--prompts`: how many are answered, and how many are skipped because they do not fit.
pub(super) struct PromptsUsed<'a> {
    pub(super) file: &'a PromptFile,
    pub(super) conversations: usize,
    pub(super) too_long: usize,
}

impl DistillArgs {
    /// The prompts that leave room for an answer, and the tokens of each.
    pub(super) fn fitting(
        &self,
        dialogues: Vec<Dialogue>,
        renderer: Option<&Renderer>,
        settings: &DistillSettings,
        common: &CommonFlags,
    ) -> anyhow::Result<(Vec<Dialogue>, Vec<DialogueTokens>)> {
        if let Some(renderer) = renderer {
            let openings = dialogues.iter().filter_map(|dialogue| dialogue.questions.opening());
            prompts::say_unread(openings, renderer.template, common);
        }
        let tokens = distill::check(&dialogues, renderer, settings)?;
        let all = dialogues.into_iter().zip(tokens);
        let (fit, others): (Vec<_>, Vec<_>) = all.partition(|(_, tokens)| tokens.first < settings.context);
        let too_long =
            others.into_iter().map(|(dialogue, tokens)| TooLong { place: Some(dialogue.place), length: tokens.first });
        self.fit.refuse_or_say(&too_long.collect::<Vec<_>>(), fit.len(), settings.context, common)?;
        Ok(fit.into_iter().unzip())
    }

    pub(super) fn settings(&self, context: usize, common: &CommonFlags) -> DistillSettings {
        let all = if self.self_talk { SELF_TALK_TURNS } else { usize::MAX };
        DistillSettings {
            max_new_tokens: self.max_new_tokens,
            turns: self.turns.unwrap_or(NonZeroUsize::new(all).expect("above 0")),
            self_talk: self.self_talk,
            seed: common.seed,
            context,
            max_refused: 0,
        }
    }

    /// An error if the user stopped the run.
    pub(super) fn check_ended(&self, end: DistillEnd, output: &Output) -> Result<(), Interrupted> {
        match end {
            DistillEnd::Whole => Ok(()),
            DistillEnd::Stopped => {
                let (kept, all, folder) = (output.kept(), output.conversations(), self.out.display());
                Err(Interrupted(format!(
                    "interrupted: {kept} of {all} conversations are saved in {folder}; continue with --resume"
                )))
            }
        }
    }

    /// What flags and prompts decide, whoever answers.
    pub(super) fn provenance(&self, prompts: &PromptsUsed, common: &CommonFlags) -> DistillProvenance {
        DistillProvenance {
            shard_format: SHARD_FORMAT,
            program_version: env!("CARGO_PKG_VERSION"),
            model: None,
            endpoint: None,
            server_context: None,
            backbone: self.backbone.as_deref().map(hub::name_of),
            backbone_revision: self.backbone.as_deref().and_then(provenance::revision),
            backbone_sha256: None,
            tokenizer_sha256: None,
            chat_template_sha256: None,
            prompts: prompts.file.name().display().to_string(),
            prompts_sha256: prompts.file.sha256(),
            conversations: prompts.conversations,
            too_long: prompts.too_long,
            share: self.shard.to_string(),
            conversations_per_file: CONVERSATIONS_PER_SHARD,
            device: None,
            dtype: None,
            quantization: None,
            temperature: self.temperature.get(),
            top_p: self.top_p.get(),
            max_new_tokens: self.max_new_tokens.get(),
            max_context: self.engine.max_context.map(NonZeroU32::get),
            turns: self.turns.map(NonZeroUsize::get),
            self_talk: self.self_talk,
            seed: common.seed,
            heads: None,
            heads_sha256: None,
            adapter_sha256: None,
            acceptance: None,
            tree_sha256: None,
            engine: None,
        }
    }
}
