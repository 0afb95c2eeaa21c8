//! The receiver of pushes and notifications. It answers the quiet bots immediately, and the hostile
//! ones as the resource needs it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::routing::{any, post};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::figures::Tally;
use crate::error::BenchError;

/// Larger than a slice of large events.
const BODY_MAX: usize = 128 << 20;

/// What the receiver does.
#[derive(Debug)]
pub(super) struct Behaviour {
    /// The number of the current phase, and its work.
    current: Mutex<(u64, Arc<Tally>)>,
    /// Time that a slice of a hostile bot takes, ms.
    pub(super) hold_ms: AtomicU64,
    /// The answer to pushes of hostile bots.
    pub(super) status: AtomicU16,
    /// Pushes of hostile bots so far.
    pub(super) hostile: AtomicU64,
}

impl Behaviour {
    /// Starts a phase. Work of earlier ones is counted no more.
    pub(super) fn begin(&self, phase: u64) -> Arc<Tally> {
        let tally = Arc::new(Tally::new());
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = (phase, Arc::clone(&tally));
        tally
    }

    fn done(&self, work: &Work) {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.0 == work.phase {
            current.1.done(work.due);
        }
    }
}

/// Identifies work of the quiet bots: the data of an event.
#[derive(Debug, Deserialize)]
struct Work {
    phase: u64,
    due: u64,
}

#[derive(Debug, Deserialize)]
struct Push {
    events: Vec<Pushed>,
}

#[derive(Debug, Deserialize)]
struct Pushed {
    data: Option<Work>,
}

/// Runs until dropped.
pub(super) struct Receiver {
    pub(super) address: SocketAddr,
    pub(super) behaviour: Arc<Behaviour>,
    _running: JoinSet<()>,
}

impl Receiver {
    pub(super) async fn start() -> Result<Self, BenchError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let behaviour = Arc::new(Behaviour {
            current: Mutex::new((0, Arc::new(Tally::new()))),
            hold_ms: AtomicU64::new(0),
            status: AtomicU16::new(200),
            hostile: AtomicU64::new(0),
        });
        let router = Router::new()
            .route("/push", post(push))
            .route("/failing", post(failing))
            .route("/event", post(event))
            .route("/quiet/{phase}/{due}", any(notified))
            .route("/fail", any(async || StatusCode::INTERNAL_SERVER_ERROR))
            .layer(DefaultBodyLimit::max(BODY_MAX))
            .with_state(Arc::clone(&behaviour));
        let mut running = JoinSet::new();
        // It ends only when it is dropped.
        running.spawn(async move { drop(axum::serve(listener, router).await) });
        Ok(Self { address, behaviour, _running: running })
    }
}

/// Whether a push is for a quiet bot. The bot is near the start of the body.
fn is_quiet(body: &[u8]) -> bool {
    const QUIET: &[u8] = b"\"bot\":\"quiet-";
    let start = &body[..body.len().min(400)];
    start.windows(QUIET.len()).any(|window| window == QUIET)
}

async fn push(State(behaviour): State<Arc<Behaviour>>, body: Bytes) -> StatusCode {
    if is_quiet(&body) {
        if let Ok(push) = serde_json::from_slice::<Push>(&body) {
            push.events.iter().filter_map(|event| event.data.as_ref()).for_each(|work| {
                behaviour.done(work);
            });
        }
        return StatusCode::OK;
    }
    behaviour.hostile.fetch_add(1, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(behaviour.hold_ms.load(Ordering::Relaxed))).await;
    StatusCode::from_u16(behaviour.status.load(Ordering::Relaxed)).unwrap_or(StatusCode::OK)
}

/// Every event of this pipeline becomes a dead letter.
async fn failing(State(behaviour): State<Arc<Behaviour>>) -> StatusCode {
    behaviour.hostile.fetch_add(1, Ordering::Relaxed);
    StatusCode::INTERNAL_SERVER_ERROR
}

/// An event that a rule sends.
async fn event(State(behaviour): State<Arc<Behaviour>>, body: Bytes) {
    if let Ok(Pushed { data: Some(work) }) = serde_json::from_slice(&body) {
        behaviour.done(&work);
    }
}

async fn notified(State(behaviour): State<Arc<Behaviour>>, Path((phase, due)): Path<(u64, u64)>) {
    behaviour.done(&Work { phase, due });
}
