//! Keeps what a process knows of the rules up to date.
//!
//! Whoever changes a rule tells all processes through Redis, before and after. What they miss they
//! find within a second: each asks MongoDB what changed of late. Once an hour all of it is read
//! again, for what neither finds: clocks that were set back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use mongodb::bson::DateTime;
use tokio::time::Instant;
use tracing::{info, warn};

use super::Automations;
use super::subscriptions::Wanted;
use crate::automations::store::{Changed, GONE_FOR};
use crate::lifecycle::Shutdown;
use crate::store::mongo::MongoError;

/// How often it is asked what changed.
const EVERY: Duration = Duration::from_millis(500);
/// Between two questions, whatever the news.
const GATHER: Duration = Duration::from_millis(30);
/// A change may be seen so much later than one that has a later time.
const OVERLAP: Duration = Duration::from_secs(5);
/// How often all rules are read.
const ALL_EVERY: Duration = Duration::from_secs(3_600);
/// Bots whose rules are asked for at once.
const BOTS: usize = 200;

/// What was read.
struct Known {
    /// The time of the newest change, by the server's clock.
    newest: Option<DateTime>,
    /// When it was first seen here.
    seen: Instant,
    /// The changes that were read last: documents and their versions.
    recent: HashMap<String, String>,
    /// When changes were last read.
    read: Instant,
    /// When all rules were.
    all: Instant,
}

/// Watches until the soft stop.
pub(crate) async fn run(automations: Automations, shutdown: Shutdown) {
    let mut known: Option<Known> = None;
    let (mut away, mut prepared) = (false, false);
    automations.subscriptions().watched();
    loop {
        let round = async {
            if !prepared {
                automations.store().prepare().await?;
                prepared = true;
            }
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
            Ok(()) if away => info!("the rules of automations can be read again"),
            Err(ref error) if !away => {
                warn!(%error, "the rules of automations cannot be read; the last known ones decide what is copied");
            }
            _ => {}
        }
        away = result.is_err();
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = async {
                // News during an outage must not make it a busy one.
                if away {
                    tokio::time::sleep(EVERY).await;
                } else {
                    // Many changes at once are read together.
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
    // Of a change that is old by now, nothing is on its way any more.
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
    // Once the newest was seen long enough ago, nothing comes before it any more.
    let back = if known.seen.elapsed() < OVERLAP { OVERLAP.as_millis() } else { 0 };
    let back = i64::try_from(back).unwrap_or(i64::MAX);
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
