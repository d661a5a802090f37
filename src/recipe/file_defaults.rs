//! Defaults that depend on files: on the backbone's config and weights, and on the heads that training starts from.

use std::num::NonZeroUsize;
use std::path::Path;

use tch::Device;

use super::Recipe;
use super::located::LocatedToml;
use crate::draft::medusa::heads::import::HeadsFile;
use crate::dtype::Dtype;
use crate::model::config::LlamaConfig;
use crate::model::stored_dtype::stored_dtype;

/// The longest row, where the backbone's context is longer.
const LONGEST_ROW: i64 = 2048;

/// What files say about keys that a recipe leaves out.
pub(super) struct FileFacts {
    dtype: Dtype,
    max_length: Option<NonZeroUsize>,
    /// Heads that training starts from, and ResBlocks of each.
    heads: Option<[NonZeroUsize; 2]>,
}

impl FileFacts {
    /// Of a recipe with local paths.
    pub(super) fn of(recipe: &Recipe, backbone: &LlamaConfig, device: Device) -> Self {
        let start = recipe.heads.init_from.as_deref().and_then(|path| HeadsFile::open(path).ok()); // if not, loading them says why
        let sizes = start.map(|file| [file.shape().medusa_num_heads, file.shape().medusa_num_layers]);
        Self {
            dtype: trained_in(stored_dtype(Path::new(&recipe.backbone.path), backbone), device),
            max_length: usize::try_from(backbone.largest_context().min(LONGEST_ROW)).ok().and_then(NonZeroUsize::new),
            heads: sizes.and_then(|[heads, layers]| Some([NonZeroUsize::new(heads)?, NonZeroUsize::new(layers)?])),
        }
    }
}

impl Recipe {
    /// Sets the defaults that depend on files: the dtype of the backbone's weights, a length within its context, and the sizes of the
    /// heads that training starts from.
    pub(super) fn fit_to(&mut self, facts: &FileFacts, text: &LocatedToml<'_>) {
        let set = |key, place: &mut NonZeroUsize, value: Option<NonZeroUsize>| match value {
            Some(value) if text.key(key).is_none() => *place = value,
            _ => {}
        };
        if text.key("backbone.dtype").is_none() {
            self.backbone.dtype = facts.dtype;
        }
        set("data.max_length", &mut self.data.max_length, facts.max_length);
        set("heads.medusa_num_heads", &mut self.heads.medusa_num_heads, facts.heads.map(|[heads, _]| heads));
        set("heads.medusa_num_layers", &mut self.heads.medusa_num_layers, facts.heads.map(|[_, layers]| layers));
    }
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
