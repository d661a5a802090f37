//! Writes the files of each layout.

use std::io::{self, Write as _};
use std::path::Path;

use serde_json::{Map, Value, json};
use tch::Tensor;

use super::error::ExportError;
use super::format::{FolderContents, joined};
use super::recorded;
use super::trained::Trained;
use crate::bounds::JSON_FILE_BYTES;
use crate::draft::heads::layout::{HeadTensor, VLLM_LM_HEAD};
use crate::draft::token_map::TOKEN_MAP;
use crate::files::{self, write_json, write_synced};
use crate::formats::heads_config::TRAINING;
use crate::model::folder::{Additions, save_folder_with};
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::model::prefix_layer::PREFIX;
use crate::model::weights::torch_file;
use crate::model::weights::{Planned, save_each};

/// The key with the backbone's name, in the heads' config.json and in PEFT's.
const BASE: &str = "base_model_name_or_path";

/// Writes weights, config and chat template of the layout into `folder`.
pub(super) fn write(folder: &Path, trained: &mut Trained) -> Result<(), ExportError> {
    match trained.format.contents {
        FolderContents::Backbone => with_backbone(folder, trained)?,
        FolderContents::Adapter => adapter(folder, trained).and_then(|()| heads(folder, trained))?,
        FolderContents::Heads => heads(folder, trained)?,
    }
    recorded::write_template(folder, trained)
}

/// Writes the heads and their config.
fn heads(folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    match (trained.format.safetensors, trained.format.pickle) {
        (Some(file), _) if !trained.pickle => alone(folder, trained, file),
        (_, Some(file)) => pickled(folder, trained, file),
        _ => unreachable!("refused, or in the backbone's files"),
    }
}

fn alone(folder: &Path, trained: &Trained, file: &str) -> Result<(), ExportError> {
    let (mut planned, places) = plan(trained);
    let lm_head = trained.one_lm_head().map(|lm_head| (VLLM_LM_HEAD, lm_head.to_kind(trained.dtype.kind())));
    let token_map = trained.file.token_map().map(|tokens| (TOKEN_MAP, Tensor::from_slice(tokens)));
    let prefix = trained.file.prefix_tensors()?;
    let mut others: Vec<(&str, Tensor)> = lm_head.into_iter().chain(token_map).collect();
    for (name, size) in &prefix {
        others.push((name, trained.file.prefix_tensor(name, size)?.to_kind(trained.dtype.kind())));
    }
    planned.extend(others.iter().map(|(name, tensor)| Planned::of((*name).into(), tensor)));
    save_each(&folder.join(file), &planned, &mut |at| match at.checked_sub(places.len()) {
        None => tensor(trained, places[at]),
        Some(other) => Ok(others[other].1.shallow_clone()),
    })?;
    write_config(folder, trained)
}

fn pickled(folder: &Path, trained: &Trained, file: &str) -> Result<(), ExportError> {
    let (mut planned, places) = plan(trained);
    let (prefix, kind) = (trained.file.prefix_tensors()?, trained.dtype.kind());
    let begin = trained.layout().prefix_layer().unwrap_or(PREFIX);
    let written = |ours: &str| ours.replacen(PREFIX, begin, 1);
    planned.extend(prefix.iter().map(|(ours, size)| Planned { name: written(ours), shape: size.clone(), kind }));
    torch_file::save(&folder.join(file), &planned, &mut |at| match at.checked_sub(places.len()) {
        None => tensor(trained, places[at]),
        Some(part) => {
            let (ours, size) = &prefix[part];
            Ok(trained.file.prefix_tensor(ours, size).map_err(io::Error::other)?.to_kind(kind))
        }
    })?;
    write_config(folder, trained)
}

fn with_backbone(folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    let backbone = trained.backbone.as_ref().expect("a format that holds the backbone loads it");
    let base = trained.base.as_deref().expect("a backbone was loaded from somewhere");
    let (planned, places) = plan(trained);
    let tensor = |at: usize| tensor(trained, places[at]);
    let additions = Additions { config: config(trained), planned, tensor: Some(&tensor) };
    Ok(save_folder_with(folder, backbone, base, &additions)?)
}

fn adapter(folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    let from = trained.adapter.as_deref().expect("refused without an adapter");
    copy(&from.join(ADAPTER_FILE), &folder.join(ADAPTER_FILE))?;
    let path = folder.join(ADAPTER_CONFIG);
    write_json(&path, &adapter_config(from, trained)?).map_err(|source| ExportError::Io { path, source })
}

/// The adapter's config as trained, with the backbone's public name.
pub(super) fn adapter_config(adapter: &Path, trained: &Trained) -> Result<Map<String, Value>, ExportError> {
    let mut config = read_object(&adapter.join(ADAPTER_CONFIG))?;
    config.insert(BASE.into(), trained.public_base_name().into());
    Ok(config)
}

/// Reads a JSON file that holds an object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, ExportError> {
    let read = files::read_at_most(path, JSON_FILE_BYTES).and_then(|text| Ok(serde_json::from_slice(&text)?));
    read.map_err(|source| ExportError::Io { path: path.into(), source })
}

/// Copies a file and syncs it.
pub(super) fn copy(from: &Path, to: &Path) -> Result<(), ExportError> {
    let io = |path: &Path, source| ExportError::Io { path: path.into(), source };
    let mut source = files::open_regular(from).map_err(|e| io(from, e))?;
    write_synced(to, |out| io::copy(&mut source, out).and_then(|_| out.flush())).map_err(|e| io(to, e))
}

/// The layout's tensors, and the head and part of each.
fn plan(trained: &Trained) -> (Vec<Planned>, Vec<HeadTensor>) {
    let (shape, kind) = (trained.written_shape(), trained.dtype.kind());
    let planned = trained.layout().tensors(&shape).into_iter();
    (planned.map(|(name, shape)| Planned { name, shape, kind }).collect(), shape.places())
}

fn tensor(trained: &Trained, place: HeadTensor) -> io::Result<Tensor> {
    trained.tensor(place, trained.dtype.kind()).map_err(io::Error::other)
}

fn write_config(folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    let path = folder.join("config.json");
    write_json(&path, &config(trained)).map_err(|source| ExportError::Io { path, source })
}

/// The keys that the format's loader reads, without those that confuse it: TGI ignores heads whose config has
/// `architectures`; vLLM takes every key with "num" and "heads" in it for the number of heads.
fn config(trained: &Trained) -> Map<String, Value> {
    let named = if trained.format.holds_backbone() { None } else { trained.public_base_name() };
    let base = named.map_or(json!({}), |base| json!({BASE: base}));
    let recorded = recorded::keys(trained);
    let recorded = if recorded.is_empty() { json!({}) } else { json!({TRAINING: recorded}) };
    match joined(joined(base, (trained.format.keys)(&trained.written_heads())), recorded) {
        Value::Object(config) => config,
        _ => unreachable!("objects were joined"),
    }
}
