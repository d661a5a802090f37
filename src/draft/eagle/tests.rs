//! What training computes is what decoding guesses, and gradients are those of autograd.

use tch::{Device, Kind, Tensor};

use super::levels::EagleLevels;
use super::weights::Eagle;
use crate::data::loader::Batch;
use crate::draft::levels::LevelGuesser;
use crate::draft::loss::fused::{OutputGradients, OutputLayer};
use crate::draft::loss::{Targets, cross_entropy_at};
use crate::draft::trained::{DrafterBatch, DrafterGradients, LevelTargets, LevelTask, TrainedDrafter};
use crate::draft::{CommittedTokens, TextSoFar};
use crate::engine::sample::{Chosen, Sampling, Stream};
use crate::model::attention::RowMask;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::taps::Taps;
use crate::numbers::NonNegative;
use crate::torch::Generator;
use crate::tree::dynamic::FrontierNode;

const STEPS: usize = 4;

fn backbone(config: LlamaConfig) -> Llama {
    tch::set_num_threads(1);
    let mut llama = Llama::random(config, Kind::Double, Device::Cpu, 1);
    for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
        let _ = weight.shallow_clone().g_mul_scalar_(8.0);
    }
    llama.set_taps(Taps::new([0, 1, 2]));
    llama
}

fn eagle(backbone: &Llama) -> Eagle {
    Eagle::untrained(backbone, None, (backbone.taps().clone(), STEPS), 2)
}

fn random_ids(count: usize, vocabulary: i64, seed: u64) -> Vec<i64> {
    let drawn = Generator::seeded(seed).normal(&[count as i64], (Kind::Double, Device::Cpu)).abs() * 1e4;
    Vec::<i64>::try_from(drawn.to_kind(Kind::Int64).remainder(vocabulary)).unwrap()
}

/// The tokens' states, `[T, W]`.
fn states(backbone: &Llama, ids: &[i64]) -> Tensor {
    let mask = RowMask::causal(ids.len() as i64, &backbone.config, Device::Cpu);
    backbone.hidden_states(&Tensor::from_slice(ids).unsqueeze(0), &mask, Adapters::Off).squeeze_dim(0)
}

/// Log-probabilities `[V]` of the drafter's guess behind the first tokens of a text and a path of guesses, by the training-time test.
fn expected(backbone: &Llama, eagle: &Eagle, text: &[i64], path: &[i64]) -> Tensor {
    let ids = [text, path].concat();
    let (at, step) = (text.len() - 2, path.len());
    let all = eagle.known_text(backbone, &ids).logits(step, &[at as i64]);
    all.log_softmax(-1, Kind::Double).squeeze_dim(0)
}

/// Texts in the rows of a guesser; the last token of each is its root.
struct Texts<'a> {
    backbone: &'a Llama,
    levels: EagleLevels<'a>,
    texts: Vec<Vec<i64>>,
}

