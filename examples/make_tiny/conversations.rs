//! The synthetic conversation set: seeded, ten families of tasks, split into training and held-out rows by the first
//! question, so that no held-out question is ever trained on.

use std::collections::BTreeMap;
use std::collections::HashSet;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{knowledge, language, numbers};

/// Begins every text; the tokenizer adds it.
pub(crate) const BOS: &str = "<|bos|>";
/// Ends every turn, and therefore also a text.
pub(crate) const EOS: &str = "<|end|>";
/// Begins a question.
pub(crate) const USER: &str = "<|user|>";
/// Begins an answer.
pub(crate) const ASSISTANT: &str = "<|assistant|>";

/// One conversation in this many has a second question.
const ONE_IN_TWO_TURNS: u32 = 6;
/// One first question in this many is held out.
const ONE_IN_HELD_OUT: u8 = 16;

/// One question and its answer.
pub(crate) struct Turn {
    pub(crate) question: String,
    pub(crate) answer: String,
}

pub(crate) struct Conversation {
    pub(crate) category: &'static str,
    pub(crate) turns: Vec<Turn>,
}

/// Numbers of rows.
pub(crate) struct Sizes {
    pub(crate) train: usize,
    pub(crate) eval: usize,
    pub(crate) prompts: usize,
}

pub(crate) struct ConversationSet {
    pub(crate) train: Vec<Conversation>,
    pub(crate) eval: Vec<Conversation>,
    pub(crate) prompts: Vec<Conversation>,
}

/// Draws one turn of a family.
type Family = fn(&mut ChaCha8Rng) -> Turn;

const FAMILIES: [(&str, Family); 10] = [
    ("arithmetic", numbers::arithmetic),
    ("units", numbers::units),
    ("sorting", numbers::sorting),
    ("calendar", numbers::calendar),
    ("extraction", language::extraction),
    ("story", language::story),
    ("translation", language::translation),
    ("code", knowledge::code),
    ("howto", knowledge::howto),
    ("faq", knowledge::faq),
];

#[derive(Serialize)]
struct TextRow<'a> {
    text: String,
    category: &'a str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'a str,
    content: &'a str,
}

#[derive(Serialize)]
struct PromptRow<'a> {
    messages: [Message<'a>; 1],
    category: &'a str,
}

#[derive(Serialize)]
struct SeedRow<'a> {
    messages: Vec<serde_json::Value>,
    category: &'a str,
}

impl Conversation {
    /// The conversation as the chat template renders it, without the BOS and the last EOS, which the tokenizer and the
    /// reader of `text` rows add.
    pub(crate) fn text(&self) -> String {
        let turns = self.turns.iter().map(|turn| format!("{USER}{}{EOS}{ASSISTANT}{}", turn.question, turn.answer));
        turns.collect::<Vec<_>>().join(EOS)
    }

    /// The row of train.jsonl and eval.jsonl.
    pub(crate) fn text_row(&self) -> String {
        json_line(&TextRow { text: self.text(), category: self.category })
    }

    /// The row of seeds.jsonl: the whole conversation, whose questions `medusa distill` asks.
    pub(crate) fn seed_row(&self) -> String {
        let turn = |turn: &Turn| [("user", turn.question.clone()), ("assistant", turn.answer.clone())];
        let messages = self.turns.iter().flat_map(turn);
        let messages: Vec<_> =
            messages.map(|(role, content)| serde_json::json!({"role": role, "content": content})).collect();
        json_line(&SeedRow { messages, category: self.category })
    }

    /// The row of prompts.jsonl: the first question alone.
    pub(crate) fn prompt_row(&self) -> String {
        let messages = [Message { role: "user", content: &self.turns[0].question }];
        json_line(&PromptRow { messages, category: self.category })
    }

    /// Whether the first question is held out; decided by its bytes, not by the draw.
    fn is_held_out(&self) -> bool {
        Sha256::digest(&self.turns[0].question)[0].is_multiple_of(ONE_IN_HELD_OUT)
    }
}

impl ConversationSet {
    /// Draws until every part is full; every family gets the same number of rows.
    pub(crate) fn draw(sizes: &Sizes, seed: u64) -> ConversationSet {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut set = ConversationSet { train: Vec::new(), eval: Vec::new(), prompts: Vec::new() };
        let mut prompted = HashSet::new();
        let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        while set.train.len() < sizes.train || set.eval.len() < sizes.eval || set.prompts.len() < sizes.prompts {
            let (category, family) = FAMILIES[rng.random_range(0..FAMILIES.len())];
            let conversation = draw_one(category, family, &mut rng);
            let mut room = |part, size: usize| {
                let count = counts.entry((part, category)).or_default();
                *count += 1;
                *count <= size / FAMILIES.len()
            };
            if !conversation.is_held_out() {
                if room("train", sizes.train) {
                    set.train.push(conversation);
                }
            } else if prompted.insert(conversation.turns[0].question.clone()) && room("prompts", sizes.prompts) {
                set.prompts.push(conversation);
            } else if room("eval", sizes.eval) {
                set.eval.push(conversation);
            }
        }
        set
    }
}

fn draw_one(category: &'static str, family: Family, rng: &mut ChaCha8Rng) -> Conversation {
    let mut turns = vec![family(rng)];
    if rng.random_ratio(1, ONE_IN_TWO_TURNS) {
        turns.push(family(rng));
    }
    Conversation { category, turns }
}

fn json_line(row: &impl Serialize) -> String {
    let mut line = serde_json::to_string(row).expect("strings and maps of strings are JSON");
    line.push('\n');
    line
}

/// A random item of a table.
pub(crate) fn pick<'a, T>(items: &'a [T], rng: &mut ChaCha8Rng) -> &'a T {
    &items[rng.random_range(0..items.len())]
}
