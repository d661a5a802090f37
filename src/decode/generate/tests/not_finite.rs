//! Backbones whose logits are not finite: no token can be chosen, and the error names the first one.

use super::*;
use crate::decode::DecodeLoop;
use crate::decode::step::Drafting;
use crate::draft::levels::LevelDrafter;
use crate::draft::model::{Guessing, ModelGuesser};
use crate::engine::tch::TchEngine;
use crate::formats::tree::DynamicTree;

/// With NaN in one weight, no way of decoding chooses a token.
#[test]
fn logits_with_nan_are_an_error_whoever_decodes() {
    let (heads, tree, prompt) = (heads(2, 3), every_pair_of_guesses(), [1, 2, 3]);
    let typical = Acceptance::Typical(TypicalAcceptance::default());
    let forced = Acceptance::Forced { rate: 2.0 };
    let acceptances = [Acceptance::Greedy, typical, Acceptance::Nucleus, Acceptance::Rejection, forced];
    let is_refused = |decoded: Result<Generation, DecodeError>, what: &str| {
        assert!(matches!(decoded, Err(DecodeError::NotFinite { token: 1 })), "{what}: {decoded:?}");
    };
    for name in ["lm_head", "0.self_attn.v_proj", "1.mlp.gate_proj"] {
        let llama = backbone(config(2, None, vec![]), 4);
        let weights = llama.weights();
        let (_, weight_oi) = weights.iter().find(|(full, _)| full.contains(name)).expect("a weight of this name");
        let _ = weight_oi.narrow(0, 1, 1).narrow(1, 2, 1).fill_(f64::NAN);
        for temperature in [0.0, 0.8] {
            let request = request(&prompt, 9, temperature);
            is_refused(plain(&llama, &request, &mut go_on()), name);
            let penalty = Positive::new(1.3).unwrap();
            is_refused(plain(&llama, &Request { repetition_penalty: penalty, ..request }, &mut go_on()), name);
            for acceptance in acceptances {
                let drafts = prepare(&llama, &heads, &tree, acceptance).unwrap();
                is_refused(medusa(&llama, &drafts, &request, &mut go_on()), name);
                is_refused(drafted(&llama, NgramDrafter::new(&llama), acceptance, &request, &mut go_on()), name);
            }
        }
        let scored = crate::decode::likelihood::log_probability(&llama, &prompt, &[4, 5]);
        assert!(matches!(scored, Err(DecodeError::NotFinite { token: 1 })), "{name}: {scored:?}");
    }
}

/// Whatever the dtype. NaN in queries and keys only with the CPU's kernels: libtorch's fused attention drops it.
#[test]
fn logits_with_nan_are_an_error_in_every_dtype() {
    for name in ["lm_head", "0.self_attn.q_proj", "1.self_attn.k_proj", "0.self_attn.v_proj", "1.mlp.up_proj"] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let spoilt = || {
                let llama = Llama::random(config(2, None, vec![]), kind, Device::Cpu, 4);
                let weights = llama.weights();
                let (_, weight_oi) = weights.iter().find(|(full, _)| full.contains(name)).expect("a weight");
                let _ = weight_oi.get(1).fill_(f64::NAN);
                llama
            };
            let is_refused = |llama: &Llama| {
                let refused = plain(llama, &request(&[1, 2, 3], 9, 0.0), &mut go_on());
                assert!(matches!(refused, Err(DecodeError::NotFinite { token: 1 })), "{name}, {kind:?}: {refused:?}");
            };
            if !name.contains("q_proj") && !name.contains("k_proj") {
                is_refused(&spoilt());
            }
            let packed = spoilt().for_decoding();
            if CpuEngine::supports(&packed).is_ok() {
                is_refused(&packed);
            }
        }
    }
}

/// A token whose embedding is NaN: the texts are whole up to it, and the token after it cannot be chosen.
#[test]
fn the_error_names_the_token_that_could_not_be_chosen() {
    let (heads, tree) = (heads(2, 3), every_pair_of_guesses());
    let llama = backbone(config(2, None, vec![]), 4);
    let prompt = [1, 2, 3];
    let request = request(&prompt, 30, 0.0);
    let whole = plain(&llama, &request, &mut go_on()).unwrap().new_ids;
    let bad = *whole.iter().rev().find(|id| !prompt.contains(id)).unwrap();
    let at = whole.iter().position(|&id| id == bad).unwrap();
    let _ = llama.weights()[0].1.get(bad).fill_(f64::NAN);
    let mut heard: Vec<i64> = vec![];
    let failure = plain(&llama, &request, &mut |ids| {
        heard.extend(ids);
        ControlFlow::Continue(())
    });
    assert_eq!(heard, whole[..=at], "streamed as far as it goes");
    assert!(matches!(failure, Err(DecodeError::NotFinite { token }) if token == at + 2), "{failure:?}");
    let message = failure.unwrap_err().to_string();
    assert!(message.starts_with(&format!("logits contain NaN or infinity at new token {};", at + 2)), "{message}");
    let drafts = prepare(&llama, &heads, &tree, Acceptance::Greedy).unwrap();
    let failure = medusa(&llama, &drafts, &request, &mut go_on());
    assert!(matches!(failure, Err(DecodeError::NotFinite { token }) if token == at + 2), "{failure:?}");
    let scored = crate::decode::likelihood::log_probability(&llama, &prompt, &whole);
    // One pass scores many tokens, and NaN in one of them spoils those before it, too.
    assert!(matches!(scored, Err(DecodeError::NotFinite { token }) if token <= at + 2), "{scored:?}");
}

