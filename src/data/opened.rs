//! Opens a data file: detects its format from the first bytes (names may be wrong) and decompresses it. CSV and plain text have no first
//! bytes of their own: there the name counts. Knows nothing of rows.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::source::{self, SourceError};
use crate::files::{self, WrongContent};

/// Bytes that the format is detected from.
const START: u64 = 4096;
const BUFFER: usize = 1 << 20;
/// The first bytes of an Arrow stream's messages.
pub(super) const CONTINUATION: [u8; 4] = [0xff; 4];

/// A data file.
#[derive(Debug)]
pub(super) enum Opened {
    Jsonl(UnpackedText),
    JsonArray(UnpackedText),
    Csv {
        text: UnpackedText,
        delimiter: u8,
    },
    /// Plain text.
    Text(UnpackedText),
    Parquet(File),
    ArrowFile(File),
    ArrowStream(BufReader<CountedFile>),
}

/// A format by the name of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NamedFormat {
    Csv,
    Tsv,
    Text,
}

/// A file's bytes, counted for the progress display.
#[derive(Debug)]
pub(super) struct CountedFile {
    file: File,
    count: Arc<AtomicU64>,
}

/// JSON, CSV or plain text, unpacked.
pub(super) struct UnpackedText {
    path: PathBuf,
    reader: Chain<Cursor<Vec<u8>>, Box<dyn BufRead>>,
    /// `gzip` or `zstd`.
    packed: Option<&'static str>,
    count: Arc<AtomicU64>,
}

impl Opened {
    pub(super) fn open(path: &Path) -> Result<Self, SourceError> {
        let open = || files::open_regular(path).map_err(files::failed("read", path));
        let start = start_of(&mut open()?).map_err(files::failed("read", path))?;
        match start.as_slice() {
            [b'P', b'A', b'R', b'1', ..] => Ok(Self::Parquet(open()?)),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => Ok(Self::ArrowFile(open()?)),
            start if start.starts_with(&CONTINUATION) => {
                let (file, _) = CountedFile::new(open()?);
                Ok(Self::ArrowStream(BufReader::with_capacity(BUFFER, file)))
            }
            start => {
                check_content(path, start)?;
                Self::text(path, packing(start), open()?)
            }
        }
    }

    fn text(path: &Path, packed: Option<&'static str>, file: File) -> Result<Self, SourceError> {
        let (file, count) = CountedFile::new(file);
        let raw = BufReader::with_capacity(BUFFER, file);
        let failed = |source| failed(path, packed, source);
        let mut unpacked: Box<dyn BufRead> = match packed {
            Some("gzip") => Box::new(BufReader::with_capacity(BUFFER, flate2::bufread::MultiGzDecoder::new(raw))),
            Some(_) => {
                let frames = zstd::Decoder::with_buffer(raw).map_err(failed)?;
                Box::new(BufReader::with_capacity(BUFFER, frames))
            }
            None => Box::new(raw),
        };
        let start = start_of(&mut unpacked).map_err(failed)?;
        check_content(path, &start)?;
        let first = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&start).trim_ascii_start().first().copied();
        let columns = start.starts_with(b"PAR1") || start.starts_with(b"ARROW1") || start.starts_with(&CONTINUATION);
        if columns {
            let format = "Parquet or Arrow inside gzip or zstd (unpack it first)";
            return Err(SourceError::Format { path: path.to_owned(), format });
        }
        let reader = Cursor::new(start).chain(unpacked);
        let text = UnpackedText { path: path.to_owned(), reader, packed, count };
        let delimiter = match format_of_name(path) {
            Some(NamedFormat::Csv) => b',',
            Some(NamedFormat::Tsv) => b'\t',
            Some(NamedFormat::Text) if !begins_as_json(text.start()) => return Ok(Self::Text(text)),
            _ => return Ok(if first == Some(b'[') { Self::JsonArray(text) } else { Self::Jsonl(text) }),
        };
        Ok(Self::Csv { text, delimiter })
    }
}

/// Refuses a file that does not hold data but, for example, a Git LFS pointer; a text may be an HTML page.
fn check_content(path: &Path, start: &[u8]) -> Result<(), SourceError> {
    let is_text = format_of_name(path) == Some(NamedFormat::Text);
    match WrongContent::in_text(start).filter(|wrong| !(is_text && *wrong == WrongContent::Html)) {
        Some(wrong) => Err(files::failed("read", path)(wrong.into()).into()),
        None => Ok(()),
    }
}

/// What a name says of a format that has no first bytes of its own.
pub(super) fn format_of_name(path: &Path) -> Option<NamedFormat> {
    match source::extension(&path.to_string_lossy()).as_str() {
        "csv" => Some(NamedFormat::Csv),
        "tsv" => Some(NamedFormat::Tsv),
        "txt" => Some(NamedFormat::Text),
        _ => None,
    }
}

