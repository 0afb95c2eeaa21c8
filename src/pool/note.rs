//! Notes how attempts end, for operators.

use std::time::Duration;

use super::settle::Settlement;
use crate::clock::{micros, millis};
use crate::event::Event;
use crate::handler::Delivery;
use crate::history::{Attempt, AttemptResult, Ids, Recorder, kept_id};
use crate::id::{BotId, Sequence};
use crate::redis::scripts::{Attempts, Mode};

/// The events of an attempt.
pub(super) struct Tried {
    count: usize,
    first: (String, u64),
    last: (String, u64),
    ids: Ids,
}

impl Tried {
    /// `None`: there are none.
    pub(super) fn of(events: &[Delivery]) -> Option<Self> {
        let named = |delivery: &Delivery| (kept_id(delivery.event.id()), delivery.sequence.get());
        let (first, last) = (named(events.first()?), named(events.last()?));
        let ids = Ids::of(events.iter().map(|delivery| delivery.event.id()));
        Some(Self { count: events.len(), first, last, ids })
    }

    /// From the records of a queue.
    pub(super) fn read(records: &[Vec<u8>], bot: &BotId) -> Option<Self> {
        let named = |record: &Vec<u8>| match Event::decode(record, bot) {
            Ok((sequence, event)) => (event.id().to_owned(), sequence.get()),
            Err(_) => (String::new(), Event::sequence_of(record).map_or(0, Sequence::get)),
        };
        let named: Vec<(String, u64)> = records.iter().map(named).collect();
        let ids = Ids::of(named.iter().map(|(id, _)| id.as_str()));
        let kept = |(id, sequence): &(String, u64)| (kept_id(id), *sequence);
        let (first, last) = (kept(named.first()?), kept(named.last()?));
        Some(Self { count: records.len(), first, last, ids })
    }
}

/// An attempt of a bot.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
    pub(super) bot: &'a BotId,
    /// The attempts before it.
    pub(super) attempts: Attempts,
    /// How long its handler ran; `None`: unknown.
    pub(super) took: Option<Duration>,
    /// The end of the attempt, since 1970.
    pub(super) now: Duration,
}

impl Of<'_> {
    fn note(self, tried: Tried, settled: usize) -> Attempt {
        let (Self { attempts, took, now, .. }, Tried { count, first, last, ids }) = (self, tried);
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Attempt {
            time_ms: millis(now.saturating_sub(took.unwrap_or_default())),
            duration_us: took.map(micros),
            result: AttemptResult::Done,
            attempt: attempts.counted().saturating_add(1),
            lost: attempts.lost,
            slices: 1,
            events: number(count),
            settled: number(settled),
            first_id: first.0,
            last_id: last.0,
            first_sequence: first.1,
            last_sequence: last.1,
            status: None,
            reason: None,
            answer: None,
            retry_ms: None,
            process: String::new(),
            ids,
        }
    }

    /// Notes an attempt that is committed.
    pub(super) fn settled(self, recorder: &Recorder, tried: Tried, end: &Settlement) {
        let mut note = self.note(tried, end.settled);
        note.retry_ms = match end.mode {
            Mode::Fail { ms, .. } | Mode::Park { ms } => Some(ms),
            _ => None,
        };
        let dead = end.tally.dead > 0;
        recorder.note(self.bot, end.ending.clone().finish(note, dead, end.failure.as_deref()));
    }

    /// Notes an attempt without a settlement.
    pub(super) fn ended(self, recorder: &Recorder, tried: Tried, result: AttemptResult) {
        let note = self.note(tried, 0);
        recorder.note(self.bot, Attempt { result, ..note });
    }
}
