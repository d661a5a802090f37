//! Refuses a footer or a page header that counts more items than it has bytes. The parquet crate passes over lists of Booleans that it does
//! not know without reading a byte for each: 20 bytes can be two billion of them. (`skip_till_depth` of parquet 60.1; apache/arrow-rs#9874 has what
//! else of its reader is to be hardened.)

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use parquet::file::FOOTER_SIZE;
use parquet::file::metadata::FooterTail;

use crate::bounds::PARQUET_PAGE_HEADER_BYTES;

/// Levels that the parquet crate passes over.
const DEPTH: usize = 64;
/// Bytes that most page headers fit into.
const HEADER_BYTES: u64 = 1 << 10;
/// `compressed_page_size` of a page header.
const PAGE_SIZE: usize = 3;

/// Types of Thrift's compact protocol.
mod kind {
    pub(super) const STOP: u8 = 0;
    pub(super) const TRUE: u8 = 1;
    pub(super) const FALSE: u8 = 2;
    pub(super) const BYTE: u8 = 3;
    pub(super) const I16: u8 = 4;
    pub(super) const I32: u8 = 5;
    pub(super) const I64: u8 = 6;
    pub(super) const DOUBLE: u8 = 7;
    pub(super) const BINARY: u8 = 8;
    pub(super) const LIST: u8 = 9;
    pub(super) const SET: u8 = 10;
    pub(super) const MAP: u8 = 11;
    pub(super) const STRUCT: u8 = 12;
    pub(super) const UUID: u8 = 13;
}

/// Why a footer or a header was not read to its end.
#[derive(Debug, PartialEq, Eq)]
enum ThriftFault {
    /// Left to the parquet crate, which says what is wrong.
    Malformed,
    TooMany,
}

/// Whether the footer of a file counts no more items than it has bytes.
///
/// # Errors
/// The I/O error.
pub(super) fn is_footer_bounded(file: &File) -> io::Result<bool> {
    Ok(Thrift::new(&footer(file)?).pass(kind::STRUCT, 0) != Err(ThriftFault::TooMany))
}

/// Whether every header of a column chunk's pages ends within [`PARQUET_PAGE_HEADER_BYTES`] and counts no more items than it may have bytes. `bytes` is where the chunk stands in
/// the file. What follows a malformed header is left to the parquet crate, which does not get beyond it either.
///
/// # Errors
/// The I/O error.
pub(super) fn are_page_headers_bounded(file: &File, mut bytes: Range<u64>) -> io::Result<bool> {
    while bytes.start < bytes.end {
        match page_length(file, &bytes)? {
            Ok(length) => bytes.start = bytes.start.saturating_add(length),
            Err(fault) => return Ok(fault != ThriftFault::TooMany),
        }
    }
    Ok(true)
}

/// Bytes of the first page, its header included. A header that is longer than what was read is read again.
fn page_length(file: &File, bytes: &Range<u64>) -> io::Result<Result<u64, ThriftFault>> {
    let most = PARQUET_PAGE_HEADER_BYTES.min(bytes.end - bytes.start);
    let mut length = HEADER_BYTES.min(most);
    loop {
        let page = Thrift::new(&bytes_at(file, bytes.start, length)?).page_length();
        if page.is_err() && length == PARQUET_PAGE_HEADER_BYTES {
            return Ok(Err(ThriftFault::TooMany));
        }
        if page.is_ok() || length == most {
            return Ok(page);
        }
        length = most.min(length * 4);
    }
}

/// The footer's bytes; none in a file that is not Parquet, or encrypted.
fn footer(file: &File) -> io::Result<Vec<u8>> {
    let Some(end) = file.metadata()?.len().checked_sub(FOOTER_SIZE as u64) else { return Ok(vec![]) };
    let footer = FooterTail::try_from(bytes_at(file, end, FOOTER_SIZE as u64)?.as_slice()).ok();
    let length = footer.filter(|f| !f.is_encrypted_footer()).map_or(0, |f| f.metadata_length() as u64);
    end.checked_sub(length).map_or(Ok(vec![]), |start| bytes_at(file, start, length))
}

/// Fewer at the file's end.
fn bytes_at(mut file: &File, start: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    file.seek(SeekFrom::Start(start))?;
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A reader of Thrift's compact protocol that keeps nothing.
struct Thrift<'b> {
    bytes: &'b [u8],
    /// Items of lists, sets and maps that may still come.
    items: usize,
}

impl<'b> Thrift<'b> {
    fn new(bytes: &'b [u8]) -> Self {
        Self { items: bytes.len(), bytes }
    }

