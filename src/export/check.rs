//! Reads an export back with the normal loader: compares every tensor bit for bit with the trained one, then compares
//! the heads' outputs.

// N hidden states, T tokens, H hidden, I inputs of a head, V vocabulary
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Kind, Tensor};

use super::error::ExportError;
use super::finite::finite;
use super::format::FolderContents;
use super::trained::Trained;
use super::write;
use crate::draft::heads::import::HeadsFile;
use crate::draft::heads::layout::{HeadTensor, VLLM_LM_HEAD};
use crate::draft::heads::{Heads, HeadsShape};
use crate::draft::token_map::TOKEN_MAP;
use crate::files::sha256;
use crate::model::llama::Llama;
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::model::weights::WeightFiles;
use crate::torch::bytes;

/// Number of hidden states on which heads are compared.
const STATES: i64 = 4;
const SEED: u64 = 0x6d65_6475_7361;

/// Difference between the outputs of the exported, rounded weights and those of the trained weights.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RoundingDifference {
    /// The largest difference over all heads.
    pub largest: f64,
    /// The largest output.
    pub of: f64,
}

/// Reads a written folder back and compares it with the trained heads.
pub(super) fn read_back(folder: &Path, trained: &Trained) -> Result<RoundingDifference, ExportError> {
    let got = HeadsFile::open(folder)?;
    let expected = trained.written_shape();
    if got.shape() != expected {
        return Err(ExportError::OtherShape { path: folder.into(), expected, got: got.shape() });
    }
    if got.token_map() != trained.file.token_map() {
        return Err(ExportError::Differs { path: folder.into(), what: TOKEN_MAP.into() });
    }
    if let Some(own_vh) = trained.one_lm_head() {
        let (written_vh, own_vh) = (got.lm_head()?.unwrap_or_else(Tensor::new), own_vh.to_kind(trained.dtype.kind()));
        finite(&own_vh, trained.dtype, || "the backbone's lm_head".into())?;
        same(folder, VLLM_LM_HEAD, &written_vh, &own_vh)?;
    }
    if let Some(backbone) = &trained.backbone {
        same_backbone(folder, backbone)?;
    }
    if let (FolderContents::Adapter, Some(adapter)) = (trained.format.contents, &trained.adapter) {
        same_adapter(folder, adapter, trained)?;
    }
    for place in expected.places() {
        let kind = trained.dtype.kind();
        let (written, own) = (got.stored(place)?, trained.tensor(place, kind)?);
        same(folder, &trained.layout().name_in(&expected, place), &written, &own)?;
    }
    for (ours, size) in trained.file.prefix_tensors()? {
        let [written, own] = [&got, &trained.file].map(|file| file.prefix_tensor(&ours, &size));
        let (written, own) = (written?, own?.to_kind(trained.dtype.kind()));
        finite(&own, trained.dtype, || format!("tensor {ours}"))?;
        same(folder, &ours, &written, &own)?;
    }
    heads(&got, trained)
}

/// Compares the output of every exported head on fixed hidden states with that of the trained head; the difference is
/// the rounding of the export's dtype. Keeps two copies of one head in memory.
fn heads(got: &HeadsFile, trained: &Trained) -> Result<RoundingDifference, ExportError> {
    let mut difference = RoundingDifference { largest: 0.0, of: 0.0 };
    for head in 0..trained.shape.medusa_num_heads {
        let x_ni = hidden_states(trained.shape.inputs(head, 0));
        let run = |read: &dyn Fn(HeadTensor) -> Result<Tensor, ExportError>| run(head, trained, read, &x_ni);
        let written = run(&|place| Ok(got.tensor(place, Kind::Float)?))?;
        let as_trained = run(&|place| trained.tensor(place, Kind::Float))?;
        finite(&written, trained.dtype, || format!("head {}", head + 1))?;
        difference.largest = difference.largest.max(largest(&(written - &as_trained)));
        difference.of = difference.of.max(largest(&as_trained));
    }
    Ok(difference)
}

/// One head's output for an input `[N, I]`: logits `[N, V]`, or the input of a shared lm_head, `[N, H]`.
fn run(
    head: usize,
    trained: &Trained,
    read: &dyn Fn(HeadTensor) -> Result<Tensor, ExportError>,
    x_ni: &Tensor,
) -> Result<Tensor, ExportError> {
    let shape = trained.written_shape();
    let tensors = shape.places_of(head).into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let one = HeadsShape { medusa_num_heads: 1, ..shape }.with_own_w2();
    let one = Heads::from_tensors(one, tensors, shape.vocab_size);
    let x_nh = one.head(0).hidden(x_ni);
    Ok(one.head(0).w2().map_or_else(|| x_nh.shallow_clone(), |w2_vh| x_nh.linear(w2_vh, one.head(0).w2_bias())))
}

