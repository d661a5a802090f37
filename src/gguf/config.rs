//! `config.json` of the backbone in a GGUF file, in the keys of transformers. Keys of the architecture that have no such name keep their own, so
//! that they are reported or refused as others are.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::file::GgufFile;
use super::header::HeaderError;
use super::metadata::MetaValue;
use super::vocabulary::end_tokens;

/// GGUF's architectures whose `model_type` has another name.
const RENAMED: [(&str, &str); 1] = [("gemma3", "gemma3_text")];

/// Numbers that both have, by their names there and here.
const NUMBERS: [(&str, &str); 14] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("attention.scale", "attention_multiplier"),
    ("logit_scale", "logits_scaling"),
];

/// Keys that say what other keys or the tensors say.
const REPEATED: [&str; 2] = ["vocab_size", "rope.scaling.finetuned"];

/// The largest models of Gemma scale their queries by the hidden size per head: layers of each, which the file identifies them by.
const GEMMA_27B: [(&str, i64); 2] = [("gemma2", 46), ("gemma3", 62)];

/// The config of the backbone in a file.
///
/// # Errors
/// [`HeaderError`] names the key or the tensor.
pub(super) fn config(file: &GgufFile) -> Result<Map<String, Value>, HeaderError> {
    let architecture = file.architecture()?;
    let prefix = format!("{architecture}.");
    let own = file.metadata().iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?, value)));
    let mut keys = ArchitectureKeys { file, architecture, left: own.collect(), config: Map::new() };
    let renamed = RENAMED.iter().find(|(name, _)| *name == architecture);
    keys.set("model_type", renamed.map_or(architecture, |(_, name)| name));
    for (theirs, ours) in NUMBERS {
        if let Some(value) = keys.take(theirs) {
            keys.set(ours, value.json());
        }
    }
    keys.heads()?;
    keys.rotary()?;
    keys.layers()?;
    keys.tensors()?;
    keys.left.retain(|key, _| !REPEATED.contains(key));
    let left: Vec<(String, Value)> =
        keys.left.iter().map(|(key, value)| (format!("{prefix}{key}"), value.json())).collect();
    keys.config.extend(left);
    Ok(keys.config)
}

/// The keys of the architecture that were not looked at yet, and the config so far.
struct ArchitectureKeys<'f> {
    file: &'f GgufFile,
    architecture: &'f str,
    left: BTreeMap<&'f str, &'f MetaValue>,
    config: Map<String, Value>,
}

