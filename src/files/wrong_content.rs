//! Recognises files that hold something else than they should, after a download or an editor, by their first bytes.

use std::io;

/// What a file holds instead of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WrongContent {
    #[error("it is a Git LFS pointer to the file, not the file itself; run `git lfs pull` where it was cloned")]
    LfsPointer,
    #[error(
        "it is an HTML page, as servers send it in the place of a file (to log in, or for a link to a page); download the file itself"
    )]
    Html,
    #[error("it is text in UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE)")]
    Utf16,
}

const LFS: &[u8] = b"version https://git-lfs.github.com/spec/v1";
const HTML: [&str; 2] = ["<!doctype html", "<html"];
/// Without a byte order mark, UTF-16 is recognised by the zero bytes of this many letters at its beginning.
const LETTERS: usize = 16;

impl WrongContent {
    /// By the first bytes of a file that should be text in UTF-8.
    pub fn in_text(start: &[u8]) -> Option<Self> {
        Self::in_binary(start).or_else(|| is_utf_16(start).then_some(Self::Utf16))
    }

    /// By the first bytes of a binary file.
    pub fn in_binary(start: &[u8]) -> Option<Self> {
        let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
        let is_html =
            |begin: &str| text.get(..begin.len()).is_some_and(|text| text.eq_ignore_ascii_case(begin.as_bytes()));
        match () {
            () if start.starts_with(LFS) => Some(Self::LfsPointer),
            () if HTML.into_iter().any(is_html) => Some(Self::Html),
            () => None,
        }
    }
}

impl From<WrongContent> for io::Error {
    fn from(wrong: WrongContent) -> Self {
        Self::new(io::ErrorKind::InvalidData, wrong)
    }
}

fn is_utf_16(start: &[u8]) -> bool {
    let (letters, _) = start[..start.len().min(2 * LETTERS)].as_chunks::<2>();
    let all = |is_letter: fn(&[u8; 2]) -> bool| letters.len() > 1 && letters.iter().all(is_letter);
    let has_mark = start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff");
    has_mark || all(|[low, high]| *low != 0 && *high == 0) || all(|[high, low]| *low != 0 && *high == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_recognised_by_its_first_bytes() {
        let utf_16 = |text: &str| -> Vec<u8> { text.encode_utf16().flat_map(u16::to_le_bytes).collect() };
        let swapped = |text: &str| -> Vec<u8> { text.encode_utf16().flat_map(u16::to_be_bytes).collect() };
        let json = "{\"text\": \"caf\u{e9} and much more than sixteen letters\"}";
        for text in [json, "[]", "\u{feff}\u{4f60}\u{597d}"] {
            assert_eq!(WrongContent::in_text(&utf_16(text)), Some(WrongContent::Utf16), "{text}");
            assert_eq!(WrongContent::in_text(&swapped(text)), Some(WrongContent::Utf16), "{text}");
            assert_eq!(WrongContent::in_binary(&utf_16(text)), None);
            assert_eq!(WrongContent::in_text(text.as_bytes()), None);
        }
        for page in ["<!DOCTYPE html>\n<html>", "\u{feff}\r\n<html lang=\"en\">", "<HTML>"] {
            assert_eq!(WrongContent::in_text(page.as_bytes()), Some(WrongContent::Html));
        }
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
        assert_eq!(WrongContent::in_binary(pointer), Some(WrongContent::LfsPointer));
        for other in [&b""[..], b"a", b"\0\0\0\0", b"a\0", b"<htm", b"version https"] {
            assert_eq!(WrongContent::in_text(other), None);
        }
    }
}
