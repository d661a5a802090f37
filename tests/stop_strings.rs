//! Promise: generated text ends before its first stop string, even if that spans tokens; no part of a stop string is
//! printed, and no character is split.

use std::ops::ControlFlow;
use std::time::Duration;

use medusa::data::tokenize::TextTokenizer;
use medusa::decode::request::{FinishReason, Generation};
use medusa::decode::text::{FinishedText, TextOptions, stream_text};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::data::tokenizer_of;
use crate::decoding::World;

const PIECES: [&str; 8] = ["▁", "a", "b", "ab", "ba▁", "▁é", "aé", "bb"];
const FIRST: i64 = 3;
const BYTES: i64 = FIRST + PIECES.len() as i64;

fn tokenizer() -> TextTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    tokenizer_of(folder.path(), &PIECES)
}

/// Decodes these tokens with the given numbers of tokens per step; returns the text and the pieces in which it was
/// passed on.
fn reported(tokenizer: &TextTokenizer, ids: &[i64], steps: &[usize], stop: &[String]) -> (FinishedText, Vec<String>) {
    let (mut pieces, options) = (vec![], TextOptions { tokenizer, prompt: &[1, FIRST + 1], stop });
    let mut hear = |piece: &str| {
        pieces.push(piece.to_owned());
        ControlFlow::Continue(())
    };
    let reported = stream_text(options, &mut hear, |on_tokens| {
        let (mut new_ids, mut accept_lengths, mut sizes) = (vec![], vec![], steps.iter().cycle());
        let mut finish_reason = FinishReason::Length;
        while new_ids.len() < ids.len() && finish_reason == FinishReason::Length {
            let size = sizes.next().map_or(1, |&size| size).min(ids.len() - new_ids.len());
            let step = &ids[new_ids.len()..new_ids.len() + size];
            new_ids.extend(step);
            accept_lengths.push(size);
            if on_tokens(step).is_break() {
                finish_reason = FinishReason::Stopped;
            }
        }
        let (prefill, decoding) = (Duration::ZERO, Duration::ZERO);
        Ok(Generation {
            new_ids,
            scored: vec![],
            accept_lengths,
            cached: 0,
            proposed: 0,
            finish_reason,
            end: vec![],
            end_steps: 0,
            prefill,
            decoding,
        })
    });
    (reported.expect("known tokens"), pieces)
}

/// The text, and where each token's part of it ends; a token that completes no character ends where the next complete
/// character does.
fn ends(tokenizer: &TextTokenizer, ids: &[i64]) -> (String, Vec<usize>) {
    let mut stream = tokenizer.stream_after(&[1, 4]);
    let (mut text, mut ends) = (String::new(), vec![]);
    for (at, &id) in ids.iter().enumerate() {
        if let Some(piece) = stream.push(i32::try_from(id).expect("small")).expect("a known token") {
            text.push_str(&piece);
            ends.resize(at + 1, text.len());
        }
    }
    text.push_str(&stream.finish().expect("known tokens").unwrap_or_default());
    ends.resize(ids.len(), text.len());
    (text, ends)
}

/// The text before the stop string that is completed first.
fn before_stop<'t>(text: &'t str, stop: &[String]) -> Option<&'t str> {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    let cut = |end: usize| stop.iter().filter(|stop| text[..end].ends_with(*stop)).map(|stop| end - stop.len()).min();
    ends.filter_map(cut).next().map(|at| &text[..at])
}

