//! An in-memory Hub on localhost, with the part of the protocol that programs use and faults on request. Python's
//! huggingface_hub is run against it as a second client, which checks that it behaves like the real Hub wherever both
//! clients look.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The only valid token.
pub(crate) const TOKEN: &str = "hf_TheOneThatIsRight";
/// Part of the URLs of its store: whoever has it can read.
pub(crate) const SIGNATURE: &str = "SignedForAnHour";
/// Bytes per part of a multipart upload.
const PART: usize = 1 << 20;
/// Files per page of a tree listing.
const PAGE: usize = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) bytes: Vec<u8>,
    pub(crate) lfs: bool,
}

type Tree = BTreeMap<String, Stored>;

/// Each commit has a complete tree.
#[derive(Debug, Default)]
pub(crate) struct Repo {
    pub(crate) private: bool,
    pub(crate) gated: bool,
    commits: HashMap<String, Tree>,
    branches: BTreeMap<String, String>,
}

/// A fault in the first `times` requests whose path contains `path`.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) path: String,
    pub(crate) trouble: Trouble,
    pub(crate) times: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Trouble {
    /// Answers with this status and `Retry-After` in seconds.
    Status(u16, Option<u64>),
    /// Closes the connection after this many bytes of the body.
    Break(usize),
    /// Changes the last byte of the body.
    Corrupt,
    /// Answers this and all later requests with 503 and a `Retry-After` of one day.
    Gone,
    /// Adds another client's commit first.
    Raced,
    /// Redirects to this server under another host name.
    Elsewhere,
    /// Performs the request but answers with this status, like a gateway that timed out.
    Done(u16),
}

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) has_token: bool,
    pub(crate) range: Option<String>,
}

/// How the pages of a tree follow each other.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// As far as there are files.
    #[default]
    Whole,
    /// Each page names itself as the next one.
    Repeated,
    /// The first file of each page is there twice.
    Twice,
    /// An empty page follows the last one, and so on.
    Endless,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Key: `models/owner/name` or `datasets/owner/name`.
    pub(crate) repos: HashMap<String, Repo>,
    /// LFS objects by SHA-256.
    objects: HashMap<String, Vec<u8>>,
    parts: HashMap<(String, usize), Vec<u8>>,
    /// Host of further pages of a tree, if not this one: `http://localhost`.
    pub(crate) next_page: Option<&'static str>,
    /// How the pages of a tree follow each other.
    pub(crate) pages: Pages,
    pub(crate) faults: Vec<Fault>,
    pub(crate) seen: Vec<Seen>,
}

/// Listens until the test process ends.
pub(crate) struct Server {
    port: u16,
    state: Arc<Mutex<State>>,
}

struct Request {
    method: String,
    path: String,
    query: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    medusa::files::hex(&Sha256::digest(bytes))
}

pub(crate) fn git_hash(bytes: &[u8]) -> String {
    let mut hasher = Sha1::new();
    hasher.update(format!("blob {}\0", bytes.len()));
    hasher.update(bytes);
    medusa::files::hex(&hasher.finalize())
}

fn is_large(path: &str, size: usize) -> bool {
    size > 10 << 20 || ["safetensors", "bin", "pt", "parquet"].iter().any(|end| path.ends_with(end))
}

impl Stored {
    fn hash(&self) -> String {
        if self.lfs { sha256(&self.bytes) } else { git_hash(&self.bytes) }
    }
}

impl Repo {
    pub(crate) fn head(&self, branch: &str) -> &Tree {
        &self.commits[&self.branches[branch]]
    }

    pub(crate) fn commit_of(&self, branch: &str) -> String {
        self.branches[branch].clone()
    }

