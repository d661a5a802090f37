//! One conversation, turn by turn: produces the next prompt, and finally its row. Does not decode.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::answer::{Question, WrittenAnswer};
use super::refusal::{Refusal, RefusedTurn};
use super::render::{self, OpenQuestion, Rendered, Renderer, WrittenTurn};
use crate::data::IGNORE;
use crate::data::conversation::{ChatInput, Message, TemplateInputs};
use crate::data::prompts::{Dialogue, PromptError, PromptInput, Questions};
use crate::data::tokenize::narrow;
use crate::decode::request::FinishReason;
use crate::engine::sample::Stream;

/// Settings of the conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DistillSettings {
    /// Per answer.
    pub max_new_tokens: NonZeroUsize,
    /// Maximum number of answers per conversation.
    pub turns: NonZeroUsize,
    /// The backbone also writes the user's turns after the first one.
    pub self_talk: bool,
    pub seed: u64,
    /// Most tokens of prompt and answer: the backbone's `max_position_embeddings`, or a server's limit.
    pub context: usize,
    /// Most questions of the folder that a server may refuse; one more ends the run.
    pub max_refused: usize,
}

/// A conversation in progress.
#[derive(Debug)]
pub struct Conversation<'a> {
    id: usize,
    dialogue: &'a Dialogue,
    /// All turns so far; the last one is the question to answer.
    chat: ChatInput,
    /// The turns that the backbone wrote.
    written: Vec<WrittenTurn>,
    writer: Writer,
    /// The prompt of the current turn.
    prompt: Rendered,
    /// Tokens and labels up to the last finished turn.
    row: Row,
    /// The conversation after its last answer, without a later unanswered question.
    kept: Option<FinishedConversation>,
    /// Turns requested from the backbone; they number the random streams.
    asked: u64,
    answers: usize,
    is_over: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    Assistant,
    User,
}

/// Tokens, and for each token its label.
#[derive(Debug, Clone, Default)]
struct Row {
    ids: Vec<i64>,
    labels: Vec<i32>,
}

/// A conversation as a row of a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedConversation {
    /// Its number among the prompts that fit.
    pub id: usize,
    /// Its index in the prompt file; `None` in journals of versions that skipped no prompt: its number.
    #[serde(default)]
    pub index: Option<usize>,
    /// The prompt's own name.
    #[serde(default)]
    pub prompt_id: Option<String>,
    pub category: Option<String>,
    /// Its turns in ShareGPT's format.
    pub conversations: Vec<ShareGptMessage>,
    /// The prompt's tools, as JSON.
    #[serde(default)]
    pub tools: Option<String>,
    /// The prompt's variables of the chat template, as JSON.
    #[serde(default)]
    pub chat_template_kwargs: Option<String>,
    /// Tokens that the backbone read and wrote; empty, like `labels`, where a server answered and no backbone was given.
    pub input_ids: Vec<i32>,
    /// The token itself if the backbone wrote it, else [`IGNORE`].
    pub labels: Vec<i32>,
    /// Why the last answer ended; `length` also if a further turn does not fit.
    pub finish_reason: String,
    /// The question at which a server refused to go on; after the first turn the row holds the turns before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedTurn>,
}

impl FinishedConversation {
    /// Whether it has an answer.
    pub(super) fn is_row(&self) -> bool {
        !self.conversations.is_empty()
    }
}

/// One message, in the ShareGPT shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareGptMessage {
    /// `system`, `human` or `gpt`.
    pub from: String,
    pub value: String,
}

impl<'a> Conversation<'a> {
    /// A conversation without any turn.
    pub fn new(id: usize, dialogue: &'a Dialogue) -> Self {
        Self {
            id,
            dialogue,
            chat: ChatInput::default(),
            written: vec![],
            writer: Writer::Assistant,
            prompt: Rendered::default(),
            row: Row::default(),
            kept: None,
            asked: 0,
            answers: 0,
            is_over: false,
        }
    }

