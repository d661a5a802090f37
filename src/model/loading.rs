//! Loads a backbone from a Hugging Face folder, or makes one without numbers (an outline) or with random weights.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::cpu;
use crate::dtype::DraftDtype;
use crate::model::block_spec::names;
use crate::model::config::{ConfigError, LlamaConfig};
use crate::model::decoder_layer::{DecoderLayer, LinearStore, build_linear};
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::peft::{self, PeftError};
use crate::model::stages::{StageBorders, Stages};
use crate::model::stored::table::TokenTable;
use crate::model::stored::{Quantization, QuantizationError, QuantizedWeight, Quantizer};
use crate::model::taps::Taps;
use crate::model::weights::{WeightFiles, WeightsError};
use crate::torch::Generator;

mod tensors;

pub use tensors::TensorsError;

/// Why a folder cannot be loaded as a backbone.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Adapter(#[from] PeftError),
    #[error(transparent)]
    Tensors(#[from] TensorsError),
    #[error(transparent)]
    Quantization(#[from] QuantizationError),
}

/// Where a backbone's tensors come from: name, shape and device to tensor.
type StagedSource<'s> = dyn FnMut(&str, &[i64], Device) -> Result<Tensor, WeightsError> + 's;

/// The part of a backbone that is loaded for hidden states that were computed elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputPart {
    /// The final norm and the LM head.
    NormAndLmHead,
    /// Also the token embedding, which sequential heads read.
    WithEmbedding,
}

impl OutputPart {
    /// Names of its tensors. A tied LM head is named, too: if it is there, it must be the embedding.
    pub fn tensors(self, config: &LlamaConfig) -> Vec<&'static str> {
        let embeds = self == Self::WithEmbedding || config.tie_word_embeddings;
        [names::NORM, names::LM_HEAD_WEIGHT].into_iter().chain(embeds.then_some(names::EMBED_TOKENS)).collect()
    }
}

/// The use that a backbone's weights are laid out for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Whole rows: every product separate, over the mapped file where dtype and device allow. On a CPU, weights in the blocks of a GGUF file
    /// stay so; elsewhere, and for decoding, they are dequantised while they are loaded.
    Training,
    /// As [`Purpose::Training`], with every weight as numbers.
    Saving,
    /// As [`Purpose::Training`], with float32 copies of all weights, which are trained and compute in this dtype.
    FineTuning(Kind),
    /// A few tokens at a time: q, k, v and gate, up merged, and laid out for the CPU's own kernels. There, weights in the blocks of a GGUF file
    /// stay so, and are multiplied by activations in 8 bits.
    Decoding,
    /// As [`Purpose::Decoding`], of a draft model: on the CPU's own kernels, dense weights are in this dtype.
    Guesses(DraftDtype),
    /// A token of each of many generations at a time: merged, and packed on the CPU by oneDNN, which is faster from some 20 rows on.
    Batches,
}

impl Purpose {
    /// Whether linear layers stay in the blocks of a GGUF file, on a CPU.
    fn keeps_blocks(self) -> bool {
        match self {
            Self::Training => true,
            Self::Decoding | Self::Guesses(_) => cpu::available(),
            Self::Saving | Self::FineTuning(_) | Self::Batches => false,
        }
    }
}

