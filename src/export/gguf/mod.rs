//! Writes a backbone, with the adapter that was trained with heads merged into it, as one GGUF file for llama.cpp. The file is read back by the
//! loader of GGUF files and compared before it gets its name.
//!
//! Memory: the weights of a Hugging Face folder are memory-mapped and written a part at a time. With an adapter, or from a GGUF file in blocks, the
//! whole backbone is in memory in float32 (70 billion weights: 280 GB).

mod config;

use std::io::Write;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tch::{Device, Kind, Tensor};

use super::error::{ExportError, GgufExportError};
use super::finite::finite_backbone;
use super::new_folder;
use super::recorded;
use super::trained::{TrainedBackbone, backbone_with};
use super::write::copy;
use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::data::tokenize::{TextTokenizer, TokenizeError};
use crate::draft::heads::import::HeadsFile;
use crate::dtype::Dtype;
use crate::files::{checksums, failed, write_synced};
use crate::gguf::file::is_gguf;
use crate::gguf::folder::on_disk;
use crate::gguf::metadata::MetaValue;
use crate::gguf::names::{Conversion, conversion, in_gguf, interleaved};
use crate::gguf::types::TensorType;
use crate::gguf::write::{PlannedTensor, write};
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::weights::WeightFiles;

/// Numbers that are written at a time.
const PART: i64 = 1 << 24;

/// How the matrices are stored; norms and biases are always F32, as llama.cpp has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "UPPER")]
pub enum GgufType {
    F32,
    F16,
    BF16,
    /// Eight bits in blocks of 32.
    #[value(name = "Q8_0")]
    Q8,
}

/// What is exported, and where to.
#[derive(Debug)]
pub struct GgufRequest {
    /// A folder or a GGUF file, if it is not the one that the heads name.
    pub backbone: Option<PathBuf>,
    /// Its name on the Hub, if it is a folder from there.
    pub name: Option<String>,
    /// The heads of a Medusa-2 run, whose adapter is merged.
    pub heads: Option<PathBuf>,
    /// The new folder.
    pub out: PathBuf,
    /// By default the type of the weights; BF16 for those in blocks.
    pub kind: Option<GgufType>,
}

/// The written file.
#[derive(Debug, serde::Serialize)]
pub struct GgufExported {
    pub file: PathBuf,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub tensors: usize,
    pub bytes: u64,
    /// Warnings for the user.
    pub notices: Vec<String>,
}

impl GgufType {
    /// The type of the same numbers; `None` for float64, which no program writes.
    pub fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::Float32 => Some(Self::F32),
            Dtype::Float16 => Some(Self::F16),
            Dtype::BFloat16 => Some(Self::BF16),
            Dtype::Float64 => None,
        }
    }

    fn tensor_type(self) -> &'static TensorType {
        let name = match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8 => "Q8_0",
        };
        TensorType::named(name).expect("a type that is written")
    }

    /// `general.file_type` of llama.cpp.
    fn file_type(self) -> i64 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8 => 7,
            Self::BF16 => 32,
        }
    }
}

/// The backbone that is read, as a path or a name.
///
/// # Errors
/// Unreadable heads, or no backbone.
pub fn backbone_needed(request: &GgufRequest) -> Result<PathBuf, ExportError> {
    NamedBackbone::open(request).map(|source| source.base)
}

/// What a request names.
struct NamedBackbone {
    base: PathBuf,
    adapter: Option<PathBuf>,
    heads: Option<HeadsFile>,
}

impl NamedBackbone {
    fn open(request: &GgufRequest) -> Result<Self, ExportError> {
        let heads = request.heads.as_deref().map(HeadsFile::open).transpose()?;
        let TrainedBackbone { base, adapter, .. } = backbone_with(heads.as_ref(), request.backbone.as_deref())?;
        let base = base.ok_or(ExportError::NoBackbone { format: "gguf", why: "its weights are in the file" })?;
        Ok(Self { base, adapter, heads })
    }
}

