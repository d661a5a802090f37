//! Promise: `--acceptance rejection` is lossless. The first three tokens follow the backbone's own distribution, whatever drafts, and the
//! same test detects rules that are nearly right.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use medusa::decode::DecodeLoop;
use medusa::decode::batch::SequenceBatch;
use medusa::decode::host_loop::HostLoop;
use medusa::decode::request::Request;
use medusa::decode::step::Drafting;
use medusa::decode::texts::TextDecoder;
use medusa::draft::Drafter;
use medusa::draft::heads::{Heads, HeadsShape};
use medusa::draft::joined::JoinedDrafter;
use medusa::draft::levels::LevelDrafter;
use medusa::draft::lookahead::{LookaheadDrafter, LookaheadSize};
use medusa::draft::medusa::drafter::MedusaDrafter;
use medusa::draft::model::{Guessing, ModelGuesser};
use medusa::draft::ngram::NgramDrafter;
use medusa::draft::recycling::RecyclingDrafter;
use medusa::dtype::DraftDtype;
use medusa::engine::Engine;
use medusa::engine::cpu::CpuEngine;
use medusa::engine::sample::{Sampling, Stream};
use medusa::engine::tch::TchEngine;
use medusa::formats::tree::DynamicTree;
use medusa::model::attention::RowMask;
use medusa::model::config::{Biases, FamilyTraits, LlamaConfig, RopeScaling};
use medusa::model::llama::Llama;
use medusa::model::lora::Adapters;
use medusa::numbers::{NonNegative, Probability};
use medusa::tree::accept::{self, Acceptance};
use medusa::tree::rejection::{DrawnChildren, next_token};
use medusa::tree::sparse_tree::SparseTree;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

const VOCABULARY: usize = 16;
/// Holds every token, so that prompt lookup always finds one.
const PROMPT: [i64; 19] = [7, 1, 2, 0, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 1, 2, 3];
/// Tokens whose joint distribution is tested.
const TOKENS: usize = 3;

/// Random weights, scaled so that the next token is neither certain nor uniform.
fn backbone() -> Llama {
    random(Kind::Double, 21)
}

/// A model that is often wrong, but not always.
fn draft_model() -> Llama {
    let (draft, backbone) = (random(Kind::Double, 24), backbone());
    for ((_, weight), (_, of_backbone)) in draft.weights().iter().zip(backbone.weights()) {
        weight.shallow_clone().copy_(&(0.1 * *weight + 0.95 * of_backbone));
    }
    draft
}

fn random(kind: Kind, seed: u64) -> Llama {
    tch::set_num_threads(1);
    let config = LlamaConfig {
        model_type: "llama".into(),
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        vocab_size: VOCABULARY as i64,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window: None,
        tie_word_embeddings: false,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        eos_token_ids: vec![],
    };
    let llama = Llama::random(config, kind, Device::Cpu, seed);
    fill(llama.weights().iter().map(|(_, weight)| *weight).filter(|weight| weight.dim() == 2), 0.34, seed);
    llama
}

/// Fills weights with this standard deviation from a separate generator, since libtorch's is shared with concurrent
/// tests.
fn fill<'t>(weights: impl Iterator<Item = &'t Tensor>, deviation: f64, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for weight in weights {
        let numbers: Vec<f64> =
            (0..weight.numel()).map(|_| (rng.random::<f64>() - 0.5) * 12f64.sqrt() * deviation).collect();
        weight.shallow_clone().copy_(&Tensor::from_slice(&numbers).view_as(weight));
    }
}

fn heads() -> Heads {
    heads_in(Kind::Double)
}

fn heads_in(kind: Kind) -> Heads {
    let shape = HeadsShape {
        medusa_num_heads: 3,
        medusa_num_layers: 1,
        hidden_size: 32,
        vocab_size: VOCABULARY as i64,
        ..HeadsShape::default()
    };
    let heads = Heads::random(shape, kind, Device::Cpu, 22);
    fill(heads.parameters().iter().map(|(_, tensor)| *tensor), 0.1, 22);
    heads
}

