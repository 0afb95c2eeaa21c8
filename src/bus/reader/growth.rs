//! New partitions of a topic. Producers that key by bot send the later events of some bots to a new
//! partition, so it may be read only when the earlier events are copied:
//!
//! 1. A new partition is noted with the time at which it was found.
//! 2. Producers learn of it within the age of their metadata (`partition_wait`). After that time, none
//!    sends to the old places any more, and the ends of the old partitions are noted.
//! 3. When every shard has copied up to these ends, pipelines start at its first entry, and it is read.
//!
//! A partition also waits for those that were added before it and are not read yet.
//!
//! The notes are in a hash in Redis, so all processes agree, also after restarts. The partitions that
//! are there when a topic is seen for the first time are read at once. A topic that has lost partitions was
//! made anew with fewer of them: the notes of the others are removed, so that they are new if it grows again.
//! One listing without them does not show that: brokers may answer with what they knew some time ago.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::{info, warn};

use super::super::BusError;
use super::super::source::Log;
use super::end_of;
use crate::clock::{SharedClock, millis};
use crate::fanout::starts::LogEnd;
use crate::fanout::{Fanout, NewStart};
use crate::id::Offset;
use crate::metrics::BusMetrics;
use crate::redis::{Link, RedisError, keys};
use crate::telemetry::OncePerMinute;

/// Limits the log line about logs that are not noted.
static UNNOTED: OncePerMinute = OncePerMinute::new();

/// A partition is gone if it is missing for this time, in at least this number of listings in a row.
const GONE_AFTER: Duration = Duration::from_secs(30);
const GONE_LISTINGS: u32 = 4;

/// What is known of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// It is read.
    Open,
    /// It was found at this time, ms since 1970.
    New(u64),
    /// It is read once these logs are copied up to there.
    Behind(HashMap<String, String>),
}

/// Which logs of a bus may be read.
pub(super) struct Growth {
    pub(super) fanout: Arc<Fanout>,
    pub(super) clock: SharedClock,
    /// How long a new partition waits for the producers.
    pub(super) wait: Duration,
    /// The logs that wait, as far as this process shows it.
    pub(super) waiting: Mutex<HashSet<Arc<str>>>,
    pub(super) missing: Mutex<Missing>,
}

/// Partitions that are not listed any more: since when, and by how many listings.
#[derive(Debug, Default)]
pub(super) struct Missing(HashMap<String, (Instant, u32)>);

impl Missing {
    /// Notes what a listing lacks; returns what is gone.
    fn note(&mut self, lacking: Vec<String>, now: Instant) -> Vec<String> {
        self.0.retain(|log, _| lacking.contains(log));
        let is_gone = |log: &String| {
            let (since, listings) = self.0.entry(log.clone()).or_insert((now, 0));
            *listings += 1;
            *listings >= GONE_LISTINGS && now.duration_since(*since) >= GONE_AFTER
        };
        lacking.into_iter().filter(is_gone).collect()
    }
}

