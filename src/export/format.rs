//! The formats: what each program that loads heads expects, as a row of a table.

use std::ops::Deref;
use std::sync::LazyLock;

use clap::builder::PossibleValue;
use serde_json::{Value, json};

use crate::draft::heads::import::{HYDRA_LM_HEAD_PT, MEDUSA_LM_HEAD, MEDUSA_LM_HEAD_PT};
use crate::draft::heads::layout::HeadsLayout;
use crate::draft::heads::{HEADS_FILE, HeadsShape};
use crate::dtype::Dtype;
use crate::formats::heads_config::SHARED_W2;
use crate::model::weights::MODEL_FILE;

/// A layout of heads, named after the program that loads it.
#[derive(Debug, Clone, Copy)]
pub struct ExportFormat(&'static FormatSpec);

/// What the loaders of a format expect.
#[derive(Debug)]
pub struct FormatSpec {
    /// On the command line.
    pub name: &'static str,
    help: &'static str,
    /// Of the tensors' names.
    pub(super) layout: HeadsLayout,
    pub(super) contents: FolderContents,
    /// The heads' file, unless they are in the backbone's. A format without one is always pickled.
    pub(super) safetensors: Option<&'static str>,
    /// The heads' file as `torch.save` writes it, if the loaders read one.
    pub(super) pickle: Option<&'static str>,
    pub(super) lm_head: SharedLmHead,
    /// Whether a W2 that all heads share is written once; otherwise every head gets a copy.
    pub(super) one_w2: bool,
    /// Whether heads may guess a part of the vocabulary.
    pub(super) draft_vocabulary: bool,
    /// Whether heads may read earlier tokens, and have a bias of W2.
    pub(super) hydra: bool,
    /// This program's own, for heads of every kind.
    pub(super) own: bool,
    /// Why the backbone's name must be known, if it must.
    pub(super) needs_name: Option<&'static str>,
    /// Parts of a path with which the program mistakes the folder for something else.
    pub(super) mistaken_paths: Option<MistakenPaths>,
    /// The keys of config.json besides the backbone's name and what is recorded of the training.
    pub(super) keys: fn(&WrittenHeads) -> Value,
}

/// The heads of an export, for its config.json.
pub(super) struct WrittenHeads {
    pub(super) trained: HeadsShape,
    pub(super) written: HeadsShape,
    pub(super) dtype: Dtype,
    /// V of the backbone, if it is known.
    pub(super) vocab_size: Option<i64>,
    /// The size of a truncated vocabulary.
    pub(super) truncated: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct MistakenPaths {
    pub(super) parts: &'static [&'static str],
    pub(super) notice: &'static str,
}

/// What a folder holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FolderContents {
    Heads,
    /// An adapter with the heads beside it.
    Adapter,
    /// The backbone, adapters merged, with the heads in its files.
    Backbone,
}

/// What becomes of the backbone's lm_head if the heads share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SharedLmHead {
    /// The program takes it from the backbone.
    OfBackbone,
    /// The same, for heads of one ResBlock.
    OfBackboneWithOneBlock,
    /// It is written once.
    Written,
    /// Every head gets a copy.
    Copied,
}

/// A format without anything special.
const PLAIN: FormatSpec = FormatSpec {
    name: "heads",
    help: "Heads only, for FasterDecoding v0.1 and abyo-speculate",
    layout: HeadsLayout::Heads,
    contents: FolderContents::Heads,
    safetensors: Some(MEDUSA_LM_HEAD),
    pickle: Some(MEDUSA_LM_HEAD_PT),
    lm_head: SharedLmHead::OfBackbone,
    one_w2: false,
    draft_vocabulary: false,
    hydra: false,
    own: false,
    needs_name: None,
    mistaken_paths: None,
    keys: |heads| joined(counts(heads), json!({"version": version(heads).to_string()})),
};

