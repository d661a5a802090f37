//! The tokenizer in a GGUF file, as the files of a Hugging Face folder: byte-level BPE as tokenizer.json, SentencePiece as tokenizer.model, and
//! what is said of special tokens as tokenizer_config.json.

use protobuf::CodedOutputStream;
use serde_json::{Map, Value, json};

use super::header::HeaderError;
use super::metadata::{MetaValue, Metadata};

/// Splits a text into words as Llama 3 does.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What `tokenizer.ggml.pre` stands for.
struct PreTokenizer {
    names: &'static [&'static str],
    words: Words,
    /// Texts are composed (NFC) first.
    composes: bool,
    /// A word that is a token is that token, whatever the merges say.
    ignores_merges: bool,
    /// BOS goes before a text where the file does not say.
    adds_bos: bool,
}

#[derive(Clone, Copy)]
enum Words {
    /// By this expression.
    Split(&'static str),
    /// As GPT-2.
    Gpt2,
    /// As GPT-2, each digit a word.
    DigitsThenGpt2,
}

const PRE_TOKENIZERS: [PreTokenizer; 7] = [
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3"],
        words: Words::Split(LLAMA_3),
        composes: false,
        ignores_merges: true,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe"],
        words: Words::Split(LLAMA_3),
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        words: Words::Split(QWEN_2),
        composes: true,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["tekken"],
        words: Words::Split(TEKKEN),
        composes: false,
        ignores_merges: true,
        adds_bos: true,
    },
    PreTokenizer {
        names: &["gpt-4o"],
        words: Words::Split(GPT_4O),
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["gpt-2", "olmo", "phi-2", "mpt"],
        words: Words::Gpt2,
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
    PreTokenizer {
        names: &["smollm", "refact", "starcoder", "command-r", "codeshell"],
        words: Words::DigitsThenGpt2,
        composes: false,
        ignores_merges: false,
        adds_bos: false,
    },
];

/// Tokens that end a turn or an answer, whatever type the file gives them, as in llama.cpp.
const ENDS: [&str; 9] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "<end_of_utterance>",
];
/// Ids that stand for no token, as in llama.cpp.
const NO_TOKEN: [i64; 2] = [u32::MAX as i64, -1];
/// Keys with the ids of such tokens.
const END_KEYS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

/// A token's type in `tokenizer.ggml.token_type`; SentencePiece's numbers.
pub const NORMAL: i64 = 1;
pub const UNKNOWN: i64 = 2;
pub const CONTROL: i64 = 3;
pub const USER_DEFINED: i64 = 4;
pub const UNUSED: i64 = 5;
pub const BYTE: i64 = 6;

/// The `tokenizer.ggml.pre` of a tokenizer.json of byte-level BPE, if llama.cpp has one that splits texts as it does.
pub fn pre_tokenizer_name(tokenizer: &Value) -> Option<&'static str> {
    let composes = tokenizer["normalizer"]["type"] == "NFC";
    let ignores_merges = tokenizer["model"]["ignore_merges"] == true;
    let mut written = tokenizer["pre_tokenizer"].clone();
    without_offsets(&mut written);
    let is_it = |known: &&PreTokenizer| {
        let mut words = words(known.words);
        without_offsets(&mut words);
        (known.composes, known.ignores_merges) == (composes, ignores_merges) && words == written
    };
    let other_normalizer = !composes && !tokenizer["normalizer"].is_null();
    PRE_TOKENIZERS.iter().find(is_it).filter(|_| !other_normalizer).map(|known| known.names[0])
}

/// Drops what decides about places in the text alone.
fn without_offsets(pre_tokenizer: &mut Value) {
    match pre_tokenizer {
        Value::Object(keys) => {
            keys.remove("trim_offsets");
            keys.values_mut().for_each(without_offsets);
        }
        Value::Array(values) => values.iter_mut().for_each(without_offsets),
        _ => {}
    }
}

/// A key of the tokenizer.
pub fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