/// Depth 3, with more guesses where they are more likely to be right.
fn tree() -> SparseTree {
    SparseTree::cartesian(&[6, 4, 2]).expect("a tree")
}

/// The backbone's exact conditionals after the prompt and up to two more tokens.
struct Conditionals {
    /// Indexed by the tokens after the prompt, read as digits: one row, then 16, then 256.
    after: [Vec<Vec<f64>>; TOKENS],
}

fn number(tokens: &[i64]) -> usize {
    tokens.iter().fold(0, |number, &token| number * VOCABULARY + token as usize)
}

fn digits(mut number: usize, length: usize) -> Vec<i64> {
    let mut tokens: Vec<i64> = (0..length)
        .map(|_| {
            let digit = number % VOCABULARY;
            number /= VOCABULARY;
            digit as i64
        })
        .collect();
    tokens.reverse();
    tokens
}

impl Conditionals {
    /// Computed by plain passes over whole rows: no cache, no tree.
    fn of(llama: &Llama, temperature: f64) -> Self {
        Self::of_kept(llama, temperature, VOCABULARY, 1.0)
    }

    /// Of the `top_k` most probable tokens, those that together reach `top_p`.
    fn of_kept(llama: &Llama, temperature: f64, top_k: usize, top_p: f64) -> Self {
        Self {
            after: [0, 1, 2].map(|length| {
                let rows: Vec<i64> = (0..VOCABULARY.pow(length as u32))
                    .flat_map(|text| [&PROMPT[..], &digits(text, length)].concat())
                    .collect();
                let t = (PROMPT.len() + length) as i64;
                let tokens_bt = Tensor::from_slice(&rows).view([-1, t]);
                let hidden_bth =
                    llama.hidden_states(&tokens_bt, &RowMask::causal(t, &llama.config, Device::Cpu), Adapters::Off);
                let logits_bv = llama.logits(&hidden_bth.select(1, t - 1), Adapters::Off);
                let mut rows: Vec<Vec<f64>> =
                    Vec::try_from((logits_bv / temperature).softmax(-1, Kind::Double)).expect("two axes of float64");
                for row in &mut rows {
                    keep_top_k(row, top_k);
                    keep_nucleus(row, top_p);
                }
                rows
            }),
        }
    }

    fn after(&self, tokens: &[i64]) -> &[f64] {
        &self.after[tokens.len()][number(tokens)]
    }

    /// The probability of each text of three tokens.
    fn joint(&self) -> Vec<f64> {
        let probability = |text: usize| {
            let tokens = digits(text, TOKENS);
            (0..TOKENS).map(|at| self.after(&tokens[..at])[tokens[at] as usize]).product()
        };
        (0..VOCABULARY.pow(TOKENS as u32)).map(probability).collect()
    }
}

/// Keeps the `top_k` most probable tokens.
fn keep_top_k(row: &mut [f64], top_k: usize) {
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[top_k - 1];
    row.iter_mut().filter(|p| **p < least).for_each(|p| *p = 0.0);
    let kept: f64 = row.iter().sum();
    row.iter_mut().for_each(|p| *p /= kept);
}

/// Keeps the most probable tokens that together reach `top_p`.
fn keep_nucleus(row: &mut [f64], top_p: f64) {
    let mut sorted: Vec<usize> = (0..row.len()).collect();
    sorted.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    let mut mass = 0.0;
    for token in sorted {
        let is_outside = mass >= top_p;
        mass += row[token];
        if is_outside {
            row[token] = 0.0;
        }
    }
    let kept: f64 = row.iter().sum();
    row.iter_mut().for_each(|p| *p /= kept);
}

