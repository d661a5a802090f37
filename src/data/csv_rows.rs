//! Rows of CSV and TSV: the first record names the columns, each further one is a row of strings.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use serde_json::{Map, Value};

use super::column_names::ColumnNames;
use super::columns::FileColumns;
use super::error::DataError;
use super::opened::UnpackedText;
use super::raw_row::RawRow;
use super::row_keys::{self, OtherKey};
use super::row_object::RowObject;
use super::rows::{RowLocation, RowProblem};
use crate::bounds::ROW_BYTES;

/// The names of the columns, and which of them rows are made of.
#[derive(Debug)]
pub(super) struct CsvHeader {
    names: Vec<String>,
    wanted: Vec<usize>,
}

/// A record behind the header.
#[derive(Debug)]
pub(super) struct CsvRecord {
    /// Counted from 1, without blank lines. (The csv crate's line numbers are off where lines end with `\r\n`, and behind blank lines.)
    pub(super) number: usize,
    pub(super) fields: csv::ByteRecord,
}

/// The records behind the header.
#[derive(Debug)]
pub(super) struct CsvRows {
    reader: csv::Reader<LimitedText>,
    /// Records read so far.
    records: usize,
    pub(super) header: Arc<CsvHeader>,
}

/// Stands behind the text: a record of its own, unless the file ends within quotes.
const END: &[u8] = b"\n\0end\n";

/// A missing quote would take the rest of the file into one field: reading fails where a record gets too long.
#[derive(Debug)]
struct LimitedText {
    text: UnpackedText,
    /// Bytes that may still be read for this record.
    room: usize,
    /// What is still to be read of [`END`].
    end: &'static [u8],
}

impl Read for LimitedText {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.room == 0 {
            return Err(io::Error::other(RowProblem::LongRecord));
        }
        let read = match self.text.read(bytes)? {
            0 => self.end.read(bytes)?,
            read => read,
        };
        self.room = self.room.saturating_sub(read);
        Ok(read)
    }
}

impl CsvRows {
    pub(super) fn open(
        text: UnpackedText,
        delimiter: u8,
        path: &Path,
        names: Option<&ColumnNames>,
    ) -> Result<Self, DataError> {
        let text = LimitedText { text, room: ROW_BYTES, end: END };
        let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(text);
        let header = match reader.byte_headers() {
            Ok(header) if is_end(header) => csv::ByteRecord::new(),
            Ok(header) if !is_cut_off(header) => header.clone(),
            Ok(_) => return Err(RowLocation::file(path).error(cut_off()).into()),
            Err(error) => return Err(unread(error, &reader.get_ref().text, RowLocation::file(path))),
        };
        let header = CsvHeader::of(&header, names).map_err(|problem| RowLocation::file(path).error(problem))?;
        Ok(Self { reader, records: 0, header: Arc::new(header) })
    }

    /// Bytes of the file read so far.
    pub(super) fn count(&self) -> u64 {
        self.reader.get_ref().text.count()
    }

    /// The next record; `None` at the end.
    pub(super) fn next(&mut self, path: &Path) -> Result<Option<CsvRecord>, DataError> {
        self.reader.get_mut().room = ROW_BYTES;
        let mut fields = csv::ByteRecord::new();
        self.records += 1;
        match self.reader.read_byte_record(&mut fields) {
            Ok(true) if is_end(&fields) => Ok(None),
            Ok(true) if is_cut_off(&fields) => Err(RowLocation::row(path, self.records).error(cut_off()).into()),
            Ok(true) => Ok(Some(CsvRecord { number: self.records, fields })),
            Ok(false) => Ok(None),
            Err(error) => Err(unread(error, &self.reader.get_ref().text, RowLocation::row(path, self.records))),
        }
    }
}

fn is_end(record: &csv::ByteRecord) -> bool {
    record.len() == 1 && record[0] == *END.trim_ascii()
}

fn is_cut_off(record: &csv::ByteRecord) -> bool {
    record.iter().next_back().is_some_and(|field| field.ends_with(END))
}

fn cut_off() -> RowProblem {
    RowProblem::BrokenCsv("the file ends within a field in quotes; is it cut off?".into())
}

