//! Prints the tokens of texts, for scripts/oracles/check_tokenizers.py: a JSON string on each line of stdin, and for each a line of
//! `{"ids": […], "around": […], "places": [[start, end], …], "text": "…"}`. `around` has what the tokenizer puts around a
//! text, `places` are bytes of it, and `text` is decoded from `ids`, special tokens left out.
//!
//! ```text
//! cargo run --example token_ids -- BACKBONE < texts.jsonl
//! ```

use std::io::{self, BufRead, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use medusa::data::tokenize::TextTokenizer;
use serde_json::{Value, json};

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).context("usage: token_ids BACKBONE < texts.jsonl")?;
    let start = Instant::now();
    let tokenizer = TextTokenizer::load(Path::new(&folder))?;
    writeln!(io::stderr(), "loaded in {:.3} s", start.elapsed().as_secs_f64())?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    for line in io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        writeln!(out, "{}", tokens(&tokenizer, &text)?)?;
    }
    Ok(out.flush()?)
}

fn tokens(tokenizer: &TextTokenizer, text: &str) -> Result<Value> {
    let (ids, places) = tokenizer.encode_with_places(text)?;
    let places: Vec<[usize; 2]> = places.into_iter().map(|place| [place.start, place.end]).collect();
    let (around, decoded) = (tokenizer.encode(text, true)?, tokenizer.decode(&ids, true)?);
    Ok(json!({"ids": ids, "around": around, "places": places, "text": decoded}))
}
