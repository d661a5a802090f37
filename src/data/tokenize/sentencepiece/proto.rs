//! The protobuf message of a SentencePiece `tokenizer.model`: the fields that decide ids, by the numbers of
//! `sentencepiece_model.proto`. Fields that only training uses are skipped.

use protobuf::CodedInputStream;
use protobuf::rt::WireType::{self, Fixed32, LengthDelimited, Varint};
use protobuf::rt::skip_field_for_tag;

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
    Normal = 1,
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
    pub(super) fn parse(bytes: &[u8]) -> protobuf::Result<Self> {
        let mut model = Self::default();
        let mut stream = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = stream.read_raw_tag_or_eof()? {
            match (tag >> 3, WireType::new(tag & 7)) {
                (1, Some(LengthDelimited)) => model.pieces.push(PieceProto::parse(&stream.read_bytes()?)?),
                (2, Some(LengthDelimited)) => model.trainer.merge(&stream.read_bytes()?)?,
                (3, Some(LengthDelimited)) => model.normalizer.merge(&stream.read_bytes()?)?,
                _ => skip_field_for_tag(tag, &mut stream)?,
            }
        }
        Ok(model)
    }
}

impl PieceProto {
    fn parse(bytes: &[u8]) -> protobuf::Result<Self> {
        let mut piece = Self { text: String::new(), score: 0.0, kind: PieceKind::Normal };
        let mut stream = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = stream.read_raw_tag_or_eof()? {
            match (tag >> 3, WireType::new(tag & 7)) {
                (1, Some(LengthDelimited)) => piece.text = stream.read_string()?,
                (2, Some(Fixed32)) => piece.score = stream.read_float()?,
                (3, Some(Varint)) => piece.kind = PieceKind::of(stream.read_int32()?),
                _ => skip_field_for_tag(tag, &mut stream)?,
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
    fn merge(&mut self, bytes: &[u8]) -> protobuf::Result<()> {
        let mut stream = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = stream.read_raw_tag_or_eof()? {
            match (tag >> 3, WireType::new(tag & 7)) {
                (3, Some(Varint)) => self.model_type = stream.read_int32()?,
                (24, Some(Varint)) => self.treat_whitespace_as_suffix = stream.read_bool()?,
                (35, Some(Varint)) => self.byte_fallback = stream.read_bool()?,
                (46, Some(LengthDelimited)) => self.bos_piece = stream.read_string()?,
                (47, Some(LengthDelimited)) => self.eos_piece = stream.read_string()?,
                _ => skip_field_for_tag(tag, &mut stream)?,
            }
        }
        Ok(())
    }
}

impl NormalizerSpec {
    /// A message that comes in parts is the sum of them.
    fn merge(&mut self, bytes: &[u8]) -> protobuf::Result<()> {
        let mut stream = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = stream.read_raw_tag_or_eof()? {
            match (tag >> 3, WireType::new(tag & 7)) {
                (2, Some(LengthDelimited)) => self.precompiled_charsmap = stream.read_bytes()?,
                (3, Some(Varint)) => self.add_dummy_prefix = stream.read_bool()?,
                (4, Some(Varint)) => self.remove_extra_whitespaces = stream.read_bool()?,
                (5, Some(Varint)) => self.escape_whitespaces = stream.read_bool()?,
                _ => skip_field_for_tag(tag, &mut stream)?,
            }
        }
        Ok(())
    }
}
