//! Medusa heads: ResBlocks on the last hidden state, then a linear layer to the vocabulary (paper section 2.1.1).
//!
//! Head `h` (0-based) at position `t` predicts token `t + h + 2`; token `t + 1` belongs to the LM head.

// N positions, H hidden, V vocabulary, K heads
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::cpu::arena::Arena;
use crate::engine::cuda::draft::{DeviceDraft, DraftShape, HeadMatrices};
use crate::model::config::LlamaConfig;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::weights::{WeightsError, save};
use crate::torch::Generator;
use crate::tree::sparse_tree::SparseTree;

mod error;
mod guesses;
pub mod import;
pub mod layout;

pub use error::{HeadsError, HeadsMismatch};
use import::HeadsFile;
pub use layout::{HEADS_FILE, HeadsShape};

/// The `[heads]` table of a recipe.
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
}

/// A set of Medusa heads.
#[derive(Debug)]
pub struct Heads {
    heads: Vec<Head>,
    hidden_size: i64,
    vocab_size: i64,
}

/// One Medusa head.
#[derive(Debug)]
pub struct Head {
    /// W1 and b1 of each ResBlock.
    blocks: Vec<Linear>,
    /// W2, `[V, H]`; `None` if the head uses the backbone's lm_head.
    w2: Option<Linear>,
}

impl Heads {
    /// Untrained heads in float32. W1 = 0 and b1 = 0, so that a head starts out as the LM head (the published trainers leave b1
    /// random). W2 is a copy of `lm_head_vh` `[V, H]`, or absent with `shared_lm_head`.
    pub fn new(config: &HeadsConfig, lm_head_vh: &Tensor) -> Self {
        let [v, h] = lm_head_vh.size()[..] else { panic!("[V, H], got {lm_head_vh:?}") };
        let options = (Kind::Float, lm_head_vh.device());
        let block = |_| Linear::dense(Tensor::zeros([h, h], options), Some(Tensor::zeros([h], options)));
        let head = |_| Head {
            blocks: (0..config.medusa_num_layers.get()).map(block).collect(),
            w2: (!config.shared_lm_head).then(|| Linear::dense(lm_head_vh.to_kind(Kind::Float).copy(), None)),
        };
        Self { heads: (0..config.medusa_num_heads.get()).map(head).collect(), hidden_size: h, vocab_size: v }
    }

    /// Sets the vocabulary size, which the shape of heads that share the backbone's lm_head lacks.
    #[cfg(test)]
    fn of_vocabulary(self, vocab_size: i64) -> Self {
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
    /// [`HeadsError`] names the file and what is wrong with it.
    pub fn load(path: &Path, backbone: &Llama) -> Result<Self, HeadsError> {
        let file = HeadsFile::open(path)?;
        let (hidden, vocab) = (backbone.config.hidden_size, backbone.config.vocab_size);
        file.check([vocab, hidden])?;
        file.compare_lm_head(backbone.lm_head_weight())?;
        Self::of(&file, vocab, backbone.kind(), backbone.device())
    }

    /// Like [`Heads::load`], for an lm_head of shape `[V, H]`, in `kind` on `device`.
    ///
    /// # Errors
    /// As [`Heads::load`].
    pub fn load_for(path: &Path, size: [i64; 2], kind: Kind, device: Device) -> Result<Self, HeadsError> {
        let file = HeadsFile::open(path)?;
        file.check(size)?;
        Self::of(&file, size[0], kind, device)
    }

    /// Checks the heads in a folder or file as [`Heads::load_for`] does and returns their shape. Reads no tensor data.
    ///
    /// # Errors
    /// As [`Heads::load`].
    pub fn check(path: &Path, size: [i64; 2]) -> Result<HeadsShape, HeadsError> {
        let file = HeadsFile::open(path)?;
        file.check(size)?;
        Ok(file.shape())
    }

    /// All heads of a file, in `kind` on `device`, for a vocabulary of `vocab_size` tokens.
    fn of(file: &HeadsFile, vocab_size: i64, kind: Kind, device: Device) -> Result<Self, HeadsError> {
        let read = |place| Ok(file.tensor(place, kind)?.to_device(device));
        let tensors = file.shape().places().into_iter().map(read).collect::<Result<Vec<_>, HeadsError>>()?;
        Ok(Self::from_tensors(file.shape(), tensors, vocab_size))
    }

    /// Builds heads from `tensors` in the order of [`HeadsShape::tensors`]; `vocab_size` is the backbone's.
    pub fn from_tensors(shape: HeadsShape, tensors: Vec<Tensor>, vocab_size: i64) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("as many tensors as the shape has");
        let heads = (0..shape.medusa_num_heads).map(|_| Head {
            blocks: (0..shape.medusa_num_layers).map(|_| Linear::dense(next(), Some(next()))).collect(),
            w2: (shape.vocab_size > 0).then(|| Linear::dense(next(), None)),
        });
        Self { heads: heads.collect(), hidden_size: shape.hidden_size, vocab_size }
    }