    fn commit(&mut self, branch: &str, tree: Tree) -> String {
        let described: Vec<_> = tree.iter().map(|(path, file)| format!("{path} {}", file.hash())).collect();
        let text = format!("{branch} {} {}", self.commits.len(), described.join("\n"));
        let commit = git_hash(text.as_bytes());
        self.commits.insert(commit.clone(), tree);
        self.branches.insert(branch.into(), commit.clone());
        commit
    }

    fn resolve(&self, revision: &str) -> Option<String> {
        let of_branch = self.branches.get(revision).cloned();
        of_branch.or_else(|| self.commits.contains_key(revision).then(|| revision.to_owned()))
    }
}

impl Server {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                thread::spawn(move || serve(&stream, port, &state));
            }
        });
        Self { port, state }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no request panicked")
    }

    /// Adds a public repository with these files on `main`.
    pub(crate) fn add(&self, repo: &str, files: &[(&str, Vec<u8>)]) {
        let mut state = self.state();
        let stored = |(path, bytes): &(&str, Vec<u8>)| {
            ((*path).to_owned(), Stored { bytes: bytes.clone(), lfs: is_large(path, bytes.len()) })
        };
        let tree: Tree = files.iter().map(stored).collect();
        for file in tree.values().filter(|file| file.lfs) {
            state.objects.insert(file.hash(), file.bytes.clone());
        }
        state.repos.entry(repo.into()).or_default().commit("main", tree);
    }

    pub(crate) fn fail(&self, path: &str, trouble: Trouble, times: usize) {
        self.state().faults.push(Fault { path: path.into(), trouble, times });
    }

    /// Forgets past requests and pending faults.
    pub(crate) fn forget(&self) {
        let mut state = self.state();
        state.seen.clear();
        state.faults.clear();
    }

    /// Requests of this method whose path contains `piece`.
    pub(crate) fn seen(&self, method: &str, piece: &str) -> Vec<Seen> {
        self.state().seen.iter().filter(|seen| seen.method == method && seen.path.contains(piece)).cloned().collect()
    }
}

fn serve(stream: &TcpStream, port: u16, state: &Mutex<State>) {
    let Some(request) = read(stream) else { return };
    let mut state = state.lock().expect("no request panicked");
    let token = request.headers.get("authorization").cloned();
    state.seen.push(Seen {
        method: request.method.clone(),
        path: request.path.clone(),
        has_token: token.is_some(),
        range: request.headers.get("range").cloned(),
    });
    let fault = state.faults.iter_mut().find(|fault| fault.times > 0 && request.path.contains(&fault.path));
    let trouble = fault.map(|fault| {
        fault.times -= 1;
        fault.trouble
    });
    if let Some(Trouble::Raced) = trouble {
        for repo in state.repos.values_mut() {
            let mut tree = repo.head("main").clone();
            tree.insert("other.txt".into(), Stored { bytes: b"other".to_vec(), lfs: false });
            repo.commit("main", tree);
        }
    }
    let right = format!("Bearer {TOKEN}");
    let trouble = if let Some(Trouble::Gone) = trouble {
        let tomorrow = Trouble::Status(503, Some(86_400));
        state.faults.insert(0, Fault { path: "/".into(), trouble: tomorrow, times: usize::MAX });
        Some(tomorrow)
    } else {
        trouble
    };
    let mut answer = match (trouble, token) {
        (Some(Trouble::Status(status, seconds)), _) => {
            let headers = seconds.map(|seconds| ("Retry-After", seconds.to_string())).into_iter().collect();
            Answer { status, headers, body: json!({"error": "in trouble"}).to_string().into() }
        }
        (Some(Trouble::Elsewhere), _) => {
            let to = format!("http://localhost:{port}{}?{}", request.path, request.query);
            Answer { status: 307, headers: vec![("Location", to)], body: Vec::new() }
        }
        // Repeats the token in its answer, as a careless proxy would.
        (_, Some(token)) if token != right => Answer {
            status: 401,
            headers: vec![("X-Error-Message", format!("Invalid credentials in Authorization header: {token}"))],
            body: json!({"error": format!("Invalid credentials: {token}")}).to_string().into(),
        },
        (_, token) => route(&mut state, &request, port, token.is_some()),
    };
    drop(state);
    if let Some(Trouble::Done(status)) = trouble {
        answer = Answer { status, headers: vec![("Retry-After", "0".into())], body: Vec::new() };
    }
    if let Some(Trouble::Corrupt) = trouble
        && let Some(byte) = answer.body.last_mut()
    {
        *byte ^= 1;
    }
    let sent = if let Some(Trouble::Break(bytes)) = trouble { bytes.min(answer.body.len()) } else { answer.body.len() };
    let _ = write(stream, &answer, request.method == "HEAD", sent); // the client may have closed the connection
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let mut body = Vec::new();
    if headers.get("transfer-encoding").is_some_and(|value| value == "chunked") {
        read_chunks(&mut reader, &mut body)?;
    } else if let Some(length) = headers.get("content-length") {
        reader.take(length.parse().ok()?).read_to_end(&mut body).ok()?;
    }
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Some(Request { method, path: path.into(), query: query.into(), headers, body })
}