/// A guess whose embedding is NaN spoils its tree's logits, but not the text.
#[test]
fn a_guess_with_nan_changes_no_text() {
    let (heads, tree, prompt) = (heads(2, 3), every_pair_of_guesses(), [1, 2, 3]);
    let llama = backbone(config(2, None, vec![]), 4);
    for (acceptance, temperature) in [(Acceptance::Greedy, 0.0), (Acceptance::Rejection, 0.8)] {
        let request = Request { stream: seeded(3), ..request(&prompt, 8, temperature) };
        let whole = plain(&llama, &request, &mut go_on()).unwrap().new_ids;
        let unused =
            (0..VOCABULARY).find(|id| !prompt.contains(id) && !whole.contains(id)).expect("a token of another text");
        let mut embedding_h = llama.weights()[0].1.get(unused);
        let before_h = embedding_h.copy();
        let _ = embedding_h.fill_(f64::NAN);
        let drafts = prepare(&llama, &heads, &tree, acceptance).unwrap();
        let run = medusa(&llama, &drafts, &request, &mut go_on()).unwrap();
        assert_eq!(
            (&run.new_ids, run.accept_lengths),
            (&whole, vec![1; 8]),
            "every tree has the token among its guesses"
        );
        embedding_h.copy_(&before_h);
    }
}

/// Drafters that follow the rows go on from a root whose guesses were NaN, in this turn and the next.
#[test]
fn drafters_that_follow_the_rows_outlast_a_guess_with_nan() {
    let prompt = [1, 2, 3];
    let llama = backbone(config(2, None, vec![]), 4);
    let (heads, tree) = (heads(2, 3), every_pair_of_guesses());
    let request = request(&prompt, 8, 0.0);
    let whole = plain(&llama, &request, &mut go_on()).unwrap().new_ids;
    let next: Vec<i64> = prompt.iter().chain(&whole).chain(&prompt).copied().collect();
    let after = plain(&llama, &Request { prompt: &next, ..request }, &mut go_on()).unwrap().new_ids;
    let is_unused = |id: &i64| !prompt.contains(id) && !whole.contains(id) && !after.contains(id);
    let unused = (0..VOCABULARY).find(is_unused).expect("a token of another text");
    let mut embedding_h = llama.weights()[0].1.get(unused);
    let before_h = embedding_h.copy();
    let mut repeated = vec![];
    for which in 0..training_free::drafters(&llama, &heads, &tree).len() {
        let decoded = || {
            let (name, drafter) = training_free::drafters(&llama, &heads, &tree).swap_remove(which);
            let mut decoding = HostLoop::new(Box::new(TchEngine::new(&llama)), Some((drafter, Acceptance::Greedy)));
            let mut steps = 0;
            for (prompt, expected) in [(&prompt[..], &whole), (&next, &after)] {
                let text = decoding.decode(Drafting::On, &Request { prompt, ..request }, &mut go_on()).unwrap();
                assert_eq!(&text.new_ids, expected, "{name}");
                steps += text.accept_lengths.len();
            }
            (name, steps)
        };
        let (name, finite) = decoded();
        let _ = embedding_h.fill_(f64::NAN);
        let (_, spoilt) = decoded();
        embedding_h.copy_(&before_h);
        if spoilt > finite {
            repeated.push(name);
        }
    }
    let guessed_it = ["recycling", "medusa+ngram", "ngram+recycling+lookahead"];
    assert_eq!(repeated, guessed_it, "drafters with steps that were repeated without guesses");
}

/// NaN in a draft model: it guesses anything, and the text stays.
#[test]
fn a_draft_model_with_nan_changes_no_text() {
    let (llama, draft) = (backbone(config(2, None, vec![]), 4), backbone(config(2, None, vec![]), 5));
    let weights = draft.weights();
    let (_, lm_head_vh) = weights.iter().find(|(name, _)| name.contains("lm_head")).expect("an LM head");
    let _ = lm_head_vh.get(2).fill_(f64::NAN);
    let (tree, limits) = (SparseTree::cartesian(&[3, 2]).unwrap(), DynamicTree { nodes: 9, depth: 2, top_k: 4 });
    for guessing in [Guessing::Best, Guessing::Drawn] {
        let guesser = || {
            let engine = Box::new(TchEngine::new(&draft));
            Box::new(ModelGuesser::new(engine, VOCABULARY as usize, 2, guessing))
        };
        for (acceptance, temperature) in [(Acceptance::Greedy, 0.0), (Acceptance::Rejection, 0.8)] {
            let request = Request { stream: seeded(3), ..request(&[1, 2, 3], 12, temperature) };
            let whole = plain(&llama, &request, &mut go_on()).unwrap().new_ids;
            for drafter in
                [LevelDrafter::for_tree(&llama, guesser(), &tree), LevelDrafter::dynamic(&llama, guesser(), limits)]
            {
                let text = drafted(&llama, drafter, acceptance, &request, &mut go_on()).unwrap();
                assert_eq!(text.new_ids, whole, "{guessing:?}, {acceptance:?}");
            }
        }
    }
}
