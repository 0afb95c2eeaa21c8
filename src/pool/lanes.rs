//! Ordering keys: which events of a bot keep their order, and which list of a bot a lease is for.
//!
//! A bot has 64 lanes, and an event belongs to the lane of its ordering key. The holder of the lease of
//! the bot runs several lanes at once. When a lane fails, it is *set aside*: its events go to a list of
//! its own, and the bot goes on with the others. Each lease is for one list: the queue, or a lane that
//! is due again.

use xxhash_rust::xxh3::xxh3_64;

use crate::event::Event;
use crate::expression::{FilterError, TextExpression};
use crate::id::{Fence, Lane};
use crate::queue::OrderBy;
use crate::redis::aside::{Aside, Tried};
use crate::telemetry::OncePerMinute;

/// The ordering key of a pipeline, below the bot.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// `None`: the subject.
    key: Option<TextExpression>,
    /// Names the key in Redis: lanes that were set aside for another key are worked off first.
    pub(super) tag: u32,
    /// Maximum number of lanes of one bot that run at once.
    pub(super) concurrency: usize,
    failed: OncePerMinute,
}

impl Lanes {
    /// The lanes of a pipeline; `None`: each bot has one order.
    ///
    /// # Errors
    /// If the expression cannot be used.
    pub(crate) fn new(order_by: &OrderBy, concurrency: usize) -> Result<Option<Self>, FilterError> {
        let (key, text) = match order_by {
            OrderBy::Bot => return Ok(None),
            OrderBy::Subject => (None, "subject"),
            OrderBy::Key(text) => (Some(TextExpression::compile(text)?), text.as_str()),
        };
        #[expect(clippy::cast_possible_truncation, reason = "a short hash")]
        let tag = xxh3_64(text.as_bytes()) as u32;
        Ok(Some(Self { key, tag, concurrency, failed: OncePerMinute::new() }))
    }

    /// The lane of an event. All events without an ordering key share one.
    pub(super) fn of(&self, event: &Event) -> Lane {
        let Some(key) = &self.key else { return Lane::of(event.subject().unwrap_or_default()) };
        match key.text(event) {
            Ok(text) => Lane::of(&text),
            Err(error) => {
                if let Some(suppressed) = self.failed.take() {
                    tracing::warn!(%error, suppressed, event = event.id(),
                        "order_by gives no text for an event; such events share one lane");
                }
                Lane::of("")
            }
        }
    }
}

/// What decides which list a lease is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Situation {
    /// The ordering key of the pipeline now; `None`: each bot has one order.
    pub(super) tag: Option<u32>,
    /// Whether the queue has events.
    pub(super) has_queue: bool,
    /// Whether a holder vanished.
    pub(super) vanished: bool,
    pub(super) fence: Fence,
    pub(super) now_ms: u64,
}

/// The list of a bot that a lease is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    Queue,
    Lane(Lane),
    /// None of them yet: for so long, ms.
    None(u64),
}