fn read_chunks(reader: &mut impl BufRead, body: &mut Vec<u8>) -> Option<()> {
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let size = u64::from_str_radix(line.trim(), 16).ok()?;
        reader.take(size).read_to_end(body).ok()?;
        reader.read_line(&mut line).ok()?;
        if size == 0 {
            return Some(());
        }
    }
}

fn write(mut stream: &TcpStream, answer: &Answer, is_head: bool, sent: usize) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Answer\r\nConnection: close\r\n", answer.status);
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    write!(stream, "{head}Content-Length: {}\r\n\r\n", answer.body.len())?;
    if is_head { Ok(()) } else { stream.write_all(&answer.body[..sent]) }
}

fn json_answer(value: &Value) -> Answer {
    Answer { status: 200, headers: vec![("Content-Type", "application/json".into())], body: value.to_string().into() }
}

fn refused(status: u16, code: &str) -> Answer {
    let headers = vec![("X-Error-Code", code.to_owned()), ("X-Error-Message", format!("refused: {code}"))];
    Answer { status, headers, body: json!({"error": code}).to_string().into() }
}

fn decoded(path: &str) -> Vec<String> {
    let decode = |part: &str| {
        let mut bytes = Vec::new();
        let mut rest = part.as_bytes();
        while let [first, after @ ..] = rest {
            let escaped = (*first == b'%').then(|| std::str::from_utf8(after.get(..2)?).ok()).flatten();
            match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
                Some(byte) => (bytes.push(byte), rest = &after[2..]).0,
                None => (bytes.push(*first), rest = after).0,
            }
        }
        String::from_utf8(bytes).expect("UTF-8 in an address")
    };
    path.trim_start_matches('/').split('/').map(decode).collect()
}

