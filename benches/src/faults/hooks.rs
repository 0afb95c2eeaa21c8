//! The receiver of pushes and notifications. It gives every kind of answer.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use fairlane::clock::{Clock as _, SystemClock, millis};
use fairlane_testkit::history::{HistoryLog, Outcome, Record};
use rand::Rng as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::api::Api;
use super::worker::{POISON, history, now_us, random_ms};
use crate::error::BenchError;

/// Longer than `handler_timeout`.
const TOO_LONG: Duration = Duration::from_millis(3_500);
/// How often a lease is completed again if no answer comes.
const TRIES: usize = 4;
/// The number of the receiver in the histories.
const PROCESS: u32 = 0;

/// Calls of one notification.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Called {
    /// How many were answered with 200.
    pub(crate) times: u32,
    /// When the first one came, ms since 1970.
    pub(crate) first_ms: u64,
}

/// What the receiver knows.
#[derive(Debug)]
pub(crate) struct Hooks {
    pub(crate) address: SocketAddr,
    /// The processes at which leases are completed.
    apis: OnceLock<Vec<Api>>,
    pushed: HistoryLog,
    leased: HistoryLog,
    cured: std::path::PathBuf,
    pub(crate) notified: Mutex<BTreeMap<String, Called>>,
    /// Leases completed, failed, and never ended by the receiver.
    pub(crate) leases: [AtomicU32; 3],
}

#[derive(Deserialize)]
struct Push {
    bot: String,
    lease: String,
    fence: u64,
    events: Vec<Pushed>,
}

#[derive(Deserialize)]
struct Pushed {
    id: String,
    r#type: String,
}

impl Pushed {
    fn position(&self) -> Option<u32> {
        self.id.rsplit('-').next()?.parse().ok()
    }
}

impl Hooks {
    /// Starts the receiver, which runs until the set is dropped.
    pub(crate) async fn start(
        directory: &Path,
        running: &mut JoinSet<()>,
    ) -> Result<Arc<Self>, BenchError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let hooks = Arc::new(Self {
            address: listener.local_addr()?,
            apis: OnceLock::new(),
            pushed: HistoryLog::append(&history(directory, "pushed", PROCESS))?,
            leased: HistoryLog::append(&history(directory, "leased", PROCESS))?,
            cured: directory.join("cured"),
            notified: Mutex::default(),
            leases: Default::default(),
        });
        let router = Router::new()
            .route("/pushed", post(pushed))
            .route("/leased", post(leased))
            .route("/notified", post(notified))
            .with_state(Arc::clone(&hooks));
        running.spawn(async move {
            // Ends only with the set.
            let _ = axum::serve(listener, router).await;
        });
        Ok(hooks)
    }

    /// Names the processes.
    pub(crate) fn know(&self, apis: Vec<Api>) {
        // Called once.
        let _ = self.apis.set(apis);
    }

    fn api(&self) -> Option<&Api> {
        let apis = self.apis.get()?;
        apis.get(rand::rng().random_range(0..apis.len().max(1)))
    }

    fn note(log: &HistoryLog, push: &Push, event: &Pushed, started: u64, outcome: Outcome) {
        let Some(position) = event.position() else { return };
        let record = Record::Handled {
            bot: &push.bot,
            event: position,
            // A push does not tell the sequence. The position rises with it.
            sequence: position.into(),
            fence: push.fence,
            started,
            ended: now_us(),
            outcome,
            process: PROCESS,
        };
        log.write([record]).expect("the history of the campaign can be written");
    }

    /// Whether the event fails until the end of the campaign.
    fn is_poison(&self, event: &Pushed) -> bool {
        event.r#type.ends_with(POISON) && !self.cured.exists()
    }
}

