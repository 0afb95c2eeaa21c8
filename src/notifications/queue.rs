//! Calls the scripts of delayed notifications, and reads their records.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use redis::{Pipeline, Value};
use tracing::debug;

use super::keys;
use super::kinds::Kinds;
use crate::clock::millis;
use crate::event::Event;
use crate::id::{BotId, Sequence, Shard};
use crate::notifications::record::{Ended, Kept, NewNotification, NotificationId, OTHER_KINDS};
use crate::notifications::scripts::{
    Amend, Amended, Amendment, Begin, Finish, Finished, Forget, Judged, Release, Restore, Schedule,
    Scheduled, SendHold, Throttle,
};
use crate::queue::Queue;
use crate::redis::scripts::Limits;
use crate::redis::{RedisError, Reply, ReplyError};

/// Number of queued events read by one command.
const QUEUED_PAGE: isize = 1_000;
/// Number of statistics hashes that are read in one round trip.
const STATS_READ: usize = 512;
/// Number of attempts to schedule with a key. Another call may take the key between the lookup and
/// the script.
const KEY_TRIES: usize = 10;

/// The result of scheduling a notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// Its id, or the id of the existing notification with its key.
    pub id: NotificationId,
    /// Whether it was scheduled; otherwise an existing one was kept.
    pub is_new: bool,
    /// The statistics type of the notification that it replaced.
    pub(crate) cancelled: Option<String>,
}

impl Queue {
    /// Schedules a notification, unless an existing one with its key is kept.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] it may or may not be scheduled: only a call with the same key
    /// is safe.
    pub async fn schedule(
        &self,
        new: &NewNotification,
        label: &str,
        now: Duration,
    ) -> Result<Accepted, RedisError> {
        let (keys, id) = (self.keys_of(&new.bot), NotificationId::new(self.shard_of(&new.bot)));
        let mut tries = 0;
        loop {
            let known = match &new.key {
                Some((key, _)) => self.who_has(&new.bot, key).await?,
                None => None,
            };
            let id_of_known = known.as_ref().map(|(id, _)| *id);
            let quota = self.limits_of(&new.bot).quota;
            let schedule = Schedule { keys, now, id, new, label, quota, known };
            match self.link().call(&schedule).await? {
                Scheduled::Ok { cancelled, .. } => {
                    return Ok(Accepted { id, is_new: true, cancelled });
                }
                Scheduled::Duplicate(_) => {
                    let id = id_of_known.unwrap_or(id);
                    return Ok(Accepted { id, is_new: false, cancelled: None });
                }
                Scheduled::Again if tries < KEY_TRIES => tries += 1,
                Scheduled::Again => {
                    let error =
                        ReplyError::unexpected("a key that does not change all the time", "");
                    return Err(self.link().misread("schedule", error));
                }
            }
        }
    }

    /// The notification with a key, and its user.
    async fn who_has(
        &self,
        bot: &BotId,
        key: &str,
    ) -> Result<Option<(NotificationId, String)>, RedisError> {
        let keys = self.keys_of(bot);
        let id = self.text("GET", redis::Cmd::get(keys.notification_key(bot, key))).await?;
        let Ok(id) = id.parse() else { return Ok(None) };
        let uid = redis::Cmd::hget(keys.notification(id), "uid");
        Ok(Some((id, self.text("HGET", uid).await?)))
    }

    /// The text that a command returns; empty if it returns no value.
    async fn text(&self, name: &'static str, command: redis::Cmd) -> Result<String, RedisError> {
        let value = self.link().command(name, command).await?;
        let text = Reply::single(value).and_then(|mut reply| reply.text());
        text.map_err(|error| self.link().misread(name, error))
    }

    /// Decides about the notifications of a slice; returns those to send.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] they may have been started. Then they become due again after
    /// `hold`.
    pub async fn begin_sends(
        &self,
        bot: &BotId,
        events: &[(NotificationId, &str, Sequence)],
        throttle: &Throttle,
        hold: SendHold,
        now: Duration,
    ) -> Result<Judged, RedisError> {
        let Limits { dead_max, quota, .. } = self.limits_of(bot);
        let keys = self.keys_of(bot);
        let begin = Begin { keys, now, bot, hold, throttle, dead_max, quota, events };
        let judged = self.link().call(&begin).await?;
        self.letters_over_quota(judged.letters_over_quota);
        self.forget(judged.ended.iter().map(|ended| (bot, ended.id, &*ended.key))).await;
        Ok(judged)
    }