/// What reading a record failed with.
fn unread(error: csv::Error, text: &UnpackedText, place: RowLocation) -> DataError {
    match error.into_kind() {
        csv::ErrorKind::Io(source) if source.get_ref().is_some_and(|inner| inner.is::<RowProblem>()) => {
            place.error(RowProblem::LongRecord).into()
        }
        csv::ErrorKind::Io(source) => text.failed(source).into(),
        other => place.error(RowProblem::BrokenCsv(format!("{other:?}"))).into(),
    }
}

impl CsvHeader {
    fn of(header: &csv::ByteRecord, names: Option<&ColumnNames>) -> Result<Self, RowProblem> {
        let name =
            |name| str::from_utf8(name).map(|name: &str| name.trim().to_owned()).map_err(|_| RowProblem::NotUtf8);
        let header: Vec<String> = header.iter().map(name).collect::<Result<_, _>>()?;
        let fields: Vec<Field> = header.iter().map(|name| Field::new(name, DataType::Utf8, true)).collect();
        let wanted = FileColumns::of(&Schema::new(fields), names)?.wanted;
        let is_twice = |&&at: &&usize| header.iter().filter(|name| **name == header[at]).count() > 1;
        if let Some(&twice) = wanted.iter().find(is_twice) {
            return Err(RowProblem::BrokenCsv(format!("two columns are named {:?}", header[twice])));
        }
        Ok(Self { names: header, wanted })
    }

