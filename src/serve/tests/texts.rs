//! Whole answers, and requests that end before their texts.

use super::*;
use crate::data::tokenize::narrow;
use crate::engine::sample::Stream;

#[test]
fn a_chat_is_answered_whole() {
    run(async {
        let server = FakeServer::new();
        let (sent, job) = server.begun(CHAT, &chat(&json!({}))).await;
        assert_eq!((job.choice, job.text.settings.max_new_tokens), (0, usize::MAX));
        let prompt = server.service.prompting.tokenizer.decode(&narrow(&job.text.prompt), false).expect("text");
        assert_eq!(prompt, "<|bos|><|user|>hi<|end|><|assistant|>");
        let tokens = job.text.prompt.len();
        finish(job, [piece("Hel", &[8]), ended("lo", &[9, 10], FinishReason::Eos)]);
        let (status, mut answer) = answer(sent).await;
        assert_eq!(status, 200);
        let id = answer["id"].take();
        assert!(id.as_str().is_some_and(|id| id.starts_with("chatcmpl-")), "{id}");
        assert!(answer["created"].take().is_u64());
        let message = json!({"role": "assistant", "content": "Hello", "refusal": null});
        let usage = json!({
            "prompt_tokens": tokens, "completion_tokens": 3, "total_tokens": tokens + 3,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3},
        });
        let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"});
        let expected = json!({
            "id": null, "object": "chat.completion", "created": null, "model": "tiny", "choices": [choice],
            "usage": usage,
        });
        assert_eq!(answer, expected);
        let line = server.line();
        assert_eq!((&line["status"], &line["usage"], &line["endpoint"]), (&json!(200), &usage, &json!(CHAT)));
        assert_eq!(line.get("aborted"), None, "{line}");
        assert_eq!(server.free_places(), PLACES);
    });
}

#[test]
fn texts_of_several_prompts_come_in_any_order_and_are_answered_in_theirs() {
    run(async {
        let server = FakeServer::new();
        let body = json!({
            "model": "tiny", "prompt": [[5, 6, 7], [5]], "n": 2, "seed": 3, "max_tokens": 9, "return_token_ids": true
        });
        let sent = server.post(COMPLETIONS, &body);
        let mut jobs = vec![];
        for choice in 0..4 {
            let job = server.job().await;
            let (index, sample) = (choice / 2, choice % 2);
            assert_eq!(job.choice, choice as usize);
            assert_eq!(job.text.stream, Stream { seed: 3, index, turn: 0, sample });
            assert_eq!((job.text.prompt.len(), job.text.settings.max_new_tokens), ([3, 1][index as usize], 9));
            jobs.push(job);
        }
        assert_eq!(server.free_places(), 0);
        for job in &jobs {
            assert!(job.send(piece(&format!("{} begins", job.choice), &[8])));
        }
        for job in jobs.into_iter().rev() {
            finish(job, [ended(" and ends", &[9, 10], FinishReason::Length)]);
        }
        let (status, answer) = answer(sent).await;
        assert_eq!(status, 200, "{answer}");
        for choice in 0..4 {
            let shown = &answer["choices"][choice];
            let expected = json!({
                "index": choice, "text": format!("{choice} begins and ends"), "logprobs": null,
                "finish_reason": "length", "token_ids": [8, 9, 10],
                "prompt_token_ids": if choice < 2 { json!([5, 6, 7]) } else { json!([5]) },
            });
            assert_eq!(*shown, expected);
        }
        let usage = &answer["usage"];
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(4), &json!(12)));
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 4, "a prompt counts once: {usage}");
        assert_eq!(server.free_places(), PLACES);
    });
}