    /// Ends the callers' keys of notifications that have ended with their records. After an error they
    /// end later by themselves.
    async fn forget(&self, ended: impl Iterator<Item = (&BotId, NotificationId, &str)>) {
        let keyed = ended.filter(|(.., key)| !key.is_empty());
        let calls: Vec<_> =
            keyed.map(|(bot, id, key)| Forget { keys: self.keys_of(bot), bot, id, key }).collect();
        if !calls.is_empty()
            && let Err(error) = self.link().call_all(&calls).await
        {
            debug!(%error, "the keys of ended notifications are kept for longer");
        }
    }

    /// Reports the results of sends, all of one shard.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] the results may or may not be stored; the call can be
    /// repeated.
    pub async fn finish_sends(
        &self,
        shard: Shard,
        endings: &[Ended],
        throttle: &Throttle,
        now: Duration,
    ) -> Result<Finished, RedisError> {
        let (keys, dead_max) = (self.keys(shard), self.limits().dead_max);
        let quotas = self.quotas();
        let finish = Finish { keys, now, dead_max, quotas, throttle, endings };
        let finished = self.link().call(&finish).await?;
        self.letters_over_quota(finished.letters_over_quota);
        self.forget(endings.iter().map(|Ended { begun, .. }| (&begun.bot, begun.id, &*begun.key)))
            .await;
        Ok(finished)
    }

    /// Cancels or reschedules a notification that was looked up.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] it may or may not be done; the call can be repeated.
    pub async fn amend(
        &self,
        kept: &Kept,
        amendment: Amendment,
        now: Duration,
    ) -> Result<Amended, RedisError> {
        let Kept { id, bot, uid, key, .. } = kept;
        let (keys, id) = (self.keys_of(bot), *id);
        let ended_bytes = self.quotas().of(bot).ended_bytes;
        self.link().call(&Amend { keys, now, id, bot, uid, key, ended_bytes, amendment }).await
    }

    /// Releases the notification that has waited longest for a user, if it is due and the last
    /// release was at least `threshold` ago. Returns whether one was released.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] a notification may or may not be released.
    pub async fn release_online(
        &self,
        bot: &BotId,
        uid: &str,
        threshold: Duration,
        now: Duration,
    ) -> Result<bool, RedisError> {
        let keys = self.keys_of(bot);
        self.link().call(&Release { keys, now, bot, uid, threshold }).await
    }

