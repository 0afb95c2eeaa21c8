//! The receiver of all pushes. It answers at once, and notes when each event arrived.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use fairlane::sandbox::waits;
use hdrhistogram::Histogram;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::error::BenchError;

/// What arrived of one bot with a rate.
#[derive(Debug, Clone, Default)]
pub(super) struct Arrived {
    /// When each event arrived, µs; repeated ones too.
    pub(super) times_us: Vec<u64>,
    /// The number of the next event.
    next: u64,
    /// Number of events that came before an earlier one.
    pub(super) reordered: u64,
    /// Number of events that came again.
    pub(super) repeated: u64,
}

impl Arrived {
    pub(super) fn note(&mut self, id: u64, now_us: u64) {
        self.times_us.push(now_us);
        self.reordered += u64::from(id > self.next);
        self.repeated += u64::from(id < self.next);
        self.next = self.next.max(id + 1);
    }
}

struct Notes {
    limited: BTreeMap<String, Arrived>,
    quiet: Histogram<u64>,
    parked: u64,
}

struct Receiving {
    origin: Instant,
    notes: Mutex<Notes>,
}

impl Receiving {
    fn now(&self) -> u64 {
        fairlane::clock::micros(self.origin.elapsed())
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Deserialize)]
struct Push {
    bot: String,
    events: Vec<Pushed>,
}

#[derive(Deserialize)]
struct Pushed {
    id: String,
    data: Due,
}

#[derive(Deserialize)]
struct Due {
    due: u64,
}

/// Runs until dropped.
pub(super) struct Receiver {
    pub(super) address: SocketAddr,
    receiving: Arc<Receiving>,
    _running: JoinSet<()>,
}

impl Receiver {
    pub(super) async fn start() -> Result<Self, BenchError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let notes = Notes { limited: BTreeMap::new(), quiet: waits(), parked: 0 };
        let receiving = Arc::new(Receiving { origin: Instant::now(), notes: Mutex::new(notes) });
        let router = Router::new()
            .route("/{pipeline}", post(receive))
            .layer(DefaultBodyLimit::disable())
            .with_state(Arc::clone(&receiving));
        let mut running = JoinSet::new();
        // It ends only when it is dropped.
        running.spawn(async move { drop(axum::serve(listener, router).await) });
        Ok(Self { address, receiving, _running: running })
    }

    /// The time since the start, µs.
    pub(super) fn now(&self) -> u64 {
        self.receiving.now()
    }

    /// Number of events of the pipeline in which all wait.
    pub(super) fn parked(&self) -> u64 {
        self.receiving.notes().parked
    }

    /// Number of events within rates.
    pub(super) fn limited(&self) -> u64 {
        let notes = self.receiving.notes();
        notes.limited.values().map(|arrived| arrived.times_us.len() as u64).sum()
    }

    /// Number of events of quiet bots since they were taken.
    pub(super) fn quiet(&self) -> u64 {
        self.receiving.notes().quiet.len()
    }

    pub(super) fn take_quiet(&self) -> Histogram<u64> {
        std::mem::replace(&mut self.receiving.notes().quiet, waits())
    }

    pub(super) fn take_limited(&self) -> BTreeMap<String, Arrived> {
        std::mem::take(&mut self.receiving.notes().limited)
    }
}

async fn receive(
    State(receiving): State<Arc<Receiving>>,
    Path(pipeline): Path<String>,
    body: Bytes,
) -> StatusCode {
    let now = receiving.now();
    let Ok(Push { bot, events }) = serde_json::from_slice(&body) else {
        return StatusCode::BAD_REQUEST;
    };
    let mut notes = receiving.notes();
    for Pushed { id, data: Due { due } } in events {
        match pipeline.as_str() {
            "limited" => {
                let Ok(id) = id.parse() else { return StatusCode::BAD_REQUEST };
                notes.limited.entry(bot.clone()).or_default().note(id, now);
            }
            "quiet" => notes.quiet.saturating_record(now.saturating_sub(due).max(1)),
            _ => notes.parked += 1,
        }
    }
    StatusCode::OK
}
