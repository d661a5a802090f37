//! Requests that never become texts: limits, keys, paths, methods, bodies, other origins.

use std::collections::BTreeSet;

use axum::http::Method;
use axum::http::header::{ALLOW, AUTHORIZATION, CONTENT_LENGTH, ORIGIN, RETRY_AFTER, WWW_AUTHENTICATE};
use tower_http::cors::AllowOrigin;

use super::*;

#[test]
fn a_full_queue_says_when_to_come_again() {
    run(async {
        let server = FakeServer::new();
        let (open, job) = server.begun(COMPLETIONS, &completion(&json!({"n": 3}))).await;
        let others = [server.job().await, server.job().await];
        let refused = server.post(COMPLETIONS, &completion(&json!({"n": 2}))).await.expect("no panic");
        assert_eq!(refused.headers()[RETRY_AFTER], "1");
        let (status, error) = json_of(refused).await;
        assert_eq!((status, &error["error"]["code"]), (429, &json!("queue_full")));
        let message = "the queue has 1 place left, and the request asks for 2 texts; try again in 1 s";
        assert_eq!(error["error"]["message"], message);
        assert_eq!(server.free_places(), 1, "a refused request takes none");
        drop((open, job, others));
        let (sent, job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        finish(job, [ended("", &[8, 9, 10], FinishReason::Eos)]);
        assert_eq!(answer(sent).await.0, 200);
    });
}

#[test]
fn a_request_for_more_texts_than_there_are_places_names_what_asks_for_them() {
    run(async {
        let server = FakeServer::new();
        let prompts = json!(vec!["a"; 5]);
        for (more, param) in [(json!({"n": 5}), "n"), (json!({"prompt": prompts}), "prompt")] {
            let (status, error) = answer(server.post(COMPLETIONS, &completion(&more))).await;
            assert_eq!((status, &error["error"]["param"]), (400, &json!(param)));
            assert_eq!(error["error"]["message"], format!("{param}: expected at most 4 texts in a request, got 5"));
        }
    });
}

#[test]
fn a_text_that_cannot_fit_the_context_does_not_become_tokens() {
    run(async {
        let server = FakeServer::new();
        let longest = PROMPTING.tokenizer.longest_token();
        let text_of = |bytes: usize| "a".repeat(bytes);
        for (path, param, bytes) in [(COMPLETIONS, "prompt", 4 * 64 * longest), (CHAT, "messages", 4 * 64 * longest)] {
            let ask = |text: String| match path {
                CHAT => chat(&json!({"messages": [{"role": "user", "content": text}]})),
                _ => completion(&json!({"prompt": text})),
            };
            let (status, error) = answer(server.post(path, &ask(text_of(bytes)))).await;
            assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")), "{error}");
            assert_eq!(error["error"]["param"], param);
            let message = error["error"]["message"].as_str().expect("words");
            assert!(
                message.ends_with("bytes, too many for the context of 64 tokens; send a shorter prompt"),
                "{message}"
            );
            let (status, error) = answer(server.post(path, &ask(text_of(bytes / 2)))).await;
            assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")), "{error}");
            let message = error["error"]["message"].as_str().expect("words");
            assert!(
                message.contains(" tokens, and the context 64 with the answer"),
                "its tokens are counted: {message}"
            );
        }
    });
}

#[test]
fn the_servers_limit_on_new_tokens_holds_and_a_default_bows_to_it() {
    run(async {
        let server = FakeServer::with(|service| service.limits.new_tokens = limit(8));
        for (path, body) in [(COMPLETIONS, completion(&json!({}))), (CHAT, chat(&json!({})))] {
            let (_sent, job) = server.begun(path, &body).await;
            assert_eq!(job.text.settings.max_new_tokens, 8, "{path}");
        }
        let (_sent, job) = server.begun(COMPLETIONS, &completion(&json!({"max_tokens": 7}))).await;
        assert_eq!(job.text.settings.max_new_tokens, 7);
        let (status, error) = answer(server.post(COMPLETIONS, &completion(&json!({"max_tokens": 9})))).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!("max_tokens")), "{error}");
    });
}