fn route(state: &mut State, request: &Request, port: u16, is_user: bool) -> Answer {
    let parts = decoded(&request.path);
    let words: Vec<&str> = parts.iter().map(String::as_str).collect();
    let json: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    match (request.method.as_str(), words.as_slice()) {
        ("GET", ["api", "whoami-v2"]) if is_user => json_answer(&json!({"name": "org", "type": "user"})),
        ("GET", ["cdn", hash]) if request.query.contains(SIGNATURE) => ranged(request, &state.objects[*hash]),
        ("PUT", ["store", hash]) => put_object(state, hash, &request.body),
        ("PUT", ["store", hash, part]) => {
            state.parts.insert(((*hash).into(), part.parse().expect("a part's number")), request.body.clone());
            Answer { status: 200, headers: vec![("ETag", format!("\"{}\"", git_hash(&request.body)))], body: vec![] }
        }
        ("POST", ["store", hash, "complete"]) => complete(state, hash, &json),
        ("POST", ["verify"]) if is_user => json_answer(&json!({})),
        ("POST", ["api", "repos", "create"]) if is_user => create(state, &json, port),
        ("POST", [owner, name, "info", "lfs", "objects", "batch"]) if is_user => {
            assert!(state.repos.contains_key(&format!("models/{owner}/{}", name.trim_end_matches(".git"))));
            json_answer(&batch(state, &json, port))
        }
        (method, ["api", kind, owner, name, rest @ ..]) => {
            let repo = format!("{kind}/{owner}/{name}");
            visible(state, &repo, is_user)
                .unwrap_or_else(|| api(state, (method, &repo, rest), request, (&json, is_user)))
        }
        ("GET" | "HEAD", ["datasets", owner, name, "resolve", revision, path @ ..]) => {
            resolve(state, &format!("datasets/{owner}/{name}"), (revision, &path.join("/")), is_user, port)
        }
        ("GET" | "HEAD", [owner, name, "resolve", revision, path @ ..]) => {
            resolve(state, &format!("models/{owner}/{name}"), (revision, &path.join("/")), is_user, port)
        }
        _ => refused(404, ""),
    }
}

/// The refusal if the repository does not exist or this user may not see it.
fn visible(state: &State, repo: &str, is_user: bool) -> Option<Answer> {
    let is_there = state.repos.get(repo).is_some_and(|repo| is_user || !repo.private);
    (!is_there).then(|| refused(if is_user { 404 } else { 401 }, "RepoNotFound"))
}

fn api(
    state: &mut State,
    (method, name, rest): (&str, &str, &[&str]),
    request: &Request,
    (json, is_user): (&Value, bool),
) -> Answer {
    let (objects, further) = (&state.objects, (state.next_page, state.pages));
    let repo = state.repos.get_mut(name).expect("it is visible");
    let id = name.split_once('/').expect("a kind").1;
    let info = |repo: &Repo, commit: &str| {
        let siblings: Vec<_> = repo.commits[commit].keys().map(|path| json!({"rfilename": path})).collect();
        json_answer(&json!({"_id": "1", "id": id, "sha": commit, "private": repo.private, "tags": [], "downloads": 0,
            "gated": if repo.gated { json!("manual") } else { json!(false) }, "siblings": siblings}))
    };
    match (method, rest) {
        ("GET", []) => info(repo, &repo.commit_of("main")),
        ("GET", ["revision", revision]) => match repo.resolve(revision) {
            Some(commit) => info(repo, &commit),
            None => refused(404, "RevisionNotFound"),
        },
        ("GET", ["tree", revision]) => match repo.resolve(revision) {
            Some(commit) => page(&repo.commits[&commit], request, further),
            None => refused(404, "RevisionNotFound"),
        },
        _ if !is_user => refused(401, ""),
        ("POST", ["branch", branch]) => {
            if repo.branches.contains_key(*branch) {
                return refused(409, "");
            }
            repo.branches.insert((*branch).into(), repo.commit_of("main"));
            json_answer(&json!({}))
        }
        ("POST", ["preupload", _]) => {
            let mode = |file: &Value| {
                let (path, size) = (file["path"].as_str().expect("a path"), file["size"].as_u64().expect("a size"));
                let is_lfs = is_large(path, usize::try_from(size).expect("small"));
                json!({"path": path, "uploadMode": if is_lfs { "lfs" } else { "regular" },
                    "shouldIgnore": path.ends_with(".log"), "oid": repo.head("main").get(path).map(Stored::hash)})
            };
            json_answer(
                &json!({"files": json["files"].as_array().expect("files").iter().map(mode).collect::<Vec<_>>()}),
            )
        }
        ("POST", ["commit", branch]) => commit(repo, (id, branch), request, objects),
        _ => refused(404, ""),
    }
}

