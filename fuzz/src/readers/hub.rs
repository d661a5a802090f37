//! The Hub's answers: commits, listings, pages and redirects, each a whole HTTP response of a server on this machine; and its cache.
//!
//! All requests go through a proxy, which is that server: no redirect leads anywhere else.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;

use medusa::hub::id::{self, Id};
use medusa::hub::{DataSplit, Hub, TransferEvent, Wanted};

use super::scratch::{choice, folder, words, write};

/// What the server answers, in turn.
static ANSWERS: Mutex<VecDeque<Vec<u8>>> = Mutex::new(VecDeque::new());
/// One reader at a time has the server.
static IN_USE: Mutex<()> = Mutex::new(());
static SERVER: LazyLock<u16> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of this machine");
    let port = listener.local_addr().expect("an address").port();
    thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(answer(stream))));
    port
});
const COMMIT: &str = "0123456789012345678901234567890123456789";

thread_local! {
    static ONLINE: Hub<'static> = with("hub", &[]);
    static OFFLINE: Hub<'static> = with("hub_cache", &[("HF_HUB_OFFLINE", "1")]);
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with(name: &str, more: &[(&str, &str)]) -> Hub<'static> {
    let (proxy, cache) = (format!("http://127.0.0.1:{}", *SERVER), folder(name).display().to_string());
    let settings = [("HF_ENDPOINT", "http://hub.test"), ("HTTP_PROXY", &proxy), ("HF_HOME", &cache)];
    let setting = |name: &str| {
        let found = settings.iter().chain(more).find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Hub::with_settings(&setting, &watch).expect("settings that are right")
}

/// What unwinds where a client would wait for a server in trouble, or begin to download.
struct Enough;

fn watch(event: TransferEvent) {
    if matches!(event, TransferEvent::Waiting { .. } | TransferEvent::Began { .. }) {
        panic::resume_unwind(Box::new(Enough));
    }
}

/// Answers one request, and closes the connection.
fn answer(stream: TcpStream) -> std::io::Result<()> {
    let mut lines = BufReader::new(&stream);
    let mut line = String::new();
    while lines.read_line(&mut line)? > 2 {
        line.clear();
    }
    let next = held(&ANSWERS).pop_front();
    (&stream).write_all(&next.unwrap_or_else(|| response(b"404\n\n")))
}

/// A status, headers and behind an empty line the body, as an HTTP response whose length is right.
fn response(piece: &[u8]) -> Vec<u8> {
    let end = piece.windows(2).position(|two| two == b"\n\n").unwrap_or(piece.len());
    let (head, body) = (&piece[..end], piece.get(end + 2..).unwrap_or_default());
    let mut lines = head.split(|&byte| byte == b'\n');
    let status = lines.next().and_then(|line| std::str::from_utf8(line).ok()?.parse::<u16>().ok());
    let status = status.filter(|status| (200..600).contains(status)).unwrap_or(200);
    let mut out =
        format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n", body.len()).into_bytes();
    for line in lines.filter(|line| !line.to_ascii_lowercase().starts_with(b"content-length")) {
        out.extend_from_slice(line);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
    out
}

/// The first byte says what is asked for, the pieces between NULs are what the server answers; behind an `o`, the files of the cache that
/// is read without a network.
pub(super) fn hub(input: &[u8]) {
    let _one = held(&IN_USE);
    let (what, rest) = choice(input);
    let mut pieces = rest.split(|&byte| byte == 0);
    if what == b'o' {
        return OFFLINE.with(|hub| cached(hub, &mut pieces));
    }
    *held(&ANSWERS) = pieces.map(response).collect();
    let (id, wanted) = match what {
        b'd' => (id::data("owner/data"), Wanted::Data(DataSplit::HeldOut)),
        b't' => (id::data("owner/data@main/part/*.jsonl"), Wanted::Data(DataSplit::Train)),
        b'c' => (id::data("owner/data:config:split"), Wanted::Data(DataSplit::Any)),
        b's' => (id::data("owner/data::split"), Wanted::Data(DataSplit::Any)),
        b'v' => (id::data("owner/data:config"), Wanted::Data(DataSplit::Validation)),
        b'r' => (id::data("owner/data@main"), Wanted::Data(DataSplit::Train)),
        b'h' => (id::model("owner/model@v1"), Wanted::Heads),
        _ => (id::model("owner/model"), Wanted::Backbone),
    };
    ONLINE.with(|hub| fetch(hub, &id.expect("an id"), wanted));
}

fn fetch(hub: &Hub<'_>, id: &Id, wanted: Wanted) {
    match panic::catch_unwind(AssertUnwindSafe(|| hub.fetch(id, wanted))) {
        Ok(Ok(fetched)) => assert!(fetched.folder.ends_with(&fetched.origin.commit)),
        Ok(Err(error)) => {
            let words = words(&error);
            assert!(
                ["hub.test", "owner/", "models--owner", "datasets--owner"].iter().any(|name| words.contains(name)),
                "an error names neither Hub nor id: {words}"
            );
            assert!(!words.contains(|c: char| c.is_control() && c != '\n'), "control characters: {words:?}");
        }
        Err(payload) if payload.is::<Enough>() => {}
        Err(payload) => panic::resume_unwind(payload),
    }
}

/// A reference, the list of a data set's files, the index of weights, and the config of a model.
fn cached<'p>(hub: &Hub<'_>, pieces: &mut impl Iterator<Item = &'p [u8]>) {
    let cache = folder("hub_cache").join("hub");
    let model = cache.join("models--owner--model");
    let snapshot = model.join("snapshots").join(COMMIT);
    let data = cache.join("datasets--owner--data");
    let reference = pieces.next().unwrap_or_default();
    let put = |folder: PathBuf, name: &str, bytes: Option<&[u8]>| {
        fs::create_dir_all(&folder).expect("a folder in the temporary folder");
        match bytes.filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => write(&folder.join(name), bytes),
            None => drop(fs::remove_file(folder.join(name))),
        }
    };
    let reference = if reference == b"!" { COMMIT.as_bytes() } else { reference };
    put(model.join("refs"), "main", Some(reference));
    put(data.join("refs"), "main", Some(reference));
    put(data.join(".medusa"), &format!("{COMMIT}.json"), pieces.next());
    put(snapshot.clone(), "model.safetensors.index.json", pieces.next());
    put(snapshot, "config.json", pieces.next());
    let ids = [id::model("owner/model"), id::data("owner/data"), id::data("owner/data:config")];
    for id in ids.into_iter().flatten() {
        let wanted =
            if id.part.is_some() || id.repo.name == "data" { Wanted::Data(DataSplit::Train) } else { Wanted::Backbone };
        fetch(hub, &id, wanted);
    }
}
