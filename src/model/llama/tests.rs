//! Caches, trees and packed rows against whole rows; the CPU's own kernels against libtorch's operations.

use super::*;
use crate::model::adapters::attach_new;
use crate::model::backward::Keep;
use crate::torch::Generator;
use crate::torch::flash_attention::tests::emulation::emulated;

fn config(sliding_window: Option<i64>) -> LlamaConfig {
    LlamaConfig { sliding_window, ..LlamaConfig::tiny() }
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

#[test]
fn extending_a_cache_equals_whole_rows() {
    for config in LlamaConfig::tiny_of_each_family().into_iter().chain([config(Some(5))]) {
        let family = config.model_type.clone();
        let mut llama = Llama::random(config, Kind::Double, Device::Cpu, 0);
        llama.set_taps(Taps::new([0, llama.config.num_hidden_layers]));
        let tokens = Generator::seeded(11).integers(50, &[23]);
        let rows = RowMask::causal(23, &llama.config, Device::Cpu);
        let whole = llama.hidden_states(&tokens.unsqueeze(0), &rows, Adapters::Off).squeeze_dim(0);
        for chunk in [1, 4, 23] {
            let mut cache = KvCache::with_one_row(&llama.config, Kind::Double, Device::Cpu);
            for piece in tokens.split(chunk, 0) {
                let n = piece.size()[0];
                let new = NewTokens::chain(n, &llama.config, Kind::Double, Device::Cpu);
                let hidden = llama.extend(&piece, &new, &mut cache, 0);
                let expected = whole.narrow(0, cache.len(0), n);
                assert!(largest_difference(&hidden, &expected) < 1e-9, "{family}, chunks of {chunk}");
                cache.commit(0, n);
            }
        }
    }
}

#[test]
fn taps_are_the_residual_stream_behind_so_many_layers() {
    for config in LlamaConfig::tiny_of_each_family() {
        let mut llama = Llama::random(config, Kind::Double, Device::Cpu, 0);
        let (layers, h) = (llama.config.num_hidden_layers, llama.config.hidden_size);
        let tokens_bt = Generator::seeded(11).integers(50, &[2, 9]);
        let rows = RowMask::causal(9, &llama.config, Device::Cpu);
        let alone = llama.hidden_states(&tokens_bt, &rows, Adapters::Off);
        llama.set_taps(Taps::new([layers, 0, layers]));
        let states = llama.hidden_states(&tokens_bt, &rows, Adapters::Off);
        assert_eq!((states.size(), llama.states_width()), (vec![2, 9, 3 * h], 3 * h));
        assert_eq!(llama.last_of(&states), alone);
        assert_eq!(states.narrow(-1, h, h), llama.embed(&tokens_bt));
        assert_eq!(llama.final_norm(&states.narrow(-1, 2 * h, h)), alone);
        assert_eq!([0, 1, layers].map(|tap| llama.taps().column(tap, h)), [Some(h), None, Some(2 * h)]);
    }
}

#[test]
fn a_path_of_a_tree_equals_the_row_it_spells() {
    for config in LlamaConfig::tiny_of_each_family().into_iter().chain([config(Some(4))]) {
        let family = config.model_type.clone();
        let llama = Llama::random(config, Kind::Double, Device::Cpu, 1);
        let tokens = Generator::seeded(12).integers(50, &[12]);
        let mut cache = KvCache::with_one_row(&llama.config, Kind::Double, Device::Cpu);
        let prompt = NewTokens::chain(12, &llama.config, Kind::Double, Device::Cpu);
        let _ = llama.extend(&tokens, &prompt, &mut cache, 0);
        cache.commit(0, 12);
        // root 0 with children 1 and 2; 3 is a child of 2
        let parents = [None, Some(0), Some(0), Some(2)];
        let ancestor = |query: usize, key: usize| std::iter::successors(Some(query), |&n| parents[n]).any(|n| n == key);
        let new = NewTokens::pattern(&[0, 1, 1, 2], ancestor, &llama.config, Kind::Double, Device::Cpu);
        let tree = Tensor::from_slice(&[7i64, 8, 9, 10]);
        let hidden = llama.extend(&tree, &new, &mut cache, 0);
        cache.commit_path(0, &[0, 2, 3]);
        let spelt = Tensor::cat(&[&tokens, &Tensor::from_slice(&[7i64, 9, 10])], 0);
        let rows = RowMask::causal(15, &llama.config, Device::Cpu);
        let whole = llama.hidden_states(&spelt.unsqueeze(0), &rows, Adapters::Off).squeeze_dim(0);
        assert!(largest_difference(&hidden.get(3), &whole.get(14)) < 1e-9, "{family}");
        let next = llama.extend(
            &Tensor::from_slice(&[3i64]),
            &NewTokens::chain(1, &llama.config, Kind::Double, Device::Cpu),
            &mut cache,
            0,
        );
        let longer = Tensor::cat(&[&spelt, &Tensor::from_slice(&[3i64])], 0);
        let rows = RowMask::causal(16, &llama.config, Device::Cpu);
        let whole = llama.hidden_states(&longer.unsqueeze(0), &rows, Adapters::Off).squeeze_dim(0);
        assert!(largest_difference(&next.get(0), &whole.get(15)) < 1e-9, "the cache after commit_path, {family}");
    }
}

#[test]
fn packed_texts_do_not_see_each_other() {
    for config in LlamaConfig::tiny_of_each_family().into_iter().chain([config(Some(6))]) {
        let llama = Llama::random(config, Kind::Double, Device::Cpu, 2);
        let tokens = Generator::seeded(13).integers(50, &[1, 20]);
        let rows = RowMask::packed(&[vec![9, 8]], 20, &llama.config, Device::Cpu);
        let packed = llama.hidden_states(&tokens, &rows, Adapters::Off);
        for (from, length) in [(0, 9), (9, 8)] {
            let alone = RowMask::causal(length, &llama.config, Device::Cpu);
            let expected = llama.hidden_states(&tokens.narrow(1, from, length), &alone, Adapters::Off);
            let difference = largest_difference(&packed.narrow(1, from, length), &expected);
            assert!(difference < 1e-9, "{}: {difference}", llama.config.model_type);
        }
    }
}

/// The hidden states of packed rows and the gradients of adapters, as Medusa-2 computes them.
fn trained_on_packed_rows(llama: &Llama, keep: Keep) -> Vec<Tensor> {
    let tokens = Generator::seeded(16).integers(50, &[2, 20]);
    let rows = RowMask::packed(&[vec![9, 8], vec![20]], 20, &llama.config, Device::Cpu);
    let (hidden, tape) = llama.forward_kept(&tokens, rows, Adapters::Training { seed: 4 }, keep);
    let trained = (0..llama.parts()).map(|part| llama.trained_in(part));
    let sums: Vec<Vec<Tensor>> =
        trained.map(|part| part.iter().map(|(_, tensor)| tensor.detach().zeros_like()).collect()).collect();
    let into: Vec<Vec<&Tensor>> = sums.iter().map(|part| part.iter().collect()).collect();
    tape.backward(&Generator::seeded(17).normal(&hidden.size(), (Kind::Double, Device::Cpu)), &into);
    sums.into_iter().flatten().chain([hidden]).collect()
}

#[test]
fn flash_attention_changes_neither_hidden_states_nor_gradients_of_packed_rows() {
    for config in LlamaConfig::tiny_of_each_family().into_iter().chain([config(Some(6))]) {
        let mut llama = Llama::random(config, Kind::Double, Device::Cpu, 2);
        attach_new(&mut llama, &toml::from_str("rank = 2\nalpha = 4\ndropout = 0.1").unwrap(), 3);
        for (_, tensor) in (0..llama.parts()).flat_map(|part| llama.trained_in(part)) {
            let noise = Generator::seeded(5).normal_like(tensor) * 0.1;
            let _ = tch::no_grad(|| tensor.shallow_clone().g_add_(&noise));
        }
        for keep in [Keep::Everything, Keep::Inputs] {
            let expected = trained_on_packed_rows(&llama, keep);
            let got = emulated(|| trained_on_packed_rows(&llama, keep));
            for (expected, got) in expected.iter().zip(&got) {
                let (difference, largest) = (largest_difference(expected, got), expected.abs().max().double_value(&[]));
                assert!(difference < 1e-6 * largest, "{}: {difference} of {largest}", llama.config.model_type);
            }
        }
    }
}

#[test]
fn merging_for_decoding_changes_nothing() {
    for config in LlamaConfig::tiny_of_each_family() {
        let llama = Llama::random(config, Kind::Double, Device::Cpu, 3);
        let tokens = Generator::seeded(14).integers(50, &[1, 9]);
        let rows = RowMask::causal(9, &llama.config, Device::Cpu);
        let logits = |llama: &Llama| llama.logits(&llama.hidden_states(&tokens, &rows, Adapters::Off), Adapters::Off);
        let before = logits(&llama);
        let merged = llama.for_decoding();
        assert!(largest_difference(&before, &logits(&merged)) < 1e-9, "{}", merged.config.model_type);
    }
}

#[test]
#[should_panic(expected = "load the backbone for training")]
fn a_backbone_for_decoding_does_not_list_some_of_its_weights() {
    let _ = Llama::random(config(None), Kind::Float, Device::Cpu, 3).for_decoding().weights();
}

#[test]
fn the_lm_head_is_known_when_it_is_packed() {
    let llama = || Llama::random(config(None), Kind::Float, Device::Cpu, 3);
    assert_eq!(llama().for_batches().lm_head_weight(), llama().lm_head_weight());
}

#[test]
fn causal_attention_in_blocks_equals_a_prompt_in_chunks() {
    let long = LlamaConfig { max_position_embeddings: 256, ..config(None) };
    let llama = Llama::random(long, Kind::Double, Device::Cpu, 4);
    let tokens = Generator::seeded(15).integers(50, &[150]);
    let rows = RowMask::causal(150, &llama.config, Device::Cpu);
    let whole = llama.hidden_states(&tokens.unsqueeze(0), &rows, Adapters::Off).squeeze_dim(0);
    let mut cache = KvCache::with_one_row(&llama.config, Kind::Double, Device::Cpu);
    for piece in tokens.split(37, 0) {
        let n = piece.size()[0];
        let hidden =
            llama.extend(&piece, &NewTokens::chain(n, &llama.config, Kind::Double, Device::Cpu), &mut cache, 0);
        assert!(largest_difference(&hidden, &whole.narrow(0, cache.len(0), n)) < 1e-9);
        cache.commit(0, n);
    }
}
