//! Lanes that are set aside: `att` names them, and each has a list of its own.

use std::collections::VecDeque;

use super::{Bot, Event, Server};

/// A lane of a bot.
pub(crate) type Lane = u8;

/// The number of lanes that events have here.
pub(crate) const LANES: Lane = 3;

/// The lane of an event.
pub(crate) fn lane_of(event: Event) -> Lane {
    u8::try_from(event % Event::from(LANES)).unwrap()
}

/// A change of the lanes that are set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    /// The lanes afterwards, each with the time in ms at which it is due; the first one first.
    pub(crate) lanes: Vec<(Lane, i64)>,
    /// The time until the first one is due, as the caller sees it; 0: it is due.
    pub(crate) next_ms: i64,
    /// The lane whose list has the `n` events of the completion; `None`: the queue has them.
    pub(crate) list: Option<Lane>,
}

impl Server {
    /// The number of events in the queue of a bot.
    pub(super) fn length(&self, bot: Bot) -> usize {
        self.queues.get(&bot).map_or(0, VecDeque::len)
    }

    /// The number of events in the lanes of a bot that are set aside.
    pub(super) fn set_aside(&self, bot: Bot) -> usize {
        self.lists.iter().filter(|((of, _), _)| *of == bot).map(|(_, list)| list.len()).sum()
    }

    /// The events of the queue, or of a lane that is set aside.
    pub(crate) fn list(&self, bot: Bot, list: Option<Lane>) -> Option<&VecDeque<(u64, Event)>> {
        match list {
            None => self.queues.get(&bot),
            Some(lane) => self.lists.get(&(bot, lane)),
        }
    }

    /// Ends the parks of bots that wait for a lane alone, and whose queue just got its first event.
    pub(crate) fn unpark(&mut self, fresh: &[Bot]) {
        for bot in fresh {
            if self.aside.contains_key(bot) && !self.own.contains_key(bot) {
                self.busy.remove(bot);
            }
        }
    }

    /// Whether a bot has something to do, now or later.
    pub(super) fn has_events(&self, bot: Bot) -> bool {
        self.queues.contains_key(&bot) || self.aside.contains_key(&bot)
    }

    /// Makes all lanes of a bot due. Returns whether it has one.
    pub(super) fn make_due(&mut self, bot: Bot) -> bool {
        let Some(lanes) = self.aside.get_mut(&bot) else { return false };
        for (_, due_ms) in lanes {
            *due_ms = 0;
        }
        true
    }

    /// Removes the first `n` events of the queue or of a list.
    pub(super) fn remove_head(&mut self, bot: Bot, list: Option<Lane>, n: u32) -> Vec<Event> {
        let queue = match list {
            None => self.queues.get_mut(&bot),
            Some(lane) => self.lists.get_mut(&(bot, lane)),
        };
        let Some(queue) = queue else { return Vec::new() };
        let n = queue.len().min(n as usize);
        let removed: Vec<Event> = queue.drain(..n).map(|(_, event)| event).collect();
        if queue.is_empty() {
            match list {
                None => self.queues.remove(&bot),
                Some(lane) => self.lists.remove(&(bot, lane)),
            };
        }
        self.depth -= removed.len() as u64;
        removed
    }

    /// Drops the lanes of a bot with their events.
    pub(super) fn drop_lanes(&mut self, bot: Bot) -> Vec<Event> {
        self.aside.remove(&bot);
        self.redriven.remove(&bot);
        (0..LANES).flat_map(|lane| self.remove_head(bot, Some(lane), u32::MAX)).collect()
    }
}
