//! A row's columns by name, and the row that they make up. Files of every kind come through here, so the same content is the same row.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::column_names::ColumnNames;
use super::conversation::{self, CALLS, ChatInput, Message, TemplateInputs, drop_nulls, is_nothing};
use super::raw_row::RawRow;
use super::row_keys::{self, ColumnUse, FORMS, OtherKey, is_read, other_column};
use super::rows::RowProblem;
use super::shown::shown;
use super::token_lists;

/// A row's columns.
#[derive(Debug, Default)]
pub(super) struct RowObject {
    /// The columns that are read, by the names that are known; nulls among them.
    pub(super) columns: Map<String, Value>,
    /// The other columns that have a value, and keys of messages.
    pub(super) others: Vec<OtherKey>,
}

impl RowObject {
    /// From an object with all of a row's columns; with names, only the named columns are read.
    pub(super) fn of(object: Map<String, Value>, names: Option<&ColumnNames>) -> Result<Self, RowProblem> {
        let is_wanted = |key: &str| names.map_or_else(|| is_read(key), |names| names.takes(key));
        let others = object.iter().filter(|(key, value)| !is_wanted(key) && !is_nothing(value));
        let others = others.map(|(key, _)| other_column(key)).collect();
        let columns = match names {
            Some(names) => names.pick(&object)?,
            None => object.into_iter().filter(|(key, _)| is_wanted(key)).collect(),
        };
        Ok(Self { columns, others })
    }