impl Growth {
    /// The logs that may be read now.
    pub(super) async fn readable(
        &self,
        link: &Link,
        bus: &str,
        logs: Vec<Log>,
    ) -> Result<Vec<Log>, BusError> {
        let key = keys::logs(link.prefix(), bus);
        let mut states = states(link, &key).await?;
        let gone = {
            let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
            missing.note(lacking(&logs, &states), Instant::now())
        };
        if !gone.is_empty() {
            info!(bus, ?gone, "a topic was made anew with fewer partitions");
            forget(link, &key, &gone).await?;
            states.retain(|log, _| !gone.contains(log));
        }
        self.place_added(&logs, &states).await?;
        let now = millis(self.clock.now());
        let mut noted = Vec::new();
        let mut readable = Vec::with_capacity(logs.len());
        for log in &logs {
            let state = match states.get(&*log.name) {
                Some(state) => state.clone(),
                None if is_first(log, &states) => {
                    noted.push((log, State::Open));
                    State::Open
                }
                None => {
                    noted.push((log, State::New(now)));
                    State::New(now)
                }
            };
            match state {
                State::Open => readable.push(log.clone()),
                State::New(found) if now.saturating_sub(found) >= millis(self.wait) => {
                    noted.extend(ends(log, &logs, &states).map(|ends| (log, State::Behind(ends))));
                }
                State::New(_) => {}
                State::Behind(ends) => {
                    if self.is_copied(&logs, &ends).await? {
                        let placed = self.fanout.positions(&[added(log)]).await?;
                        if placed.missing() == 0 {
                            noted.push((log, State::Open));
                            readable.push(log.clone());
                        }
                    }
                }
            }
        }
        match note(link, &key, &noted, &states).await {
            // The next listing tries it again. Those that were read before are read on.
            Err(error) if error.is_passing() => {
                if let Some(suppressed) = UNNOTED.take() {
                    warn!(bus, %error, suppressed,
                        "new logs cannot be noted now, so they are not read yet; trying again");
                }
                readable.retain(|log| noted.iter().all(|(new, _)| new.name != log.name));
            }
            done => {
                let others = done?;
                // Another process has noted these meanwhile: the next listing reads its notes.
                readable.retain(|log| !others.contains(&log.name));
                noted.retain(|(log, _)| !others.contains(&log.name));
                self.tell(&noted, &states);
            }
        }
        self.show(&logs, &readable);
        Ok(readable)
    }

    /// Logs what is noted of new partitions.
    fn tell(&self, noted: &[(&Log, State)], states: &HashMap<String, State>) {
        for (log, state) in noted {
            let log = &*log.name;
            match state {
                State::New(_) => {
                    info!(log, wait = ?self.wait,
                        "a new partition: it is read once all producers know it and what was before is copied");
                }
                State::Open if states.contains_key(log) => {
                    info!(log, "a new partition is read from now on");
                }
                State::Open | State::Behind(_) => {}
            }
        }
    }

    /// Shows that the entries of logs that wait are not read yet. All processes show the same.
    fn show(&self, logs: &[Log], readable: &[Log]) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|name| {
            let is_in = |logs: &[Log]| logs.iter().any(|log| log.name == *name);
            let waits = is_in(logs) && !is_in(readable);
            if !waits {
                BusMetrics::new(name).lag.set(0.0);
            }
            waits
        });
        let waits = |log: &&Log| readable.iter().all(|other| other.name != log.name);
        for log in logs.iter().filter(waits).filter(|log| log.unknown.is_none()) {
            BusMetrics::new(&log.name).lag.set(unread(log));
            waiting.insert(Arc::clone(&log.name));
        }
    }

    /// Lets the pipelines of this process start at the first entry of partitions that are not read yet:
    /// another process, which has other pipelines, may be the first to read them.
    async fn place_added(
        &self,
        logs: &[Log],
        states: &HashMap<String, State>,
    ) -> Result<(), BusError> {
        let is_waiting =
            |log: &&Log| matches!(states.get(&*log.name), Some(State::New(_) | State::Behind(_)));
        let waiting: Vec<LogEnd> = logs.iter().filter(is_waiting).map(added).collect();
        if !waiting.is_empty() {
            self.fanout.positions(&waiting).await?;
        }
        Ok(())
    }

    /// Whether every shard has copied these logs up to there. A log that is gone is passed over.
    async fn is_copied(
        &self,
        logs: &[Log],
        ends: &HashMap<String, String>,
    ) -> Result<bool, BusError> {
        let old = logs.iter().filter_map(|log| {
            let end: Offset = ends.get(&*log.name)?.parse().ok()?;
            Some((end_of(log), end))
        });
        let (old, ends): (Vec<LogEnd>, Vec<Offset>) = old.unzip();
        let positions = self.fanout.positions(&old).await?;
        if positions.missing() > 0 {
            return Ok(false);
        }
        let elsewhere = self.fanout.needed_elsewhere(positions.logs(), false).await?;
        let behind = ends.iter().zip(elsewhere).enumerate().any(|(place, (end, elsewhere))| {
            let here = positions.lowest(place);
            here.into_iter().chain(elsewhere).any(|lowest| lowest < *end)
        });
        Ok(!behind)
    }
}

