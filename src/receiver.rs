//! A small receiver for tests: accepts notifications and pushes, checks their signatures, detects
//! repetitions, and fails on purpose. It stores nothing. `fairlane receiver` prints its reports.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use rand::Rng as _;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use url::Url;

use crate::clock::{Clock as _, SystemClock, millis, rfc3339};
use crate::id::BotId;
use crate::lifecycle::Shutdown;
use crate::outbound::sign::{self, Secret, Unsigned};

/// Maximum size of a body: larger than a push of a hundred events of the maximum size.
const BODY_MAX: usize = 128 << 20;
/// Maximum number of remembered ids; the oldest are forgotten first.
const KNOWN_MAX: usize = 100_000;
/// Maximum length of a body in a report, in characters.
const SHOWN: usize = 200;
/// Timeout of completing a lease.
const COMPLETE: Duration = Duration::from_secs(10);

/// The behaviour of the receiver.
#[derive(Debug, Clone)]
pub(crate) struct Behaviour {
    /// Keys of single bots, in the form of `fairlane secret`.
    pub(crate) keys: Vec<Secret>,
    /// `callbacks.secrets`: a push names its bot, which determines the key.
    pub(crate) secrets: Vec<Secret>,
    /// The share of calls that fail on purpose.
    pub(crate) fail: f64,
    /// The status of those calls.
    pub(crate) status: StatusCode,
    /// Their `Retry-After`.
    pub(crate) retry_after: Option<Duration>,
    /// Response time of every call; with `complete_at`, the time until the completion.
    pub(crate) delay: Duration,
    /// The Fairlane whose pushes get 202 and are completed afterwards.
    pub(crate) complete_at: Option<Url>,
    /// Whether reports contain the headers.
    pub(crate) headers: bool,
}

/// A report of a received call, or of the completion of a lease.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Told {
    /// The time, RFC 3339.
    pub(crate) time: String,
    pub(crate) method: String,
    pub(crate) path: String,
    /// The status of the answer; absent without an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// `good`, `none`, `old`, `wrong`, or `unchecked` without a key; `ours` for a completion.
    pub(crate) signature: &'static str,
    /// `webhook-id`.
    pub(crate) id: String,
    /// Whether everything in this call was already answered with success.
    pub(crate) again: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) push: Option<ToldPush>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) headers: Vec<(String, String)>,
    /// The start of the body.
    pub(crate) body: String,
}

/// The content of a push.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ToldPush {
    pub(crate) bot: String,
    pub(crate) fence: u64,
    pub(crate) attempt: u64,
    /// The ids of its events.
    pub(crate) events: Vec<String>,
    /// Number of events that were already answered with success.
    pub(crate) again: usize,
}

/// The part of a push that the receiver reads.
#[derive(Debug, Deserialize)]
struct Push {
    bot: String,
    lease: String,
    fence: u64,
    attempt: u64,
    events: Vec<PushedEvent>,
}

#[derive(Debug, Deserialize)]
struct PushedEvent {
    id: String,
    #[serde(default)]
    source: String,
}

/// The last ids that were answered with success.
#[derive(Debug, Default)]
struct Known {
    ids: HashSet<String>,
    order: VecDeque<String>,
}

impl Known {
    fn add(&mut self, id: String) {
        if self.ids.insert(id.clone()) {
            self.order.push_back(id);
        }
        if self.order.len() > KNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }
}

type Tell = dyn Fn(&Told) + Send + Sync;

struct Receiver {
    behaviour: Behaviour,
    known: Mutex<Known>,
    client: reqwest::Client,
    shutdown: Shutdown,
    tell: Box<Tell>,
}

