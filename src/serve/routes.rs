//! The paths of the server.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{ConnectInfo, Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, EXPECT, HOST, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, Version};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use rand::Rng;
use serde_json::json;
use tokio::task::spawn_blocking;
use tokio::time::{timeout, timeout_at};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::answering::AnswerInProgress;
use super::api::answer::AnswerHead;
use super::api::error::ApiError;
use super::api::{Endpoint, models};
use super::connections::Phase;
use super::record::Record;
use super::service::{CheckedRequest, RequestBody, Service, kibibytes};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// OpenAI's clients obey it before they look at the status.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const HEALTH: &str = "/health";
/// Bytes of bodies that never wait for memory, so that clients of large or slow ones do not hold up the others.
const SMALL_BODY: usize = 64 << 10;
/// For a client that sends more than the limit to notice it.
const DISCARD_TIME: Duration = Duration::from_secs(5);
/// Comments between the chunks of a stream that waits, so that nobody on the way takes it for dead.
const STILL_HERE: Duration = Duration::from_secs(15);

/// The routes of a service; pages of these origins may call it.
pub fn routes(service: &Arc<Service>, origins: Option<AllowOrigin>) -> Router {
    let routes = Router::new()
        .route(CHAT, post(chat))
        .route(COMPLETIONS, post(completions))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(show_model))
        .route(HEALTH, get(health))
        .route("/metrics", get(metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(service.clone(), record))
        .with_state(service.clone());
    match origins {
        Some(origins) => routes.layer(cors(origins)),
        None => routes,
    }
}

fn cors(origins: AllowOrigin) -> CorsLayer {
    CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request()) // OpenAI's client sends several of its own
        .expose_headers([REQUEST_ID, RETRY_AFTER, SHOULD_RETRY])
}

/// Around every request: its id and record, the host and the key.
async fn record(State(service): State<Arc<Service>>, mut request: Request, next: Next) -> Response {
    let id = format!("req-{:016x}", rand::rng().random::<u64>());
    let path = request.uri().path().to_owned();
    let record = Record::begin(service.recorder.clone(), &id, known(&path));
    record.set("method", request.method().as_str());
    if let Some(ConnectInfo(peer)) = request.extensions().get::<ConnectInfo<SocketAddr>>() {
        record.set("peer", peer.to_string());
    }
    request.extensions_mut().insert(record.clone());
    let mut response = match admit(&service, &path, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => refused(&record, &error),
    };
    record.answered(response.status().as_u16());
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// The path, or a name for all that the server does not have: a label of the metrics must not grow with what clients make up.
fn known(path: &str) -> &str {
    const PATHS: [&str; 5] = [CHAT, COMPLETIONS, "/v1/models", HEALTH, "/metrics"];
    let same = PATHS.into_iter().find(|known| *known == path);
    same.unwrap_or(if path.starts_with("/v1/models/") { "/v1/models/{id}" } else { "other" })
}

fn admit(service: &Service, path: &str, request: &Request) -> Result<(), ApiError> {
    if let Some(got) = hosts(request).find(|host| !service.hosts.admit(host)) {
        return Err(ApiError::WrongHost { got: got.into_owned() });
    }
    let named = request.headers().get_all(HOST).iter().count();
    if named > 1 || (named == 0 && request.version() >= Version::HTTP_11) {
        return Err(ApiError::HostCount { got: named });
    }
    let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    match authorization {
        _ if path == HEALTH => Ok(()),
        None if service.keys.are_needed() => Err(ApiError::NoKey),
        given if !service.keys.admit(given) => Err(ApiError::WrongKey),
        _ => Ok(()),
    }
}

/// What a request calls the server; a browser always names it.
fn hosts(request: &Request) -> impl Iterator<Item = Cow<'_, str>> {
    let in_line = request.uri().authority().map(|authority| Cow::Borrowed(authority.as_str()));
    request.headers().get_all(HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes())).chain(in_line)
}

