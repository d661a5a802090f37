//! Refuses a footer that counts more items than it has bytes. The parquet crate passes over lists of Booleans that it does not know without
//! reading a byte for each: 20 bytes can be four billion of them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// Behind the footer: its length, and this.
const MAGIC: &[u8; 4] = b"PAR1";
/// Levels that the parquet crate passes over.
const DEPTH: usize = 64;

/// Types of Thrift's compact protocol.
mod kind {
    pub(super) const STOP: u8 = 0;
    pub(super) const TRUE: u8 = 1;
    pub(super) const FALSE: u8 = 2;
    pub(super) const BYTE: u8 = 3;
    pub(super) const I16: u8 = 4;
    pub(super) const I64: u8 = 6;
    pub(super) const DOUBLE: u8 = 7;
    pub(super) const BINARY: u8 = 8;
    pub(super) const LIST: u8 = 9;
    pub(super) const SET: u8 = 10;
    pub(super) const MAP: u8 = 11;
    pub(super) const STRUCT: u8 = 12;
    pub(super) const UUID: u8 = 13;
}

/// Why a footer was not read to its end.
#[derive(Debug, PartialEq, Eq)]
enum FooterFault {
    /// Left to the parquet crate, which says what is wrong.
    Malformed,
    TooMany,
}

/// Whether the footer of a file counts no more items than it has bytes.
///
/// # Errors
/// The I/O error.
pub(super) fn is_bounded(file: &mut File) -> io::Result<bool> {
    let bytes = footer(file)?;
    let mut thrift = Thrift { items: bytes.len(), bytes: &bytes };
    Ok(thrift.pass(kind::STRUCT, 0) != Err(FooterFault::TooMany))
}

/// The footer's bytes; none in a file that is not Parquet, or encrypted.
fn footer(file: &mut File) -> io::Result<Vec<u8>> {
    let end = file.seek(SeekFrom::End(0))?;
    let mut tail = [0; 8];
    if end < tail.len() as u64 {
        return Ok(vec![]);
    }
    file.seek(SeekFrom::Start(end - 8))?;
    file.read_exact(&mut tail)?;
    let ([length, magic], _) = tail.as_chunks::<4>() else { return Ok(vec![]) };
    let length = u64::from(u32::from_le_bytes(*length));
    if magic != MAGIC || length > end - 8 {
        return Ok(vec![]);
    }
    let mut bytes = vec![];
    file.seek(SeekFrom::Start(end - 8 - length))?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A reader of Thrift's compact protocol that keeps nothing.
struct Thrift<'b> {
    bytes: &'b [u8],
    /// Items of lists, sets and maps that may still come.
    items: usize,
}

impl Thrift<'_> {
    fn pass(&mut self, kind: u8, depth: usize) -> Result<(), FooterFault> {
        if depth > DEPTH {
            return Err(FooterFault::Malformed);
        }
        match kind {
            kind::TRUE | kind::FALSE => Ok(()),
            kind::BYTE => self.take(1),
            kind::I16..=kind::I64 => self.number().map(drop),
            kind::DOUBLE => self.take(8),
            kind::BINARY => self.number().and_then(|length| self.take(length)),
            kind::LIST | kind::SET => self.list(depth),
            kind::MAP => self.map(depth),
            kind::STRUCT => self.fields(depth),
            kind::UUID => self.take(16),
            _ => Err(FooterFault::Malformed),
        }
    }

    fn list(&mut self, depth: usize) -> Result<(), FooterFault> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.number()? } else { usize::from(head >> 4) };
        self.count(count)?;
        (0..count).try_for_each(|_| self.pass(head & 15, depth + 1))
    }

    fn map(&mut self, depth: usize) -> Result<(), FooterFault> {
        let count = self.number()?;
        if count == 0 {
            return Ok(());
        }
        let kinds = self.byte()?;
        self.count(count)?;
        (0..count).try_for_each(|_| {
            self.pass(kinds >> 4, depth + 1)?;
            self.pass(kinds & 15, depth + 1)
        })
    }

    fn fields(&mut self, depth: usize) -> Result<(), FooterFault> {
        loop {
            let head = self.byte()?;
            if head & 15 == kind::STOP {
                return Ok(());
            }
            if head >> 4 == 0 {
                self.number()?; // the field's id, which else is a step from the one before
            }
            self.pass(head & 15, depth + 1)?;
        }
    }

    fn count(&mut self, items: usize) -> Result<(), FooterFault> {
        self.items = self.items.checked_sub(items).ok_or(FooterFault::TooMany)?;
        Ok(())
    }

    fn byte(&mut self) -> Result<u8, FooterFault> {
        let (&first, rest) = self.bytes.split_first().ok_or(FooterFault::Malformed)?;
        self.bytes = rest;
        Ok(first)
    }

    fn take(&mut self, length: usize) -> Result<(), FooterFault> {
        self.bytes = self.bytes.get(length..).ok_or(FooterFault::Malformed)?;
        Ok(())
    }

    /// Seven bits a byte, the lowest first.
    fn number(&mut self) -> Result<usize, FooterFault> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return usize::try_from(number).map_err(|_| FooterFault::TooMany);
            }
        }
        Err(FooterFault::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::files::write_atomic;

    fn is_bounded_file(bytes: &[u8]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        write_atomic(&path, |out| io::Write::write_all(out, bytes)).unwrap();
        is_bounded(&mut File::open(path).unwrap()).unwrap()
    }

    fn with_footer(footer: &[u8]) -> Vec<u8> {
        [MAGIC, footer, &(footer.len() as u32).to_le_bytes(), MAGIC].concat()
    }

    #[test]
    fn a_file_that_was_written_is_bounded() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a"; 1000]));
        let batch = RecordBatch::try_from_iter([("text", texts.clone()), ("other", texts)]).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        let bytes = writer.into_inner().unwrap();
        assert!(is_bounded_file(&bytes));
        let at = bytes.len() - 8;
        let length = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let footer = &bytes[at - length..at];
        let mut thrift = Thrift { bytes: footer, items: footer.len() };
        assert_eq!((thrift.pass(kind::STRUCT, 0), thrift.bytes.len()), (Ok(()), 0), "read to its end");
    }

    #[test]
    fn lists_of_more_items_than_bytes_are_not() {
        let booleans = |count: &[u8]| [&[0x19, 0xf1], count, &[0]].concat(); // field 1, a list of Booleans
        assert!(is_bounded_file(&with_footer(&booleans(&[3]))));
        assert!(!is_bounded_file(&with_footer(&booleans(&[0xff, 0xff, 0xff, 0xff, 0x0e]))));
        let lists = [vec![0x19, 0xf9, 40], [0xf1, 40].repeat(40), vec![0]].concat(); // 40 lists of 40
        assert!(!is_bounded_file(&with_footer(&lists)));
        let map = [0x1b, 0xff, 0xff, 0xff, 0x7f, 0x11, 0];
        assert!(!is_bounded_file(&with_footer(&map)));
    }

    #[test]
    fn what_is_malformed_is_left_to_the_library() {
        for footer in [&[][..], &[0x1c], &[0x18, 9], &[0x1f], &[0x1c; 400]] {
            assert!(is_bounded_file(&with_footer(footer)), "{footer:?}");
        }
        assert!(is_bounded_file(b"PAR1") && is_bounded_file(b"PAR1\xff\xff\xff\xffPAR1"));
    }
}
