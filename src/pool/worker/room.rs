//! The quota of delayed events, for the events that a handler wants later. Only the holder of its lease
//! delays events of a bot in this way. So it compares before it commits, with what the scripts count.

use tokio::time::timeout_at;
use tracing::debug;

use super::super::settle::Fitness;
use super::Worker;
use crate::handler::{Failure, Outcome, Outcomes};
use crate::metrics;
use crate::quotas::{Quota, QuotaExceeded};

/// The bytes of a queue record before its event.
const HEAD: u64 = 11;

/// Whether a handler wants events later.
pub(super) fn wants_later(answer: &Result<Outcomes, Failure>) -> bool {
    let is_later = |(_, outcome): &(usize, Outcome)| matches!(outcome, Outcome::Later(_));
    answer.as_ref().is_ok_and(|outcomes| outcomes.exceptions.iter().any(is_later))
}

/// The room of a bot for further delayed events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// What it holds.
    events: u64,
    bytes: u64,
    quota: Quota,
}

impl Room {
    const UNLIMITED: Self = Self { events: 0, bytes: 0, quota: Quota::NONE };

    /// The answer up to the first event that the bot may not delay: this one failed. `size`: the bytes of
    /// the record of each event that the handler got.
    pub(super) fn bound(
        &mut self,
        answer: Result<Outcomes, Failure>,
        size: impl Fn(usize) -> Option<u64>,
    ) -> Result<Outcomes, Failure> {
        if !wants_later(&answer) {
            return answer;
        }
        let mut outcomes = answer?;
        let exceptions = &mut outcomes.exceptions;
        // As the settlement does it: the first outcome of an event counts, if the event is settled.
        exceptions.sort_by_key(|(k, _)| *k);
        exceptions.dedup_by_key(|(k, _)| *k);
        let settled = outcomes.settled.unwrap_or(usize::MAX);
        let refused = exceptions.iter().enumerate().find_map(|(place, (k, outcome))| {
            let is_later = *k < settled && matches!(outcome, Outcome::Later(_));
            let bytes = size(*k).filter(|_| is_later)?;
            let exceeded = self.take(bytes.saturating_sub(HEAD)).err()?;
            Some((place, *k, exceeded))
        });
        let Some((place, k, exceeded)) = refused else { return Ok(outcomes) };
        metrics::quota_refused(exceeded.name, 1);
        outcomes.exceptions.truncate(place);
        let reason = format!("the event cannot be delayed: {exceeded}");
        Err(Failure { before: outcomes.exceptions, ..Failure::transient(k, reason) })
    }

    fn take(&mut self, bytes: u64) -> Result<(), QuotaExceeded> {
        let Self { events, bytes: held_bytes, quota } = *self;
        for (name, held, more, limit) in [
            ("delayed_events", events, 1, quota.delayed_events),
            ("delayed_bytes", held_bytes, bytes, quota.delayed_bytes),
        ] {
            if limit > 0 && held.saturating_add(more) > limit {
                return Err(QuotaExceeded { name, held, limit });
            }
        }
        *self = Self { events: events + 1, bytes: held_bytes + bytes, quota };
        Ok(())
    }
}

impl Worker {
    /// The answer of the handler for the fit events of a slice, as far as the quota of delayed events allows.
    pub(super) async fn within_quota(
        &self,
        slice: &[Fitness],
        answer: Result<Outcomes, Failure>,
    ) -> Result<Outcomes, Failure> {
        if !wants_later(&answer) {
            return answer;
        }
        let is_fit = |(fitness, _): &(&Fitness, &u64)| **fitness == Fitness::Fit;
        let sizes = slice.iter().zip(&self.sizes).filter(is_fit);
        let sizes: Vec<u64> = sizes.map(|(_, size)| *size).collect();
        self.room(true).await.bound(answer, |k| sizes.get(k).copied())
    }

    /// The room of the bot for further delayed events, if that is needed.
    pub(super) async fn room(&self, is_needed: bool) -> Room {
        let (queue, bot) = (&self.shared.queue, &self.lease.bot);
        // The event leaves the queue in the same step, so a delay takes hardly more memory.
        let quota = queue.quotas().for_a_move(bot);
        if !is_needed || quota.delayed_events == 0 && quota.delayed_bytes == 0 {
            return Room::UNLIMITED;
        }
        match timeout_at(self.lease.deadline(), queue.delayed_of(bot)).await {
            Ok(Ok([events, bytes])) => Room { events, bytes, quota },
            // The completion needs Redis too. If it comes through, one slice may exceed the quota.
            Ok(Err(error)) => {
                debug!(%bot, %error, "cannot read how many delayed events a bot holds");
                Room::UNLIMITED
            }
            Err(_) => Room::UNLIMITED,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const EVENT: u64 = 100;

    fn room(events: u64, bytes: u64) -> Room {
        let quota = Quota { delayed_events: 10, delayed_bytes: 1_000, ..Quota::NONE };
        Room { events, bytes, quota }
    }

    /// What becomes of the answer for a slice of five events.
    fn bound(room: &mut Room, outcomes: Outcomes) -> Result<Outcomes, Failure> {
        room.bound(Ok(outcomes), |k| (k < 5).then_some(HEAD + EVENT))
    }

    fn later(outcomes: Outcomes, index: usize) -> Outcomes {
        outcomes.later(index, Duration::from_secs(1))
    }

    #[test]
    fn the_first_event_that_a_bot_may_not_delay_failed_and_those_before_it_keep_their_outcome() {
        let all = || (0..5).rev().fold(Outcomes::done(), later).dead(1, "not the first outcome");
        assert!(bound(&mut room(5, 0), all()).is_ok());
        assert!(bound(&mut room(0, 500), all()).is_ok());
        for (mut full, at, why) in [
            (room(8, 0), 2, "it holds 10, and quotas.delayed_events is now 10"),
            (room(0, 701), 2, "it holds 901, and quotas.delayed_bytes is now 1000"),
            (room(20, 0), 0, "it holds 20, and quotas.delayed_events is now 10"),
        ] {
            let failure = bound(&mut full, all()).unwrap_err();
            assert_eq!(failure.at(), Some(at));
            let before: Vec<_> =
                (0..at).map(|k| (k, Outcome::Later(Duration::from_secs(1)))).collect();
            assert_eq!(failure.before, before);
            assert!(failure.reason().ends_with(why), "{}", failure.reason());
        }
    }

    #[test]
    fn slices_of_one_completion_share_the_room() {
        let mut room = room(8, 0);
        assert!(bound(&mut room, (0..2).fold(Outcomes::done(), later)).is_ok());
        assert_eq!(bound(&mut room, later(Outcomes::done(), 4)).unwrap_err().at(), Some(4));
        assert!(bound(&mut room, Outcomes::done().dead(0, "no")).is_ok());
    }

    #[test]
    fn an_event_that_is_not_settled_needs_no_room() {
        for outcomes in [later(Outcomes::first(2), 2), later(Outcomes::done(), 5)] {
            assert_eq!(bound(&mut room(10, 0), outcomes.clone()), Ok(outcomes));
        }
        let mut unlimited = Room::UNLIMITED;
        assert!(bound(&mut unlimited, later(Outcomes::done(), 0)).is_ok());
    }
}