    /// Bytes of a page whose header comes now.
    fn page_length(mut self) -> Result<u64, ThriftFault> {
        let (before, mut id, mut page_bytes) = (self.bytes.len(), 0usize, None);
        loop {
            let head = self.byte()?;
            if head & 15 == kind::STOP {
                let header = (before - self.bytes.len()) as u64;
                return page_bytes.map(|bytes| header + bytes).ok_or(ThriftFault::Malformed);
            }
            id = match head >> 4 {
                0 => unfolded(self.number()?).ok_or(ThriftFault::Malformed)?,
                step => id + usize::from(step),
            };
            match (id, head & 15) {
                (PAGE_SIZE, kind::I32) => {
                    page_bytes = Some(unfolded(self.number()?).ok_or(ThriftFault::Malformed)? as u64)
                }
                (_, kind) => self.pass(kind, 1)?,
            }
        }
    }

    fn pass(&mut self, kind: u8, depth: usize) -> Result<(), ThriftFault> {
        if depth > DEPTH {
            return Err(ThriftFault::Malformed);
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
            _ => Err(ThriftFault::Malformed),
        }
    }

    fn list(&mut self, depth: usize) -> Result<(), ThriftFault> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.number()? } else { usize::from(head >> 4) };
        self.count(count)?;
        (0..count).try_for_each(|_| self.pass(head & 15, depth + 1))
    }

    fn map(&mut self, depth: usize) -> Result<(), ThriftFault> {
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

    fn fields(&mut self, depth: usize) -> Result<(), ThriftFault> {
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

    fn count(&mut self, items: usize) -> Result<(), ThriftFault> {
        self.items = self.items.checked_sub(items).ok_or(ThriftFault::TooMany)?;
        Ok(())
    }

    fn byte(&mut self) -> Result<u8, ThriftFault> {
        let (&first, rest) = self.bytes.split_first().ok_or(ThriftFault::Malformed)?;
        self.bytes = rest;
        Ok(first)
    }

    fn take(&mut self, length: usize) -> Result<(), ThriftFault> {
        self.bytes = self.bytes.get(length..).ok_or(ThriftFault::Malformed)?;
        Ok(())
    }

    /// Seven bits a byte, the lowest first.
    fn number(&mut self) -> Result<usize, ThriftFault> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return usize::try_from(number).map_err(|_| ThriftFault::TooMany);
            }
        }
        Err(ThriftFault::Malformed)
    }
}

/// The number of a zigzag code; `None` if it is negative.
fn unfolded(code: usize) -> Option<usize> {
    code.is_multiple_of(2).then_some(code / 2)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::{EnabledStatistics, WriterProperties};

    use super::*;

    fn file_of(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, bytes).unwrap();
        file
    }

    fn is_bounded_file(bytes: &[u8]) -> bool {
        is_footer_bounded(&file_of(bytes)).unwrap()
    }

    fn with_footer(footer: &[u8]) -> Vec<u8> {
        [b"PAR1", footer, &(footer.len() as u32).to_le_bytes(), b"PAR1"].concat()
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
        let mut thrift = Thrift::new(footer);
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

    #[test]
    fn every_page_of_a_file_that_was_written_is_passed() {
        let texts: ArrayRef =
            Arc::new(StringArray::from_iter_values((0..3000).map(|row| "x".repeat(2000) + &row.to_string())));
        let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
        let small = WriterProperties::builder().set_data_page_size_limit(1 << 16).set_write_batch_size(16);
        let small = small.set_statistics_enabled(EnabledStatistics::Page).set_statistics_truncate_length(None).build();
        let file = tempfile::tempfile().unwrap();
        let mut writer = ArrowWriter::try_new(file.try_clone().unwrap(), batch.schema(), Some(small)).unwrap();
        writer.write(&batch).unwrap();
        let (start, length) = writer.close().unwrap().row_group(0).column(0).byte_range();
        let (mut at, mut pages) = (start, 0);
        while at < start + length {
            at += page_length(&file, &(at..start + length)).unwrap().unwrap();
            pages += 1;
        }
        assert_eq!((pages > 20, at), (true, start + length), "{pages}");
        assert!(are_page_headers_bounded(&file, start..start + length).unwrap());
    }

    #[test]
    fn a_page_header_with_more_items_than_bytes_is_not_bounded() {
        let page = [0x35, 6, 0, 1, 2, 3]; // field 3: three bytes follow the header
        let booleans = |count: &[u8]| [&page[..], &[0x39, 0xf1], count, &[0x05, 6, 6, 0, 1, 2, 3]].concat();
        let is_bounded = |bytes: &[u8]| are_page_headers_bounded(&file_of(bytes), 0..bytes.len() as u64).unwrap();
        assert!(is_bounded(&[page, page].concat()) && is_bounded(&booleans(&[3])));
        assert!(!is_bounded(&booleans(&[0xff, 0xff, 0xff, 0xff, 0x0e])));
        assert!(
            is_bounded(&[0x35, 7, 0]) && is_bounded(&[0x15, 6, 0]),
            "a negative size, or none, is left to the library"
        );
    }
}
