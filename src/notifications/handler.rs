//! The handler `notify`: starts sending due notifications. It never waits for a send.

use super::Sender;
use crate::handler::{Environment, Failure, Handler, Outcomes, Slice};

/// The handler `notify`.
#[derive(Debug)]
pub(crate) struct NotifyHandler(pub(crate) Sender);

impl Handler for NotifyHandler {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        self.0.start(slice).await?;
        Ok(Outcomes::done())
    }
}