#[test]
fn a_key_opens_all_paths_and_health_needs_none() {
    run(async {
        let server = FakeServer::with(|service| service.keys = ApiKeys::new(["sesame"]));
        let with_key = |path: &str, key: Option<&str>| {
            let request = key.iter().fold(Request::get(path), |request, key| request.header(AUTHORIZATION, *key));
            server.send(request.body(Body::empty()).expect("a request"))
        };
        for path in ["/v1/models", "/metrics", "/nothing"] {
            for key in [None, Some("Bearer wrong"), Some("Basic sesame")] {
                let refused = with_key(path, key).await.expect("no panic");
                assert_eq!(refused.headers()[WWW_AUTHENTICATE], "Bearer", "{path} {key:?}");
                let (status, error) = json_of(refused).await;
                assert_eq!((status, &error["error"]["code"]), (401, &json!("invalid_api_key")), "{path} {key:?}");
            }
            let admitted = with_key(path, Some("Bearer sesame")).await.expect("no panic").status();
            assert_eq!(admitted, if path == "/nothing" { 404 } else { 200 }, "{path}");
        }
        assert_eq!(answer(with_key("/health", None)).await, (200, json!({"status": "ok"})));
        assert!(!server.lines().iter().any(|line| line.to_string().contains("sesame")));
    });
}

/// A page that points its name to a loopback address after it was loaded.
#[test]
fn a_page_cannot_call_the_server_by_its_own_name() {
    run(async {
        let server = FakeServer::with(|service| service.hosts = HostNames::loopback_and(["box"]));
        let called = |path: &str, hosts: &[&str]| {
            let request = hosts.iter().fold(Request::get(path), |request, host| request.header(HOST, *host));
            server.send(request.body(Body::empty()).expect("a request"))
        };
        for path in ["/v1/models", "/metrics", "/health", "/nothing", "http://evil.example/v1/models"] {
            for hosts in [&["evil.example:8000"][..], &["localhost", "evil.example:8000"]] {
                let (status, error) = answer(called(path, hosts)).await;
                assert_eq!((status, &error["error"]["code"]), (403, &json!("host_not_allowed")), "{path} {hosts:?}");
                let message = error["error"]["message"].as_str().expect("a message");
                assert!(message.contains("evil.example") && message.contains("--allowed-host"), "{message}");
            }
        }
        assert_eq!(answer(called("http://evil.example/health", &["localhost"])).await.0, 403);
        for hosts in [&["localhost:8000"][..], &["127.0.0.1:8000"], &["box:8000"]] {
            assert_eq!(answer(called("/v1/models", hosts)).await.0, 200, "{hosts:?}");
        }
        let posted = Request::post(COMPLETIONS)
            .header(CONTENT_TYPE, "application/json")
            .header(HOST, "evil.example")
            .body(completion(&json!({})).to_string().into());
        assert_eq!(answer(server.send(posted.expect("a request"))).await.0, 403);
        assert!(server.jobs.try_recv().is_err(), "no text was begun");
    });
}

#[test]
fn a_request_of_http_1_1_has_one_host() {
    run(async {
        let server = FakeServer::new();
        for (version, hosts, expected) in [
            (Version::HTTP_11, 0, 400),
            (Version::HTTP_11, 1, 200),
            (Version::HTTP_11, 2, 400),
            (Version::HTTP_10, 0, 200),
            (Version::HTTP_10, 2, 400),
        ] {
            let request =
                (0..hosts).fold(Request::get("/v1/models").version(version), |request, _| request.header(HOST, "a"));
            let request = request.body(Body::empty()).expect("a request");
            let answer = routes(&server.service, None).oneshot(request).await.expect("an answer");
            assert_eq!(answer.status(), expected, "{version:?}, {hosts}");
        }
    });
}

