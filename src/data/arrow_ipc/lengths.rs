//! What compressed buffers of Arrow files say of their length. Arrow's reader reserves as much before it looks at what is there, and memory that
//! is not there ends the process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use arrow::error::ArrowError;
use arrow::ipc::reader::read_footer_length;
use arrow::ipc::{root_as_footer, root_as_message};

/// Bytes of a buffer, or rows of a batch, as far as 32-bit offsets reach.
const LARGEST: i64 = i32::MAX as i64;
/// The footer's length and the magic word at a file's end.
const TRAILER: u64 = 10;
/// The first bytes of a message, before its length.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// The length that a compressed buffer begins with.
const PREFIX: usize = 8;

/// Checks all batches of a file with a footer. A message that cannot be read in its place is refused here: Arrow's reader takes the body's bytes
/// for a part of it. What else is wrong with the file, that reader says.
pub(super) fn check_file(file: &File) -> Result<(), ArrowError> {
    let size = file.metadata()?.len();
    let Some(trailer_at) = size.checked_sub(TRAILER) else { return Ok(()) };
    let trailer: [u8; TRAILER as usize] = bytes_at(file, size, trailer_at, TRAILER)?.try_into().unwrap_or_default();
    let Ok(length) = read_footer_length(trailer) else { return Ok(()) };
    let Some(footer_at) = trailer_at.checked_sub(length as u64) else { return Ok(()) };
    let footer = bytes_at(file, size, footer_at, length as u64)?;
    let Ok(footer) = root_as_footer(&footer) else { return Ok(()) };
    let blocks = footer.dictionaries().into_iter().flatten().chain(footer.recordBatches().into_iter().flatten());
    for block in blocks {
        if let (Ok(at), Ok(metadata)) = (u64::try_from(block.offset()), u64::try_from(block.metaDataLength())) {
            check_message(file, size, [at, metadata])?;
        }
    }
    Ok(())
}

/// As [`check_file`], of a stream.
pub(super) fn check_stream(file: &File) -> Result<(), ArrowError> {
    let (size, mut at) = (file.metadata()?.len(), 0);
    while let Ok([marker, length]) = bytes_at(file, size, at, 8).map(|bytes| {
        let (words, _) = bytes.as_chunks::<4>();
        [words[0], words[1]]
    }) {
        // Messages of early versions begin with their length.
        let (start, length) = if marker == CONTINUATION { (8, length) } else { (4, marker) };
        let metadata = start + u64::from(u32::from_le_bytes(length));
        if metadata == start {
            break; // the end
        }
        let body = check_message(file, size, [at, metadata])?;
        at = at.saturating_add(metadata).saturating_add(body);
    }
    Ok(())
}

/// Checks the batch in the message at `at`, of which so many bytes are before the body; the length of its body.
fn check_message(file: &File, size: u64, [at, metadata]: [u64; 2]) -> Result<u64, ArrowError> {
    let broken = |why: &str| ArrowError::IpcError(format!("the message at byte {at} {why}"));
    let bytes = bytes_at(file, size, at, metadata).map_err(|_| broken("reaches beyond the file"))?;
    let start = if bytes.starts_with(&CONTINUATION) { 8 } else { 4 };
    let message = bytes.get(start..).and_then(|bytes| root_as_message(bytes).ok());
    let message = message.ok_or_else(|| broken("cannot be read"))?;
    let dictionary = message.header_as_dictionary_batch().and_then(|dictionary| dictionary.data());
    let batch = message.header_as_record_batch().or(dictionary);
    let nodes = batch.and_then(|batch| batch.nodes()).into_iter().flatten().map(|node| node.length());
    if let Some(rows) = nodes.chain(batch.map(|batch| batch.length())).find(|rows| *rows > LARGEST) {
        return Err(ArrowError::IpcError(format!(
            "expected a batch of at most {LARGEST} rows, got one that says {rows}"
        )));
    }
    for buffer in
        batch.filter(|batch| batch.compression().is_some()).and_then(|batch| batch.buffers()).into_iter().flatten()
    {
        let place = u64::try_from(buffer.offset()).ok().and_then(|offset| (at + metadata).checked_add(offset));
        let Some(place) = place.filter(|_| buffer.length() >= PREFIX as i64) else { continue };
        let Ok(prefix) = bytes_at(file, size, place, PREFIX as u64) else { continue };
        let says = prefix.try_into().map_or(0, i64::from_le_bytes);
        if says > LARGEST {
            let expected = format!("expected a compressed buffer of at most {LARGEST} bytes, got one that says {says}");
            return Err(ArrowError::IpcError(expected));
        }
    }
    u64::try_from(message.bodyLength()).map_err(|_| broken("has a body of less than nothing"))
}

fn bytes_at(file: &File, size: u64, at: u64, length: u64) -> io::Result<Vec<u8>> {
    if at.checked_add(length).is_none_or(|end| end > size) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}
