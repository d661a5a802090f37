//! What a text may have for itself: log-probabilities, penalties, temperature, and its rule of acceptance. Each text is the one alone.

use super::*;
use crate::decode::likelihood::{ScoredToken, scored};
use crate::decode::request::EmittedTokens;
use crate::numbers::{Finite, Positive};
use crate::tree::accept::TypicalAcceptance;

/// In float32, as [`backbone`].
fn in_float32(seed: u64) -> (Llama, Heads) {
    tch::set_num_threads(1);
    let llama =
        Llama::random(LlamaConfig { eos_token_ids: vec![11], ..LlamaConfig::tiny() }, Kind::Float, Device::Cpu, seed);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(8.0);
    }
    (llama, heads(Kind::Float, seed))
}

fn heads(kind: Kind, seed: u64) -> Heads {
    let shape = HeadsShape {
        medusa_num_heads: 2,
        medusa_num_layers: 1,
        hidden_size: 32,
        vocab_size: 50,
        ..HeadsShape::default()
    };
    Heads::random(shape, kind, Device::Cpu, seed)
}

/// Often right, whatever it guesses.
fn wide() -> SparseTree {
    SparseTree::cartesian(&[25, 4]).unwrap()
}

/// All requests through one batch; returns the texts in the order of the requests, and what was emitted of each.
fn together(batch: &mut SequenceBatch, requests: &[Request]) -> Vec<(Generation, Vec<i64>, Vec<ScoredToken>)> {
    let mut heard = vec![(vec![], vec![]); requests.len()];
    requests.iter().enumerate().for_each(|(key, request)| batch.enter(key, request).unwrap());
    let mut ended = vec![];
    while !batch.is_idle() {
        let mut listen = |key: usize, emitted: EmittedTokens| {
            heard[key].0.extend(emitted.ids);
            heard[key].1.extend(emitted.scored.iter().cloned());
            // One text is ended by its listener.
            if key == 1 && heard[1].0.len() >= 9 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        ended.extend(batch.step_with(&mut listen).unwrap());
    }
    ended.sort_by_key(|(key, _)| *key);
    ended.into_iter().zip(heard).map(|((_, text), (ids, scored))| (text.unwrap(), ids, scored)).collect()
}

/// Rounding of float32: the oracle reads the text in one pass.
fn assert_scored(got: &[ScoredToken], expected: &[ScoredToken]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        let near = |a: f64, b: f64| (a - b).abs() < 2e-3 * b.abs().max(1.0);
        assert!(got.id == expected.id && near(got.log_p, expected.log_p), "{got:?}, expected {expected:?}");
        assert_eq!(got.likeliest.len(), expected.likeliest.len());
        for (got, expected) in got.likeliest.iter().zip(&expected.likeliest) {
            assert!(near(got.1, expected.1), "{got:?}, expected {expected:?}"); // equals may come in another order
        }
    }
}

#[test]
fn log_probabilities_come_with_the_tokens_and_are_those_of_a_pass_over_the_text() {
    let (mut by_eos, mut by_mark, mut several) = (0, 0, 0);
    for seed in 0..3 {
        let (llama, heads) = in_float32(seed);
        let wanted: Vec<Wanted> = (0..8).map(|key| Wanted::new(key, 12 + 2 * key)).collect();
        let tree = wide();
        // An end mark that comes.
        let go_on = &mut |_: &[i64]| ControlFlow::Continue(());
        let whole = plain(&llama, &wanted[0].request(0.0), go_on).unwrap().new_ids;
        let mut requests: Vec<Request> = wanted.iter().map(|text| text.request([0.0, 0.9][text.key % 2])).collect();
        requests[0].end_mark = &whole[whole.len().saturating_sub(4)..][..2];
        (requests[2].repetition_penalty, requests[3].frequency_penalty) =
            (Positive::new(1.4).unwrap(), Finite::new(0.7).unwrap());
        requests[5].sampling.top_k = NonZeroUsize::new(3);
        for (key, request) in requests.iter_mut().enumerate() {
            request.logprobs = [Some(3), Some(0), Some(99), None][key % 4];
        }
        let drafter: Box<dyn Drafter> = Box::new(MedusaDrafter::new(&llama, &heads, &tree).unwrap());
        for drafter in [None, Some((drafter, Acceptance::Rejection))] {
            let is_drafted = drafter.is_some();
            let engine = Box::new(TchEngine::for_batches(&llama));
            let mut batch = SequenceBatch::new(engine, drafter, NonZeroUsize::new(5).unwrap());
            for ((text, ids, heard), request) in together(&mut batch, &requests).into_iter().zip(&requests) {
                let expected = match request.logprobs {
                    Some(count) => scored(&llama, request.prompt, &text.new_ids, count).unwrap(),
                    None => vec![],
                };
                assert_scored(&text.scored, &expected);
                // An end mark was emitted before it was known to be one.
                assert!(ids.starts_with(&text.new_ids) && heard.starts_with(&text.scored));
                assert_eq!(heard.len(), if request.logprobs.is_some() { ids.len() } else { 0 });
                by_eos += u32::from(text.finish_reason == FinishReason::Eos && text.end == [11]);
                by_mark += u32::from(text.end.len() == 2);
                several += u32::from(is_drafted && text.accept_lengths.iter().any(|&length| length > 1));
            }
        }
    }
    assert!(by_eos > 3 && by_mark > 2 && several > 5, "{by_eos} by EOS, {by_mark} by a mark, {several} with several");
}

