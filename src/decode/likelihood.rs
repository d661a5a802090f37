//! The backbone's log-probability of a text: measures what typical and nucleus acceptance cost in quality.

// N tokens, H hidden size, V vocabulary
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

fn score(engine: &dyn Engine, prompt: &[i64], text: &[i64]) -> Result<f64, DecodeError> {
    let (kind, device) = (engine.backbone().kind(), engine.backbone().device());
    let all = [prompt, text].concat();
    let mut cache = KvCache::of_one_row(&engine.backbone().config, kind, device);
    let seen = &all[..all.len() - 1]; // the last token predicts nothing that is asked for
    let (mut log_p, mut end) = (vec![], 0);
    let _ = prefill(CHUNK, engine, (&mut cache, 0), seen, &mut |piece, hidden_nh| {
        let begin = end;
        end += piece.len();
        let first = (prompt.len() - 1).saturating_sub(begin); // the first one whose next token is asked for
        if first < piece.len() {
            let hidden_nh = hidden_nh.narrow(0, first as i64, (piece.len() - first) as i64);
            log_p.push(score_piece(&engine.logits(&hidden_nh), &all[begin + first + 1..=end]));
        }
    });
    let log_p_n = Tensor::cat(&log_p, 0);
    match log_p_n.sum(Kind::Double).double_value(&[]) {
        sum if sum.is_nan() => {
            Err(DecodeError::NotFinite { token: log_p_n.argmax(0, false).int64_value(&[]) as usize + 1 })
        }
        sum => Ok(sum),
    }
}

/// `[N]`: log p of the next token of each row of logits `[N, V]`.
fn score_piece(logits_nv: &Tensor, next: &[i64]) -> Tensor {
    let log_p_nv = logits_nv.to_kind(Kind::Float).log_softmax(-1, Kind::Float);
    let next_n = Tensor::from_slice(next).to_device(logits_nv.device());
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
                let cache = &mut KvCache::of_one_row(&backbone.config, Kind::Float, Device::Cpu);
                let hidden_1h = prefill(512, &engine, (cache, 0), &[&prompt[..], &text[..at]].concat(), &mut |_, _| {});
                let log_p_1v = engine.logits(&hidden_1h).log_softmax(-1, Kind::Float);
                log_p_1v.double_value(&[0, text[at]])
            })
            .sum();
        // A sum of 140 float32 numbers of about 4, each off by some 1e-6.
        assert!((at_once - one_by_one).abs() < 1e-3, "{at_once}, expected {one_by_one}");
        assert_eq!(log_probability(&backbone, &prompt, &[]).expect("a prompt"), 0.0);
    }
}
