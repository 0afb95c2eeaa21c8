//! One `enqueue` call for a shard: its events by bot, and what belongs to them.

use rustc_hash::FxHashMap;

use super::gather::Wanted;
use crate::id::{BotId, Offset};
use crate::ledger::Posting;
use crate::redis::scripts::EventName;

/// Maximum number of bytes in one enqueue call; a single larger event is sent alone.
const CALL_BYTES: usize = 256 * 1_024;

/// The events of a call for one shard, by bot.
#[derive(Debug, Default)]
pub(super) struct CallBatch<'a> {
    pub(super) bots: Vec<(BotId, Vec<&'a [u8]>)>,
    /// Per bot the ledger entry of each event, if the queues have a ledger.
    pub(super) postings: Vec<Vec<Option<&'a Posting>>>,
    /// Per bot the name of each event, if repetitions are dropped.
    pub(super) named: Vec<Vec<EventName>>,
    /// The names of repetitions that were left out.
    pub(super) left_out: Vec<EventName>,
    places: FxHashMap<BotId, usize>,
    pub(super) events: usize,
    pub(super) bytes: usize,
    /// The last offset of each log with events in the call.
    pub(super) lasts: Vec<(usize, Offset)>,
}

impl<'a> CallBatch<'a> {
    /// Adds an event; returns the place of its bot.
    pub(super) fn add(&mut self, wanted: &Wanted, event: &'a [u8]) -> usize {
        let bots = &mut self.bots;
        let place = *self.places.entry(wanted.bot.clone()).or_insert_with(|| {
            bots.push((wanted.bot.clone(), Vec::with_capacity(1)));
            bots.len() - 1
        });
        bots[place].1.push(event);
        self.events += 1;
        self.bytes += event.len();
        // Most events are of the log of the one before.
        match self.lasts.iter_mut().rev().find(|(log, _)| *log == wanted.log) {
            Some((_, last)) => *last = wanted.offset,
            None => self.lasts.push((wanted.log, wanted.offset)),
        }
        place
    }

    /// Adds the ledger entry of an event of the bot at `place`.
    pub(super) fn post(&mut self, place: usize, posting: Option<&'a Posting>) {
        self.postings.resize_with(self.bots.len(), Vec::new);
        self.postings[place].push(posting);
    }

    /// Notes the name of an event of the bot at `place`.
    pub(super) fn name(&mut self, place: usize, name: EventName) {
        self.named.resize_with(self.bots.len(), Vec::new);
        self.named[place].push(name);
    }

    /// Whether the event needs another call. `size`: the maximum number of events.
    pub(super) fn is_full_for(&self, event: &[u8], size: usize) -> bool {
        self.events >= size || (self.events > 0 && self.bytes + event.len() > CALL_BYTES)
    }

