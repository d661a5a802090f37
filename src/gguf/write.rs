//! Writes a GGUF file (version 3): a header, then each tensor where the header says.

use std::io::{self, Write};

use super::metadata::MetaValue;
use super::types::TensorType;

const VERSION: u32 = 3;
/// Tensors begin at multiples of it: the default of `general.alignment`.
const ALIGNMENT: u64 = 32;
/// The numbers of value types in the file.
const UINT32: u32 = 4;
const INT32: u32 = 5;
const FLOAT32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A tensor that will be written.
#[derive(Debug, Clone)]
pub struct PlannedTensor {
    pub name: String,
    /// Slowest axis first, as in torch. A row of the last axis holds whole blocks.
    pub shape: Vec<i64>,
    pub kind: &'static TensorType,
}

impl PlannedTensor {
    fn bytes(&self) -> u64 {
        let numbers: i64 = self.shape.iter().product();
        numbers as u64 / self.kind.numbers as u64 * self.kind.bytes as u64
    }
}

/// Writes the file. Numbers are written as llama.cpp reads them: whole ones in 32 bits without a sign, in arrays with one, others in float32.
/// `fill` writes the blocks of a tensor, by its place in `tensors`.
///
/// # Errors
/// The file cannot be written, or a number that does not fit.
pub fn write<W: Write>(
    out: &mut W,
    metadata: &[(String, MetaValue)],
    tensors: &[PlannedTensor],
    fill: &mut dyn FnMut(usize, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut header = b"GGUF".to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        push_text(&mut header, key);
        push_value(&mut header, value).map_err(|why| io::Error::other(format!("{key}: {why}")))?;
    }
    let mut start = 0;
    for tensor in tensors {
        push_entry(&mut header, tensor, start);
        start = (start + tensor.bytes()).next_multiple_of(ALIGNMENT);
    }
    out.write_all(&header)?;
    pad(out, header.len() as u64)?;
    for (at, tensor) in tensors.iter().enumerate() {
        fill(at, out)?;
        pad(out, tensor.bytes())?;
    }
    Ok(())
}

fn pad<W: Write>(out: &mut W, written: u64) -> io::Result<()> {
    let zeros = written.next_multiple_of(ALIGNMENT) - written;
    out.write_all(&[0; ALIGNMENT as usize][..zeros as usize])
}

fn push_text(header: &mut Vec<u8>, text: &str) {
    header.extend((text.len() as u64).to_le_bytes());
    header.extend(text.as_bytes());
}

fn push_entry(header: &mut Vec<u8>, tensor: &PlannedTensor, start: u64) {
    push_text(header, &tensor.name);
    header.extend((tensor.shape.len() as u32).to_le_bytes());
    tensor.shape.iter().rev().for_each(|size| header.extend((*size as u64).to_le_bytes()));
    header.extend(tensor.kind.id().to_le_bytes());
    header.extend(start.to_le_bytes());
}

fn push_value(header: &mut Vec<u8>, value: &MetaValue) -> Result<(), String> {
    let MetaValue::List(values) = value else {
        header.extend(kind_of(value, UINT32).to_le_bytes());
        return push_scalar(header, value, UINT32);
    };
    header.extend(ARRAY.to_le_bytes());
    header.extend(values.first().map_or(STRING, |first| kind_of(first, INT32)).to_le_bytes());
    header.extend((values.len() as u64).to_le_bytes());
    values.iter().try_for_each(|value| push_scalar(header, value, INT32))
}

/// `integer` is the type of whole numbers.
fn kind_of(value: &MetaValue, integer: u32) -> u32 {
    match value {
        MetaValue::Integer(_) => integer,
        MetaValue::Float(_) => FLOAT32,
        MetaValue::Bool(_) => BOOL,
        MetaValue::Text(_) => STRING,
        MetaValue::List(_) => ARRAY,
    }
}

fn push_scalar(header: &mut Vec<u8>, value: &MetaValue, integer: u32) -> Result<(), String> {
    let too_large = |_| format!("{value} does not fit into 32 bits");
    match value {
        MetaValue::Integer(number) if integer == UINT32 => {
            header.extend(u32::try_from(*number).map_err(too_large)?.to_le_bytes());
        }
        MetaValue::Integer(number) => header.extend(i32::try_from(*number).map_err(too_large)?.to_le_bytes()),
        #[expect(clippy::cast_possible_truncation, reason = "as llama.cpp reads it")]
        MetaValue::Float(number) => header.extend((*number as f32).to_le_bytes()),
        MetaValue::Bool(is_set) => header.push(u8::from(*is_set)),
        MetaValue::Text(text) => push_text(header, text),
        MetaValue::List(_) => return Err("an array of arrays".into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::header::Header;
    use super::super::types::TensorType;
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let text = |text: &str| MetaValue::Text(text.into());
        let metadata = [
            ("general.architecture".to_owned(), text("llama")),
            ("llama.block_count".to_owned(), MetaValue::Integer(30)),
            ("llama.rope.freq_base".to_owned(), MetaValue::Float(0.5)),
            ("tokenizer.ggml.add_bos_token".to_owned(), MetaValue::Bool(true)),
            ("tokenizer.ggml.tokens".to_owned(), MetaValue::List(vec![text("a"), text("bc")])),
            ("tokenizer.ggml.token_type".to_owned(), MetaValue::List(vec![MetaValue::Integer(-1)])),
        ];
        let [f32, q8_0] = ["F32", "Q8_0"].map(|name| TensorType::named(name).unwrap());
        let planned = |name: &str, shape: &[i64], kind| PlannedTensor { name: name.into(), shape: shape.into(), kind };
        let tensors = [planned("one", &[3], f32), planned("two", &[2, 32], q8_0)];
        let mut file = vec![];
        write(&mut file, &metadata, &tensors, &mut |at, out| out.write_all(&vec![7; [12, 68][at]])).unwrap();
        assert_eq!(file.len() % 32, 0);
        let header = Header::read(file.as_slice(), file.len() as u64).unwrap();
        let read: Vec<_> = header.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
        let mut sorted = metadata.to_vec();
        sorted.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(read, sorted);
        for tensor in &tensors {
            let entry = &header.tensors[&tensor.name];
            assert_eq!((&entry.shape, entry.kind, entry.bytes), (&tensor.shape, tensor.kind, tensor.bytes()));
            let data = &file[entry.start as usize..(entry.start + entry.bytes) as usize];
            assert!(data.iter().all(|byte| *byte == 7), "{}", tensor.name);
        }
    }

    #[test]
    fn a_number_that_does_not_fit_names_its_key() {
        let metadata = [("llama.block_count".to_owned(), MetaValue::Integer(-1))];
        let error = write(&mut vec![], &metadata, &[], &mut |_, _| Ok(())).unwrap_err().to_string();
        assert_eq!(error, "llama.block_count: -1 does not fit into 32 bits");
    }
}