/// `[N, I]`, float32, between -1 and 1, from a separate generator, since libtorch's is shared with the program.
fn hidden_states(inputs: i64) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let numbers: Vec<f32> =
        (0..STATES * inputs).map(|_| (f64::from(rng.next_u32()) / 2f64.powi(31) - 1.0) as f32).collect();
    Tensor::from_slice(&numbers).view([STATES, inputs])
}

/// Compares config and weights bit for bit. The written weights are memory-mapped, not loaded.
fn same_backbone(folder: &Path, backbone: &Llama) -> Result<(), ExportError> {
    let (outline, _) = Llama::outline(folder)?;
    if outline.config != backbone.config {
        return Err(ExportError::Differs { path: folder.into(), what: "what config.json says".into() });
    }
    let files = WeightFiles::open(folder)?;
    for (name, own) in backbone.weights() {
        let written = files.mapped_as(&name, &own.size(), backbone.kind())?;
        same(folder, &name, &written, &own.detach().to_kind(backbone.kind()))?;
        files.release();
    }
    Ok(())
}

/// Compares the adapter's files with the ones that were tested on the backbone: the tensors byte for byte, the config by its values.
fn same_adapter(folder: &Path, adapter: &Path, trained: &Trained) -> Result<(), ExportError> {
    let differs = |name: &str| Err(ExportError::Differs { path: folder.into(), what: name.into() });
    let sum = |folder: &Path| {
        let path = folder.join(ADAPTER_FILE);
        sha256(&path).map_err(|source| ExportError::Io { path, source })
    };
    if sum(folder)? != sum(adapter)? {
        return differs(ADAPTER_FILE);
    }
    let same = write::read_object(&folder.join(ADAPTER_CONFIG))? == write::adapter_config(adapter, trained)?;
    if same { Ok(()) } else { differs(ADAPTER_CONFIG) }
}

