//! Contents of a weights file: heads, or any other tensors.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::draft::heads::HeadsShape;
use crate::draft::heads::import::HeadsFile;
use crate::draft::heads::layout::HeadsLayout;
use crate::formats::best::BestEvaluation;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::model::weights::{TensorHeader, WeightFiles};
use crate::plural::{counted, mebibytes};

/// Contents of a weights file.
pub(super) enum WeightsFound {
    Heads(HeadsFound),
    /// Weights of a backbone, or any others.
    Tensors(TensorsFound),
}

#[derive(Debug, Serialize)]
pub(super) struct HeadsFound {
    layout: HeadsLayout,
    #[serde(flatten)]
    shape: HeadsShape,
    shared_lm_head: bool,
    /// Tokens of a truncated vocabulary.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_vocab_size: Option<usize>,
    parameters: i64,
    dtypes: Vec<String>,
    bytes: u64,
    /// Of a run's `best/`: the evaluation that it was kept for.
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<BestEvaluation>,
    /// Warnings for readers of this file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notices: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct TensorsFound {
    tensors: Vec<TensorHeader>,
    parameters: i64,
    bytes: usize,
}

/// Reads the headers of a safetensors or torch file.
///
/// # Errors
/// An invalid file.
pub(super) fn read(path: &Path) -> anyhow::Result<WeightsFound> {
    let is_torch = path.extension().is_some_and(|extension| extension != "safetensors");
    let tensors = if is_torch { None } else { Some(tensors(path)?) };
    match (HeadsFile::open(path), tensors) {
        (Ok(file), None) => Ok(WeightsFound::Heads(HeadsFound::read(&file)?)),
        (Ok(file), Some(_)) if file.layout().prefix().is_none() => Ok(WeightsFound::Heads(HeadsFound::read(&file)?)),
        (_, Some(tensors)) => Ok(WeightsFound::Tensors(tensors)),
        (Err(_), None) => Ok(WeightsFound::Tensors(self::tensors(path)?)), // or the error in the file
    }
}

fn tensors(path: &Path) -> anyhow::Result<TensorsFound> {
    let tensors = WeightFiles::open_file(path)?.tensors();
    let parameters = tensors.iter().map(|tensor| tensor.shape.iter().product::<i64>()).sum();
    let bytes = tensors.iter().map(|tensor| tensor.bytes).sum();
    Ok(TensorsFound { tensors, parameters, bytes })
}

impl HeadsFound {
    pub(super) fn read(file: &HeadsFile) -> anyhow::Result<Self> {
        let (shape, bytes) = (file.shape(), file.bytes()?);
        Ok(Self {
            layout: file.layout(),
            shape,
            shared_lm_head: shape.vocab_size == 0,
            draft_vocab_size: file.token_map().map(<[i64]>::len),
            parameters: file.parameters()?,
            bytes: bytes.values().sum(),
            dtypes: bytes.into_keys().collect(),
            best: file.config().and_then(PublishedHeadsConfig::best),
            notices: file.notices()?.iter().map(ToString::to_string).collect(),
        })
    }

    pub(super) fn text(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "heads        {}", self.line())?;
        writeln!(out, "layout       {}", self.layout.title())?;
        if let Some(best) = &self.best {
            writeln!(out, "best         {best}")?;
        }
        self.notices.iter().try_for_each(|notice| writeln!(out, "note         {notice}"))
    }

    pub(super) fn line(&self) -> String {
        let HeadsShape { medusa_num_heads, medusa_num_layers, hidden_size, vocab_size, w2_rank, shared_w2, .. } =
            self.shape;
        let rank = if w2_rank > 0 { format!(" by rank {w2_rank}") } else { String::new() };
        let shared = if shared_w2 { ", one W2 for all heads" } else { "" };
        let vocabulary = match self.shared_lm_head {
            true => "shared lm_head".into(),
            false => {
                let truncated = if self.draft_vocab_size.is_some() { "truncated " } else { "" };
                format!("{truncated}vocabulary {vocab_size}{rank}{shared}")
            }
        };
        format!(
            "{} of {}, hidden size {hidden_size}, {vocabulary}: {} parameters, {} ({})",
            counted(medusa_num_heads, self.shape.architecture.noun()),
            counted(medusa_num_layers, "ResBlock"),
            self.parameters,
            self.dtypes.join(" and "),
            mebibytes(self.bytes)
        )
    }
}

impl TensorsFound {
    pub(super) fn text(&self, out: &mut String) -> std::fmt::Result {
        let width = self.tensors.iter().map(|tensor| tensor.name.len()).max().unwrap_or(0);
        for TensorHeader { name, dtype, shape, .. } in &self.tensors {
            writeln!(out, "{name:width$}  {dtype:5} {shape:?}")?;
        }
        writeln!(
            out,
            "{}, {} values, {}",
            counted(self.tensors.len(), "tensor"),
            self.parameters,
            mebibytes(self.bytes as u64)
        )
    }
}