fn wrong(name: &str, expected: impl Into<String>, got: Option<&MetaValue>) -> HeaderError {
    let got = got.map_or_else(|| "no such key".into(), ToString::to_string);
    HeaderError::Value { key: key(name), expected: expected.into(), got }
}

/// The ids of tokens that end a text.
pub(super) fn end_tokens(metadata: &Metadata) -> Vec<i64> {
    let named = END_KEYS.iter().filter_map(|name| metadata.get(&key(name))?.integer());
    let mut ids: Vec<i64> = named.collect();
    let list = |name: &str| metadata.get(&key(name)).and_then(MetaValue::list).unwrap_or_default();
    let tokens = list("tokens");
    let ends = tokens.iter().zip(0..).filter(|(token, _)| token.text().is_some_and(|token| ENDS.contains(&token)));
    ids.extend(ends.map(|(_, id)| id));
    ids.retain(|id| !NO_TOKEN.contains(id));
    let mut seen = std::collections::HashSet::new();
    ids.retain(|id| seen.insert(*id));
    ids
}

/// The tokenizer of a file.
pub(super) struct Vocabulary<'m> {
    metadata: &'m Metadata,
    tokens: Vec<&'m str>,
    kinds: Vec<i64>,
}

impl<'m> Vocabulary<'m> {
    /// `None`: a file without a tokenizer.
    ///
    /// # Errors
    /// [`HeaderError`] names the key.
    pub(super) fn of(metadata: &'m Metadata) -> Result<Option<Self>, HeaderError> {
        let Some(value) = metadata.get(&key("tokens")) else { return Ok(None) };
        let texts = value.list().unwrap_or_default().iter().map(MetaValue::text).collect::<Option<Vec<_>>>();
        let tokens = texts.filter(|tokens| !tokens.is_empty());
        let tokens = tokens.ok_or_else(|| wrong("tokens", "an array of text", Some(value)))?;
        let kinds = match metadata.get(&key("token_type")) {
            None => vec![1; tokens.len()],
            Some(value) => {
                let numbers =
                    value.list().unwrap_or_default().iter().map(MetaValue::integer).collect::<Option<Vec<_>>>();
                let expected =
                    || wrong("token_type", format!("a whole number for each of {} tokens", tokens.len()), Some(value));
                numbers.filter(|kinds| kinds.len() == tokens.len()).ok_or_else(expected)?
            }
        };
        let is_end = |token: &str| ENDS.contains(&token);
        let kinds = tokens.iter().zip(kinds).map(|(token, kind)| if is_end(token) { CONTROL } else { kind }).collect();
        Ok(Some(Self { metadata, tokens, kinds }))
    }