/// Receives until `shutdown` stops it. Calls `tell` for every answered call.
///
/// # Errors
/// If it cannot accept connections any more, or cannot create the HTTP client.
pub(crate) async fn run(
    listener: TcpListener,
    behaviour: Behaviour,
    shutdown: &Shutdown,
    tell: impl Fn(&Told) + Send + Sync + 'static,
) -> io::Result<()> {
    // Only the first call in a process installs the provider; any provider will do.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = || reqwest::Client::builder().no_proxy();
    // A machine without CA certificates can still complete leases at http:// URLs.
    let client = client().build().or_else(|_| client().tls_certs_only([]).build());
    let client = client.map_err(io::Error::other)?;
    let (known, tell) = (Mutex::default(), Box::new(tell));
    let receiver = Receiver { behaviour, known, client, shutdown: shutdown.clone(), tell };
    let routes = Router::new().fallback(receive).with_state(Arc::new(receiver));
    let serving = axum::serve(listener, routes)
        .with_graceful_shutdown(shutdown.soft.clone().cancelled_owned())
        .into_future();
    tokio::select! {
        biased;
        () = shutdown.hard.cancelled() => Ok(()),
        ended = serving => ended,
    }
}

async fn receive(State(receiver): State<Arc<Receiver>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_MAX).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let push = serde_json::from_slice::<Push>(&body).ok().filter(|_| parts.method == Method::POST);
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let header = |name: &str| {
        let value = parts.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let mut told = Told {
        time: rfc3339(millis(SystemClock.now())),
        method: parts.method.to_string(),
        path,
        status: None,
        signature: receiver.signature(&parts.headers, &body, push.as_ref()),
        id: header(sign::ID),
        again: false,
        push: None,
        headers: receiver.headers(&parts.headers),
        body: shown(&body),
    };
    let (ids, again) = receiver.note(&mut told, push.as_ref());
    // Calls that hang or fail do not count as received.
    let Some(answer) = receiver.answer(parts.uri.path(), &told, push.as_ref()) else {
        (receiver.tell)(&told);
        return std::future::pending().await;
    };
    let answers_first = push.is_some() && receiver.behaviour.complete_at.is_some();
    if !answers_first {
        tokio::time::sleep(receiver.behaviour.delay).await;
    }
    if answer.status().is_success() {
        let mut known = receiver.known.lock().unwrap_or_else(PoisonError::into_inner);
        for id in ids {
            known.add(id);
        }
        drop(known);
        if let (true, Some(push)) = (answers_first, push) {
            receiver.complete_later(push);
        }
    }
    told.again = again;
    told.status = Some(answer.status().as_u16());
    (receiver.tell)(&told);
    answer
}