/// Compares bytes, so that a NaN equals itself and -0 differs from 0.
fn same(folder: &Path, what: &str, written: &Tensor, own: &Tensor) -> Result<(), ExportError> {
    let is_same = written.kind() == own.kind()
        && written.size() == own.size()
        && bytes::raw(&written.contiguous()) == bytes::raw(&own.contiguous());
    if is_same { Ok(()) } else { Err(ExportError::Differs { path: folder.into(), what: what.into() }) }
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Float).abs().max().double_value(&[])
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::io::{Read, Seek, SeekFrom, Write};
    use std::num::NonZeroUsize;
    use std::path::PathBuf;

    use clap::ValueEnum;

    use super::super::{ExportFormat, ExportRequest};
    use super::*;
    use crate::dtype::Dtype;
    use crate::model::adapters::attach_new;
    use crate::model::block_spec::names;
    use crate::model::loading::Purpose;
    use crate::model::lora::LoraConfig;
    use crate::model::peft::save_adapters;
    use crate::model::weights::{MODEL_FILE, save};
    use tch::Device;

    fn tiny() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone")
    }

    /// Two untrained heads for the tiny backbone.
    fn write_heads(folder: &Path) {
        let config = toml::from_str("medusa_num_heads = 2\nmedusa_num_layers = 1").unwrap();
        let files = WeightFiles::open(&tiny()).unwrap();
        let lm_head_vh = files.mapped(names::EMBED_TOKENS, &files.shape(names::EMBED_TOKENS).unwrap()).unwrap();
        fs::create_dir(folder).unwrap();
        Heads::new(&config, &lm_head_vh, None).save(folder).unwrap();
    }

    fn request(heads: PathBuf, format: &str, out: PathBuf) -> ExportRequest {
        ExportRequest {
            heads,
            backbone: Some(tiny()),
            backbone_name: None,
            format: ExportFormat::from_str(format, false).unwrap(),
            out,
            dtype: None,
            medusa_num_heads: None,
            pickle: false,
            calibration: None,
            tree: None,
            bench: None,
        }
    }

    /// Flips the lowest bit of a tensor's last number.
    fn flip(path: &Path, name: &str) {
        let mut file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut length = [0; 8];
        file.read_exact(&mut length).unwrap();
        let mut header = vec![0; usize::try_from(u64::from_le_bytes(length)).unwrap()];
        file.read_exact(&mut header).unwrap();
        let header: serde_json::Value = serde_json::from_slice(&header).unwrap();
        let size = if header[name]["dtype"] == "F32" { 4 } else { 2 };
        let end = header[name]["data_offsets"][1].as_u64().unwrap();
        let at = SeekFrom::Start(8 + u64::from_le_bytes(length) + end - size);
        let byte = |file: &mut File| {
            let mut byte = [0];
            file.seek(at).unwrap();
            file.read_exact(&mut byte).unwrap();
            byte[0]
        };
        let flipped = byte(&mut file) ^ 1;
        file.seek(at).unwrap();
        file.write_all(&[flipped]).unwrap();
    }

    #[test]
    fn a_flipped_bit_of_any_written_tensor_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write_heads(&path("heads"));
        for (format, prefix) in [("merged", "medusa_head"), ("modelopt", "medusa_heads")] {
            let out = path(format);
            let mut trained = Trained::open(&request(path("heads"), format, out.clone())).unwrap();
            write::write(&out, &mut trained).unwrap();
            read_back(&out, &trained).unwrap();
            let head_names = [format!("{prefix}.1.0.linear.bias"), format!("{prefix}.0.1.weight")];
            for name in [names::EMBED_TOKENS, names::NORM].map(str::to_owned).into_iter().chain(head_names) {
                flip(&out.join(MODEL_FILE), &name);
                let error = read_back(&out, &trained).unwrap_err().to_string();
                assert!(error.contains(&format!("read back, {name} is not bit for bit")), "{name}: {error}");
                flip(&out.join(MODEL_FILE), &name);
            }
            read_back(&out, &trained).unwrap();
        }
    }

    #[test]
    fn the_outputs_of_each_head_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write_heads(&path("heads"));
        let request = ExportRequest {
            dtype: Some(Dtype::BFloat16),
            medusa_num_heads: NonZeroUsize::new(1),
            ..request(path("heads"), "heads", path("out"))
        };
        let mut trained = Trained::open(&request).unwrap();
        fs::create_dir(path("out")).unwrap();
        write::write(&path("out"), &mut trained).unwrap();
        let RoundingDifference { largest, of } = read_back(&path("out"), &trained).unwrap();
        assert!(of > 0.0 && largest <= 0.02 * of, "{largest} of {of}");
    }

    #[test]
    fn a_tensor_of_another_dtype_is_found_though_its_numbers_are_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write_heads(&path("heads"));
        let request = ExportRequest { dtype: Some(Dtype::BFloat16), ..request(path("heads"), "heads", path("out")) };
        let mut trained = Trained::open(&request).unwrap();
        fs::create_dir(path("out")).unwrap();
        write::write(&path("out"), &mut trained).unwrap();
        read_back(&path("out"), &trained).unwrap();
        let file = path("out").join(crate::draft::heads::import::MEDUSA_LM_HEAD);
        let files = WeightFiles::open_file(&file).unwrap();
        let read = |name: &&str| {
            let tensor = files.mapped(name, &files.shape(name).unwrap()).unwrap();
            ((*name).to_owned(), if *name == "1.1.weight" { tensor.to_kind(Kind::Float) } else { tensor.copy() })
        };
        let tensors: Vec<_> = files.names().iter().map(read).collect();
        let named: Vec<_> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save(&file, &named).unwrap();
        let error = read_back(&path("out"), &trained).unwrap_err().to_string();
        assert!(error.contains("1.1.weight is not bit for bit"), "{error}");
    }

    #[test]
    fn an_adapters_bytes_are_compared_and_no_backbone_stays_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write_heads(&path("heads"));
        let mut backbone = Llama::load(&tiny(), Kind::Float, Device::Cpu, Purpose::Training).unwrap();
        let config: LoraConfig = toml::from_str("rank = 2\nalpha = 4").unwrap();
        attach_new(&mut backbone, &config, 9);
        save_adapters(&path("heads"), &backbone, "tiny").unwrap();
        let out = path("out");
        let mut trained = Trained::open(&request(path("heads"), "peft", out.clone())).unwrap();
        assert!(trained.backbone.is_none(), "it was tried on one, which is gone");
        fs::create_dir(&out).unwrap();
        write::write(&out, &mut trained).unwrap();
        read_back(&out, &trained).unwrap();
        let files = WeightFiles::open_file(&out.join(ADAPTER_FILE)).unwrap();
        flip(&out.join(ADAPTER_FILE), files.names()[0]);
        let error = read_back(&out, &trained).unwrap_err().to_string();
        assert!(error.contains(&format!("{ADAPTER_FILE} is not bit for bit")), "{error}");
    }
}