    /// The notifications among `ids` that have not ended and have no due time. Their events are
    /// queued, or they are lost.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn without_due_time(
        &self,
        ids: &[NotificationId],
    ) -> Result<Vec<Suspect>, RedisError> {
        let shards = |id: &NotificationId| Some((*id, id.shard(self.shard_count())?));
        let ids: Vec<(NotificationId, Shard)> = ids.iter().filter_map(shards).collect();
        let mut pipe = Pipeline::with_capacity(3 * ids.len());
        for (id, shard) in &ids {
            let keys = self.keys(*shard);
            // The last handled event is read first, because a later action on the notification
            // changes it.
            pipe.cmd("HMGET").arg(keys.notification(*id)).arg(&["bot", "uid", "s", "ended"]);
            pipe.cmd("ZSCORE").arg(&keys.due).arg(id.to_string());
            pipe.cmd("HEXISTS").arg(&keys.later).arg(id.to_string());
        }
        let values = self.link().run_checked("HMGET", &pipe).await?;
        let mut found = Vec::new();
        for ((id, _), facts) in ids.iter().zip(values.chunks(3)) {
            let [record, due, later] = facts else { break };
            let has_time =
                *due != Value::Nil && matches!(later, Value::Int(1) | Value::Boolean(true));
            if !has_time {
                let suspect = suspect(*id, record.clone());
                found.extend(suspect.map_err(|error| self.link().misread("HMGET", error))?);
            }
        }
        Ok(found)
    }

    /// The ids of all events in the queue of a bot.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn queued_ids(&self, bot: &BotId) -> Result<HashSet<String>, RedisError> {
        let key = self.keys_of(bot).queue(bot);
        let mut ids = HashSet::new();
        // Reads from the tail to the head, with indexes from the tail. An event that is added at
        // the tail only repeats a part, and one that leaves at the head shifts no index. So none is
        // missed.
        let mut last = -1_isize;
        loop {
            let range = redis::Cmd::lrange(&key, last - QUEUED_PAGE + 1, last);
            let value = self.link().command("LRANGE", range).await?;
            let misread = |error| self.link().misread("LRANGE", error);
            let mut page = Reply::new(value).map_err(misread)?;
            let count = page.len();
            for _ in 0..count {
                let record = page.bytes().map_err(misread)?.unwrap_or_default();
                if let Ok((_, event)) = Event::decode(&record, bot) {
                    ids.insert(event.id().to_owned());
                }
            }
            if count == 0 {
                return Ok(ids);
            }
            last -= QUEUED_PAGE;
        }
    }

    /// Reschedules a notification that was found nowhere. Returns whether it was really lost.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] it may or may not be done; the call can be repeated.
    pub(crate) async fn restore(&self, lost: &Suspect, now: Duration) -> Result<bool, RedisError> {
        let Suspect { id, bot, uid, sequence } = lost;
        let (keys, id, sequence) = (self.keys_of(bot), *id, *sequence);
        self.link().call(&Restore { keys, now, id, bot, uid, sequence }).await
    }

    /// The statistics of days or hours, in their order.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn notification_stats(&self, spans: &[Span]) -> Result<Vec<Stats>, RedisError> {
        let mut all = vec![Stats::new(); spans.len()];
        let misread = |error| self.link().misread("HGETALL", error);
        // In batches, because the replies for many spans could need much memory.
        let at_once = (STATS_READ / self.shards().len()).max(1);
        for (spans, all) in spans.chunks(at_once).zip(all.chunks_mut(at_once)) {
            let mut pipe = Pipeline::with_capacity(spans.len() * self.shards().len());
            for span in spans {
                for keys in self.shards().iter() {
                    pipe.cmd("HGETALL").arg(match *span {
                        Span::Day(day) => keys.stats_of_day(day),
                        Span::Hour(hour) => keys.stats_of_hour(hour),
                    });
                }
            }
            let values = self.link().run_checked("HGETALL", &pipe).await?;
            for (at, value) in values.into_iter().enumerate() {
                add(&mut all[at / self.shards().len()], value).map_err(misread)?;
            }
        }
        Ok(all)
    }

    /// The earliest due time, in ms since 1970.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn first_due_ms(&self) -> Result<Option<u64>, RedisError> {
        let mut pipe = Pipeline::with_capacity(self.shards().len());
        for keys in self.shards().iter() {
            pipe.cmd("ZRANGE").arg(&keys.due).arg(0).arg(0).arg("WITHSCORES");
        }
        let mut all = Vec::new();
        let misread = |error| self.link().misread("ZRANGE", error);
        for first in self.link().run_checked("ZRANGE", &pipe).await? {
            let mut first = Reply::new(first).map_err(misread)?;
            if first.next().is_some() {
                let due = first.score().map_err(misread)?;
                all.extend(due.and_then(|due| u64::try_from(due).ok()));
            }
        }
        Ok(all.into_iter().min())
    }

    /// The entry of a type of `bot` in the statistics: its own, or `other`. See [`super::kinds`].
    /// `now` is the time since 1970.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn label(
        &self,
        bot: &BotId,
        kind: &str,
        now: Duration,
    ) -> Result<String, RedisError> {
        let key = keys::kinds(self.link().prefix());
        let known = self.link().command("HGETALL", redis::Cmd::hgetall(&key)).await?;
        let known = Kinds::read(known).map_err(|error| self.link().misread("HGETALL", error))?;
        let entry = known.enter(bot, kind, millis(now));
        let mut pipe = Pipeline::with_capacity(2);
        if !entry.ended.is_empty() {
            pipe.cmd("HDEL").arg(&key).arg(&entry.ended);
        }
        if let Some(used) = &entry.used {
            pipe.cmd("HSET").arg(&key).arg(kind).arg(used);
        }
        // Concurrent calls may exceed the maximum by a few.
        if !pipe.is_empty() {
            self.link().run_checked("HSET", &pipe).await?;
        }
        Ok(if entry.is_own { kind } else { OTHER_KINDS }.to_owned())
    }
}

