//! The creation of indexes.

use std::time::Duration;

use tracing::{debug, warn};

use super::client::MongoError;
use crate::lifecycle::Shutdown;

/// Pause between two attempts.
const AGAIN: Duration = Duration::from_secs(5);

/// Creates the indexes `of` a store, and tries again while MongoDB is unavailable. With much data, one
/// attempt is not enough. An interrupted creation is repeated at the next start.
pub(crate) async fn prepare<F>(of: &'static str, shutdown: Shutdown, create: impl Fn() -> F)
where
    F: Future<Output = Result<(), MongoError>>,
{
    let mut warned = false;
    loop {
        let created = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            created = create() => created,
        };
        match created {
            Ok(()) => return debug!("the indexes of {of} exist"),
            Err(error) if !warned => {
                warn!(%error, "cannot create the indexes of {of}; retrying");
                warned = true;
            }
            Err(error) => debug!(%error, "cannot create the indexes of {of}"),
        }
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(AGAIN) => {}
        }
    }
}
