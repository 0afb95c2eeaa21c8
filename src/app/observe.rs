//! Health and metrics, on a separate thread: they answer an orchestrator even when all other
//! threads are busy.

use std::io;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::http::{self, Ending, Health, Limits, Proxies};
use crate::startup::Startup;

/// There are few scrapers and probes.
const LIMITS: Limits = Limits { name: "metrics", connections: 256, per_address: 128 };

/// Serves `metrics.listen` until `stop`; the receiver is notified when it has ended. `after`: the start to
/// wait for.
pub(super) fn spawn(
    (listener, after): (TcpListener, Option<Startup>),
    health: Health,
    handed: CancellationToken,
    stop: CancellationToken,
) -> io::Result<oneshot::Receiver<()>> {
    let listener = listener.into_std()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (ended, ending) = oneshot::channel();
    let serve = move || {
        runtime.block_on(async {
            match TcpListener::from_std(listener) {
                Ok(listener) => {
                    super::accepts(after, &stop).await;
                    let ending = Ending { leaving: health.leaving.clone(), handed, stop };
                    let routes = http::metrics_routes(health);
                    http::serve(listener, routes, LIMITS, Proxies::default(), ending).await;
                }
                Err(error) => tracing::error!(%error, "cannot serve metrics.listen"),
            }
        });
        // The connections are closed before the end is reported.
        drop(runtime);
        drop(ended);
    };
    std::thread::Builder::new().name("fairlane-health".to_owned()).spawn(serve)?;
    Ok(ending)
}
