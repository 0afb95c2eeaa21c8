//! How parts of a process ask for a reload of its configuration.
//!
//! `fairlane serve` starts a new instance in the same process, which takes over the sockets, and
//! then stops the old one, see `app::relay`.

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use utoipa::ToSchema;

/// What a reload did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Reloaded {
    /// The settings with another value than before, by their keys, sorted. Files that settings name
    /// are read again in any case.
    pub(crate) changed: Vec<String>,
}

/// Why nothing was reloaded. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReloadError {
    /// The new configuration is refused.
    #[error("the configuration cannot be used, and nothing changed: {0}")]
    Refused(String),
    /// An instance with it does not start.
    #[error("with the new configuration the process does not start, and nothing changed: {0}")]
    NotReady(String),
    /// The process stops.
    #[error("this process stops, and nothing changed")]
    Stops,
    /// Another program runs this one.
    #[error("this process does not reload its configuration: restart it")]
    Unsupported,
}

/// The answer to a request.
pub(crate) type Answer = Result<Reloaded, ReloadError>;

/// A request to reload.
pub(crate) struct Request(pub(crate) oneshot::Sender<Answer>);

/// Asks for reloads. Clones ask the same process.
#[derive(Debug, Clone)]
pub(crate) struct Reloads(mpsc::Sender<Request>);

/// Reloads, and the requests for them. While one is handled, one more is accepted, and others wait.
pub(crate) fn channel() -> (Reloads, mpsc::Receiver<Request>) {
    let (sender, receiver) = mpsc::channel(1);
    (Reloads(sender), receiver)
}

/// A request that was accepted. It is carried out, also if nothing waits for its answer.
pub(crate) struct Accepted(oneshot::Receiver<Answer>);

impl Accepted {
    /// Returns when the new settings are in force.
    ///
    /// # Errors
    /// See [`ReloadError`].
    pub(crate) async fn answer(self) -> Answer {
        self.0.await.unwrap_or(Err(ReloadError::Stops))
    }
}

impl Reloads {
    /// Waits until a reload is accepted.
    ///
    /// # Errors
    /// If the process stops.
    ///
    /// # Cancel safety
    /// Nothing was asked for: requests that end early do not pile up.
    pub(crate) async fn request(&self) -> Result<Accepted, ReloadError> {
        let (answer, answered) = oneshot::channel();
        self.0.send(Request(answer)).await.map_err(|_| ReloadError::Stops)?;
        Ok(Accepted(answered))
    }

    /// Reloads, and returns when the new settings are in force.
    ///
    /// # Errors
    /// See [`ReloadError`].
    ///
    /// # Cancel safety
    /// A request that was accepted is carried out.
    pub(crate) async fn ask(&self) -> Answer {
        self.request().await?.answer().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_request_that_ends_before_it_is_accepted_asks_for_nothing() {
        let (reloads, mut requests) = channel();
        let _first = reloads.request().await;
        for _ in 0..3 {
            assert!(reloads.request().now_or_never().is_none(), "it waits");
        }
        assert!(requests.recv().await.is_some());
        assert!(requests.try_recv().is_err(), "there are no others");
    }

    #[tokio::test]
    async fn a_request_is_told_that_the_process_stops() {
        let (reloads, requests) = channel();
        let waits = reloads.request().await.expect("there is room");
        drop(requests);
        assert_eq!(waits.answer().await, Err(ReloadError::Stops));
        assert_eq!(reloads.ask().await, Err(ReloadError::Stops));
    }
}
