//! Keeps the rules in a process up to date.
//!
//! A process that changes a rule publishes a message in Redis, before and after the change. Missed
//! changes are found within a second, because each process queries MongoDB for recent changes. Once
//! an hour all rules are read again, to find changes that both ways miss, for example after a clock
//! was set back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use mongodb::bson::DateTime;
use tokio::time::Instant;
use tracing::{info, warn};

use super::Automations;
use super::subscriptions::Wanted;
use crate::automations::store::{Changed, GONE_FOR};
use crate::lifecycle::Shutdown;
use crate::mongo::client::MongoError;

/// Interval of queries for recent changes.
const EVERY: Duration = Duration::from_millis(500);
/// Minimum pause between two queries, regardless of messages.
const GATHER: Duration = Duration::from_millis(30);
/// Maximum delay with which a change becomes visible after another one with a later time.
const OVERLAP: Duration = Duration::from_secs(5);
/// Interval of reading all rules.
const ALL_EVERY: Duration = Duration::from_secs(3_600);
/// Maximum number of bots whose rules are read by one query.
const BOTS: usize = 200;

/// The state of the reader.
struct Known {
    /// The time of the newest change, by the server's clock.
    newest: Option<DateTime>,
    /// When this process first saw it.
    seen: Instant,
    /// The changes of the last query: documents and their versions.
    recent: HashMap<String, String>,
    /// When changes were last read.
    read: Instant,
    /// When all rules were last read.
    all: Instant,
}

impl Known {
    /// How far before the newest change the next query begins. Once one began long enough after that change
    /// was seen, no earlier one can appear. Time without a query, such as a pause of the process, does not
    /// count.
    fn back(&self) -> Duration {
        let queried = self.read.saturating_duration_since(self.seen);
        if queried < OVERLAP { OVERLAP } else { Duration::ZERO }
    }
}

/// Watches until the soft stop.
pub(crate) async fn run(automations: Automations, shutdown: Shutdown) {
    let mut known: Option<Known> = None;
    let mut away = false;
    automations.subscriptions().watched();
    loop {
        let round = async {
            let is_stale = |known: &Known| {
                known.all.elapsed() > ALL_EVERY || known.read.elapsed() > GONE_FOR / 2
            };
            match known.take() {
                Some(mut now) if !is_stale(&now) => {
                    let result = changes(&automations, &mut now).await;
                    known = Some(now);
                    result
                }
                before => match all(&automations).await {
                    Ok(now) => {
                        known = Some(now);
                        Ok(())
                    }
                    Err(error) => {
                        known = before;
                        Err(error)
                    }
                },
            }
        };
        let result = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            result = round => result,
        };
        match result {
            Ok(()) if away => info!("reading the rules of automations works again"),
            Err(ref error) if !away => {
                warn!(%error, "cannot read the rules of automations; using the last known ones");
            }
            _ => {}
        }
        away = result.is_err();
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = async {
                // Messages during an outage must not cause a busy loop.
                if away {
                    tokio::time::sleep(EVERY).await;
                } else {
                    // Concurrent changes are read together.
                    tokio::time::sleep(GATHER).await;
                    let news = automations.subscriptions().news();
                    let _ = tokio::time::timeout(EVERY.saturating_sub(GATHER), news).await;
                }
            } => {}
        }
    }
}

/// Reads all rules.
async fn all(automations: &Automations) -> Result<Known, MongoError> {
    let begun = Instant::now();
    let (store, subscriptions) = (automations.store(), automations.subscriptions());
    let doubts = subscriptions.doubts();
    let newest = store.newest_change().await?;
    // A change that is this old has no earlier one still on its way.
    let is_old = newest.zip(store.time().await?).is_some_and(|(newest, now)| {
        let newest = u64::try_from(newest.timestamp_millis()).unwrap_or(0);
        now > Duration::from_millis(newest) + OVERLAP
    });
    let seen = if is_old { begun.checked_sub(OVERLAP).unwrap_or(begun) } else { begun };
    let (mut wanted, mut last) = (Wanted::default(), None);
    loop {
        let (page, next) = store.page(last.as_deref()).await?;
        wanted.add(page);
        last = next;
        if last.is_none() {
            break;
        }
    }
    automations.forget_all();
    subscriptions.replace(wanted, &doubts);
    Ok(Known { newest, seen, recent: HashMap::new(), read: begun, all: begun })
}

/// Reads what changed.
async fn changes(automations: &Automations, known: &mut Known) -> Result<(), MongoError> {
    let begun = Instant::now();
    let (store, subscriptions) = (automations.store(), automations.subscriptions());
    let doubts = subscriptions.doubts();
    let back = i64::try_from(known.back().as_millis()).unwrap_or(i64::MAX);
    let newest = known.newest.map_or(0, DateTime::timestamp_millis);
    let changed = store.changes(DateTime::from_millis((newest - back).max(0))).await?;
    let mut bots: HashSet<_> = doubts.bots.iter().cloned().collect();
    for Changed { id, bot, version, .. } in &changed {
        if known.recent.get(id) != Some(version) {
            bots.insert(bot.clone());
        }
    }
    let bots: Vec<_> = bots.into_iter().collect();
    let mut wanted = Wanted::default();
    for some in bots.chunks(BOTS) {
        wanted.add(store.of_bots(some).await?);
    }
    for bot in &bots {
        automations.forget(bot);
    }
    subscriptions.update(&bots, wanted, &doubts);
    let last = changed.last().map(|change| change.at);
    if last > known.newest {
        (known.newest, known.seen) = (last, begun);
    }
    known.recent = changed.into_iter().map(|Changed { id, version, .. }| (id, version)).collect();
    known.read = begun;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_query_overlaps_with_earlier_changes_also_after_a_pause_of_the_process() {
        let seen = Instant::now();
        let recent = HashMap::new();
        let mut known = Known { newest: None, seen, recent, read: seen, all: seen };
        let mut back = |read: Duration| {
            known.read = seen + read;
            known.back()
        };
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(back(Duration::ZERO), OVERLAP, "nothing was read since");
        assert_eq!(back(OVERLAP.saturating_sub(Duration::from_millis(1))), OVERLAP);
        assert_eq!(back(OVERLAP), Duration::ZERO);
    }
}
