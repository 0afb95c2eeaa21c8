//! What bots hold, and their quotas.

use std::collections::BTreeMap;

use super::{Bot, Event, Letter, Reason, Server};

/// The bytes of a record before its event.
const HEAD: u64 = 11;

/// The bytes of an event: they differ, so that a wrong sum is found.
pub(crate) fn size(event: Event) -> u64 {
    3 + u64::from(event % 5)
}

/// The bytes of the record of an event.
pub(crate) fn record_size(event: Event) -> u64 {
    HEAD + size(event)
}

impl Server {
    /// What every bot holds, by the letters of the key `held`.
    pub(crate) fn holdings(&self) -> BTreeMap<(char, Bot), u64> {
        let mut held = BTreeMap::new();
        let mut add = |kind, bot, by| *held.entry((kind, bot)).or_default() += by;
        for (&bot, queue) in &self.queues {
            for &(_, event) in queue {
                add('q', bot, record_size(event));
            }
        }
        for (&(bot, _), list) in &self.lists {
            for &(_, event) in list {
                add('q', bot, record_size(event));
                add('a', bot, 1);
            }
        }
        for &(_, bot, event) in self.later.values() {
            add('l', bot, 1);
            add('L', bot, size(event));
        }
        for letter in &self.dead {
            add('d', letter.bot, 1);
            add('D', letter.bot, record_size(letter.event));
        }
        held
    }

    pub(super) fn held(&self, kind: char, bot: Bot) -> u64 {
        self.holdings().get(&(kind, bot)).copied().unwrap_or(0)
    }

    pub(super) fn may_queue(&self, bot: Bot, events: &[Event]) -> bool {
        let bytes: u64 = events.iter().map(|&event| record_size(event)).sum();
        let limit = self.limits.queued_bytes;
        limit == 0 || self.held('q', bot) + bytes <= limit
    }

    pub(super) fn may_bury(&self, letter: Letter) -> bool {
        let (letters, bytes) = self.limits.letters;
        let (bot, size) = (letter.bot, record_size(letter.event));
        // Redriven events above the quota count as letters.
        let above = match (letter.reason, self.limits.queued_bytes) {
            (Reason::Quota(_) | Reason::Full(_), limit) if limit > 0 => {
                self.held('q', bot).saturating_sub(limit)
            }
            _ => 0,
        };
        (letters == 0 || self.held('d', bot) < letters)
            && (bytes == 0 || self.held('D', bot) + above + size <= bytes)
            && !self.keeps_oldest_letter(bot)
    }

    /// Whether a full shard keeps its oldest letter: the bot of that one has fewer than this bot
    /// would have.
    fn keeps_oldest_letter(&self, bot: Bot) -> bool {
        let Some(oldest) = self.dead.front() else { return false };
        self.dead.len() >= self.limits.dead_max
            && oldest.bot != bot
            && self.held('d', oldest.bot) <= self.held('d', bot)
    }
}