fn page(tree: &Tree, request: &Request, (elsewhere, pages): (Option<&str>, Pages)) -> Answer {
    let cursor = request.query.split('&').find_map(|pair| pair.strip_prefix("cursor="));
    let from: usize = cursor.map_or(0, |cursor| cursor.parse().expect("a number"));
    let entry = |(path, file): (&String, &Stored)| {
        let mut entry = json!({"type": "file", "path": path, "size": file.bytes.len(), "oid": git_hash(&file.bytes)});
        if file.lfs {
            entry["oid"] = git_hash(b"a pointer").into();
            entry["lfs"] = json!({"oid": file.hash(), "size": file.bytes.len(), "pointerSize": 134});
        }
        entry
    };
    let mut entries: Vec<Value> = tree.iter().skip(from).take(PAGE).map(entry).collect();
    if pages == Pages::Twice {
        entries.extend(entries.first().cloned());
    }
    let mut answer = json_answer(&json!(entries));
    if from + PAGE < tree.len() || pages == Pages::Endless {
        let host = &request.headers["host"];
        let port = host.rsplit(':').next().expect("a port");
        let origin = elsewhere.map_or_else(|| format!("http://{host}"), |origin| format!("{origin}:{port}"));
        let cursor = if pages == Pages::Repeated { from } else { from + PAGE };
        let address = format!("{origin}{}?recursive=true&cursor={cursor}", request.path);
        let signed = elsewhere.map_or_else(String::new, |_| format!("&X-Signature={SIGNATURE}"));
        let next = format!("<{address}{signed}>; rel=\"next\"");
        answer.headers.push(("Link", next));
    }
    answer
}

fn resolve(state: &State, name: &str, (revision, path): (&str, &str), is_user: bool, port: u16) -> Answer {
    if let Some(refusal) = visible(state, name, is_user) {
        return refusal;
    }
    let repo = &state.repos[name];
    if repo.gated {
        return refused(if is_user { 403 } else { 401 }, "GatedRepo");
    }
    let Some(commit) = repo.resolve(revision) else { return refused(404, "RevisionNotFound") };
    let Some(file) = repo.commits[&commit].get(path) else { return refused(404, "EntryNotFound") };
    let common = [("X-Repo-Commit", commit), ("ETag", format!("\"{}\"", file.hash()))];
    if !file.lfs {
        return Answer { status: 200, headers: common.into(), body: file.bytes.clone() };
    }
    // Another host name, so that a test notices a token sent there.
    let to = format!("http://localhost:{port}/cdn/{}?X-Signature={SIGNATURE}", file.hash());
    let linked = [("X-Linked-Etag", format!("\"{}\"", file.hash())), ("X-Linked-Size", file.bytes.len().to_string())];
    let headers = common.into_iter().chain(linked).chain([("Location", to)]).collect();
    Answer { status: 302, headers, body: Vec::new() }
}

fn ranged(request: &Request, bytes: &[u8]) -> Answer {
    let start = request.headers.get("range").and_then(|range| {
        range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok().filter(|start| *start < bytes.len())
    });
    match start {
        None => Answer { status: 200, headers: vec![("Accept-Ranges", "bytes".into())], body: bytes.into() },
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
            Answer { status: 206, headers: vec![("Content-Range", range)], body: bytes[start..].into() }
        }
    }
}

fn create(state: &mut State, json: &Value, port: u16) -> Answer {
    let (owner, name) = (json["organization"].as_str().unwrap_or("org"), json["name"].as_str().expect("a name"));
    let kind = if json["type"] == "dataset" { "datasets" } else { "models" };
    let prefix = if json["type"] == "dataset" { "datasets/" } else { "" };
    let url = format!("http://127.0.0.1:{port}/{prefix}{owner}/{name}");
    if owner != "org" {
        return refused(403, "");
    }
    let key = format!("{kind}/{owner}/{name}");
    if state.repos.contains_key(&key) {
        let body = json!({"error": "You already created this repo", "url": url}).to_string().into();
        return Answer { status: 409, headers: Vec::new(), body };
    }
    let private = json["private"] == true || json["visibility"] == "private";
    let mut repo = Repo { private, ..Repo::default() };
    let attributes = Stored { bytes: b"*.safetensors filter=lfs\n".to_vec(), lfs: false };
    repo.commit("main", Tree::from([(".gitattributes".to_owned(), attributes)]));
    state.repos.insert(key, repo);
    json_answer(&json!({"url": url, "id": format!("{owner}/{name}"), "name": format!("{owner}/{name}")}))
}