/// The distance of counts from their expectation: the chi-square statistic converted to deviations of a standard normal
/// (Wilson and Hilferty 1931: its cube root is nearly normal). Cells that expect fewer than five draws are merged.
fn deviations(counts: &[usize], probabilities: &[f64]) -> f64 {
    let draws = counts.iter().sum::<usize>() as f64;
    let mut cells: Vec<(f64, usize)> = probabilities.iter().map(|p| p * draws).zip(counts.iter().copied()).collect();
    cells.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut merged: Vec<(f64, usize)> = vec![];
    for cell in cells {
        match merged.last_mut().filter(|last| last.0 < 5.0) {
            Some(last) => *last = (last.0 + cell.0, last.1 + cell.1),
            None => merged.push(cell),
        }
    }
    if merged.len() > 1 && merged[merged.len() - 1].0 < 5.0 {
        let rest = merged.pop().expect("there are two");
        let last = merged.last_mut().expect("there is one");
        *last = (last.0 + rest.0, last.1 + rest.1);
    }
    let square: f64 = merged.iter().map(|&(expected, count)| (count as f64 - expected).powi(2) / expected).sum();
    let ninth = 2.0 / (9.0 * (merged.len() - 1) as f64);
    assert!(merged.len() > 50, "too few cells to see anything: {}", merged.len());
    ((square * ninth * 4.5).cbrt() - (1.0 - ninth)) / ninth.sqrt()
}

/// A standard normal exceeds it one time in a thousand.
const ONE_IN_A_THOUSAND: f64 = 3.0902;

fn draw(p: &[f64], rng: &mut ChaCha8Rng) -> i64 {
    let number = rng.random::<f64>();
    let mut below = 0.0;
    let chosen = p.iter().position(|p| {
        below += p;
        below > number
    });
    chosen.unwrap_or(p.len() - 1) as i64
}

/// Guesses at the nodes of a tree after a text: arbitrary, as long as siblings differ.
fn guesses(tree: &SparseTree, text: &[i64], root: i64) -> Vec<i64> {
    let guess = |node: usize| match tree.child_index(node) {
        None => root,
        Some(child) => ((5 * child + 7 * tree.depth(node) + 3 * number(text) + 1) % VOCABULARY) as i64,
    };
    (0..tree.len()).map(guess).collect()
}

/// The rule of a step: maps the guesses and the draw after each node to the path and the next root.
type Rule = fn(&SparseTree, &[i64], &mut dyn FnMut(usize) -> i64) -> (Vec<usize>, i64);

fn at_nodes(tree: &SparseTree, tokens: &[i64], draw: &mut dyn FnMut(usize) -> i64) -> (Vec<usize>, i64) {
    accept::walk(tree, tokens, draw)
}

/// A wrong rule: each candidate, root to leaf, draws for itself, and the longest accepted one wins.
fn along_candidates(tree: &SparseTree, tokens: &[i64], draw: &mut dyn FnMut(usize) -> i64) -> (Vec<usize>, i64) {
    let leaves = (0..tree.len()).filter(|&node| tree.children(node).is_empty());
    let candidates = leaves.map(|leaf| {
        let mut nodes: Vec<usize> = std::iter::successors(Some(leaf), |&node| tree.parent(node)).collect();
        nodes.reverse();
        let mut kept = vec![0];
        loop {
            let drawn = draw(kept[kept.len() - 1]);
            match nodes.get(kept.len()).filter(|&&next| tokens[next] == drawn) {
                Some(&next) => kept.push(next),
                None => return (kept, drawn),
            }
        }
    });
    candidates.max_by_key(|(kept, _)| kept.len()).expect("a tree has a leaf")
}

