//! Polls MongoDB in the background, so that health checks do not wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::{info, warn};

use super::client::Mongo;
use crate::lifecycle::Shutdown;
use crate::metrics;

/// Interval of the polls.
const EVERY: Duration = Duration::from_secs(1);
/// A server that has not answered within this time is reported as unavailable. The poll goes on.
const SILENT: Duration = Duration::from_millis(2_500);

/// Whether a store answered the last poll; false before its first answer.
#[derive(Debug, Default)]
pub struct Reachable {
    up: AtomicBool,
    asked: AtomicBool,
}

impl Reachable {
    /// The last result, at most about four seconds old.
    #[must_use]
    pub fn now(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// The last result; `None` before the first one.
    #[must_use]
    pub fn known(&self) -> Option<bool> {
        self.asked.load(Ordering::Relaxed).then(|| self.now())
    }

    /// Stores the result.
    fn set(&self, up: bool) {
        metrics::mongodb_up(up);
        self.up.store(up, Ordering::Relaxed);
        self.asked.store(true, Ordering::Relaxed);
    }
}

/// Starts to poll, if there is a MongoDB.
pub(crate) fn begin(mongo: Option<Mongo>, shutdown: &Shutdown) -> Option<Arc<Reachable>> {
    let mongo = mongo?;
    let reachable = Arc::new(Reachable::default());
    shutdown.spawn(watch(mongo, Arc::clone(&reachable), shutdown.clone()));
    Some(reachable)
}

/// Polls every second until the soft stop. Logs each change once.
async fn watch(mongo: Mongo, reachable: Arc<Reachable>, shutdown: Shutdown) {
    metrics::mongodb_up(false);
    let mut told = None;
    loop {
        let ping = mongo.ping();
        tokio::pin!(ping);
        let answer = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            answer = &mut ping => answer,
            () = tokio::time::sleep(SILENT) => {
                reachable.set(false);
                // The error says more than that there is no answer yet.
                tokio::select! {
                    biased;
                    () = shutdown.soft.cancelled() => return,
                    answer = ping => answer,
                }
            }
        };
        let up = answer.is_ok();
        reachable.set(up);
        if told.replace(up) != Some(up) {
            match answer {
                Ok(()) => info!(%mongo, "MongoDB answers"),
                Err(error) => warn!(%error, "MongoDB is unavailable"),
            }
        }
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}
