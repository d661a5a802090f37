//! `data.columns`: what rows are made of, where a file's columns have other names than those that are known.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::row_keys::BESIDE;
use super::rows::RowProblem;

/// The columns that make up one form of a row; those in the second list may be absent.
const FORMS: [(&[&str], &[&str]); 4] = [
    (&["text"], &[]),
    (&["messages"], &[]),
    (&["prompt", "completion"], &[]),
    (&["instruction", "output"], &["input"]),
];

/// `data.columns` in a recipe and `--columns` on the command line. Rows are read from these columns alone, and from those that stand beside
/// a conversation, such as `tools`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenNames", into = "WrittenNames")]
pub struct ColumnNames(Vec<(&'static str, String)>);

/// As it is written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenNames {
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instruction: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<String>,
}

impl WrittenNames {
    fn places(&mut self) -> [(&'static str, &mut Option<String>); 7] {
        let Self { text, messages, prompt, completion, instruction, input, output } = self;
        [
            ("text", text),
            ("messages", messages),
            ("prompt", prompt),
            ("completion", completion),
            ("instruction", instruction),
            ("input", input),
            ("output", output),
        ]
    }
}

impl TryFrom<WrittenNames> for ColumnNames {
    type Error = String;

    fn try_from(mut written: WrittenNames) -> Result<Self, String> {
        let given = written.places().into_iter().filter_map(|(key, column)| Some((key, column.take()?)));
        let names: Vec<(&'static str, String)> = given.collect();
        if let Some((key, _)) = names.iter().find(|(_, column)| column.trim().is_empty()) {
            return Err(format!("{key}: expected the name of a column, got nothing"));
        }
        let has = |key: &&str| names.iter().any(|(given, _)| given == key);
        let is_form = |(needed, optional): &(&[&str], &[&str])| {
            needed.iter().all(has) && names.iter().all(|(key, _)| needed.contains(key) || optional.contains(key))
        };
        if FORMS.iter().any(is_form) {
            return Ok(Self(names));
        }
        let given: Vec<_> = names.iter().map(|(key, _)| *key).collect();
        let given = if given.is_empty() { "nothing".to_owned() } else { given.join(" and ") };
        Err(format!(
            "expected prompt and completion, instruction and output (and input), text, or messages, got {given}"
        ))
    }
}

impl From<ColumnNames> for WrittenNames {
    fn from(names: ColumnNames) -> Self {
        let mut written = Self::default();
        for (key, column) in names.0 {
            let place = written.places().into_iter().find(|(known, _)| *known == key);
            *place.expect("only known keys are read").1 = Some(column);
        }
        written
    }
}

/// `prompt=question,completion=answer`.
impl FromStr for ColumnNames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut written = WrittenNames::default();
        for pair in text.split(',') {
            let wrong = || format!("{pair:?}: expected a key and a column, such as prompt=question");
            let (key, column) = pair.split_once('=').ok_or_else(wrong)?;
            let place = written.places().into_iter().find(|(known, _)| *known == key.trim());
            let (_, place) = place.ok_or_else(|| {
                format!("{key:?}: expected text, messages, prompt, completion, instruction, input or output")
            })?;
            if place.replace(column.trim().to_owned()).is_some() {
                return Err(format!("{} is there twice", key.trim()));
            }
        }
        Self::try_from(written)
    }
}

impl fmt::Display for ColumnNames {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.0.iter().map(|(key, column)| format!("{key}={column}")).collect();
        out.write_str(&pairs.join(","))
    }
}

impl ColumnNames {
    /// As a recipe has them: `{ prompt = "question", completion = "answer" }`.
    pub fn to_toml(&self) -> String {
        let pair = |(key, column): &(&str, String)| format!("{key} = {}", toml::Value::from(column.as_str()));
        format!("{{ {} }}", self.0.iter().map(pair).collect::<Vec<_>>().join(", "))
    }

    /// Whether rows are read from the column.
    pub(super) fn takes(&self, column: &str) -> bool {
        self.0.iter().any(|(_, named)| named == column) || self.beside().any(|key| key == column)
    }