/// The logs of a bus that gets new ones, as far as it was read before.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn known(link: &Link, bus: &str) -> Result<Vec<String>, RedisError> {
    Ok(states(link, &keys::logs(link.prefix(), bus)).await?.into_keys().collect())
}

/// The logs in which pipelines start as they say. In new partitions the reader places them.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn settled(
    link: &Link,
    bus: &str,
    logs: Vec<Log>,
) -> Result<Vec<Log>, RedisError> {
    if logs.len() < 2 {
        return Ok(logs);
    }
    let states = states(link, &keys::logs(link.prefix(), bus)).await?;
    let is_settled = |log: &Log| match states.get(&*log.name) {
        Some(state) => *state == State::Open,
        None => is_first(log, &states),
    };
    Ok(logs.into_iter().filter(is_settled).collect())
}

/// A log in which all pipelines start at the first entry that it ever had: what was deleted since is lost.
fn added(log: &Log) -> LogEnd {
    LogEnd { start: NewStart::At(log.before.1), ..end_of(log) }
}

/// Whether no partition of its topic is known.
fn is_first(log: &Log, states: &HashMap<String, State>) -> bool {
    !states.keys().any(|known| topic(known) == topic(&log.name))
}

/// The number of entries of a log.
#[expect(clippy::cast_precision_loss, reason = "a count of entries")]
fn unread(log: &Log) -> f64 {
    log.last.seq.saturating_sub(log.before.0.seq) as f64
}

/// Where the logs end that a new one waits for. `None`: not known now, and asked again. The end of a topic
/// that was made anew, as if it were the old one, would be before all positions.
fn ends(
    log: &Log,
    logs: &[Log],
    states: &HashMap<String, State>,
) -> Option<HashMap<String, String>> {
    let is_before = |old: &&Log| {
        let is_open = states.get(&*old.name) == Some(&State::Open);
        topic(&old.name) == topic(&log.name)
            && (is_open || partition(&old.name) < partition(&log.name))
    };
    let end = |old: &Log| {
        let is_known = old.unknown.is_none() && !old.is_doubtful;
        is_known.then(|| (old.name.to_string(), old.last.to_string()))
    };
    logs.iter().filter(is_before).map(end).collect()
}

/// The logs that are known and not listed, of topics that have others. A topic without any partition may
/// only not be visible now.
fn lacking(logs: &[Log], states: &HashMap<String, State>) -> Vec<String> {
    let is_there = |known: &str| logs.iter().any(|log| *log.name == *known);
    let is_listed = |known: &str| logs.iter().any(|log| topic(&log.name) == topic(known));
    let mut gone: Vec<String> =
        states.keys().filter(|known| is_listed(known) && !is_there(known)).cloned().collect();
    gone.sort_unstable();
    gone
}

fn topic(log: &str) -> &str {
    log.rsplit_once('/').map_or(log, |(topic, _)| topic)
}

/// The number of a partition: later ones have higher numbers.
fn partition(log: &str) -> Option<u32> {
    log.rsplit_once('/').and_then(|(_, number)| number.parse().ok())
}

async fn states(link: &Link, key: &str) -> Result<HashMap<String, State>, RedisError> {
    let mut command = redis::cmd("HGETALL");
    command.arg(key);
    let value = link.command("HGETALL", command).await?;
    let texts: HashMap<String, String> = link.read("HGETALL", value)?;
    // What cannot be read was written by a later version: the log waits.
    let read = |text: &str| serde_json::from_str(text).unwrap_or(State::New(u64::MAX));
    Ok(texts.into_iter().map(|(log, text)| (log, read(&text))).collect())
}

/// Returns the logs that another process has noted since `states` was read, as after a pause of this one.
/// Its notes stay.
async fn note(
    link: &Link,
    key: &str,
    noted: &[(&Log, State)],
    states: &HashMap<String, State>,
) -> Result<HashSet<Arc<str>>, RedisError> {
    if noted.is_empty() {
        return Ok(HashSet::new());
    }
    let mut pipe = Pipeline::with_capacity(noted.len());
    let is_new = |log: &Log| !states.contains_key(&*log.name);
    for (log, state) in noted {
        let command = if is_new(log) { "HSETNX" } else { "HSET" };
        // Texts and numbers always serialise.
        let text = serde_json::to_string(state).unwrap_or_default();
        pipe.cmd(command).arg(key).arg(&*log.name).arg(text);
    }
    let values = link.run_checked("HSET", &pipe).await?;
    let is_refused = |log: &Log, value: &Value| is_new(log) && *value == Value::Int(0);
    let refused = noted.iter().zip(&values).filter(|((log, _), value)| is_refused(log, value));
    Ok(refused.map(|((log, _), _)| log.name.clone()).collect())
}

