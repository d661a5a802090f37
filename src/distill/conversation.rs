//! One conversation, turn by turn: what is asked next, and the row that it becomes. Decodes nothing.

use serde::{Deserialize, Serialize};

use super::Settings;
use super::render::{self, OpenQuestion, Rendered, Renderer, Written, narrow};
use crate::data::IGNORE;
use crate::data::chat_template::Message;
use crate::data::prompts::{Dialogue, PromptError, Questions};
use crate::decode::batch::{RowEnded, RowRequest};
use crate::decode::generate::FinishReason;

/// A conversation that is being held.
#[derive(Debug)]
pub struct Conversation<'a> {
    id: usize,
    dialogue: &'a Dialogue,
    /// So far; the question whose answer is awaited is the last one.
    messages: Vec<Message>,
    /// The turns that the backbone wrote.
    written: Vec<Written>,
    /// Who is writing.
    writer: Writer,
    /// What the running turn goes on from.
    prompt: Rendered,
    /// What the backbone saw and wrote up to the last turn that was heard.
    row: Row,
    /// As it was after the last answer: a question without an answer is no part of it.
    kept: Option<Finished>,
    /// Turns that were asked of the backbone; they name the streams of what is drawn.
    asked: u64,
    answers: usize,
    is_over: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writer {
    Assistant,
    User,
}

/// Tokens, and for each the token to learn.
#[derive(Debug, Clone, Default)]
struct Row {
    ids: Vec<i64>,
    labels: Vec<i32>,
}

/// A conversation as it is written to a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    /// Its index in the prompt file.
    pub id: usize,
    /// The prompt's.
    pub category: Option<String>,
    /// Its turns, as ShareGPT writes them.
    pub conversations: Vec<Said>,
    /// What the backbone saw and wrote.
    pub input_ids: Vec<i32>,
    /// The same where the backbone wrote it, else [`IGNORE`].
    pub labels: Vec<i32>,
    /// Why the last answer ended; `length` also where a further turn does not fit.
    pub finish_reason: String,
}

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// `system`, `human` or `gpt`.
    pub from: String,
    /// What was said.
    pub value: String,
}

impl<'a> Conversation<'a> {
    /// Nothing is asked yet.
    pub fn new(id: usize, dialogue: &'a Dialogue) -> Self {
        Self {
            id,
            dialogue,
            messages: vec![],
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

    /// What is asked of the backbone next; `None` where the conversation ends.
    ///
    /// # Errors
    /// What the template or the tokenizer says.
    pub fn next_request(
        &mut self,
        renderer: &Renderer,
        settings: &Settings,
    ) -> Result<Option<RowRequest>, PromptError> {
        let Some(OpenQuestion { prompt, end_mark }) = self.next_prompt(renderer, settings)? else { return Ok(None) };
        if self.answers > 0 && prompt.ids.len() >= settings.context {
            self.cut_short();
            return Ok(None);
        }
        self.prompt = prompt;
        self.asked += 1;
        Ok(Some(RowRequest {
            key: self.id,
            prompt: self.prompt.ids.clone(),
            max_new_tokens: settings.max_new_tokens,
            end_mark,
            stream: [settings.seed, self.id as u64, self.asked],
        }))
    }

    fn next_prompt(&mut self, renderer: &Renderer, settings: &Settings) -> Result<Option<OpenQuestion>, PromptError> {
        let was_written_by = std::mem::replace(&mut self.writer, Writer::Assistant);
        let of_answer = |prompt| Some(OpenQuestion { prompt, end_mark: vec![] });
        if self.asked == 0 {
            return render::first(&self.dialogue.questions, renderer, &mut self.messages).map(of_answer);
        }
        if was_written_by == Writer::User && !self.is_over {
            return renderer.answer(&self.messages).map(of_answer);
        }
        let Questions::Turns { user, .. } = &self.dialogue.questions else { return Ok(None) };
        if self.is_over || self.answers >= settings.turns.get() {
            return Ok(None);
        }
        if settings.self_talk {
            self.writer = Writer::User;
            return renderer.question(&self.messages);
        }
        let Some(question) = user.get(self.answers) else { return Ok(None) };
        self.messages.push(Message::new("user", question));
        renderer.answer(&self.messages).map(of_answer)
    }

    /// Takes what the backbone said. A question of its own that is empty or has no end is dropped, and ends the conversation.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn hear(&mut self, said: RowEnded, renderer: &Renderer) -> Result<(), PromptError> {
        let content = renderer.text(&said.new_ids)?;
        let is_question = self.writer == Writer::User;
        if is_question && (said.end.is_empty() || content.trim().is_empty()) {
            self.is_over = true;
            if said.finish_reason == FinishReason::Length {
                self.cut_short();
            }
            return Ok(());
        }
        self.row = self.row_with(&said, renderer)?;
        self.written.push(Written {
            opened: std::mem::take(&mut self.prompt.text),
            content: content.clone(),
            end: renderer.end_text(&said.end)?,
        });
        self.messages.push(Message::new(if is_question { "user" } else { "assistant" }, content));
        if !is_question {
            self.answers += 1;
            self.kept = Some(self.as_finished(said.finish_reason));
        }
        Ok(())
    }

    /// The row that it became.
    ///
    /// # Panics
    /// If no answer was heard.
    pub fn finish(self) -> Finished {
        self.kept.expect("a conversation ends after an answer")
    }

    /// The prompt as the backbone saw it, then what it wrote. Labels of earlier turns are carried over where the prompt begins
    /// with the very tokens of these turns, else found in its text (see [`Renderer::labels`]).
    fn row_with(&self, said: &RowEnded, renderer: &Renderer) -> Result<Row, PromptError> {
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

    fn as_finished(&self, finish_reason: FinishReason) -> Finished {
        let said = |message: &Message| {
            let from = match message.role.as_str() {
                "user" => "human",
                "assistant" => "gpt",
                other => other,
            };
            Said { from: from.to_owned(), value: message.content.clone() }
        };
        Finished {
            id: self.id,
            category: self.dialogue.category.clone(),
            conversations: self.messages.iter().map(said).collect(),
            input_ids: narrow(&self.row.ids),
            labels: self.row.labels.clone(),
            finish_reason: finish_reason.name().to_owned(),
        }
    }

    /// A further turn does not fit.
    fn cut_short(&mut self) {
        if let Some(kept) = &mut self.kept {
            FinishReason::Length.name().clone_into(&mut kept.finish_reason);
        }
    }
}