    /// The names of what stands beside a conversation, where the columns may be one.
    fn beside(&self) -> impl Iterator<Item = &'static str> {
        let may_be_messages = self.0.iter().all(|(key, _)| *key != "text");
        BESIDE.into_iter().filter(move |_| may_be_messages)
    }

    /// The named columns of a row, under the keys that are known.
    pub(super) fn pick(&self, object: &Map<String, Value>) -> Result<Map<String, Value>, RowProblem> {
        let take = |(key, column): &(&'static str, String)| match object.get(column) {
            None | Some(Value::Null) if *key == "input" => None, // Alpaca's rows leave it out
            Some(Value::Null) => Some(Err(RowProblem::null(column))),
            Some(value) => Some(Ok(((*key).to_owned(), value.clone()))),
            None => Some(Err(self.missing(column, object.keys()))),
        };
        let beside = |key: &'static str| Some(Ok((key.to_owned(), object.get(key)?.clone())));
        self.0.iter().filter_map(take).chain(self.beside().filter_map(beside)).collect()
    }

    /// Refuses a file that lacks a named column. (Without names, its first row shows whether all columns are there.)
    pub(super) fn check<'c>(&self, columns: impl Iterator<Item = &'c String> + Clone) -> Result<(), RowProblem> {
        let is_missing = |(_, column): &&(&'static str, String)| !columns.clone().any(|found| found == column);
        match self.0.iter().find(is_missing) {
            Some((_, column)) => Err(self.missing(column, columns)),
            None => Ok(()),
        }
    }

    fn missing<'c>(&self, column: &str, found: impl Iterator<Item = &'c String>) -> RowProblem {
        RowProblem::NoNamedColumn { column: column.to_owned(), found: found.cloned().collect() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_one_form_of_a_row() {
        let parsed = |text: &str| text.parse::<ColumnNames>();
        let names = parsed("completion=answer,prompt=question").unwrap();
        assert_eq!(names.to_string(), "prompt=question,completion=answer");
        assert_eq!(names.to_toml(), "{ prompt = \"question\", completion = \"answer\" }");
        assert_eq!(toml::to_string(&names).unwrap(), "prompt = \"question\"\ncompletion = \"answer\"\n");
        assert_eq!(toml::from_str::<ColumnNames>(&toml::to_string(&names).unwrap()).unwrap(), names);
        assert!(parsed("instruction=a,input=b,output=c").is_ok() && parsed("instruction=a,output=c").is_ok());
        assert!(parsed("prompt=question").unwrap_err().ends_with("got prompt"));
        assert!(parsed("text=a,messages=b").unwrap_err().ends_with("got text and messages"));
        assert!(parsed("question").unwrap_err().contains("such as prompt=question"));
        assert!(parsed("question=prompt").unwrap_err().starts_with("\"question\": expected text, messages"));
        assert_eq!(parsed("text=a,text=b").unwrap_err(), "text is there twice");
        assert_eq!(parsed("text= ").unwrap_err(), "text: expected the name of a column, got nothing");
        let blank = toml::from_str::<ColumnNames>("text = \"\"").unwrap_err().to_string();
        assert!(blank.contains("text: expected the name of a column, got nothing"), "{blank}");
    }

    #[test]
    fn a_row_has_the_named_columns_alone() {
        let names: ColumnNames = "prompt=question,completion=answer".parse().unwrap();
        let row = |value: Value| names.pick(value.as_object().unwrap()).map_err(|e| e.to_string());
        let read = row(json!({"text": "t", "answer": "a", "question": "q"})).unwrap();
        assert_eq!(Value::Object(read), json!({"prompt": "q", "completion": "a"}));
        let with_tools = json!({"question": [], "answer": [], "tools": [1], "chat_template_kwargs": {"a": 1}, "x": 1});
        let keys: Vec<String> = row(with_tools).unwrap().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["prompt", "completion", "tools", "chat_template_kwargs"]);
        assert!(names.takes("answer") && names.takes("system") && !names.takes("completion"));
        let expected = "expected a column \"answer\", as data.columns or --columns names it, got \"question\"";
        assert_eq!(row(json!({"question": "q"})).unwrap_err(), expected);
        let null = row(json!({"question": "q", "answer": null})).unwrap_err();
        assert_eq!(null, "answer: expected a value, got null");
    }

    #[test]
    fn an_input_may_be_absent() {
        let names: ColumnNames = "instruction=task,input=context,output=answer".parse().unwrap();
        for row in [json!({"task": "t", "answer": "a"}), json!({"task": "t", "context": null, "answer": "a"})] {
            let read = Value::Object(names.pick(row.as_object().unwrap()).unwrap());
            assert_eq!(read, json!({"instruction": "t", "output": "a"}));
        }
    }
}