/// What rules, temperatures and penalties a server's texts may have.
fn mixed_requests(wanted: &[Wanted]) -> Vec<Request<'_>> {
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    let rules = [None, Some(typical), Some(Acceptance::Rejection), Some(Acceptance::Greedy), Some(Acceptance::Nucleus)];
    let mut requests: Vec<Request> = wanted.iter().map(|text| text.request([0.8, 0.0, 1.2][text.key % 3])).collect();
    for (key, request) in requests.iter_mut().enumerate() {
        request.acceptance = rules[key % 5];
        request.sampling.top_k = NonZeroUsize::new([0, 20][key % 2]);
        request.presence_penalty = Finite::new([0.0, 0.0, 0.0, 4.0][key % 4]).unwrap();
    }
    requests
}

fn batch<'a>(
    llama: &'a Llama,
    drafter: Box<dyn Drafter + 'a>,
    acceptance: Acceptance,
    size: usize,
) -> SequenceBatch<'a> {
    let engine = Box::new(TchEngine::for_batches(llama));
    SequenceBatch::new(engine, Some((drafter, acceptance)), NonZeroUsize::new(size).unwrap())
}

#[test]
fn texts_with_their_own_rules_temperatures_and_penalties_are_those_alone() {
    let llama = backbone(None, vec![11], 5);
    let (heads, draft, tree) = (heads(Kind::Double, 5), backbone(None, vec![], 25), wide());
    let wanted: Vec<Wanted> = (0..30).map(|key| Wanted::new(key, 25)).collect();
    let requests = mixed_requests(&wanted);
    let drafter = |name: &str, guessing: Guessing| -> Box<dyn Drafter> {
        match name {
            "heads" => Box::new(MedusaDrafter::new(&llama, &heads, &tree).unwrap()),
            "recycling" => Box::new(RecyclingDrafter::new(&llama)),
            _ => {
                let guesser = ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), 50, 2, guessing);
                Box::new(LevelDrafter::for_tree(&llama, Box::new(guesser), &tree))
            }
        }
    };
    // Alone with the rule as the loop's, and the guesses that suit it.
    let alone = |request: &Request, name: &str| {
        let rule = request.acceptance.unwrap_or(Acceptance::Rejection);
        let guessing = if rule == Acceptance::Rejection { Guessing::Drawn } else { Guessing::Best };
        let request = Request { acceptance: None, ..*request };
        together(&mut batch(&llama, drafter(name, guessing), rule, 1), &[request]).remove(0).0
    };
    for name in ["heads", "a draft model", "recycling"] {
        let mut in_batch = batch(&llama, drafter(name, Guessing::Drawn), Acceptance::Rejection, 7);
        let (mut several, mut stopped) = (0, 0);
        for (key, (text, ..)) in together(&mut in_batch, &requests).into_iter().enumerate() {
            several += u32::from(text.accept_lengths.iter().any(|&length| length > 1));
            let expected = alone(&requests[key], name);
            if text.finish_reason == FinishReason::Stopped {
                assert!(expected.new_ids.starts_with(&text.new_ids), "{name}, text {key}");
                stopped += 1;
            } else {
                assert_eq!(facts(&[text]), facts(&[expected]), "{name}, text {key}");
            }
        }
        assert!(several > 12 && stopped <= 1, "{name}: {several} texts with several, {stopped} stopped");
    }
}

#[test]
fn texts_without_a_drafter_have_their_own_penalties_and_temperatures() {
    let llama = backbone(None, vec![11], 6);
    let wanted: Vec<Wanted> = (0..12).map(|key| Wanted::new(key, 25)).collect();
    let requests = mixed_requests(&wanted);
    let mut batch = SequenceBatch::new(Box::new(TchEngine::for_batches(&llama)), None, NonZeroUsize::new(7).unwrap());
    for (key, (text, ..)) in together(&mut batch, &requests).into_iter().enumerate().filter(|(key, _)| *key != 1) {
        let alone = plain(&llama, &requests[key], &mut |_: &[i64]| ControlFlow::Continue(())).unwrap();
        assert_eq!(facts(&[text]), facts(&[alone]), "text {key}");
    }
    // The penalties do something.
    let text = |request: &Request| plain(&llama, request, &mut |_: &[i64]| ControlFlow::Continue(())).unwrap().new_ids;
    let unpenalised = |key: usize| text(&Request { presence_penalty: Finite::ZERO, ..requests[key] });
    assert!([3, 7, 11].iter().any(|&key| unpenalised(key) != text(&requests[key])));
}