    fn get(&self, name: &str) -> Option<&'m MetaValue> {
        self.metadata.get(&key(name))
    }

    fn text(&self, name: &str) -> Result<&'m str, HeaderError> {
        let value = self.get(name);
        value.and_then(MetaValue::text).ok_or_else(|| wrong(name, "text", value))
    }

    fn switch(&self, name: &str, default: bool) -> Result<bool, HeaderError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.bool().ok_or_else(|| wrong(name, "true or false", Some(value)))
    }

    /// The text of a special token, by the key with its id.
    fn special(&self, name: &str) -> Result<Option<&'m str>, HeaderError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let id = value.integer().ok_or_else(|| wrong(name, "the id of a token", Some(value)))?;
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id).copied());
        if token.is_none() && !NO_TOKEN.contains(&id) {
            return Err(wrong(name, format!("an id below {}", self.tokens.len()), Some(value)));
        }
        Ok(token)
    }

    /// Whether it is SentencePiece's.
    ///
    /// # Errors
    /// Another algorithm.
    pub(super) fn is_sentencepiece(&self) -> Result<bool, HeaderError> {
        match self.text("model")? {
            "llama" => Ok(true),
            "gpt2" => Ok(false),
            _ => Err(wrong("model", "llama (SentencePiece) or gpt2 (byte-level BPE)", self.get("model"))),
        }
    }

    fn pre_tokenizer(&self) -> Result<&'static PreTokenizer, HeaderError> {
        let name = self.text("pre")?;
        let known = || {
            let names: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|known| known.names).copied().collect();
            let beside = "; a tokenizer.json beside the file takes the place of its tokenizer";
            wrong("pre", format!("one of {}{beside}", names.join(", ")), self.get("pre"))
        };
        PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name)).ok_or_else(known)
    }

    fn adds_bos(&self) -> Result<bool, HeaderError> {
        let default = if self.is_sentencepiece()? { true } else { self.pre_tokenizer()?.adds_bos };
        self.switch("add_bos_token", default)
    }

    /// tokenizer_config.json.
    ///
    /// # Errors
    /// [`HeaderError`] names the key.
    pub(super) fn config(&self) -> Result<Value, HeaderError> {
        let mut config = Map::new();
        let ids = [
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        ];
        for (ours, theirs) in ids {
            if let Some(token) = self.special(theirs)? {
                config.insert(ours.into(), token.into());
            }
        }
        config.insert("add_bos_token".into(), self.adds_bos()?.into());
        config.insert("add_eos_token".into(), self.switch("add_eos_token", false)?.into());
        let declared: Map<String, Value> = self.added().map(|(id, token)| (id.to_string(), token)).collect();
        config.insert("added_tokens_decoder".into(), declared.into());
        Ok(config.into())
    }

    /// Whether a special token takes the white space behind it: those of Phi-3, which llama.cpp knows by the name of the model.
    fn takes_white_space(&self, token: &str) -> bool {
        let name = self.metadata.get("general.name").and_then(MetaValue::text).unwrap_or_default().to_lowercase();
        ["phi-3", "phi3"].iter().any(|phi| name.contains(phi)) && !["<unk>", "<s>", "<|endoftext|>"].contains(&token)
    }

    /// The tokens that are found in a text before it is cut, by their ids.
    fn added(&self) -> impl Iterator<Item = (usize, Value)> {
        let added = (self.tokens.iter().zip(&self.kinds).enumerate())
            .filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind));
        added.map(move |(id, (token, kind))| {
            let token = json!({
                "content": token, "special": *kind == CONTROL,
                "lstrip": false, "rstrip": self.takes_white_space(token), "single_word": false, "normalized": false,
            });
            (id, token)
        })
    }

    /// tokenizer.json of byte-level BPE.
    ///
    /// # Errors
    /// [`HeaderError`] names the key.
    pub(super) fn bpe(&self) -> Result<Value, HeaderError> {
        let pre = self.pre_tokenizer()?;
        let merges = self.get("merges");
        let merges = merges.and_then(MetaValue::list).ok_or_else(|| wrong("merges", "an array of text", merges))?;
        let merges: Vec<Value> = merges.iter().map(MetaValue::json).collect();
        let mut vocab = Map::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if vocab.insert((*token).to_owned(), id.into()).is_some() {
                return Err(HeaderError::Twice { what: "token", name: (*token).to_owned() });
            }
        }
        let added = self.added().map(|(id, mut token)| {
            token["id"] = id.into();
            token
        });
        Ok(json!({
            "version": "1.0",
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": if pre.composes { json!({"type": "NFC"}) } else { Value::Null },
            "pre_tokenizer": words(pre.words),
            "post_processor": self.around()?,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": false, "fuse_unk": false,
                "ignore_merges": pre.ignores_merges,
            },
        }))
    }

    /// BOS before and EOS behind a text, where the file asks for them.
    fn around(&self) -> Result<Value, HeaderError> {
        let token = |wanted: bool, name| if wanted { self.special(name) } else { Ok(None) };
        let bos = token(self.adds_bos()?, "bos_token_id")?;
        let eos = token(self.switch("add_eos_token", false)?, "eos_token_id")?;
        let special = |token: &str, kind: u32| json!({"SpecialToken": {"id": token, "type_id": kind}});
        let sequence = |name: &str, kind: u32| {
            let text = json!({"Sequence": {"id": name, "type_id": kind}});
            bos.iter()
                .map(|bos| special(bos, kind))
                .chain([text])
                .chain(eos.iter().map(|eos| special(eos, kind)))
                .collect::<Vec<_>>()
        };
        let ids = bos.iter().chain(&eos).map(|token| {
            let id = self.tokens.iter().position(|other| other == token).unwrap_or_default();
            ((*token).to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}))
        });
        let pair = [sequence("A", 0), sequence("B", 1)].concat();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": pair,
            "special_tokens": ids.collect::<Map<_, _>>(),
        }))
    }

    /// tokenizer.model of SentencePiece: a `ModelProto`.
    ///
    /// # Errors
    /// [`HeaderError`] names the key.
    pub(super) fn sentencepiece(&self) -> Result<Vec<u8>, HeaderError> {
        let scores = self.get("scores");
        let numbers = scores
            .and_then(MetaValue::list)
            .unwrap_or_default()
            .iter()
            .map(MetaValue::number)
            .collect::<Option<Vec<_>>>();
        let expected = || wrong("scores", format!("a number for each of {} tokens", self.tokens.len()), scores);
        let scores = numbers.filter(|scores| scores.len() == self.tokens.len()).ok_or_else(expected)?;
        let spaces = [
            (3, self.switch("add_space_prefix", true)?),
            (4, self.switch("remove_extra_whitespaces", false)?),
            (5, true), // blanks are U+2581
        ];
        let names = [(46, self.special("bos_token_id")?), (47, self.special("eos_token_id")?)];
        let has_bytes = self.kinds.contains(&BYTE);
        // SentencePiece needs one; converters write it as a control token, and its id beside.
        let unknown =
            self.get("unknown_token_id").and_then(MetaValue::integer).filter(|_| !self.kinds.contains(&UNKNOWN));
        let kinds = (0..).zip(&self.kinds).map(|(id, kind)| if Some(id) == unknown { UNKNOWN } else { *kind });
        Ok(message(|out| {
            for ((token, score), kind) in self.tokens.iter().zip(&scores).zip(kinds) {
                let piece = message(|out| {
                    out.write_string(1, token)?;
                    #[expect(clippy::cast_possible_truncation, reason = "the file has them in float32")]
                    out.write_float(2, *score as f32)?;
                    out.write_enum(3, i32::try_from(kind).unwrap_or_default())
                });
                out.write_bytes(1, &piece)?;
            }
            let trainer = message(|out| {
                out.write_enum(3, 2)?; // BPE
                out.write_bool(35, has_bytes)?;
                names.iter().try_for_each(|(field, name)| name.map_or(Ok(()), |name| out.write_string(*field, name)))
            });
            out.write_bytes(2, &trainer)?;
            let normalizer = message(|out| spaces.iter().try_for_each(|(field, value)| out.write_bool(*field, *value)));
            out.write_bytes(3, &normalizer)
        }))
    }
}

/// As tokenizer.json writes a pre-tokenizer.
fn words(words: Words) -> Value {
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let sequence = |first: Value, second: Value| json!({"type": "Sequence", "pretokenizers": [first, second]});
    match words {
        Words::Gpt2 => bytes(true),
        Words::DigitsThenGpt2 => sequence(json!({"type": "Digits", "individual_digits": true}), bytes(true)),
        Words::Split(pattern) => sequence(
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}),
            bytes(false),
        ),
    }
}

/// A protobuf message.
fn message(fill: impl FnOnce(&mut CodedOutputStream) -> protobuf::Result<()>) -> Vec<u8> {
    let mut bytes = vec![];
    let mut out = CodedOutputStream::vec(&mut bytes);
    fill(&mut out).and_then(|()| out.flush()).expect("a vector takes all bytes");
    drop(out);
    bytes
}