async fn pushed(State(hooks): State<Arc<Hooks>>, body: Bytes) -> Response {
    let started = now_us();
    let Ok(push) = serde_json::from_slice::<Push>(&body) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let dice = rand::rng().random_range(0..100);
    let refuses = |place: usize| {
        if let Some(event) = push.events.get(place) {
            Hooks::note(&hooks.pushed, &push, event, started, Outcome::Failed);
        }
    };
    if dice < 2 {
        refuses(0);
        return (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")]).into_response();
    }
    // Handles a part only, sometimes.
    let wanted = if (2..8).contains(&dice) {
        rand::rng().random_range(0..=push.events.len())
    } else {
        push.events.len()
    };
    let mut done = 0;
    for event in &push.events[..wanted] {
        if hooks.is_poison(event) || rand::rng().random_range(0..200) == 0 {
            Hooks::note(&hooks.pushed, &push, event, started, Outcome::Failed);
            let answer = json!({ "ack": done });
            return (StatusCode::INTERNAL_SERVER_ERROR, answer.to_string()).into_response();
        }
        Hooks::note(&hooks.pushed, &push, event, started, Outcome::Done);
        done += 1;
    }
    match dice {
        2..8 => {
            refuses(done);
            (StatusCode::OK, json!({ "ack": done }).to_string()).into_response()
        }
        // The effect happened, and the answer does not tell it.
        8 => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        9 => {
            sleep(TOO_LONG).await;
            StatusCode::OK.into_response()
        }
        10..20 => StatusCode::NO_CONTENT.into_response(),
        _ => StatusCode::OK.into_response(),
    }
}

async fn leased(State(hooks): State<Arc<Hooks>>, body: Bytes) -> Response {
    let Ok(push) = serde_json::from_slice::<Push>(&body) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    // The lease is completed by a task of its own. It ends with the process of the bench.
    #[expect(clippy::disallowed_methods, reason = "nothing of Fairlane stops in this process")]
    tokio::spawn(async move { complete(&hooks, &push).await });
    StatusCode::ACCEPTED.into_response()
}

/// Handles the events of a lease, and completes it.
async fn complete(hooks: &Hooks, push: &Push) {
    let started = now_us();
    let dice = rand::rng().random_range(0..100);
    sleep(random_ms(0..200)).await;
    if dice < 3 {
        hooks.leases[2].fetch_add(1, Ordering::Relaxed);
        return;
    }
    if dice < 10 {
        end(hooks, push, "extend", &json!({})).await;
        sleep(Duration::from_millis(200)).await;
    }
    let mut done = Vec::new();
    for event in &push.events {
        let fails = hooks.is_poison(event) || rand::rng().random_range(0..50) == 0;
        let outcome = if fails { Outcome::Failed } else { Outcome::Done };
        Hooks::note(&hooks.leased, push, event, started, outcome);
        if fails {
            let body = json!({ "ack": done.len(), "retry_after": 0.1, "reason": "the campaign" });
            ended(hooks, push, "fail", &body, &done).await;
            hooks.leases[1].fetch_add(1, Ordering::Relaxed);
            return;
        }
        done.extend(event.position());
    }
    ended(hooks, push, "complete", &json!({ "ack": done.len() }), &done).await;
    hooks.leases[0].fetch_add(1, Ordering::Relaxed);
}

/// Ends a lease, and notes the commit if it is confirmed.
async fn ended(hooks: &Hooks, push: &Push, how: &str, body: &Value, done: &[u32]) {
    let asked = now_us();
    if end(hooks, push, how, body).await != Some(true) {
        return;
    }
    let record = Record::Committed {
        bot: &push.bot,
        events: Cow::Borrowed(done),
        fence: push.fence,
        asked,
        at: now_us(),
        process: PROCESS,
    };
    hooks.leased.write([record]).expect("the history of the campaign can be written");
}

/// `None`: no process answered. `false`: the lease had ended.
async fn end(hooks: &Hooks, push: &Push, how: &str, body: &Value) -> Option<bool> {
    let path = format!("/v1/leases/{}/{how}", push.lease);
    for again in 0..TRIES {
        let answer = hooks.api()?.post(&path, body).await;
        match answer.code {
            204 => return Some(true),
            // A repetition of a call that was executed is refused, too.
            409 if again == 0 => return Some(false),
            409 => return None,
            _ => sleep(Duration::from_millis(100)).await,
        }
    }
    None
}

async fn notified(State(hooks): State<Arc<Hooks>>, headers: HeaderMap, _: Bytes) -> Response {
    let id = headers.get("webhook-id").and_then(|id| id.to_str().ok()).unwrap_or_default();
    if rand::rng().random_range(0..50) == 0 {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let now = millis(SystemClock.now());
    let mut notified = hooks.notified.lock().unwrap_or_else(PoisonError::into_inner);
    let called = notified.entry(id.to_owned()).or_default();
    if called.times == 0 {
        called.first_ms = now;
    }
    called.times += 1;
    StatusCode::OK.into_response()
}
