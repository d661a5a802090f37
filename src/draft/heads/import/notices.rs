//! Warnings about a heads file that is usable all the same.

use std::fmt;
use std::path::PathBuf;

use super::HeadsFile;
use crate::draft::error::DrafterError;
use crate::draft::heads::layout::{HeadPart, HeadTensor, HeadsLayout};
use crate::formats::heads_config::PublishedHeadsConfig;

/// A warning about a heads file that is usable all the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// `config.json` contradicts the tensors.
    Count {
        /// `config.json`.
        path: PathBuf,
        key: String,
        says: u64,
        /// Counted from the tensors.
        holds: usize,
    },
    /// Several ResBlocks of a head share one weight.
    Tied {
        path: PathBuf,
        /// 1-based heads.
        heads: Vec<usize>,
    },
    /// vLLM would ignore the biases.
    DroppedBias {
        /// `config.json`.
        path: PathBuf,
    },
    /// The heads were trained on a quantised backbone, but the backbone here is not quantised.
    Quantized {
        /// `config.json`.
        path: PathBuf,
        /// `nf4` or `int8`.
        quantization: String,
    },
    /// The file has no biases, as its `config.json` declares.
    NoBias { path: PathBuf },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::Count { path, key, says, holds } => {
                write!(f, "{} says {key} = {says}, but the file holds {holds}: {holds} are used", path.display())
            }
            Notice::Tied { path, heads } => write!(
                f,
                "{}: the ResBlocks of head(s) {heads:?} are one module under several names (tied); here each has a copy of its own",
                path.display()
            ),
            Notice::DroppedBias { path } => write!(
                f,
                "{} does not say \"medusa_fc_bias\": true, so vLLM leaves the file's biases out; here they are used",
                path.display()
            ),
            Notice::Quantized { path, quantization } => write!(
                f,
                "{}: these heads were trained on a backbone quantised to {quantization}, but the backbone here is not quantised: their \
                 accuracy may differ from training",
                path.display()
            ),
            Notice::NoBias { path } => {
                write!(f, "{}: ResBlocks without biases, as its config.json says; they are taken as 0", path.display())
            }
        }
    }
}

impl Notice {
    /// That a drafter was trained on a quantised backbone, by the config.json beside it.
    pub fn quantized(config: Option<&PublishedHeadsConfig>) -> Option<Self> {
        let config = config?;
        Some(Self::Quantized { path: config.path.clone(), quantization: config.quantization()?.to_owned() })
    }
}

impl HeadsFile {
    /// Warnings for the user. Reads weights only to compare the ResBlocks of a head.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is wrong.
    pub fn notices(&self) -> Result<Vec<Notice>, DrafterError> {
        let mut notices = Vec::new();
        if let Some(config) = &self.config {
            let layers = if self.layout == HeadsLayout::Vllm { "num_hidden_layers" } else { "medusa_num_layers" };
            let keys = [
                (
                    &["medusa_num_heads", "num_heads", "num_medusa_heads", "hydra_num_heads"][..],
                    self.shape.medusa_num_heads,
                ),
                (&[layers, "num_medusa_layers", "hydra_num_layers"], self.shape.medusa_num_layers),
            ];
            let differs = |(keys, holds): (&[&str], usize)| {
                let (key, says) = config.count(keys).filter(|(_, says)| *says != holds as u64)?;
                Some(Notice::Count { path: config.path.clone(), key, says, holds })
            };
            notices.extend(keys.into_iter().filter_map(differs));
            notices.extend(Notice::quantized(Some(config)));
        }
        let path = self.path.clone();
        match (self.has_biases(), self.says("medusa_fc_bias")) {
            (false, _) if self.shape.medusa_num_layers > 0 => notices.push(Notice::NoBias { path: path.clone() }),
            (true, Some(false)) if self.layout == HeadsLayout::Vllm => {
                notices.extend(self.config.as_ref().map(|config| Notice::DroppedBias { path: config.path.clone() }));
            }
            _ => {}
        }
        let tied = self.tied_heads()?;
        notices.extend((!tied.is_empty()).then_some(Notice::Tied { path, heads: tied }));
        Ok(notices)
    }

    /// The first ResBlock that reads H inputs: those of a sequential head's first block are more.
    pub fn first_square_block(&self) -> usize {
        usize::from(self.shape.architecture.is_sequential())
    }

    /// 1-based heads with a later ResBlock that equals the first of its size. Blocks of zeros, with which training starts, do not count.
    fn tied_heads(&self) -> Result<Vec<usize>, DrafterError> {
        let mut tied = Vec::new();
        for head in 0..self.shape.medusa_num_heads {
            let mut is_tied = false;
            for layer in self.first_square_block() + 1..self.shape.medusa_num_layers {
                is_tied |= self.are_one(head, layer)?;
            }
            tied.extend(is_tied.then_some(head + 1));
        }
        Ok(tied)
    }

    /// The first of `num_heads` heads (1-based) whose ResBlocks of H inputs differ from each other.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is wrong.
    pub fn head_of_several_blocks(&self, num_heads: usize) -> Result<Option<usize>, DrafterError> {
        let first = self.first_square_block();
        for head in 0..num_heads {
            for layer in first + 1..self.shape.medusa_num_layers {
                for part in [HeadPart::W1, HeadPart::B1] {
                    let [one, other] = [first, layer].map(|layer| self.stored(HeadTensor { head, layer, part }));
                    if !one?.equal(&other?) {
                        return Ok(Some(head + 1));
                    }
                }
            }
        }
        Ok(None)
    }

    fn are_one(&self, head: usize, layer: usize) -> Result<bool, DrafterError> {
        let w1 = |layer| self.name(HeadTensor { head, layer, part: HeadPart::W1 });
        let (Some(first), Some(other)) = (w1(self.first_square_block())?, w1(layer)?) else { return Ok(false) };
        if self.tensors.same_memory(&first, &other) {
            return Ok(true);
        }
        let size = [self.shape.hidden_size; 2];
        self.tensors.check(&first, &size)?;
        self.tensors.check(&other, &size)?;
        Ok(self.tensors.same_bits(&first, &other)? && !self.tensors.is_zero(&first)?)
    }
}
