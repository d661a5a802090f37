//! The sizes that an Arrow file claims, checked before a reader reserves memory for them: one changed byte can claim exabytes, and memory
//! that cannot be reserved ends the process.

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
    let Some(end) = size.checked_sub(END) else { return Ok(()) }; // the reader tells it
    let length = i32::from_le_bytes(array_at(file, end)?);
    let footer = u64::try_from(length).ok().filter(|length| *length <= end).ok_or_else(|| beyond("footer", length))?;
    let bytes = bytes_at(file, end - footer, footer)?;
    let footer = root_as_footer(&bytes).map_err(|error| ArrowError::ParseError(error.to_string()))?;
    let blocks = footer.dictionaries().into_iter().chain(footer.recordBatches());
    for block in blocks.flatten() {
        let sizes = [block.offset(), i64::from(block.metaDataLength()), block.bodyLength()];
        let [offset, header, body] = sizes.map(|size| u64::try_from(size).unwrap_or(u64::MAX));
        let body_at = offset.checked_add(header).filter(|at| at.checked_add(body).is_some_and(|end| end <= size));
        let body_at = body_at.ok_or_else(|| beyond("block", format!("{sizes:?}")))?;
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
        let length = i32::from_le_bytes(word);
        let header = u64::try_from(length).ok().filter(|length| *length <= size - at);
        let header = header.ok_or_else(|| beyond("header", length))?;
        if header == 0 {
            break; // the end, as streams mark it
        }
        let bytes = bytes_at(file, at, header)?;
        at += header;
        let message = root_as_message(&bytes).map_err(|error| ArrowError::ParseError(error.to_string()))?;
        let body = u64::try_from(message.bodyLength()).ok().filter(|length| *length <= size - at);
        let body = body.ok_or_else(|| beyond("block", message.bodyLength()))?;
        check_message(file, &bytes, [at, body])?;
        at += body;
    }
    Ok(())
}

/// Checks what the packed buffers of a block say that they unpack to.
fn check_message(file: &File, bytes: &[u8], [body_at, body]: [u64; 2]) -> Result<(), ArrowError> {
    let message = root_as_message(bytes).map_err(|error| ArrowError::ParseError(error.to_string()))?;
    let of_dictionary = || message.header_as_dictionary_batch()?.data();
    let batch: Option<RecordBatch<'_>> = message.header_as_record_batch().or_else(of_dictionary);
    let rows = batch
        .into_iter()
        .flat_map(|batch| batch.nodes().into_iter().flatten().map(|node| node.length()).chain([batch.length()]));
    if let Some(rows) = rows.into_iter().find(|rows| !(0..=ARROW_BLOCK_ROWS).contains(rows)) {
        return Err(ArrowError::IpcError(format!(
            "a block claims {rows} rows or values; expected 0 to {ARROW_BLOCK_ROWS}"
        )));
    }
    let Some(batch) = batch.filter(|batch| batch.compression().is_some()) else { return Ok(()) };
    let mut unpacked = 0;
    for buffer in batch.buffers().into_iter().flatten().filter(|buffer| buffer.length() >= 8) {
        let at = u64::try_from(buffer.offset()).ok().filter(|at| at.checked_add(8).is_some_and(|end| end <= body));
        let at = at.ok_or_else(|| beyond("buffer", buffer.offset()))?;
        unpacked = match i64::from_le_bytes(array_at(file, body_at + at)?) {
            -1 => unpacked, // it is not packed
            claimed => {
                let sum =
                    Some(claimed).filter(|claimed| *claimed >= 0).and_then(|claimed| claimed.checked_add(unpacked));
                sum.filter(|sum| *sum <= ARROW_BLOCK_BYTES).ok_or_else(|| {
                    let most = ARROW_BLOCK_BYTES >> 20;
                    ArrowError::IpcError(format!(
                        "a block claims to unpack to {claimed} bytes; expected at most {most} MiB, so write smaller blocks"
                    ))
                })?
            }
        };
    }
    Ok(())
}

fn beyond(what: &str, got: impl std::fmt::Display) -> ArrowError {
    ArrowError::IpcError(format!("the file ends before its {what}, whose size and place are {got}"))
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
