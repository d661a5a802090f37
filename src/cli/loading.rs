//! Loads backbones: of `--backbone`, and draft models.

use std::path::Path;

use super::backbone::{backbone_config, report_keys_without_effect};
use super::progress::Progress;
use super::served::ModelOptions;
use super::{CommonFlags, UsageError};
use crate::draft::heads::Heads;
use crate::draft::heads::import::folder_of;
use crate::dtype::Dtype;
use crate::engine::dtype::default_dtype;
use crate::files::{is_file, is_folder};
use crate::formats::run_folder;
use crate::memory::stages::balanced;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::device_map::DeviceMap;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::model::stages::Stages;
use crate::model::stored::{Quantization, stored_format};
use crate::model::weights::WeightFiles;
use crate::torch::shared_gpus::SharedGpus;
use tch::Device;

/// Loads a backbone in `--dtype`, by default its weights' own (for float16 on a CPU that of `served`, else [`default_dtype`]), quantised and
/// with the context as in `served`. An adapter in the folder of `heads` is merged into it.
///
/// # Errors
/// If the device cannot be used, or the folder holds no backbone.
pub fn load_backbone(
    folder: &Path,
    heads: Option<&Path>,
    served: &ModelOptions,
    common: &CommonFlags,
    purpose: Purpose,
) -> anyhow::Result<Llama> {
    let config = backbone_config(folder)?;
    report_keys_without_effect(folder, common)?;
    let device = common.device.resolve()?;
    let dtype = match common.dtype {
        Some(dtype) => dtype,
        None => dtype_without_flag(own_dtype(folder)?, served.dtype, device, common),
    };
    let (kind, quantization) = (dtype.kind(), served.quantization);
    let stages = match &served.device_map {
        None => Stages::one(device),
        Some(map) => spread(map, device, &SplitRequest { config: &config, heads, dtype, quantization })?,
    };
    let heads = heads.map(folder_of);
    if let Some(tuned) = heads.map(|heads| heads.join(run_folder::BACKBONE)).filter(|tuned| tuned != folder)
        && is_folder(&tuned)?
    {
        common.say(format_args!(
            "these heads were trained together with the backbone in {}, not with {}",
            tuned.display(),
            folder.display()
        ));
    }
    let is_adapted = heads.map(|heads| is_file(&heads.join(ADAPTER_CONFIG))).transpose()?;
    let adapter = heads.filter(|_| is_adapted == Some(true));
    if let Some(adapter) = adapter {
        common.say(format_args!("merging the adapter beside the heads ({})", adapter.join(ADAPTER_FILE).display()));
    }
    let progress = Progress::waiting(format!("loading {}", folder.display()), common);
    let mut backbone = match adapter {
        None => Llama::load_on(folder, kind, stages, purpose, quantization)?,
        Some(adapter) => {
            Llama::load_on(folder, kind, stages, Purpose::Training, quantization)?.with_adapter(adapter, purpose)?
        }
    };
    drop(progress);
    served.context.into_iter().for_each(|tokens| backbone.set_context(tokens));
    Ok(backbone)
}

/// What `--device-map` spreads.
struct SplitRequest<'s> {
    config: &'s LlamaConfig,
    heads: Option<&'s Path>,
    dtype: Dtype,
    quantization: Option<Quantization>,
}

/// The stages of `--device-map` on the GPUs of this process; `auto` spreads the weights, the heads' on the last GPU included.
fn spread(map: &DeviceMap, device: Device, of: &SplitRequest) -> anyhow::Result<Stages> {
    let (gpus, layers) = (SharedGpus::alone(device), of.config.num_hidden_layers);
    if let Some(expected) = map.expected_layers(layers).or_else(|| map.expected_gpus(gpus.of_each(device))) {
        return Err(UsageError(format!("--device-map {map}: expected {expected}")).into());
    }
    let devices = DeviceMap::devices(Some(map), gpus, device);
    let counts = match map {
        DeviceMap::Layers(counts) => counts.clone(),
        DeviceMap::Auto => {
            let heads = of.heads.map(|heads| Heads::check(heads, of.config)).transpose()?;
            let element = of.dtype.kind().elt_size_in_bytes() as u64;
            let heads = heads.map_or(0, |shape| shape.parameters().unsigned_abs() * element);
            let stored = stored_format(of.quantization, element);
            balanced(layers, devices.len(), |stage| {
                stage.matrix_bytes(of.config, &*stored, element) + if stage.is_last { heads } else { 0 }
            })
        }
    };
    Ok(Stages::new(devices.into_iter().zip(counts)))
}

/// `trained`: the dtype of the heads' training.
fn dtype_without_flag(own: Dtype, trained: Option<Dtype>, device: Device, common: &CommonFlags) -> Dtype {
    let fastest = default_dtype(own, device);
    if fastest == own {
        return own;
    }
    let trained = trained.map(Dtype::by_default).filter(|trained| *trained != own);
    let why = match (trained, fastest) {
        (Some(_), _) => ", as in the heads' training",
        (None, Dtype::BFloat16) => "; --dtype float32 is more exact",
        (None, _) => ", which is faster on a CPU",
    };
    let dtype = trained.unwrap_or(fastest);
    common.say(format_args!("{own} weights: computing in {dtype}{why}"));
    dtype
}

/// The dtype of a backbone's weights; float32 for float64.
fn own_dtype(folder: &Path) -> anyhow::Result<Dtype> {
    let config = LlamaConfig::load(folder)?;
    let embedding = WeightFiles::open(folder)?.mapped(names::EMBED_TOKENS, &[config.vocab_size, config.hidden_size])?;
    Ok(Dtype::of(embedding.kind()).by_default())
}
