//! A tokenizer as the metadata of a GGUF file.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::config::{SpecialTokens, read_json};
use super::error::TokenizeError;
use super::pipeline::{TextNormalizer, TokenModel};
use super::{TextTokenizer, special_tokens};
use crate::gguf::metadata::MetaValue;
use crate::gguf::vocabulary::{BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, key, pre_tokenizer_name};

/// Ids by the names of transformers.
const NAMED: [(&str, &str); 3] =
    [("bos_token_id", "bos_token"), ("unknown_token_id", "unk_token"), ("padding_token_id", "pad_token")];
/// `tokenizer.ggml.model` of pieces with scores.
const PIECES: &str = "llama";
/// Keys for tokens that end a text.
const ENDS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];

/// A token of the list.
struct Listed {
    text: String,
    kind: i64,
    score: f32,
}

type GgufKeys = Vec<(String, MetaValue)>;

impl TextTokenizer {
    /// The keys `tokenizer.ggml.*` of this tokenizer, which is that of `folder`: `vocab_size` tokens, and up to three of `ends`, tokens that end
    /// a text; llama.cpp finds others by their text.
    ///
    /// # Errors
    /// [`TokenizeError::NotInGguf`]: llama.cpp has no such tokenizer.
    pub fn gguf_keys(&self, folder: &Path, vocab_size: usize, ends: &[i64]) -> Result<GgufKeys, TokenizeError> {
        let mut tokens = self.listed(vocab_size);
        let mut keys = match self.tokenizer.get_model() {
            TokenModel::SentencePiece { .. } => self.sentencepiece_keys(&mut tokens)?,
            TokenModel::Library(_) => self.bpe_keys(&mut tokens)?,
        };
        let column = |value: &dyn Fn(&Listed) -> MetaValue| MetaValue::List(tokens.iter().map(value).collect());
        keys.push((key("tokens"), column(&|token| MetaValue::Text(token.text.clone()))));
        keys.push((key("token_type"), column(&|token| MetaValue::Integer(token.kind))));
        if keys.contains(&(key("model"), MetaValue::Text(PIECES.into()))) {
            keys.push((key("scores"), column(&|token| MetaValue::Float(token.score.into()))));
        }
        keys.extend(self.special_keys(&special_tokens(folder)?, ends)?);
        Ok(keys)
    }

    /// A text that this tokenizer and the one of its keys read as different tokens: GGUF does not say whether a space goes before a text behind a
    /// special token, nor which white space such a token takes.
    ///
    /// # Errors
    /// As [`TextTokenizer::encode`].
    pub fn read_otherwise(&self, written: &Self) -> Result<Option<String>, TokenizeError> {
        const TEXTS: [&str; 3] = ["Hi there", " Hi  there\n\n1234 ", "naïve 北京 🦙\t"];
        let special = self.tokenizer.get_added_tokens_decoder().into_values().filter(|token| token.special);
        let behind = special.flat_map(|token| ["Hi", " Hi", "\nHi"].map(|text| format!("Hi {}{text}", token.content)));
        for text in TEXTS.map(str::to_owned).into_iter().chain(behind) {
            if self.encode(&text, false)? != written.encode(&text, false)? {
                return Ok(Some(text));
            }
        }
        Ok(None)
    }

    /// The tokens by id, and as many as are missing.
    fn listed(&self, vocab_size: usize) -> Vec<Listed> {
        let padding = |id: usize| Listed { text: format!("[PAD{id}]"), kind: UNUSED, score: -1e4 };
        let mut tokens: Vec<Listed> = (0..vocab_size).map(padding).collect();
        for (id, text) in self.by_id() {
            if let Some(token) = tokens.get_mut(id as usize) {
                *token = Listed { text, kind: NORMAL, score: -1e3 };
            }
        }
        for (id, added) in self.tokenizer.get_added_tokens_decoder() {
            if let Some(token) = tokens.get_mut(id as usize) {
                token.kind = if added.special { CONTROL } else { USER_DEFINED };
            }
        }
        tokens
    }

    /// BPE of tokenizer.json: of bytes, or of SentencePiece's pieces.
    fn bpe_keys(&self, tokens: &mut [Listed]) -> Result<GgufKeys, TokenizeError> {
        let json = read_json(&self.path)?.unwrap_or_default();
        let refused = |why: &'static str| TokenizeError::NotInGguf { path: self.path.clone(), why };
        let pairs = json["model"]["merges"].as_array().into_iter().flatten();
        let merges = pairs.map(pair).collect::<Option<Vec<_>>>();
        let merges = merges.filter(|_| json["model"]["type"] == "BPE").ok_or_else(|| refused("it is no BPE"))?;
        if json["model"]["byte_fallback"] == true {
            let adds_prefix = adds_prefix(&json)
                .ok_or_else(|| refused("llama.cpp does not treat spaces as its normalizer and pre-tokenizer do"))?;
            score_by_merges(tokens, &merges, json["model"]["unk_token"].as_str());
            return Ok(piece_keys(adds_prefix, false));
        }
        let pre = pre_tokenizer_name(&json)
            .ok_or_else(|| refused("llama.cpp has no name for how it splits a text into words"))?;
        let merges = merges.iter().map(|[first, second]| MetaValue::Text(format!("{first} {second}"))).collect();
        Ok(vec![
            (key("model"), MetaValue::Text("gpt2".into())),
            (key("pre"), MetaValue::Text(pre.into())),
            (key("merges"), MetaValue::List(merges)),
        ])
    }

