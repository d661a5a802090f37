//! Rows of plain text: a file is one document, or several with a line `<|endoftext|>` between them. A document that would be too long to
//! tokenise ends with the line that makes it longer than [`DOCUMENT_BYTES`], and the next one goes on behind it.

use super::jsonl::{JsonLines, RowText};
use super::opened::UnpackedText;
use super::source::SourceError;
use crate::bounds::DOCUMENT_BYTES;

/// GPT-2's document separator, which corpora in one file kept.
const BETWEEN: &[u8] = b"<|endoftext|>";

/// The documents of a file that are not blank.
#[derive(Debug)]
pub(super) struct Documents {
    lines: JsonLines,
}

impl Documents {
    pub(super) fn new(text: UnpackedText) -> Self {
        Self { lines: JsonLines::new(text) }
    }

    /// Bytes of the file read so far.
    pub(super) fn count(&self) -> u64 {
        self.lines.count()
    }

    /// The next document, without blank lines around it; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<RowText>, SourceError> {
        let Some(mut document) = self.lines.next()? else { return Ok(None) };
        while is_border(&document) {
            match self.lines.next()? {
                Some(line) => document = line,
                None => return Ok(None),
            }
        }
        document.text = document.text.map(without_return);
        while !is_long(&document)
            && let Some(line) = self.lines.line()?.filter(|line| !is_border(line))
        {
            document.push(b"\n");
            match line.text {
                Some(text) => document.push(&without_return(text)),
                None => document.text = None,
            }
        }
        document.text = document.text.map(|text| text.trim_ascii_end().to_vec());
        Ok(Some(document))
    }
}

fn is_border(line: &RowText) -> bool {
    line.text.as_ref().is_some_and(|text| text.trim_ascii() == BETWEEN)
}

fn is_long(document: &RowText) -> bool {
    document.text.as_ref().is_some_and(|text| text.len() > DOCUMENT_BYTES)
}

fn without_return(mut line: Vec<u8>) -> Vec<u8> {
    line.truncate(line.strip_suffix(b"\r").unwrap_or(&line).len());
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::opened::Opened;

    fn documents(text: &str) -> Vec<(usize, String)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("book.txt");
        crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).unwrap();
        let Ok(Opened::Text(text)) = Opened::open(&path) else { panic!("no text") };
        let mut documents = Documents::new(text);
        std::iter::from_fn(|| documents.next().unwrap())
            .map(|row| (row.number, String::from_utf8(row.text.unwrap()).unwrap()))
            .collect()
    }

    #[test]
    fn a_file_is_a_document_or_has_a_sign_between_them() {
        let owned =
            |found: &[(usize, &str)]| found.iter().map(|(at, text)| (*at, (*text).to_owned())).collect::<Vec<_>>();
        assert_eq!(documents("\u{feff}\n\n  one\r\n\r\ntwo\n\n"), owned(&[(3, "  one\n\ntwo")]));
        let several = "<|endoftext|>\none\n<|endoftext|>\n\n<|endoftext|> \n\ntwo <|endoftext|>\nthree\n<|endoftext|>";
        assert_eq!(documents(several), owned(&[(2, "one"), (7, "two <|endoftext|>\nthree")]));
        assert_eq!(documents(" \n"), []);
    }

    #[test]
    fn a_long_document_is_divided_between_lines() {
        let line = "0123456789abcde\n";
        let lines = 3 * DOCUMENT_BYTES / line.len();
        let divided = documents(&format!("{}<|endoftext|>\nend", line.repeat(lines)));
        let [first, second, third, end] = &divided[..] else { panic!("{} documents", divided.len()) };
        assert_eq!((first.0, second.0, end.1.as_str()), (1, DOCUMENT_BYTES / line.len() + 2, "end"));
        let whole = [first, second, third].map(|(_, text)| text.as_str()).join("\n");
        assert_eq!(whole.len() + 1, line.len() * lines);
        assert!(whole.split('\n').all(|got| got == &line[..15]));
    }
}
