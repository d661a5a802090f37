//! A response that is no success, as an error: what the Hub refuses, and why.

use std::io::Read;

use serde_json::Value;

use super::super::HubError;
use super::super::id::RepoKind;
use super::{Ask, Client, LONGEST_WAIT, RequestContext, address, retry_after};
use crate::http::connection::{HttpAnswer, header};

impl Client<'_> {
    pub(super) fn refusal(&self, ask: &Ask<'_>, response: HttpAnswer) -> HubError {
        let RequestContext { repo, revision, file, doing } = ask.about;
        let (status, code) =
            (response.status().as_u16(), header(&response, "x-error-code").unwrap_or_default().to_owned());
        let endpoint = self.host_of(&address(&response));
        if endpoint != self.name() && code.is_empty() {
            // An object store, which knows neither repositories nor tokens. A mirror sends the Hub's error codes.
            let message = self.message(response);
            return HubError::Refused { endpoint, doing: doing.into(), status, message };
        }
        let id = format!("{repo}@{revision}");
        let kind = if repo.kind == RepoKind::Dataset { "data set" } else { "model" };
        let no_repo = || HubError::NoRepo {
            endpoint: endpoint.clone(),
            repo: format!("{kind} {repo}"),
            token: self.token_words(),
        };
        let message = self.message(response);
        if let Some(token) = self.token.as_ref().filter(|_| status == 401 && message.contains("Invalid credentials")) {
            return HubError::WrongToken { endpoint, from: token.from.clone() };
        }
        match (code.as_str(), status) {
            ("GatedRepo", _) => {
                HubError::Gated { repo: repo.to_string(), page: self.page(repo, &[]).into(), token: self.token_words() }
            }
            ("RevisionNotFound", _) => {
                HubError::NoRevision { repo: format!("{kind} {repo}"), revision: revision.into() }
            }
            ("EntryNotFound", _) => HubError::NoFile { id, file: file.unwrap_or_default().into(), holds: Vec::new() },
            ("RepoNotFound", _) => no_repo(),
            (_, 401) if self.token.is_none() && ask.method != "GET" => HubError::NeedsToken { endpoint },
            (_, 401) => no_repo(), // the Hub answers so for repositories that the user may not see
            (_, 403) => {
                let token = self.token_words();
                HubError::Forbidden { endpoint, doing: doing.into(), token, message }
            }
            (_, 412) => HubError::Moved { repo: repo.to_string() },
            _ => HubError::Refused { endpoint, doing: doing.into(), status, message },
        }
    }

    pub(super) fn busy(&self, ask: &Ask<'_>, response: HttpAnswer, tries: u32) -> HubError {
        let (status, wait) = (response.status().as_u16(), retry_after(&response));
        let endpoint = self.host_of(&address(&response));
        let message = match wait.filter(|seconds| *seconds > LONGEST_WAIT) {
            Some(seconds) => format!("it asks to wait {seconds} seconds"),
            None => self.message(response),
        };
        let doing = ask.about.doing.to_owned();
        HubError::Busy { endpoint, status, doing, tries, message }
    }

    /// The token's source, for messages.
    fn token_words(&self) -> String {
        self.token.as_ref().map_or_else(|| "no token was sent".into(), |token| format!("the token from {}", token.from))
    }

    /// The server's error message, from the header or the JSON body.
    fn message(&self, response: HttpAnswer) -> String {
        if let Some(message) = header(&response, "x-error-message") {
            return self.clean(message);
        }
        let mut bytes = Vec::new();
        let _ = response.into_body().into_reader().take(1 << 16).read_to_end(&mut bytes); // without a body the status has to do
        let json: Option<Value> = serde_json::from_slice(&bytes).ok();
        let error = json.as_ref().and_then(|json| json.get("error")).and_then(Value::as_str);
        self.clean(error.unwrap_or_default())
    }
}
