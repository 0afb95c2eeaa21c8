//! The state of a bot in words.

use std::time::Duration;

use super::super::error::CliError;
use super::super::output::{duration, plain};
use super::super::session::Session;
use crate::clock::millis;
use crate::condition::{Condition, Handled, Terms};
use crate::presence;
use crate::queue::{BotView, Holdings, LastFailure, Queue};

/// Number of attempts that are read: the last one that completed anything is among them, usually.
const ATTEMPTS: usize = 20;

/// The sentence, as on the page of the bot.
pub(super) async fn words(
    session: &Session,
    queue: &Queue,
    look: &BotView,
    (failure, holds): (Option<&LastFailure>, &Holdings),
    now: Duration,
) -> Result<String, CliError> {
    let attempts = queue.attempts(&look.bot, ATTEMPTS).await?;
    let processes = presence::processes(queue.link()).await?;
    let handled = presence::handler_of(&processes, queue.name(), &look.bot);
    let condition = Condition {
        look,
        failure,
        attempts: &attempts,
        holds,
        stopped: queue.is_stopped(&look.bot).await?,
        handled: handled
            .map(|(process, since_ms)| Handled { since_ms, process: (&process.host, process.pid) }),
        terms: &Terms::of(session.config.pipelines.get(queue.name()), true),
    };
    Ok(plain(&condition.words(millis(now), duration)))
}