#[test]
fn pages_of_one_origin_may_call_and_others_may_not() {
    run(async {
        let server = FakeServer::with(|service| service.keys = ApiKeys::new(["sesame"]));
        let origins = || AllowOrigin::list(["https://example.org".parse().expect("a value")]);
        let ask = async |method: Method, origin: &str| {
            let request = Request::builder().method(method).uri(CHAT).header(ORIGIN, origin).header(HOST, "localhost");
            let request = request
                .header("access-control-request-method", "POST")
                .header("access-control-request-headers", "authorization,x-stainless-os")
                .body(Body::empty())
                .expect("a request");
            routes(&server.service, Some(origins())).oneshot(request).await.expect("an answer")
        };
        let preflight = ask(Method::OPTIONS, "https://example.org").await;
        assert_eq!(preflight.status(), 200, "a preflight has no key");
        let headers = preflight.headers();
        assert_eq!(headers["access-control-allow-origin"], "https://example.org");
        assert_eq!(headers["access-control-allow-methods"], "GET,POST");
        assert_eq!(headers["access-control-allow-headers"], "authorization,x-stainless-os", "OpenAI's client");
        let other = ask(Method::OPTIONS, "https://example.com").await;
        assert!(!other.headers().contains_key("access-control-allow-origin"));
        let refused = ask(Method::POST, "https://example.org").await;
        assert_eq!(refused.status(), 401);
        assert_eq!(refused.headers()["access-control-allow-origin"], "https://example.org", "the page reads the error");
        assert_eq!(refused.headers()["access-control-expose-headers"], "x-request-id,retry-after,x-should-retry");
    });
}

#[test]
fn other_paths_and_methods_are_errors_as_clients_read_them() {
    run(async {
        let server = FakeServer::new();
        let cases = [
            ("GET", "/", 404, None),
            ("POST", "/v1/embeddings", 404, None),
            ("GET", "/v1/models/", 404, None),
            ("GET", "/v1/models/other", 404, None),
            ("GET", CHAT, 405, Some("POST")),
            ("DELETE", "/v1/models", 405, Some("GET")),
            ("POST", "/v1/models/my-completions", 405, Some("GET")),
            ("OPTIONS", "/health", 405, Some("GET")),
        ];
        let mut ids = BTreeSet::new();
        for (method, path, expected, allowed) in cases {
            let request = Request::builder().method(method).uri(path).body(Body::empty()).expect("a request");
            let response = server.send(request).await.expect("no panic");
            ids.insert(response.headers()["x-request-id"].clone());
            let allow = response.headers().get(ALLOW).map(|allow| allow.to_str().expect("text").to_owned());
            assert_eq!(allow.is_some(), allowed.is_some(), "{method} {path}: {allow:?}");
            let (status, error) = json_of(response).await;
            assert_eq!((status, &error["error"]["type"]), (expected, &json!("invalid_request_error")), "{path}");
            let message = error["error"]["message"].as_str().expect("a message");
            if let (Some(allowed), Some(allow)) = (allowed, allow) {
                assert!(message.ends_with(&format!("use {allowed}")) && allow.contains(allowed), "{message} {allow}");
            }
        }
        let logged: BTreeSet<String> = server.lines().iter().map(|line| line["request_id"].to_string()).collect();
        assert_eq!(logged, ids.iter().map(|id| format!("{id:?}")).collect());
        assert_eq!(ids.len(), cases.len(), "ids differ");
        let page = server.page();
        assert!(page.contains("medusa_requests_total{endpoint=\"other\",status=\"404\"} 2"), "{page}");
        assert!(!page.contains("embeddings"), "clients make up no labels: {page}");
    });
}

#[test]
fn the_model_is_listed() {
    run(async {
        let server = FakeServer::with(|service| service.model = "owner/tiny".to_owned());
        let model = json!({"id": "owner/tiny", "object": "model", "created": 7, "owned_by": "medusa"});
        let list = json!({"object": "list", "data": [model]});
        assert_eq!(answer(server.send(get("/v1/models"))).await, (200, list));
        assert_eq!(answer(server.send(get("/v1/models/owner/tiny"))).await, (200, model));
        let head = Request::head("/health").body(Body::empty()).expect("a request");
        let response = server.send(head).await.expect("no panic");
        assert_eq!((response.status().as_u16(), text_of(response).await), (200, String::new()));
    });
}