/// `{"` or `[{`, blanks aside: no text begins so.
fn begins_as_json(start: &[u8]) -> bool {
    let mut letters = start.iter().filter(|byte| !byte.is_ascii_whitespace() && byte.is_ascii());
    matches!((letters.next(), letters.next()), (Some(b'{'), Some(b'"')) | (Some(b'['), Some(b'{')))
}

impl CountedFile {
    fn new(file: File) -> (Self, Arc<AtomicU64>) {
        let count = Arc::new(AtomicU64::new(0));
        (Self { file, count: count.clone() }, count)
    }

    /// Bytes read so far.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Read for CountedFile {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(bytes)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl UnpackedText {
    /// What is there without waiting for more than a buffer; empty at the end.
    pub(super) fn chunk(&mut self) -> Result<&[u8], SourceError> {
        let Self { path, reader, packed, .. } = self;
        reader.fill_buf().map_err(|source| failed(path, *packed, source))
    }

    /// What it begins with.
    fn start(&self) -> &[u8] {
        self.reader.get_ref().0.get_ref()
    }

    /// An error of reading it.
    pub(super) fn failed(&self, source: io::Error) -> SourceError {
        failed(&self.path, self.packed, source)
    }

    /// Takes bytes of the last chunk away.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.reader.consume(bytes);
    }

    /// Bytes of the file, packed ones where it is packed, read so far.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Read for UnpackedText {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader.read(bytes)
    }
}

impl std::fmt::Debug for UnpackedText {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("UnpackedText").field("path", &self.path).field("packed", &self.packed).finish_non_exhaustive()
    }
}

fn start_of(reader: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    reader.take(START).read_to_end(&mut start)?;
    Ok(start)
}

fn packing(start: &[u8]) -> Option<&'static str> {
    match start {
        [0x1f, 0x8b, ..] => Some("gzip"),
        // A frame, or a frame to skip, as parallel packers write first.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some("zstd"),
        _ => None,
    }
}

fn failed(path: &Path, packed: Option<&'static str>, source: io::Error) -> SourceError {
    match packed {
        Some(format) => SourceError::Unpack { path: path.to_owned(), format, source },
        None => files::failed("read", path)(source).into(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn a_format_is_recognised_by_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.parquet");
        let opened = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            Opened::open(&path)
        };
        assert!(matches!(opened(b"{\"text\": \"a\"}"), Ok(Opened::Jsonl(_))));
        assert!(matches!(opened(b"\xef\xbb\xbf\n [{\"text\": \"a\"}]"), Ok(Opened::JsonArray(_))));
        assert!(matches!(opened(b"a,b"), Ok(Opened::Jsonl(_))), "the name says nothing of CSV");
        assert!(matches!(opened(b"ARROW1\0\0"), Ok(Opened::ArrowFile(_))));
        assert!(matches!(opened(&[0xff, 0xff, 0xff, 0xff, 1]), Ok(Opened::ArrowStream(_))));
        let packed = zstd::encode_all(b"PAR1".as_slice(), 1).unwrap();
        assert!(opened(&packed).unwrap_err().to_string().contains("unpack it first"));
        let page = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>".as_slice();
        for bytes in [page, &zstd::encode_all(page, 1).unwrap()] {
            let error = opened(bytes).unwrap_err().to_string();
            assert!(error.contains("rows.parquet: it is an HTML page"), "{error}");
        }
        assert!(matches!(opened(&packed[..6]), Err(SourceError::Unpack { format: "zstd", .. })));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test")]
    fn csv_and_text_are_recognised_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let opened = |name: &str, bytes: &[u8]| {
            fs::write(dir.path().join(name), bytes).unwrap();
            Opened::open(&dir.path().join(name)).unwrap()
        };
        assert!(matches!(opened("a.CSV", b"{\"a\",b"), Opened::Csv { delimiter: b',', .. }));
        let packed = zstd::encode_all(b"a\tb".as_slice(), 1).unwrap();
        assert!(matches!(opened("a.tsv.zst", &packed), Opened::Csv { delimiter: b'\t', .. }));
        assert!(matches!(opened("a.txt", b"[Scene: a wood]"), Opened::Text(_)));
        assert!(matches!(opened("a.txt", b"<html><body>a text about HTML"), Opened::Text(_)));
        assert!(matches!(opened("a.txt", b"\xef\xbb\xbf [\n{\"text\": 1}"), Opened::JsonArray(_)));
        assert!(matches!(opened("a.txt", b"{\"text\": 1}"), Opened::Jsonl(_)));
        assert!(matches!(opened("a.txt", b"PAR1"), Opened::Parquet(_)));
    }
}
