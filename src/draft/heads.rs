//! Heads on the backbone's last hidden state: ResBlocks, then a linear layer to the vocabulary.
//!
//! Head `h` (0-based) at position `t` predicts token `t + h + 2`; token `t + 1` belongs to the LM head. Medusa heads read the hidden
//! state alone (arXiv 2401.10774, section 2.1.1), sequential heads also the tokens `t + 1` to `t + h + 1` (Hydra, arXiv 2402.05109).

// N positions, H hidden, V vocabulary, K heads
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::cpu::arena::Arena;
use crate::draft::error::{BackboneMismatch, DrafterError};
use crate::draft::token_map::{TOKEN_MAP, TokenMap};
use crate::dtype::DraftDtype;
use crate::engine::cuda::draft::{DeviceDraft, DraftInput, DraftShape, HeadMatrices, OutputMatrix};
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::logits::logits_of;
use crate::model::lora::Adapters;
use crate::model::prefix_layer::PrefixLayer;
use crate::model::weights::{WeightsError, save};
use crate::numbers::Fraction;
use crate::torch::memory::KEPT_BLOCK;
use crate::torch::{Generator, wide};
use crate::tree::sparse_tree::SparseTree;

mod drafter;
mod file;
pub(in crate::draft) mod guesses;
mod head;
mod head_states;
pub mod import;
mod known_text;
pub mod layout;
pub mod objective;
pub mod planned;
pub(in crate::draft) mod sequential;
mod token_products;

pub use head::{Head, HeadInput};
use import::HeadsFile;
pub use layout::{HEADS_FILE, HeadsArchitecture, HeadsShape};
use layout::{HeadPart, HeadTensor};
use sequential::SequentialLayout;

/// Heads to train, as the `[heads]` table of a recipe describes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadsConfig {
    /// K, the number of heads.
    pub medusa_num_heads: NonZeroUsize,
    /// ResBlocks per head, each with its own weights.
    pub medusa_num_layers: NonZeroUsize,
    /// Trained heads to start from: a folder or file in any layout that [`import`] reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
    /// Heads consist of ResBlocks only and use the backbone's lm_head as output layer.
    #[serde(default)]
    pub shared_lm_head: bool,
    /// R: W2 = B·A with an inner width of R.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub w2_rank: Option<NonZeroUsize>,
    /// One W2 for all heads.
    #[serde(default)]
    pub shared_w2: bool,
    /// N: heads guess among the N most frequent tokens of the training data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_vocab_size: Option<NonZeroUsize>,
    /// What a head reads.
    #[serde(default)]
    pub architecture: HeadsArchitecture,
    /// Dropout in training, on the input of every ResBlock and of the output layer.
    #[serde(default = "no_dropout")]
    pub dropout: Fraction,
}

fn no_dropout() -> Fraction {
    Fraction::ZERO
}

impl HeadsConfig {
    /// The shape of these heads on a backbone with an lm_head of shape `[V, H]`.
    pub fn shape(&self, [vocab_size, hidden_size]: [i64; 2]) -> HeadsShape {
        let own = |size: NonZeroUsize| i64::try_from(size.get()).unwrap_or(i64::MAX);
        let outputs = self.draft_vocab_size.map_or(vocab_size, own);
        HeadsShape {
            architecture: self.architecture,
            medusa_num_heads: self.medusa_num_heads.get(),
            medusa_num_layers: self.medusa_num_layers.get(),
            hidden_size,
            vocab_size: if self.shared_lm_head { 0 } else { outputs },
            w2_bias: false,
            w2_rank: self.w2_rank.map_or(0, own),
            shared_w2: self.shared_w2 && self.medusa_num_heads.get() > 1,
        }
    }
}

/// A set of heads.
#[derive(Debug)]
pub struct Heads {
    heads: Vec<Head>,
    shape: HeadsShape,
    /// The backbone's, also if the heads use its lm_head.
    vocab_size: i64,
    /// Of heads with a truncated vocabulary.
    token_map: Option<TokenMap>,
    /// Of sequential heads for the CPU kernels.
    sequential: Option<SequentialLayout>,
    /// Of Hydra++ heads.
    prefix: Option<PrefixLayer>,
}

