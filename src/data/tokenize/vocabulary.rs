//! Compares the vocabularies of two tokenizers: whether an id stands for the same token in both.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::TextTokenizer;

/// Two tokenizers that give an id to different tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} and {} have different vocabularies: token {id} is {} in the first and {} in the second",
    paths[0].display(), paths[1].display(), shown(tokens[0].as_ref()), shown(tokens[1].as_ref())
)]
pub struct VocabularyMismatch {
    pub paths: [PathBuf; 2],
    /// The first id that differs.
    pub id: u32,
    /// `None`: the tokenizer has no such id.
    pub tokens: [Option<String>; 2],
}

fn shown(token: Option<&String>) -> String {
    token.map_or_else(|| "missing".to_owned(), |token| format!("{token:?}"))
}

impl TextTokenizer {
    /// Refuses a tokenizer with another vocabulary. One of the two may have more tokens at the end, as after fine-tuning with added
    /// tokens. How text is split into tokens is not compared: ids of the same vocabulary have the same meaning.
    ///
    /// # Errors
    /// [`VocabularyMismatch`] names the first token that differs.
    pub fn check_same_vocabulary(&self, other: &Self) -> Result<(), VocabularyMismatch> {
        if self.sha256 == other.sha256 {
            return Ok(());
        }
        let (ours, theirs) = (self.by_id(), other.by_id());
        let last = self.highest.id.min(other.highest.id);
        match (0..=last).find(|id| ours.get(id) != theirs.get(id)) {
            None => Ok(()),
            Some(id) => Err(VocabularyMismatch {
                paths: [self.path.clone(), other.path.clone()],
                id,
                tokens: [ours, theirs].map(|tokens| tokens.get(&id).cloned()),
            }),
        }
    }

    pub(super) fn by_id(&self) -> BTreeMap<u32, String> {
        self.tokenizer.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn tokenizer(folder: &Path, tokens: &[&str]) -> TextTokenizer {
        fs::create_dir_all(folder).unwrap();
        let vocab: serde_json::Map<_, _> =
            tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), json!(id))).collect();
        let file = json!({"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}});
        fs::write(folder.join("tokenizer.json"), file.to_string()).unwrap();
        TextTokenizer::load(folder).unwrap()
    }

    #[test]
    fn tokens_are_compared_one_by_one_and_one_vocabulary_may_continue_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let with_tokens = |name: &str, tokens: &[&str]| tokenizer(&dir.path().join(name), tokens);
        let (three, four) = (with_tokens("three", &["a", "b", "c"]), with_tokens("four", &["a", "b", "c", "d"]));
        assert_eq!(three.check_same_vocabulary(&four), Ok(()));
        assert_eq!(four.check_same_vocabulary(&three), Ok(()));
        let other = with_tokens("other", &["a", "c", "b"]); // as many tokens, and the same ones
        let why = three.check_same_vocabulary(&other).unwrap_err();
        assert_eq!((why.id, &why.tokens), (1, &[Some("b".into()), Some("c".into())]));
        let words = why.to_string();
        let ends = "have different vocabularies: token 1 is \"b\" in the first and \"c\" in the second";
        assert!(words.contains("three/tokenizer.json and ") && words.ends_with(ends), "{words}");
    }
}