/// Decides which list a lease is for.
///
/// Lanes of another ordering key come before the queue, one after the other. Otherwise a lane that is
/// due and the queue take turns at random, for which the fence is good enough. After a holder vanished,
/// the same list is tried again, so that its attempts count for the right event. After a redrive, the queue
/// goes first.
pub(super) fn choose(aside: &Aside, at: Situation) -> List {
    let Some(first) = aside.first() else { return List::Queue };
    let other_key = at.tag != Some(aside.tag);
    let next_ms = aside.next_ms(at.now_ms);
    let due = (next_ms == 0).then_some(List::Lane(first.lane));
    match aside.tried {
        Some(Tried::Lane(lane)) if at.vanished && aside.get(lane).is_some() => {
            return List::Lane(lane);
        }
        Some(Tried::Queue) if at.has_queue && !other_key => return List::Queue,
        _ => {}
    }
    let queue = (at.has_queue && !other_key).then_some(List::Queue);
    match (due, queue) {
        (Some(_), Some(queue)) if !at.vanished && at.fence.get() % 2 == 1 => queue,
        (Some(lane), _) => lane,
        (None, Some(queue)) => queue,
        (None, None) => List::None(next_ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::BotId;
    use crate::redis::aside::Waiting;

    fn lanes(order_by: &str) -> Lanes {
        Lanes::new(&OrderBy::parse(order_by), 4).unwrap().unwrap()
    }

    fn event(subject: Option<&str>, data: &serde_json::Value) -> Event {
        let bot = BotId::parse("b").unwrap();
        let event = Event::builder("t", &bot).data(data).unwrap();
        match subject {
            Some(subject) => event.subject(subject).build().unwrap(),
            None => event.build().unwrap(),
        }
    }

    #[test]
    fn the_bot_alone_has_no_lanes() {
        assert!(Lanes::new(&OrderBy::parse("bot"), 1).unwrap().is_none());
    }

    #[test]
    fn an_event_has_the_lane_of_its_key_and_those_without_one_share_a_lane() {
        let none = serde_json::json!({});
        assert_eq!(lanes("subject").of(&event(Some("ann"), &none)), Lane::of("ann"));
        assert_eq!(lanes("subject").of(&event(None, &none)), Lane::of(""));
        let by_order = lanes("event.data.order");
        let data = serde_json::json!({ "order": "o-7" });
        assert_eq!(by_order.of(&event(Some("ann"), &data)), Lane::of("o-7"));
        for no_text in [none, serde_json::json!({ "order": 7 })] {
            assert_eq!(by_order.of(&event(Some("ann"), &no_text)), Lane::of(""));
        }
    }

    #[test]
    fn an_expression_that_cannot_be_used_is_refused_with_its_place() {
        for (text, message) in [
            ("event.data.", "line 1, column"),
            ("evnt.subject", "\"evnt\" at line 1, column 1"),
            ("1 + 1", "it must give a text"),
        ] {
            let error = Lanes::new(&OrderBy::parse(text), 1).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    const NOW: u64 = 1_000;

    fn aside(due_ms: u64) -> Aside {
        let mut aside = Aside::of(5);
        aside.set(Waiting { lane: Lane::of("ann"), due_ms, attempts: 1, alone: 0 });
        aside
    }

    fn situation(fence: u64) -> Situation {
        let fence = Fence::new(fence);
        Situation { tag: Some(5), has_queue: true, vanished: false, fence, now_ms: NOW }
    }

    #[test]
    fn a_lane_that_is_due_and_the_queue_take_turns() {
        let ann = List::Lane(Lane::of("ann"));
        assert_eq!(choose(&Aside::default(), situation(2)), List::Queue);
        assert_eq!(choose(&aside(NOW), situation(1)), List::Queue);
        assert_eq!(choose(&aside(NOW), situation(2)), ann);
        assert_eq!(choose(&aside(NOW + 9), situation(2)), List::Queue);
        let empty = Situation { has_queue: false, ..situation(1) };
        assert_eq!(choose(&aside(NOW), empty), ann);
        assert_eq!(choose(&aside(NOW + 9), empty), List::None(9));
    }

    #[test]
    fn lanes_of_another_key_come_before_the_queue() {
        for tag in [None, Some(6)] {
            let changed = Situation { tag, ..situation(1) };
            assert_eq!(choose(&aside(NOW), changed), List::Lane(Lane::of("ann")));
            assert_eq!(choose(&aside(NOW + 9), changed), List::None(9));
        }
    }

    #[test]
    fn after_a_holder_vanished_the_same_list_is_tried_again() {
        let vanished = |fence| Situation { vanished: true, ..situation(fence) };
        let ann = List::Lane(Lane::of("ann"));
        assert_eq!(choose(&aside(NOW), vanished(1)), ann);
        let tried = |due_ms, tried| aside(due_ms).trying(Some(tried));
        assert_eq!(choose(&tried(NOW, Tried::Queue), vanished(2)), List::Queue);
        assert_eq!(choose(&tried(NOW + 9, Tried::Lane(Lane::of("ann"))), vanished(1)), ann);
        let empty = Situation { has_queue: false, ..vanished(2) };
        assert_eq!(choose(&tried(NOW, Tried::Queue), empty), ann);
        let gone = tried(NOW, Tried::Lane(Lane::of("bob")));
        assert_eq!(choose(&gone, vanished(1)), ann, "that lane has no events any more");
        let other_key = Situation { tag: Some(6), ..vanished(1) };
        assert_eq!(choose(&tried(NOW, Tried::Queue), other_key), ann);
    }
}
