//! Writes queued views to MongoDB, merged per ad, and per ad and day.
//!
//! 1. Takes the views that are old enough, by the clock of Redis or of this process (`waiting`).
//!    Redis can still lose younger ones in a crash. If only one of the two collections had such
//!    views, the collections would disagree permanently.
//! 2. Merges them per ad, in the order of the queue.
//! 3. Writes both collections, in portions that the store accepts in time. Each document contains
//!    the sequence of the last record applied to it, and accepts only later records. So each view
//!    counts once, regardless of repeated writes by any process.
//! 4. Settles the views of the written portions, only after both writes.
//!
//! A write that timed out may continue in the server. The next write of its bot waits for it: see
//! `mongo::turns`.
//!
//! While MongoDB is unavailable, no attempt is counted, so no queued view becomes a dead letter here.
//! Only an event that is not a view becomes one. Views from the bus above the quota of their bot
//! (`quotas.queued_bytes`) are never queued: their copy makes them dead letters, and deletes those
//! above `quotas.dead_letters`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::store::{Added, Change, CounterStore, Effect};
use super::view::{self, AdId, Deed};
use super::waiting::Waiting;
use crate::clock::micros;
use crate::counters::metrics::CounterMetrics;
use crate::handler::portion::Portion;
use crate::handler::{
    Delivery, Environment, Failure, Handler, Outcomes, Slice, TURN_PATIENCE, store_patience,
};
use crate::id::BotId;
use crate::ledger::LedgerEntry;
use crate::mongo::turns::Turn;

/// Minimum pause before the remaining views of a bot are handled. It is short enough that no view
/// waits 3 s, and long enough that many views share a write.
const AGAIN: Duration = Duration::from_millis(500);

/// Maximum number of replacements per portion. Each one clears all months of its ad.
const REPLACEMENTS_MAX: usize = 50;
/// Maximum number of months that the replacements of a portion set, unless a single one sets more.
/// Each month is a statement, and they run in order.
const MONTHS_MAX: usize = 500;
/// Number of records that add as much to the size of a write as one more ad. The records of an ad
/// are summed up, unless its documents already contain some of them.
const RECORDS_PER_AD: usize = 16;

/// The minimum age of a view before it is written. Set by the task that determines how Redis
/// persists.
#[derive(Debug, Clone)]
pub(crate) struct MinAge(Arc<AtomicU64>);