impl Texts<'_> {
    /// Commits the tokens behind those of a row, but for the last.
    fn go_on(&mut self, row: usize, more: &[i64]) {
        let before = self.texts[row].len().saturating_sub(1);
        self.texts[row].extend(more);
        let text = &self.texts[row];
        let last = text.len() - 1;
        let states_tw = states(self.backbone, &text[..last]);
        let states_nw = states_tw.narrow(0, before as i64, (last - before) as i64);
        self.levels.committed(row, &CommittedTokens { ids: &text[before..last], states_nw });
    }

    fn begin(&mut self) {
        let state_1w = Tensor::zeros([1, 1], (Kind::Double, Device::Cpu));
        let roots: Vec<Chosen> = self.texts.iter().map(|ids| Chosen::on_host(ids[ids.len() - 1])).collect();
        let text = |(row, (ids, root))| TextSoFar {
            row,
            ids,
            root,
            state_1w: &state_1w,
            sampling: Sampling::with_temperature(NonNegative::ZERO),
            stream: Stream::default(),
            may_draw: false,
        };
        let batch: Vec<TextSoFar> = self.texts.iter().map(Vec::as_slice).zip(&roots).enumerate().map(text).collect();
        self.levels.begin(&batch);
    }

    /// Compares the guesses below every node of trees with two guesses a node, three levels deep.
    fn check(&mut self, eagle: &Eagle) {
        let vocabulary = self.backbone.config.vocab_size as usize;
        self.begin();
        let mut paths: Vec<(usize, Vec<i64>)> = (0..self.texts.len()).map(|text| (text, vec![])).collect();
        let mut frontier: Vec<FrontierNode> = self
            .texts
            .iter()
            .enumerate()
            .map(|(parent, ids)| FrontierNode { parent, token: ids[ids.len() - 1] })
            .collect();
        for level in 0..3 {
            let guesses = self.levels.guess(&frontier, vocabulary);
            let (mut next, mut next_paths) = (vec![], vec![]);
            for (node, ((text, path), guesses)) in paths.iter().zip(guesses.chunks_exact(vocabulary)).enumerate() {
                let expected: Vec<f64> =
                    Vec::try_from(expected(self.backbone, eagle, &self.texts[*text], path)).unwrap();
                for guess in guesses {
                    let off = (f64::from(guess.log_p) - expected[guess.token as usize]).abs();
                    assert!(off < 1e-5, "text {text}, level {level}, path {path:?}: {off}");
                }
                for guess in [0, 7] {
                    let token = guesses[guess].token;
                    next.push(FrontierNode { parent: node, token });
                    next_paths.push((*text, [&path[..], &[token]].concat()));
                }
            }
            (frontier, paths) = (next, next_paths);
        }
    }
}

/// Prompts in pieces, several texts at a time, accepted tokens, and rows that leave.
#[test]
fn guesses_are_the_steps_of_the_training_time_test() {
    for config in LlamaConfig::tiny_of_each_family() {
        let backbone = backbone(config);
        let (eagle, vocabulary) = (eagle(&backbone), backbone.config.vocab_size);
        let mut texts = Texts { backbone: &backbone, levels: EagleLevels::new(&backbone, &eagle), texts: vec![] };
        tch::no_grad(|| {
            for (row, pieces) in [vec![9, 1, 6], vec![2], vec![17, 3]].into_iter().enumerate() {
                texts.levels.push_row();
                texts.texts.push(vec![]);
                for (piece, length) in pieces.into_iter().enumerate() {
                    texts.go_on(row, &random_ids(length, vocabulary, (10 * row + piece) as u64));
                }
            }
            texts.check(&eagle);
            (0..3).for_each(|row| texts.go_on(row, &random_ids(row + 1, vocabulary, 50 + row as u64)));
            texts.levels.swap_remove(0);
            texts.texts.swap_remove(0);
            texts.check(&eagle);
        });
    }
}

/// A text that goes on from an earlier place has guesses, though its last token before that place is missing.
#[test]
fn a_text_that_is_cut_off_goes_on() {
    let backbone = backbone(LlamaConfig::tiny());
    let (eagle, vocabulary) = (eagle(&backbone), backbone.config.vocab_size);
    let mut texts = Texts { backbone: &backbone, levels: EagleLevels::new(&backbone, &eagle), texts: vec![vec![]] };
    tch::no_grad(|| {
        texts.levels.push_row();
        texts.go_on(0, &random_ids(12, vocabulary, 1));
        texts.begin();
        texts.levels.truncate(0, 5);
        texts.texts[0].truncate(5);
        let more = random_ids(4, vocabulary, 2);
        let states_tw = states(&backbone, &[&texts.texts[0][..], &more[..3]].concat());
        let states_nw = states_tw.narrow(0, 5, 3);
        texts.levels.committed(0, &CommittedTokens { ids: &more[..3], states_nw });
        texts.texts[0].extend(&more);
        texts.begin();
        let root = FrontierNode { parent: 0, token: more[3] };
        let guesses = texts.levels.guess(&[root], 4);
        assert!(guesses.iter().all(|guess| guess.log_p.is_finite()));
    });
}

