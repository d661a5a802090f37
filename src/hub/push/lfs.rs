//! Uploads large files by Git LFS, in one piece or in the parts that the Hub requests.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use url::Url;

use super::super::client::{Ask, Body, RequestContext};
use super::super::{Hub, HubError, TransferEvent};
use super::{Addition, BATCH, Local, Push};
use crate::http::connection::{HttpAnswer, header};

/// Response of the LFS batch API (<https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md>).
#[derive(Deserialize)]
struct LfsBatch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    /// Absent if the Hub has the object.
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    code: u16,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    /// For the Hub's multipart transfer: `chunk_size`, and one URL per part under its number.
    header: Option<Map<String, Value>>,
}

impl Hub<'_> {
    /// Uploads the large files that the Hub's store lacks.
    pub(super) fn upload<'l>(&self, push: &Push<'_>, files: &[&'l Local]) -> Result<Vec<Addition<'l>>, HubError> {
        let additions = files.iter().map(|file| Addition::large(file)).collect::<Result<Vec<_>, _>>()?;
        for some in additions.chunks(BATCH) {
            let objects = self.batch(push, some)?;
            let addition = |oid: &str| some.iter().find(|addition| addition.hash == oid);
            let work: Vec<(&Local, Object)> = objects
                .into_iter()
                .filter(|object| object.actions.as_ref().is_some_and(|actions| actions.upload.is_some()))
                .filter_map(|object| Some((addition(&object.oid)?.file, object)))
                .collect();
            if work.is_empty() {
                continue;
            }
            let bytes = work.iter().map(|(file, _)| file.size).sum();
            (self.observer)(TransferEvent::Began { what: push.repo.to_string(), files: work.len(), bytes });
            let sent = work.iter().try_for_each(|(file, object)| self.send_object(push, file, object));
            (self.observer)(TransferEvent::Ended);
            sent?;
        }
        Ok(additions)
    }

    fn batch(&self, push: &Push<'_>, files: &[Addition<'_>]) -> Result<Vec<Object>, HubError> {
        let doing = format!("asking where {} takes large files", push.repo);
        let objects: Vec<Value> =
            files.iter().map(|addition| json!({"oid": addition.hash, "size": addition.file.size})).collect();
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": objects,
            "hash_algo": "sha256",
            "ref": {"name": push.revision},
        });
        let name = format!("{}.git", push.repo.name);
        let url = self.client.url(&[&push.repo.owner, &name, "info", "lfs", "objects", "batch"]);
        let mut ask = Ask::post(url, Body::Json(&body), Self::about(push, &doing));
        ask.headers = lfs_headers();
        let answer: LfsBatch = self.client.json(&ask)?;
        match answer.objects.iter().find_map(|object| object.error.as_ref()) {
            None => Ok(answer.objects),
            Some(ObjectError { code, message }) => {
                let (endpoint, message) = (self.client.name(), self.client.clean(message));
                Err(HubError::Refused { endpoint, doing, status: *code, message })
            }
        }
    }

    fn send_object(&self, push: &Push<'_>, file: &Local, object: &Object) -> Result<(), HubError> {
        let Some(Actions { upload: Some(upload), verify }) = &object.actions else { return Ok(()) };
        let doing = format!("uploading {}", file.name);
        let about = RequestContext { file: Some(&file.name), ..Self::about(push, &doing) };
        match upload.header.as_ref().and_then(|header| header.get("chunk_size")) {
            None => drop(self.put(file, &upload.href, (0, file.size), about)?),
            Some(size) => self.send_parts(file, object, (upload, size), about)?,
        }
        let Some(verify) = verify else { return Ok(()) };
        let body = json!({"oid": object.oid, "size": file.size});
        let mut ask = Ask::post(self.address(&verify.href, &doing)?, Body::Json(&body), about);
        ask.headers = lfs_headers();
        self.client.send(&ask).map(drop)
    }

    /// The Hub's multipart transfer: uploads each part to its URL, then sends the parts' ETags.
    fn send_parts(
        &self,
        file: &Local,
        object: &Object,
        (upload, chunk_size): (&Action, &Value),
        about: RequestContext<'_>,
    ) -> Result<(), HubError> {
        let bad = |reason: &str| self.client.bad_answer(about.doing, reason);
        let text = chunk_size.as_str().map_or_else(|| chunk_size.to_string(), str::to_owned);
        let chunk: u64 =
            text.parse().ok().filter(|&size| size > 0).ok_or_else(|| bad("a chunk_size that is no number"))?;
        let mut addresses: Vec<(u64, &str)> = upload
            .header
            .iter()
            .flatten()
            .filter_map(|(number, url)| Some((number.parse().ok()?, url.as_str()?)))
            .collect();
        addresses.sort_unstable();
        if addresses.len() as u64 != file.size.div_ceil(chunk) {
            return Err(bad("another number of parts than the file has"));
        }
        let mut parts = Vec::new();
        for (at, (_, address)) in (0..).zip(&addresses) {
            let length = chunk.min(file.size - at * chunk);
            let response = self.put(file, address, (at * chunk, length), about)?;
            let etag =
                header(&response, "etag").filter(|etag| !etag.is_empty()).ok_or_else(|| bad("a part without ETag"))?;
            parts.push(json!({"partNumber": at + 1, "etag": etag}));
        }
        let body = json!({"oid": object.oid, "parts": parts});
        let mut ask = Ask::post(self.address(&upload.href, about.doing)?, Body::Json(&body), about);
        ask.headers = lfs_headers();
        self.client.send(&ask).map(drop)
    }

    fn put(
        &self,
        file: &Local,
        address: &str,
        (offset, length): (u64, u64),
        about: RequestContext<'_>,
    ) -> Result<HttpAnswer, HubError> {
        let body = Body::Part { path: &file.path, offset, length };
        let url = self.address(address, about.doing)?;
        self.client.send(&Ask { method: "PUT", url, headers: Vec::new(), body, about })
    }

    fn address(&self, text: &str, doing: &str) -> Result<Url, HubError> {
        let url = self.client.endpoint.join(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        url.ok_or_else(|| self.client.bad_answer(doing, "an address that is none"))
    }
}

fn lfs_headers() -> Vec<(&'static str, String)> {
    ["Accept", "Content-Type"].map(|name| (name, "application/vnd.git-lfs+json".to_owned())).into()
}