async fn forget(link: &Link, key: &str, gone: &[String]) -> Result<(), RedisError> {
    let mut command = redis::cmd("HDEL");
    command.arg(key).arg(gone);
    match link.command("HDEL", command).await? {
        Value::ServerError(error) => Err(link.refused("HDEL", &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_notes_of_partitions_are_removed_when_their_topic_has_fewer() {
        let names = ["kafka:k/a/0", "kafka:k/a/1", "kafka:k/a/10", "kafka:k/b/0"];
        let states: HashMap<_, _> = names.map(|name| (name.to_owned(), State::Open)).into();
        let log = |name: &str| Log { name: name.into(), ..Log::default() };
        let of = |names: &[&str]| {
            lacking(&names.iter().map(|name| log(name)).collect::<Vec<_>>(), &states)
        };
        assert_eq!(of(&names), [""; 0]);
        assert_eq!(of(&["kafka:k/a/0", "kafka:k/b/0"]), ["kafka:k/a/1", "kafka:k/a/10"]);
        assert_eq!(
            of(&["kafka:k/a/0", "kafka:k/a/1", "kafka:k/a/10"]),
            [""; 0],
            "b is not visible"
        );
        assert_eq!(of(&[]), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_partition_is_gone_only_if_it_is_missing_for_a_while_in_several_listings() {
        let (mut missing, start) = (Missing::default(), Instant::now());
        let mut of = |seconds: f64, lacking: &[&str]| {
            let lacking = lacking.iter().map(|&log| log.to_owned()).collect();
            missing.note(lacking, start + Duration::from_secs_f64(seconds))
        };
        for seconds in [0.0, 5.0, 10.0, 15.0, 20.0] {
            assert_eq!(of(seconds, &["a", "b"]), [""; 0], "a broker may not know it yet");
        }
        assert_eq!(of(25.0, &["a"]), [""; 0]);
        assert_eq!(of(30.0, &["a", "b"]), ["a"]);
        // After another listing that has it, it is missing anew.
        for seconds in [55.0, 55.1, 59.9] {
            assert_eq!(of(seconds, &["b"]), [""; 0]);
        }
        assert_eq!(of(60.0, &["b"]), ["b"]);
        assert_eq!(of(61.0, &["c"]), [""; 0]);
        assert_eq!([of(95.0, &["c"]), of(96.0, &["c"])], [[""; 0]; 2], "too few listings");
    }

    #[test]
    fn a_new_partition_waits_until_the_ends_of_the_old_ones_are_certain() {
        let log = |number: u32| {
            let last = Offset { ms: 1, seq: u64::from(number) };
            Log { name: format!("kafka:k/a/{number}").into(), last, ..Log::default() }
        };
        let (mut logs, new) = (vec![log(0), log(1), log(2), log(3)], log(2));
        let states = [("kafka:k/a/0", State::Open), ("kafka:k/a/1", State::Open)];
        let states = states.map(|(name, state)| (name.to_owned(), state)).into();
        let expected = [("kafka:k/a/0", "1-0"), ("kafka:k/a/1", "1-1")];
        let expected = expected.map(|(name, end)| (name.to_owned(), end.to_owned()));
        assert_eq!(ends(&new, &logs, &states), Some(expected.into()));
        logs[3].is_doubtful = true;
        assert!(ends(&new, &logs, &states).is_some(), "it does not wait for that one");
        logs[1].is_doubtful = true;
        assert_eq!(ends(&new, &logs, &states), None, "it may have been made anew");
        logs[1] = Log { unknown: Some("no leader".into()), ..log(1) };
        assert_eq!(ends(&new, &logs, &states), None, "its end is not known");
    }
}