/// Counts of the first three tokens of texts decoded by a rule, and the mean tokens per step.
fn decoded(conditionals: &Conditionals, rule: Rule, draws: usize) -> (Vec<usize>, f64) {
    let (tree, mut rng) = (tree(), ChaCha8Rng::seed_from_u64(23));
    let (mut counts, mut tokens, mut steps) = (vec![0; VOCABULARY.pow(TOKENS as u32)], 0, 0);
    for _ in 0..draws {
        let mut text: Vec<i64> = vec![];
        let mut root = draw(conditionals.after(&[]), &mut rng);
        while text.len() < TOKENS {
            let guessed = guesses(&tree, &text, root);
            let mut after = |node: usize| {
                let mut path: Vec<i64> =
                    std::iter::successors(Some(node), |&n| tree.parent(n)).map(|n| guessed[n]).collect();
                path.reverse();
                let text = [&text[..], &path].concat();
                // Tokens after the third one are not counted.
                if text.len() < TOKENS { draw(conditionals.after(&text), &mut rng) } else { 0 }
            };
            let (path, next) = rule(&tree, &guessed, &mut after);
            text.extend(path.iter().map(|&node| guessed[node]));
            (tokens, steps) = (tokens + path.len(), steps + 1);
            root = next;
        }
        counts[number(&text[..TOKENS])] += 1;
    }
    (counts, tokens as f64 / f64::from(steps))
}

#[test]
fn deciding_at_nodes_is_lossless_and_along_candidates_it_is_not() {
    let llama = backbone();
    for temperature in [0.7, 1.0] {
        let conditionals = Conditionals::of(&llama, temperature);
        let joint = conditionals.joint();
        let entropy = -conditionals.after(&[]).iter().map(|p| p * p.ln()).sum::<f64>();
        assert!((0.7..2.5).contains(&entropy), "neither a spike nor flat: {entropy} nats of at most 2.77");
        let (counts, rate) = decoded(&conditionals, at_nodes, 20_000);
        let off = deviations(&counts, &joint);
        assert!(off.abs() < ONE_IN_A_THOUSAND && rate > 1.2, "temperature {temperature}: {off}, {rate} tokens a step");
        let (counts, rate) = decoded(&conditionals, along_candidates, 20_000);
        let wrong = deviations(&counts, &joint);
        assert!(wrong > 10.0 * ONE_IN_A_THOUSAND, "temperature {temperature}: {wrong}, {rate} tokens a step");
    }
}

/// The token after a node, given the backbone's distribution and the guesses that were drawn.
type DrawnRule = fn(&[f64], &DrawnChildren, &mut ChaCha8Rng) -> i64;

fn with_residual(p: &[f64], guesses: &DrawnChildren, rng: &mut ChaCha8Rng) -> i64 {
    next_token(p.to_vec(), guesses, || rng.random()).expect("a distribution")
}

/// A wrong rule: after a rejection, the token is drawn from the whole distribution.
fn without_residual(p: &[f64], guesses: &DrawnChildren, rng: &mut ChaCha8Rng) -> i64 {
    let q = &guesses.sources[0];
    let accepted = guesses.guesses.iter().find(|guess| {
        let at = guess.token as usize;
        rng.random::<f64>() * q[at] < p[at]
    });
    accepted.map_or_else(|| draw(p, rng), |guess| guess.token)
}

/// A wrong rule: a guess is accepted exactly if the backbone finds it at least as probable as the draft model does.
fn without_chance(p: &[f64], guesses: &DrawnChildren, rng: &mut ChaCha8Rng) -> i64 {
    let q = &guesses.sources[0];
    let accepted = guesses.guesses.iter().find(|guess| p[guess.token as usize] >= q[guess.token as usize]);
    let rest: Vec<f64> = p.iter().zip(q.iter()).map(|(p, q)| (p - q).max(0.0)).collect();
    let rest: Vec<f64> = rest.iter().map(|p| p / rest.iter().sum::<f64>()).collect();
    accepted.map_or_else(|| draw(&rest, rng), |guess| guess.token)
}