impl Llama {
    /// Loads a Hugging Face folder to compute in `kind` on `device`.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load(folder: &Path, kind: Kind, device: Device, purpose: Purpose) -> Result<Self, LoadError> {
        Self::load_quantized(folder, kind, device, purpose, None)
    }

    /// As [`Llama::load`], with the decoder's linear layers quantised one at a time: at most one is in memory unquantised.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_quantized(
        folder: &Path,
        kind: Kind,
        device: Device,
        purpose: Purpose,
        quantization: Option<Quantization>,
    ) -> Result<Self, LoadError> {
        Self::load_on(folder, kind, Stages::one(device), purpose, quantization)
    }

    /// As [`Llama::load_quantized`], over several devices: each weight goes from its file to its device.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_on(
        folder: &Path,
        kind: Kind,
        stages: Stages,
        purpose: Purpose,
        quantization: Option<Quantization>,
    ) -> Result<Self, LoadError> {
        Self::load_with(folder, (LlamaConfig::load(folder)?, None), kind, stages, purpose, quantization)
    }

    /// As [`Llama::load_on`], with a config that was read before, and only so many of the first layers if they are to be timed.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_with(
        folder: &Path,
        (mut config, layers): (LlamaConfig, Option<usize>),
        kind: Kind,
        stages: Stages,
        purpose: Purpose,
        quantization: Option<Quantization>,
    ) -> Result<Self, LoadError> {
        if let Some(quantization) = quantization {
            quantization.check(&config.block(), stages.devices())?;
        }
        let files = WeightFiles::open(folder)?;
        tensors::check(folder, &config, &files)?;
        tensors::check_tied(folder, &config, &files)?;
        config.num_hidden_layers = layers.unwrap_or(config.num_hidden_layers);
        let store = |device: Device| match (quantization, purpose) {
            (Some(quantization), _) => LinearStore::Quantized(Quantizer::new(quantization, device)),
            (None, purpose) if device == Device::Cpu && purpose.keeps_blocks() => LinearStore::Blocks(&files, kind),
            (None, _) => LinearStore::Dense,
        };
        let on_cpu = stages.devices().all(|device| device == Device::Cpu);
        let keeps_tables = purpose.keeps_blocks() && purpose != Purpose::Training;
        let keeps_blocks = |name: &str| keeps_tables && on_cpu && files.is_in_blocks(name);
        let embedding = match keeps_blocks(names::EMBED_TOKENS) {
            true => absent(&[config.vocab_size, config.hidden_size], kind, Device::Cpu),
            false => embedding(&files, &config, kind, stages.first())?,
        };
        let stores: Vec<LinearStore> = stages.devices().map(store).collect();
        let mut source = |name: &str, shape: &[i64], device| {
            if quantization.is_some() {
                files.release(); // what was read before is quantised by now
            }
            match name {
                names::EMBED_TOKENS => Ok(embedding.shallow_clone()),
                names::LM_HEAD_WEIGHT if keeps_blocks(name) => Ok(absent(shape, kind, device)),
                _ => files.tensor(name, shape, kind, device),
            }
        };
        let layers = config.num_hidden_layers;
        let mut llama = Self::build_layers(layers, config, kind, stages, &stores, &mut source)?;
        llama.quantization = quantization;
        let (lm_head, shape) = (llama.lm_head_name(), [llama.config.vocab_size, llama.config.hidden_size]);
        if !files.is_in_blocks(lm_head) {
            llama.lm_head_table = TokenTable::Dense(files.mapped(lm_head, &shape)?);
        }
        let blocks = |name: &str| if keeps_blocks(name) { files.blocks(name, &shape) } else { Ok(None) };
        if let Some(blocks) = blocks(names::EMBED_TOKENS)? {
            llama.embed_tokens = TokenTable::Blocks(blocks);
        }
        if let Some(blocks) = blocks(lm_head)? {
            llama.lm_head = Linear::quantized(QuantizedWeight::from_blocks(blocks.shallow_clone(), kind), None);
            llama.lm_head_table = TokenTable::Blocks(blocks);
        }
        let llama = llama.prepared_for(purpose);
        files.release(); // also what was read to be copied
        Ok(llama)
    }

    /// Loads a part of a backbone, which has no decoder layers: it can norm hidden states and compute logits, but not run over tokens. Other
    /// tensors need not be in the folder.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_output(folder: &Path, kind: Kind, device: Device, part: OutputPart) -> Result<Self, LoadError> {
        let config = LlamaConfig::load(folder)?;
        let wanted = part.tensors(&config);
        let files = WeightFiles::open_tensors(folder, &wanted)?;
        tensors::check_tied(folder, &config, &files)?;
        let mut source = |name: &str, shape: &[i64], device| match name {
            names::EMBED_TOKENS if !wanted.contains(&name) => Ok(absent(shape, kind, device)),
            names::EMBED_TOKENS => embedding(&files, &config, kind, device),
            _ => files.tensor(name, shape, kind, device),
        };
        let llama =
            Self::build_layers(0, config.clone(), kind, Stages::one(device), &[LinearStore::Dense], &mut source)?;
        files.release();
        Ok(llama)
    }

    /// As [`Llama::outline`], of the part that [`Llama::load_output`] loads.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn outline_output(folder: &Path, part: OutputPart) -> Result<(Self, bool), LoadError> {
        let config = LlamaConfig::load(folder)?;
        let wanted = part.tensors(&config);
        let files = match WeightFiles::open_tensors(folder, &wanted) {
            Err(WeightsError::NoWeights { .. }) => None,
            files => Some(files?),
        };
        let outline = Self::outline_of(config, 0, |name, shape| {
            let files = files.as_ref().filter(|_| wanted.contains(&name));
            files.map_or(Ok(()), |files| files.check(name, shape))
        })?;
        Ok((outline, files.is_some()))
    }

    /// As [`Llama::load_quantized`], with the adapter of a PEFT folder merged into the weights. Quantised weights that it changes are
    /// dense afterwards: dequantised, as in training, plus the adapter.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_merged(
        folder: &Path,
        adapter: &Path,
        kind: Kind,
        device: Device,
        purpose: Purpose,
        quantization: Option<Quantization>,
    ) -> Result<Self, LoadError> {
        let first = if purpose == Purpose::Saving { purpose } else { Purpose::Training };
        Self::load_quantized(folder, kind, device, first, quantization)?.with_adapter(adapter, purpose)
    }

    /// A backbone for training with the adapter of a PEFT folder merged into its weights, as [`Llama::load_merged`] does.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn with_adapter(mut self, adapter: &Path, purpose: Purpose) -> Result<Self, LoadError> {
        peft::attach(&mut self, adapter, None)?;
        Ok(self.merged().prepared_for(purpose))
    }

    /// The backbone of a folder without its numbers: every weight is an expanded zero and takes no memory. Also returns whether the folder has
    /// weights; if so, their headers are checked as loading would check them, and no data are read.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn outline(folder: &Path) -> Result<(Self, bool), LoadError> {
        let config = LlamaConfig::load(folder)?;
        let files = match WeightFiles::open(folder) {
            Err(WeightsError::NoWeights { .. }) => None,
            files => Some(files?),
        };
        files.iter().try_for_each(|files| tensors::check(folder, &config, files))?;
        let layers = config.num_hidden_layers;
        let outline = Self::outline_of(config, layers, |name, shape| {
            files.iter().try_for_each(|files| files.check(name, shape))
        })?;
        Ok((outline, files.is_some()))
    }

    fn outline_of(
        config: LlamaConfig,
        layers: usize,
        check: impl Fn(&str, &[i64]) -> Result<(), WeightsError>,
    ) -> Result<Self, WeightsError> {
        let zero = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        let mut source = |name: &str, shape: &[i64], _| {
            check(name, shape)?;
            Ok(zero.expand(shape, false))
        };
        Self::build_layers(layers, config, Kind::Float, Stages::one(Device::Cpu), &[LinearStore::Dense], &mut source)
    }

    /// A backbone of seeded random weights: normal with deviation 0.02, norms 1.
    pub fn random(config: LlamaConfig, kind: Kind, device: Device, seed: u64) -> Self {
        Self::random_on(config, kind, Stages::one(device), seed)
    }

    /// As [`Llama::random`], over several devices: the weights are those of a backbone on the first of them.
    pub fn random_on(config: LlamaConfig, kind: Kind, stages: Stages, seed: u64) -> Self {
        let (mut generator, options) = (Generator::seeded(seed), (kind, stages.first()));
        let mut source = |_: &str, shape: &[i64], device| {
            let is_norm = shape.len() == 1;
            let weight = if is_norm { Tensor::ones(shape, options) } else { generator.normal(shape, options) * 0.02 };
            Ok(weight.to_device(device))
        };
        let (layers, stores) =
            (config.num_hidden_layers, stages.devices().map(|_| LinearStore::Dense).collect::<Vec<_>>());
        Self::build_layers(layers, config, kind, stages, &stores, &mut source).expect("this source has every tensor")
    }

    /// The first `layers` decoder layers, and all that is beside them; each stage has a store of its own.
    fn build_layers(
        layers: usize,
        config: LlamaConfig,
        kind: Kind,
        stages: Stages,
        stores: &[LinearStore],
        source: &mut StagedSource,
    ) -> Result<Self, WeightsError> {
        let (h, v, [first, last]) = (config.hidden_size, config.vocab_size, [stages.first(), stages.last()]);
        let embed_tokens_vh = source(names::EMBED_TOKENS, &[v, h], first)?;
        let mut on_last = |name: &str, shape: &[i64]| source(name, shape, last);
        let lm_head = match config.tie_word_embeddings {
            true => Linear::dense(embed_tokens_vh.to_device(last).to_kind(kind), None),
            false => build_linear(&mut on_last, names::LM_HEAD, &config.lm_head(), &LinearStore::Dense)?,
        };
        let norm_h = on_last(names::NORM, &[h])?;
        let block = config.block();
        let layers = (0..layers).map(|index| {
            let stage = stages.layer_stage(index);
            let mut on_stage = |name: &str, shape: &[i64]| source(name, shape, stages.device(stage));
            DecoderLayer::build(&block, index, &stores[stage], &mut on_stage)
        });
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            norm_h,
            ropes: stages.ropes(&block.layers, kind),
            lm_head_table: TokenTable::Dense(lm_head.dense_weight().expect("a dense LM head").shallow_clone()),
            lm_head,
            embed_tokens: TokenTable::Dense(embed_tokens_vh),
            config,
            block,
            kind,
            quantization: None,
            stages,
            borders: StageBorders::default(),
            taps: Taps::default(),
        })
    }

    /// The name of the tensor that is the LM head's weight.
    fn lm_head_name(&self) -> &'static str {
        match self.config.tie_word_embeddings {
            true => names::EMBED_TOKENS,
            false => names::LM_HEAD_WEIGHT,
        }
    }

    fn prepared_for(self, purpose: Purpose) -> Self {
        match purpose {
            Purpose::Training | Purpose::Saving => self,
            Purpose::FineTuning(kind) => self.for_fine_tuning(kind),
            Purpose::Decoding => self.for_decoding(),
            Purpose::Guesses(dtype) => self.for_guesses(dtype),
            Purpose::Batches => self.for_batches(),
        }
    }
}

/// The token embedding in the dtype of the file; of blocks, in `kind`.
fn embedding(files: &WeightFiles, config: &LlamaConfig, kind: Kind, device: Device) -> Result<Tensor, WeightsError> {
    let (name, shape) = (names::EMBED_TOKENS, [config.vocab_size, config.hidden_size]);
    if files.is_in_blocks(name) { files.tensor(name, &shape, kind, device) } else { files.stored(name, &shape, device) }
}

/// In the place of a weight that is not loaded: NaN, so that whatever reads it shows.
fn absent(shape: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::full([1], f64::NAN, (kind, device)).expand(shape, false)
}
