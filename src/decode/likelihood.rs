//! The backbone's log-probabilities of a text: of the whole, which measures what typical and nucleus acceptance cost in quality, and of each
//! token.

// N tokens, W a token's states, V vocabulary
use tch::{Kind, Tensor};

use super::error::{DecodeError, check_prompt};
use crate::engine::Engine;
use crate::engine::fastest::fastest;
use crate::engine::prefill::prefill;
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::torch::guard;

/// The number of tokens that are read at a time, which bounds the memory of their logits.
const CHUNK: usize = 128;

/// The sum of log p(token | all before it) over `text`, at temperature 1; 0 for no text.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn log_probability(backbone: &Llama, prompt: &[i64], text: &[i64]) -> Result<f64, DecodeError> {
    check_prompt(&backbone.config, prompt)?;
    if text.is_empty() {
        return Ok(0.0);
    }
    guard("scoring a text", || tch::no_grad(|| score(&*fastest(backbone), prompt, text)))?
}

/// A token of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredToken {
    pub id: i64,
    /// log p(token | all before it).
    pub log_p: f64,
    /// The likeliest tokens at its place with their log-probabilities, the best first.
    pub likeliest: Vec<(i64, f64)>,
}

/// Log-probabilities of each token of `text` and of the `count` likeliest at its place, of the backbone's distribution at temperature 1: no
/// penalty, no top-k, no top-p. The text is read at once, so rounding may differ from that of the steps that wrote it.
///
/// # Errors
/// As [`log_probability`].
pub fn scored(backbone: &Llama, prompt: &[i64], text: &[i64], count: usize) -> Result<Vec<ScoredToken>, DecodeError> {
    check_prompt(&backbone.config, prompt)?;
    if text.is_empty() {
        return Ok(vec![]);
    }
    let mut tokens = Vec::with_capacity(text.len());
    let mut take = |logits_nv: &Tensor, next: &[i64]| tokens.extend(score_tokens(logits_nv, next, count));
    guard("scoring a text", || tch::no_grad(|| read(&*fastest(backbone), prompt, text, &mut take)))?;
    match tokens.iter().position(|token| token.log_p.is_nan()) {
        Some(at) => Err(DecodeError::NotFinite { token: at + 1 }),
        None => Ok(tokens),
    }
}

/// The next tokens of rows of logits `[N, V]`, scored as [`scored`] does.
pub(super) fn score_tokens(logits_nv: &Tensor, next: &[i64], count: usize) -> Vec<ScoredToken> {
    let log_p_nv = log_probabilities(logits_nv);
    let log_p_n = to_host::<f64>(&next_log_p(&log_p_nv, next).to_kind(Kind::Double));
    let count = count.min(log_p_nv.size()[1].unsigned_abs() as usize);
    let (best_nk, ids_nk) = log_p_nv.topk(count as i64, -1, true, true);
    let (best, ids) = (to_host::<f64>(&best_nk.to_kind(Kind::Double)), to_host::<i64>(&ids_nk));
    let token = |(at, (&id, log_p)): (usize, (&i64, f64))| {
        let place = at * count..(at + 1) * count;
        let likeliest = ids[place.clone()].iter().copied().zip(best[place].iter().copied()).collect();
        ScoredToken { id, log_p, likeliest }
    };
    next.iter().zip(log_p_n).enumerate().map(token).collect()
}

/// All values, row after row.
fn to_host<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    Vec::try_from(tensor.reshape([-1])).expect("one axis, of the kind that was made")
}

fn score(engine: &dyn Engine, prompt: &[i64], text: &[i64]) -> Result<f64, DecodeError> {
    let mut log_p = vec![];
    read(engine, prompt, text, &mut |logits_nv, next| log_p.push(next_log_p(&log_probabilities(logits_nv), next)));
    let log_p_n = Tensor::cat(&log_p, 0);
    match log_p_n.sum(Kind::Double).double_value(&[]) {
        sum if sum.is_nan() => {
            Err(DecodeError::NotFinite { token: log_p_n.argmax(0, false).int64_value(&[]) as usize + 1 })
        }
        sum => Ok(sum),
    }
}