fn batch(state: &State, json: &Value, port: u16) -> Value {
    let object = |object: &Value| {
        let (oid, size) = (object["oid"].as_str().expect("a hash"), object["size"].as_u64().expect("a size"));
        if state.objects.contains_key(oid) {
            return json!({"oid": oid, "size": size});
        }
        let store = format!("http://localhost:{port}/store/{oid}");
        let verify = json!({"href": format!("http://127.0.0.1:{port}/verify")});
        let parts = usize::try_from(size).expect("small").div_ceil(PART);
        let upload = if parts == 1 {
            json!({"href": format!("{store}?X-Signature={SIGNATURE}")})
        } else {
            let mut header = json!({"chunk_size": PART.to_string()});
            for part in 1..=parts {
                header[format!("{part:05}")] = format!("{store}/{part}?X-Signature={SIGNATURE}").into();
            }
            json!({"href": format!("{store}/complete"), "header": header})
        };
        json!({"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}})
    };
    let objects: Vec<Value> = json["objects"].as_array().expect("objects").iter().map(object).collect();
    json!({"transfer": "basic", "objects": objects})
}

fn put_object(state: &mut State, hash: &str, bytes: &[u8]) -> Answer {
    if sha256(bytes) != hash {
        return refused(400, "");
    }
    state.objects.insert(hash.into(), bytes.into());
    Answer { status: 200, headers: Vec::new(), body: Vec::new() }
}

fn complete(state: &mut State, hash: &str, json: &Value) -> Answer {
    let mut whole = Vec::new();
    for part in json["parts"].as_array().expect("parts") {
        let number = usize::try_from(part["partNumber"].as_u64().expect("a number")).expect("small");
        let bytes = &state.parts[&(hash.to_owned(), number)];
        assert_eq!(part["etag"].as_str(), Some(format!("\"{}\"", git_hash(bytes)).as_str()));
        whole.extend_from_slice(bytes);
    }
    put_object(state, hash, &whole)
}

fn commit(
    repo: &mut Repo,
    (id, branch): (&str, &str),
    request: &Request,
    objects: &HashMap<String, Vec<u8>>,
) -> Answer {
    let mut tree = repo.head(branch).clone();
    for line in request.body.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Value = serde_json::from_slice(line).expect("a line of JSON");
        let value = &line["value"];
        let path = || value["path"].as_str().expect("a path").to_owned();
        match line["key"].as_str() {
            Some("header") => {
                let parent = value["parentCommit"].as_str();
                if parent.is_some_and(|parent| parent != repo.commit_of(branch)) {
                    return refused(412, "");
                }
            }
            Some("file") => {
                let bytes = STANDARD.decode(value["content"].as_str().expect("a content")).expect("base64");
                tree.insert(path(), Stored { bytes, lfs: false });
            }
            Some("lfsFile") => match objects.get(value["oid"].as_str().expect("a hash")) {
                Some(bytes) => drop(tree.insert(path(), Stored { bytes: bytes.clone(), lfs: true })),
                None => return refused(400, ""),
            },
            other => panic!("a commit has no {other:?}"),
        }
    }
    let oid = repo.commit(branch, tree);
    let page = format!("http://{}/{id}/commit/{oid}", request.headers["host"]);
    json_answer(&json!({"success": true, "commitOid": oid, "commitUrl": page, "hookOutput": ""}))
}