#[test]
fn a_text_that_fails_logs_why_and_the_client_gets_no_more_than_it_should_know() {
    run(async {
        let failed = (TextEvent::Failed("row 7 broke".to_owned()), 500, "internal error");
        let refused = (TextEvent::Refused("no log-probabilities here".to_owned()), 400, "no log-probabilities here");
        for (event, expected, message) in [failed, refused] {
            let server = FakeServer::new();
            let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({"n": 2}))).await;
            let other = server.job().await;
            finish(job, [piece("half", &[8]), event]);
            let (status, answer) = answer(sent).await;
            let said = answer["error"]["message"].as_str().expect("a message");
            assert!(status == expected && said.contains(message) && !said.contains("row 7"), "{status} {answer}");
            assert!(other.events.is_closed(), "nobody waits for the other text");
            let line = server.line();
            assert_eq!(line["status"], expected);
            assert_eq!(line["error"] == "row 7 broke", expected == 500, "{line}");
            assert_eq!(line.get("aborted"), None, "the client heard the end: {line}");
        }
    });
}

#[test]
fn a_text_that_takes_too_long_ends_at_the_time_limit() {
    run(async {
        let server = FakeServer::new();
        let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        assert!(job.send(piece("half", &[8])));
        let (status, answer) = answer(sent).await; // time jumps
        assert_eq!((status, &answer["error"]["type"]), (408, &json!("timeout_error")), "{answer}");
        assert_eq!(answer["error"]["message"], "request timed out: not finished within 600 s");
        assert!(job.events.is_closed() && server.line().get("aborted").is_none(), "{:?}", server.line());
    });
}

#[test]
fn a_client_that_leaves_is_heard_of_and_gives_its_place_back() {
    run(async {
        let server = FakeServer::new();
        let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        assert!(!job.events.is_closed());
        sent.abort();
        assert!(sent.await.is_err_and(|error| error.is_cancelled()));
        assert!(job.events.is_closed() && !job.send(piece("more", &[8])));
        assert_eq!(server.free_places(), PLACES - 1, "the worker has the text");
        drop(job);
        assert_eq!(server.free_places(), PLACES);
        let line = server.line();
        assert_eq!((&line["status"], &line["aborted"]), (&json!(499), &json!(true)), "{line}");
        let counted = format!("medusa_requests_total{{endpoint=\"{COMPLETIONS}\",status=\"499\"}} 1");
        assert!(server.page().contains(&counted), "{}", server.page());
    });
}

#[test]
fn a_server_that_stops_finishes_open_requests_until_it_cuts_them() {
    run(async {
        let server = FakeServer::new();
        let (first, first_job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        let (second, second_job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        server.phase.send_replace(Phase::Draining);
        for late in [server.post(COMPLETIONS, &completion(&json!({}))), server.send(get("/health"))] {
            let (status, answer) = answer(late).await;
            assert_eq!((status, &answer["error"]["message"]), (503, &json!("the server is shutting down")));
        }
        finish(first_job, [ended("whole", &[8, 9, 10], FinishReason::Eos)]);
        assert_eq!(answer(first).await.0, 200);
        server.phase.send_replace(Phase::Cutting);
        assert_eq!(answer(second).await.0, 503);
        assert!(second_job.events.is_closed());
    });
}

#[test]
fn a_body_that_is_on_its_way_is_cut_too() {
    run(async {
        let server = FakeServer::new();
        let sent = server.send(posted(COMPLETIONS).body(endless_body()).expect("a request"));
        sleep(Duration::from_secs(1)).await;
        assert!(!sent.is_finished());
        server.phase.send_replace(Phase::Cutting);
        sleep(Duration::from_millis(1)).await;
        assert!(sent.is_finished());
        assert_eq!(answer(sent).await.0, 503);
    });
}

#[test]
fn without_a_worker_there_is_no_answer() {
    run(async {
        let server = FakeServer::new();
        let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        let FakeServer { jobs, service, .. } = server;
        drop((job, jobs));
        assert_eq!(answer(sent).await.0, 503, "its text is lost");
        let request = posted(COMPLETIONS).body(Body::from(completion(&json!({})).to_string())).expect("a request");
        let late = routes(&service, None).oneshot(request).await.expect("an answer");
        assert_eq!((late.status().as_u16(), service.places.available_permits()), (503, PLACES));
    });
}
