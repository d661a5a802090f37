//! Promise: one conversation, one code. The same messages become the same tokens as a row of training, as a prompt of `generate`, `bench`
//! and `calibrate`, as a question of `distill` and as a request to `serve`, and a turn that the chat template does not write is an error.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use medusa::data::chat::LossOn;
use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::conversation::ChatInput;
use medusa::data::prompts::{self, PromptFile};
use medusa::data::tokenize::{TextTokenizer, narrow, wide};
use medusa::data::{self, LoadSettings};
use medusa::distill::render::{self, Renderer};
use medusa::files::write_atomic;
use medusa::serve::api::request::TextRequest;
use medusa::serve::prompting::Prompting;
use proptest::prelude::*;
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

struct World {
    name: String,
    prompting: Prompting,
}

impl World {
    fn new(choice: &str) -> Self {
        let folder = root().join("data/tiny/backbone");
        let name = choice.to_owned();
        let choice = TemplateChoice::try_from(name.clone()).expect("a template");
        let template = ChatTemplate::choose(&choice, &folder).expect("a template that parses").map(Arc::new);
        let tokenizer = Arc::new(TextTokenizer::load(&folder).expect("a tokenizer"));
        Self { name, prompting: Prompting { tokenizer, template, context: 1 << 20 } }
    }

    fn tokenizer(&self) -> &TextTokenizer {
        &self.prompting.tokenizer
    }

    fn template(&self) -> &ChatTemplate {
        self.prompting.template.as_deref().expect("a template")
    }

    /// The tokens of a file's only prompt.
    fn prompted(&self, path: &Path) -> Result<Vec<i32>, String> {
        let prompts = prompts::read(path).map_err(|error| error.to_string())?;
        prompts::to_ids(&prompts[0].input, self.tokenizer(), Some(self.template())).map_err(|error| error.to_string())
    }

    /// Those of a file's only dialogue.
    fn distilled(&self, path: &Path) -> Result<Vec<i32>, String> {
        let dialogues = PromptFile::open(path).and_then(|file| file.dialogues()).map_err(|error| error.to_string())?;
        let renderer = Renderer { tokenizer: self.tokenizer(), template: Some(self.template()) };
        let rendered = render::first(&dialogues[0].questions, Some(&renderer), &mut ChatInput::default());
        rendered.map(|rendered| narrow(&rendered.ids)).map_err(|error| error.to_string())
    }

    fn served(&self, body: &Value) -> Result<Vec<i32>, String> {
        let request = TextRequest::chat(body.to_string().as_bytes()).map_err(|error| error.to_string())?;
        self.prompting.tokens(&request.prompts[0]).map(|ids| narrow(&ids)).map_err(|error| error.to_string())
    }