/// Reads a text, piece by piece: `take` gets the logits `[N, V]` before each token, and these tokens.
fn read(engine: &dyn Engine, prompt: &[i64], text: &[i64], take: &mut dyn FnMut(&Tensor, &[i64])) {
    let (kind, device) = (engine.backbone().kind(), engine.backbone().device());
    let all = [prompt, text].concat();
    let mut cache = KvCache::with_one_row(&engine.backbone().config, kind, device);
    let seen = &all[..all.len() - 1]; // the last token predicts nothing that is asked for
    let mut end = 0;
    let _ = prefill(CHUNK, engine, (&mut cache, 0), seen, &mut |piece, states_nw| {
        let begin = end;
        end += piece.len();
        let first = (prompt.len() - 1).saturating_sub(begin); // the first one whose next token is asked for
        if first < piece.len() {
            let states_nw = states_nw.narrow(0, first as i64, (piece.len() - first) as i64);
            take(&engine.logits(&states_nw), &all[begin + first + 1..=end]);
        }
    });
}

/// Of logits `[N, V]`, in float32.
fn log_probabilities(logits_nv: &Tensor) -> Tensor {
    logits_nv.to_kind(Kind::Float).log_softmax(-1, Kind::Float)
}

/// `[N]`: of log-probabilities `[N, V]`, that of the next token of each row.
fn next_log_p(log_p_nv: &Tensor, next: &[i64]) -> Tensor {
    let next_n = Tensor::from_slice(next).to_device(log_p_nv.device());
    log_p_nv.gather(1, &next_n.unsqueeze(1), false).squeeze_dim(1)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::engine::tch::TchEngine;
    use crate::model::config::LlamaConfig;

    fn backbone() -> Llama {
        let folder = tempfile::tempdir().expect("a folder");
        let config = r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 40, "max_position_embeddings": 512, "eos_token_id": null}"#;
        crate::files::write_atomic(&folder.path().join("config.json"), |out| {
            std::io::Write::write_all(out, config.as_bytes())
        })
        .expect("a file of a test");
        Llama::random(LlamaConfig::load(folder.path()).expect("this config"), Kind::Float, Device::Cpu, 5)
    }

    #[test]
    fn one_pass_says_what_token_after_token_says() {
        let backbone = backbone();
        let prompt = [&[1, 7, 9][..], &[11; CHUNK]].concat(); // a whole piece predicts nothing
        let text: Vec<i64> = (0..CHUNK as i64 + 12).map(|at| (at * at + 3) % 40).collect();
        let at_once = log_probability(&backbone, &prompt, &text).expect("a prompt");
        let one_by_one: f64 = (0..text.len())
            .map(|at| {
                let engine = TchEngine::new(&backbone);
                let cache = &mut KvCache::with_one_row(&backbone.config, Kind::Float, Device::Cpu);
                let state_1w = prefill(512, &engine, (cache, 0), &[&prompt[..], &text[..at]].concat(), &mut |_, _| {});
                let log_p_1v = engine.logits(&state_1w).log_softmax(-1, Kind::Float);
                log_p_1v.double_value(&[0, text[at]])
            })
            .sum();
        // A sum of 140 float32 numbers of about 4, each off by some 1e-6.
        assert!((at_once - one_by_one).abs() < 1e-3, "{at_once}, expected {one_by_one}");
        assert_eq!(log_probability(&backbone, &prompt, &[]).expect("a prompt"), 0.0);
    }

    #[test]
    fn every_token_is_scored_beside_the_likeliest() {
        let backbone = backbone();
        let (prompt, text) = ([1, 7, 9], [3, 30, 3, 8]);
        let tokens = scored(&backbone, &prompt, &text, 3).expect("a prompt");
        assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), text);
        let sum: f64 = tokens.iter().map(|token| token.log_p).sum();
        assert!((sum - log_probability(&backbone, &prompt, &text).expect("a prompt")).abs() < 1e-5, "{sum}");
        for at in 0..text.len() {
            let before = [&prompt[..], &text[..at]].concat();
            let log_p = |id| log_probability(&backbone, &before, &[id]).expect("a prompt");
            let mut all: Vec<(i64, f64)> = (0..40).map(|id| (id, log_p(id))).collect();
            all.sort_by(|a, b| b.1.total_cmp(&a.1));
            for (got, expected) in tokens[at].likeliest.iter().zip(&all[..3]) {
                assert!(got.0 == expected.0 && (got.1 - expected.1).abs() < 1e-5, "{got:?}, expected {expected:?}");
            }
            assert_eq!(tokens[at].likeliest.len(), 3);
        }
        assert!(scored(&backbone, &prompt, &text, 99).expect("a prompt")[0].likeliest.len() == 40, "all there are");
        assert_eq!(scored(&backbone, &prompt, &text, 0).expect("a prompt")[0].likeliest, []);
    }
}