impl Heads {
    /// Untrained heads in float32 (float64 for a backbone in float64), each of which starts out as the LM head: W1 = 0, the residual connection of a sequential head is the
    /// identity of the hidden state and 0 on the embeddings, every bias is 0 (the published trainers leave biases and residual
    /// connections random), and W2 is a copy of `lm_head_vh` `[V, H]` or of its rows in `token_map`, its best approximation of a low rank, or
    /// absent with `shared_lm_head`. `token_map` has `draft_vocab_size` tokens.
    pub fn new(config: &HeadsConfig, lm_head_vh: &Tensor, token_map: Option<TokenMap>) -> Self {
        let [v, h] = lm_head_vh.size()[..] else { panic!("[V, H], got {lm_head_vh:?}") };
        let rows = token_map.as_ref().map(|map| lm_head_vh.index_select(0, map.tokens_n()));
        let lm_head_vh = rows.as_ref().unwrap_or(lm_head_vh);
        let (shape, options) = (config.shape([v, h]), (wide(lm_head_vh.kind()), lm_head_vh.device()));
        let low_rank = (shape.w2_rank > 0).then(|| low_rank(lm_head_vh, shape.w2_rank));
        let start = |place: HeadTensor| match (place.part, &low_rank) {
            (HeadPart::W2, Some([_, b_vr])) => b_vr.copy(),
            (HeadPart::W2Down, Some([a_rh, _])) => a_rh.copy(),
            (HeadPart::W2, None) => lm_head_vh.to_kind(options.0).copy(),
            (HeadPart::Res, _) => Tensor::eye_m(h, shape.size(place)[1], options),
            _ => Tensor::zeros(shape.size(place), options),
        };
        Self { token_map, ..Self::from_tensors(shape, shape.places().into_iter().map(start).collect(), v) }
    }

    /// The same heads, whose outputs are the tokens of `token_map`, for a backbone with `vocab_size` tokens.
    #[must_use]
    pub fn with_token_map(self, token_map: TokenMap, vocab_size: i64) -> Self {
        Self { token_map: Some(token_map), vocab_size, ..self }
    }

    /// The same heads with an untrained prefix layer for `backbone`, if their architecture has one. `seed` determines its weights.
    #[must_use]
    pub fn with_new_prefix(self, backbone: &Llama, seed: u64) -> Self {
        let options = (backbone.kind(), backbone.device());
        let prefix = self.architecture().has_prefix().then(|| PrefixLayer::new(&backbone.config, options, seed));
        Self { prefix, ..self }
    }

    /// Replaces the token map by that of a checkpoint.
    pub(in crate::draft) fn set_map(&mut self, token_map: TokenMap) {
        self.token_map = Some(token_map);
    }

    /// Sets the vocabulary size, which the shape of heads that share the backbone's lm_head lacks.
    #[cfg(test)]
    pub(in crate::draft) fn with_vocabulary(self, vocab_size: i64) -> Self {
        Self { vocab_size, ..self }
    }

    /// Random heads from a seed, for tests.
    pub fn random(shape: HeadsShape, kind: Kind, device: Device, seed: u64) -> Self {
        let mut generator = Generator::seeded(seed);
        let mut tensor = |shape: &[i64]| generator.normal(shape, (kind, device)) * 0.1;
        let tensors = shape.tensors().into_iter().map(|(_, size)| tensor(&size)).collect();
        Self::from_tensors(shape, tensors, shape.vocab_size)
    }