    /// A call with these events, which is sent again.
    pub(super) fn of(
        bots: Vec<(BotId, Vec<&'a [u8]>)>,
        postings: Vec<Vec<Option<&'a Posting>>>,
        named: Vec<Vec<EventName>>,
        left_out: Vec<EventName>,
        lasts: Vec<(usize, Offset)>,
    ) -> Self {
        let events = || bots.iter().flat_map(|(_, events)| events);
        let (count, bytes) = (events().count(), events().map(|event| event.len()).sum());
        Self { bots, postings, named, left_out, lasts, events: count, bytes, ..Self::default() }
    }

    /// The same call without the events at these places.
    pub(super) fn without(mut self, repeated: &[usize]) -> Self {
        let (mut at, mut repeated) = (0, repeated.iter().copied().peekable());
        let mut kept = Self {
            lasts: std::mem::take(&mut self.lasts),
            left_out: std::mem::take(&mut self.left_out),
            ..Self::default()
        };
        let mut postings = self.postings.into_iter();
        for ((bot, events), names) in self.bots.into_iter().zip(self.named) {
            let mut postings = postings.next().map(Vec::into_iter);
            for (event, name) in events.into_iter().zip(names) {
                let posting = postings.as_mut().and_then(Iterator::next);
                let is_repeated = repeated.next_if_eq(&at).is_some();
                at += 1;
                if is_repeated {
                    kept.left_out.push(name);
                    continue;
                }
                if kept.bots.last().is_none_or(|(last, _)| *last != bot) {
                    kept.bots.push((bot.clone(), Vec::with_capacity(1)));
                }
                let place = kept.bots.len() - 1;
                kept.bots[place].1.push(event);
                kept.events += 1;
                kept.bytes += event.len();
                kept.name(place, name);
                if let Some(posting) = posting {
                    kept.post(place, posting);
                }
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Account;

    fn wanted(log: usize, at: u64, bot: &str) -> Wanted {
        Wanted {
            log,
            offset: offset(at),
            bot: BotId::parse(bot).unwrap(),
            encoded: None,
            name: EventName::default(),
        }
    }

    fn offset(at: u64) -> Offset {
        Offset { ms: at, seq: 0 }
    }

    fn name(number: u8) -> EventName {
        let mut name = EventName::default();
        name[0] = number;
        name
    }

    /// The bots of a call, with their events.
    fn bots<'a>(call: &CallBatch<'a>) -> Vec<(String, Vec<&'a [u8]>)> {
        call.bots.iter().map(|(bot, events)| (bot.to_string(), events.clone())).collect()
    }

    #[test]
    fn a_call_has_the_events_of_each_bot_in_order_and_the_last_offset_of_each_log() {
        let mut call = CallBatch::default();
        let events = [(0, 1, "a"), (0, 2, "b"), (1, 9, "a"), (0, 3, "a")];
        let places = events.map(|(log, at, bot)| call.add(&wanted(log, at, bot), b"xy"));
        assert_eq!(places, [0, 1, 0, 0]);
        let all = [("a".to_owned(), vec![&b"xy"[..]; 3]), ("b".to_owned(), vec![&b"xy"[..]])];
        assert_eq!(bots(&call), all);
        assert_eq!((call.events, call.bytes), (4, 8));
        assert_eq!(call.lasts, [(0, offset(3)), (1, offset(9))]);
    }

    #[test]
    fn a_call_is_full_by_events_or_bytes_but_takes_any_first_event() {
        let (large, rest) = (vec![0; CALL_BYTES - 10], [0; 11]);
        let mut call = CallBatch::default();
        assert!(!call.is_full_for(&vec![0; 2 * CALL_BYTES], 2), "the first one");
        call.add(&wanted(0, 1, "a"), &large);
        assert!(!call.is_full_for(&rest[..10], 2), "just enough room");
        assert!(call.is_full_for(&rest, 2));
        call.add(&wanted(0, 2, "a"), b"");
        assert!(call.is_full_for(b"", 2), "two events");
        assert!(!call.is_full_for(b"", 3));
    }

    #[test]
    fn repetitions_leave_a_call_with_their_ledger_entries_and_their_names_stay() {
        let posting = |amount| Posting { account: Account::from("ad"), amount };
        let postings = [posting(1), posting(10), posting(100), posting(1_000)];
        let mut call = CallBatch::default();
        for (at, bot) in [(0, "a"), (1, "b"), (2, "a"), (3, "c")] {
            let place = call.add(&wanted(0, at as u64, bot), &b"wxyz"[..=at]);
            call.post(place, Some(&postings[at]));
            call.name(place, name(u8::try_from(at).unwrap()));
        }
        // The places count the events by bot: a has the first two.
        let call = call.without(&[0, 3]);
        let left = [("a".to_owned(), vec![&b"wxy"[..]]), ("b".to_owned(), vec![&b"wx"[..]])];
        assert_eq!(bots(&call), left);
        assert_eq!((call.events, call.bytes), (2, 5));
        assert_eq!(call.left_out, [name(0), name(3)]);
        assert_eq!(call.lasts, [(0, offset(3))], "the log is covered all the same");
        let amounts = |bot: usize| {
            call.postings[bot].iter().flatten().map(|posting| posting.amount).collect::<Vec<_>>()
        };
        assert_eq!([amounts(0), amounts(1)], [[100], [10]]);
        let named: Vec<u8> = call.named.iter().flatten().map(|name| name[0]).collect();
        assert_eq!(named, [2, 1]);
        let none = call.without(&[0, 1]);
        assert_eq!((none.events, none.bytes, none.bots.len()), (0, 0, 0));
        assert_eq!(none.left_out, [0, 3, 2, 1].map(name));
    }

    #[test]
    fn a_call_that_is_sent_again_counts_its_events_anew() {
        let bots = vec![(BotId::parse("b").unwrap(), vec![&b"yy"[..], b"zzz"])];
        let lasts = vec![(0, offset(1))];
        let again = CallBatch::of(bots, Vec::new(), Vec::new(), Vec::new(), lasts);
        assert_eq!((again.events, again.bytes, again.lasts.len()), (2, 5, 1));
    }
}
