//! `precompiled_charsmap`: the replacements of a normalisation rule (nmt_nfkc and its like), found by longest prefix in a
//! double-array trie of the Darts library. The trie's size in bytes (`u32`), the trie, then the replacements, each ended by NUL.

/// The replacements.
#[derive(Debug, Clone)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

impl Charsmap {
    /// `None` for bytes that are no such map.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (size, rest) = bytes.split_first_chunk::<4>()?;
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, replacements) = (rest.get(..size)?, rest.get(size..)?);
        std::str::from_utf8(replacements).ok()?;
        let (units, []) = trie.as_chunks::<4>() else { return None };
        let units: Vec<u32> = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        (!units.is_empty()).then(|| Self { units, replacements: replacements.to_vec() })
    }

    /// The longest beginning of `text` that is replaced: its length in bytes, and its replacement.
    pub(super) fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let mut found = None;
        let mut at = offset(*self.units.first()?);
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            at ^= byte as usize;
            let unit = *self.units.get(at)?;
            if unit & ((1 << 31) | 0xFF) != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            if has_leaf(unit) {
                found = Some((index + 1, self.units.get(at)? & ((1 << 31) - 1)));
            }
        }
        // A rule that ends inside a character cannot be in a map of characters.
        let (length, start) = found.filter(|(length, _)| text.is_char_boundary(*length))?;
        let replacement = self.replacements.get(start as usize..)?;
        let end = replacement.iter().position(|byte| *byte == 0).unwrap_or(replacement.len());
        Some((length, std::str::from_utf8(&replacement[..end]).ok()?))
    }
}

/// From a unit to its children.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

/// Whether a key ends here.
fn has_leaf(unit: u32) -> bool {
    unit & (1 << 8) != 0
}