/// Counts of the first three tokens where each is decided by a rule, after guesses of the draft model.
fn decided(p: &Conditionals, q: &Conditionals, siblings: usize, rule: DrawnRule) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(25);
    let mut counts = vec![0; VOCABULARY.pow(TOKENS as u32)];
    for _ in 0..20_000 {
        let mut text: Vec<i64> = vec![];
        while text.len() < TOKENS {
            let guesses = DrawnChildren::draw(q.after(&text).to_vec(), siblings, || rng.random());
            let next = rule(p.after(&text), &guesses, &mut rng);
            text.push(next);
        }
        counts[number(&text)] += 1;
    }
    counts
}

#[test]
fn guesses_that_were_drawn_are_judged_by_both_distributions() {
    let (llama, draft) = (backbone(), draft_model());
    for temperature in [0.8, 1.2] {
        let [p, q] = [&llama, &draft].map(|model| Conditionals::of(model, temperature));
        let overlap: f64 = p.after(&[]).iter().zip(q.after(&[])).map(|(p, q)| p.min(*q)).sum();
        assert!((0.2..0.9).contains(&overlap), "the draft model is right now and then: {overlap}");
        for siblings in [1, 3] {
            let off = |rule| deviations(&decided(&p, &q, siblings, rule), &p.joint());
            let right = off(with_residual);
            assert!(right.abs() < ONE_IN_A_THOUSAND, "temperature {temperature}, {siblings} siblings: {right}");
            for (wrong, name) in [(off(without_residual), "residual"), (off(without_chance), "chance")] {
                assert!(
                    wrong > 5.0 * ONE_IN_A_THOUSAND,
                    "temperature {temperature}, {siblings} siblings, no {name}: {wrong}"
                );
            }
        }
    }
}

/// Counts of the first three tokens of texts, and the steps that they took.
fn generated<'a>(llama: &'a Llama, sampling: Sampling, drafter: impl Drafter + 'a) -> (Vec<usize>, usize) {
    generated_on(Box::new(TchEngine::new(llama)), sampling, drafter)
}

fn generated_on<'a>(
    engine: Box<dyn Engine + 'a>,
    sampling: Sampling,
    drafter: impl Drafter + 'a,
) -> (Vec<usize>, usize) {
    let (mut counts, mut steps) = (vec![0; VOCABULARY.pow(TOKENS as u32)], 0);
    let drafter: Box<dyn Drafter + 'a> = Box::new(drafter);
    let mut decoding = HostLoop::new(engine, Some((drafter, Acceptance::Rejection)));
    for seed in 0..TEXTS {
        let stream = Stream { seed: 1000 + seed as u64, ..Stream::default() };
        let request = Request { sampling, stream, ..Request::greedy(&PROMPT, TOKENS) };
        let text = decoding.decode(Drafting::On, &request, &mut |_| ControlFlow::Continue(())).expect("decodes");
        counts[number(&text.new_ids)] += 1;
        steps += text.accept_lengths.len();
    }
    (counts, steps)
}

/// As [`generated`], twenty texts at a time, whose prompts are computed in pieces.
fn generated_together<'a>(
    llama: &'a Llama,
    samplings: [Sampling; 2],
    drafter: impl Drafter + 'a,
) -> [(Vec<usize>, usize); 2] {
    let mut results = [0; 2].map(|_| (vec![0; VOCABULARY.pow(TOKENS as u32)], 0));
    let number_of = |number| NonZeroUsize::new(number).expect("above 0");
    let drafter: Box<dyn Drafter + 'a> = Box::new(drafter);
    let engine = Box::new(TchEngine::for_batches(llama));
    let mut batch = SequenceBatch::new(engine, Some((drafter, Acceptance::Rejection)), number_of(20))
        .with_prompt_tokens(number_of(30));
    let mut next = 0;
    while next < 2 * TEXTS || !batch.is_idle() {
        while batch.has_room() && next < 2 * TEXTS {
            let stream = Stream { seed: 1000 + next as u64, ..Stream::default() };
            let request = Request { sampling: samplings[next % 2], stream, ..Request::greedy(&PROMPT, TOKENS) };
            batch.enter(next, &request).expect("a prompt that fits");
            next += 1;
        }
        for (key, text) in batch.step().expect("decodes") {
            let (counts, steps) = &mut results[key % 2];
            let text = text.expect("finite logits");
            counts[number(&text.new_ids)] += 1;
            *steps += text.accept_lengths.len();
        }
    }
    results
}

