//! The handler `notify`: starts to send the notifications that are due. It never waits for one.

use std::sync::OnceLock;

use super::{Answer, AnyHandler, Environment, Failure, Handling, Outcomes, Slice};
use crate::notifications::Sender;

/// The handler `notify`, idle until it is given what sends.
#[derive(Debug, Default)]
pub(crate) struct NotifyHandler(OnceLock<Sender>);

impl AnyHandler for NotifyHandler {
    fn handle_boxed<'a>(
        &'a self,
        _: &'a Environment,
        slice: &'a Slice,
        _: &'a str,
    ) -> Handling<'a> {
        Box::pin(async move {
            let Some(sender) = self.0.get() else {
                return Err(Failure::unavailable(0, "nothing is sent here yet"));
            };
            sender.start(slice).await?;
            Ok(Answer::Settled(Outcomes::done()))
        })
    }

    fn send_with(&self, sender: Sender) {
        // The first one stays; there is one per process.
        let _ = self.0.set(sender);
    }

    fn committed(&self, _: &Slice, _: usize) {}
}
