//! Loads backbones: of a session, and draft models.

use std::path::Path;

use super::error::{SessionError, UsageError};
use super::opened::OpenedHeads;
use super::reporter::{LoadContext, Reporter};
use super::setup::ModelSetup;
use crate::dtype::Dtype;
use crate::engine::dtype::default_dtype;
use crate::files::is_folder;
use crate::formats::run_folder;
use crate::memory::stages::balanced;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::device_map::DeviceMap;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::peft::ADAPTER_FILE;
use crate::model::stages::Stages;
use crate::model::stored::dense::Dense;
use crate::model::stored::{Quantization, stored_format};
use crate::model::weights::WeightFiles;
use crate::torch::shared_gpus::SharedGpus;
use tch::Device;

/// Loads a backbone in the dtype of the context, by default its weights' own (for float16 on a CPU that of the heads' training, else
/// [`default_dtype`]). An adapter in the folder of the heads is merged into it.
///
/// # Errors
/// If the device cannot be used, or the folder holds no backbone.
pub fn load_backbone(setup: &ModelSetup, purpose: Purpose, context: LoadContext) -> Result<Llama, SessionError> {
    let (folder, config, quantization) = (&setup.backbone.folder, &setup.backbone.config, setup.quantization);
    setup.backbone.report_keys_without_effect(context.reporter)?;
    let device = context.device.resolve()?;
    let dtype = match context.dtype {
        Some(dtype) => dtype,
        None => dtype_of_weights(own_dtype(setup)?, setup.trained_dtype, device, context.reporter),
    };
    let heads = setup.heads.as_deref();
    let stages = match &setup.device_map {
        None => Stages::one(device),
        Some(map) => spread(map, device, &SplitRequest { config, heads, dtype, quantization })?,
    };
    let adapter = heads.map_or(Ok(None), |heads| adapter_of(heads, setup, context.reporter))?;
    let progress = context.reporter.begin(format!("loading {}", folder.display()));
    let whole = (config.clone(), None);
    let load = |purpose| Llama::load_with(folder, whole, dtype.kind(), stages, purpose, quantization);
    let mut backbone = match adapter {
        None => load(purpose)?,
        Some(adapter) => load(Purpose::Training)?.with_adapter(adapter, purpose)?,
    };
    drop(progress);
    setup.context.into_iter().for_each(|tokens| backbone.set_context(tokens));
    if let Some(heads) = heads {
        let taps = heads.file.taps(&backbone.config);
        if !taps.is_empty() {
            heads.file.check(&backbone.config)?;
            backbone.set_taps(taps);
        }
    }
    Ok(backbone)
}

/// The folder of the adapter to merge. Reports it, and heads that were trained together with another backbone.
fn adapter_of<'h>(
    heads: &'h OpenedHeads,
    setup: &ModelSetup,
    reporter: &dyn Reporter,
) -> Result<Option<&'h Path>, SessionError> {
    let (folder, tuned) = (&setup.backbone.folder, heads.folder().join(run_folder::BACKBONE));
    if tuned != *folder && is_folder(&tuned)? {
        reporter.notice(&format_args!(
            "these heads were trained together with the backbone in {}, not with {}",
            tuned.display(),
            folder.display()
        ));
    }
    let adapter = heads.adapter()?;
    if let Some(adapter) = adapter {
        let file = adapter.join(ADAPTER_FILE);
        reporter.notice(&format_args!("merging the adapter beside the heads ({})", file.display()));
    }
    Ok(adapter)
}

/// What `--device-map` spreads.
struct SplitRequest<'s> {
    config: &'s LlamaConfig,
    heads: Option<&'s OpenedHeads>,
    dtype: Dtype,
    quantization: Option<Quantization>,
}

/// The stages of `--device-map` on the GPUs of this process; `auto` spreads the weights, the heads' on the last GPU included.
fn spread(map: &DeviceMap, device: Device, of: &SplitRequest) -> Result<Stages, SessionError> {
    let (gpus, layers) = (SharedGpus::alone(device), of.config.num_hidden_layers);
    if let Some(expected) = map.expected_layers(layers).or_else(|| map.expected_gpus(gpus.per_process(device))) {
        return Err(UsageError(format!("--device-map {map}: expected {expected}")).into());
    }
    let devices = DeviceMap::devices(Some(map), gpus, device);
    let counts = match map {
        DeviceMap::Layers(counts) => counts.clone(),
        DeviceMap::Auto => {
            of.heads.map_or(Ok(()), |heads| heads.file.check(of.config))?;
            let element = of.dtype.kind().elt_size_in_bytes() as u64;
            let heads = of.heads.map_or(0, |heads| heads.file.num_parameters() * element);
            let dense = Dense(element);
            let stored = stored_format(of.quantization, &dense);
            balanced(layers, devices.len(), |stage| {
                stage.matrix_bytes(of.config, stored, element) + if stage.is_last { heads } else { 0 }
            })
        }
    };
    Ok(Stages::new(devices.into_iter().zip(counts)))
}

/// `trained`: the dtype of the heads' training.
fn dtype_of_weights(own: Dtype, trained: Option<Dtype>, device: Device, reporter: &dyn Reporter) -> Dtype {
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
    reporter.notice(&format_args!("{own} weights: computing in {dtype}{why}"));
    dtype
}

/// The dtype of a backbone's weights; float32 for float64.
fn own_dtype(setup: &ModelSetup) -> Result<Dtype, SessionError> {
    let LlamaConfig { vocab_size, hidden_size, .. } = setup.backbone.config;
    let files = WeightFiles::open(&setup.backbone.folder)?;
    if files.is_in_blocks(names::EMBED_TOKENS) {
        return Ok(Dtype::BFloat16);
    }
    files.check(names::EMBED_TOKENS, &[vocab_size, hidden_size])?;
    Ok(files.kind(names::EMBED_TOKENS).map_or(Dtype::Float32, |kind| Dtype::of(kind).by_default()))
}
