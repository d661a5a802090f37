//! Answers in chunks.

use super::*;
use crate::serve::api::answer::ShownToken;

/// The data of a stream's events; comments have none.
fn data(stream: &str) -> Vec<&str> {
    let events = stream.split_terminator("\n\n").filter(|event| !event.starts_with(':'));
    events.map(|event| event.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event:?}"))).collect()
}

/// The chunks of a stream that ended well.
fn chunks(stream: &str) -> Vec<Value> {
    let data = data(stream);
    let (last, chunks) = data.split_last().expect("a stream has chunks");
    assert_eq!(*last, "[DONE]");
    chunks.iter().map(|chunk| serde_json::from_str(chunk).expect("JSON")).collect()
}

async fn streamed(sent: JoinHandle<Response>) -> String {
    let response = sent.await.expect("no panic");
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()[CONTENT_TYPE], "text/event-stream");
    text_of(response).await
}

#[test]
fn a_chat_of_two_texts_comes_in_chunks_as_they_come() {
    run(async {
        let server = FakeServer::new();
        let more = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
        let (sent, first) = server.begun(CHAT, &chat(&more)).await;
        let second = server.job().await;
        let tokens = first.text.prompt.len();
        assert!(second.send(piece("B", &[9])) && first.send(piece("A", &[8])) && second.send(piece("", &[11])));
        finish(second, [ended("", &[10], FinishReason::Length)]);
        finish(first, [ended("a", &[10], FinishReason::Stop)]);
        let chunks = chunks(&streamed(sent).await);
        let (usage, choice_chunks) = chunks.split_last().expect("chunks");
        let choice = |index: usize, delta: Value, finish: Value| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": finish});
        let role = || json!({"role": "assistant", "content": "", "refusal": null});
        let expected = [
            choice(0, role(), Value::Null),
            choice(1, role(), Value::Null),
            choice(1, json!({"content": "B"}), Value::Null),
            choice(0, json!({"content": "A"}), Value::Null),
            choice(1, json!({}), json!("length")),
            choice(0, json!({"content": "a"}), json!("stop")),
        ];
        let shown: Vec<&Value> = choice_chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
        assert_eq!(json!(shown), json!(expected));
        for chunk in &chunks {
            assert_eq!((&chunk["object"], &chunk["model"]), (&json!("chat.completion.chunk"), &json!("tiny")));
            assert_eq!((&chunk["id"], &chunk["created"]), (&usage["id"], &usage["created"]));
        }
        assert!(choice_chunks.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
        assert_eq!((&usage["choices"], &usage["usage"]["total_tokens"]), (&json!([]), &json!(tokens + 6)));
        let line = server.line();
        assert_eq!((&line["status"], &line["stream"], &line["usage"]), (&json!(200), &json!(true), &usage["usage"]));
        assert!(line.get("aborted").is_none() && server.free_places() == PLACES, "{line}");
    });
}

#[test]
fn a_completion_streams_tokens_with_their_places_and_its_prompt_once() {
    run(async {
        let server = FakeServer::new();
        let more = json!({"stream": true, "logprobs": 0, "return_token_ids": true});
        let (sent, job) = server.begun(COMPLETIONS, &completion(&more)).await;
        assert_eq!((job.text.settings.logprobs, job.text.settings.max_new_tokens), (Some(0), 16));
        let with_logprobs = |text: &str, id: i64, token: &str| TextPiece {
            text: text.to_owned(),
            ids: vec![id],
            logprobs: vec![ShownToken { text: token.to_owned(), bytes: vec![], logprob: -0.5, top: vec![] }],
        };
        let generated = GeneratedTokens { tokens: 3, steps: 3 };
        let end = EndedText { reason: FinishReason::Eos, generated, cached_tokens: 0, proposed: 0 };
        finish(
            job,
            [
                TextEvent::Piece(with_logprobs("", 8, "")),
                TextEvent::Piece(with_logprobs("é", 9, "é")),
                TextEvent::Piece(TextPiece::default()),
                TextEvent::Ended(with_logprobs("b", 10, "b"), end),
            ],
        );
        let chunks = chunks(&streamed(sent).await);
        let choice = |text: &str, id: i64, offset: usize, finish: Value| {
            let logprobs = json!({
                "tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}], "text_offset": [offset],
            });
            json!({"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish, "token_ids": [id]})
        };
        let mut expected =
            [choice("", 8, 0, Value::Null), choice("é", 9, 0, Value::Null), choice("b", 10, 1, json!("stop"))];
        expected[0]["prompt_token_ids"] = json!([5, 6, 7]);
        let shown: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
        assert_eq!(json!(shown), json!(expected));
        assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion" && chunk.get("usage").is_none()));
    });
}

#[test]
fn a_stream_that_fails_ends_with_an_error() {
    run(async {
        let cases = [("internal", "server_error"), ("timed out", "timeout_error"), ("shutting down", "server_error")];
        for (why, kind) in cases {
            let server = FakeServer::new();
            let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({"stream": true}))).await;
            assert!(job.send(piece("half", &[8])));
            match why {
                "internal" => assert!(job.send(TextEvent::Failed("row 7 broke".to_owned()))),
                "timed out" => {} // time jumps to the limit
                _ => _ = server.phase.send_replace(Phase::Cutting),
            }
            let stream = streamed(sent).await;
            let [half, error] = data(&stream)[..] else { panic!("two chunks: {stream}") };
            assert!(half.contains("\"half\""), "what came before is sent: {half}");
            let error: Value = serde_json::from_str(error).expect("JSON");
            let message = error["error"]["message"].as_str().expect("a message");
            assert!(message.contains(why) && error["error"]["type"] == kind, "{why}: {error}");
            assert!(job.events.is_closed());
            let line = server.line();
            assert_eq!((&line["status"], &line["error_type"]), (&json!(200), &json!(kind)), "{line}");
            assert_eq!(line["error"] == "row 7 broke", why == "internal", "{line}");
            let usage = json!({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4});
            assert_eq!(line["usage"], usage, "what was decoded until then");
            assert_eq!(line.get("aborted"), None, "{line}");
        }
    });
}

#[test]
fn a_stream_that_waits_says_that_it_is_still_there() {
    run(async {
        let server = FakeServer::new();
        let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({"stream": true}))).await;
        let mut body = sent.await.expect("no panic").into_body();
        let frame = body.frame().await.expect("a frame").expect("no error"); // time jumps
        assert_eq!(frame.into_data().expect("data"), ":\n\n");
        finish(job, [ended("late", &[8, 9, 10], FinishReason::Eos)]);
        let rest = body.collect().await.expect("a body").to_bytes();
        assert_eq!(chunks(std::str::from_utf8(&rest).expect("UTF-8"))[0]["choices"][0]["text"], "late");
    });
}

#[test]
fn a_client_that_leaves_a_stream_is_heard_of() {
    run(async {
        let server = FakeServer::new();
        let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({"stream": true}))).await;
        let mut body = sent.await.expect("no panic").into_body();
        assert!(job.send(piece("half", &[8])));
        assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
        assert!(server.lines().is_empty() && !job.events.is_closed(), "it is under way");
        assert!(job.send(piece(" more", &[9, 10])), "decoded, but not sent yet");
        drop(body);
        assert!(job.events.is_closed());
        let line = server.line();
        assert_eq!((&line["status"], &line["aborted"]), (&json!(200), &json!(true)), "{line}");
        assert_eq!(line["usage"], json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}), "{line}");
    });
}