fn refused(record: &Record, error: &ApiError) -> Response {
    record.failed(error);
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(error.to_json())).into_response();
    if let Some(seconds) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    if error.is_not_to_be_repeated() {
        response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

async fn chat(service: State<Arc<Service>>, record: Extension<Record>, request: Request) -> Response {
    answer(Endpoint::Chat, &service, &record, request).await
}

async fn completions(service: State<Arc<Service>>, record: Extension<Record>, request: Request) -> Response {
    answer(Endpoint::Completions, &service, &record, request).await
}

async fn answer(endpoint: Endpoint, service: &Arc<Service>, record: &Record, request: Request) -> Response {
    match begin(endpoint, service, record, request).await {
        Ok(answer) => respond(answer, record).await,
        Err(error) => refused(record, &error),
    }
}

async fn respond(answer: AnswerInProgress, record: &Record) -> Response {
    if answer.is_streamed() {
        let events = Sse::new(answer.streamed()).keep_alive(KeepAlive::new().interval(STILL_HERE));
        return events.into_response();
    }
    match answer.whole().await {
        Ok(answer) => Json(answer).into_response(),
        Err(error) => refused(record, &error),
    }
}

/// Reads a request and hands its texts to the thread that decodes.
async fn begin(
    endpoint: Endpoint,
    service: &Arc<Service>,
    record: &Record,
    request: Request,
) -> Result<AnswerInProgress, ApiError> {
    if *service.phase.borrow() != Phase::Serving {
        return Err(ApiError::ShuttingDown);
    }
    check_type(request.headers())?;
    let limit = service.limits.time.min(service.limits.body_time);
    let body = tokio::select! {
        read = timeout_at(record.began() + limit, read(service, request)) => {
            read.map_err(|_| ApiError::TimeLimit { limit })??
        }
        () = service.cut() => return Err(ApiError::ShuttingDown),
    };
    let checking = service.clone();
    let checked = spawn_blocking(move || checking.checked(endpoint, body)).await;
    let CheckedRequest { request, prompts } = checked.map_err(|panic| {
        record.set("error", panic.to_string());
        ApiError::Internal
    })??;
    record.set("stream", request.stream);
    record.set("prompt_tokens", prompts.iter().map(|prompt| prompt.len()).sum::<usize>());
    record.set_text("prompts", || prompts.iter().map(|prompt| json!(**prompt)).collect());
    let texts = service.enter(&request, prompts)?;
    let head = AnswerHead {
        id: format!("{}{:016x}", endpoint.id_prefix(), rand::rng().random::<u64>()),
        created: seconds_since_1970(),
        model: request.model.clone(),
        endpoint,
        include_usage: request.include_usage,
    };
    Ok(AnswerInProgress::new(service, head, request, texts, record.clone()))
}

/// Pages of other origins can send texts without being asked, but not JSON.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("bytes that are no text"));
    if let Some(got) = text(CONTENT_ENCODING).filter(|encoding| !encoding.eq_ignore_ascii_case("identity")) {
        return Err(ApiError::ContentEncoding { got: got.to_owned() });
    }
    let given = text(CONTENT_TYPE).unwrap_or("none");
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::ContentType { got: given.to_owned() })
}

/// A body, once there is memory for it.
async fn read(service: &Service, request: Request) -> Result<RequestBody, ApiError> {
    let (limit, asks_first) = (service.limits.body_bytes, request.headers().contains_key(EXPECT));
    let mut body = request.into_body();
    let bytes = body.size_hint().upper().map_or(limit, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    if bytes > limit {
        if !asks_first {
            discard(body).await;
        }
        return Err(ApiError::BodyTooLarge { limit });
    }
    let memory = match bytes {
        ..=SMALL_BODY => None,
        _ => Some(service.bodies.clone().acquire_many_owned(kibibytes(bytes)).await),
    };
    let memory = memory.transpose().map_err(|_| ApiError::ShuttingDown)?;
    match Limited::new(&mut body, limit).collect().await {
        Ok(body) => Ok(RequestBody { json: body.to_bytes(), memory }),
        Err(error) if error.is::<LengthLimitError>() => {
            discard(body).await;
            Err(ApiError::BodyTooLarge { limit })
        }
        Err(error) => Err(ApiError::Json { why: format!("the connection broke: {error}") }),
    }
}

/// Reads the rest of a body for a while: a client that is still sending when the connection closes may lose the answer.
async fn discard(mut body: Body) {
    let all = async { while let Some(Ok(_)) = body.frame().await {} };
    let _ = timeout(DISCARD_TIME, all).await;
}

async fn list_models(State(service): State<Arc<Service>>) -> Response {
    Json(models::list(std::slice::from_ref(&service.model), service.created)).into_response()
}

async fn show_model(
    State(service): State<Arc<Service>>,
    Extension(record): Extension<Record>,
    id: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response {
    let id = id.map_or_else(|_| uri.path().to_owned(), |Path(id)| id); // the path as it came, where it is not UTF-8
    if id == service.model {
        return Json(models::model(&id, service.created)).into_response();
    }
    refused(&record, &ApiError::UnknownModel { model: id })
}

async fn health(State(service): State<Arc<Service>>, Extension(record): Extension<Record>) -> Response {
    if *service.phase.borrow() == Phase::Serving {
        return Json(json!({"status": "ok"})).into_response();
    }
    refused(&record, &ApiError::ShuttingDown)
}

async fn metrics(State(service): State<Arc<Service>>, Extension(record): Extension<Record>) -> Response {
    const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
    match service.recorder.metrics.page() {
        Ok(page) => ([(CONTENT_TYPE, TYPE)], page).into_response(),
        Err(error) => {
            record.set("error", error.to_string());
            refused(&record, &ApiError::Internal)
        }
    }
}

async fn not_found(Extension(record): Extension<Record>, uri: Uri) -> Response {
    refused(&record, &ApiError::NotFound { path: uri.path().to_owned() })
}

async fn method_not_allowed(Extension(record): Extension<Record>, method: Method, uri: Uri) -> Response {
    let path = uri.path().to_owned();
    let allowed = if [CHAT, COMPLETIONS].contains(&path.as_str()) { "POST" } else { "GET" };
    refused(&record, &ApiError::MethodNotAllowed { path, method: method.to_string(), allowed })
}

/// As `created` of an answer.
pub fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