    /// A record's row. An empty cell counts as missing where the other cells are a row without it: nothing in CSV is null.
    pub(super) fn row(
        &self,
        record: &CsvRecord,
        names: Option<&ColumnNames>,
    ) -> Result<(RawRow, Vec<OtherKey>), RowProblem> {
        let fields = &record.fields;
        if fields.len() != self.names.len() {
            return Err(RowProblem::FieldCount { expected: self.names.len(), got: fields.len() });
        }
        let cell = |&at: &usize| {
            let text = str::from_utf8(&fields[at]).map_err(|_| RowProblem::NotUtf8)?;
            Ok((self.names[at].clone(), Value::from(text)))
        };
        let all = self.wanted.iter().map(cell).collect::<Result<Map<_, _>, RowProblem>>()?;
        let filled: Map<String, Value> = all.clone().into_iter().filter(|(_, cell)| cell != "").collect();
        let is_whole = filled.len() == all.len();
        let read = |cells| RowObject::of(cells, names).and_then(RowObject::row);
        let (row, mut others) = match read(filled) {
            Err(_) if !is_whole => read(all)?,
            filled => filled?,
        };
        let is_other = |at: &usize| !self.wanted.contains(at) && !fields[*at].is_empty();
        others.extend((0..fields.len()).filter(is_other).map(|at| row_keys::other_column(&self.names[at])));
        Ok((row, others))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::opened::Opened;

    type NumberedRow = (usize, Result<RawRow, String>);

    fn rows(name: &str, text: &[u8], names: Option<&str>) -> Result<Vec<NumberedRow>, String> {
        let names: Option<ColumnNames> = names.map(|names| names.parse().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        crate::files::write_atomic(&path, |out| io::Write::write_all(out, text)).unwrap();
        let Ok(Opened::Csv { text, delimiter }) = Opened::open(&path) else { panic!("no CSV") };
        let shown = |error: DataError| error.to_string().replace(&path.display().to_string(), "FILE");
        let mut rows = CsvRows::open(text, delimiter, &path, names.as_ref()).map_err(shown)?;
        let mut found = Vec::new();
        while let Some(record) = rows.next(&path).map_err(shown)? {
            let row =
                rows.header.row(&record, names.as_ref()).map(|(row, _)| row).map_err(|problem| problem.to_string());
            found.push((record.number, row));
        }
        Ok(found)
    }

    fn pair(prompt: &str, completion: &str) -> RawRow {
        RawRow::Pair { prompt: prompt.to_owned(), completion: completion.to_owned() }
    }

    #[test]
    fn a_record_is_a_row_of_the_columns_that_are_named() {
        let text = "\u{feff}id,prompt,completion\r\n1,\"a, \"\"b\"\"\nc\",d\r\n\r\n2,,e\n";
        let read = rows("pairs.csv", text.as_bytes(), None).unwrap();
        assert_eq!(read, [(1, Ok(pair("a, \"b\"\nc", "d"))), (2, Ok(pair("", "e")))]);
        let named =
            rows("pairs.tsv", b"question\tanswer\nq, 1\ta\n", Some("prompt=question,completion=answer")).unwrap();
        assert_eq!(named, [(1, Ok(pair("q, 1", "a")))]);
        let text = rows("texts.csv", b"text,labels\nhi,joy\n", None).unwrap();
        assert_eq!(text, [(1, Ok(RawRow::Text("hi".to_owned())))]);
    }

    #[test]
    fn an_empty_cell_leaves_the_row_to_the_other_cells() {
        let read = rows("rows.csv", b"instruction,output,text\n,,a\nb,,c\n,,\n", None).unwrap();
        let text_row = |text: &str| Ok(RawRow::Text(text.to_owned()));
        assert_eq!(read[..2], [(1, text_row("a")), (2, text_row("c"))]);
        assert!(matches!(&read[2], (3, Ok(RawRow::Conversation { key: "instruction", .. }))), "{:?}", read[2]);
        let blank = rows("texts.csv", b"text\na\n\n\"\"\nb\n", None).unwrap();
        assert_eq!(blank, [(1, text_row("a")), (2, text_row("")), (3, text_row("b"))], "a blank line is no record");
    }

    #[test]
    fn a_record_beyond_the_limit_is_reported_with_both_causes() {
        let mut text = b"text\na\n\"".to_vec();
        text.resize(ROW_BYTES + (1 << 20), b'x');
        let error = rows("texts.csv", &text, None).unwrap_err();
        assert_eq!(
            error,
            "FILE, row 2: this record is longer than 100 MiB, the most that a row may have; it may begin with a quote that is never closed"
        );
    }

    #[test]
    fn a_file_that_ends_within_quotes_is_cut_off() {
        let cut = "not readable as CSV: the file ends within a field in quotes; is it cut off?";
        for text in ["text\na\n\"b", "text\na\n\"b\n", "text\na\n\"b\"\"", "text\na\n\"", "text,id\na,1\nb,\"c,d\n"] {
            assert_eq!(
                rows("texts.csv", text.as_bytes(), None).unwrap_err(),
                format!("FILE, row 2: {cut}"),
                "{text:?}"
            );
        }
        assert_eq!(rows("texts.csv", b"\"text", None).unwrap_err(), format!("FILE: {cut}"));
        let whole = [(1, Ok(RawRow::Text("b\n".to_owned())))];
        assert_eq!(rows("texts.csv", b"text\n\"b\n\"", None).unwrap(), whole);
        assert_eq!(rows("texts.csv", b"text\r\n\"b\n\"\r\n\r\n", None).unwrap(), whole);
        let inches = [(1, Ok(RawRow::Text("5\" disk".to_owned())))];
        assert_eq!(rows("texts.csv", b"text\n5\" disk", None).unwrap(), inches);
        assert_eq!(rows("texts.csv", b"text", None).unwrap(), []);
        assert!(rows("texts.csv", b"", None).is_err());
    }

    #[test]
    fn a_complaint_names_the_row_or_the_column() {
        let read = rows("texts.csv", b"text,id\na,1,2\n\xff,1\nb,3\n", None).unwrap();
        let expected = "this record has 3 fields, the header 2; a field";
        assert!(read[0].0 == 1 && read[0].1.as_ref().is_err_and(|error| error.starts_with(expected)), "{read:?}");
        assert_eq!(
            (read[1].0, read[1].1.clone().unwrap_err()),
            (2, "not UTF-8 text; convert the file to UTF-8".to_owned())
        );
        assert!(read[2].1.is_ok());
        let error = rows("texts.csv", b"question,answer\na,b\n", None).unwrap_err();
        assert!(error.starts_with("FILE: expected a key") && error.contains("\"question\", \"answer\""), "{error}");
        let error = rows("texts.csv", b"text,caf\xe9\na,b\n", None).unwrap_err();
        assert_eq!(error, "FILE: not UTF-8 text; convert the file to UTF-8");
        let error = rows("texts.csv", b"text,text\na,b\n", None).unwrap_err();
        assert_eq!(error, "FILE: not readable as CSV: two columns are named \"text\"");
        let error = rows("texts.csv", b"input_ids\n1\n", None).unwrap_err();
        assert!(error.contains("input_ids: expected a column of integer lists, got a column of Utf8"), "{error}");
    }
}
