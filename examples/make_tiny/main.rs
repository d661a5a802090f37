//! Regenerates the embedded default: the conversations, the tokenizer and the trained backbone in data/tiny.
//!
//! ```text
//! cargo run --release --example make_tiny                    # everything: about 20 minutes on 2 cores
//! cargo run --release --example make_tiny -- --data-only     # conversations and tokenizer: seconds
//! ```
//!
//! Everything is seeded. The texts and the tokenizer are the same on every machine; the weights are the same on the
//! same processor with the same number of threads, and slightly different elsewhere (the order of floating point sums).
#![expect(clippy::print_stderr, reason = "a program: its progress goes to the terminal")]

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use medusa::files::write_atomic;
use tokenizers::Tokenizer;

mod backbone;
mod conversations;
mod knowledge;
mod language;
mod numbers;
mod tokenizer;

use conversations::{Conversation, ConversationSet, Sizes};

const SEED: u64 = 42;
/// Conversations of train.jsonl whose questions are the seeds of self-distillation.
const SEEDS: usize = 1_500;
const SIZES: Sizes = Sizes { train: 10_000, eval: 200, prompts: 40 };

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let data_only = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--data-only"] => true,
        _ => bail!("usage: make_tiny [--data-only]"),
    };
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/tiny");
    let set = ConversationSet::draw(&SIZES, SEED);
    let tokenizer = write_texts(&folder, &set)?;
    if data_only {
        return Ok(());
    }
    backbone::make(&folder.join("backbone"), &tokenizer, &set, SEED)
}

/// Writes the conversations and the tokenizer.
fn write_texts(folder: &Path, set: &ConversationSet) -> Result<Tokenizer> {
    write(&folder.join("train.jsonl"), &lines(&set.train, Conversation::text_row))?;
    write(&folder.join("eval.jsonl"), &lines(&set.eval, Conversation::text_row))?;
    write(&folder.join("seeds.jsonl"), &lines(&set.train[..SEEDS], Conversation::seed_row))?;
    write(&folder.join("prompts.jsonl"), &lines(&set.prompts, Conversation::prompt_row))?;
    let turns = set.train.iter().flat_map(|conversation| &conversation.turns);
    let texts: Vec<String> = turns.flat_map(|turn| [turn.question.clone(), turn.answer.clone()]).collect();
    let tokenizer = tokenizer::train(&texts).map_err(anyhow::Error::from_boxed)?;
    let json = tokenizer.to_string(true).map_err(anyhow::Error::from_boxed)?;
    write(&folder.join("backbone/tokenizer.json"), &json)?;
    write(&folder.join("backbone/tokenizer_config.json"), &pretty(&tokenizer::config()))?;
    report_sizes(&tokenizer, set)?;
    Ok(tokenizer)
}

fn report_sizes(tokenizer: &Tokenizer, set: &ConversationSet) -> Result<()> {
    let mut longest = 0;
    let mut all = 0;
    for conversation in &set.train {
        let length = backbone::encode(tokenizer, conversation)?.len();
        longest = longest.max(length);
        all += length;
    }
    eprintln!(
        "{} pieces; {} training rows of {all} tokens (longest {longest}), {} to evaluate on, {} prompts",
        tokenizer.get_vocab_size(true),
        set.train.len(),
        set.eval.len(),
        set.prompts.len()
    );
    Ok(())
}

fn lines(conversations: &[Conversation], row: impl Fn(&Conversation) -> String) -> String {
    conversations.iter().map(row).collect()
}

/// JSON in Hugging Face's formatting.
pub(crate) fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Writes a text file and the folders above it.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().context("a file lies in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    write_atomic(path, |out| out.write_all(text.as_bytes())).with_context(|| format!("cannot write {}", path.display()))
}