    /// Packs the weights for decoding where that is faster. With the CPU kernels they become bfloat16, whatever the backbone's
    /// dtype: reading them is most of the cost of a guess, and guesses are verified.
    #[must_use]
    pub fn for_decoding(self) -> Self {
        let mut arena = Arena::default();
        let mut prepare = |linear: Linear| linear.for_few_rows(Kind::BFloat16, &mut arena);
        let pack = |head: Head| Head {
            blocks: head.blocks.into_iter().map(&mut prepare).collect(),
            w2: head.w2.map(&mut prepare),
        };
        Self { heads: self.heads.into_iter().map(pack).collect(), ..self }
    }

    /// Copies the heads to float32 for training; loaded heads may be views of a file.
    #[must_use]
    pub fn for_training(self) -> Self {
        let own = |tensor: &Tensor| tensor.to_kind(Kind::Float).copy();
        let tensors = self.parameters().iter().map(|(_, tensor)| own(tensor)).collect();
        Self::from_tensors(self.shape(), tensors, self.vocab_size)
    }

    /// K, the number of heads.
    pub fn num_heads(&self) -> usize {
        self.heads.len()
    }

    /// Checks that the heads fit a backbone.
    ///
    /// # Errors
    /// [`HeadsMismatch`] names the size that differs.
    pub fn check_backbone(&self, config: &LlamaConfig) -> Result<(), HeadsMismatch> {
        let sizes =
            [("hidden size", self.hidden_size, config.hidden_size), ("vocabulary", self.vocab_size, config.vocab_size)];
        match sizes.into_iter().find(|(_, heads, backbone)| heads != backbone) {
            Some((what, heads, backbone)) => Err(HeadsMismatch { what, heads, backbone }),
            None => Ok(()),
        }
    }

    /// H, the hidden size.
    pub fn hidden_size(&self) -> i64 {
        self.hidden_size
    }

    /// V, the vocabulary size.
    pub fn vocab_size(&self) -> i64 {
        self.vocab_size
    }

    /// Head `head`, 0-based.
    pub fn head(&self, head: usize) -> &Head {
        &self.heads[head]
    }

    /// Logits of head `head` (0-based): `hidden_nh` `[N, H]` (after the final norm) to `[N, V]`.
    pub fn logits(&self, head: usize, hidden_nh: &Tensor, backbone: &Llama) -> Tensor {
        let x_nh = self.heads[head].hidden(hidden_nh);
        self.heads[head]
            .w2
            .as_ref()
            .map_or_else(|| backbone.logits(&x_nh, Adapters::Off), |w2| w2.forward(&x_nh, Adapters::Off))
    }

    /// Every parameter with its name in the file, by head, then layer. Not for packed heads.
    pub fn parameters(&self) -> Vec<(String, &Tensor)> {
        let names = self.shape().tensors().into_iter().map(|(name, _)| name);
        names.zip(self.heads.iter().flat_map(Head::parameters)).collect()
    }

    /// The heads' shape, as stored in a file.
    pub fn shape(&self) -> HeadsShape {
        let first = &self.heads[0];
        HeadsShape {
            medusa_num_heads: self.heads.len(),
            medusa_num_layers: first.blocks.len(),
            hidden_size: self.hidden_size,
            vocab_size: if first.w2.is_some() { self.vocab_size } else { 0 },
        }
    }

    /// The heads that `tree` uses, for an engine that drafts on the device.
    pub fn on_device<'a>(&self, tree: &'a SparseTree) -> DeviceDraft<'a> {
        let (shape, used) = (self.shape(), &self.heads[..tree.max_depth()]);
        let shape = DraftShape { tree, blocks: shape.medusa_num_layers, parameters: shape.parameters() };
        DeviceDraft { shape, heads: used.iter().map(Head::matrices).collect() }
    }

    /// Writes `heads.safetensors` into `folder`.
    ///
    /// # Errors
    /// [`WeightsError::File`].
    pub fn save(&self, folder: &Path) -> Result<(), WeightsError> {
        save(&folder.join(HEADS_FILE), &self.parameters())
    }
}

impl Head {
    /// Applies the ResBlocks: `x + SiLU(W1·x + b1)` each, `[N, H]` to `[N, H]`. Computes in `x`'s dtype.
    pub fn hidden(&self, hidden_nh: &Tensor) -> Tensor {
        self.blocks.iter().fold(hidden_nh.shallow_clone(), |x, block| &x + block.forward(&x, Adapters::Off).silu())
    }

    /// W2 `[V, H]`; `None` if the head uses the backbone's lm_head or W2 is packed.
    pub fn w2(&self) -> Option<&Tensor> {
        self.w2.as_ref().and_then(Linear::dense_weight)
    }

    /// W1 and b1 of every block, block after block.
    pub fn block_parameters(&self) -> Vec<&Tensor> {
        self.blocks.iter().flat_map(|block| block.dense_weight().into_iter().chain(block.bias())).collect()
    }

    /// Views of the weights; `None` if they are laid out for the CPU kernels.
    fn matrices(&self) -> Option<HeadMatrices> {
        let block = |block: &Linear| Some((block.in_rows()?, block.bias()?.shallow_clone()));
        let blocks = self.blocks.iter().map(block).collect::<Option<_>>()?;
        Some(HeadMatrices { blocks, w2_vh: self.w2.as_ref().map_or(Some(None), |w2| w2.in_rows().map(Some))? })
    }

    fn parameters(&self) -> Vec<&Tensor> {
        self.block_parameters().into_iter().chain(self.w2()).collect()
    }
}