/// Every token of the rows that step `step` can predict.
fn targets_at_step(rows: &Batch, step: usize) -> Targets {
    let within = |from: usize, length: usize| (0..length.saturating_sub(step + 2)).map(move |at| (from + at) as i64);
    let mut positions = vec![];
    for (row, lengths) in rows.segment_lengths.iter().enumerate() {
        let mut start = row * rows.length;
        for &length in lengths {
            positions.extend(within(start, length));
            start += length;
        }
    }
    let tokens: Vec<i64> = positions.iter().map(|&at| rows.input_ids[at as usize + step + 2]).collect();
    Targets { positions_m: Tensor::from_slice(&positions), tokens_m: Tensor::from_slice(&tokens), previous_mj: None }
}

/// Of a packed row and a padded one, with labels.
#[test]
fn gradients_are_those_of_autograd() {
    let backbone = backbone(LlamaConfig::tiny());
    let eagle = eagle(&backbone);
    let vocabulary = backbone.config.vocab_size;
    let t = 13;
    let rows = Batch {
        row_ids: vec![vec![0, 1], vec![2]],
        rows: 2,
        length: t,
        input_ids: random_ids(2 * t, vocabulary, 3),
        labels: vec![],
        segment_lengths: vec![vec![6, 7], vec![11]],
    };
    let tokens_bt = Tensor::from_slice(&rows.input_ids).view([2, t as i64]);
    let mask = RowMask::packed(&rows.segment_lengths, t as i64, &backbone.config, Device::Cpu);
    let states_nw = tch::no_grad(|| backbone.hidden_states(&tokens_bt, &mask, Adapters::Off).flatten(0, 1));
    let hidden_nh = backbone.last_of(&states_nw);
    let targets = |step: usize| targets_at_step(&rows, step);
    let parameters: Vec<(String, Tensor)> =
        eagle.parameters().into_iter().map(|(name, weight)| (name, weight.set_requires_grad(true))).collect();
    let sums: Vec<Tensor> = parameters.iter().map(|(_, weight)| weight.detach().zeros_like()).collect();
    let scales = [1.0, 0.8, 0.5, 0.3];
    let levels = (0..STEPS).map(|step| LevelTask { targets: LevelTargets::Labels(targets(step)), scale: scales[step] });
    let batch = DrafterBatch {
        rows: &rows,
        backbone: &backbone,
        lm_head: OutputLayer::lm_head(&backbone, Adapters::Off),
        states_nw: &states_nw,
        hidden_nh: &hidden_nh,
        dropout: None,
        levels: levels.collect(),
    };
    let into = DrafterGradients { own: sums.iter().collect(), lm_head: OutputGradients::default(), hidden_nh: None };
    let losses = eagle.losses(&batch, Some(&into));

    let own_mask = eagle.layer.mask(&rows.segment_lengths, t as i64);
    let taps_btl = eagle.tapped(&states_nw).view([2, t as i64, -1]);
    let embedded = |step: usize| backbone.embed(&tokens_bt.roll([-1 - step as i64], [1]));
    let outputs = eagle.unroll_rows(&taps_btl, embedded, &own_mask);
    let mut total = Tensor::zeros([], (Kind::Double, Device::Cpu));
    for (step, output_bth) in outputs.iter().enumerate() {
        let targets = targets(step);
        let logits_mv = eagle.logits(&output_bth.flatten(0, 1).index_select(0, &targets.positions_m));
        let loss = cross_entropy_at(&logits_mv, &targets.tokens_m);
        let off = (&losses[step].loss - &loss).abs().double_value(&[]);
        assert!(off < 1e-9, "step {step}: {off}");
        total += loss * scales[step];
    }
    total.backward();
    for ((name, weight), sum) in parameters.iter().zip(&sums) {
        let off = (weight.grad() - sum).abs().max().double_value(&[]);
        assert!(off < 1e-9 && sum.abs().max().double_value(&[]) > 0.0, "{name}: {off}");
    }
}
