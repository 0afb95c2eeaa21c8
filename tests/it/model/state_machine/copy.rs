//! The copy of the bus into queues, and the leases that a copier takes.

use std::collections::BTreeMap;

use super::{Bot, Event, Granted, Queued, Repeats, Server, Stream};

/// The leases that a copier wants.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Take {
    pub(crate) max: usize,
    pub(crate) ttl_ms: i64,
    /// The highest virtual clock that the copier saw on any shard.
    pub(crate) seen: i64,
}

/// A lease that a copier took, and what it knows of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) granted: Granted,
    /// The sequence before that of the first event.
    pub(crate) before: u64,
    pub(crate) events: usize,
}

/// The part of a stream that a call covers: the offset before it, and its last one.
pub(crate) type Span = (Stream, (u64, u64));

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Enqueued {
    Stored(Queued, Vec<Taken>),
    /// Already copied.
    Dup,
    /// Earlier events are missing: continue from these offsets of the streams of the call.
    Gap(Vec<u64>),
    /// The events at these places were copied before, so nothing was copied.
    Repeated(Vec<usize>),
}

impl Server {
    pub(crate) fn enqueue(
        &mut self,
        now_us: i64,
        spans: &[Span],
        events: &[(Bot, Event)],
        repeats: Option<Repeats<'_>>,
        take: Take,
    ) -> Enqueued {
        let stands = self.stands(spans);
        let stood = || spans.iter().zip(&stands);
        if stood().all(|((_, (_, last)), stand)| stand >= last) {
            return Enqueued::Dup;
        }
        if stood().any(|((_, (prev, last)), stand)| stand != prev || stand >= last) {
            return Enqueued::Gap(stands);
        }
        if let Some(repeats) = repeats {
            // The copies to which they refer were lost, or are too old.
            if repeats.left_out.iter().any(|name| !self.names.knows(*name)) {
                return Enqueued::Gap(stands);
            }
            let seen = self.names.repeated(now_us, repeats);
            if !seen.is_empty() {
                return Enqueued::Repeated(seen);
            }
        }
        let lengths: BTreeMap<Bot, usize> =
            events.iter().map(|&(bot, _)| (bot, self.length(bot))).collect();
        let (queued, fresh) = self.append(now_us, events);
        if let Some(repeats) = repeats.filter(|_| queued.dropped > 0) {
            self.forget_dropped(events, repeats, lengths);
        }
        self.unpark(&fresh);
        let (taken, fresh) = self.lease_fresh(now_us, fresh, take);
        self.rise(now_us, &fresh);
        self.offsets.extend(spans.iter().map(|(stream, (_, last))| (*stream, *last)));
        Enqueued::Stored(queued, taken)
    }

    /// Events that were dropped may be copied later. `left`: the former lengths of the queues.
    fn forget_dropped(
        &mut self,
        events: &[(Bot, Event)],
        repeats: Repeats<'_>,
        mut left: BTreeMap<Bot, usize>,
    ) {
        for (bot, length) in &mut left {
            *length = self.length(*bot) - *length;
        }
        for ((bot, _), name) in events.iter().zip(repeats.names) {
            match left.get_mut(bot) {
                Some(left) if *left > 0 => *left -= 1,
                _ => self.names.forget(*name),
            }
        }
    }

    /// The last copied offset of each stream of a call.
    pub(crate) fn stands(&self, spans: &[Span]) -> Vec<u64> {
        spans.iter().map(|(stream, _)| self.offsets.get(stream).copied().unwrap_or(0)).collect()
    }

    /// Leases quiet bots whose queues were empty to the copier, unless quiet bots wait already.
    /// Returns the bots that are left.
    fn lease_fresh(&mut self, now_us: i64, fresh: Vec<Bot>, take: Take) -> (Vec<Taken>, Vec<Bot>) {
        let waits = self.ctl.values().any(|&score| score < 0);
        if waits || self.shard_paused || self.limits.linger_ms > 0 {
            return (Vec::new(), fresh);
        }
        let (v, rests) = (self.v.max(take.seen), self.at_rest(&fresh));
        let is_quiet = |bot: &Bot| {
            self.fin.get(bot).is_none_or(|&finish| finish <= v + self.slice_us)
                && !self.ctl.contains_key(bot)
        };
        let quiet: Vec<Bot> = rests.into_iter().filter(is_quiet).take(take.max).collect();
        let mut taken = Vec::new();
        for &bot in &quiet {
            let start = v.max(self.fin.get(&bot).copied().unwrap_or(0));
            let granted = self.grant(now_us, take.ttl_ms, bot, start);
            let queue = &self.queues[&bot];
            taken.push(Taken { granted, before: queue[0].0 - 1, events: queue.len() });
        }
        if !taken.is_empty() {
            self.v = v;
            self.forget_finished();
            let until_ms = now_us / 1_000 + take.ttl_ms;
            if self.told < until_ms - take.ttl_ms || self.told > until_ms {
                self.told = until_ms;
            }
        }
        let left = fresh.into_iter().filter(|bot| !quiet.contains(bot)).collect();
        (taken, left)
    }
}
