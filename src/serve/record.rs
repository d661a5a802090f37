//! The record of a request: one JSON line for the log, and its metrics. Never what was asked or said, unless that is wanted.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::api::error::ApiError;
use super::metrics::ServerMetrics;

/// Receives the lines.
pub type LogSink = Arc<dyn Fn(&Value) + Send + Sync>;

/// The status of a request whose client went away before the answer began, as nginx has it.
const CLIENT_CLOSED: u16 = 499;

/// Where records go.
#[derive(Clone)]
pub struct Recorder {
    pub sink: LogSink,
    pub metrics: ServerMetrics,
    /// Whether prompts and answers are logged.
    pub logs_texts: bool,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("logs_texts", &self.logs_texts).finish_non_exhaustive()
    }
}

/// A request's record. It is written when its last clone is dropped: after the last byte of a streamed answer, or when the client
/// went away.
#[derive(Debug, Clone)]
pub struct Record(Arc<OpenRecord>);

#[derive(Debug)]
struct OpenRecord {
    recorder: Recorder,
    began: Instant,
    endpoint: String,
    line: Mutex<RecordLine>,
}

#[derive(Debug)]
struct RecordLine {
    status: u16,
    facts: Map<String, Value>,
}

impl Record {
    /// Of a request that begins now; `endpoint` is its path, if the server has it.
    pub fn begin(recorder: Recorder, id: &str, endpoint: &str) -> Self {
        let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let facts = [("time", json!(time)), ("request_id", json!(id)), ("endpoint", json!(endpoint))];
        let facts = facts.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let line = Mutex::new(RecordLine { status: CLIENT_CLOSED, facts });
        Self(Arc::new(OpenRecord { recorder, began: Instant::now(), endpoint: endpoint.to_owned(), line }))
    }

    /// When the request began.
    pub fn began(&self) -> Instant {
        self.0.began
    }

    /// The HTTP status of the answer.
    pub fn answered(&self, status: u16) {
        self.0.line().status = status;
    }

    /// Adds the error that a client gets, by its type: its words may quote the request.
    pub fn failed(&self, error: &ApiError) {
        self.set("error_type", error.code().unwrap_or(error.kind()));
        self.set_text("error", || json!(error.to_string()));
    }

    /// Adds a fact, or replaces it.
    pub fn set(&self, key: &str, value: impl Into<Value>) {
        self.0.line().facts.insert(key.to_owned(), value.into());
    }

    /// Adds a text, where texts are logged.
    pub fn set_text(&self, key: &str, text: impl FnOnce() -> Value) {
        if self.0.recorder.logs_texts {
            self.set(key, text());
        }
    }
}

impl OpenRecord {
    fn line(&self) -> MutexGuard<'_, RecordLine> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        let seconds = self.began.elapsed().as_secs_f64();
        let RecordLine { status, mut facts } =
            std::mem::replace(&mut *self.line(), RecordLine { status: CLIENT_CLOSED, facts: Map::new() });
        facts.insert("status".to_owned(), json!(status));
        facts.insert("seconds".to_owned(), json!((seconds * 1e6).round() / 1e6));
        let Recorder { sink, metrics, .. } = &self.recorder;
        metrics.count_request(&self.endpoint, status, seconds);
        sink(&Value::Object(facts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(logs_texts: bool, run: impl FnOnce(Record)) -> (Vec<Value>, String) {
        let lines = Arc::new(Mutex::new(vec![]));
        let heard = lines.clone();
        let sink: LogSink = Arc::new(move |line| heard.lock().expect("no test panics").push(line.clone()));
        let metrics = ServerMetrics::new().expect("names differ");
        run(Record::begin(Recorder { sink, metrics: metrics.clone(), logs_texts }, "req-1", "/v1/models"));
        let page = String::from_utf8(metrics.page().expect("text")).expect("UTF-8");
        let lines = lines.lock().expect("no test panics").clone();
        (lines, page)
    }

    #[test]
    fn a_record_is_one_line_and_has_texts_only_where_wanted() {
        for logs_texts in [false, true] {
            let (lines, page) = recorded(logs_texts, |record| {
                let other = record.clone();
                record.answered(200);
                drop(record);
                other.set_text("prompt", || json!("a secret"));
            });
            let [line] = &lines[..] else { panic!("one line: {lines:?}") };
            assert_eq!((&line["request_id"], &line["status"]), (&json!("req-1"), &json!(200)));
            assert!(line["seconds"].is_number() && line["time"].is_string());
            assert_eq!(line.get("prompt").is_some(), logs_texts);
            assert!(page.contains("medusa_requests_total{endpoint=\"/v1/models\",status=\"200\"} 1"), "{page}");
        }
    }

    #[test]
    fn a_client_that_went_away_is_distinguished() {
        let (lines, page) = recorded(false, drop);
        assert_eq!(lines[0]["status"], 499);
        assert!(page.contains("status=\"499\"} 1"), "{page}");
    }
}