/// The period of statistics, by its number since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    /// A day.
    Day(u64),
    /// An hour.
    Hour(u64),
}

/// The counts by type.
pub type Stats = BTreeMap<String, Tally>;

/// The counts of one type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// The count of each outcome: `received`, `retried`, or the way a notification ended.
    pub outcomes: BTreeMap<String, u64>,
    /// The number of first attempts by their delay. The keys are steps of
    /// [`LATE_STEPS`](crate::notifications::record::LATE_STEPS); a step counts only delays above
    /// the previous step.
    pub late: BTreeMap<u64, u64>,
}

impl Tally {
    /// Adds another tally.
    pub fn add(&mut self, other: &Self) {
        for (outcome, n) in &other.outcomes {
            *self.outcomes.entry(outcome.clone()).or_default() += n;
        }
        for (step, n) in &other.late {
            *self.late.entry(*step).or_default() += n;
        }
    }

    /// The sum of several tallies.
    #[must_use]
    pub fn sum<'a>(tallies: impl Iterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        for tally in tallies {
            sum.add(tally);
        }
        sum
    }

    /// The count of an outcome.
    #[must_use]
    pub fn count(&self, outcome: &str) -> u64 {
        self.outcomes.get(outcome).copied().unwrap_or_default()
    }

    /// The delay in ms that this share (such as 0.99) of the first attempts did not exceed; `None`
    /// if there was no attempt.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count"
    )]
    pub fn late_ms(&self, share: f64) -> Option<u64> {
        let all: u64 = self.late.values().sum();
        let mut left = ((all as f64 * share).ceil() as u64).max(1);
        self.late.iter().find_map(|(&step, &n)| {
            let found = n >= left;
            left = left.saturating_sub(n);
            found.then_some(step)
        })
    }
}

/// A notification that may be lost.
#[derive(Debug)]
pub(crate) struct Suspect {
    pub(crate) id: NotificationId,
    pub(crate) bot: BotId,
    uid: String,
    /// The sequence of the last handled event, at the time of the check.
    sequence: u64,
}

/// `None`: the notification has ended, or does not exist.
fn suspect(id: NotificationId, record: Value) -> Result<Option<Suspect>, ReplyError> {
    let mut fields = Reply::new(record)?;
    let (bot, uid) = (fields.text()?, fields.text()?);
    let (sequence, ended) = (fields.optional::<u64>()?, fields.optional::<u64>()?);
    let Some(sequence) = sequence.filter(|_| ended.is_none()) else { return Ok(None) };
    let bot = bot.parse().map_err(|_| ReplyError::unexpected("a bot", &bot))?;
    Ok(Some(Suspect { id, bot, uid, sequence }))
}

fn add(stats: &mut Stats, value: Value) -> Result<(), ReplyError> {
    let pairs = match value {
        Value::Map(pairs) => pairs.into_iter().flat_map(|(name, n)| [name, n]).collect(),
        Value::Array(values) => values,
        _ => Vec::new(),
    };
    let mut reply = Reply::new(Value::Array(pairs))?;
    while reply.len() > 0 {
        let (name, n) = (reply.text()?, reply.number::<u64>()?);
        // An outcome contains no `|`, so the last one separates it from the type.
        let (kind, outcome) = name
            .rsplit_once('|')
            .ok_or_else(|| ReplyError::unexpected("a type and an outcome", &name))?;
        let tally = stats.entry(kind.to_owned()).or_default();
        match outcome.strip_prefix("late").and_then(|step| step.parse().ok()) {
            Some(step) => *tally.late.entry(step).or_default() += n,
            None => *tally.outcomes.entry(outcome.to_owned()).or_default() += n,
        }
    }
    Ok(())
}
