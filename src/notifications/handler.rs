//! The handler `notify`: starts to send the notifications that are due. It never waits for one.

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
