//! Which of many strings a text begins with.

/// Strings with a number each.
#[derive(Debug, Clone)]
pub(super) struct Prefixes {
    /// Sorted by their bytes.
    keys: Vec<(Box<[u8]>, u32)>,
    /// The first key of each first byte, and where the last ends.
    starts: Vec<usize>,
}

impl Prefixes {
    /// Of strings that are not empty.
    pub(super) fn new<'a>(strings: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut keys: Vec<(Box<[u8]>, u32)> = strings.map(|(text, value)| (text.as_bytes().into(), value)).collect();
        keys.sort_unstable();
        let starts = (0..=256).map(|byte| keys.partition_point(|(key, _)| usize::from(key[0]) < byte)).collect();
        Self { keys, starts }
    }

    /// Calls `found` with the length and the number of each string that `text` begins with, the shortest first.
    pub(super) fn each(&self, text: &[u8], mut found: impl FnMut(usize, u32)) {
        let Some(&first) = text.first() else { return };
        let mut keys = &self.keys[self.starts[usize::from(first)]..self.starts[usize::from(first) + 1]];
        for length in 1..=text.len() {
            let Some(((key, value), others)) = keys.split_first() else { return };
            if key.len() == length {
                found(length, *value);
                keys = others;
            }
            let Some(&next) = text.get(length) else { return };
            keys = &keys[keys.partition_point(|(key, _)| key[length] < next)..];
            keys = &keys[..keys.partition_point(|(key, _)| key[length] == next)];
        }
    }

    /// The length of the longest string that `text` begins with.
    pub(super) fn longest(&self, text: &str) -> Option<usize> {
        let mut longest = None;
        self.each(text.as_bytes(), |length, _| longest = Some(length));
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prefix_is_found_the_shortest_first() {
        let prefixes = Prefixes::new(["b", "a", "abc", "ab", "abd", "é"].into_iter().zip(0..));
        let prefixes_of = |text: &str| {
            let mut found = Vec::new();
            prefixes.each(text.as_bytes(), |length, value| found.push((length, value)));
            found
        };
        assert_eq!(prefixes_of("abdx"), [(1, 1), (2, 3), (3, 4)]);
        assert_eq!(prefixes_of("éa"), [(2, 5)]);
        assert_eq!((prefixes_of("xa"), prefixes_of("")), (vec![], vec![]));
        assert_eq!((prefixes.longest("abcd"), prefixes.longest("c")), (Some(3), None));
    }
}
