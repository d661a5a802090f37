//! Loads a backbone from a Hugging Face folder, or makes one without numbers (an outline) or with random weights.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::model::block_spec::names;
use crate::model::config::{ConfigError, LlamaConfig};
use crate::model::decoder_layer::{DecoderLayer, TensorSource, build_linear};
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::peft::{self, PeftError};
use crate::model::quantization::{Quantization, Quantizer};
use crate::model::rope::Ropes;
use crate::model::weights::{WeightFiles, WeightsError};
use crate::torch::Generator;

/// Why a folder cannot be loaded as a backbone.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Adapter(#[from] PeftError),
}

/// The use that a backbone's weights are laid out for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Whole rows: every product separate, over the mapped file where dtype and device allow.
    Training,
    /// A few tokens at a time: q, k, v and gate, up merged, and laid out for the CPU's own kernels.
    Decoding,
    /// A token of each of many generations at a time: merged, and packed on the CPU by oneDNN, which is faster from some 20 rows on.
    Batches,
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
        let config = LlamaConfig::load(folder)?;
        let files = WeightFiles::open(folder)?;
        let embedding = files.stored(names::EMBED_TOKENS, &[config.vocab_size, config.hidden_size], device)?;
        let mut source = |name: &str, shape: &[i64]| {
            if quantization.is_some() {
                files.release(); // what was read before is quantised by now
            }
            match name {
                names::EMBED_TOKENS => Ok(embedding.shallow_clone()),
                _ => files.tensor(name, shape, kind, device),
            }
        };
        let mut llama = Self::build(config, kind, device, quantization, &mut source)?;
        llama.lm_head_vh = files.mapped(&llama.lm_head_name(), &[llama.config.vocab_size, llama.config.hidden_size])?;
        let llama = llama.prepared_for(purpose);
        files.release();
        Ok(llama)
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
        let mut llama = Self::load_quantized(folder, kind, device, Purpose::Training, quantization)?;
        peft::attach(&mut llama, adapter, None)?;
        Ok(llama.merged().prepared_for(purpose))
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
        let zero = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        let mut source = |name: &str, shape: &[i64]| {
            files.iter().try_for_each(|files| files.check(name, shape))?;
            Ok(zero.expand(shape, false))
        };
        let outline = Self::build(config, Kind::Float, Device::Cpu, None, &mut source)?;
        Ok((outline, files.is_some()))
    }

    /// A backbone of seeded random weights: normal with deviation 0.02, norms 1.
    pub fn random(config: LlamaConfig, kind: Kind, device: Device, seed: u64) -> Self {
        let mut generator = Generator::seeded(seed);
        let mut source = |_: &str, shape: &[i64]| {
            let options = (kind, device);
            Ok(if shape.len() == 1 { Tensor::ones(shape, options) } else { generator.normal(shape, options) * 0.02 })
        };
        Self::build(config, kind, device, None, &mut source).expect("this source has every tensor")
    }

    fn build(
        config: LlamaConfig,
        kind: Kind,
        device: Device,
        quantization: Option<Quantization>,
        source: &mut TensorSource,
    ) -> Result<Self, WeightsError> {
        let (h, v) = (config.hidden_size, config.vocab_size);
        let quantizer = quantization.map(|quantization| Quantizer::new(quantization, device));
        let embed_tokens_vh = source(names::EMBED_TOKENS, &[v, h])?;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::dense(embed_tokens_vh.to_kind(kind), None),
            false => build_linear(source, names::LM_HEAD, &config.lm_head(), None)?,
        };
        let block = config.block();
        let layers = (0..config.num_hidden_layers).map(|i| DecoderLayer::build(&block, i, quantizer.as_ref(), source));
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            norm_h: source(names::NORM, &[h])?,
            ropes: Ropes::new(&block.layers, kind, device),
            lm_head_vh: lm_head.dense_weight().expect("lm_head is not quantised").shallow_clone(),
            lm_head,
            embed_tokens_vh,
            config,
            block,
            kind,
            quantization,
            device,
        })
    }

    /// The name of the tensor that is the LM head's weight.
    fn lm_head_name(&self) -> String {
        match self.config.tie_word_embeddings {
            true => names::EMBED_TOKENS.to_owned(),
            false => format!("{}.weight", names::LM_HEAD),
        }
    }

    fn prepared_for(self, purpose: Purpose) -> Self {
        match purpose {
            Purpose::Training => self,
            Purpose::Decoding => self.for_decoding(),
            Purpose::Batches => self.for_batches(),
        }
    }
}
