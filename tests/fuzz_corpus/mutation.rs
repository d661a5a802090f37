//! Changes inputs: bits, numbers, pieces of one and of several.

use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Numbers at the ends of types, and beside them.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "2147483647",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e308",
    "-0.0",
    "1e-320",
];
/// What formats are made of.
const TOKENS: [&str; 14] =
    ["null", "true", "[", "]", "{", "}", "\"", ",", "\n", "\0", "{{", "}}", "{% for x in range(9) %}", "\u{1f600}"];
/// Bytes of a changed input.
const LONGEST: usize = 1 << 16;

/// Changed inputs, one after the other, from a seed.
pub(super) struct Mutator {
    random: ChaCha8Rng,
    corpus: Vec<Vec<u8>>,
}

impl Mutator {
    pub(super) fn new(seed: u64, mut corpus: Vec<Vec<u8>>) -> Self {
        corpus.push(Vec::new());
        Self { random: ChaCha8Rng::seed_from_u64(seed), corpus }
    }

    /// An input of the corpus with one to eight changes.
    pub(super) fn next(&mut self) -> Vec<u8> {
        let mut input = self.any().clone();
        for _ in 0..1 << self.random.random_range(0..4) {
            self.change(&mut input);
        }
        input.truncate(LONGEST);
        input
    }

    fn any(&mut self) -> &Vec<u8> {
        self.corpus.choose(&mut self.random).expect("never empty")
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.random.random_range(0..=input.len());
        let end = (at + self.random.random_range(0..=16)).min(input.len());
        match self.random.random_range(0..9) {
            0 if at < input.len() => input[at] ^= 1 << self.random.random_range(0..8),
            1 if at < input.len() => input[at] = self.random.random(),
            2 => drop(input.drain(at..end)),
            3 => {
                let piece = input[at..end].to_vec();
                input.splice(at..at, piece);
            }
            4 => input.truncate(at),
            5 => {
                let other = self.any().clone();
                let from = self.random.random_range(0..=other.len());
                let until = (from + self.random.random_range(0..=256)).min(other.len());
                input.splice(at..end, other[from..until].iter().copied());
            }
            6 => self.change_number(input, at),
            _ => {
                let token = TOKENS.choose(&mut self.random).expect("tokens");
                input.splice(at..at, token.bytes());
            }
        }
    }

    /// Replaces the next number in a text.
    fn change_number(&mut self, input: &mut Vec<u8>, from: usize) {
        let Some(start) = input[from..].iter().position(u8::is_ascii_digit).map(|at| from + at) else { return };
        let digits = input[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = NUMBERS.choose(&mut self.random).expect("numbers");
        input.splice(start..start + digits, number.bytes());
    }
}

#[test]
fn a_seed_gives_the_same_inputs_and_they_differ() {
    let inputs = |seed: u64| -> Vec<Vec<u8>> {
        let mut mutator = Mutator::new(seed, vec![b"{\"a\": 12}".to_vec()]);
        (0..100).map(|_| mutator.next()).collect()
    };
    assert_eq!(inputs(1), inputs(1));
    assert_ne!(inputs(1), inputs(2));
    let different: std::collections::BTreeSet<Vec<u8>> = inputs(1).into_iter().collect();
    assert!(different.len() > 50, "{}", different.len());
}