/// Writes `OUT/NAME-TYPE.gguf` under a temporary name, reads it back, and renames it.
///
/// # Errors
/// [`ExportError`]; nothing is left then.
pub fn export(request: &GgufRequest) -> Result<GgufExported, ExportError> {
    let folder = new_folder::claim(&request.out)?;
    let NamedBackbone { base, adapter, heads } = NamedBackbone::open(request)?;
    let own = WeightFiles::open(&base)?;
    let stored = own.kind(names::EMBED_TOKENS).filter(|_| !own.names().iter().any(|name| own.is_in_blocks(name)));
    let same = |kind: &Kind| own.names().iter().all(|name| own.kind(name).as_ref() == Some(kind));
    let backbone = load(&base, adapter.as_deref(), stored.filter(same))?;
    let kind = request.kind.unwrap_or(match stored {
        Some(Kind::Float | Kind::Double) => GgufType::F32,
        Some(Kind::Half) => GgufType::F16,
        _ => GgufType::BF16,
    });
    let source = WrittenBackbone { backbone: &backbone, architecture: config::architecture(&backbone.config), kind };
    let name = model_name(request.name.as_deref().map_or(&base, Path::new));
    let file = format!("{name}-{}.gguf", kind.tensor_type().name);
    let metadata = source.metadata(&base, &name, heads.as_ref())?;
    let path = folder.partial().join(&file);
    let tensors = source.write(&path, &metadata)?;
    source.check(&path)?;
    let other_tokens = other_tokens(&base, &path).map_err(GgufExportError::from)?;
    copy_licence(&base, folder.partial())?;
    let bytes = std::fs::metadata(&path).map_err(failed("read", &path))?.len();
    checksums::seal(folder.partial(), &[])?;
    new_folder::commit(folder, &request.out)?;
    let mut notices: Vec<String> = config::notice(&backbone.config).into_iter().chain(other_tokens).collect();
    if heads.is_some() {
        notices.push(
            "the heads are not in the file: llama.cpp loads none. Give the file as --backbone and the heads as --heads"
                .into(),
        );
    }
    Ok(GgufExported { file: request.out.join(file), kind: kind.tensor_type().name, tensors, bytes, notices })
}

/// That the tokenizer of the file reads some text otherwise.
fn other_tokens(base: &Path, written: &Path) -> Result<Option<String>, TokenizeError> {
    let text = TextTokenizer::load(base)?.read_otherwise(&TextTokenizer::load(written)?)?;
    Ok(text.map(|text| {
        format!("GGUF does not say all of this tokenizer: llama.cpp, and this file as a backbone, read {text:?} as other tokens")
    }))
}

/// Copies the files that say what may be done with the weights.
fn copy_licence(base: &Path, folder: &Path) -> Result<(), ExportError> {
    let beside = on_disk(base);
    let entries = std::fs::read_dir(beside).map_err(failed("read", beside))?;
    for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        if ["LICENSE", "NOTICE"].iter().any(|begin| name.starts_with(begin)) {
            copy(&beside.join(&name), &folder.join(&name))?;
        }
    }
    Ok(())
}

/// The backbone in the dtype that it is stored in; in float32 where that are several or none of torch's, or an adapter is merged.
fn load(base: &Path, adapter: Option<&Path>, stored: Option<Kind>) -> Result<Llama, ExportError> {
    let purpose = Purpose::Saving;
    let backbone = match (adapter, stored) {
        (Some(adapter), _) => Llama::load_merged(base, adapter, Kind::Float, Device::Cpu, purpose, None)?,
        (None, Some(kind)) if kind != Kind::Double => Llama::load(base, kind, Device::Cpu, purpose)?,
        (None, _) => Llama::load(base, Kind::Float, Device::Cpu, purpose)?,
    };
    finite_backbone(&backbone)?;
    Ok(backbone)
}

/// The last part of a path or of a name on the Hub, without `.gguf`.
fn model_name(base: &Path) -> String {
    // A file of the Hub's cache is a link to one that a hash names.
    let base = if is_gguf(base) { base.to_owned() } else { base.canonicalize().unwrap_or_else(|_| base.to_owned()) };
    let name = base.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

/// A backbone, and how it is written.
struct WrittenBackbone<'b> {
    backbone: &'b Llama,
    architecture: &'b str,
    kind: GgufType,
}

