//! Promise: data/tiny is small and consistent, and its model answers questions that it was not trained on.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use medusa::data::chat_template::{ChatTemplate, Message};
use medusa::data::conversation::ChatInput;
use medusa::data::prompts::{self, PromptInput};
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::engine::RowTokens;
use medusa::engine::fastest::fastest;
use medusa::model::kv_cache::KvCache;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::new_tokens::NewTokens;
use tch::{Device, Kind, Tensor};

const LARGEST_BYTES: u64 = 10_000_000;
const FEWEST_PROMPTS: usize = 32;
const ROLES: [&str; 2] = ["user", "assistant"];

#[derive(serde::Deserialize)]
struct Row {
    text: String,
    category: String,
}

pub(crate) fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny").join(name)
}

fn rows(name: &str) -> Vec<Row> {
    let text = std::fs::read_to_string(tiny(name)).expect("a readable file");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON of the expected form")).collect()
}

fn tokenizer() -> TextTokenizer {
    TextTokenizer::load(&tiny("backbone")).expect("the tiny tokenizer")
}

fn chat_template() -> ChatTemplate {
    ChatTemplate::load(&tiny("backbone")).expect("a readable chat template").expect("a chat template")
}

/// Parses a rendered conversation.
fn messages(text: &str) -> Vec<Message> {
    let turns = text.split("<|end|>").zip(ROLES.iter().cycle());
    let message = |(turn, role): (&str, &&str)| {
        let content = turn.strip_prefix(&format!("<|{role}|>"));
        Message::new(*role, content.unwrap_or_else(|| panic!("expected <|{role}|>: {turn:?}")))
    };
    turns.map(message).collect()
}

fn bytes_below(folder: &Path, total: &mut u64) {
    for entry in std::fs::read_dir(folder).expect("a readable file") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            bytes_below(&path, total);
        } else {
            *total += path.metadata().expect("a file").len();
        }
    }
}

#[test]
fn the_embedded_default_is_small() {
    let mut total = 0;
    bytes_below(&tiny(""), &mut total);
    assert!(total < LARGEST_BYTES, "data/tiny has {total} bytes");
}

#[test]
fn a_text_row_is_what_the_chat_template_renders() {
    let (tokenizer, template) = (tokenizer(), chat_template());
    for (name, one_in) in [("train.jsonl", 20), ("eval.jsonl", 1)] {
        for row in rows(name).iter().step_by(one_in) {
            let rendered = template.render(&messages(&row.text), false).unwrap();
            assert_eq!(rendered, format!("<|bos|>{}<|end|>", row.text));
            let trained = TokenRow::from_text(&row.text, &tokenizer).unwrap();
            assert_eq!(trained.input_ids, tokenizer.encode(&rendered, false).unwrap(), "{}", row.text);
        }
    }
}

#[test]
fn the_tokenizer_gives_every_text_back() {
    let tokenizer = tokenizer();
    let texts = rows("eval.jsonl").into_iter().map(|row| row.text);
    for text in texts.chain(["Größe, naïve, 你好, 🦊\t\u{0}".to_owned()]) {
        let ids = tokenizer.encode(&text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn no_held_out_question_was_trained_on() {
    let first_question = |row: &Row| messages(&row.text)[0].content.clone();
    let trained: HashSet<String> = rows("train.jsonl").iter().map(first_question).collect();
    for row in rows("eval.jsonl") {
        assert!(!trained.contains(&first_question(&row)), "{}", row.text);
    }
    for prompt in prompts::read(&tiny("prompts.jsonl")).unwrap() {
        let PromptInput::Chat(ChatInput { messages, .. }) = prompt.input else { panic!("expected messages") };
        assert!(!trained.contains(&messages[0].content), "{}", messages[0].content);
    }
}

#[test]
fn every_category_is_trained_evaluated_and_asked() {
    let categories = |name: &str| rows(name).into_iter().map(|row| row.category).collect::<HashSet<_>>();
    let prompts = prompts::read(&tiny("prompts.jsonl")).unwrap();
    assert!(prompts.len() >= FEWEST_PROMPTS, "{} prompts", prompts.len());
    let asked: HashSet<String> = prompts.into_iter().filter_map(|prompt| prompt.category).collect();
    assert_eq!(categories("train.jsonl"), asked);
    assert_eq!(categories("eval.jsonl"), asked);
}

/// Greedy tokens up to the end of the answer; panics if it does not end.
fn answer(llama: &Llama, prompt: &[i32]) -> Vec<i32> {
    const MOST: usize = 200;
    let engine = fastest(llama);
    let (row, mut cache) = (0, KvCache::with_one_row(&llama.config, llama.kind(), llama.device()));
    let mut next: Vec<i64> = prompt.iter().map(|&id| i64::from(id)).collect();
    let mut ids = Vec::new();
    while ids.len() < MOST {
        let n = i64::try_from(next.len()).expect("a number in range");
        let new = NewTokens::chain(n, &llama.config, Kind::Float, Device::Cpu);
        let hidden_nh = engine.extend(&mut cache, &Tensor::from_slice(&next), &[RowTokens { row, nodes: &new }]);
        cache.commit(row, n);
        let id = engine.logits(&hidden_nh.narrow(0, n - 1, 1)).argmax(-1, false).int64_value(&[0]);
        if llama.config.eos_token_ids.contains(&id) {
            return ids;
        }
        ids.push(i32::try_from(id).expect("a number in range"));
        next = vec![id];
    }
    panic!("no end after {MOST} tokens");
}

#[test]
fn the_tiny_backbone_answers_held_out_questions() {
    const FEWEST_OF_ALL: f64 = 0.6;
    let _no_grad = tch::no_grad_guard();
    let (tokenizer, template) = (tokenizer(), chat_template());
    let llama = Llama::load(&tiny("backbone"), Kind::Float, Device::Cpu, Purpose::Decoding).unwrap();
    let conversations = rows("eval.jsonl").into_iter().step_by(5);
    let (mut right, mut all) = (0, 0);
    for messages in conversations.map(|row| messages(&row.text)) {
        let input = PromptInput::Chat(ChatInput { messages: messages[..1].to_vec(), ..ChatInput::default() });
        let prompt = prompts::to_ids(&input, &tokenizer, Some(&template)).unwrap();
        let got = tokenizer.decode(&answer(&llama, &prompt), true).unwrap();
        right += u32::from(got == messages[1].content);
        all += 1;
    }
    let rate = f64::from(right) / f64::from(all);
    assert!(rate >= FEWEST_OF_ALL, "{right} of {all} answers are the expected ones to the letter");
}
