//! The worker that decodes one text after the other.

use super::*;
use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::request::{Generation, OnTokens, Request};
use crate::decode::step::Drafting;
use crate::decode::texts::SerialDecoder;
use crate::serve::api::request::TextRequest;
use crate::serve::service::RequestedTexts;
use crate::serve::worker::Worker;

/// Writes the token 8 until a text is full, and looks at the gauges before each text.
#[derive(Debug)]
struct Eights {
    metrics: ServerMetrics,
    /// Texts that are decoded, and texts that wait.
    seen: Arc<Mutex<Vec<(i64, i64)>>>,
}

impl DecodeLoop for Eights {
    fn engine_name(&self) -> &'static str {
        "eights"
    }

    fn decode(&mut self, _: Drafting, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        let gauges = (self.metrics.running.get(), self.metrics.waiting.get());
        self.seen.lock().expect("no test panics").push(gauges);
        let mut new_ids = vec![];
        while new_ids.len() < request.max_new_tokens && on_tokens(&[8]).is_continue() {
            new_ids.push(8);
        }
        Ok(Generation::from_tokens(new_ids))
    }

    fn reset(&mut self) {}
}

/// Decodes what these requests ask for, of which some have been dropped; returns the gauges before each text, and after all.
fn decoded(
    requests: impl FnOnce(&dyn Fn() -> RequestedTexts) -> Vec<RequestedTexts>,
) -> (Vec<(i64, i64)>, Vec<Vec<i64>>) {
    let FakeServer { service, jobs, .. } = FakeServer::new();
    let body = completion(&json!({"max_tokens": 3})).to_string();
    let request = TextRequest::completion(body.as_bytes()).expect("a request");
    let open = requests(&|| service.enter(&request, vec![Arc::from([5, 6, 7])]).expect("a place"));
    let (metrics, seen) = (service.recorder.metrics.clone(), Arc::new(Mutex::new(vec![])));
    let eights = Eights { metrics: metrics.clone(), seen: seen.clone() };
    let places = service.places.clone();
    drop(service); // nobody can send more
    Worker::new(Box::new(SerialDecoder::new(Box::new(eights))), &PROMPTING.tokenizer, metrics.clone()).run(&jobs);
    assert_eq!((metrics.running.get(), metrics.waiting.get(), places.available_permits()), (0, 0, PLACES));
    let seen = seen.lock().expect("no test panics").clone();
    (seen, open.into_iter().map(ids_of).collect())
}

/// The tokens of a text that ended.
fn ids_of(mut texts: RequestedTexts) -> Vec<i64> {
    let mut ids = vec![];
    loop {
        match texts.events.try_recv().expect("the text has an end") {
            (0, TextEvent::Piece(piece)) => ids.extend(piece.ids),
            (0, TextEvent::Ended(piece, ended)) => {
                ids.extend(piece.ids);
                assert_eq!((ended.reason, ended.generated.tokens), (FinishReason::Length, ids.len()));
                return ids;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn texts_come_one_after_the_other_and_those_of_clients_that_left_are_passed_over() {
    let (seen, texts) = decoded(|enter| {
        drop(enter());
        let first = enter();
        drop(enter());
        vec![first, enter()]
    });
    assert_eq!(seen, [(1, 1), (1, 0)]);
    assert_eq!(texts, [[8, 8, 8], [8, 8, 8]]);
}

#[test]
fn a_worker_whose_only_client_left_goes_on() {
    let (seen, texts) = decoded(|enter| {
        drop(enter());
        vec![]
    });
    assert!(seen.is_empty() && texts.is_empty(), "nothing is decoded");
}

/// Commits two tokens a step, the second of them a guess, until an EOS after eight tokens.
#[derive(Debug)]
struct Pairs {
    /// Of the EOS: whether it is the third token of the last step, or comes alone.
    is_end_guessed: bool,
}

impl DecodeLoop for Pairs {
    fn engine_name(&self) -> &'static str {
        "pairs"
    }

    fn decode(&mut self, _: Drafting, _: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        let steps = (1..=4).take_while(|_| on_tokens(&[8, 8]).is_continue()).count();
        let steps = steps + usize::from(steps < 4); // a step that is stopped was made
        let (finish_reason, end, end_steps) = match steps {
            4 => (FinishReason::Eos, vec![2], usize::from(!self.is_end_guessed)),
            _ => (FinishReason::Stopped, vec![], 0),
        };
        Ok(Generation {
            new_ids: vec![8; 2 * steps],
            scored: vec![],
            accept_lengths: vec![2; steps],
            cached: 0,
            proposed: 5 * steps,
            finish_reason,
            end,
            end_steps,
            prefill: Duration::ZERO,
            decoding: Duration::ZERO,
        })
    }

    fn reset(&mut self) {}
}

/// What a text of [`Pairs`] came to, and the metrics of generated and accepted tokens and of steps.
fn pairs(is_end_guessed: bool, stop: &[String]) -> (EndedText, [u64; 3]) {
    let FakeServer { service, jobs, .. } = FakeServer::new();
    let body = completion(&json!({ "stop": stop })).to_string();
    let request = TextRequest::completion(body.as_bytes()).expect("a request");
    let mut texts = service.enter(&request, vec![Arc::from([5, 6, 7])]).expect("a place");
    let metrics = service.recorder.metrics.clone();
    drop(service); // nobody can send more
    let decoding = Box::new(SerialDecoder::new(Box::new(Pairs { is_end_guessed })));
    Worker::new(decoding, &PROMPTING.tokenizer, metrics.clone()).run(&jobs);
    let counters = [&metrics.new_tokens, &metrics.accepted_tokens, &metrics.steps].map(|counter| counter.get());
    assert_eq!(metrics.between_tokens.get_sample_count(), counters[2].min(4) - 1, "one latency between two steps");
    loop {
        if let (_, TextEvent::Ended(_, ended)) = texts.events.try_recv().expect("the text has an end") {
            return (ended, counters);
        }
    }
}

#[test]
fn the_eos_counts_as_generated_and_as_accepted_where_it_was_guessed() {
    for (is_end_guessed, steps) in [(true, 4), (false, 5)] {
        let (ended, counters) = pairs(is_end_guessed, &[]);
        assert_eq!((ended.reason, ended.generated), (FinishReason::Eos, GeneratedTokens { tokens: 9, steps }));
        assert_eq!(counters, [9, 9 - steps as u64, steps as u64]);
    }
}

#[test]
fn the_tokens_of_a_stop_string_count_as_generated_and_what_the_step_committed_after_them_does_not() {
    let text = PROMPTING.tokenizer.decode(&[8; 3], false).expect("text");
    let (ended, counters) = pairs(false, &[text]);
    assert_eq!((ended.reason, ended.generated), (FinishReason::Stop, GeneratedTokens { tokens: 3, steps: 2 }));
    assert_eq!(counters, [3, 1, 2]);
}
