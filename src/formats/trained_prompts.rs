//! `prompts.hashes`: which prompts heads were trained on, as 8 bytes each. Measurements on them say too much.
//!
//! A prompt is what [`TokenRow::prompt`](crate::data::rows::TokenRow::prompt) says: tokens, so that rows of every form and prompts that a template rendered agree.
//! A prompt to decode is known again if it begins with a trained one: a template may open thoughts behind it, and later turns may follow.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::FormatError;
use super::run_folder::{PROMPTS, above};
use crate::files::{self, failed};
use crate::plural::counted;

const WHAT: &str = "hashes of the trained prompts";
/// Begins the file.
const MAGIC: &[u8; 16] = b"medusa prompts 1";
const SHA256_BYTES: usize = 32;

/// The prompts of training rows. Two different ones have the same hash with a probability of 2^-64.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrainedPrompts {
    /// Ascending, each once.
    hashes: Vec<u64>,
}

/// Prompts, or rows, on which heads were measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredPrompts {
    pub count: usize,
    /// How many of them the heads were trained on.
    pub trained_on: usize,
}

impl fmt::Display for MeasuredPrompts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} of {}", self.trained_on, counted(self.count, "prompt"))
    }
}

/// The hash of each beginning of a text: of its first token, of its first two, and so on. FNV-1a, since it is the same in every version of this program and needs
/// one step for a byte.
fn hashes_of_beginnings(ids: &[i32]) -> impl Iterator<Item = u64> {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    ids.iter().scan(BASIS, |hash, id| {
        *hash = id.to_le_bytes().iter().fold(*hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME));
        Some(*hash)
    })
}

/// The hash of a whole text; 0 for one without tokens.
pub fn prompt_hash(ids: &[i32]) -> u64 {
    hashes_of_beginnings(ids).last().unwrap_or_default()
}

impl TrainedPrompts {
    /// Those with these [hashes](prompt_hash).
    pub fn of(mut hashes: Vec<u64>) -> Self {
        hashes.sort_unstable();
        hashes.dedup();
        Self { hashes }
    }

    /// Those of heads in a folder, or of the run whose folder that is in. `None` for heads that say nothing of their prompts: of other programs, or of earlier
    /// versions.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn for_heads(folder: &Path) -> Result<Option<Self>, FormatError> {
        let places = [Some(folder.join(PROMPTS)), above(folder).map(|run| run.join(PROMPTS))];
        for path in places.iter().flatten() {
            if files::is_file(path)? {
                return Self::load(path).map(Some);
            }
        }
        Ok(None)
    }

    /// Reads the file.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        let bytes = files::read_any(path).map_err(failed("read", path))?;
        Self::parse(&bytes).ok_or_else(|| FormatError::NoPrompts { path: path.to_owned() })
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (content, sum) = bytes.split_last_chunk::<SHA256_BYTES>()?;
        let (numbers, []) = content.strip_prefix(MAGIC)?.as_chunks() else { return None };
        let hashes: Vec<u64> = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let is_whole = Sha256::digest(content)[..] == sum[..] && hashes.is_sorted_by(|a, b| a < b);
        is_whole.then_some(Self { hashes })
    }

    /// The file's content.
    fn bytes(&self) -> Vec<u8> {
        let numbers = self.hashes.iter().flat_map(|hash| hash.to_le_bytes());
        let mut bytes: Vec<u8> = MAGIC.iter().copied().chain(numbers).collect();
        let sum = Sha256::digest(&bytes);
        bytes.extend(sum);
        bytes
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        let io = |source: io::Error| FormatError::Io { action: "write", what: WHAT, path: path.to_owned(), source };
        files::write_atomic(path, |out| out.write_all(&self.bytes())).map_err(io)
    }

    /// These and others.
    pub fn with(mut self, others: Self) -> Self {
        self.hashes.extend(others.hashes);
        Self::of(self.hashes)
    }

    /// Whether a prompt begins with one of them.
    pub fn have(&self, prompt: &[i32]) -> bool {
        hashes_of_beginnings(prompt).any(|hash| self.hashes.binary_search(&hash).is_ok())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(prompts: &[&[i32]]) -> TrainedPrompts {
        TrainedPrompts::of(prompts.iter().map(|ids| prompt_hash(ids)).collect())
    }

    #[test]
    fn a_prompt_is_known_by_its_beginning_and_not_by_its_end() {
        let trained = of(&[&[1, 2, 3], &[7, 8], &[7, 8]]);
        assert_eq!(trained.len(), 2);
        for met in [&[1, 2, 3][..], &[1, 2, 3, 4], &[7, 8, 1]] {
            assert!(trained.have(met), "{met:?}");
        }
        for new in [&[][..], &[1, 2], &[2, 3], &[1, 3, 2], &[258, 3]] {
            assert!(!trained.have(new), "{new:?}");
        }
    }

    #[test]
    fn the_hash_of_a_prompt_is_that_of_every_version() {
        assert_eq!(prompt_hash(&[0x0061_0062]), 0x8c00_299b_1091_d6ee, "FNV-1a of the bytes 62 00 61 00");
    }

    #[test]
    fn a_file_comes_back_and_a_changed_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PROMPTS);
        let trained = of(&[&[1, 2, 3], &[7, 8]]).with(of(&[&[7, 8], &[9]]));
        trained.save(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((trained.len(), bytes.len()), (3, 16 + 3 * 8 + 32));
        assert_eq!(TrainedPrompts::for_heads(dir.path()).unwrap(), Some(trained));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(TrainedPrompts::parse(&changed), None, "byte {at}");
            assert_eq!(TrainedPrompts::parse(&bytes[..at]), None, "{at} bytes");
        }
        assert_eq!(TrainedPrompts::parse(&TrainedPrompts::default().bytes()), Some(TrainedPrompts::default()));
    }
}
