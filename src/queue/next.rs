//! Pages of the next events of a bot, bounded in number and bytes.

use serde::{Deserialize, Serialize};

use super::Queue;
use super::inspect::QueuedEvent;
use super::letters::{PAGE_BYTES, PORTION_BYTES};
use crate::event::{Event, Glimpse};
use crate::id::{BotId, Sequence};
use crate::redis::RedisError;
use crate::redis::scripts::{Part, Peek};

/// The end of a page: the next page starts after it. If the queue moves meanwhile, an event may be
/// listed twice or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventCursor {
    place: u64,
    sequence: u64,
}

/// A page of the next events of a bot.
#[derive(Debug)]
pub struct EventPage {
    /// The next one to be handled first.
    pub events: Vec<QueuedEvent>,
    /// The start of the next page; `None`: this is the last one.
    pub next: Option<EventCursor>,
}

impl Queue {
    /// The next events of a bot: at most `limit` and about [`PAGE_BYTES`], but at least one.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn page_of_events(
        &self,
        bot: &BotId,
        after: Option<EventCursor>,
        limit: usize,
    ) -> Result<EventPage, RedisError> {
        let (mut events, mut bytes, mut next) = (Vec::new(), 0, after);
        while events.len() < limit && bytes < PAGE_BYTES {
            let EventCursor { place, sequence } =
                next.unwrap_or(EventCursor { place: 0, sequence: 0 });
            let peek = Peek {
                keys: self.keys_of(bot),
                bot,
                lane: None,
                place,
                before: sequence,
                limit: limit - events.len(),
                bytes: PORTION_BYTES.min(PAGE_BYTES - bytes),
                part: Part::Whole,
            };
            let peeked = self.link().call(&peek).await?;
            let mut last = 0;
            for record in peeked.records {
                bytes += record.len();
                last = sequence_of(&record);
                let event = Event::decode(&record, bot).ok().map(|(_, event)| event);
                events.push(QueuedEvent { sequence: last, event });
            }
            next = peeked.next.map(|place| EventCursor { place, sequence: last });
            if next.is_none() {
                break;
            }
        }
        Ok(EventPage { events, next })
    }

    /// The next events of a bot, at most `limit`, of any size: for tools that run on a machine of
    /// their own.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn next_events(
        &self,
        bot: &BotId,
        limit: usize,
    ) -> Result<Vec<QueuedEvent>, RedisError> {
        let (mut events, mut after) = (Vec::new(), None);
        while events.len() < limit {
            let page = self.page_of_events(bot, after, limit - events.len()).await?;
            events.extend(page.events);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        Ok(events)
    }

    /// The sequences of the next events of a bot, each with the start of its event: for web pages.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn glimpse_events(
        &self,
        bot: &BotId,
        limit: usize,
    ) -> Result<Vec<(u64, Option<Glimpse>)>, RedisError> {
        let peek = Peek {
            keys: self.keys_of(bot),
            bot,
            lane: None,
            place: 0,
            before: 0,
            limit,
            bytes: usize::MAX >> 12,
            part: Part::Start(Glimpse::BYTES),
        };
        let peeked = self.link().call(&peek).await?;
        let read = |record: &Vec<u8>| (sequence_of(record), Glimpse::read(record));
        Ok(peeked.records.iter().map(read).collect())
    }
}

pub(super) fn sequence_of(record: &[u8]) -> u64 {
    Event::sequence_of(record).map_or(0, Sequence::get)
}
