//! Polls MongoDB in the background, so that health checks do not wait for it.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::client::{Mongo, MongoError};
use crate::lifecycle::Shutdown;
use crate::metrics;

/// Interval of the polls.
const EVERY: Duration = Duration::from_secs(1);
/// A server that has not answered within this time is reported as unavailable, until it answers a later
/// poll sooner.
const SILENT: Duration = Duration::from_millis(2_500);

/// Whether a store answered the last poll soon; false before its first answer.
#[derive(Debug, Default)]
pub struct Reachable {
    up: AtomicBool,
    asked: AtomicBool,
}

impl Reachable {
    /// The last result. It is false about four seconds after the server stopped to answer.
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

/// What the log said last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    Answers,
    /// That there is no answer.
    Silent,
    /// And why.
    Fails,
}

/// Starts to poll, if there is a MongoDB.
pub(crate) fn begin(mongo: Option<Mongo>, shutdown: &Shutdown) -> Option<Arc<Reachable>> {
    let mongo = mongo?;
    let reachable = Arc::new(Reachable::default());
    shutdown.spawn(watch(mongo, Arc::clone(&reachable), shutdown.clone()));
    Some(reachable)
}

/// Polls every second until the soft stop.
async fn watch(mongo: Mongo, reachable: Arc<Reachable>, shutdown: Shutdown) {
    metrics::mongodb_up(false);
    tokio::select! {
        biased;
        () = shutdown.soft.cancelled() => {}
        () = poll(&mongo, &reachable, || mongo.ping()) => {}
    }
}

/// Polls for ever, and logs each change once.
async fn poll<F>(mongo: &impl fmt::Display, reachable: &Reachable, ping: impl Fn() -> F)
where
    F: Future<Output = Result<(), MongoError>>,
{
    let mut told: Option<Told> = None;
    loop {
        let mut asking = pin!(ping());
        let soon = timeout(SILENT, asking.as_mut()).await;
        let up = matches!(soon, Ok(Ok(())));
        reachable.set(up);
        let answer = if let Ok(answer) = soon {
            answer
        } else {
            if told < Some(Told::Silent) {
                warn!(%mongo, after = ?SILENT, "MongoDB is unavailable: it does not answer");
                told = Some(Told::Silent);
            }
            // An error says why. A success that is this late does not count.
            asking.await
        };
        match answer {
            Ok(()) if up => {
                if told.replace(Told::Answers) != Some(Told::Answers) {
                    info!(%mongo, "MongoDB answers");
                }
            }
            Ok(()) => {}
            Err(error) => {
                if told.replace(Told::Fails) != Some(Told::Fails) {
                    warn!(%error, "MongoDB is unavailable");
                }
            }
        }
        sleep(EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_late_is_unavailable_until_it_answers_soon() {
        let (reachable, takes) = (Reachable::default(), Cell::new(Duration::ZERO));
        let ping = || {
            let takes = takes.get();
            async move {
                sleep(takes).await;
                Ok::<(), MongoError>(())
            }
        };
        let watched = async {
            for (ms, up) in
                [(0, true), (4_500, false), (2_600, false), (2_400, true), (4_500, false)]
            {
                takes.set(Duration::from_millis(ms));
                // The first of these answers, and a poll before it.
                sleep(Duration::from_secs(12)).await;
                let until = Instant::now() + Duration::from_secs(60);
                while Instant::now() < until {
                    assert_eq!(reachable.known(), Some(up), "{ms} ms");
                    sleep(Duration::from_millis(50)).await;
                }
            }
        };
        tokio::select! {
            () = poll(&"the server", &reachable, ping) => {}
            () = watched => {}
        }
    }
}
