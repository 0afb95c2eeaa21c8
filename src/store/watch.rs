//! Whether MongoDB answers: asked in the background, so that no health check has to wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tracing::{info, warn};

use super::mongo::{Mongo, MongoError};
use crate::config::{MongoConfig, MongoUrl};
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

/// Begins to ask, where a MongoDB is configured.
pub(crate) fn begin(config: &MongoConfig, shutdown: &Shutdown) -> Option<Arc<Reachable>> {
    let url = config.url.clone()?;
    let reachable = Arc::new(Reachable::default());
    let (database, told) = (config.database.clone(), Arc::clone(&reachable));
    shutdown.spawn(watch(url, database, told, shutdown.clone()));
    Some(reachable)
}

/// Asks every two seconds until the soft stop. A change is logged once.
async fn watch(url: MongoUrl, database: String, reachable: Arc<Reachable>, shutdown: Shutdown) {
    metrics::mongodb_up(false);
    let mut client: Option<Mongo> = None;
    let mut first = true;
    loop {
        let answer = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            answer = ask(&mut client, &url, &database) => answer,
        };
        let news = reachable.set(answer.is_ok());
        match answer {
            Ok(()) if news => info!(mongodb = %url, "MongoDB answers"),
            Err(error) if news || first => warn!(%error, "MongoDB is away"),
            Ok(()) | Err(_) => {}
        }
        first = false;
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
    if let Some(client) = client {
        client.close().await;
    }
}

/// Pings; makes the client first where that was not possible yet.
async fn ask(client: &mut Option<Mongo>, url: &MongoUrl, database: &str) -> Result<(), MongoError> {
    match client {
        Some(client) => client.ping().await,
        None => client.insert(Mongo::open(url, database).await?).ping().await,
    }
}
