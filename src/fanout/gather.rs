//! What is gathered of several batches until it is copied.

use std::collections::HashSet;

use super::read::{Read, is_in};
use super::traced::Traced;
use super::unmatched::Found;
use super::{Fanout, Matches, Route, name};
use crate::event::entry::Entry;
use crate::id::{BotId, Offset};
use crate::ledger::Posting;
use crate::redis::scripts::EventName;
use crate::trace::Copied;

/// When this number of events, bytes or batches is gathered, they are copied first.
pub(super) const GATHERED_EVENTS: usize = 2_000;
pub(super) const GATHERED_BYTES: usize = 4 << 20;
pub(super) const GATHERED_BATCHES: usize = 8;

/// An event as stored in a queue with a ledger, and its ledger entry.
pub(super) type Stamped = (Vec<u8>, Option<Posting>);

/// The matching events of the batches since the last copy.
#[derive(Debug, Default)]
pub struct Gathered {
    pub(super) events: Vec<Wanted>,
    /// Per pipeline, the indexes of its events.
    pub(super) wanted: Vec<Vec<usize>>,
    /// Per pipeline with a ledger, these events as it stores them.
    pub(super) stamped: Vec<Vec<Stamped>>,
    /// Events of a type that no pipeline takes.
    pub(super) unmatched: Found,
    /// Per pipeline, what is counted once the batches are copied.
    pub(super) counts: Vec<Counts>,
    /// Events whose trace is recorded.
    pub(super) traced: Vec<Traced>,
    pub(super) bytes: usize,
    pub(super) batches: usize,
    /// What was read of each log.
    pub(super) covered: Vec<Covered>,
    /// The names of the wanted events, if repetitions are dropped.
    pub(super) names: HashSet<EventName>,
}

/// What is counted of a pipeline. A session that is interrupted counts nothing of what it did not copy:
/// the next one reads that again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) repeated: u64,
    pub(super) filter_errors: u64,
}

/// What was read of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Covered {
    /// Up to where.
    pub end: Offset,
    /// Number of entries.
    pub entries: u64,
    /// Number of those that were not read for other shards before.
    pub new: u64,
    /// Number of tombstones that were not read for other shards before.
    pub tombstones: u64,
    /// Whether anything was read.
    is_read: bool,
}

/// An event that at least one pipeline wants.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) log: usize,
    pub(super) offset: Offset,
    pub(super) bot: BotId,
    /// `None` if only pipelines with a ledger want it.
    pub(super) encoded: Option<Vec<u8>>,
    /// Zero if repetitions are not dropped.
    pub(super) name: EventName,
}

impl Gathered {
    /// Whether there was no batch since the last copy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batches == 0
    }

    /// The places of the logs of these batches, and what was read of each.
    pub fn covers(&self) -> impl Iterator<Item = (usize, Covered)> {
        self.covered.iter().copied().enumerate().filter(|(_, covered)| covered.is_read)
    }

    /// Up to where a log of these batches was read.
    pub(super) fn end(&self, log: usize) -> Offset {
        self.covered[log].end
    }

    /// Whether to copy now, although more entries are available.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.events.len() >= GATHERED_EVENTS
            || self.bytes >= GATHERED_BYTES
            || self.batches >= GATHERED_BATCHES
    }

    /// Notes what a batch covers.
    fn cover(&mut self, Read { log, end, known, tombstones }: Read<'_>, entries: &[Entry]) {
        if self.covered.len() <= log {
            self.covered.resize_with(log + 1, Covered::default);
        }
        let is_new = |offset: Offset| !is_in(known, offset);
        let covered = &mut self.covered[log];
        covered.entries += entries.len() as u64;
        covered.new += entries.iter().filter(|entry| is_new(entry.offset)).count() as u64;
        covered.tombstones += tombstones.iter().filter(|offset| is_new(**offset)).count() as u64;
        (covered.end, covered.is_read) = (end, true);
    }
}

impl Fanout {
    /// Adds the matches of entries that directly follow the gathered ones of their log.
    pub fn gather(
        &self,
        read: Read<'_>,
        entries: &[Entry],
        matches: &mut Matches,
        gathered: &mut Gathered,
    ) {
        gathered.wanted.resize_with(self.routes.len(), Vec::new);
        gathered.stamped.resize_with(self.routes.len(), Vec::new);
        gathered.counts.resize_with(self.routes.len(), Counts::default);
        for Entry { offset, event } in entries {
            let Ok(event) = event else { continue };
            let is_new = !is_in(read.known, *offset);
            let passes = |route: &Route, counts: &mut Counts| {
                route.passes(event).unwrap_or_else(|| {
                    counts.filter_errors += u64::from(is_new);
                    false
                })
            };
            let name = if self.window.is_zero() { EventName::default() } else { name(event) };
            let is_repeated = !self.window.is_zero() && gathered.names.contains(&name);
            let (index, mut is_wanted, mut encoded) = (gathered.events.len(), false, None);
            let mut is_taken = false;
            for &number in matches.of(&self.routes, event.kind()) {
                let (route, counts) = (&self.routes[number], &mut gathered.counts[number]);
                if !route.concerns(event) {
                    continue;
                }
                is_taken = true;
                if !passes(route, counts) {
                    continue;
                }
                if is_repeated {
                    counts.repeated += u64::from(is_new);
                    continue;
                }
                is_wanted = true;
                gathered.wanted[number].push(index);
                if let Some(ledger) = route.queue.ledger() {
                    let (event, posting) = ledger.enter(event);
                    let bytes = event.encode();
                    gathered.bytes += bytes.len();
                    gathered.stamped[number].push((bytes, posting));
                } else {
                    encoded.get_or_insert_with(|| event.encode());
                }
            }
            if !is_taken && is_new && !is_repeated {
                gathered.unmatched.add(event.kind());
            }
            if is_wanted {
                if !self.window.is_zero() {
                    gathered.names.insert(name);
                }
                if let Some(copied) = Copied::note(&self.tracer, event) {
                    gathered.traced.push(Traced { index, copied });
                }
                gathered.bytes += encoded.as_ref().map_or(0, Vec::len);
                let (log, offset, bot) = (read.log, *offset, event.bot().clone());
                gathered.events.push(Wanted { log, offset, bot, encoded, name });
            }
        }
        gathered.batches += 1;
        gathered.cover(read, entries);
    }
}