impl<'f> ArchitectureKeys<'f> {
    fn take(&mut self, key: &str) -> Option<&'f MetaValue> {
        self.left.remove(key)
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.config.insert(key.to_owned(), value.into());
    }

    fn wrong(&self, key: &str, expected: impl Into<String>, got: &dyn ToString) -> HeaderError {
        HeaderError::Value {
            key: format!("{}.{key}", self.architecture),
            expected: expected.into(),
            got: got.to_string(),
        }
    }

    fn integer(&mut self, key: &str) -> Result<Option<i64>, HeaderError> {
        let read = |value: &MetaValue| value.integer().ok_or_else(|| self.wrong(key, "a whole number", value));
        let found = self.left.get(key).copied().map(read).transpose()?;
        self.left.remove(key);
        Ok(found)
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>, HeaderError> {
        let read = |value: &MetaValue| value.number().ok_or_else(|| self.wrong(key, "a number", value));
        let found = self.left.get(key).copied().map(read).transpose()?;
        self.left.remove(key);
        Ok(found)
    }

    fn known(&self, key: &str) -> Option<i64> {
        self.config.get(key).and_then(Value::as_i64)
    }

    /// Heads and their sizes, whose defaults are not those of transformers.
    fn heads(&mut self) -> Result<(), HeaderError> {
        let heads = self.known("num_attention_heads").unwrap_or_default();
        let per_head = self.known("hidden_size").map(|size| size / heads.max(1));
        let key_value_heads = self.integer("attention.head_count_kv")?.unwrap_or(heads);
        let Some(head_dim) = self.integer("attention.key_length")?.or(per_head) else { return Ok(()) };
        let value_length = self.integer("attention.value_length")?.unwrap_or(head_dim);
        if value_length != head_dim {
            return Err(self.wrong(
                "attention.value_length",
                format!("attention.key_length = {head_dim}"),
                &value_length,
            ));
        }
        self.set("num_key_value_heads", key_value_heads);
        self.set("head_dim", head_dim);
        let largest = (self.architecture, self.known("num_hidden_layers").unwrap_or_default());
        if self.architecture.starts_with("gemma") {
            self.set(
                "query_pre_attn_scalar",
                if GEMMA_27B.contains(&largest) { per_head.unwrap_or(head_dim) } else { head_dim },
            );
        }
        Ok(())
    }

    fn rotary(&mut self) -> Result<(), HeaderError> {
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        self.set("rope_theta", theta);
        if let Some((size, head_dim)) = self.integer("rope.dimension_count")?.zip(self.known("head_dim"))
            && size != head_dim
        {
            self.set("partial_rotary_factor", size as f64 / head_dim.max(1) as f64);
        }
        let linear = self.number("rope.scale_linear")?; // of older files
        let kind = self.take("rope.scaling.type");
        let factor = self.number("rope.scaling.factor")?.or(linear);
        let original = self.integer("rope.scaling.original_context_length")?;
        let attention_factor = self.number("rope.scaling.attn_factor")?;
        let kind = match kind {
            Some(kind) => kind.text().ok_or_else(|| self.wrong("rope.scaling.type", "text", kind))?,
            None if factor.is_some_and(|factor| factor != 1.0) => "linear",
            None => "none",
        };
        let divisors = self.divisors()?;
        self.check_scaling(kind, factor, attention_factor, divisors.is_some())?;
        let mut scaling = Map::from_iter([("rope_type".to_owned(), kind.into())]);
        let optional =
            [("factor", factor.map(Value::from)), ("original_max_position_embeddings", original.map(Value::from))];
        match divisors {
            Some([short, long]) => {
                // A factor of one and a context of its own: the divisors and the attention factor say all.
                let context = original.or(self.known("max_position_embeddings")).unwrap_or_default();
                scaling = Map::from_iter([
                    ("rope_type".to_owned(), "longrope".into()),
                    ("short_factor".to_owned(), short),
                    ("long_factor".to_owned(), long),
                    ("original_max_position_embeddings".to_owned(), context.into()),
                ]);
                self.set("original_max_position_embeddings", context);
                scaling.insert("attention_factor".into(), attention_factor.unwrap_or(1.0).into());
            }
            None if kind == "none" => return Ok(()),
            None => scaling.extend(optional.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)))),
        }
        self.set("rope_scaling", scaling);
        Ok(())
    }

    /// Refuses what no scaling of transformers says: a magnitude of its own, unless divisors go with it, and divisors of scaled positions.
    fn check_scaling(
        &self,
        kind: &str,
        factor: Option<f64>,
        magnitude: Option<f64>,
        has_divisors: bool,
    ) -> Result<(), HeaderError> {
        if let Some(magnitude) = magnitude.filter(|&magnitude| magnitude != 1.0 && !has_divisors) {
            return Err(self.wrong("rope.scaling.attn_factor", "1, as there are no rope_factors tensors", &magnitude));
        }
        let scales = !["none", "longrope"].contains(&kind) && factor.is_some_and(|factor| factor != 1.0);
        if scales && has_divisors {
            return Err(self.wrong(
                "rope.scaling.type",
                "none or longrope beside rope_freqs or rope_factors tensors",
                &kind,
            ));
        }
        Ok(())
    }

    /// Divisors of the rotary frequencies, of short and of long contexts, which are tensors: Phi-3's two, and the one that Llama 3's scaling is
    /// converted to.
    fn divisors(&self) -> Result<Option<[Value; 2]>, HeaderError> {
        let read = |name: &str| self.file.numbers(name).map(|found| found.map(|numbers| json!(numbers)));
        let both = [read("rope_factors_short.weight")?, read("rope_factors_long.weight")?];
        if let [Some(short), Some(long)] = both {
            return Ok(Some([short, long]));
        }
        Ok(read("rope_freqs.weight")?.map(|divisors| [divisors.clone(), divisors]))
    }

    /// Which layers have a window.
    fn layers(&mut self) -> Result<(), HeaderError> {
        const KEY: &str = "attention.sliding_window_pattern";
        match self.take(KEY) {
            Some(MetaValue::List(slides)) => {
                let name = |slides: &MetaValue| match slides.bool() {
                    Some(true) => Ok("sliding_attention"),
                    Some(false) => Ok("full_attention"),
                    None => Err(self.wrong(KEY, "true or false for each layer", slides)),
                };
                let names = slides.iter().map(name).collect::<Result<Vec<_>, _>>()?;
                self.set("layer_types", names);
            }
            Some(every) => self.set("sliding_window_pattern", every.json()),
            None => {}
        }
        Ok(())
    }

    /// What the tensors say.
    fn tensors(&mut self) -> Result<(), HeaderError> {
        let embedding = self.file.entry("token_embd.weight").ok_or_else(|| HeaderError::Tensor {
            name: "token_embd.weight".into(),
            expected: "the token embedding".into(),
            got: "no such tensor".into(),
        })?;
        let vocab_size = embedding.shape.first().copied().unwrap_or_default();
        let dtype = match embedding.kind.name {
            "F32" => "float32",
            "F16" => "float16",
            _ => "bfloat16",
        };
        self.set("vocab_size", vocab_size);
        self.set("dtype", dtype);
        self.set("tie_word_embeddings", self.file.entry("output.weight").is_none());
        for (tensor, key) in [("blk.0.attn_output.bias", "attention_bias"), ("blk.0.ffn_gate.bias", "mlp_bias")] {
            if self.file.entry(tensor).is_some() {
                self.set(key, true);
            }
        }
        self.set("eos_token_id", end_tokens(self.file.metadata()));
        Ok(())
    }
}
