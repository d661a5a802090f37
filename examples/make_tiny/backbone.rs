//! The tiny Llama: trained on the conversations with the program's own model and optimizer, and saved as a Hugging Face
//! folder.

// B rows, T tokens of a row, H hidden, V vocabulary, N targets
use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use medusa::model::attention::RowMask;
use medusa::model::config::LlamaConfig;
use medusa::model::kv_cache::KvCache;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::new_tokens::NewTokens;
use medusa::model::weights;
use medusa::numbers::Fraction;
use medusa::torch::optim::adamw::{AdamW, Parameter, gradient_norm};
use medusa::torch::optim::{AdamWConfig, OptimizerName};
use medusa::train::schedule::{ScheduleConfig, ScheduleName};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tokenizers::Tokenizer;

use crate::conversations::{ASSISTANT, BOS, Conversation, ConversationSet, EOS, USER};
use crate::tokenizer::{CONTEXT, VOCAB_SIZE};
use crate::{pretty, write};

const STEPS: usize = 3000;
const WARMUP_STEPS: usize = 100;
const PEAK_RATE: f64 = 2.5e-3;
/// Tokens per batch, including padding.
const BATCH_TOKENS: usize = 1536;
/// Rows among which batches of similar length are formed.
const SHUFFLE_WINDOW: usize = 1024;
const MAX_GRAD_NORM: f64 = 1.0;
const LOG_EVERY: usize = 50;
/// Longer than any answer of the set.
const MAX_NEW_TOKENS: usize = 200;
/// A target without loss.
const IGNORE: i64 = -100;

/// One conversation as the backbone's input.
struct Row {
    ids: Vec<i64>,
    /// Whether each id belongs to the assistant.
    is_answer: Vec<bool>,
}

/// Trains the backbone, writes its folder, and reports how well it answers held-out questions.
pub(crate) fn make(folder: &Path, tokenizer: &Tokenizer, set: &ConversationSet, seed: u64) -> Result<()> {
    write(&folder.join("config.json"), &pretty(&config()))?;
    write(&folder.join("generation_config.json"), &pretty(&generation_config()))?;
    let rows = |conversations: &[Conversation]| -> Result<Vec<Row>> {
        conversations.iter().map(|conversation| Row::new(encode(tokenizer, conversation)?, tokenizer)).collect()
    };
    let llama = random(LlamaConfig::load(folder)?, seed);
    train(&llama, &rows(&set.train)?, seed)?;
    save(&llama, &folder.join("model.safetensors"))?;
    let saved = Llama::load(folder, Kind::Float, Device::Cpu, Purpose::Decoding)?;
    let eval = rows(&set.eval)?;
    let (answers, questions) = tch::no_grad(|| evaluate(&saved, &eval));
    eprintln!("as saved, on eval.jsonl: {answers:.4} nats a token of answers, {questions:.4} of questions");
    tch::no_grad(|| report_answers(&saved, tokenizer, set))
}

/// The ids of a conversation: BOS, its text, EOS.
pub(crate) fn encode(tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Vec<i64>> {
    encode_text(tokenizer, &(conversation.text() + EOS))
}

fn encode_text(tokenizer: &Tokenizer, text: &str) -> Result<Vec<i64>> {
    let encoding = tokenizer.encode(text, true).map_err(anyhow::Error::from_boxed)?;
    Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
}

fn id(tokenizer: &Tokenizer, token: &str) -> Result<i64> {
    tokenizer.token_to_id(token).map(i64::from).with_context(|| format!("the tokenizer has no {token}"))
}

impl Row {
    fn new(ids: Vec<i64>, tokenizer: &Tokenizer) -> Result<Row> {
        let (answer, question) = (id(tokenizer, ASSISTANT)?, id(tokenizer, USER)?);
        let mut answering = false;
        let is_answer = ids.iter().map(|&id| {
            let is_answer = answering && id != question;
            answering = id == answer || is_answer;
            is_answer
        });
        Ok(Row { is_answer: is_answer.collect(), ids })
    }
}

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
    })
}

fn generation_config() -> Value {
    json!({ "bos_token_id": 0, "eos_token_id": 1, "max_length": CONTEXT })
}

/// Random weights; those added to the residual stream start smaller, as in GPT-2.
fn random(config: LlamaConfig, seed: u64) -> Llama {
    let branches = 2.0 * config.num_hidden_layers as f64;
    let llama = Llama::random(config, Kind::Float, Device::Cpu, seed);
    for (name, weight) in llama.weights() {
        if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            let _ = weight.shallow_clone().g_mul_scalar_(branches.sqrt().recip());
        }
    }
    llama
}