static FORMATS: [FormatSpec; 9] = [
    PLAIN,
    FormatSpec {
        name: "medusa-train",
        help: "Heads only, for these programs: heads of every kind, in the dtype of --dtype",
        safetensors: Some(HEADS_FILE),
        pickle: None,
        one_w2: true,
        draft_vocabulary: true,
        own: true,
        keys: |heads| {
            joined(counts(heads), json!({"hidden_size": heads.trained.hidden_size, "vocab_size": heads.vocab_size}))
        },
        ..PLAIN
    },
    FormatSpec {
        name: "tgi",
        help: "Heads only, for text-generation-inference (its v2 layout if the heads share the backbone's lm_head)",
        pickle: None,
        lm_head: SharedLmHead::OfBackboneWithOneBlock,
        needs_name: Some("text-generation-inference finds it by base_model_name_or_path in config.json"),
        ..PLAIN
    },
    FormatSpec {
        name: "vllm",
        help: "Draft model for vLLM",
        layout: HeadsLayout::Vllm,
        safetensors: Some(MODEL_FILE),
        pickle: None,
        lm_head: SharedLmHead::Written,
        one_w2: true,
        draft_vocabulary: true,
        mistaken_paths: Some(MistakenPaths {
            parts: &["eagle", "dflash"],
            notice: "vLLM mistakes a path with \"eagle\" or \"dflash\" for another drafter: rename the folder",
        }),
        keys: keys_of_vllm,
        ..PLAIN
    },
    FormatSpec {
        name: "tensorrt-llm",
        help: "Heads only, for TensorRT-LLM's convert_checkpoint.py",
        lm_head: SharedLmHead::Copied,
        // TensorRT-LLM reads each of the two spellings in a different place.
        keys: |heads| joined(counts(heads), counts_named(heads, ["num_medusa_heads", "num_medusa_layers"])),
        ..PLAIN
    },
    FormatSpec {
        name: "merged",
        help: "Hugging Face folder of the backbone, with adapters merged and heads included (FasterDecoding v1.0)",
        layout: HeadsLayout::Merged,
        keys: counts,
        ..IN_BACKBONE
    },
    FormatSpec {
        name: "modelopt",
        help: "As merged, with NVIDIA ModelOpt's tensor names; also loaded by TensorRT-LLM",
        layout: HeadsLayout::ModelOpt,
        keys: |heads| json!({"medusa": counts_named(heads, ["num_medusa_heads", "num_medusa_layers"])}),
        ..IN_BACKBONE
    },
    FormatSpec {
        name: "peft",
        help: "PEFT adapter of a Medusa-2 run with the heads beside it, for LoRAX",
        contents: FolderContents::Adapter,
        pickle: None,
        lm_head: SharedLmHead::OfBackboneWithOneBlock,
        keys: |heads| joined(counts(heads), json!({"version": f64::from(version(heads))})),
        ..PLAIN
    },
    FormatSpec {
        name: "hydra",
        help: "hydra_lm_head.pt for zankner/Hydra, the code of Hydra's authors",
        layout: HeadsLayout::Hydra,
        safetensors: None,
        pickle: Some(HYDRA_LM_HEAD_PT),
        lm_head: SharedLmHead::Copied,
        hydra: true,
        keys: keys_of_hydra,
        ..PLAIN
    },
];

const IN_BACKBONE: FormatSpec = FormatSpec {
    contents: FolderContents::Backbone,
    safetensors: None,
    pickle: None,
    lm_head: SharedLmHead::Copied,
    ..PLAIN
};

impl Deref for ExportFormat {
    type Target = FormatSpec;

    fn deref(&self) -> &FormatSpec {
        self.0
    }
}

impl clap::ValueEnum for ExportFormat {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<ExportFormat>> = LazyLock::new(|| FORMATS.iter().map(ExportFormat).collect());
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name).help(self.help))
    }
}

impl FormatSpec {
    pub(super) fn holds_backbone(&self) -> bool {
        self.contents == FolderContents::Backbone
    }
}

/// Numbers of heads and ResBlocks.
fn counts(heads: &WrittenHeads) -> Value {
    counts_named(heads, ["medusa_num_heads", "medusa_num_layers"])
}

fn counts_named(heads: &WrittenHeads, [count, layers]: [&str; 2]) -> Value {
    json!({count: heads.trained.medusa_num_heads, layers: heads.trained.medusa_num_layers})
}

/// 2 for heads that share the backbone's lm_head.
fn version(heads: &WrittenHeads) -> u8 {
    if heads.written.vocab_size == 0 { 2 } else { 1 }
}

fn keys_of_vllm(heads: &WrittenHeads) -> Value {
    let WrittenHeads { trained, written, dtype, vocab_size, truncated } = heads;
    let config = json!({
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": trained.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": truncated,
        "num_heads": trained.medusa_num_heads,
        "num_hidden_layers": trained.medusa_num_layers,
        "medusa_fc_bias": true,
        // vLLM reads one lm_head for all heads, whether it is the backbone's or not.
        "original_lm_head": written.vocab_size == 0 || written.shared_w2,
        "dtype": dtype.to_string(),
    });
    if written.shared_w2 { joined(config, json!({SHARED_W2: true})) } else { config }
}

fn keys_of_hydra(heads: &WrittenHeads) -> Value {
    let reads = heads.trained.reads();
    let counts = counts_named(heads, ["hydra_num_heads", "hydra_num_layers"]);
    let others = json!({
        "hydra_head_arch": if reads.whole_rows { "prefix-mlp" } else { "mlp" },
        "grounded_heads": reads.tokens,
        "hidden_state_offset": 0,
    });
    joined(counts, others)
}

/// Two objects as one.
pub(super) fn joined(mut one: Value, other: Value) -> Value {
    if let (Value::Object(one), Value::Object(other)) = (&mut one, other) {
        one.extend(other);
    }
    one
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_format_has_a_name_of_its_own_and_a_file_for_its_heads() {
        assert_eq!(FORMATS.iter().map(|format| format.name).collect::<BTreeSet<_>>().len(), FORMATS.len());
        for format in &FORMATS {
            let has_file = format.safetensors.or(format.pickle).is_some();
            assert_ne!(has_file, format.holds_backbone(), "{}", format.name);
        }
    }
}
