//! The handler `notify`: starts to send the notifications that are due. It never waits for one.

use super::{Answer, AnyHandler, Environment, Handling, Outcomes, Slice};
use crate::notifications::Sender;

/// The handler `notify`.
#[derive(Debug)]
pub(crate) struct NotifyHandler(pub(crate) Sender);

impl AnyHandler for NotifyHandler {
    fn handle_boxed<'a>(
        &'a self,
        _: &'a Environment,
        slice: &'a Slice,
        _: &'a str,
    ) -> Handling<'a> {
        Box::pin(async move {
            self.0.start(slice).await?;
            Ok(Answer::Settled(Outcomes::done()))
        })
    }

    fn committed(&self, _: &Slice, _: usize) {}
}
