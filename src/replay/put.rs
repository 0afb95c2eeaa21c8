//! Puts the events of a page into the queues of their bots.

use std::collections::BTreeMap;

use super::{Place, Replay};
use crate::clock::millis;
use crate::id::{BotId, Offset};
use crate::redis::scripts::{self, Refused};
use crate::redis::{RedisError, pages};

/// A serialised event, and its offset on the bus.
pub(super) type Encoded = (Offset, Vec<u8>);

/// What was put of a page.
#[derive(Debug, Default)]
pub(super) struct Put {
    /// Number of events that were put.
    pub(super) events: u64,
    /// Number of events that an earlier call had put already.
    pub(super) earlier: u64,
    /// Number of events that did not fit.
    pub(super) refused: u64,
    /// The bots whose queues are full, as a run stores them.
    pub(super) held: Vec<(BotId, (Place, String))>,
}

impl Replay {
    /// Puts events that were read behind `place`. A bot whose queue is full gets no later event.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. It can be repeated: nothing is put twice.
    pub(super) async fn put(
        &self,
        id: &str,
        place: Place,
        of_bots: &BTreeMap<BotId, Vec<Encoded>>,
    ) -> Result<Put, RedisError> {
        let mut done = Put::default();
        let mut left: Vec<(&BotId, &[Encoded])> =
            of_bots.iter().map(|(bot, events)| (bot, events.as_slice())).collect();
        // The parts of a bot go one after the other: behind a refused part, nothing may be put.
        while !left.is_empty() {
            let parts: Vec<_> =
                left.iter().map(|&(bot, events)| (bot, split(events, pages::BYTES))).collect();
            let calls: Vec<_> = parts
                .iter()
                .map(|&(bot, (events, _))| scripts::Replay {
                    keys: self.queue.keys_of(bot),
                    limits: self.queue.limits_of(bot),
                    id,
                    keep_ms: millis(super::run::KEEP_POSITIONS),
                    stream: place.stream,
                    bot,
                    events,
                })
                .collect();
            let answers = self.queue.link().call_all(&calls).await?;
            left.clear();
            for (answer, (bot, (part, rest))) in answers.into_iter().zip(parts) {
                // Without this answer, the place of the run stays: the next step puts the rest.
                let answer = answer?;
                done.events += answer.put;
                done.earlier += answer.earlier;
                let why = match answer.refused {
                    None if rest.is_empty() => continue,
                    None => {
                        left.push((bot, rest));
                        continue;
                    }
                    Some(Refused::MaxQueue) => "max_queue",
                    Some(Refused::QueuedBytes) => "quotas.queued_bytes",
                };
                done.held.push((bot.clone(), (place, why.to_owned())));
                done.refused += (part.len() + rest.len()) as u64 - answer.put - answer.earlier;
            }
        }
        Ok(done)
    }
}

/// Splits off the first events of up to `most` bytes; at least one event.
fn split(events: &[Encoded], most: usize) -> (&[Encoded], &[Encoded]) {
    let mut bytes = 0;
    let fits = events.iter().take_while(|(_, event)| {
        bytes += event.len();
        bytes <= most
    });
    let first = fits.count().max(1).min(events.len());
    events.split_at(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_few_bytes_and_at_least_one_event() {
        let event = |bytes: usize| (Offset::default(), vec![0; bytes]);
        let events = [event(3), event(2), event(9), event(1)];
        let first = |from: usize, most| split(&events[from..], most).0.len();
        assert_eq!((first(0, 5), first(0, 4), first(0, 99)), (2, 1, 4));
        assert_eq!((first(2, 5), first(3, 5), first(4, 5)), (1, 1, 0));
    }
}
