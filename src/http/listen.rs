//! Accepting connections: each has bounds in time and size before any route is asked.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::fanout::OncePerMinute;

/// Connections of one listener; more wait to be accepted.
const CONNECTIONS_MAX: usize = 4_096;
/// The head of a request has this long to arrive; a connection may rest as long between two.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// Largest head, in bytes.
const HEAD_MAX: usize = 32 << 10;
/// Most bytes read ahead on a connection.
const BUFFER_MAX: usize = 64 << 10;
/// Nothing is accepted for this long when the operating system has no more to give.
const EXHAUSTED: Duration = Duration::from_millis(500);

/// Serves `routes` until `stop`; then requests that were begun are still answered.
///
/// # Cancel safety
/// Dropping the future closes every connection.
pub(crate) async fn serve(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let service = TowerToHyperService::new(routes.with_state::<()>(()));
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME);
    server.max_header_size(HEAD_MAX).max_buf_size(BUFFER_MAX);
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let exhausted = OncePerMinute::default();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    // An answer must not wait for the acknowledgement of the one before.
                    let _ = stream.set_nodelay(true);
                    let serving = server.serve_connection(TokioIo::new(stream), service.clone());
                    let serving = graceful.watch(serving);
                    connections.spawn(async move {
                        if let Err(error) = serving.await {
                            debug!(%error, "a connection ended");
                        }
                    });
                }
                Err(error) if is_the_peers(&error) => {}
                Err(error) => {
                    if exhausted.take() {
                        warn!(%error, "cannot accept connections; raise the limit of open files");
                    }
                    tokio::time::sleep(EXHAUSTED).await;
                }
            },
        }
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Whether one connection failed, not the listener.
fn is_the_peers(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
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
    source: io::Error,
}
