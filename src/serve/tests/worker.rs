//! The worker that decodes one text after the other.

use super::*;
use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::request::{Generation, OnTokens, Request};
use crate::decode::step::Drafting;
use crate::serve::api::request::TextRequest;
use crate::serve::service::RequestedTexts;
use crate::serve::worker::{TextDecoding, Worker};

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
        Ok(Generation {
            accept_lengths: vec![1; new_ids.len()],
            new_ids,
            scored: vec![],
            cached: 0,
            proposed: 0,
            finish_reason: FinishReason::Length,
            end: vec![],
            prefill: Duration::ZERO,
            decoding: Duration::ZERO,
        })
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
    Worker::new(TextDecoding::OneByOne(Box::new(eights)), &PROMPTING.tokenizer, metrics.clone()).run(&jobs);
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
                assert_eq!((ended.reason, ended.new_tokens), (FinishReason::Length, ids.len()));
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
