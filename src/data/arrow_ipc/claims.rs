//! The sizes that an Arrow file claims, checked before a reader reserves memory for them: one changed byte can claim exabytes, and memory
//! that cannot be reserved ends the process.
//!
//! The arrow crate bounds what it reads by what the file has (apache/arrow-rs#10521), but not what it unpacks: it reserves what a packed buffer
//! claims (`decompress_lz4` and `decompress_zstd` of arrow-ipc 60.1). So the messages are found here too, and a truncated file is reported.

use std::fs::File;
use std::os::unix::fs::FileExt;

use arrow::error::ArrowError;
use arrow::ipc::{RecordBatch, root_as_footer, root_as_message};

use crate::bounds::{ARROW_BLOCK_BYTES, ARROW_BLOCK_ROWS};
use crate::data::opened::CONTINUATION;

/// The length of the footer, and the magic word behind it.
const END: u64 = 10;

/// Checks the blocks that a file's footer names.
pub(super) fn check_file(file: &File) -> Result<(), ArrowError> {
    let size = file.metadata()?.len();
    let Some(end) = size.checked_sub(END) else { return Ok(()) }; // the reader reports it
    let footer = within(end, "footer", i32::from_le_bytes(array_at(file, end)?))?;
    let bytes = bytes_at(file, end - footer, footer)?;
    let footer = root_as_footer(&bytes).map_err(unreadable)?;
    for block in footer.dictionaries().into_iter().chain(footer.recordBatches()).flatten() {
        let offset = within(size, "block", block.offset())?;
        let header = within(size - offset, "block", block.metaDataLength())?;
        let body_at = offset + header;
        let body = within(size - body_at, "block", block.bodyLength())?;
        let bytes = bytes_at(file, offset, header)?;
        let prefix = if bytes.starts_with(&CONTINUATION) { 8 } else { 4 };
        check_message(file, bytes.get(prefix..).unwrap_or_default(), [body_at, body])?;
    }
    Ok(())
}

/// Checks one message of a stream after the other.
pub(super) fn check_stream(file: &File) -> Result<(), ArrowError> {
    let (size, mut at) = (file.metadata()?.len(), 0);
    while at + 4 <= size {
        let mut word: [u8; 4] = array_at(file, at)?;
        at += 4;
        if word == CONTINUATION && at + 4 <= size {
            word = array_at(file, at)?;
            at += 4;
        }
        let header = within(size - at, "header", i32::from_le_bytes(word))?;
        if header == 0 {
            break; // the end, as streams mark it
        }
        let bytes = bytes_at(file, at, header)?;
        at += header;
        let body = within(size - at, "block", root_as_message(&bytes).map_err(unreadable)?.bodyLength())?;
        check_message(file, &bytes, [at, body])?;
        at += body;
    }
    Ok(())
}

/// Checks what the packed buffers of a block say that they unpack to.
fn check_message(file: &File, bytes: &[u8], [body_at, body]: [u64; 2]) -> Result<(), ArrowError> {
    let message = root_as_message(bytes).map_err(unreadable)?;
    let dictionary = || message.header_as_dictionary_batch()?.data();
    let batch: Option<RecordBatch<'_>> = message.header_as_record_batch().or_else(dictionary);
    let rows = batch
        .into_iter()
        .flat_map(|batch| batch.nodes().into_iter().flatten().map(|node| node.length()).chain([batch.length()]));
    if let Some(rows) = rows.into_iter().find(|rows| !(0..=ARROW_BLOCK_ROWS).contains(rows)) {
        return Err(ArrowError::IpcError(format!(
            "a block claims {rows} rows or values; expected 0 to {ARROW_BLOCK_ROWS}"
        )));
    }
    let Some(batch) = batch.filter(|batch| batch.compression().is_some()) else { return Ok(()) };
    let mut unpacked = 0_i64;
    for buffer in batch.buffers().into_iter().flatten().filter(|buffer| buffer.length() >= 8) {
        let at = body_at + within(body.saturating_sub(8), "buffer", buffer.offset())?;
        let claimed = i64::from_le_bytes(array_at(file, at)?);
        if claimed == -1 {
            continue; // it is not packed
        }
        unpacked = unpacked.saturating_add(claimed);
        if claimed < 0 || unpacked > ARROW_BLOCK_BYTES {
            let most = ARROW_BLOCK_BYTES >> 20;
            return Err(ArrowError::IpcError(format!(
                "a block claims to unpack to {claimed} bytes; expected at most {most} MiB, so write smaller blocks"
            )));
        }
    }
    Ok(())
}

/// A length or a place that the file has as many bytes for.
fn within(bytes: u64, what: &str, length: impl Into<i64>) -> Result<u64, ArrowError> {
    let length = length.into();
    let beyond = || ArrowError::IpcError(format!("the file ends before its {what}, whose size or place is {length}"));
    u64::try_from(length).ok().filter(|length| *length <= bytes).ok_or_else(beyond)
}

fn unreadable(error: impl std::fmt::Display) -> ArrowError {
    ArrowError::ParseError(error.to_string())
}

fn array_at<const N: usize>(file: &File, at: u64) -> Result<[u8; N], ArrowError> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// `length` is known to be within the file.
fn bytes_at(file: &File, at: u64, length: u64) -> Result<Vec<u8>, ArrowError> {
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}
