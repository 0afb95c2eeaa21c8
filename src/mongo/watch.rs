//! Polls MongoDB in the background, so that health checks do not wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::{info, warn};

use super::client::Mongo;
use crate::lifecycle::Shutdown;
use crate::metrics;

/// Interval of the polls.
const EVERY: Duration = Duration::from_secs(2);

/// Whether a store answered the last poll; false before its first answer.
#[derive(Debug, Default)]
pub struct Reachable {
    up: AtomicBool,
    asked: AtomicBool,
}

impl Reachable {
    /// The last result, at most about ten seconds old.
    #[must_use]
    pub fn now(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// The last result; `None` before the first one.
    #[must_use]
    pub fn known(&self) -> Option<bool> {
        self.asked.load(Ordering::Relaxed).then(|| self.now())
    }

    /// Stores the result. Returns whether it differs from the last one.
    fn set(&self, up: bool) -> bool {
        metrics::mongodb_up(up);
        let before = self.up.swap(up, Ordering::Relaxed);
        self.asked.store(true, Ordering::Relaxed);
        before != up
    }
}

/// Starts to poll, if there is a MongoDB.
pub(crate) fn begin(mongo: Option<Mongo>, shutdown: &Shutdown) -> Option<Arc<Reachable>> {
    let mongo = mongo?;
    let reachable = Arc::new(Reachable::default());
    shutdown.spawn(watch(mongo, Arc::clone(&reachable), shutdown.clone()));
    Some(reachable)
}

/// Polls every two seconds until the soft stop. Logs each change once.
async fn watch(mongo: Mongo, reachable: Arc<Reachable>, shutdown: Shutdown) {
    metrics::mongodb_up(false);
    let mut first = true;
    loop {
        let answer = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            answer = mongo.ping() => answer,
        };
        let news = reachable.set(answer.is_ok());
        match answer {
            Ok(()) if news => info!(%mongo, "MongoDB answers"),
            Err(error) if news || first => warn!(%error, "MongoDB is unavailable"),
            Ok(()) | Err(_) => {}
        }
        first = false;
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}