    /// The row of token ids. What they were made of says nothing more.
    pub(super) fn row_of_tokens(
        self,
        input_ids: Vec<i64>,
        list: impl Fn(&'static str) -> Result<Option<Vec<i64>>, RowProblem>,
    ) -> Result<(RawRow, Vec<OtherKey>), RowProblem> {
        Ok((token_lists::row(input_ids, list)?, self.others))
    }

    /// The row: of several forms the first counts.
    pub(super) fn row(mut self) -> Result<(RawRow, Vec<OtherKey>), RowProblem> {
        let row = self.first_form()?;
        let left = self.columns.iter().filter(|(key, value)| !FORMS.contains(&key.as_str()) && !is_nothing(value));
        self.others.extend(left.map(|(key, _)| (ColumnUse::NotRead, key.clone())));
        Ok((row, self.others))
    }

    fn first_form(&mut self) -> Result<RawRow, RowProblem> {
        for key in ["messages", "conversations"] {
            if let Some(ChatInput { messages, inputs }) = self.conversation(key)? {
                return Ok(RawRow::conversation(key, messages, inputs));
            }
        }
        if let (true, Some(output)) = (self.has("instruction"), self.take("output")) {
            let input = self.take("input").map(|input| string("input", input)).transpose()?;
            let instruction = string("instruction", self.take("instruction").unwrap_or_default())?;
            let turns = conversation::from_alpaca(&instruction, input.as_deref(), &string("output", output)?);
            let turns = self.behind_earlier(turns)?;
            return Ok(RawRow::conversation("instruction", turns, self.template_inputs()?));
        }
        if let (true, Some(completion)) = (self.has("prompt"), self.take("completion")) {
            let prompt = self.take("prompt").unwrap_or_default();
            return self.pair(prompt, completion);
        }
        match self.take("text") {
            Some(text) => string("text", text).map(RawRow::Text),
            None => Err(self.no_row()),
        }
    }

    /// The conversation of a column, with what stands beside it.
    pub(super) fn conversation(&mut self, key: &'static str) -> Result<Option<ChatInput>, RowProblem> {
        let Some(messages) = self.take(key) else { return Ok(None) };
        let messages = self.turns(key, messages)?;
        Ok(Some(ChatInput { messages: self.behind_earlier(messages)?, inputs: self.template_inputs()? }))
    }

    /// The context that stands beside the turns of a user alone.
    pub(super) fn opening(mut self) -> Result<ChatInput, RowProblem> {
        Ok(ChatInput { messages: self.behind_earlier(vec![])?, inputs: self.template_inputs()? })
    }

    fn has(&self, key: &str) -> bool {
        self.columns.get(key).is_some_and(|value| !value.is_null())
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        if self.has(key) { self.columns.shift_remove(key) } else { None }
    }

    /// Why there is no row: a column that is known is null, or there is none.
    fn no_row(&self) -> RowProblem {
        let forms = FORMS.into_iter().filter(|key| *key != "input");
        match forms.into_iter().find(|key| self.columns.get(*key).is_some_and(Value::is_null)) {
            Some(key) => RowProblem::null(key),
            None => RowProblem::NoKnownKey { found: self.columns.keys().cloned().collect() },
        }
    }

    /// TRL's prompt and completion: two strings, or two lists of messages.
    fn pair(&mut self, prompt: Value, completion: Value) -> Result<RawRow, RowProblem> {
        let is_chat = |value: &Value| value.is_array() || value.is_object();
        if is_chat(&prompt) || is_listed_messages(&prompt) && is_listed_messages(&completion) {
            let asked = self.turns("prompt", prompt)?;
            let (asked, said) = (self.behind_earlier(asked)?, self.turns("completion", completion)?);
            return Ok(RawRow::conversation_pair(asked, said, self.template_inputs()?));
        }
        Ok(RawRow::Pair { prompt: string("prompt", prompt)?, completion: string("completion", completion)? })
    }

    fn turns(&mut self, key: &'static str, value: Value) -> Result<Vec<Message>, RowProblem> {
        let messages = messages(key, value)?;
        let named = messages.as_array().into_iter().flatten().filter_map(Value::as_object).flatten();
        let mut seen = BTreeSet::new();
        for (name, _) in named.filter(|(_, value)| !is_nothing(value)) {
            let usage = row_keys::message_use(name);
            if usage != ColumnUse::Read && seen.insert(name) {
                self.others.push((usage, format!("{key}[].{name}")));
            }
        }
        Ok(conversation::read_messages(key, &messages)?)
    }

    /// The turns behind LLaMA-Factory's `system` and `history`. A conversation that begins with a system message keeps its own.
    fn behind_earlier(&mut self, mut turns: Vec<Message>) -> Result<Vec<Message>, RowProblem> {
        let has_system = turns.first().is_some_and(Message::is_from_system);
        let mut earlier = Vec::new();
        if let Some(system) = self.take("system") {
            let system = string("system", system)?;
            earlier.extend((!has_system && !system.is_empty()).then(|| Message::new("system", system)));
        }
        if let Some(history) = self.take("history") {
            earlier.extend(turns_of_history(history)?);
        }
        let at = usize::from(has_system);
        turns.splice(at..at, earlier);
        Ok(turns)
    }

    fn template_inputs(&mut self) -> Result<TemplateInputs, RowProblem> {
        let inputs = template_inputs(self.take("tools"), self.take("chat_template_kwargs"))?;
        self.others.extend(inputs.names().map(|name| (ColumnUse::Template, name)));
        Ok(inputs)
    }
}

/// Messages as a list of objects. Columns have them also as JSON, whole or each, and as a struct of lists.
fn messages(key: &str, value: Value) -> Result<Value, RowProblem> {
    let listed = match parsed(value) {
        Value::Object(lists) if !lists.is_empty() && lists.values().all(Value::is_array) => {
            list_of_objects(key, &lists)?
        }
        other => other,
    };
    let Value::Array(items) = listed else { return Ok(listed) };
    let message = |item: Value| {
        let mut message = parsed(item);
        if let Some(calls) = message.get_mut(CALLS) {
            let is_blank = calls.as_str().is_some_and(|text| text.trim().is_empty());
            let written = calls.take();
            *calls = if is_blank { Value::Null } else { parsed_items(written) };
        }
        message
    };
    Ok(items.into_iter().map(message).collect())
}

/// Whether a cell of text holds a list of messages as JSON.
fn is_listed_messages(cell: &Value) -> bool {
    let is_message = |item: &Value| item.get("role").or_else(|| item.get("from")).is_some_and(Value::is_string);
    let items = if cell.is_string() { parsed(cell.clone()) } else { Value::Null };
    items.as_array().is_some_and(|items| !items.is_empty() && items.iter().all(is_message))
}

/// What `datasets` makes of a `Sequence` of several features: for each key a list.
fn list_of_objects(key: &str, lists: &Map<String, Value>) -> Result<Value, RowProblem> {
    let list = |name: &str| lists[name].as_array().map_or(&[][..], Vec::as_slice);
    let (first, count) = lists.keys().next().map_or(("", 0), |name| (name.as_str(), list(name).len()));
    if let Some(name) = lists.keys().find(|name| list(name).len() != count) {
        let got = format!("{count} of {first:?} and {} of {name:?}", list(name).len());
        return Err(RowProblem::Value { key: key.to_owned(), expected: "lists of the same length", got });
    }
    let object = |at: usize| lists.keys().map(|name| (name.clone(), list(name)[at].clone())).collect();
    Ok(Value::Array((0..count).map(|at| Value::Object(object(at))).collect()))
}

/// Pairs of a question and its answer.
fn turns_of_history(value: Value) -> Result<Vec<Message>, RowProblem> {
    let value = parsed(value);
    let expected = "a list of pairs, each a question and its answer";
    let wrong = |key: String, got: &Value| RowProblem::Value { key, expected, got: shown(got) };
    let pairs = value.as_array().ok_or_else(|| wrong("history".to_owned(), &value))?;
    let mut turns = Vec::new();
    for (index, pair) in pairs.iter().enumerate() {
        let Some([Value::String(asked), Value::String(said)]) = pair.as_array().map(Vec::as_slice) else {
            return Err(wrong(format!("history[{index}]"), pair));
        };
        turns.extend([Message::new("user", asked), Message::new("assistant", said)]);
    }
    Ok(turns)
}

/// What a row has for its chat template beside messages.
fn template_inputs(tools: Option<Value>, kwargs: Option<Value>) -> Result<TemplateInputs, RowProblem> {
    let kwargs = kwargs.map_or(Ok(Map::new()), kwargs_of)?;
    Ok(TemplateInputs { tools: tools.map(tools_of).transpose()?.flatten(), kwargs })
}

/// A list of tools, or its JSON as a string. An empty list is none.
fn tools_of(value: Value) -> Result<Option<Vec<Value>>, RowProblem> {
    let mut tools = parsed_items(value);
    drop_nulls(&mut tools);
    match tools {
        Value::Array(tools) => Ok(Some(tools).filter(|tools| !tools.is_empty())),
        Value::String(blank) if blank.trim().is_empty() => Ok(None),
        other => {
            let expected = "a list of tools, or a string that holds one as JSON";
            Err(RowProblem::Value { key: "tools".to_owned(), expected, got: shown(&other) })
        }
    }
}

fn kwargs_of(value: Value) -> Result<Map<String, Value>, RowProblem> {
    let mut kwargs = parsed(value);
    drop_nulls(&mut kwargs);
    match kwargs {
        Value::Object(kwargs) => Ok(kwargs),
        Value::String(blank) if blank.trim().is_empty() => Ok(Map::new()),
        other => {
            let expected = "an object, or a string that holds one as JSON";
            Err(RowProblem::Value { key: "chat_template_kwargs".to_owned(), expected, got: shown(&other) })
        }
    }
}

/// The list or object that a string holds as JSON; other values as they are.
fn parsed(value: Value) -> Value {
    let json = value.as_str().map(str::trim_start).filter(|text| text.starts_with(['[', '{']));
    json.and_then(|json| serde_json::from_str(json).ok()).unwrap_or(value)
}

fn parsed_items(value: Value) -> Value {
    match parsed(value) {
        Value::Array(items) => items.into_iter().map(parsed).collect(),
        other => other,
    }
}

fn string(key: &str, value: Value) -> Result<String, RowProblem> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(RowProblem::Value { key: key.to_owned(), expected: "a string", got: shown(&other) }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(columns: Value) -> Result<(RawRow, Vec<OtherKey>), String> {
        let object = RowObject::of(columns.as_object().cloned().unwrap_or_default(), None);
        object.and_then(RowObject::row).map_err(|problem| problem.to_string())
    }

    fn raw(columns: Value) -> RawRow {
        row(columns).unwrap().0
    }

    #[test]
    fn a_prompt_and_completion_of_messages_may_be_json_in_cells() {
        let (asked, said) = (json!([{"role": "user", "content": "q"}]), json!([{"role": "assistant", "content": "a"}]));
        let lists = raw(json!({"prompt": asked, "completion": said}));
        assert_eq!(raw(json!({"prompt": asked.to_string(), "completion": said.to_string()})), lists);
        let texts = raw(json!({"prompt": asked.to_string(), "completion": "[1]"}));
        assert!(matches!(texts, RawRow::Pair { .. }), "{texts:?}");
    }

    #[test]
    fn messages_are_the_same_however_a_column_holds_them() {
        let call = json!([{"function": {"name": "rain", "arguments": {"city": "Oslo"}}}]);
        let messages = json!([{"role": "user", "content": "Rain?"}, {"role": "assistant", "tool_calls": call}]);
        let expected = raw(json!({"messages": messages}));
        let padded = json!([{"role": "user", "content": "Rain?", "tool_calls": null}, {"role": "assistant", "content": null,
            "tool_calls": [{"id": null, "function": {"name": "rain", "arguments": {"city": "Oslo", "days": null}}}]}]);
        let as_strings: Vec<String> = messages.as_array().unwrap().iter().map(Value::to_string).collect();
        let call_as_string = json!([{"role": "user", "content": "Rain?", "tool_calls": ""},
            {"role": "assistant", "content": null, "tool_calls": call.to_string()}]);
        let lists = json!({"role": ["user", "assistant"], "content": ["Rain?", null], "tool_calls": [null, call]});
        for form in [padded, json!(messages.to_string()), json!(as_strings), call_as_string, lists] {
            assert_eq!(raw(json!({"messages": form})), expected, "{form}");
        }
    }

    #[test]
    fn system_and_history_stand_before_the_last_exchange() {
        let said = |role: &str, content: &str| json!({"role": role, "content": content});
        let said_in_turn = |turns: &[Value]| raw(json!({"conversations": turns}));
        let (asked, answer) = (said("user", "And now?"), said("assistant", "Later."));
        let earlier = [said("system", "Be brief."), said("user", "First?"), said("assistant", "Yes.")];
        let expected = said_in_turn(&[&earlier[..], &[asked.clone(), answer.clone()]].concat());
        let more = |columns: Value| {
            let mut all = json!({"system": "Be brief.", "history": [["First?", "Yes."]]});
            all.as_object_mut().unwrap().extend(columns.as_object().unwrap().clone());
            row(all)
        };
        let beside =
            json!({"conversations": [{"from": "human", "value": "And now?"}, {"from": "gpt", "value": "Later."}]});
        assert_eq!(more(beside).unwrap(), (expected.clone(), vec![]));
        let own = json!({"conversations": [said("system", "Be kind."), asked, answer]});
        let RawRow::Conversation { messages: turns, .. } = more(own).unwrap().0 else { panic!("no conversation") };
        let contents: Vec<&str> = turns.iter().map(|turn| turn.content.as_str()).collect();
        assert_eq!(contents, ["Be kind.", "First?", "Yes.", "And now?", "Later."]);
        let alpaca =
            json!({"instruction": "And now?", "input": "", "output": "Later.", "history": "[[\"First?\", \"Yes.\"]]"});
        let RawRow::Conversation { messages: alpaca_turns, key: "instruction", .. } = more(alpaca).unwrap().0 else {
            panic!()
        };
        assert!(matches!(expected, RawRow::Conversation { messages: turns, .. } if turns == alpaca_turns));
        let wrong = row(json!({"instruction": "a", "output": "b", "history": [["c"]]})).unwrap_err();
        assert_eq!(wrong, "history[0]: expected a list of pairs, each a question and its answer, got [\"c\"]");
        let system = row(json!({"instruction": "a", "output": "b", "system": 3})).unwrap_err();
        assert_eq!(system, "system: expected a string, got 3");
    }

    #[test]
    fn tools_and_variables_are_read_of_strings_too() {
        let tool = json!({"name": "rain"});
        let with = |tools: Value, kwargs: Value| {
            raw(json!({"instruction": "a", "output": "b", "tools": tools, "chat_template_kwargs": kwargs}))
        };
        let expected = with(json!([tool]), json!({"enable_thinking": false}));
        let strings = with(json!(json!([tool]).to_string()), json!("{\"enable_thinking\": false, \"x\": null}"));
        assert_eq!(strings, expected);
        assert_eq!(with(json!([tool.to_string()]), json!({"enable_thinking": false})), expected);
        assert_eq!(with(json!(" "), json!(null)), raw(json!({"instruction": "a", "output": "b"})));
        let wrong = row(json!({"messages": [], "tools": "rain"})).unwrap_err();
        assert_eq!(wrong, "tools: expected a list of tools, or a string that holds one as JSON, got \"rain\"");
        let wrong = row(json!({"messages": [], "chat_template_kwargs": [1]})).unwrap_err();
        assert!(wrong.starts_with("chat_template_kwargs: expected an object, or a string"), "{wrong}");
    }

    #[test]
    fn what_no_row_is_made_of_is_named_once() {
        let name = |usage, name: &str| (usage, name.to_owned());
        let message = json!({"role": "user", "content": "a", "name": "b", "train_detail": [1], "emotion": "joy", "id": 1, "images": []});
        let columns = json!({"messages": [message, message], "text": "a", "prompt": "a", "rejected": "b", "id": 1, "mine": 0,
            "chosen": null, "images": [], "history": []});
        let (_, mut others) = row(columns).unwrap();
        others.sort_by(|a, b| a.1.cmp(&b.1));
        let expected = [
            name(ColumnUse::Harmless, "id"),
            name(ColumnUse::Template, "messages[].emotion"),
            name(ColumnUse::Harmless, "messages[].id"),
            name(ColumnUse::NotRead, "messages[].train_detail"),
            name(ColumnUse::NotRead, "mine"),
            name(ColumnUse::NotRead, "rejected"),
        ];
        assert_eq!(others, expected);
        let (_, others) = row(json!({"text": "a", "system": "b", "tools": [1]})).unwrap();
        assert_eq!(
            others,
            [name(ColumnUse::NotRead, "system"), name(ColumnUse::NotRead, "tools")],
            "a text has neither"
        );
    }
}
