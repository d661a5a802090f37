//! Read back what was written, by the way that any heads are read, and run it against what was trained.

// N hidden states, T tokens, H hidden, V vocabulary
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Device, Kind, Tensor};

use super::trained::Trained;
use super::{ExportError, Format, load_backbone};
use crate::medusa::heads::import::HeadsFile;
use crate::medusa::heads::layout::Place;
use crate::medusa::heads::{Heads, HeadsShape};
use crate::model::attention::RowMask;
use crate::model::llama::{Llama, Purpose};
use crate::model::lora::Adapters;

/// Hidden states that heads are compared on.
const STATES: i64 = 4;
const SEED: u64 = 0x6d65_6475_7361;

/// How far what is computed with rounded weights lies from what the heads compute as they were trained.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Difference {
    /// The largest, over all heads.
    pub largest: f64,
    /// The largest number itself.
    pub of: f64,
}

/// Checks a written folder.
pub(super) fn read_back(folder: &Path, trained: &Trained) -> Result<Difference, ExportError> {
    let got = HeadsFile::open(folder)?;
    let expected = trained.written_shape();
    if got.shape() != expected {
        return Err(ExportError::OtherShape { path: folder.into(), expected, got: got.shape() });
    }
    if let Some(own_vh) = trained.one_lm_head() {
        let own_vh = own_vh.to_kind(trained.dtype.kind());
        let written_vh = got.lm_head()?.filter(|written| written.size() == own_vh.size());
        let difference = written_vh.map_or(f64::INFINITY, |written_vh| largest(&(written_vh - own_vh)));
        equal(folder, "the lm_head's weights", difference)?;
    }
    match (&trained.backbone, trained.format) {
        (Some(backbone), Format::Merged | Format::ModelOpt) => {
            finite(&logits(backbone), trained, || "the backbone".into())?;
            check_backbone(folder, backbone)?;
        }
        (Some(backbone), Format::Peft) => check_adapter(folder, trained, backbone)?,
        _ => {}
    }
    heads(folder, &got, trained)
}

/// Every head on fixed hidden states: in the dtype of the export bit for bit, and how far that is from float32. One head is in memory,
/// three times.
fn heads(folder: &Path, got: &HeadsFile, trained: &Trained) -> Result<Difference, ExportError> {
    let (hidden_nh, kind) = (hidden_states(trained.shape.hidden_size), trained.dtype.kind());
    let mut difference = Difference { largest: 0.0, of: 0.0 };
    for head in 0..trained.shape.medusa_num_heads {
        let run = |read: &dyn Fn(Place) -> Result<Tensor, ExportError>| run(head, trained, read, &hidden_nh);
        let written = run(&|place| Ok(got.tensor(place, Kind::Float)?))?;
        let rounded = run(&|place| Ok(trained.tensor(place, kind)?.to_kind(Kind::Float)))?;
        let as_trained = run(&|place| trained.tensor(place, Kind::Float))?;
        finite(&written, trained, || format!("head {}", head + 1))?;
        equal(folder, &format!("the numbers of head {}", head + 1), largest(&(&written - rounded)))?;
        difference.largest = difference.largest.max(largest(&(written - &as_trained)));
        difference.of = difference.of.max(largest(&as_trained));
    }
    Ok(difference)
}

/// What one head makes of hidden states `[N, H]`: logits `[N, V]`, or, where the lm_head is not its own, what goes into that, `[N, H]`.
fn run(
    head: usize,
    trained: &Trained,
    read: &dyn Fn(Place) -> Result<Tensor, ExportError>,
    hidden_nh: &Tensor,
) -> Result<Tensor, ExportError> {
    let shape = trained.written_shape();
    let of_head = shape.places().into_iter().filter(|place| place.head == head);
    let tensors = of_head.map(read).collect::<Result<Vec<_>, _>>()?;
    let one = Heads::from_tensors(HeadsShape { medusa_num_heads: 1, ..shape }, tensors, shape.vocab_size);
    let x_nh = one.head(0).hidden(hidden_nh);
    Ok(one.head(0).w2().map_or_else(|| x_nh.shallow_clone(), |w2_vh| x_nh.matmul(&w2_vh.tr())))
}

/// `[N, H]`, float32, between -1 and 1, from a stream of its own: libtorch's generator is the program's.
fn hidden_states(hidden_size: i64) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let numbers: Vec<f32> =
        (0..STATES * hidden_size).map(|_| (f64::from(rng.next_u32()) / 2f64.powi(31) - 1.0) as f32).collect();
    Tensor::from_slice(&numbers).view([STATES, hidden_size])
}

/// The weights are the same numbers, so the logits are.
fn check_backbone(folder: &Path, backbone: &Llama) -> Result<(), ExportError> {
    let written = Llama::load(folder, backbone.kind(), Device::Cpu, Purpose::Training)?;
    equal(folder, "the backbone's logits", largest(&(logits(backbone) - logits(&written))))
}

/// The adapter's files make the same backbone.
fn check_adapter(folder: &Path, trained: &Trained, backbone: &Llama) -> Result<(), ExportError> {
    let base = trained.base.as_deref().expect("a backbone was loaded from somewhere");
    let written = load_backbone(base, Some(folder), backbone.kind())?;
    equal(folder, "the adapted backbone's logits", largest(&(logits(backbone) - logits(&written))))
}

/// `[T, V]`, float32, of a few tokens.
fn logits(llama: &Llama) -> Tensor {
    let tokens: Vec<i64> = (0..8).map(|t| (t * t * 31 + 1) % llama.config.vocab_size).collect();
    let rows = RowMask::causal(8, &llama.config, llama.device());
    let hidden = || llama.hidden_states(&Tensor::from_slice(&tokens).unsqueeze(0), &rows, Adapters::Off);
    tch::no_grad(|| llama.logits(&hidden(), Adapters::Off)).to_kind(Kind::Float)
}

/// float16 ends at 65504: what does not fit is infinite there, and equal to nothing.
fn finite(numbers: &Tensor, trained: &Trained, what: impl FnOnce() -> String) -> Result<(), ExportError> {
    if numbers.isfinite().all().int64_value(&[]) == 1 {
        return Ok(());
    }
    Err(ExportError::NotFinite { what: what(), dtype: trained.dtype })
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.to_kind(Kind::Float).abs().max().double_value(&[])
}

fn equal(folder: &Path, what: &str, difference: f64) -> Result<(), ExportError> {
    // Written so that a NaN is a difference, too.
    if difference == 0.0 {
        Ok(())
    } else {
        Err(ExportError::Differs { path: folder.into(), what: what.into(), difference })
    }
}
