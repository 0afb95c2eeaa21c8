//! Health and metrics, on a thread of their own: whatever keeps the others busy, an orchestrator that
//! asks is answered.

use std::io;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::http::{self, Ending, Health, Limits, Proxies};

/// Scrapers and probes are few.
const LIMITS: Limits = Limits { name: "metrics", connections: 256, per_address: 128 };

/// Serves `metrics.listen` until `stop`; the answer comes when that has ended.
pub(super) fn spawn(
    listener: TcpListener,
    health: Health,
    stop: CancellationToken,
) -> io::Result<oneshot::Receiver<()>> {
    let listener = listener.into_std()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (ended, ending) = oneshot::channel();
    let serve = move || {
        runtime.block_on(async {
            match TcpListener::from_std(listener) {
                Ok(listener) => {
                    let ending = Ending { leaving: health.leaving.clone(), stop };
                    let routes = http::metrics_routes(health);
                    http::serve(listener, routes, LIMITS, Proxies::default(), ending).await;
                }
                Err(error) => tracing::error!(%error, "cannot serve metrics.listen"),
            }
        });
        // Its connections are closed before anybody hears that it ended.
        drop(runtime);
        drop(ended);
    };
    std::thread::Builder::new().name("fairlane-health".to_owned()).spawn(serve)?;
    Ok(ending)
}
