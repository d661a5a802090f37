//! What can be wrong with a SentencePiece model.

/// What is wrong with a tokenizer.model.
#[derive(Debug, thiserror::Error)]
pub enum SentencePieceError {
    #[error("it is neither a SentencePiece model (protobuf) nor a tiktoken vocabulary (lines of base64 and a rank)")]
    NoProtobuf(#[source] protobuf::Error),
    #[error(
        "it is neither a SentencePiece model (it has no pieces) nor a tiktoken vocabulary (lines of base64 and a rank)"
    )]
    NoPieces,
    #[error("trainer_spec.model_type: expected 1 (unigram) or 2 (BPE), got {number} ({name})")]
    Algorithm { number: i32, name: &'static str },
    #[error("piece {id} is empty")]
    EmptyPiece { id: u32 },
    #[error("piece {piece:?} has two ids, {first} and {second}")]
    Twice { piece: String, first: u32, second: u32 },
    #[error("expected one piece of the type UNKNOWN, got {got}")]
    Unknown { got: usize },
    #[error("trainer_spec.byte_fallback is true, but there is no piece {piece}")]
    NoByte { piece: String },
    #[error("normalizer_spec.precompiled_charsmap is broken ({bytes} bytes)")]
    Charsmap { bytes: usize },
}
