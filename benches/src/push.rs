//! The receiver of `pipeline --handler push`. It answers at once, and checks the order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::routing::post;
use fairlane::outbound::{CheckedUrl, Policy};
use fairlane::sandbox::Meter;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::error::BenchError;

/// Runs until dropped.
pub(crate) struct Receiver {
    pub(crate) url: CheckedUrl,
    received: Arc<Received>,
    _running: JoinSet<()>,
}

struct Received {
    meter: Arc<Meter>,
    events: AtomicU64,
}

#[derive(Deserialize)]
struct Push {
    bot: String,
    events: Vec<Pushed>,
}

#[derive(Deserialize)]
struct Pushed {
    id: String,
}

impl Receiver {
    pub(crate) async fn start(meter: Arc<Meter>) -> Result<Self, BenchError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let url = format!("http://{}/", listener.local_addr()?);
        let url = CheckedUrl::parse(&url, &Policy::Operator)?;
        let received = Arc::new(Received { meter, events: AtomicU64::new(0) });
        let router = Router::new()
            .route("/", post(receive))
            .layer(DefaultBodyLimit::disable())
            .with_state(Arc::clone(&received));
        let mut running = JoinSet::new();
        // It ends only when it is dropped.
        running.spawn(async move { drop(axum::serve(listener, router).await) });
        Ok(Self { url, received, _running: running })
    }

    /// Number of events received so far, with repeated ones.
    pub(crate) fn events(&self) -> u64 {
        self.received.events.load(Ordering::Relaxed)
    }
}

async fn receive(State(received): State<Arc<Received>>, body: Bytes) -> StatusCode {
    let Ok(Push { bot, events }) = serde_json::from_slice(&body) else {
        return StatusCode::BAD_REQUEST;
    };
    for event in &events {
        received.meter.noted(&bot, &event.id);
    }
    received.events.fetch_add(events.len() as u64, Ordering::Relaxed);
    StatusCode::OK
}
