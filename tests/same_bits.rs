//! Promise: on a CPU with our kernels, in float32, the logits of an accepted path equal plain decoding's bit for bit.

use medusa::data::chat_template::ChatTemplate;
use medusa::data::prompts;
use medusa::data::tokenize::{TextTokenizer, wide};
use medusa::engine::fastest::fastest;
use medusa::engine::{Engine, RowTokens};
use medusa::model::kv_cache::KvCache;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::new_tokens::NewTokens;
use medusa::tree::accept;
use medusa::tree::sparse_tree::SparseTree;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use crate::embedded_default::tiny;

const PROMPTS: usize = 32;
const NEW_TOKENS: usize = 12;

/// A cache whose row 0 has a prompt, and the logits `[1, V]` after it.
fn prefill(engine: &dyn Engine, prompt: &[i64]) -> (KvCache, Tensor) {
    let llama = engine.backbone();
    let (row, mut cache) = (0, KvCache::with_one_row(&llama.config, llama.kind(), llama.device()));
    let new = NewTokens::chain(prompt.len() as i64, &llama.config, Kind::Float, Device::Cpu);
    let hidden_nh = engine.extend(&mut cache, &Tensor::from_slice(prompt), &[RowTokens { row, nodes: &new }]);
    cache.commit(row, new.len());
    let logits_1v = engine.logits(&hidden_nh.narrow(0, new.len() - 1, 1));
    (cache, logits_1v)
}

/// Greedy decoding, one token at a time: the tokens, and the logits before each token and after the last, `[tokens + 1,
/// V]`.
fn plainly(llama: &Llama, prompt: &[i64]) -> (Vec<i64>, Tensor) {
    let engine = fastest(llama);
    let (mut cache, logits_1v) = prefill(&*engine, prompt);
    let (mut tokens, mut logits) = (vec![], vec![logits_1v]);
    let one = NewTokens::chain(1, &llama.config, Kind::Float, Device::Cpu);
    while tokens.len() < NEW_TOKENS {
        let token = logits[logits.len() - 1].argmax(-1, false);
        tokens.push(token.int64_value(&[0]));
        let hidden_1h = engine.extend(&mut cache, &token, &[RowTokens { row: 0, nodes: &one }]);
        cache.commit(0, 1);
        logits.push(engine.logits(&hidden_1h));
    }
    (tokens, Tensor::cat(&logits, 0))
}

/// Tokens for the tree's nodes: random, but on one random branch those of the text, as heads could guess them.
fn filled(tree: &SparseTree, text: &[i64], vocabulary: i64, rng: &mut ChaCha8Rng) -> Vec<i64> {
    let leaf = rng.random_range(0..tree.len());
    let on_branch = |node: usize| tree.attends(leaf, node);
    (0..tree.len())
        .map(|node| match text.get(tree.depth(node)) {
            Some(&token) if on_branch(node) => token,
            _ => rng.random_range(0..vocabulary),
        })
        .collect()
}

#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn logits_of_an_accepted_path_are_plain_decodings_to_the_bit_on_32_prompts() {
    let llama =
        Llama::load(&tiny("backbone"), Kind::Float, Device::Cpu, Purpose::Decoding).expect("the embedded default");
    let tokenizer = TextTokenizer::load(&tiny("backbone")).expect("the embedded default");
    let template = ChatTemplate::load(&tiny("backbone")).expect("the embedded default");
    let choices: [&[usize]; 9] = [&[0], &[1], &[2], &[0, 0], &[0, 1], &[1, 0], &[0, 0, 0], &[0, 0, 1], &[0, 0, 0, 0]];
    let tree = SparseTree::new(choices.iter().map(|choice| choice.to_vec()).collect()).expect("a tree");
    let offsets: Vec<i64> = (0..tree.len()).map(|node| tree.depth(node) as i64).collect();
    let sees = |query, key| tree.attends(query, key);
    let nodes = NewTokens::pattern(&offsets, sees, &llama.config, Kind::Float, Device::Cpu);
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut longest = 0;
    let all = prompts::read(&tiny("prompts.jsonl")).expect("the embedded default");
    assert!(all.len() >= PROMPTS);
    for prompt in &all[..PROMPTS] {
        let prompt = wide(&prompts::to_ids(&prompt.input, &tokenizer, template.as_ref()).expect("token ids"));
        let (text, plain_logits) = plainly(&llama, &prompt);
        let engine = fastest(&llama);
        let (mut cache, logits_1v) = prefill(&*engine, &prompt);
        assert_eq!(logits_1v.get(0), plain_logits.get(0), "after the prompt");
        let mut done = 0;
        while done < text.len() {
            let tokens = filled(&tree, &text[done..], llama.config.vocab_size, &mut rng);
            let hidden_nh =
                engine.extend(&mut cache, &Tensor::from_slice(&tokens), &[RowTokens { row: 0, nodes: &nodes }]);
            let logits_nv = engine.logits(&hidden_nh);
            let best = |node: usize| logits_nv.get(node as i64).argmax(-1, false).int64_value(&[]);
            let (path, _) = accept::walk(&tree, &tokens, best);
            for (at, &node) in path.iter().enumerate().take(text.len() - done) {
                assert_eq!(logits_nv.get(node as i64), plain_logits.get((done + at + 1) as i64), "token {}", done + at);
            }
            cache.commit_path(0, &path);
            longest = longest.max(path.len());
            done += path.len();
        }
    }
    assert_eq!(longest, 5, "a whole branch was accepted at least once");
}
