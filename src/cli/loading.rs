//! Loads backbones: of `--backbone`, and draft models.

use std::path::Path;

use super::CommonFlags;
use super::backbone::backbone_config;
use super::progress::Progress;
use super::served::Served;
use crate::draft::medusa::heads::import::folder_of;
use crate::dtype::Dtype;
use crate::engine::dtype::default_dtype;
use crate::formats::run_folder;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::model::weights::WeightFiles;
use tch::Device;

/// Loads a backbone in `--dtype`, by default its weights' own (for float16 on a CPU that of `served`, else [`default_dtype`]), quantised and
/// with the context as in `served`. An adapter in the folder of `heads` is merged into it.
///
/// # Errors
/// If the device cannot be used, or the folder holds no backbone.
pub fn load_backbone(
    folder: &Path,
    heads: Option<&Path>,
    served: &Served,
    common: &CommonFlags,
    purpose: Purpose,
) -> anyhow::Result<Llama> {
    backbone_config(folder)?;
    let device = common.device.resolve()?;
    let dtype = match common.dtype {
        Some(dtype) => dtype,
        None => dtype_without_flag(own_dtype(folder)?, served.dtype, device, common),
    };
    let heads = heads.map(folder_of);
    if let Some(tuned) =
        heads.map(|heads| heads.join(run_folder::BACKBONE)).filter(|tuned| tuned.exists() && tuned != folder)
    {
        common.say(format_args!(
            "these heads were trained together with the backbone in {}, not with {}",
            tuned.display(),
            folder.display()
        ));
    }
    let (kind, quantization) = (dtype.kind(), served.quantization);
    let adapter = heads.filter(|heads| heads.join(ADAPTER_CONFIG).exists());
    if let Some(adapter) = adapter {
        common.say(format_args!("merging the adapter beside the heads ({})", adapter.join(ADAPTER_FILE).display()));
    }
    let progress = Progress::waiting(format!("loading {}", folder.display()), common);
    let mut backbone = match adapter {
        None => Llama::load_quantized(folder, kind, device, purpose, quantization)?,
        Some(adapter) => Llama::load_merged(folder, adapter, kind, device, purpose, quantization)?,
    };
    drop(progress);
    served.context.into_iter().for_each(|tokens| backbone.set_context(tokens));
    Ok(backbone)
}

/// `trained`: the dtype of the heads' training.
fn dtype_without_flag(own: Dtype, trained: Option<Dtype>, device: Device, common: &CommonFlags) -> Dtype {
    let fastest = default_dtype(own, device);
    if fastest == own {
        return own;
    }
    let trained = trained.filter(|trained| *trained != own);
    let why = match (trained, fastest) {
        (Some(_), _) => ", as in the heads' training",
        (None, Dtype::BFloat16) => "; --dtype float32 is more exact",
        (None, _) => ", which is faster on a CPU",
    };
    let dtype = trained.unwrap_or(fastest);
    common.say(format_args!("{own} weights: computing in {dtype}{why}"));
    dtype
}

/// The dtype of a backbone's weights.
fn own_dtype(folder: &Path) -> anyhow::Result<Dtype> {
    let config = LlamaConfig::load(folder)?;
    let embedding = WeightFiles::open(folder)?.mapped(names::EMBED_TOKENS, &[config.vocab_size, config.hidden_size])?;
    Ok(Dtype::of(embedding.kind()))
}
