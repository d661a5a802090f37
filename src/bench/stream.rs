//! An answer as it comes: server-sent events, each a chunk of JSON.

use std::io::{BufRead, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::Deserialize;
use serde_json::Value;

use super::timeline::{AnsweredRequest, RequestTimeline, TokenCounts};
use crate::http::connector::reason;

const DONE: &[u8] = b"[DONE]";

/// Why a stream is no whole answer.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("the stream broke off: {reason}")]
    BrokenOff { reason: String },
    #[error("the stream has more than {longest} bytes")]
    TooLong { longest: u64 },
    #[error("the stream ended without data: [DONE]")]
    NoEnd,
    #[error("interrupted")]
    Interrupted,
    #[error("the stream has no usage: the server must know stream_options.include_usage")]
    NoUsage,
    #[error("a chunk of the stream is not one of the API: {0}")]
    Chunk(#[from] serde_json::Error),
    /// An event of the server.
    #[error("error in the stream: {message}")]
    Server { message: String },
}

#[derive(Debug, Deserialize)]
struct AnswerChunk {
    choices: Option<Vec<ChunkChoice>>,
    usage: Option<ChunkUsage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct ChunkChoice {
    /// Of /v1/completions.
    text: Option<String>,
    /// Of /v1/chat/completions.
    delta: Option<ChunkDelta>,
}

#[derive(Debug, Deserialize)]
struct ChunkDelta {
    content: Option<String>,
    // Servers do not agree on the name for what a model thinks before it answers.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize)]
struct ChunkUsage {
    prompt_tokens: Option<usize>,
    completion_tokens: usize,
    completion_tokens_details: Option<ChunkUsageDetails>,
}

#[derive(Debug, Deserialize)]
struct ChunkUsageDetails {
    accepted_prediction_tokens: Option<usize>,
    rejected_prediction_tokens: Option<usize>,
}

impl ChunkChoice {
    fn has_text(&self) -> bool {
        let is_text = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let has_text = |delta: &ChunkDelta| {
            [&delta.content, &delta.reasoning_content, &delta.reasoning].into_iter().any(is_text)
                || delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
        };
        is_text(&self.text) || self.delta.as_ref().is_some_and(has_text)
    }
}

impl ChunkUsage {
    fn counts(&self) -> TokenCounts {
        let new = self.completion_tokens;
        // Each step makes one token itself; the others are accepted guesses. A server that does not guess reports 0 of both.
        let steps = self.completion_tokens_details.as_ref().and_then(|details| {
            let accepted = details.accepted_prediction_tokens?;
            let guessed = accepted + details.rejected_prediction_tokens.unwrap_or(0);
            new.checked_sub(accepted).filter(|_| guessed > 0)
        });
        TokenCounts { prompt: self.prompt_tokens.unwrap_or(0), new, steps }
    }
}

/// Reads a stream of at most `longest` bytes to its end, so that its connection can be used again.
///
/// # Errors
/// An error of the server, a stream that breaks off, does not end or is none, one without usage.
pub fn read(
    stream: &mut impl BufRead,
    longest: u64,
    mut timeline: RequestTimeline,
    stop: &AtomicBool,
) -> Result<AnsweredRequest, StreamError> {
    let (mut usage, mut line, mut data) = (None, Vec::new(), Vec::new());
    let mut stream = stream.take(longest);
    loop {
        line.clear();
        let read = stream.read_until(b'\n', &mut line);
        let length = read.map_err(|why| StreamError::BrokenOff { reason: reason(&why.into()) })?;
        let now = Instant::now();
        match (stream.limit(), length) {
            (0, _) => return Err(StreamError::TooLong { longest }),
            (_, 0) => return Err(StreamError::NoEnd),
            _ if stop.load(Ordering::Relaxed) => return Err(StreamError::Interrupted),
            _ => {}
        }
        let text = line.trim_ascii_end();
        if let Some(more) = text.strip_prefix(b"data:") {
            data.extend_from_slice(more.strip_prefix(b" ").unwrap_or(more));
        }
        if !text.is_empty() || data.is_empty() {
            continue; // an event ends with an empty line; comments keep a connection alive
        }
        if data == DONE {
            let _ = std::io::copy(&mut stream, &mut std::io::sink()); // the answer is complete, whatever comes behind it
            let usage: ChunkUsage = usage.ok_or(StreamError::NoUsage)?;
            return Ok(timeline.end(now, usage.counts()));
        }
        let chunk: AnswerChunk = serde_json::from_slice(&data)?;
        data.clear();
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
            return Err(StreamError::Server { message });
        }
        if chunk.choices.iter().flatten().any(ChunkChoice::has_text) {
            timeline.arrive(now);
        }
        usage = chunk.usage.or(usage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::timeline::LevelRun;
    use crate::bounds::STREAM_BYTES;
    use crate::formats::load::{LoadResult, LoadSource};

    fn result(stream: &str) -> Result<LoadResult, StreamError> {
        let timeline = RequestTimeline::begin(Instant::now());
        let answered = vec![read(&mut stream.as_bytes(), STREAM_BYTES, timeline, &AtomicBool::new(false))?];
        let source = LoadSource::Server { endpoint: String::new(), model: String::new() };
        Ok(LevelRun { answered, ..LevelRun::default() }.result(1, source))
    }

    const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":8,"completion_tokens_details":{"accepted_prediction_tokens":4,"rejected_prediction_tokens":9}}}"#;

    #[test]
    fn tokens_are_those_of_the_usage_and_steps_those_without_accepted_guesses() {
        let stream = format!("data: {{\"choices\":[{{\"text\":\"a\"}}]}}\n\ndata: {USAGE}\n\ndata: [DONE]\n\n");
        let found = result(&stream).unwrap();
        assert_eq!((found.prompt_tokens, found.tokens, found.tokens_per_step), (3, 8, Some(2.0)));
        let plain = stream.replace(":4,", ":0,").replace(":9}", ":0}");
        assert_eq!(result(&plain).unwrap().tokens_per_step, None, "a server that does not guess");
    }

    #[test]
    fn only_chunks_with_text_arrive() {
        let chunk = |delta: &str| format!("data:{{\"choices\":[{{\"delta\":{delta}}}],\"usage\":null}}\r\n\r\n");
        let all = [
            chunk(r#"{"role":"assistant","content":""}"#),
            ": alive\n\n".into(),
            chunk(r#"{"reasoning_content":"hm"}"#),
            chunk(r#"{"content":"a"}"#),
            chunk(r#"{"tool_calls":[{"index":0}]}"#),
            chunk("{}"),
            format!("event: x\ndata: {USAGE}\n\ndata: [DONE]\n\n"),
        ];
        let timeline = RequestTimeline::begin(Instant::now());
        let answered = read(&mut all.concat().as_bytes(), STREAM_BYTES, timeline, &AtomicBool::new(false)).unwrap();
        assert_eq!(answered.arrivals(), 3);
    }

    #[test]
    fn a_stream_without_end_is_an_error() {
        for endless in ["x", "data: {}\n\n"] {
            let timeline = RequestTimeline::begin(Instant::now());
            let read = read(&mut endless.repeat(1000).as_bytes(), 999, timeline, &AtomicBool::new(false));
            assert_eq!(read.map(drop).unwrap_err().to_string(), "the stream has more than 999 bytes");
        }
    }

    #[test]
    fn a_stream_that_is_not_whole_is_an_error() {
        let error = |stream: &str| result(stream).unwrap_err().to_string();
        assert!(error("data: {\"choices\":[]}\n\n").contains("ended without data: [DONE]"));
        assert!(error("data: [DONE]\n\n").contains("stream_options.include_usage"));
        assert!(error("data: {\"error\":{\"message\":\"too hot\"}}\n\n").contains("error in the stream: too hot"));
        assert!(error("data: nonsense\n\n").contains("not one of the API"));
        let stopped =
            read(&mut &b"data: x\n"[..], STREAM_BYTES, RequestTimeline::begin(Instant::now()), &AtomicBool::new(true));
        assert!(stopped.is_err_and(|why| why.to_string() == "interrupted"));
    }
}