    /// Loads trained heads from a folder or file in any layout that [`import`] reads, checks them against `backbone`, and
    /// converts them to its dtype and device.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    pub fn load(path: &Path, backbone: &Llama) -> Result<Self, DrafterError> {
        Self::from_file(&HeadsFile::open(path)?, backbone)
    }

    /// As [`Heads::load`], from a file that was opened before.
    ///
    /// # Errors
    /// As [`Heads::load`].
    pub fn from_file(file: &HeadsFile, backbone: &Llama) -> Result<Self, DrafterError> {
        file.check(&backbone.config)?;
        file.compare_lm_head(|| backbone.lm_head_weight())?;
        Self::of(file, &backbone.config, backbone.kind(), backbone.device())
    }

    /// Like [`Heads::load`], for a backbone of which only the config is here, in `kind` on `device`.
    ///
    /// # Errors
    /// As [`Heads::load`].
    pub fn load_for(path: &Path, backbone: &LlamaConfig, kind: Kind, device: Device) -> Result<Self, DrafterError> {
        let file = HeadsFile::open(path)?;
        file.check(backbone)?;
        Self::of(&file, backbone, kind, device)
    }

    /// Checks the heads in a folder or file as [`Heads::load_for`] does and returns their shape. Reads no tensor data.
    ///
    /// # Errors
    /// As [`Heads::load`].
    pub fn check(path: &Path, backbone: &LlamaConfig) -> Result<HeadsShape, DrafterError> {
        let file = HeadsFile::open(path)?;
        file.check(backbone)?;
        Ok(file.shape())
    }

    /// All heads of a file, in `kind` on `device`, for a backbone.
    fn of(file: &HeadsFile, backbone: &LlamaConfig, kind: Kind, device: Device) -> Result<Self, DrafterError> {
        let read = |place| Ok(file.finite_tensor(place, kind)?.to_device(device));
        let tensors = file.shape().places().into_iter().map(read).collect::<Result<Vec<_>, DrafterError>>()?;
        let token_map = file.token_map().map(|tokens| TokenMap::new(tokens.to_vec(), device));
        let heads = Self { token_map, ..Self::from_tensors(file.shape(), tensors, backbone.vocab_size) };
        if !heads.architecture().has_prefix() {
            return Ok(heads);
        }
        let read =
            |(name, size): (String, Vec<i64>)| Ok(file.finite_prefix_tensor(&name, &size, kind)?.to_device(device));
        let tensors = PrefixLayer::tensors(backbone).into_iter().map(read).collect::<Result<_, DrafterError>>()?;
        Ok(Self { prefix: Some(PrefixLayer::from_tensors(backbone, (kind, device), tensors)), ..heads })
    }

    /// Builds heads without a prefix layer from `tensors` in the order of [`HeadsShape::tensors`]; `vocab_size` is the backbone's.
    pub fn from_tensors(shape: HeadsShape, tensors: Vec<Tensor>, vocab_size: i64) -> Self {
        let mut tensors = tensors.into_iter();
        let parts: Vec<_> = (0..=shape.medusa_num_layers).map(|layer| shape.parts_of_layer(layer)).collect();
        let own = if shape.shared_w2 { &parts[..shape.medusa_num_layers] } else { &parts };
        let own: usize = own.iter().map(|parts| parts.len()).sum();
        let head_tensors: Vec<Vec<Tensor>> =
            (0..shape.medusa_num_heads).map(|_| tensors.by_ref().take(own).collect()).collect();
        let shared: Vec<Tensor> = tensors.collect();
        let head = |own_tensors: Vec<Tensor>| {
            let mut tensors = own_tensors.into_iter().chain(shared.iter().map(Tensor::shallow_clone));
            Head::of(&parts, || tensors.next().expect("as many tensors as the shape has"))
        };
        let heads = head_tensors.into_iter().map(head).collect();
        Self { heads, shape, vocab_size, token_map: None, sequential: None, prefix: None }
    }

    /// Packs the weights for decoding where that is faster. With the CPU kernels they have `dtype`, whatever the backbone's: reading them is
    /// most of the cost of a guess, and guesses are verified.
    #[must_use]
    pub fn for_decoding(self, dtype: DraftDtype) -> Self {
        let mut arena = Arena::default();
        let sequential = SequentialLayout::new(&self.heads, self.vocab_size, dtype, &mut arena);
        let shared = self.shape.shared_w2;
        let own = |(k, head): (usize, Head)| if shared && k > 0 { head.without_output() } else { head };
        let heads = self.heads.into_iter().enumerate().map(own);
        let heads = heads.map(|head| head.packed(sequential.is_some(), dtype, &mut arena)).collect();
        let prefix = self.prefix.map(|prefix| prefix.for_decoding(dtype, &mut arena));
        Self { heads, sequential, prefix, ..self }
    }

    /// Copies the heads to float32, or float64, for training on a backbone that computes in `kind`; loaded heads may be views of a file.
    #[must_use]
    pub fn for_training(self, kind: Kind) -> Self {
        let own = |tensor: &Tensor| tensor.to_kind(wide(kind)).copy();
        let tensors = self.tensors().into_iter().map(own).collect();
        let prefix = self.prefix.map(|prefix| prefix.for_training(kind));
        Self { prefix, token_map: self.token_map, ..Self::from_tensors(self.shape, tensors, self.vocab_size) }
    }

    /// The layer between the backbone's hidden states and the heads.
    pub fn prefix(&self) -> Option<&PrefixLayer> {
        self.prefix.as_ref()
    }

    /// What the heads read in place of the backbone's hidden states over whole rows, `[B, T, H]`: these themselves, or the prefix layer's
    /// output. `segment_lengths`: see [`RowMask::packed`](crate::model::attention::RowMask::packed).
    pub fn states_of_rows(&self, hidden_bth: &Tensor, segment_lengths: &[Vec<usize>]) -> Tensor {
        match &self.prefix {
            Some(prefix) => prefix.over_rows(hidden_bth, &prefix.mask(segment_lengths, hidden_bth.size()[1])),
            None => hidden_bth.shallow_clone(),
        }
    }

    /// K, the number of heads.
    pub fn num_heads(&self) -> usize {
        self.heads.len()
    }

    /// Checks that the heads fit a backbone.
    ///
    /// # Errors
    /// [`BackboneMismatch`] names the size that differs.
    pub fn check_backbone(&self, config: &LlamaConfig) -> Result<(), BackboneMismatch> {
        let sizes = [
            ("hidden size", self.hidden_size(), config.hidden_size),
            ("vocabulary", self.vocab_size, config.vocab_size),
        ];
        match sizes.into_iter().find(|(_, heads, backbone)| heads != backbone) {
            Some((what, heads, backbone)) => Err(BackboneMismatch { what, drafter: heads, backbone }),
            None => Ok(()),
        }
    }

    /// H, the hidden size.
    pub fn hidden_size(&self) -> i64 {
        self.shape.hidden_size
    }

    /// V, the vocabulary size.
    pub fn vocab_size(&self) -> i64 {
        self.vocab_size
    }

    /// How many tokens a head can guess: V, or N of a truncated vocabulary.
    pub fn draft_vocab_size(&self) -> usize {
        self.token_map.as_ref().map_or(self.vocab_size.unsigned_abs() as usize, |map| map.tokens().len())
    }

    /// The tokens that heads with a truncated vocabulary can guess.
    pub fn token_map(&self) -> Option<&TokenMap> {
        self.token_map.as_ref()
    }

    /// Head `head`, 0-based.
    pub fn head(&self, head: usize) -> &Head {
        &self.heads[head]
    }

    /// Logits of head `head` (0-based), `[N, V]`, or of the tokens of the token map.
    pub fn logits(&self, head: usize, input: &HeadInput, backbone: &Llama) -> Tensor {
        let output = self.output_of(head);
        let x_nh = output.through_down(self.heads[head].residual(&input.rows(backbone)));
        let w2 = output.w2.as_ref().unwrap_or(backbone.lm_head());
        logits_of(w2.forward(&x_nh, Adapters::Off), output.logit_spec(backbone))
    }

    /// The head whose output layer head `head` uses: packed heads keep a shared one once.
    fn output_of(&self, head: usize) -> &Head {
        &self.heads[if self.shape.shared_w2 { 0 } else { head }]
    }

    /// In the order of [`HeadsShape::tensors`].
    fn tensors(&self) -> Vec<&Tensor> {
        if !self.shape.shared_w2 {
            return self.heads.iter().flat_map(Head::parameters).collect();
        }
        let shared = self.heads[0].output_parameters();
        self.heads.iter().flat_map(Head::res_block_parameters).chain(shared).collect()
    }

    /// Every parameter with its name in the file, in the order of [`HeadsShape::tensors`], then those of the prefix layer. Not for packed
    /// heads.
    pub fn parameters(&self) -> Vec<(String, &Tensor)> {
        let names = self.shape.tensors().into_iter().map(|(name, _)| name);
        let in_heads = names.zip(self.tensors());
        in_heads.chain(self.prefix.iter().flat_map(PrefixLayer::parameters)).collect()
    }

    /// The heads' shape, as stored in a file.
    pub fn shape(&self) -> HeadsShape {
        self.shape
    }

    /// What a head reads.
    pub fn architecture(&self) -> HeadsArchitecture {
        self.shape.architecture
    }

    /// The heads that `tree` uses, for an engine that drafts on the device.
    pub fn matrices_for<'a>(&self, tree: &'a SparseTree) -> DeviceDraft<'a> {
        let input = match self.architecture() {
            HeadsArchitecture::Medusa => DraftInput::Hidden,
            HeadsArchitecture::Hydra => DraftInput::HiddenAndPath,
            HeadsArchitecture::HydraPlusPlus => DraftInput::PrefixAndPath,
        };
        let HeadsShape { medusa_num_layers, vocab_size, w2_rank, shared_w2, .. } = self.shape;
        let own_w2 = if shared_w2 { 1 } else { tree.max_depth() };
        let shape = DraftShape {
            tree,
            input,
            blocks: medusa_num_layers,
            multiplied_out: if w2_rank == 0 || vocab_size == 0 { 0 } else { own_w2 },
            is_truncated: self.token_map.is_some(),
            parameters: self.shape.parameters(),
        };
        DeviceDraft { shape, heads: (0..tree.max_depth()).map(|head| self.matrices(head)).collect() }
    }

    /// A head's weights as matrices; `None` if they are quantised or laid out for the CPU kernels.
    fn matrices(&self, head: usize) -> Option<HeadMatrices> {
        let with_output = self.output_of(head);
        let is_shared = self.shape.shared_w2 && head > 0;
        Some(HeadMatrices {
            blocks: self.heads[head].block_matrices()?,
            output: if is_shared { OutputMatrix::OfFirst } else { with_output.output_matrix()? },
            output_bias_v: with_output.w2_bias().map(Tensor::shallow_clone),
        })
    }

    /// Writes `heads.safetensors` into `folder`, with the token map.
    ///
    /// # Errors
    /// [`WeightsError::File`].
    pub fn save(&self, folder: &Path) -> Result<(), WeightsError> {
        let mut tensors = self.parameters();
        tensors.extend(self.token_map.iter().map(|map| (TOKEN_MAP.to_owned(), map.tokens_n())));
        save(&folder.join(HEADS_FILE), &tensors)
    }
}