#[test]
fn what_a_batch_makes_by_rejection_has_the_backbones_own_distribution() {
    let (llama, heads, tree, draft) = (backbone(), heads(), tree(), draft_model());
    let guesser = Box::new(ModelGuesser::new(Box::new(TchEngine::for_batches(&draft)), VOCABULARY, 2, Guessing::Drawn));
    let small = SparseTree::cartesian(&[3, 2]).expect("a tree");
    let temperatures = [0.8, 1.2];
    let samplings =
        temperatures.map(|temperature| Sampling::with_temperature(NonNegative::new(temperature).expect("at least 0")));
    let of_heads = generated_together(&llama, samplings, MedusaDrafter::new(&llama, &heads, &tree).expect("they fit"));
    let of_model = generated_together(&llama, samplings, LevelDrafter::for_tree(&llama, guesser, &small));
    for (name, results) in [("heads", of_heads), ("a draft model's tree", of_model)] {
        for ((counts, steps), temperature) in results.iter().zip(temperatures) {
            let off = deviations(counts, &Conditionals::of(&llama, temperature).joint());
            assert!(off.abs() < ONE_IN_A_THOUSAND, "{name}, temperature {temperature}: {off}");
            assert!(*steps < TEXTS * 29 / 10, "{name}: {steps} steps of {TEXTS} texts");
        }
        let [_, (counts, _)] = &results;
        let wrong = deviations(counts, &Conditionals::of(&llama, temperatures[0]).joint());
        assert!(wrong > ONE_IN_A_THOUSAND, "{name}: as if all texts had one temperature: {wrong}");
    }
}

const TEXTS: usize = 500;

#[test]
fn what_generate_makes_by_rejection_has_the_backbones_own_distribution() {
    let (llama, heads, tree, draft) = (backbone(), heads(), tree(), draft_model());
    let (chain, small) = (SparseTree::chain(2).expect("a chain"), SparseTree::cartesian(&[3, 2]).expect("a tree"));
    let guesser = || Box::new(ModelGuesser::new(Box::new(TchEngine::new(&draft)), VOCABULARY, 2, Guessing::Drawn));
    let limits = DynamicTree { nodes: 8, depth: 2, top_k: 4 };
    let model = |tree: &SparseTree| LevelDrafter::for_tree(&llama, guesser(), tree);
    for (temperature, top_p) in [(0.8, 1.0), (1.2, 1.0), (1.2, 0.8)] {
        let sampling = Sampling {
            top_p: Probability::new(top_p).expect("above 0"),
            ..Sampling::with_temperature(NonNegative::new(temperature).expect("at least 0"))
        };
        let joint = Conditionals::of_kept(&llama, temperature, VOCABULARY, top_p).joint();
        let of_heads = MedusaDrafter::new(&llama, &heads, &tree).expect("they fit");
        let dynamic = LevelDrafter::dynamic(&llama, guesser(), limits);
        let mut runs = vec![
            ("a draft model's chain", generated(&llama, sampling, model(&chain))),
            ("a draft model's tree", generated(&llama, sampling, model(&small))),
            ("a draft model's trees, chosen at each step", generated(&llama, sampling, dynamic)),
        ];
        if top_p == 1.0 {
            runs.extend([
                ("heads", generated(&llama, sampling, of_heads)),
                ("prompt lookup", generated(&llama, sampling, NgramDrafter::new(&llama))),
            ]);
        } else {
            let parts: Vec<Box<dyn Drafter>> = vec![Box::new(NgramDrafter::new(&llama)), Box::new(of_heads)];
            let lookahead = LookaheadDrafter::new(&llama, LookaheadSize { columns: 2, ngram: 3, guesses: 3 });
            runs.extend([
                ("token recycling", generated(&llama, sampling, RecyclingDrafter::new(&llama))),
                ("lookahead", generated(&llama, sampling, lookahead)),
                ("heads and prompt lookup", generated(&llama, sampling, JoinedDrafter::new(&llama, parts, 12))),
            ]);
        }
        for (name, (counts, steps)) in runs {
            let off = deviations(&counts, &joint);
            assert!(off.abs() < ONE_IN_A_THOUSAND, "temperature {temperature}, top-p {top_p}, {name}: {off}");
            assert!(steps < TEXTS * 29 / 10, "{name}: {steps} steps of {TEXTS} texts");
        }
    }
}