impl MinAge {
    /// An append-only file that is synced every second can lose this much.
    pub(crate) const EVERYSEC: Duration = Duration::from_secs(2);

    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicU64::new(micros(Self::EVERYSEC))))
    }

    pub(crate) fn set(&self, age: Duration) {
        self.0.store(micros(age), Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

/// The handler `counter`.
pub(crate) struct CounterHandler {
    store: CounterStore,
    min_age: MinAge,
    metrics: CounterMetrics,
    /// The write timeout, below `handler_timeout`.
    patience: Duration,
    /// The maximum size of a write, in ads.
    portion: Portion,
    /// The same for writes with replacements. They are slower, and any bot can make them slow. So
    /// they do not shrink the writes of other bots.
    replacing: Portion,
    waiting: Waiting,
}

impl CounterHandler {
    pub(crate) fn new(store: CounterStore, min_age: MinAge, handler_timeout: Duration) -> Self {
        Self {
            store,
            min_age,
            metrics: CounterMetrics::new(),
            patience: store_patience(handler_timeout),
            portion: Portion::new(),
            replacing: Portion::new(),
            waiting: Waiting::default(),
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes { adding: self.portion.now(), replacing: self.replacing.now() }
    }

    async fn flush(&self, slice: &Slice) -> Result<Outcomes, Failure> {
        let age = self.min_age.get();
        if age.is_zero() {
            return self.write(slice, slice.events.len()).await;
        }
        // Both are times on the server's clock, in µs: a sequence is the time of arrival. After the
        // clock was set back, sequences are ahead of it, and no view is old enough by it.
        let ripe_us = slice.granted_us.saturating_sub(micros(age));
        let ripe = slice.events.partition_point(|event| event.sequence.get() <= ripe_us);
        let (ripe, wait) = self.waiting.ripe(slice, ripe, age);
        let Some(young) = slice.events.get(ripe) else {
            return self.write(slice, ripe).await;
        };
        let wait = wait.min(Duration::from_micros(young.sequence.get().saturating_sub(ripe_us)));
        if ripe == 0 {
            return Ok(Outcomes::first(0).rest_after(wait));
        }
        let outcomes = self.write(slice, ripe).await?;
        let all = outcomes.settled == Some(ripe);
        Ok(if all { outcomes.rest_after(wait.max(AGAIN)) } else { outcomes })
    }

    /// Writes as many of the first `count` events as the store accepts within the time of a slice,
    /// and at least one portion.
    async fn write(&self, slice: &Slice, count: usize) -> Result<Outcomes, Failure> {
        let until = Instant::now() + self.patience;
        let turn = self.store.turn(&slice.bot);
        let Ok(turn) = tokio::time::timeout(TURN_PATIENCE.min(self.patience), turn).await else {
            let reason = "an earlier write of this bot is still in progress in MongoDB";
            return Err(Failure::unavailable(0, reason));
        };
        let mut settled = 0;
        let (mut dead, mut entries) = (Vec::new(), Vec::new());
        let mut failed = false;
        while settled < count && (settled == 0 || Instant::now() < slice.deadline) {
            let mut portion = merge(&slice.events[settled..count], self.sizes());
            let (refused, taken) = (std::mem::take(&mut portion.refused), portion.count);
            let noted = std::mem::take(&mut portion.entries);
            match self.take(&turn, &slice.bot, portion, until).await {
                Ok(()) => {}
                Err(reason) if settled == 0 => return Err(Failure::unavailable(0, reason)),
                Err(_) => {
                    failed = true;
                    break;
                }
            }
            dead.extend(refused.into_iter().map(|(at, why)| (settled + at, why)));
            entries.extend(noted.into_iter().map(|entry| {
                let index = settled + entry.index;
                LedgerEntry { index, ..entry }
            }));
            settled += taken;
        }
        let outcomes = Outcomes::first(settled).noting(entries);
        let outcomes = if failed { outcomes.rest_after(AGAIN) } else { outcomes };
        Ok(dead.into_iter().fold(outcomes, |outcomes, (at, why)| outcomes.dead(at, why)))
    }

    /// Writes a portion; the error says why the store did not accept it.
    async fn take(
        &self,
        turn: &Turn,
        bot: &BotId,
        portion: Merged,
        until: Instant,
    ) -> Result<(), String> {
        if portion.changes.is_empty() {
            return Ok(());
        }
        let (started, weight) = (Instant::now(), portion.weight());
        let size = if portion.replacements > 0 { &self.replacing } else { &self.portion };
        let applying = self.store.apply_in(turn, bot, portion.changes);
        match tokio::time::timeout_at(until, applying).await {
            Ok(Ok(())) => {
                let took = started.elapsed();
                size.taken(weight, took, self.patience);
                self.metrics.flush_seconds.record(took.as_secs_f64());
                Ok(())
            }
            Ok(Err(error)) => {
                if error.is_timeout() {
                    size.too_much(weight);
                }
                Err(error.to_string())
            }
            Err(_) => {
                size.too_much(weight);
                let patience = humantime::format_duration(self.patience);
                Err(format!("MongoDB did not take the views within {patience}"))
            }
        }
    }
}

impl Handler for CounterHandler {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        self.flush(slice).await
    }
}

/// Maximum sizes of a portion, in ads.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    /// If it only adds views.
    adding: usize,
    /// If it has a replacement.
    replacing: usize,
}

/// The changes of a portion.
#[derive(Debug, Default, PartialEq, Eq)]
struct Merged {
    /// The changes, in the order of the queue for each ad.
    changes: Vec<Change>,
    /// Events that are not views, and the reasons.
    refused: Vec<(usize, String)>,
    /// The ledger entries of the other events.
    entries: Vec<LedgerEntry>,
    /// Number of events in the portion.
    count: usize,
    /// Number of replacements.
    replacements: usize,
    /// Number of months that the replacements set.
    months: usize,
}

impl Merged {
    /// The size of the write, in ads.
    fn weight(&self) -> usize {
        self.changes.len() + self.months + self.count / RECORDS_PER_AD
    }
}

/// Merges the first events: at most up to one of the sizes `most`, [`REPLACEMENTS_MAX`] replacements and
/// [`MONTHS_MAX`] of their months, and at least one event.
fn merge(events: &[Delivery], most: Sizes) -> Merged {
    let mut merged = Merged::default();
    // The index of the last change of each ad.
    let mut places: HashMap<AdId, usize> = HashMap::new();
    for (at, Delivery { sequence, event }) in events.iter().enumerate() {
        let record = view::read(event);
        let deed = record.as_ref().ok().map(|record| &record.deed);
        let months = deed.map_or(0, Deed::months);
        let replaces = usize::from(matches!(deed, Some(Deed::Replace(_))));
        let replacements = merged.replacements + replaces;
        let most = if replacements > 0 { most.replacing } else { most.adding };
        let is_full = merged.weight() >= most
            || replacements > REPLACEMENTS_MAX
            || merged.months + months > MONTHS_MAX;
        if at > 0 && is_full {
            break;
        }
        (merged.count, merged.replacements) = (at + 1, replacements);
        merged.months += months;
        let record = match record {
            Ok(record) => record,
            Err(error) => {
                merged.refused.push((at, error.to_string()));
                continue;
            }
        };
        let (account, change) = (record.ad.account(), record.deed.change());
        merged.entries.push(LedgerEntry { index: at, account, change });
        let changes = &mut merged.changes;
        match record.deed {
            Deed::Add { n, day } => {
                let added = Added { sequence: *sequence, day, n };
                let last = places.get(&record.ad).and_then(|&place| changes.get_mut(place));
                if let Some(Change { effect: Effect::Add(views), .. }) = last {
                    views.push(added);
                    continue;
                }
                places.insert(record.ad.clone(), changes.len());
                changes.push(Change { ad: record.ad, effect: Effect::Add(vec![added]) });
            }
            Deed::Replace(with) => {
                places.insert(record.ad.clone(), changes.len());
                changes.push(Change { ad: record.ad, effect: Effect::Replace(*sequence, with) });
            }
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use jiff::ToSpan as _;
    use jiff::civil::{Date, date};

    use super::*;
    use crate::counters::view::Replacement;
    use crate::event::Event;
    use crate::id::Sequence;

    const DAY: Date = date(2026, 11, 20);

    fn bot() -> BotId {
        BotId::parse("b").unwrap()
    }

    fn ad(id: &str) -> AdId {
        AdId::parse(id).unwrap()
    }

    fn viewed(sequence: u64, id: &str, n: u64, day: Date) -> Delivery {
        let event = view::on_day(view::view(&bot(), &ad(id), n), Some(day));
        Delivery { sequence: Sequence::new(sequence), event }
    }

    fn merge(events: &[Delivery], most: usize) -> Merged {
        super::merge(events, Sizes { adding: most, replacing: most })
    }

    fn added(sequence: u64, n: u64, day: Date) -> Added {
        Added { sequence: Sequence::new(sequence), day, n }
    }

    #[test]
    fn views_of_an_ad_are_merged_and_those_behind_a_replacement_apart() {
        let with = Replacement { total: 7, ..Replacement::default() };
        let event = view::replacement(&bot(), &ad("x"), &with);
        let replaced = Delivery { sequence: Sequence::new(3), event };
        let later = date(2026, 12, 1);
        let events = [
            viewed(1, "x", 2, DAY),
            viewed(2, "y", 1, DAY),
            replaced,
            viewed(4, "x", 1, DAY),
            viewed(5, "y", 5, later),
        ];
        let change = |id, effect| Change { ad: ad(id), effect };
        assert_eq!(
            merge(&events, usize::MAX).changes,
            [
                change("x", Effect::Add(vec![added(1, 2, DAY)])),
                change("y", Effect::Add(vec![added(2, 1, DAY), added(5, 5, later)])),
                change("x", Effect::Replace(Sequence::new(3), with)),
                change("x", Effect::Add(vec![added(4, 1, DAY)])),
            ]
        );
    }

    #[test]
    fn a_portion_has_so_many_replacements() {
        let event = view::replacement(&bot(), &ad("x"), &Replacement::default());
        let replaced = Delivery { sequence: Sequence::new(1), event };
        let merged = merge(&vec![replaced; REPLACEMENTS_MAX + 1], usize::MAX);
        assert_eq!((merged.count, merged.changes.len()), (REPLACEMENTS_MAX, REPLACEMENTS_MAX));
        assert_eq!(merge(&[viewed(1, "x", 1, DAY)], usize::MAX).count, 1);
    }

    #[test]
    fn a_replacement_weighs_as_much_as_its_months() {
        let replaced = |sequence: u64, id: &str, months: i32| {
            let day = |month: i32| view::FIRST_DAY.saturating_add(month.months());
            let days = (0..months)
                .flat_map(|month| [(day(month), 1), (day(month).tomorrow().unwrap(), 1)]);
            let with = Replacement { total: 1_000, days: days.collect(), forget: false };
            let event = view::replacement(&bot(), &ad(id), &with);
            Delivery { sequence: Sequence::new(sequence), event }
        };
        let merged = merge(&[replaced(1, "x", 300)], usize::MAX);
        assert_eq!((merged.count, merged.weight()), (1, 301));
        let two = [replaced(1, "x", 300), replaced(2, "y", 200), replaced(3, "z", 1)];
        let merged = merge(&two, usize::MAX);
        assert_eq!((merged.count, merged.weight()), (2, 502), "the third has a month too many");
        let first = merge(&two, 301);
        assert_eq!(first.count, 1, "the size of a slow store is reached");
        assert_eq!(merge(&[replaced(1, "x", 700)], 1).count, 1, "a portion has one at least");
        // Views are in larger portions than replacements are.
        let mut views: Vec<_> = (0..10).map(|n| viewed(n, &format!("ad-{n}"), 1, DAY)).collect();
        views.push(replaced(11, "x", 1));
        let sizes = Sizes { adding: usize::MAX, replacing: 5 };
        let merged = super::merge(&views, sizes);
        assert_eq!((merged.count, merged.replacements), (10, 0));
    }

    #[test]
    fn a_portion_is_bounded_in_ads_and_records_and_has_one_event_at_least() {
        let ads: Vec<_> = (0..10).map(|n| viewed(n, &format!("ad-{n}"), 1, DAY)).collect();
        let counts = [1, 2, 9, 10, 11].map(|most| merge(&ads, most).count);
        assert_eq!(counts, [1, 2, 9, 10, 10]);
        let views: Vec<_> = (0..100).map(|n| viewed(n, "x", 1, DAY)).collect();
        let counts = [1, 2, 3, 7, 8].map(|most| merge(&views, most).count);
        assert_eq!(counts, [1, RECORDS_PER_AD, 2 * RECORDS_PER_AD, 96, 100]);
    }

    #[test]
    fn an_event_that_was_not_counted_is_refused_with_the_reason() {
        let unstamped = |data: serde_json::Value| {
            let event = Event::builder("ad.viewed", &bot()).data(&data).unwrap().build().unwrap();
            Delivery { sequence: Sequence::new(1), event }
        };
        let events = [
            unstamped(serde_json::json!({"ad": ""})),
            unstamped(serde_json::json!({"ad": "x", "n": 0})),
            unstamped(serde_json::json!({"ad": "x"})),
            viewed(2, "x", 1, DAY),
        ];
        let merged = merge(&events, usize::MAX);
        let reasons = ["empty", "n is 0", "not counted when it arrived"];
        assert_eq!(merged.refused.len(), reasons.len());
        for ((at, reason), (expected, part)) in
            merged.refused.iter().zip(reasons.iter().enumerate())
        {
            assert!(*at == expected && reason.contains(part), "{reason}");
        }
        assert_eq!(merged.changes.len(), 1);
    }
}
