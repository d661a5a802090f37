//! The protobuf message of a SentencePiece `tokenizer.model`: the fields that decide ids, by the numbers of
//! `sentencepiece_model.proto`. Fields that only training uses are skipped.

use protobuf::wire_format::WireType::{WireTypeFixed32, WireTypeLengthDelimited, WireTypeVarint};
use protobuf::{CodedInputStream, ProtobufResult};

/// `ModelProto`.
#[derive(Debug, Default)]
pub(super) struct ModelProto {
    pub(super) pieces: Vec<PieceProto>,
    pub(super) trainer: TrainerSpec,
    pub(super) normalizer: NormalizerSpec,
}

/// `ModelProto.SentencePiece`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PieceProto {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// `ModelProto.SentencePiece.Type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// `TrainerSpec`.
#[derive(Debug)]
pub(super) struct TrainerSpec {
    /// 1 unigram, 2 BPE, 3 word, 4 char.
    pub(super) model_type: i32,
    pub(super) treat_whitespace_as_suffix: bool,
    pub(super) byte_fallback: bool,
    pub(super) bos_piece: String,
    pub(super) eos_piece: String,
}

/// `NormalizerSpec`.
#[derive(Debug)]
pub(super) struct NormalizerSpec {
    pub(super) precompiled_charsmap: Vec<u8>,
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) escape_whitespaces: bool,
}

impl Default for TrainerSpec {
    fn default() -> Self {
        Self {
            model_type: 1,
            treat_whitespace_as_suffix: false,
            byte_fallback: false,
            bos_piece: "<s>".into(),
            eos_piece: "</s>".into(),
        }
    }
}

impl Default for NormalizerSpec {
    fn default() -> Self {
        Self {
            precompiled_charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
        }
    }
}

impl ModelProto {
    /// # Errors
    /// Bytes that are no such message.
    pub(super) fn parse(bytes: &[u8]) -> ProtobufResult<Self> {
        let mut model = Self::default();
        let mut stream = CodedInputStream::from_bytes(bytes);
        while !stream.eof()? {
            match stream.read_tag_unpack()? {
                (1, WireTypeLengthDelimited) => model.pieces.push(PieceProto::parse(&stream.read_bytes()?)?),
                (2, WireTypeLengthDelimited) => model.trainer.merge(&stream.read_bytes()?)?,
                (3, WireTypeLengthDelimited) => model.normalizer.merge(&stream.read_bytes()?)?,
                (_, wire_type) => stream.skip_field(wire_type)?,
            }
        }
        Ok(model)
    }
}

impl PieceProto {
    fn parse(bytes: &[u8]) -> ProtobufResult<Self> {
        let mut piece = Self { text: String::new(), score: 0.0, kind: PieceKind::Normal };
        let mut stream = CodedInputStream::from_bytes(bytes);
        while !stream.eof()? {
            match stream.read_tag_unpack()? {
                (1, WireTypeLengthDelimited) => piece.text = stream.read_string()?,
                (2, WireTypeFixed32) => piece.score = stream.read_float()?,
                (3, WireTypeVarint) => piece.kind = PieceKind::of(stream.read_int32()?),
                (_, wire_type) => stream.skip_field(wire_type)?,
            }
        }
        Ok(piece)
    }
}

impl PieceKind {
    /// As protobuf reads an enum: a number that it does not know is the default.
    fn of(number: i32) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

impl TrainerSpec {
    /// A message that comes in parts is the sum of them.
    fn merge(&mut self, bytes: &[u8]) -> ProtobufResult<()> {
        let mut stream = CodedInputStream::from_bytes(bytes);
        while !stream.eof()? {
            match stream.read_tag_unpack()? {
                (3, WireTypeVarint) => self.model_type = stream.read_int32()?,
                (24, WireTypeVarint) => self.treat_whitespace_as_suffix = stream.read_bool()?,
                (35, WireTypeVarint) => self.byte_fallback = stream.read_bool()?,
                (46, WireTypeLengthDelimited) => self.bos_piece = stream.read_string()?,
                (47, WireTypeLengthDelimited) => self.eos_piece = stream.read_string()?,
                (_, wire_type) => stream.skip_field(wire_type)?,
            }
        }
        Ok(())
    }
}

impl NormalizerSpec {
    /// A message that comes in parts is the sum of them.
    fn merge(&mut self, bytes: &[u8]) -> ProtobufResult<()> {
        let mut stream = CodedInputStream::from_bytes(bytes);
        while !stream.eof()? {
            match stream.read_tag_unpack()? {
                (2, WireTypeLengthDelimited) => self.precompiled_charsmap = stream.read_bytes()?,
                (3, WireTypeVarint) => self.add_dummy_prefix = stream.read_bool()?,
                (4, WireTypeVarint) => self.remove_extra_whitespaces = stream.read_bool()?,
                (5, WireTypeVarint) => self.escape_whitespaces = stream.read_bool()?,
                (_, wire_type) => stream.skip_field(wire_type)?,
            }
        }
        Ok(())
    }
}