impl Receiver {
    fn signature(&self, headers: &HeaderMap, body: &[u8], push: Option<&Push>) -> &'static str {
        let Behaviour { keys, secrets, .. } = &self.behaviour;
        let mut all = keys.clone();
        if let Some(bot) = push.and_then(|push| BotId::parse(&push.bot).ok()) {
            all.extend(secrets.iter().map(|secret| secret.of_bot(&bot)));
        }
        if all.is_empty() {
            return "unchecked";
        }
        match sign::check(&all, headers, body, SystemClock.now()) {
            Ok(()) => "good",
            Err(Unsigned::None) => "none",
            Err(Unsigned::Old) => "old",
            Err(Unsigned::Wrong) => "wrong",
        }
    }

    fn headers(&self, headers: &HeaderMap) -> Vec<(String, String)> {
        let text = |(name, value): (&header::HeaderName, &header::HeaderValue)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        if self.behaviour.headers { headers.iter().map(text).collect() } else { Vec::new() }
    }

    /// Returns the ids of a call, and whether all of them were received before. Notes the push in
    /// `told`.
    fn note(&self, told: &mut Told, push: Option<&Push>) -> (Vec<String>, bool) {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(push) = push else {
            // A recheck has the id of its notification.
            let counts = !told.id.is_empty() && !told.path.starts_with("/recheck/");
            let ids: Vec<String> = counts.then(|| told.id.clone()).into_iter().collect();
            let again = ids.iter().any(|id| known.ids.contains(id));
            return (ids, again);
        };
        let name = |event: &PushedEvent| format!("{} {} {}", push.bot, event.source, event.id);
        let ids: Vec<String> = push.events.iter().map(name).collect();
        let again = ids.iter().filter(|id| known.ids.contains(*id)).count();
        let events: Vec<String> = push.events.iter().map(|event| event.id.clone()).collect();
        let all = again == events.len() && again > 0;
        let (bot, fence, attempt) = (push.bot.clone(), push.fence, push.attempt);
        told.push = Some(ToldPush { bot, fence, attempt, events, again });
        (ids, all)
    }

    /// The answer; `None`: the call hangs.
    fn answer(&self, path: &str, told: &Told, push: Option<&Push>) -> Option<Response> {
        let Behaviour { fail, status, retry_after, complete_at, .. } = &self.behaviour;
        let plain =
            |status: StatusCode, text: &str| Some((status, text.to_owned()).into_response());
        if path == "/health" {
            return plain(StatusCode::OK, "ok");
        }
        if !matches!(told.signature, "good" | "unchecked") {
            return plain(StatusCode::UNAUTHORIZED, "the signature is not good");
        }
        match path.strip_prefix("/recheck/") {
            Some("ok") => return plain(StatusCode::OK, "ok"),
            Some("refused") => return plain(StatusCode::OK, "refused"),
            Some("hang") => return None,
            Some(code) => {
                let code = code.parse::<StatusCode>().unwrap_or(StatusCode::NOT_FOUND);
                return plain(code, "on purpose");
            }
            None => {}
        }
        if rand::rng().random_bool(*fail) {
            let mut answer = (*status, "failed on purpose").into_response();
            let seconds = retry_after.map(|after| after.as_secs_f64().ceil().to_string());
            let after = seconds.and_then(|seconds| seconds.parse().ok());
            answer.headers_mut().extend(after.map(|after| (header::RETRY_AFTER, after)));
            return Some(answer);
        }
        let Some(push) = push else { return plain(StatusCode::OK, "ok") };
        if complete_at.is_some() {
            return Some(StatusCode::ACCEPTED.into_response());
        }
        let ack = serde_json::json!({"ack": push.events.len()}).to_string();
        let json = [(header::CONTENT_TYPE, sign::JSON)];
        Some((json, Body::from(ack)).into_response())
    }

    /// Completes a lease after the delay, and reports it.
    fn complete_later(self: &Arc<Self>, push: Push) {
        let Some(url) = &self.behaviour.complete_at else { return };
        let path = format!("/v1/leases/{}/complete", push.lease);
        let url = format!("{}{path}", url.as_str().trim_end_matches('/'));
        let (receiver, delay) = (Arc::clone(self), self.behaviour.delay);
        self.shutdown.spawn(async move {
            tokio::time::sleep(delay).await;
            let ack = serde_json::json!({"ack": push.events.len()}).to_string();
            let call = receiver.client.post(url).header(header::CONTENT_TYPE, sign::JSON);
            let answer = call.body(ack.clone()).timeout(COMPLETE).send().await;
            let (status, body) = match answer {
                Ok(answer) => (Some(answer.status().as_u16()), ack),
                Err(error) => (None, error.without_url().to_string()),
            };
            (receiver.tell)(&Told {
                time: rfc3339(millis(SystemClock.now())),
                method: "POST".to_owned(),
                path,
                status,
                signature: "ours",
                id: String::new(),
                again: false,
                push: None,
                headers: Vec::new(),
                body,
            });
        });
    }
}

/// The start of a body, on one line.
fn shown(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let mut shown: String = text.chars().take(SHOWN).collect::<String>().escape_debug().to_string();
    // Quotes are harmless on a terminal, and frequent in JSON.
    shown = shown.replace("\\\"", "\"").replace("\\'", "'");
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_shown_on_one_line_and_cut() {
        assert_eq!(shown("{\"a\":\"ü\"}\n".as_bytes()), "{\"a\":\"ü\"}\\n");
        assert_eq!(shown(b"\x1b[31m"), "\\u{1b}[31m");
        assert_eq!(shown(&[b'x'; 300]), "x".repeat(200) + "…");
    }

    #[test]
    fn ids_are_forgotten_the_oldest_first() {
        let mut known = Known::default();
        for id in 0..=KNOWN_MAX {
            known.add(id.to_string());
            known.add(id.to_string());
        }
        assert_eq!((known.ids.len(), known.order.len()), (KNOWN_MAX, KNOWN_MAX));
        assert!(!known.ids.contains("0") && known.ids.contains("1"));
    }
}