/// A slice of [`low_rank`] is larger than the blocks that the allocator keeps, so its memory goes back to the system.
#[expect(clippy::cast_possible_wrap, reason = "a constant")]
const SLICE_BYTES: i64 = KEPT_BLOCK as i64;

/// A `[R, H]` and B `[V, R]` whose product is the matrix of rank R that is closest to `weight_vh` (Eckart and Young), as [`wide`] as it: of the
/// singular value decomposition U·S·Vᵀ, the first R rows of Vᵀ, and the weight times them. Computes in float64, on some rows at a time: a
/// float64 copy of the whole weight could take more memory than the training.
fn low_rank(weight_vh: &Tensor, rank: i64) -> [Tensor; 2] {
    let [v, h] = weight_vh.size()[..] else { panic!("[V, H], got {weight_vh:?}") };
    let weight_vh = weight_vh.detach(); // it is trained in full fine-tuning
    let rows = SLICE_BYTES / (8 * h) + 1;
    let slices = || weight_vh.split(rows, 0).into_iter().map(|slice_vh| slice_vh.to_kind(Kind::Double));
    // The columns of V are the eigenvectors of Wᵀ·W, which is far smaller than W; the largest eigenvalues come last.
    let squared_hh: Tensor = slices().map(|slice_vh| slice_vh.tr().matmul(&slice_vh)).sum();
    let (_, vectors_hh) = squared_hh.linalg_eigh("L");
    let last_hr = vectors_hh.narrow(1, h - rank, rank);
    let kind = wide(weight_vh.kind());
    let b_vr = Tensor::empty([v, rank], (kind, weight_vh.device()));
    for (b_vr, slice_vh) in b_vr.split(rows, 0).iter_mut().zip(slices()) {
        b_vr.copy_(&slice_vh.matmul(&last_hr));
    }
    [last_hr.tr().to_kind(kind).contiguous(), b_vr]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_a_low_rank_w2_is_the_lm_head_as_far_as_the_rank_allows() {
        let lm_head_vh = Generator::seeded(1).normal(&[600_000, 16], (Kind::Float, Device::Cpu)); // three slices
        let exact_vh = lm_head_vh.to_kind(Kind::Double);
        let lm_head_vh = lm_head_vh.set_requires_grad(true);
        let (_, s, _) = exact_vh.svd(true, true);
        for rank in [1, 5, 16] {
            let [a_rh, b_vr] = low_rank(&lm_head_vh, rank);
            assert_eq!((a_rh.size(), b_vr.size()), (vec![rank, 16], vec![600_000, rank]));
            assert!(!a_rh.requires_grad() && !b_vr.requires_grad());
            let off = (b_vr.matmul(&a_rh).to_kind(Kind::Double) - &exact_vh).norm().double_value(&[]);
            let best = s.narrow(0, rank, 16 - rank).norm().double_value(&[]);
            assert!(
                (off - best).abs() < 1e-6 * s.norm().double_value(&[]),
                "rank {rank}: off by {off}, the best by {best}"
            );
        }
    }

    #[test]
    fn low_rank_heads_are_those_of_the_product() {
        let (config, hidden) = (LlamaConfig::tiny(), Generator::seeded(3).normal(&[7, 32], (Kind::Float, Device::Cpu)));
        let backbone = Llama::random(config.clone(), Kind::Float, Device::Cpu, 2);
        let hidden_size = config.hidden_size;
        let hidden = hidden.narrow(1, 0, hidden_size.min(32));
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size,
            vocab_size: 50,
            w2_rank: 5,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
        let head_at = |head: usize| heads.head(head);
        let tensors = (0..2).flat_map(|head| {
            let (blocks, w2) = (head_at(head).block_parameters(), head_at(head).w2().unwrap());
            vec![blocks[0].copy(), blocks[1].copy(), w2.matmul(blocks[2])]
        });
        let full = Heads::from_tensors(HeadsShape { w2_rank: 0, ..shape }, tensors.collect(), 50);
        for head in 0..2 {
            let [low, full] = [&heads, &full].map(|heads| heads.logits(head, &HeadInput::alone(&hidden), &backbone));
            assert!(low.allclose(&full, 1e-5, 1e-5, false));
        }
        let folder = tempfile::tempdir().unwrap();
        heads.save(folder.path()).unwrap();
        assert_eq!(HeadsFile::open(folder.path()).unwrap().shape(), shape);
    }

    #[test]
    fn a_shared_w2_is_stored_once_and_heads_compute_as_with_copies_of_it() {
        let config = LlamaConfig::tiny();
        let backbone = Llama::random(config.clone(), Kind::Float, Device::Cpu, 2);
        let hidden = Generator::seeded(3).normal(&[7, config.hidden_size], (Kind::Float, Device::Cpu));
        for w2_rank in [0, 5] {
            let shape = HeadsShape {
                medusa_num_heads: 3,
                medusa_num_layers: 1,
                hidden_size: config.hidden_size,
                vocab_size: 50,
                w2_rank,
                w2_bias: true,
                shared_w2: true,
                ..HeadsShape::default()
            };
            let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
            let copies = heads.heads.iter().flat_map(Head::parameters).map(Tensor::copy).collect();
            let copied = Heads::from_tensors(shape.with_own_w2(), copies, 50);
            for head in 0..3 {
                let [one, other] =
                    [&heads, &copied].map(|heads| heads.logits(head, &HeadInput::alone(&hidden), &backbone));
                assert_eq!(one, other);
            }
            let folder = tempfile::tempdir().unwrap();
            heads.save(folder.path()).unwrap();
            let file = HeadsFile::open(folder.path()).unwrap();
            assert_eq!(file.shape(), shape);
            assert_eq!(heads.parameters().len(), copied.parameters().len() - if w2_rank > 0 { 6 } else { 4 });
            let loaded = Heads::load(folder.path(), &backbone).unwrap().for_decoding(DraftDtype::BFloat16);
            for head in 0..3 {
                let input = HeadInput::alone(&hidden);
                let [one, other] = [&heads, &loaded].map(|heads| heads.logits(head, &input, &backbone));
                assert!(one.allclose(&other, 0.0, 2e-2, false), "packed");
            }
        }
    }

    #[test]
    fn a_head_with_its_own_w2_beside_a_shared_one_is_refused() {
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size: 4,
            vocab_size: 6,
            shared_w2: true,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
        let own = Tensor::zeros([6, 4], (Kind::Float, Device::Cpu));
        for name in ["0.0.weight", "0.1.weight", "1.1.weight", "1.7.weight"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(HEADS_FILE);
            let tensors: Vec<_> = heads.parameters().into_iter().chain([(name.to_owned(), &own)]).collect();
            save(&path, &tensors).unwrap();
            let error = HeadsFile::open(&path).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("w2.weight"), "{error}");
        }
    }

    #[test]
    fn a_file_counts_the_weights_of_the_prefix_layer_too() {
        let config = LlamaConfig::tiny();
        let backbone = Llama::random(config.clone(), Kind::Float, Device::Cpu, 2);
        let (hidden_size, architecture) = (config.hidden_size, HeadsArchitecture::HydraPlusPlus);
        let shape = HeadsShape {
            architecture,
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1).with_new_prefix(&backbone, 3);
        let folder = tempfile::tempdir().unwrap();
        heads.save(folder.path()).unwrap();
        let all: usize = heads.parameters().iter().map(|(_, tensor)| tensor.numel()).sum();
        assert_eq!(HeadsFile::open(folder.path()).unwrap().parameters().unwrap(), i64::try_from(all).unwrap());
    }

    #[test]
    fn a_head_of_another_size_than_the_first_is_refused_without_a_backbone() {
        let shape = HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 1,
            hidden_size: 4,
            vocab_size: 6,
            ..HeadsShape::default()
        };
        let heads = Heads::random(shape, Kind::Float, Device::Cpu, 1);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(HEADS_FILE);
        for at in heads.parameters().len() / 2..heads.parameters().len() {
            let mut tensors = heads.parameters();
            let (name, wrong) = (tensors[at].0.clone(), Tensor::zeros([5], (Kind::Float, Device::Cpu)));
            tensors[at].1 = &wrong;
            save(&path, &tensors).unwrap();
            let error = HeadsFile::open(&path).and_then(|file| file.check_alone()).unwrap_err().to_string();
            assert!(error.contains(&name) && error.contains("[5]"), "{error}");
        }
    }
}
