//! TensorBoard's event file: records of protobuf messages (`Event` in TensorFlow's event.proto), each with two checksums.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::CodedOutputStream;
use tensorboard_rs::record_writer::RecordWriter;

use crate::files::{self, FileError, failed, parent, sync_folder};
use crate::formats::metrics::MetricsError;

/// Numbers of the fields that are written.
mod field {
    pub(super) const WALL_TIME: u32 = 1;
    pub(super) const STEP: u32 = 2;
    pub(super) const FILE_VERSION: u32 = 3;
    pub(super) const SUMMARY: u32 = 5;
    pub(super) const SUMMARY_VALUE: u32 = 1;
    pub(super) const TAG: u32 = 1;
    pub(super) const SIMPLE_VALUE: u32 = 2;
}

#[derive(Debug)]
pub(super) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// Creates the only file in `folder` and removes all others.
    pub(super) fn create(folder: &Path) -> Result<Self, MetricsError> {
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(failed("remove", folder))?;
        }
        fs::create_dir_all(folder).map_err(failed("make", folder))?;
        let path = folder.join(format!("events.out.tfevents.{:010.0}.medusa-train", now()));
        let file = File::create(&path).map_err(failed("write", &path))?;
        let mut events = Self { path, file };
        events.write(|event| event.write_string(field::FILE_VERSION, "brain.Event:2"))?;
        let synced = sync_folder(folder).and_then(|()| sync_folder(parent(folder)));
        synced.map_err(failed("make", folder))?;
        Ok(events)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What was appended is on the disk when this returns.
    pub(super) fn sync(&self) -> Result<(), MetricsError> {
        Ok(self.file.sync_data().map_err(failed("write", &self.path))?)
    }

    /// Appends one event with the value of each tag.
    #[expect(clippy::cast_possible_truncation, reason = "TensorBoard keeps float32")]
    pub(super) fn append(&mut self, step: usize, curves: &[(String, f64)]) -> Result<(), MetricsError> {
        self.write(|event| {
            event.write_int64(field::STEP, step as i64)?;
            let summary = message(|summary| {
                curves.iter().try_for_each(|(tag, value)| {
                    let scalar = message(|scalar| {
                        scalar.write_string(field::TAG, tag)?;
                        scalar.write_float(field::SIMPLE_VALUE, *value as f32)
                    })?;
                    summary.write_bytes(field::SUMMARY_VALUE, &scalar)
                })
            })?;
            event.write_bytes(field::SUMMARY, &summary)
        })
    }

    fn write(
        &mut self,
        content: impl FnOnce(&mut CodedOutputStream<'_>) -> protobuf::Result<()>,
    ) -> Result<(), MetricsError> {
        let event = message(|event| {
            event.write_double(field::WALL_TIME, now())?;
            content(event)
        });
        let written = event.map_err(io::Error::from).and_then(|event| self.file.write_all(&record(&event)));
        Ok(written.map_err(failed("write", &self.path))?)
    }
}

fn message(content: impl FnOnce(&mut CodedOutputStream<'_>) -> protobuf::Result<()>) -> protobuf::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut stream = CodedOutputStream::vec(&mut bytes);
    content(&mut stream)?;
    stream.flush()?;
    drop(stream);
    Ok(bytes)
}

/// A record of a TFRecord file: length, checksum of the length, data, checksum of the data.
fn record(data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(data.len() + 16);
    RecordWriter::new(&mut bytes).write(data).expect("a vector takes all bytes");
    bytes
}

/// Why an event file is not as it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("record {0} is damaged or cut off")]
pub struct DamagedRecord(usize);

/// Compares all records of a file with their checksums.
///
/// # Errors
/// The disk's own; inside, the first damaged record.
pub fn check(path: &Path) -> Result<Result<(), DamagedRecord>, FileError> {
    let bytes = files::read(path).map_err(failed("read", path))?;
    let (mut rest, mut number) = (bytes.as_slice(), 0);
    while !rest.is_empty() {
        number += 1;
        let Some(size) = whole_record(rest) else { return Ok(Err(DamagedRecord(number))) };
        rest = &rest[size..];
    }
    Ok(Ok(()))
}

/// The size of the first record, if it is whole.
fn whole_record(bytes: &[u8]) -> Option<usize> {
    let length = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
    let size = length.checked_add(16)?;
    let data = bytes.get(12..size.checked_sub(4)?)?;
    (bytes.get(..size)? == record(data)).then_some(size)
}

/// Seconds since 1970, the unit of event times.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_of_an_event_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(&dir.path().join("events")).unwrap();
        events.append(1, &[("loss".to_owned(), 2.5)]).unwrap();
        assert_eq!(check(&events.path).unwrap(), Ok(()));
        let whole = fs::read(&events.path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            crate::files::write_synced(&events.path, |out| out.write_all(&bytes)).unwrap();
            assert!(check(&events.path).unwrap().is_err(), "byte {at}");
        }
    }

    /// By the format: CRC-32C of RFC 3720, rotated and shifted.
    #[test]
    fn a_record_of_known_data() {
        assert_eq!(files::hex(&record(b"abc")), "0300000000000000b099490e6162636e57f121");
    }
}
