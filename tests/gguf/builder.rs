//! Writes GGUF files for tests, true ones and damaged ones, without the program's own code.

use std::path::{Path, PathBuf};

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A value of the metadata, with its type.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    /// Type and bytes, whatever they are.
    Raw(u32, Vec<u8>),
}

/// A tensor: slowest axis first.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) kind: u32,
    /// Where it begins, instead of behind the one before.
    pub(crate) offset: Option<u64>,
    pub(crate) data: Vec<u8>,
}

/// What will be written.
#[derive(Clone, Debug)]
pub(crate) struct GgufBuilder {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) metadata: Vec<(String, Meta)>,
    pub(crate) tensors: Vec<Stored>,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        Self { magic: *b"GGUF", version: 3, metadata: vec![], tensors: vec![] }
    }
}

/// Of the data of tensors.
const ALIGNMENT: usize = 32;

/// Numbers and bytes of a block, and the type's id.
fn layout(kind: &str) -> (u32, usize, usize) {
    match kind {
        "F32" => (0, 1, 4),
        "F16" => (1, 1, 2),
        "BF16" => (30, 1, 2),
        "Q4_0" => (2, 32, 18),
        "Q4_1" => (3, 32, 20),
        "Q5_0" => (6, 32, 22),
        "Q5_1" => (7, 32, 24),
        "Q8_0" => (8, 32, 34),
        "IQ4_NL" => (20, 32, 18),
        "Q4_K" => (12, 256, 144),
        "Q5_K" => (13, 256, 176),
        "Q6_K" => (14, 256, 210),
        other => panic!("{other}"),
    }
}

impl GgufBuilder {
    pub(crate) fn set(&mut self, key: &str, value: Meta) {
        match self.metadata.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.metadata.retain(|(known, _)| known != key);
    }

    /// A tensor of small random numbers.
    pub(crate) fn random(&mut self, name: &str, shape: &[usize], kind: &str) {
        let (id, numbers, bytes) = layout(kind);
        let blocks = shape.iter().product::<usize>() / numbers;
        let mut rng = ChaCha8Rng::seed_from_u64(self.tensors.len() as u64);
        let mut data = vec![0; blocks * bytes];
        rng.fill_bytes(&mut data);
        for block in data.chunks_mut(bytes) {
            match kind {
                "F32" => block.copy_from_slice(&(f32::from(block[0]) / 256.0).to_le_bytes()),
                "BF16" => block[1] = 0x3d | (block[1] & 0x80),
                "F16" => block[1] = 0x2c | (block[1] & 0x80),
                "Q4_1" | "Q5_1" => [block[1], block[3]] = [0x20, 0xa0],
                "Q4_K" | "Q5_K" => [block[1], block[3]] = [0x04, 0x04],
                "Q6_K" => block[209] = 0x01,
                _ => block[1] = 0x20,
            }
        }
        let shape = shape.iter().map(|&length| length as u64).collect();
        self.tensors.push(Stored { name: name.into(), shape, kind: id, offset: None, data });
    }

    /// The file up to its data.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = [&self.magic[..], &self.version.to_le_bytes()].concat();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            meta(&mut out, value);
        }
        let mut at = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|length| out.extend(length.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(at).to_le_bytes());
            at += tensor.data.len().next_multiple_of(ALIGNMENT) as u64;
        }
        out
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.data);
        }
        out
    }

    pub(crate) fn write(&self, path: &Path) -> PathBuf {
        let bytes = self.bytes();
        medusa::files::write_atomic(path, |out| std::io::Write::write_all(out, &bytes)).expect("a file of a test");
        path.to_owned()
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn meta(out: &mut Vec<u8>, value: &Meta) {
    let list = |out: &mut Vec<u8>, kind: u32, count: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    match value {
        Meta::U32(number) => out.extend([4u32.to_le_bytes(), number.to_le_bytes()].concat()),
        Meta::F32(number) => out.extend([6u32.to_le_bytes(), number.to_le_bytes()].concat()),
        Meta::Bool(value) => out.extend([&7u32.to_le_bytes()[..], &[u8::from(*value)]].concat()),
        Meta::Text(value) => {
            out.extend(8u32.to_le_bytes());
            text(out, value);
        }
        Meta::Texts(values) => {
            list(out, 8, values.len());
            values.iter().for_each(|value| text(out, value));
        }
        Meta::I32s(values) => {
            list(out, 5, values.len());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
        Meta::Raw(kind, bytes) => {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
    }
}