impl WrittenBackbone<'_> {
    fn metadata(
        &self,
        base: &Path,
        name: &str,
        heads: Option<&HeadsFile>,
    ) -> Result<Vec<(String, MetaValue)>, ExportError> {
        let config = &self.backbone.config;
        let text = |key: &str, text: &str| (key.to_owned(), MetaValue::Text(text.to_owned()));
        let whole = |key: &str, number: i64| (key.to_owned(), MetaValue::Integer(number));
        let mut metadata = vec![
            text("general.architecture", self.architecture),
            text("general.type", "model"),
            text("general.name", name),
            whole("general.file_type", self.kind.file_type()),
            whole("general.quantization_version", 2),
        ];
        metadata.extend(config::keys(config));
        let tokenizer = TextTokenizer::load_if_there(base).map_err(GgufExportError::from)?;
        let tokenizer = tokenizer.ok_or_else(|| GgufExportError::NoTokenizer { folder: base.into() })?;
        let rows = usize::try_from(config.vocab_size).unwrap_or_default();
        metadata.extend(tokenizer.gguf_keys(base, rows, &config.eos_token_ids).map_err(GgufExportError::from)?);
        let choice = heads.and_then(recorded::template_choice).unwrap_or(TemplateChoice::Tokenizer);
        let template = ChatTemplate::choose(&choice, base)?;
        metadata.extend(template.map(|template| text("tokenizer.chat_template", template.source())));
        Ok(metadata)
    }

    /// Writes the file; how many tensors it has.
    fn write(&self, path: &Path, metadata: &[(String, MetaValue)]) -> Result<usize, ExportError> {
        let weights = self.backbone.weights();
        let divisors = config::divisors(&self.backbone.config);
        let mut planned =
            weights.iter().map(|(name, tensor)| self.planned(name, tensor)).collect::<Result<Vec<_>, _>>()?;
        planned.extend(divisors.iter().map(|(name, numbers)| PlannedTensor {
            name: (*name).to_owned(),
            shape: vec![numbers.len() as i64],
            kind: GgufType::F32.tensor_type(),
        }));
        let mut fill = |at: usize, out: &mut dyn Write| match weights.get(at) {
            Some((_, tensor)) => {
                self.parts(&planned[at], tensor).try_for_each(|part| out.write_all(&encoded(&planned[at], &part)))
            }
            None => divisors[at - weights.len()].1.iter().try_for_each(|number| out.write_all(&number.to_le_bytes())),
        };
        write_synced(path, |out| write(out, metadata, &planned, &mut fill))
            .map_err(|source| ExportError::Io { path: path.into(), source })?;
        Ok(planned.len())
    }

    /// One-dimensional tensors stay in float32, and rows that are no whole blocks are F16, as llama.cpp's converter has it.
    fn planned(&self, name: &str, tensor: &Tensor) -> Result<PlannedTensor, GgufExportError> {
        let architecture = self.architecture;
        let theirs = in_gguf(name, architecture)
            .ok_or_else(|| GgufExportError::Tensor { name: name.into(), architecture: architecture.into() })?;
        let shape = tensor.size();
        let row = usize::try_from(shape[shape.len() - 1]).unwrap_or_default();
        let kind = match self.kind.tensor_type() {
            _ if shape.len() == 1 => GgufType::F32,
            kind if !row.is_multiple_of(kind.numbers) => GgufType::F16,
            _ => self.kind,
        };
        Ok(PlannedTensor { name: theirs, shape, kind: kind.tensor_type() })
    }

    /// The numbers of a tensor as the file has them, some rows at a time.
    fn parts(&self, planned: &PlannedTensor, tensor: &Tensor) -> impl Iterator<Item = Vec<f32>> {
        let config = &self.backbone.config;
        let heads = [config.num_attention_heads, config.num_key_value_heads];
        let change = conversion(&planned.name, self.architecture, heads);
        let (tensor, rows) = (tensor.detach(), tensor.size()[0]);
        let row = tensor.numel() as i64 / rows;
        let at_once = (PART / row).max(1);
        (0..rows.div_euclid(at_once) + i64::from(rows % at_once != 0)).map(move |part| {
            let range = part * at_once..((part + 1) * at_once).min(rows);
            let numbers = match change {
                Conversion::Interleaved { heads } => {
                    tensor.index_select(0, &Tensor::from_slice(&file_rows(range, rows, heads)))
                }
                _ => tensor.narrow(0, range.start, range.end - range.start),
            };
            let numbers = numbers.to_kind(Kind::Float);
            let numbers = if change == Conversion::PlusOne { numbers + 1.0 } else { numbers };
            Vec::<f32>::try_from(numbers.reshape([-1])).expect("float32")
        })
    }

    /// Compares config and weights with what is read back.
    fn check(&self, path: &Path) -> Result<(), ExportError> {
        let read = LlamaConfig::load(path).map_err(crate::model::loading::LoadError::from)?;
        config::check(&self.backbone.config, &read)?;
        let files = WeightFiles::open(path)?;
        for (name, own) in self.backbone.weights() {
            let planned = self.planned(&name, own)?;
            let written = files.tensor(&name, &own.size(), Kind::Float, Device::Cpu)?;
            if !self.is_as_planned(&planned, own, &written) {
                return Err(ExportError::Differs { path: path.into(), what: name });
            }
            files.release();
        }
        Ok(())
    }

    /// Whether a tensor that was read back is what its numbers become in blocks.
    fn is_as_planned(&self, planned: &PlannedTensor, own: &Tensor, written: &Tensor) -> bool {
        self.parts(planned, own).zip(self.parts(planned, written)).all(|(mut own, written)| {
            let blocks = encoded(planned, &own);
            planned.kind.dequantize_in_parallel(&blocks, &mut own);
            own.par_iter().zip(&written).all(|(own, written)| own.to_bits() == written.to_bits())
        })
    }
}

/// Where rows of the file are in transformers' tensor.
fn file_rows(range: std::ops::Range<i64>, rows: i64, heads: i64) -> Vec<i64> {
    let mut places = vec![0; rows as usize];
    (0..rows).for_each(|row| places[interleaved(row, rows, heads) as usize] = row);
    places[range.start as usize..range.end as usize].to_vec()
}

fn encoded(planned: &PlannedTensor, numbers: &[f32]) -> Vec<u8> {
    let mut blocks = Vec::with_capacity(numbers.len() / planned.kind.numbers * planned.kind.bytes);
    planned.kind.encode(numbers, &mut blocks);
    blocks
}