    /// The next prompt for the backbone; `None` at the end of the conversation. Without a renderer it has no tokens.
    ///
    /// # Errors
    /// An error of the template or the tokenizer.
    pub fn next_question(
        &mut self,
        renderer: Option<&Renderer>,
        settings: &DistillSettings,
    ) -> Result<Option<Question>, PromptError> {
        let Some(OpenQuestion { prompt, end_mark }) = self.next_prompt(renderer, settings)? else { return Ok(None) };
        if self.answers > 0 && prompt.ids.len() >= settings.context {
            self.cut_short();
            return Ok(None);
        }
        self.prompt = prompt;
        self.asked += 1;
        Ok(Some(Question {
            conversation: self.id,
            input: self.input(),
            prompt: self.prompt.clone(),
            max_new_tokens: settings.max_new_tokens,
            end_mark,
            stream: Stream { seed: settings.seed, index: self.dialogue.index as u64, turn: self.asked, sample: 0 },
        }))
    }

    /// As it is asked, without a template.
    fn input(&self) -> PromptInput {
        match &self.dialogue.questions {
            Questions::Text(text) => PromptInput::Text(text.clone()),
            Questions::Ids(ids) => PromptInput::Ids(ids.clone()),
            Questions::Turns { .. } => PromptInput::Chat(self.chat.clone()),
        }
    }

    fn next_prompt(
        &mut self,
        renderer: Option<&Renderer>,
        settings: &DistillSettings,
    ) -> Result<Option<OpenQuestion>, PromptError> {
        let was_written_by = std::mem::replace(&mut self.writer, Writer::Assistant);
        let open = |prompt| Some(OpenQuestion { prompt, end_mark: vec![] });
        if self.asked == 0 {
            return render::first(&self.dialogue.questions, renderer, &mut self.chat).map(open);
        }
        if was_written_by == Writer::User && !self.is_over {
            return render::answer(renderer, &self.chat).map(open);
        }
        let Questions::Turns { user, .. } = &self.dialogue.questions else { return Ok(None) };
        if self.is_over || self.answers >= settings.turns.get() {
            return Ok(None);
        }
        if let Some(renderer) = renderer.filter(|_| settings.self_talk) {
            self.writer = Writer::User;
            return renderer.question(&self.chat);
        }
        let Some(question) = user.get(self.answers) else { return Ok(None) };
        self.chat.messages.push(Message::new("user", question));
        render::answer(renderer, &self.chat).map(open)
    }