    /// The text of a file's only row as training reads it; `None` where it is dropped.
    fn trained(&self, path: &Path) -> Result<Option<Vec<i32>>, String> {
        let settings = LoadSettings {
            tokenizer: Some(self.tokenizer()),
            template: Some(self.template()),
            loss_on: LossOn::All,
            ..LoadSettings::new(self.tokenizer().vocab_size(), NonZeroUsize::new(1 << 16).expect("not 0"))
        };
        match data::load(&[path.display().to_string()], &settings) {
            Ok((rows, _)) => Ok(rows.iter().next().map(|row| row.expect("a row").input_ids)),
            Err(error) if ["dropped", "renders none of"].iter().any(|said| error.to_string().contains(said)) => {
                Ok(None)
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

static WORLDS: LazyLock<Vec<World>> = LazyLock::new(|| {
    let own =
        ["qwen3", "thinking", "gpt-oss"].map(|name| root().join(format!("tests/fixtures/chat_templates/{name}.jinja")));
    let own = own.iter().map(|path| path.display().to_string());
    ["chatml", "zephyr", "llama-3"]
        .map(str::to_owned)
        .into_iter()
        .chain(own)
        .map(|choice| World::new(&choice))
        .collect()
});

fn said() -> impl Strategy<Value = String> {
    prop_oneof!["[a-zäß ]{1,8}", Just("<|im_end|>".to_owned()), Just("yes".to_owned()), Just(" 🙂\n".to_owned())]
        .prop_filter("somebody says something", |said| !said.trim().is_empty())
}

/// OpenAI's spelling of a text.
fn content(said: String) -> impl Strategy<Value = Value> {
    let parts = json!([{"type": "text", "text": said}]);
    prop_oneof![Just(Value::from(said)), Just(parts)]
}

fn answer() -> impl Strategy<Value = Value> {
    let text = (said(), prop_oneof![Just(None), said().prop_map(Some)]).prop_flat_map(|(said, thought)| {
        content(said).prop_map(move |content| match &thought {
            Some(thought) => json!({"role": "assistant", "content": content, "reasoning_content": thought}),
            None => json!({"role": "assistant", "content": content}),
        })
    });
    let call = (said(), any::<bool>()).prop_map(|(city, as_text)| {
        let arguments = json!({"city": city, "days": 2});
        let arguments = if as_text { arguments.to_string().into() } else { arguments };
        let call =
            json!([{"id": "abcdefghi", "type": "function", "function": {"name": "rain", "arguments": arguments}}]);
        json!({"role": "assistant", "content": null, "tool_calls": call})
    });
    prop_oneof![3 => text, 1 => call]
}

/// A conversation that ends with a question, and its answer.
fn conversation() -> impl Strategy<Value = (Vec<Value>, Value)> {
    let first = prop_oneof![Just(None), ("system|developer", said()).prop_map(Some)];
    let exchange = (said().prop_flat_map(content), answer(), said());
    (first, prop::collection::vec(exchange, 0..3), said().prop_flat_map(content), answer()).prop_map(
        |(first, exchanges, question, answer)| {
            let mut messages: Vec<Value> =
                first.into_iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
            for (question, answer, result) in exchanges {
                let calls = answer.get("tool_calls").is_some();
                messages.extend([json!({"role": "user", "content": question}), answer]);
                if calls {
                    messages
                        .push(json!({"role": "tool", "content": result, "tool_call_id": "abcdefghi", "name": "rain"}));
                    messages.push(json!({"role": "assistant", "content": "So it is."}));
                }
            }
            messages.push(json!({"role": "user", "content": question}));
            (messages, answer)
        },
    )
}

fn write(path: &Path, value: &Value) {
    write_atomic(path, |out| std::io::Write::write_all(out, value.to_string().as_bytes())).expect("a file");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_conversation_is_the_same_tokens_in_every_verb((asked, answer) in conversation(), tools in any::<bool>(), thinks in any::<bool>()) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("one.jsonl");
        let tool = json!({"type": "function", "function": {"name": "rain", "parameters": {}}});
        for world in WORLDS.iter() {
            let mut row = json!({"messages": asked});
            if world.template().reads_variable("enable_thinking") {
                row["chat_template_kwargs"] = json!({"enable_thinking": thinks}); // the server refuses what is not read
            }
            if tools && (world.name.contains("qwen3") || world.name.contains("thinking")) {
                row["tools"] = json!([tool]);
            }
            write(&path, &row);
            let prompted = world.prompted(&path);
            let mut body = row.clone();
            body["model"] = "m".into();
            match (&prompted, world.served(&body)) {
                (Ok(prompted), Ok(served)) => prop_assert_eq!(prompted, &served, "{}: {}", world.name, row),
                (Err(_), Err(_)) => {}
                (prompted, served) => prop_assert!(false, "{}: {}: {:?} {:?}", world.name, row, prompted, served),
            }
            if asked.iter().all(|message| message["role"] != "assistant" && message["role"] != "tool") {
                prop_assert_eq!(&world.distilled(&path), &prompted, "{}: {}", world.name, row);
            }
            let mut whole = row.clone();
            whole["messages"].as_array_mut().expect("messages").push(answer.clone());
            write(&path, &whole);
            prop_assert_eq!(&world.prompted(&path), &prompted, "the answer is what is decoded");
            let chat = ChatInput {
                messages: medusa::data::conversation::read_messages("messages", &whole["messages"]).expect("messages"),
                inputs: medusa::data::chat_template::TemplateInputs {
                    tools: whole["tools"].as_array().cloned(),
                    kwargs: whole["chat_template_kwargs"].as_object().cloned().unwrap_or_default(),
                },
            };
            let text = world.template().render_with(&chat.messages, &chat.inputs, false);
            let rendered = text.ok().map(|text| world.tokenizer().encode(&text, false).expect("tokens"));
            prop_assert_eq!(world.trained(&path), Ok(rendered), "{}: {}", world.name, whole);
        }
    }
}

#[test]
fn a_turn_that_the_template_does_not_write_is_an_error_in_every_verb() {
    let folder = tempfile::tempdir().expect("a folder");
    let template = folder.path().join("users.jinja");
    let source = "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    write_atomic(&template, |out| std::io::Write::write_all(out, source.as_bytes())).expect("a file");
    let world = World::new(&template.display().to_string());
    let path = folder.path().join("one.jsonl");
    for role in ["system", "developer", "critic"] {
        let messages = json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        write(&path, &json!({"messages": messages}));
        let shown = match role {
            "critic" => ["expected the role system", "messages[0].role: expected user"],
            _ => ["writes nothing of turn 1"; 2],
        };
        let errors = [world.prompted(&path), world.distilled(&path)].map(|tokens| tokens.expect_err("an error"));
        let served = world.served(&json!({"model": "m", "messages": messages})).expect_err("an error");
        for (error, shown) in errors.iter().zip(shown) {
            assert!(error.contains(shown), "{errors:?}");
        }
        assert!(served.contains("turn 1"), "{served}");
        let with_answer = json!([messages[0], messages[1], {"role": "assistant", "content": "Hello."}]);
        write(&path, &json!({"messages": with_answer}));
        assert_eq!(world.trained(&path), Ok(None), "{role}");
    }
}

#[test]
fn a_rendered_text_gets_no_second_bos() {
    let world = World::new("chatml");
    let tokenizer = world.tokenizer();
    let bos = tokenizer.bos_id().expect("a BOS");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.jsonl");
    let count = |ids: &[i32]| ids.iter().filter(|id| **id == bos).count();
    for row in [
        json!({"text": "<|bos|>Once there was a fox."}),
        json!({"text": "Once there was a fox."}),
        json!({"prompt": "<|bos|>Name a colour: ", "completion": "red"}),
    ] {
        write(&path, &row);
        assert_eq!(world.trained(&path).map(|ids| count(&ids.expect("a row"))), Ok(1), "{row}");
    }
    write(&path, &json!({"prompt": "<|bos|>Name a colour: "}));
    assert_eq!(world.prompted(&path).map(|ids| count(&ids)), Ok(1));
    let body = json!({"model": "m", "prompt": "<|bos|>Name a colour: "});
    let request = TextRequest::completion(body.to_string().as_bytes()).expect("a request");
    assert_eq!(count(&narrow(&world.prompting.tokens(&request.prompts[0]).expect("tokens"))), 1);
    assert_eq!(wide(&tokenizer.encode("<|bos|><|bos|>a", true).expect("tokens"))[..2], [i64::from(bos); 2]);
    write(&path, &json!({"text": " "}));
    assert_eq!(world.trained(&path), Ok(None), "an empty text is dropped");
}
