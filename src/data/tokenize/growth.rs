//! How much longer the rules of a tokenizer.json may make a text, before and behind its model. Six rules that make ten letters of one make a
//! million: they are refused when the file is read. (The tokenizers crate, 0.22, has no bound, and a client's text of 4 MiB would end a server.)

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::TokenizeError;
use crate::bounds::TOKENIZER_GROWTH;

/// A blank that becomes U+2581 grows threefold.
pub(super) const USUAL: usize = 4;

/// The parts of tokenizer.json that make text or tokens.
#[derive(Deserialize)]
struct Rules {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    post_processor: Value,
}

/// How many times as long the normalizer may make a text.
///
/// # Errors
/// Rules beyond [`TOKENIZER_GROWTH`], or with an empty pattern; rules that add more bytes or tokens than that to every text.
pub(super) fn of(path: &Path, json: &[u8]) -> Result<usize, TokenizeError> {
    let Ok(Rules { normalizer, decoder, post_processor }) = serde_json::from_slice(json) else {
        return Ok(USUAL); // the library says why
    };
    check_added(prepended(&normalizer), path, "normalizer", "bytes")?;
    check_added(special_tokens(&post_processor), path, "post_processor", "tokens")?;
    checked(&decoder, path, "decoder")?;
    checked(&normalizer, path, "normalizer").map(|growth| growth.max(USUAL))
}

fn checked(rules: &Value, path: &Path, key: &'static str) -> Result<usize, TokenizeError> {
    match growth(rules) {
        None => Err(TokenizeError::EmptyPattern { path: path.to_owned(), key }),
        Some(growth) if growth > TOKENIZER_GROWTH => Err(TokenizeError::Growth { path: path.to_owned(), key, growth }),
        Some(growth) => Ok(growth),
    }
}

fn check_added(added: usize, path: &Path, key: &'static str, what: &'static str) -> Result<(), TokenizeError> {
    if added <= TOKENIZER_GROWTH {
        return Ok(());
    }
    Err(TokenizeError::Added { path: path.to_owned(), key, added, what })
}

/// Bytes that the Prepend rules put before each text.
fn prepended(normalizer: &Value) -> usize {
    let parts = normalizer["normalizers"].as_array().into_iter().flatten().map(prepended).sum::<usize>();
    parts + normalizer["prepend"].as_str().map_or(0, str::len)
}

/// Tokens that TemplateProcessing puts around each text.
fn special_tokens(processor: &Value) -> usize {
    let parts = processor["processors"].as_array().into_iter().flatten().map(special_tokens).sum::<usize>();
    let ids = |name: &Value| processor["special_tokens"][name.as_str()?]["ids"].as_array().map(Vec::len);
    let pieces = processor["single"].as_array().into_iter().flatten();
    parts + pieces.filter_map(|piece| ids(&piece["SpecialToken"]["id"])).sum::<usize>()
}

/// The product over all rules; `None` for an empty pattern.
fn growth(rules: &Value) -> Option<usize> {
    let parts = [&rules["normalizers"], &rules["decoders"]].into_iter().filter_map(Value::as_array).flatten();
    let parts = parts.map(growth).try_fold(1_usize, |product, part| Some(product.saturating_mul(part?)))?;
    let Some(content) = rules["content"].as_str().filter(|_| rules["type"] == "Replace") else { return Some(parts) };
    let here = match (&rules["pattern"]["String"], &rules["pattern"]["Regex"]) {
        (Value::String(text), _) | (_, Value::String(text)) if text.is_empty() => return None,
        (Value::String(text), _) => content.len().div_ceil(text.len()),
        _ => content.len() + 1, // an expression may find nothing before each byte
    };
    Some(parts.saturating_mul(here.max(1)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn replace(pattern: &Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn growth_is_the_product_of_all_rules() {
        let blank = replace(&json!({"String": " "}), "\u{2581}");
        assert_eq!(growth(&blank), Some(3));
        assert_eq!(growth(&json!({"type": "Sequence", "normalizers": [blank, {"type": "NFC"}]})), Some(3));
        assert_eq!(
            growth(&json!({"type": "Sequence", "decoders": [replace(&json!({"String": "\u{2581}"}), " ")]})),
            Some(1)
        );
        assert_eq!(growth(&replace(&json!({"Regex": "a*"}), "abcd")), Some(5));
        let six = vec![replace(&json!({"String": "a"}), &"a".repeat(10)); 6];
        let nested = six.into_iter().reduce(|all, one| json!({"type": "Sequence", "normalizers": [all, one]}));
        assert_eq!(growth(&nested.unwrap()), Some(1_000_000));
        assert_eq!(growth(&Value::Null), Some(1));
    }

    #[test]
    fn an_empty_pattern_is_none() {
        assert_eq!(growth(&replace(&json!({"Regex": ""}), "a")), None);
        assert_eq!(growth(&json!({"normalizers": [replace(&json!({"String": ""}), "a")]})), None);
    }

    #[test]
    fn what_is_added_to_each_text_is_bounded() {
        let refused = |key: &str, rule: Value| {
            let json = json!({key: {"type": "Sequence", "normalizers": [rule], "processors": [rule]}}).to_string();
            of(Path::new("b/tokenizer.json"), json.as_bytes()).map_err(|error| error.to_string())
        };
        let prepend = |times: usize| json!({"type": "Prepend", "prepend": "\u{2581}".repeat(times)});
        assert_eq!(refused("normalizer", prepend(1)), Ok(USUAL));
        let error = refused("normalizer", prepend(1000)).unwrap_err();
        assert!(error.starts_with("b/tokenizer.json: normalizer: it adds 3000 bytes to every text"), "{error}");
        let processor = |ids: usize| {
            let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
            let special = json!({"<s>": {"id": "<s>", "ids": vec![1; ids], "tokens": vec!["<s>"; ids]}});
            json!({"type": "TemplateProcessing", "single": [begin, {"Sequence": {}}, begin], "special_tokens": special})
        };
        assert_eq!(refused("post_processor", processor(1)), Ok(USUAL));
        let error = refused("post_processor", processor(500)).unwrap_err();
        assert!(error.starts_with("b/tokenizer.json: post_processor: it adds 1000 tokens to every text"), "{error}");
    }

    #[test]
    fn errors_name_the_file_and_the_part() {
        let json = json!({"decoder": replace(&json!({"String": "a"}), &"b".repeat(300)), "model": {}}).to_string();
        let error = of(Path::new("b/tokenizer.json"), json.as_bytes()).unwrap_err().to_string();
        assert!(
            error.starts_with("b/tokenizer.json: decoder: its Replace rules may make a text 300 times as long"),
            "{error}"
        );
        assert_eq!(of(Path::new("t.json"), b"{}").unwrap(), USUAL);
    }
}
