//! Queues events that do not come from a bus.

use std::time::Duration;

use super::Queue;
use crate::clock::millis;
use crate::event::Event;
use crate::id::{BotId, PipelineName};
use crate::redis::RedisError;
use crate::redis::scripts::{Push, Pushed};

/// Maximum number of events of a push: Redis waits until all are queued.
pub const PUSH_MAX: usize = 1_000;

/// Options of a push.
#[derive(Debug, Clone, Copy, Default)]
pub struct PushOptions<'a> {
    /// A second push with the same key within the deduplication window changes nothing.
    pub idempotency: Option<(&'a str, Duration)>,
    /// When the event becomes due, since 1970 by the clock of Redis. Only for a call with exactly one event.
    /// For a delay use [`Queue::push_later`]: the clock of this process may be wrong.
    pub due: Option<Duration>,
}

/// Why events are not queued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// There is no event, or there are too many.
    #[error(
        "a push takes 1 to {PUSH_MAX} events, and with a due time exactly 1; this one has {events}"
    )]
    Count {
        /// Their number.
        events: usize,
    },
    /// An event belongs to another bot.
    #[error("the event {event:?} is one of bot {of}, so bot {bot} cannot get it; push it for {of}")]
    OtherBot {
        /// The id of the event.
        event: String,
        /// Its bot.
        of: BotId,
        /// The bot of the push.
        bot: BotId,
    },
    /// The pipeline has a ledger, and a push enters nothing in it.
    #[error(
        "pipeline {pipeline} has a ledger, which a push would bypass; publish the events instead"
    )]
    Ledger {
        /// The pipeline.
        pipeline: PipelineName,
    },
    /// Redis failed.
    #[error(transparent)]
    Redis(#[from] RedisError),
}

impl Queue {
    /// Queues 1 to [`PUSH_MAX`] events of one bot, in order. They need not come from a bus. Redis runs no
    /// other command meanwhile, so push large events one by one.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] the events may or may not be queued: push again with the same
    /// idempotency key. If the error is not [`PushError::Redis`], nothing was queued.
    pub async fn push(
        &self,
        bot: &BotId,
        events: &[Event],
        options: PushOptions<'_>,
    ) -> Result<Pushed, PushError> {
        let due_ms = options.due.map_or(0, |due| millis(due).try_into().unwrap_or(i64::MAX));
        let most = if options.due.is_some() { 1 } else { PUSH_MAX };
        if !(1..=most).contains(&events.len()) {
            return Err(PushError::Count { events: events.len() });
        }
        self.push_at(bot, events, options.idempotency, due_ms).await
    }

    /// Queues an event of its bot after a delay, which Redis measures. It need not come from a bus. A second
    /// call with the same key within the window of `idempotency` changes nothing: the first one's delay counts.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub async fn push_later(
        &self,
        event: &Event,
        delay: Duration,
        idempotency: Option<(&str, Duration)>,
    ) -> Result<Pushed, PushError> {
        let after_ms = i64::try_from(millis(delay)).unwrap_or(i64::MAX);
        self.push_at(event.bot(), std::slice::from_ref(event), idempotency, -after_ms).await
    }

    /// Queues events whose number was checked. For `due_ms` see [`Push`].
    async fn push_at(
        &self,
        bot: &BotId,
        events: &[Event],
        idempotency: Option<(&str, Duration)>,
        due_ms: i64,
    ) -> Result<Pushed, PushError> {
        if let Some(event) = events.iter().find(|event| event.bot() != bot) {
            let (of, bot) = (event.bot().clone(), bot.clone());
            return Err(PushError::OtherBot { event: event.id().to_owned(), of, bot });
        }
        if self.ledger().is_some() {
            return Err(PushError::Ledger { pipeline: self.name.clone() });
        }
        let encoded: Vec<Vec<u8>> = events.iter().map(Event::encode).collect();
        let idempotency = idempotency.map(|(key, window)| (key, millis(window).max(1)));
        let push = Push {
            keys: self.keys_of(bot),
            limits: self.limits_of(bot),
            bot,
            events: &encoded,
            due_ms,
            idempotency,
        };
        Ok(self.link.call(&push).await?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ledger::{Account, Change, Ledger, Posting};
    use crate::pipeline::Kind;

    #[derive(Debug)]
    struct Kept;

    impl Ledger for Kept {
        fn enter(&self, event: &Event) -> (Event, Option<Posting>) {
            (event.clone(), None)
        }

        fn entry(&self, _: &Event) -> Option<(Account, Change)> {
            None
        }

        fn cached_accounts(&self) -> u64 {
            0
        }
    }

    /// Redis would be the next to refuse.
    #[tokio::test]
    async fn a_push_that_would_break_a_promise_of_the_queue_is_refused_before_redis_is_asked() {
        let queue = Queue::unreachable("p", 4);
        let [a, b] = ["a", "b"].map(|id| BotId::parse(id).unwrap());
        let event = Event::builder("t", &a).id("1").build().unwrap();
        let (one, options) = (std::slice::from_ref(&event), PushOptions::default());
        let refused = async |queue: &Queue, events: &[Event], options| {
            queue.push(&a, events, options).await.unwrap_err()
        };
        assert!(matches!(refused(&queue, one, options).await, PushError::Redis(_)));

        let other = queue.push(&b, one, options).await.unwrap_err();
        let said = "the event \"1\" is one of bot a, so bot b cannot get it; push it for a";
        assert_eq!(other.to_string(), said);

        let due = PushOptions { due: Some(Duration::from_secs(1)), ..options };
        for (events, options) in [(0, options), (PUSH_MAX + 1, options), (0, due), (2, due)] {
            let error = refused(&queue, &vec![event.clone(); events], options).await;
            assert!(matches!(error, PushError::Count { events: told } if told == events));
        }

        let kept = queue.of_kind(Kind { ledger: Some(Arc::new(Kept)), ..Kind::default() });
        assert!(matches!(refused(&kept, one, options).await, PushError::Ledger { .. }));
    }
}
