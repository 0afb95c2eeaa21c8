//! Whether MongoDB answers: asked in the background, so that no health check has to wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::{info, warn};

use super::mongo::Mongo;
use crate::lifecycle::Shutdown;
use crate::metrics;

/// How often it is asked.
const EVERY: Duration = Duration::from_secs(2);

/// Whether a store answered when it was last asked; not before it did for the first time.
#[derive(Debug, Default)]
pub struct Reachable(AtomicBool);

impl Reachable {
    /// The last answer, at most some ten seconds old.
    #[must_use]
    pub fn now(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Keeps the answer; says whether it is news.
    fn set(&self, up: bool) -> bool {
        metrics::mongodb_up(up);
        self.0.swap(up, Ordering::Relaxed) != up
    }
}

/// Begins to ask, where there is a MongoDB.
pub(crate) fn begin(mongo: Option<Mongo>, shutdown: &Shutdown) -> Option<Arc<Reachable>> {
    let mongo = mongo?;
    let reachable = Arc::new(Reachable::default());
    shutdown.spawn(watch(mongo, Arc::clone(&reachable), shutdown.clone()));
    Some(reachable)
}

/// Asks every two seconds until the soft stop. A change is logged once.
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