const OPTIMIZER: AdamWConfig =
    AdamWConfig { name: OptimizerName::AdamW, betas: [0.9, 0.98], eps: 1e-8, weight_decay: 0.02 };

/// Next-token cross-entropy over questions and answers alike, since heads are trained on both.
fn train(llama: &Llama, rows: &[Row], seed: u64) -> Result<()> {
    let mut parameters: Vec<Parameter> =
        llama.weights().into_iter().map(|(name, weight)| Parameter::new(name, weight)).collect();
    let mut optimizer = AdamW::new(OPTIMIZER, &parameters);
    let schedule = ScheduleConfig {
        name: ScheduleName::Cosine,
        warmup_steps: Some(WARMUP_STEPS),
        warmup_ratio: None,
        min_ratio: Fraction::ZERO,
    };
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (start, mut tokens, mut batches) = (Instant::now(), 0, Vec::new());
    eprintln!("training {} parameters for {STEPS} steps", llama.config.parameters());
    for step in 1..=STEPS {
        if batches.is_empty() {
            batches = batches_of_like_length(rows, &mut rng);
        }
        let batch: Vec<&Row> = batches.pop().context("there are rows")?.into_iter().map(|at| &rows[at]).collect();
        tokens += batch.iter().map(|row| row.ids.len()).sum::<usize>();
        let loss = update(llama, &mut parameters, &mut optimizer, &batch, PEAK_RATE * schedule.factor(step, STEPS));
        if step.is_multiple_of(LOG_EVERY) || step == STEPS {
            let seconds = start.elapsed().as_secs_f64();
            let loss = loss.double_value(&[]);
            anyhow::ensure!(loss.is_finite(), "the loss of step {step} is {loss}");
            eprintln!("step {step:4}: loss {loss:.4}, {:.0} tokens/s, {seconds:.0} s", tokens as f64 / seconds);
        }
    }
    Ok(())
}

/// One update; returns the batch's mean loss.
fn update(llama: &Llama, parameters: &mut [Parameter], optimizer: &mut AdamW, batch: &[&Row], rate: f64) -> Tensor {
    let (tokens_bt, targets_bt) = tensors(batch);
    let loss = token_losses(llama, &tokens_bt, &targets_bt).0.mean(Kind::Float);
    let values: Vec<Tensor> = parameters.iter().map(|parameter| parameter.value.shallow_clone()).collect();
    let gradients = Tensor::run_backward(&[&loss], &values, false, false);
    for (parameter, gradient) in parameters.iter_mut().zip(&gradients) {
        parameter.gradient.copy_(gradient);
    }
    let clip = (MAX_GRAD_NORM / gradient_norm(&*parameters)).min(1.0);
    optimizer.step(parameters, rate, clip);
    loss.detach()
}

/// The loss of every target in order, `[N]`, and the mask of targets in `[B, T]`.
fn token_losses(llama: &Llama, tokens_bt: &Tensor, targets_bt: &Tensor) -> (Tensor, Tensor) {
    let rows = RowMask::causal(tokens_bt.size()[1], &llama.config, Device::Cpu);
    let hidden_bth = llama.hidden_states(tokens_bt, &rows, Adapters::Off);
    let has_target_bt = targets_bt.not_equal(IGNORE);
    let hidden_nh = hidden_bth.index(&[Some(&has_target_bt)]);
    let targets_n = targets_bt.index(&[Some(&has_target_bt)]);
    let none = tch::Reduction::None;
    let losses_n =
        llama.logits(&hidden_nh, Adapters::Off).cross_entropy_loss::<Tensor>(&targets_n, None, none, IGNORE, 0.0);
    (losses_n, has_target_bt)
}

/// Tokens and targets `[B, T]`: each target is the row's next token; none at its end and in the padding.
fn tensors(batch: &[&Row]) -> (Tensor, Tensor) {
    let t = batch.iter().map(|row| row.ids.len()).max().unwrap_or(0);
    let shape = [batch.len() as i64, t as i64];
    let padded =
        |ids: &[i64], with: i64| -> Vec<i64> { ids.iter().copied().chain(std::iter::repeat(with)).take(t).collect() };
    let tokens: Vec<i64> = batch.iter().flat_map(|row| padded(&row.ids, 0)).collect();
    let targets: Vec<i64> = batch.iter().flat_map(|row| padded(&row.ids[1..], IGNORE)).collect();
    (Tensor::from_slice(&tokens).view(shape), Tensor::from_slice(&targets).view(shape))
}

