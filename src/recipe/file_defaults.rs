//! Defaults that depend on files: on the backbone's config and weights, and on the heads that training starts from.

use std::num::NonZeroUsize;
use std::path::Path;

use tch::Device;

use super::Recipe;
use super::located::LocatedToml;
use super::mistakes::{Findings, Mistake};
use crate::draft::heads::import::HeadsFile;
use crate::dtype::Dtype;
use crate::model::config::LlamaConfig;
use crate::model::stored_dtype::stored_dtype;

/// The longest row, where the backbone's context is longer.
const LONGEST_ROW: i64 = 2048;

const DTYPE: &str = "backbone.dtype";
const NO_DTYPE: &str = "neither the backbone's config.json nor weights in its folder tell it; add dtype = \"float32\", \"bfloat16\" \
    or \"float16\" to [backbone], or download the weights first";

/// What files say about keys that a recipe leaves out.
pub(super) struct FileFacts {
    dtype: Option<Dtype>,
    max_length: Option<NonZeroUsize>,
    /// Heads that training starts from, and ResBlocks of each.
    heads: Option<[NonZeroUsize; 2]>,
}

impl FileFacts {
    /// Of a recipe with local paths. A mistake if the recipe has no dtype and no file has it.
    pub(super) fn of(recipe: &Recipe, backbone: &LlamaConfig, device: Device, findings: &mut Findings<'_>) -> Self {
        let start = recipe.heads.init_from.as_deref().and_then(|path| HeadsFile::open(path).ok()); // if not, loading them says why
        let sizes = start.map(|file| [file.shape().medusa_num_heads, file.shape().medusa_num_layers]);
        Self {
            dtype: default_dtype(Path::new(&recipe.backbone.path), device, findings),
            max_length: usize::try_from(backbone.largest_context().min(LONGEST_ROW)).ok().and_then(NonZeroUsize::new),
            heads: sizes.and_then(|[heads, layers]| Some([NonZeroUsize::new(heads)?, NonZeroUsize::new(layers)?])),
        }
    }

    /// Of the recipe that a run was started with: to resume it, perhaps on another device, the same defaults hold.
    pub(super) fn from_run(run: &Recipe) -> Self {
        Self {
            dtype: Some(run.backbone.dtype),
            max_length: Some(run.data.max_length),
            heads: run.heads.init_from.as_ref().map(|_| [run.heads.medusa_num_heads, run.heads.medusa_num_layers]),
        }
    }
}

impl Recipe {
    /// This recipe with the defaults that depend on files: the dtype of the backbone's weights, a length within its context, and the sizes
    /// of the heads that training starts from.
    pub(super) fn with_defaults_of(&self, facts: &FileFacts, text: &LocatedToml<'_>) -> Self {
        let mut recipe = self.clone();
        let set = |key, place: &mut NonZeroUsize, value: Option<NonZeroUsize>| match value {
            Some(value) if text.key(key).is_none() => *place = value,
            _ => {}
        };
        if let (None, Some(dtype)) = (text.key(DTYPE), facts.dtype) {
            recipe.backbone.dtype = dtype;
        }
        set("data.max_length", &mut recipe.data.max_length, facts.max_length);
        set("heads.medusa_num_heads", &mut recipe.heads.medusa_num_heads, facts.heads.map(|[heads, _]| heads));
        set("heads.medusa_num_layers", &mut recipe.heads.medusa_num_layers, facts.heads.map(|[_, layers]| layers));
        recipe
    }
}

/// The dtype where the recipe has none.
fn default_dtype(backbone: &Path, device: Device, findings: &mut Findings<'_>) -> Option<Dtype> {
    let place = findings.text().value(DTYPE);
    if findings.text().key(DTYPE).is_some() {
        return None;
    }
    let mistake = match stored_dtype(backbone) {
        Ok(Some(own)) => return Some(trained_in(own, device)),
        Ok(None) => Mistake::Required { key: DTYPE, what: NO_DTYPE },
        Err(error) => Mistake::Weights(error),
    };
    findings.add(place, mistake);
    None
}

/// The dtype for weights of dtype `own`: their own, except for float16 on a CPU, where libtorch computes it several times slower.
fn trained_in(own: Dtype, device: Device) -> Dtype {
    if own == Dtype::Float16 && device == Device::Cpu { Dtype::Float32 } else { own }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_float16_on_a_cpu_is_trained_in_another_dtype() {
        for own in [Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
            assert_eq!(trained_in(own, Device::Cuda(0)), own);
            let expected = if own == Dtype::Float16 { Dtype::Float32 } else { own };
            assert_eq!(trained_in(own, Device::Cpu), expected);
        }
    }
}
