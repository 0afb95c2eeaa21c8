//! HTTP: `/healthz`, `/readyz` and `/metrics`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::keyspace::Link;

/// A readiness check waits this long for Redis.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// What the health routes look at.
#[derive(Debug, Clone)]
pub(crate) struct Health {
    pub(crate) link: Arc<Link>,
    /// Cancelled: the process is stopping and takes no new work.
    pub(crate) stopping: CancellationToken,
}

/// `/healthz` and `/readyz`.
pub(crate) fn health_routes(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(health)
}

/// `/metrics`.
pub(crate) fn metrics_routes() -> Router {
    Router::new().route(
        "/metrics",
        get(async || {
            let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
            (kind, crate::metrics::render())
        }),
    )
}

async fn ready(State(health): State<Health>) -> Response {
    let ping = health.link.command("PING", redis::cmd("PING"));
    let redis = matches!(tokio::time::timeout(READY_TIMEOUT, ping).await, Ok(Ok(_)));
    let stopping = health.stopping.is_cancelled();
    let status = match (redis, stopping) {
        (true, false) => "ready",
        (true, true) => "stopping",
        (false, _) => "unavailable",
    };
    let code = if status == "ready" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let redis = if redis { "up" } else { "down" };
    let body = json!({ "status": status, "redis": redis });
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (code, kind, format!("{body}\n")).into_response()
}

/// Serves `routes` until `stop`.
pub(crate) async fn serve(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let serving = axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = serving.await {
        tracing::error!(%error, "a listener failed");
    }
}

/// Binds `address`, which the setting `key` holds.
pub(crate) async fn bind(key: &'static str, address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|source| BindError { key, address, source })
}

/// A listener that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}; set {key} to a free address (port 0 picks one)")]
pub struct BindError {
    key: &'static str,
    address: SocketAddr,
    #[source]
    source: std::io::Error,
}