/// All rows in a new order, in batches of at most [`BATCH_TOKENS`] with little padding.
fn batches_of_like_length(rows: &[Row], rng: &mut ChaCha8Rng) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.shuffle(rng);
    let mut batches = Vec::new();
    for window in order.chunks_mut(SHUFFLE_WINDOW) {
        window.sort_by_key(|&at| rows[at].ids.len());
        let mut batch: Vec<usize> = Vec::new();
        for &at in &*window {
            if rows[at].ids.len() * (batch.len() + 1) > BATCH_TOKENS {
                batches.push(std::mem::take(&mut batch));
            }
            batch.push(at);
        }
        batches.push(batch);
    }
    batches.shuffle(rng);
    batches
}

/// Saves in bfloat16, as published models do.
fn save(llama: &Llama, path: &Path) -> Result<()> {
    let rounded: Vec<(String, Tensor)> =
        llama.weights().into_iter().map(|(name, weight)| (name, weight.detach().to_kind(Kind::BFloat16))).collect();
    let tensors: Vec<(String, &Tensor)> = rounded.iter().map(|(name, weight)| (name.clone(), weight)).collect();
    Ok(weights::save(path, &tensors)?)
}

/// Mean loss over the tokens of answers and over those of questions.
fn evaluate(llama: &Llama, rows: &[Row]) -> (f64, f64) {
    let mut sums = [(0.0, 0.0); 2];
    for row in rows {
        let (tokens_bt, targets_bt) = tensors(&[row]);
        let losses = Vec::<f64>::try_from(token_losses(llama, &tokens_bt, &targets_bt).0).expect("one dimension");
        for (loss, &is_answer) in losses.into_iter().zip(&row.is_answer[1..]) {
            let (sum, count) = &mut sums[usize::from(!is_answer)];
            *sum += loss;
            *count += 1.0;
        }
    }
    let [answers, questions] = sums.map(|(sum, count)| sum / count);
    (answers, questions)
}

/// Reports, by category, how many held-out questions are answered exactly as by the generator, and lists the others.
fn report_answers(llama: &Llama, tokenizer: &Tokenizer, set: &ConversationSet) -> Result<()> {
    let mut right: HashMap<&str, (usize, usize)> = HashMap::new();
    let mut wrong = Vec::new();
    for conversation in &set.prompts {
        let turn = &conversation.turns[0];
        let got = answer(llama, tokenizer, &turn.question)?;
        let (hits, all) = right.entry(conversation.category).or_default();
        *all += 1;
        if got == turn.answer {
            *hits += 1;
        } else {
            wrong.push(format!("{}\n  got      {got:?}\n  expected {:?}", turn.question, turn.answer));
        }
    }
    let mut lines: Vec<String> = right.iter().map(|(name, (hits, all))| format!("{name} {hits}/{all}")).collect();
    lines.sort();
    eprintln!("answers of prompts.jsonl that are the generator's to the letter: {}", lines.join(", "));
    wrong.iter().for_each(|text| eprintln!("{text}"));
    Ok(())
}

/// Greedy decoding of one question.
fn answer(llama: &Llama, tokenizer: &Tokenizer, question: &str) -> Result<String> {
    let end = id(tokenizer, EOS)?;
    let mut next = encode_text(tokenizer, &format!("{USER}{question}{EOS}{ASSISTANT}"))?;
    anyhow::ensure!(next[0] == id(tokenizer, BOS)? && next[1] != next[0], "one BOS opens a text");
    let mut cache = KvCache::with_one_row(&llama.config, Kind::Float, Device::Cpu);
    let mut ids = Vec::new();
    while ids.len() < MAX_NEW_TOKENS {
        let n = next.len() as i64;
        let new = NewTokens::chain(n, &llama.config, Kind::Float, Device::Cpu);
        let hidden_nh = llama.extend(&Tensor::from_slice(&next), &new, &mut cache, 0);
        cache.commit(0, n);
        let id = llama.logits(&hidden_nh.narrow(0, n - 1, 1), Adapters::Off).argmax(-1, false).int64_value(&[0]);
        if id == end {
            break;
        }
        ids.push(u32::try_from(id)?);
        next = vec![id];
    }
    tokenizer.decode(&ids, true).map_err(anyhow::Error::from_boxed)
}
