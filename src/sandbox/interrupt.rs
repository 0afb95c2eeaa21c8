//! Signals that end a run instead of its process.

use super::SandboxError;
use crate::signals::Signals;

/// Makes SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal is gone) end the work instead of the
/// process, so that the servers are removed first. A SIGHUP that is ignored stays so.
#[derive(Debug)]
pub struct Interrupt(Signals);

impl Interrupt {
    /// From now on, these signals do not end the process.
    ///
    /// # Errors
    /// If the operating system refuses it.
    pub fn listen() -> Result<Self, SandboxError> {
        Signals::listen().map(Self).map_err(SandboxError::Signals)
    }

    /// The result of `work`, unless it is interrupted, or was before it began.
    ///
    /// # Errors
    /// Those of `work`, or [`SandboxError::Interrupted`].
    pub async fn or<T, E: From<SandboxError>>(
        &mut self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        tokio::select! {
            result = work => result,
            () = self.0.next() => Err(SandboxError::Interrupted.into()),
        }
    }
}