    /// Takes the backbone's turn. A user turn that is empty or unfinished is dropped and ends the conversation.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn hear(&mut self, said: WrittenAnswer, renderer: Option<&Renderer>) -> Result<(), PromptError> {
        let content = match (&said.text, renderer) {
            (None, Some(renderer)) => renderer.text(&said.new_ids)?,
            (from_server, _) => from_server.clone().unwrap_or_default(),
        };
        let is_question = self.writer == Writer::User;
        if is_question && (said.end.is_empty() || content.trim().is_empty()) {
            self.is_over = true;
            if said.finish_reason == FinishReason::Length {
                self.cut_short();
            }
            return Ok(());
        }
        if let Some(renderer) = renderer {
            self.row = self.row_with(&said, renderer)?;
            let (opened, end) = (std::mem::take(&mut self.prompt.text), renderer.end_text(&said.end)?);
            self.written.push(WrittenTurn { opened, content: content.clone(), end });
        }
        self.chat.messages.push(Message::new(if is_question { "user" } else { "assistant" }, content));
        if !is_question {
            self.answers += 1;
            self.kept = Some(self.as_finished(said.finish_reason));
        }
        Ok(())
    }

    /// The finished row.
    ///
    /// # Panics
    /// If the conversation has no answer.
    pub fn finish(self) -> FinishedConversation {
        self.kept.expect("a conversation ends after an answer")
    }

    /// What is left of a conversation whose last question is refused: the turns before it, and why.
    pub fn refused(self, why: &Refusal) -> FinishedConversation {
        let refused = Some(RefusedTurn { turn: self.asked, why: why.to_string() });
        let finished = self.as_finished(FinishReason::Length);
        let without_row = FinishedConversation { conversations: vec![], finish_reason: String::new(), ..finished };
        FinishedConversation { refused, ..self.kept.unwrap_or(without_row) }
    }

    /// The prompt as the backbone read it, then its turn. Labels of earlier turns are copied if the prompt begins with
    /// exactly their tokens; otherwise they are found in its text (see [`Renderer::labels`]).
    fn row_with(&self, said: &WrittenAnswer, renderer: &Renderer) -> Result<Row, PromptError> {
        let mut ids = self.prompt.ids.clone();
        let mut labels = if ids.starts_with(&self.row.ids) {
            let mut labels = self.row.labels.clone();
            labels.resize(ids.len(), IGNORE);
            labels
        } else {
            renderer.labels(&self.prompt, &self.written)?
        };
        let new = || said.new_ids.iter().chain(&said.end).copied();
        ids.extend(new());
        labels.extend(narrow(&new().collect::<Vec<_>>()));
        Ok(Row { ids, labels })
    }

    fn as_finished(&self, finish_reason: FinishReason) -> FinishedConversation {
        let said = |message: &Message| {
            let from = match message.role.as_str() {
                "user" => "human",
                "assistant" => "gpt",
                other => other,
            };
            ShareGptMessage { from: from.to_owned(), value: message.content.clone() }
        };
        let TemplateInputs { tools, kwargs } = &self.chat.inputs;
        FinishedConversation {
            id: self.id,
            index: Some(self.dialogue.index),
            prompt_id: self.dialogue.id.as_ref().map(|id| id.as_str().map_or_else(|| id.to_string(), str::to_owned)),
            category: self.dialogue.category.clone(),
            conversations: self.chat.messages.iter().map(said).collect(),
            tools: tools.as_ref().map(|tools| json!(tools).to_string()),
            chat_template_kwargs: (!kwargs.is_empty()).then(|| json!(kwargs).to_string()),
            input_ids: narrow(&self.row.ids),
            labels: self.row.labels.clone(),
            finish_reason: finish_reason.name().to_owned(),
            refused: None,
        }
    }

    /// Records that a further turn does not fit.
    fn cut_short(&mut self) {
        if let Some(kept) = &mut self.kept {
            FinishReason::Length.name().clone_into(&mut kept.finish_reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;

    use super::*;
    use crate::data::chat_template::ChatTemplate;
    use crate::data::rows::RowLocation;
    use crate::data::tokenize::TextTokenizer;
    use crate::data::tokenize::wide;
    use crate::files::write_atomic;

    /// Vicuna's format: the user's turn has no end token.
    const PLAIN: &str = "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}{% else %}\
                         {{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}\
                         {% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}";
    /// Shortens all answers except the last one.
    const FORGETFUL: &str = "{% for m in messages %}{{ 'X' + m['role'][0] }}{% if loop.last or m['role'] == 'user' %}\
                             {{ m['content'] }}{% else %}{{ '...' }}{% endif %}{{ eos_token }}{% endfor %}\
                             {% if add_generation_prompt %}{{ 'Xa' }}{% endif %}";

    struct World {
        tokenizer: TextTokenizer,
        template: ChatTemplate,
    }

    /// The tokenizer of data/tiny with another template.
    fn world(template: &str) -> World {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
        let dir = tempfile::tempdir().unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(tiny.join(name), dir.path().join(name)).unwrap();
        }
        write_atomic(&dir.path().join("chat_template.jinja"), |out| out.write_all(template.as_bytes())).unwrap();
        let template = ChatTemplate::load(dir.path()).unwrap().unwrap();
        World { tokenizer: TextTokenizer::load(dir.path()).unwrap(), template }
    }

    impl World {
        fn renderer(&self) -> Renderer<'_> {
            Renderer { tokenizer: &self.tokenizer, template: Some(&self.template) }
        }

        fn ids(&self, text: &str) -> Vec<i64> {
            wide(&self.tokenizer.encode(text, false).unwrap())
        }

        /// One token per letter, which the tokenizer itself would never produce for a word.
        fn spelt(&self, text: &str) -> Vec<i64> {
            text.chars().flat_map(|letter| self.ids(&letter.to_string())).collect()
        }

        /// The pieces of a row that carry loss.
        fn learnt(&self, row: &FinishedConversation) -> Vec<String> {
            let pairs: Vec<_> = row.input_ids.iter().zip(&row.labels).collect();
            let pieces = pairs.chunk_by(|a, b| (*a.1 == IGNORE) == (*b.1 == IGNORE));
            let learnt = pieces.filter(|piece| *piece[0].1 != IGNORE);
            let ids = learnt.map(|piece| piece.iter().map(|(id, _)| **id).collect::<Vec<i32>>());
            ids.map(|ids| self.tokenizer.decode(&ids, false).unwrap()).collect()
        }
    }

    fn settings(turns: usize, self_talk: bool, context: usize) -> DistillSettings {
        let number = |n| NonZeroUsize::new(n).unwrap();
        DistillSettings {
            max_new_tokens: number(50),
            turns: number(turns),
            self_talk,
            seed: 1,
            context,
            max_refused: 0,
        }
    }

    fn dialogue(user: &[&str]) -> Dialogue {
        let user = user.iter().map(|&turn| turn.to_owned()).collect();
        let place = RowLocation { path: "p".into(), row: None };
        Dialogue {
            place,
            index: 0,
            id: None,
            category: None,
            questions: Questions::Turns { opening: Box::default(), user },
        }
    }

    fn said(new_ids: Vec<i64>, end: Vec<i64>) -> WrittenAnswer {
        let finish_reason = if end.is_empty() { FinishReason::Length } else { FinishReason::Eos };
        WrittenAnswer { text: None, new_ids, end, finish_reason }
    }

    const EOS: i64 = 1;

    #[test]
    fn a_template_without_tokens_for_turns_opens_and_ends_the_users() {
        let (world, dialogue) = (world(PLAIN), dialogue(&["Count to 3.", "never asked"]));
        let (renderer, settings) = (world.renderer(), settings(2, true, 500));
        let mut conversation = Conversation::new(0, &dialogue);
        let first = conversation.next_question(Some(&renderer), &settings).unwrap().unwrap();
        assert_eq!((first.prompt.ids, first.end_mark), (world.ids("USER: Count to 3. ASSISTANT:"), vec![]));
        conversation.hear(said(world.ids("1, 2, 3."), vec![EOS]), Some(&renderer)).unwrap();
        let asks = conversation.next_question(Some(&renderer), &settings).unwrap().unwrap();
        assert_eq!(asks.prompt.ids, world.ids("USER: Count to 3. ASSISTANT: 1, 2, 3.<|end|>USER:"));
        let mark = world.ids("ASSISTANT:");
        assert_eq!((asks.end_mark, asks.stream), (mark.clone(), Stream { seed: 1, index: 0, turn: 2, sample: 0 }));
        conversation.hear(said(world.ids("And to 4?"), mark), Some(&renderer)).unwrap();
        let answers = conversation.next_question(Some(&renderer), &settings).unwrap().unwrap();
        let seen = "USER: Count to 3. ASSISTANT: 1, 2, 3.<|end|>USER: And to 4? ASSISTANT:";
        assert_eq!(answers.prompt.ids, world.ids(seen));
        conversation.hear(said(world.ids("1, 2, 3, 4."), vec![]), Some(&renderer)).unwrap();
        assert!(
            conversation.next_question(Some(&renderer), &settings).unwrap().is_none(),
            "two answers were asked for"
        );
        let row = conversation.finish();
        assert_eq!(world.learnt(&row), [" 1, 2, 3.<|end|>", " And to 4? ASSISTANT:1, 2, 3, 4."]);
        assert_eq!((row.conversations.len(), row.finish_reason.as_str()), (4, "length"));
    }

    #[test]
    fn a_question_without_an_end_is_dropped() {
        let (world, dialogue) = (world(PLAIN), dialogue(&["Count to 3."]));
        let (renderer, settings) = (world.renderer(), settings(3, true, 500));
        for (question, reason) in [(said(world.ids(" And"), vec![]), "length"), (said(vec![], vec![EOS]), "eos")] {
            let mut conversation = Conversation::new(0, &dialogue);
            let _ = conversation.next_question(Some(&renderer), &settings).unwrap();
            conversation.hear(said(world.ids("1, 2, 3."), vec![EOS]), Some(&renderer)).unwrap();
            let _ = conversation.next_question(Some(&renderer), &settings).unwrap();
            conversation.hear(question, Some(&renderer)).unwrap();
            assert!(conversation.next_question(Some(&renderer), &settings).unwrap().is_none());
            let row = conversation.finish();
            assert_eq!((row.conversations.len(), row.finish_reason.as_str()), (2, reason));
            assert_eq!(row.input_ids.last(), Some(&1));
        }
    }

    #[test]
    fn an_answer_that_is_read_again_as_other_tokens_carries_loss_where_it_stands() {
        let (world, dialogue) = (world(PLAIN), dialogue(&["Count to 3.", "Count to 3.", "Count"]));
        let (renderer, settings) = (world.renderer(), settings(9, false, 500));
        let mut conversation = Conversation::new(0, &dialogue);
        for answer in ["1, 2, 3.", "Count to 3.", "omelette"] {
            let _ = conversation.next_question(Some(&renderer), &settings).unwrap().unwrap();
            conversation.hear(said(world.spelt(answer), vec![EOS]), Some(&renderer)).unwrap();
        }
        assert!(conversation.next_question(Some(&renderer), &settings).unwrap().is_none(), "all is asked");
        let row = conversation.finish();
        let last = "omelette<|end|>";
        assert_eq!(world.learnt(&row), [" 1, 2, 3.<|end|>", " Count to 3.<|end|>", last]);
        let seen = "USER: Count to 3. ASSISTANT: 1, 2, 3.<|end|>USER: Count to 3. ASSISTANT: Count to 3.<|end|>USER: Count ASSISTANT:";
        assert_eq!(wide(&row.input_ids), [world.ids(seen), world.spelt("omelette"), vec![EOS]].concat());
    }

    #[test]
    fn an_answer_that_the_template_no_longer_shows_carries_no_loss() {
        let (world, dialogue) = (world(FORGETFUL), dialogue(&["Count to 3.", "Hello"]));
        let (renderer, settings) = (world.renderer(), settings(9, false, 500));
        let mut conversation = Conversation::new(0, &dialogue);
        for answer in ["1, 2, 3.", "omelette"] {
            let _ = conversation.next_question(Some(&renderer), &settings).unwrap().unwrap();
            conversation.hear(said(world.ids(answer), vec![EOS]), Some(&renderer)).unwrap();
        }
        let row = conversation.finish();
        assert_eq!(world.learnt(&row), ["omelette<|end|>"]);
        assert_eq!(row.conversations.len(), 4);
    }

    #[test]
    fn a_turn_that_does_not_fit_ends_the_conversation_before_it() {
        let (world, dialogue) = (world(PLAIN), dialogue(&["Count to 3.", "Hello"]));
        let renderer = world.renderer();
        let mut conversation = Conversation::new(0, &dialogue);
        let settings = settings(9, false, world.ids("USER: Count to 3. ASSISTANT: 1<|end|>").len() + 2);
        let _ = conversation.next_question(Some(&renderer), &settings).unwrap().unwrap();
        conversation.hear(said(world.ids(" 1"), vec![EOS]), Some(&renderer)).unwrap();
        assert!(conversation.next_question(Some(&renderer), &settings).unwrap().is_none());
        let row = conversation.finish();
        assert_eq!((row.conversations.len(), row.finish_reason.as_str()), (2, "length"));
        assert_eq!(row.input_ids.last(), Some(&1));
    }
}
