//! Why a bot is tried again: what its handler said last, for people. Nothing depends on it: it is
//! written beside the completion, and forgotten some time after.

use std::time::Duration;

use redis::Value;
use serde::Serialize;
use utoipa::ToSchema;

use super::{BotState, BotView, Queue};
use crate::clock::millis;
use crate::id::BotId;
use crate::keyspace::{ReplyError, StoreError};

/// How much longer than the pause before the next attempt it is kept.
const KEPT: Duration = Duration::from_secs(3_600);

/// What a handler said when it failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct LastFailure {
    /// Why, up to 1,000 bytes.
    pub reason: String,
    /// When, ms since 1970.
    pub time_ms: u64,
}

impl LastFailure {
    fn written(&self) -> String {
        format!("{} {}", self.time_ms, self.reason)
    }

    fn read(text: &str) -> Option<Self> {
        let (time_ms, reason) = text.split_once(' ')?;
        Some(Self { reason: reason.to_owned(), time_ms: time_ms.parse().ok()? })
    }
}

impl Queue {
    /// Notes why a bot now rests for `pause`. `now` since 1970.
    pub(crate) async fn note_failure(
        &self,
        bot: &BotId,
        reason: &str,
        now: Duration,
        pause: Duration,
    ) -> Result<(), StoreError> {
        let failure = LastFailure { reason: reason.to_owned(), time_ms: millis(now) };
        let mut command = redis::cmd("SET");
        command.arg(self.keys_of(bot).failure(bot)).arg(failure.written());
        command.arg("PX").arg(millis(pause.saturating_add(KEPT)));
        self.link().command("SET", command).await.map(drop)
    }

    /// Why a bot is tried again; `None` when it is not, when a lease was lost without a word, and
    /// when that was long ago.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn last_failure(&self, view: &BotView) -> Result<Option<LastFailure>, StoreError> {
        if view.attempts == 0 && view.state != BotState::Parked {
            return Ok(None);
        }
        let mut command = redis::cmd("GET");
        command.arg(self.keys_of(&view.bot).failure(&view.bot));
        let text = match self.link().command("GET", command).await? {
            Value::Nil => return Ok(None),
            Value::BulkString(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => String::new(),
        };
        let failure = LastFailure::read(&text);
        let misread = || self.link().misread("GET", ReplyError::unexpected("a failure", &text));
        failure.ok_or_else(misread).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_read_as_it_was_written() {
        for reason in ["", "no answer within 5s", " 12 a|b\n"] {
            let failure = LastFailure { reason: reason.to_owned(), time_ms: 1_760_000_000_000 };
            assert_eq!(LastFailure::read(&failure.written()), Some(failure));
        }
        assert_eq!((LastFailure::read("now why"), LastFailure::read("1")), (None, None));
    }
}
