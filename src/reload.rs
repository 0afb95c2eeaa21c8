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

/// Why nothing was reloaded. The process goes on as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReloadError {
    /// The new configuration is refused.
    #[error("the configuration cannot be used, and nothing changed: {0}")]
    Refused(String),
    /// An instance with it does not start.
    #[error("with the new configuration the process does not start, and nothing changed: {0}")]
    NotReady(String),
    /// The process stops, or another program runs this one.
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

/// Reloads, and the requests for them. Further requests wait while one is handled.
pub(crate) fn channel() -> (Reloads, mpsc::Receiver<Request>) {
    let (sender, receiver) = mpsc::channel(1);
    (Reloads(sender), receiver)
}

impl Reloads {
    /// Reloads, and returns when the new settings are in force.
    ///
    /// # Errors
    /// See [`ReloadError`].
    ///
    /// # Cancel safety
    /// A request that was accepted is carried out.
    pub(crate) async fn ask(&self) -> Answer {
        let (answer, answered) = oneshot::channel();
        self.0.send(Request(answer)).await.map_err(|_| ReloadError::Unsupported)?;
        answered.await.unwrap_or(Err(ReloadError::Unsupported))
    }
}