/// On weights in blocks of 8 bits, which the kernels multiply by activations in 8 bits.
#[test]
#[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
fn what_the_kernels_make_of_blocks_by_rejection_has_the_backbones_own_distribution() {
    let llama = random(Kind::Float, 21).for_guesses(DraftDtype::Int8);
    let (heads, tree) = (heads_in(Kind::Float), tree());
    let engine = || Box::new(CpuEngine::new(&llama).expect("kernels"));
    let sampling = Sampling::with_temperature(NonNegative::new(0.8).expect("at least 0"));
    let joint = Conditionals::of_kept(&llama, 0.8, VOCABULARY, 1.0).joint();
    let of_heads = MedusaDrafter::new(&llama, &heads, &tree).expect("they fit");
    for (name, (counts, steps)) in [
        ("heads", generated_on(engine(), sampling, of_heads)),
        ("prompt lookup", generated_on(engine(), sampling, NgramDrafter::new(&llama))),
    ] {
        let off = deviations(&counts, &joint);
        assert!(off.abs() < ONE_IN_A_THOUSAND, "{name}: {off}");
        assert!(steps < TEXTS * 29 / 10, "{name}: {steps} steps of {TEXTS} texts");
    }
}

/// Both distributions, the backbone's and the draft model's, lose the tokens beyond the K most probable ones.
#[test]
fn guesses_that_were_drawn_are_judged_by_what_top_k_leaves() {
    let (llama, draft) = (backbone(), draft_model());
    let guesser = || Box::new(ModelGuesser::new(Box::new(TchEngine::new(&draft)), VOCABULARY, 2, Guessing::Drawn));
    let trees = [SparseTree::chain(2).expect("a chain"), SparseTree::cartesian(&[3, 2]).expect("a tree")];
    for (top_k, top_p) in [(5, 1.0), (7, 0.9)] {
        let sampling = Sampling {
            top_k: NonZeroUsize::new(top_k),
            top_p: Probability::new(top_p).expect("above 0"),
            ..Sampling::with_temperature(NonNegative::new(1.2).expect("at least 0"))
        };
        let [joint, of_all] = [top_k, VOCABULARY].map(|top_k| Conditionals::of_kept(&llama, 1.2, top_k, top_p).joint());
        for tree in &trees {
            let (counts, steps) = generated(&llama, sampling, LevelDrafter::for_tree(&llama, guesser(), tree));
            let (off, wrong) = (deviations(&counts, &joint), deviations(&counts, &of_all));
            assert!(off.abs() < ONE_IN_A_THOUSAND, "top-k {top_k}, top-p {top_p}: {off}");
            assert!(wrong > ONE_IN_A_THOUSAND, "top-k {top_k}, top-p {top_p}, as if without top-k: {wrong}");
            assert!(steps < TEXTS * 29 / 10, "{steps} steps of {TEXTS} texts");
        }
    }
}
