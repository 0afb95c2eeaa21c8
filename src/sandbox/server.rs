//! Routes of a load tool behind Fairlane's own listener and admission control.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::admission::{Admission, Settings, system_ticks};
use crate::app::files;
pub use crate::http::Row;
use crate::http::{self, AdmissionGate, Limits, Proxies, QuotaSettings};

/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 8_192;
/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 4_096;

/// Listens on a free port of the loopback.
///
/// # Errors
/// If the operating system refuses it.
pub fn listen() -> io::Result<TcpListener> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    http::bind("the bench", any, BACKLOG).map_err(io::Error::other)
}

/// Serves `routes` with Fairlane's own listener until `stop`.
pub async fn serve(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let limits =
        Limits { name: "bench", connections: CONNECTIONS_MAX, per_address: CONNECTIONS_MAX };
    http::serve(listener, routes, limits, Proxies::default(), stop.into()).await;
}

/// Puts `routes` behind the default admission control. `rows` holds the class of each route.
pub fn admitted(routes: Router, rows: &'static [Row]) -> Router {
    let admission = Admission::new(Settings::default(), system_ticks());
    let gate = AdmissionGate::new(admission, QuotaSettings::default(), rows);
    http::admitted(routes, Arc::new(gate))
}

/// Raises the limit of open files of this process if it is below `needed`. Returns `false` if the
/// limit cannot be raised that far.
#[must_use]
pub fn raise_open_files(needed: u64) -> bool {
    files::raise(needed)
}