#[test]
fn a_body_is_bounded_in_type_length_and_time() {
    run(async {
        let server = FakeServer::new();
        let small = || completion(&json!({})).to_string();
        let large = || completion(&json!({"user": "x".repeat(BODY_BYTES)})).to_string();
        let in_parts = Body::from_stream(stream::iter(
            large()
                .into_bytes()
                .chunks(1000)
                .map(Bytes::copy_from_slice)
                .map(Ok::<_, std::io::Error>)
                .collect::<Vec<_>>(),
        ));
        let cases = [
            (Request::post(CHAT).body(small().into()), 415, "Content-Type"),
            (Request::post(CHAT).header(CONTENT_TYPE, "text/plain").body(small().into()), 415, "text/plain"),
            (Request::post(CHAT).header("content-encoding", "gzip").body(small().into()), 415, "Content-Encoding"),
            (posted(CHAT).body(large().into()), 413, "131072 bytes"),
            (posted(CHAT).body(in_parts), 413, "131072 bytes"),
            (posted(CHAT).header(CONTENT_LENGTH, 9).body(endless_body()), 408, "within 30 s"),
            (posted(CHAT).body(Body::empty()), 400, "line 1 column 0"),
        ];
        for (request, expected, message) in cases {
            let response = server.send(request.expect("a request")).await.expect("no panic");
            let retry = response.headers().get("x-should-retry").cloned();
            assert_eq!(
                retry,
                (expected == 408).then(|| HeaderValue::from_static("false")),
                "OpenAI's clients repeat a 408"
            );
            let (status, error) = json_of(response).await;
            assert_eq!(status, expected, "{error}");
            assert!(error["error"]["message"].as_str().is_some_and(|said| said.contains(message)), "{error}");
        }
        assert_eq!(server.service.bodies.available_permits(), BODIES_KIB, "all memory is given back");
        let hasty = FakeServer::with(|service| service.limits.time = Duration::from_secs(2));
        let (status, error) = answer(hasty.send(posted(CHAT).body(endless_body()).expect("a request"))).await;
        assert_eq!(
            (status, error["error"]["message"].as_str()),
            (408, Some("request timed out: not finished within 2 s"))
        );
    });
}

#[test]
fn slow_large_bodies_hold_up_large_ones_and_no_others() {
    run(async {
        let server = FakeServer::new();
        let slow = || server.send(posted(COMPLETIONS).body(endless_body()).expect("a request"));
        let large = completion(&json!({"user": "x".repeat(100_000)}));
        let (first, _second) = (slow(), slow());
        sleep(Duration::from_millis(1)).await;
        assert_eq!(server.service.bodies.available_permits(), 0);
        let waiting = server.post(COMPLETIONS, &large);
        let (_small, job) = server.begun(COMPLETIONS, &completion(&json!({}))).await;
        assert!(!waiting.is_finished() && server.jobs.try_recv().is_err());
        first.abort();
        assert_eq!(server.job().await.text.prompt, job.text.prompt, "memory is given back by who leaves");
        assert_eq!(server.service.bodies.available_permits(), BODIES_KIB / 2, "and by what is parsed");
    });
}

#[test]
fn times_are_counted_apart_from_probes() {
    run(async {
        let server = FakeServer::new();
        for path in ["/health", "/health", "/v1/models"] {
            assert_eq!(answer(server.send(get(path))).await.0, 200);
        }
        let page = server.page();
        assert!(page.contains("medusa_request_seconds_count{endpoint=\"/health\"} 2"), "{page}");
        assert!(page.contains("medusa_request_seconds_count{endpoint=\"/v1/models\"} 1"), "{page}");
    });
}
