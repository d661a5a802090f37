//! Loads a backbone and its heads, continues a text, and prints how many tokens each decoding step committed:
//!
//! ```text
//! cargo run --release --example generate -- data/tiny/backbone "Once upon a time" [HEADS [TREE]]
//! ```
#![expect(clippy::print_stdout, reason = "an example")]

use std::ops::ControlFlow;

use anyhow::{Context, Result};
use medusa::data::prompts::{PromptInput, to_ids};
use medusa::data::tokenize::wide;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::session::{SessionOptions, Silent};
use medusa::tree::accept::Acceptance;

/// The most new tokens.
const LONGEST: usize = 128;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: generate BACKBONE PROMPT [HEADS [TREE]]";
    let (backbone, prompt) = (arguments.next().context(usage)?, arguments.next().context(usage)?);
    let options = SessionOptions {
        backbone: backbone.into(),
        heads: arguments.next().map(Into::into),
        tree: arguments.next().map(Into::into),
        ..SessionOptions::default()
    };
    let session = options.load(&Silent)?;
    let ids = wide(&to_ids(&PromptInput::Text(prompt), &session.tokenizer, session.template.as_deref())?);
    let request = Request::greedy(&ids, LONGEST);
    let mut decoding = options.decode_loop(&session, Acceptance::Greedy, &request, &Silent)?;
    let generation = decoding.decode(Drafting::On, &request, &mut |_| ControlFlow::Continue(()))?;
    println!("{}", session.text(&generation.new_ids)?);
    let tally = generation.tally();
    println!("{} tokens in {} steps: {:.2} tokens a step", tally.tokens, tally.steps, tally.tokens_per_step());
    Ok(())
}