    fn sentencepiece_keys(&self, tokens: &mut [Listed]) -> Result<GgufKeys, TokenizeError> {
        let refused = |why: &'static str| TokenizeError::NotInGguf { path: self.path.clone(), why };
        let TokenModel::SentencePiece { model, .. } = self.tokenizer.get_model() else { return Ok(vec![]) };
        let pieces = model.scored().ok_or_else(|| {
            refused("only SentencePiece's BPE is written, not its unigram models, nor tiktoken's files")
        })?;
        let Some(TextNormalizer::Space(normalizer)) = self.tokenizer.get_normalizer() else { return Ok(vec![]) };
        if normalizer.replaces_characters() {
            return Err(refused("llama.cpp does not replace characters as its normalizer does"));
        }
        for (token, (score, kind)) in tokens.iter_mut().zip(pieces) {
            token.score = score;
            if token.kind == NORMAL {
                token.kind = kind; // what is declared beside the file counts first, as in transformers
            }
        }
        Ok(piece_keys(normalizer.adds_prefix(), normalizer.removes_spaces()))
    }

    /// Ids of special tokens, and what goes around a text.
    fn special_keys(&self, special: &SpecialTokens, ends: &[i64]) -> Result<GgufKeys, TokenizeError> {
        let id = |name: &str| special.get(name).and_then(|token| self.tokenizer.token_to_id(token)).map(i64::from);
        let own_end = id("eos_token").filter(|end| ends.is_empty() || ends.contains(end));
        let others = ends.iter().copied().filter(|end| Some(*end) != own_end);
        let ends = own_end.into_iter().chain(others).zip(ENDS).map(|(id, name)| (name, Some(id)));
        let named = NAMED.into_iter().map(|(name, token)| (name, id(token)));
        let mut keys: GgufKeys =
            named.chain(ends).filter_map(|(name, id)| Some((key(name), MetaValue::Integer(id?)))).collect();
        let [around, alone] = [self.encode("a", true)?, self.encode("a", false)?];
        let is = |token: Option<&i32>, name: &str| id(name).is_some() && token.copied().map(i64::from) == id(name);
        let adds_bos = around.len() > alone.len() && is(around.first(), "bos_token");
        let adds_eos = around.len() > alone.len() + usize::from(adds_bos) && is(around.last(), "eos_token");
        if around.len() != alone.len() + usize::from(adds_bos) + usize::from(adds_eos) {
            let why = "only bos_token before and eos_token behind a text are written, which tokenizer_config.json has to name";
            return Err(TokenizeError::NotInGguf { path: self.path.clone(), why });
        }
        keys.push((key("add_bos_token"), MetaValue::Bool(adds_bos)));
        keys.push((key("add_eos_token"), MetaValue::Bool(adds_eos)));
        Ok(keys)
    }
}

/// Of pieces with scores.
fn piece_keys(adds_prefix: bool, removes_spaces: bool) -> GgufKeys {
    vec![
        (key("model"), MetaValue::Text(PIECES.into())),
        (key("pre"), MetaValue::Text("default".into())),
        (key("add_space_prefix"), MetaValue::Bool(adds_prefix)),
        (key("remove_extra_whitespaces"), MetaValue::Bool(removes_spaces)),
    ]
}

/// A merge, `"a b"` or `["a", "b"]`.
fn pair(written: &Value) -> Option<[&str; 2]> {
    match written {
        Value::String(pair) => pair.split_once(' ').map(|(first, second)| [first, second]),
        Value::Array(pair) => match pair.as_slice() {
            [first, second] => Some([first.as_str()?, second.as_str()?]),
            _ => None,
        },
        _ => None,
    }
}

/// Scores by which pieces are joined in the order of the merges, as these were made of scores. What no merge makes is joined last.
fn score_by_merges(tokens: &mut [Listed], merges: &[[&str; 2]], unknown: Option<&str>) {
    let mut ranks = HashMap::new();
    for (rank, pair) in merges.iter().enumerate() {
        ranks.entry(pair.concat()).or_insert(rank);
    }
    for token in tokens.iter_mut() {
        token.score = -(ranks.get(&token.text).copied().unwrap_or(merges.len()) as f32);
        if Some(token.text.as_str()) == unknown {
            token.kind = UNKNOWN;
        } else if token.kind == NORMAL && is_byte(&token.text) {
            token.kind = BYTE;
        }
    }
}

/// `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Whether a tokenizer.json of pieces puts a space before a text; `None` if it does something else with spaces than llama.cpp.
fn adds_prefix(json: &Value) -> Option<bool> {
    const SPACE: &str = "\u{2581}";
    let (normalizer, splitter) = (&json["normalizer"], &json["pre_tokenizer"]);
    let one = std::slice::from_ref(normalizer);
    let steps = normalizer["normalizers"].as_array().map_or(one, Vec::as_slice);
    let is_prefix = |step: &&Value| step["type"] == "Prepend" && step["prepend"] == SPACE;
    let is_space =
        |step: &&Value| step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == SPACE;
    let known = steps.iter().all(|step| step.is_null() || is_prefix(&step) || is_space(&step));
    let prefixed = steps.iter().any(|step| is_prefix(&step));
    match splitter["type"].as_str() {
        _ if !known => None,
        None => Some(prefixed),
        Some("Metaspace") if splitter["split"] != true => {
            Some(splitter["prepend_scheme"] != "never" && splitter["add_prefix_space"] != false)
        }
        Some("Split") if splitter["pattern"]["String"] == " " => Some(prefixed), // no space is left to split at
        Some(_) => None,
    }
}
