//! The notes that are not written yet. Their number is bounded, per bot and in all: what does not fit
//! is counted and left out.

use std::mem;

use rustc_hash::FxHashMap;

use super::Attempt;
use crate::id::BotId;

/// Maximum number of failures of one bot between two writes.
const BOT_FAILURES: usize = 8;
/// The same for all bots.
const FAILURES: usize = 2_000;
/// Maximum number of notes of completed slices between two writes.
const DONE: usize = 20_000;

/// Notes of attempts.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Of completed slices, in the order of their ends.
    pub(super) done: Vec<(BotId, Attempt)>,
    /// The place in `done` of the last note of a bot.
    last: FxHashMap<BotId, usize>,
    pub(super) failed: FxHashMap<BotId, Vec<Attempt>>,
    failures: usize,
    /// Number of attempts that did not fit.
    pub(super) dropped: u64,
}

impl Notes {
    pub(super) fn is_empty(&self) -> bool {
        self.done.is_empty() && self.failed.is_empty()
    }

    pub(super) fn add(&mut self, bot: &BotId, attempt: Attempt) {
        let fits = if attempt.result.is_failure() {
            // A success after a failure is not a part of the successes before.
            self.last.remove(bot);
            self.add_failure(bot, attempt)
        } else {
            self.add_done(bot, attempt)
        };
        self.dropped += u64::from(!fits);
    }

    fn add_done(&mut self, bot: &BotId, attempt: Attempt) -> bool {
        if let Some(&at) = self.last.get(bot)
            && self.done[at].1.join(&attempt)
        {
            return true;
        }
        let fits = self.done.len() < DONE;
        if fits {
            self.last.insert(bot.clone(), self.done.len());
            self.done.push((bot.clone(), attempt));
        }
        fits
    }

    fn add_failure(&mut self, bot: &BotId, attempt: Attempt) -> bool {
        if self.failures >= FAILURES {
            return false;
        }
        let of_bot = self.failed.entry(bot.clone()).or_default();
        if of_bot.len() >= BOT_FAILURES {
            return false;
        }
        of_bot.push(attempt);
        self.failures += 1;
        true
    }

    pub(super) fn take(&mut self) -> Self {
        mem::take(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::AttemptResult;
    use super::super::attempt::tests::done;
    use super::*;

    fn failed(sequence: u64) -> Attempt {
        Attempt { result: AttemptResult::Failed, settled: 0, ..done(sequence) }
    }

    #[test]
    fn slices_of_a_bot_are_joined_between_two_writes_but_not_across_a_failure() {
        let (a, b) = (BotId::parse("a").unwrap(), BotId::parse("b").unwrap());
        let mut notes = Notes::default();
        for (bot, sequence) in [(&a, 1), (&b, 2), (&a, 3)] {
            notes.add(bot, done(sequence));
        }
        notes.add(&a, failed(4));
        notes.add(&a, done(5));
        let joined: Vec<_> =
            notes.done.iter().map(|(bot, note)| (bot.as_str(), note.slices)).collect();
        assert_eq!(joined, [("a", 2), ("b", 1), ("a", 1)]);
        assert_eq!(notes.failed[&a], [failed(4)]);
        let taken = notes.take();
        assert!(notes.is_empty() && !taken.is_empty());
    }

    #[test]
    fn a_bot_that_fails_all_the_time_leaves_room_for_the_failures_of_others() {
        let (a, b) = (BotId::parse("a").unwrap(), BotId::parse("b").unwrap());
        let mut notes = Notes::default();
        for sequence in 0..5_000 {
            notes.add(&a, failed(sequence));
        }
        notes.add(&b, failed(1));
        assert_eq!((notes.failed[&a].len(), notes.failed[&b].len()), (BOT_FAILURES, 1));
        assert_eq!(notes.dropped, 5_000 - BOT_FAILURES as u64);
    }
}
