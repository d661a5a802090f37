//! `medusa generate`: decodes prompts, plainly or with heads, streaming as the tokens come.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use super::decoder::{Decoder, DecodingFlags, read_prompts};
use super::{CommonFlags, print_json};
use crate::data::tokenize::narrow;
use crate::decode::generate::{self, Generation, Medusa, Request};

/// Decode prompts; without --heads it is plain autoregressive decoding.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  medusa generate --backbone data/tiny/backbone --heads checkpoints/tiny_stage1/final \\\n    --tree tree.json --prompts data/tiny/prompts.jsonl"
)]
pub struct GenerateArgs {
    /// The backbone's folder.
    #[arg(long, value_name = "B")]
    pub backbone: PathBuf,
    /// The heads' folder, a run's `final/`.
    #[arg(long, value_name = "H")]
    pub heads: Option<PathBuf>,
    /// The tree of guesses [default: a chain of each head's best].
    #[arg(long, value_name = "T", requires = "heads")]
    pub tree: Option<PathBuf>,
    /// One prompt, raw text: only BOS is added.
    #[arg(long, value_name = "S", conflicts_with = "prompts", required_unless_present = "prompts")]
    pub prompt: Option<String>,
    /// JSONL of prompts, conversations, token ids or turns.
    #[arg(long, value_name = "F")]
    pub prompts: Option<PathBuf>,
    #[command(flatten)]
    #[expect(missing_docs, reason = "the help has the flags themselves")]
    pub decoding: DecodingFlags,
}

/// Decodes every prompt in turn.
///
/// # Errors
/// What is wrong with the command line, the backbone, the heads, the tree or a prompt.
pub fn run(args: &GenerateArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let acceptance = args.decoding.acceptance()?;
    let prompts = read_prompts(args.prompt.as_ref(), args.prompts.as_ref())?;
    let decoder = Decoder::load(&args.backbone, args.heads.as_ref(), args.tree.as_ref(), common)?;
    let medusa = decoder.medusa(acceptance)?;
    for (at, prompt) in prompts.iter().enumerate() {
        let answer = |ids: &[i64]| {
            let request = args.decoding.request(ids, common);
            let generation = match common.json {
                true => as_json(&decoder, medusa.as_ref(), &request)?,
                false => as_text(&decoder, medusa.as_ref(), &request, common)?,
            };
            Ok(generation.new_ids)
        };
        decoder.each_turn(&prompt.input, answer).with_context(|| format!("prompt {} of {}", at + 1, prompts.len()))?;
    }
    Ok(())
}

fn decode(
    decoder: &Decoder,
    medusa: Option<&Medusa>,
    request: &Request,
    on_tokens: &mut generate::OnTokens,
) -> anyhow::Result<Generation> {
    Ok(match medusa {
        Some(medusa) => generate::medusa(&decoder.backbone, medusa, request, on_tokens)?,
        None => generate::plain(&decoder.backbone, request, on_tokens)?,
    })
}

fn as_json(decoder: &Decoder, medusa: Option<&Medusa>, request: &Request) -> anyhow::Result<Generation> {
    let generation = decode(decoder, medusa, request, &mut |_| ControlFlow::Continue(()))?;
    let tally = generation.tally();
    print_json(&json!({
        "prompt_ids": request.prompt,
        "new_ids": generation.new_ids,
        "text": decoder.text(&generation.new_ids)?,
        "steps": tally.steps,
        "tokens_per_step": tally.tokens_per_step(),
        "accept_lengths": generation.accept_lengths,
        "seconds": (tally.prefill + tally.decoding).as_secs_f64(),
        "finish_reason": generation.finish_reason.name(),
    }))?;
    Ok(generation)
}

/// The text goes to stdout as it comes, what it took to stderr.
fn as_text(
    decoder: &Decoder,
    medusa: Option<&Medusa>,
    request: &Request,
    common: &CommonFlags,
) -> anyhow::Result<Generation> {
    let mut stream = decoder.tokenizer.stream_after(&narrow(request.prompt));
    let mut trouble = Ok(());
    let generation = decode(decoder, medusa, request, &mut |ids| {
        trouble = narrow(ids).into_iter().try_for_each(|id| show(stream.push(id)?));
        if trouble.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    trouble?;
    show(stream.finish()?)?;
    show(Some("\n".into()))?;
    let tally = generation.tally();
    common.say(format_args!(
        "[{} tokens in {} steps, {:.2} a step, {:.0} tokens/s, ended by {}]",
        tally.tokens,
        tally.steps,
        tally.tokens_per_step(),
        tally.tokens_per_second(),
        generation.finish_reason.name()
    ));
    Ok(generation)
}

fn show(piece: Option<String>) -> anyhow::Result<()> {
    let Some(piece) = piece else { return Ok(()) };
    let mut out = io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    Ok(out.flush()?)
}
