//! The built-in handler `log`: logs a line per event. For first steps and debugging.

use super::{Environment, Failure, Handler, Outcomes, Slice};

/// Logs bot, type, id and sequence of every event at level `info`. Never the payload.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogHandler;

impl Handler for LogHandler {
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        for delivery in &slice.events {
            tracing::info!(
                pipeline = %environment.pipeline,
                bot = %slice.bot,
                r#type = delivery.event.kind(),
                id = delivery.event.id(),
                sequence = %delivery.sequence,
                attempt = slice.attempt,
                "event"
            );
        }
        Ok(Outcomes::done())
    }
}