fn ids() -> impl Strategy<Value = Vec<i64>> {
    let byte = |byte: u8| BYTES + i64::from(byte);
    let character = prop_oneof![
        6 => (FIRST..BYTES).prop_map(|id| vec![id]),
        1 => Just("é".bytes().map(byte).collect()),
        1 => Just("👍".bytes().map(byte).collect()),
        1 => any::<u8>().prop_map(move |b| vec![byte(b)]),
    ];
    proptest::collection::vec(character, 0..14).prop_map(|ids| ids.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_text_ends_before_its_first_stop_string(
        ids in ids(),
        steps in proptest::collection::vec(1usize..5, 1..4),
        stop in proptest::collection::vec("[ab é👍]{1,3}", 0..3),
    ) {
        let tokenizer = tokenizer();
        let (whole, ends) = ends(&tokenizer, &ids);
        let (reported, pieces) = reported(&tokenizer, &ids, &steps, &stop);
        let before = before_stop(&whole, &stop);
        let expected = before.unwrap_or(&whole);
        prop_assert_eq!(&reported.text, expected);
        prop_assert_eq!(pieces.concat(), expected, "what is told is the text, and nothing of the stop string");
        prop_assert!(pieces.iter().all(|piece| !piece.is_empty()));
        let kept = if before.is_some() { ends.iter().take_while(|&&end| end <= expected.len()).count() } else { ids.len() };
        prop_assert_eq!(&reported.generation.new_ids, &ids[..kept]);
        prop_assert_eq!(reported.generation.accept_lengths.iter().sum::<usize>(), kept);
        prop_assert!(reported.generation.accept_lengths.iter().all(|&length| length > 0));
        let reason = if before.is_some() { FinishReason::Stop } else { FinishReason::Length };
        prop_assert_eq!(reported.generation.finish_reason, reason);
    }
}

#[test]
fn a_stop_string_inside_a_token_cuts_the_text_and_not_the_tokens() {
    let tokenizer = tokenizer();
    let id = |piece: &str| FIRST + PIECES.iter().position(|&known| known == piece).expect("a piece") as i64;
    let ids = [id("▁"), id("ab"), id("ab"), id("ba▁"), id("bb")];
    let (reported, pieces) = reported(&tokenizer, &ids, &[1, 3], &["bba".to_owned()]);
    assert_eq!((reported.text.as_str(), reported.text_alone.as_str()), (" aba", "aba"));
    assert_eq!(reported.generation.new_ids, [id("▁"), id("ab")], "the third one goes on into the stop string");
    assert_eq!(reported.generation.accept_lengths, [1, 1]);
    assert_eq!(pieces, [" ", "aba"]);
}

#[test]
fn bytes_of_a_character_are_reported_together_or_not_at_all() {
    let tokenizer = tokenizer();
    let ids: Vec<i64> = "a👍b".bytes().map(|byte| BYTES + i64::from(byte)).collect();
    assert_eq!(reported(&tokenizer, &ids, &[1], &[]).1, ["a", "👍", "b"]);
    let (cut, pieces) = reported(&tokenizer, &ids, &[2], &["👍".to_owned()]);
    assert_eq!((cut.generation.new_ids.len(), cut.text.as_str(), pieces), (1, "a", vec!["a".to_owned()]));
}

#[test]
fn generate_stops_at_a_stop_string_with_heads_and_without() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]));
    let arguments = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "40"];
    let heads = ["--heads", "h", "--tree", "t.json"];
    let whole = world.json(&arguments).remove(0)["text"].as_str().expect("a text").to_owned();
    let stop: String = whole.chars().skip(6).take(2).collect();
    let expected = &whole[..whole.find(&stop).expect("it is there")];
    let mut lines: Vec<Value> = vec![];
    for more in [&[][..], &heads[..]] {
        let with_stop = [&arguments[..], more, &["--stop", "never there", "--stop", &stop]].concat();
        let line = world.json(&with_stop).remove(0);
        assert_eq!((&line["text"], &line["finish_reason"]), (&json!(expected), &json!("stop")));
        let printed = world.medusa(&with_stop).output().expect("it runs").stdout;
        let printed = String::from_utf8(printed).expect("UTF-8");
        let (_, answer) = printed.split_once('\n').expect("a line with the prompt");
        assert_eq!(answer.trim(), expected.trim());
        lines.push(line);
    }
    assert_eq!(lines[0]["new_ids"], lines[1]["new_ids"]);
    assert!(world.complaint(&[&arguments[..], &["--stop", ""]].concat(), 2).contains("--stop"));
}
