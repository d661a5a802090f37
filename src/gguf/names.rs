//! Names of tensors, in GGUF's words and in transformers'.

/// Of tensors outside the layers.
const OUTER: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Of the tensors of a layer, without `.weight` or `.bias`. The first row with a name counts.
const IN_LAYER: [(&str, &str, UsedBy); 16] = [
    ("attn_q", "self_attn.q_proj", UsedBy::All),
    ("attn_k", "self_attn.k_proj", UsedBy::All),
    ("attn_v", "self_attn.v_proj", UsedBy::All),
    ("attn_qkv", "self_attn.qkv_proj", UsedBy::All),
    ("attn_output", "self_attn.o_proj", UsedBy::All),
    ("attn_q_norm", "self_attn.q_norm", UsedBy::All),
    ("attn_k_norm", "self_attn.k_norm", UsedBy::All),
    ("attn_norm", "input_layernorm", UsedBy::All),
    ("post_attention_norm", "post_attention_layernorm", UsedBy::WithOutputNorms),
    ("ffn_norm", "pre_feedforward_layernorm", UsedBy::WithOutputNorms),
    ("ffn_norm", "post_attention_layernorm", UsedBy::All),
    ("post_ffw_norm", "post_feedforward_layernorm", UsedBy::All),
    ("ffn_gate", "mlp.gate_proj", UsedBy::All),
    ("ffn_up", "mlp.gate_up_proj", UsedBy::Fused),
    ("ffn_up", "mlp.up_proj", UsedBy::All),
    ("ffn_down", "mlp.down_proj", UsedBy::All),
];

/// Which architectures a row is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UsedBy {
    All,
    /// Gemma and OLMo 2: a norm after each half of a layer.
    WithOutputNorms,
    /// Phi-3: gate and up in one.
    Fused,
}

impl UsedBy {
    fn has(self, architecture: &str) -> bool {
        match self {
            Self::All => true,
            Self::WithOutputNorms => architecture.starts_with("gemma") || architecture == "olmo2",
            Self::Fused => architecture == "phi3",
        }
    }
}

/// Tensors that are part of the config.
const CONFIG_TENSORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// The name in transformers; a tensor that has none keeps its own, and `None` is one that belongs to the config.
pub(super) fn in_transformers(name: &str, architecture: &str) -> Option<String> {
    if CONFIG_TENSORS.contains(&name) {
        return None;
    }
    let outer = OUTER.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| (*ours).to_owned());
    Some(outer.or_else(|| in_layer(name, architecture)).unwrap_or_else(|| name.to_owned()))
}

fn in_layer(name: &str, architecture: &str) -> Option<String> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, end) = part.rsplit_once('.')?;
    layer.parse::<u32>().ok()?;
    let is_it = |(theirs, _, used_by): &&(&str, &str, UsedBy)| *theirs == part && used_by.has(architecture);
    let (_, ours, _) = IN_LAYER.iter().find(is_it)?;
    Some(format!("model.layers.{layer}.{ours}.{end}"))
}

/// The name in a GGUF file of a tensor of transformers.
pub fn in_gguf(name: &str, architecture: &str) -> Option<String> {
    let outer = OUTER.iter().find(|(_, ours)| *ours == name).map(|(theirs, _)| (*theirs).to_owned());
    outer.or_else(|| {
        let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, end) = part.rsplit_once('.')?;
        let is_it = |(_, ours, used_by): &&(&str, &str, UsedBy)| *ours == part && used_by.has(architecture);
        let (theirs, ..) = IN_LAYER.iter().find(is_it)?;
        Some(format!("blk.{layer}.{theirs}.{end}"))
    })
}

/// How the numbers of a tensor differ from those of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conversion {
    Same,
    /// The rows of each of so many heads are interleaved: llama.cpp rotates neighbours, transformers halves.
    Interleaved {
        heads: i64,
    },
    /// One more than transformers' number.
    PlusOne,
}

/// Architectures whose queries and keys are interleaved.
const INTERLEAVED: [&str; 3] = ["llama", "granite", "smollm3"];

/// The conversion of a tensor with this name in the file. `heads` are those of queries and of keys.
pub fn conversion(name: &str, architecture: &str, [query, key]: [i64; 2]) -> Conversion {
    let part = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map(|(_, part)| part);
    match part {
        Some("attn_q.weight" | "attn_q.bias") if INTERLEAVED.contains(&architecture) => {
            Conversion::Interleaved { heads: query }
        }
        Some("attn_k.weight" | "attn_k.bias") if INTERLEAVED.contains(&architecture) => {
            Conversion::Interleaved { heads: key }
        }
        _ if architecture.starts_with("gemma") && name.ends_with("norm.weight") => Conversion::PlusOne,
        _ => Conversion::Same,
    }
}

/// Where row `row` of transformers' tensor is in the file, of `rows` in all.
pub fn interleaved(row: i64, rows: i64, heads: i64) -> i64 {
    let per_head = rows / heads;
    let half = per_head / 2;
    let (head, within) = (row / per_head, row % per_head);
    head * per_head + 2 * (within % half) + within / half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_come_apart_into_halves() {
        let rows: Vec<i64> = (0..8).map(|row| interleaved(row, 8, 2)).collect();
        assert_eq!(rows, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn the_same_name_is_another_norm_where_a_layer_has_four() {
        let norm = |architecture| in_transformers("blk.3.ffn_norm.weight", architecture).unwrap();
        assert_eq!(norm("llama"), "model.layers.3.post_attention_layernorm.weight");
        assert_eq!(norm("gemma2"), "model.layers.3.pre_feedforward_layernorm.weight");
        assert_eq!(in_transformers("blk.x.ffn_norm.weight", "llama").unwrap(), "blk.x.ffn_norm.weight");
        assert_eq!(in_transformers("rope_freqs.weight", "llama"), None);
    }

    #[test]
    fn every_name_has_a_way_back() {
        for architecture in ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3"] {
            let parts = IN_LAYER.iter().filter(|(_, ours, used_by)| !ours.is_empty() && used_by.has(architecture));
            let in_layer = parts.map(|(theirs, ..)| format!("blk.7.{theirs}.weight"));
            let has_no_norm_before = |name: &String| architecture == "olmo2" && name.ends_with("ffn_norm.weight");
            let in_layer = in_layer.filter(|name| !has_no_norm_before(name));
            for name in in_layer.chain(OUTER.map(|(theirs, _)| theirs.to_owned())) {
                let ours = in_transformers(&name, architecture).unwrap();
                assert_eq!(in_gguf(&ours, architecture).as_deref(), Some(&*name), "{ours} of {architecture}");
            }
        }
        assert_eq!(in_gguf("model.layers.3.mlp.router.weight", "llama"), None);
        let norm = "model.layers.0.post_attention_layernorm.weight";
        assert_eq!(
            in_gguf(norm, "llama").as_deref(),
            Some("blk.0.ffn_norm.weight"),
            "the reader takes another name, too; llama.cpp does not"
        );
    }
}
