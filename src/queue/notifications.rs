//! Delayed notifications: what the scripts of their pipeline do.

use std::collections::HashMap;
use std::time::Duration;

use redis::{Pipeline, Value};

use super::Queue;
use crate::id::{BotId, Sequence, Shard};
use crate::keyspace::scripts::{
    Amend, Amended, Amendment, Begin, Finish, Finished, Judged, Release, Schedule, Scheduled,
    Throttle,
};
use crate::keyspace::{Reply, ReplyError, StoreError, keys};
use crate::notification::{Begun, Ending, Kept, NewNotification, NotificationId, OTHER_KINDS};

/// Types with a place of their own in the statistics; what comes later is `other`.
pub const KINDS_MAX: usize = 50;
/// Somebody else may take a key between looking and taking.
const KEY_TRIES: usize = 10;

impl Queue {
    /// Accepts a notification. Answers its id, or with a key the id of the one that keeps it.
    ///
    /// # Errors
    /// With [`StoreError::Unknown`] it may or may not be accepted: only a call with the same key is
    /// safe.
    pub async fn schedule(
        &self,
        new: &NewNotification,
        label: &str,
        now: Duration,
    ) -> Result<NotificationId, StoreError> {
        let (keys, id) = (self.keys_of(&new.bot), NotificationId::new(self.shard_of(&new.bot)));
        let mut tries = 0;
        loop {
            let known = match &new.key {
                Some((key, _)) => self.who_has(&new.bot, key).await?,
                None => None,
            };
            let id_of_known = known.as_ref().map(|(id, _)| *id);
            let schedule = Schedule { keys, now, id, new, label, known };
            match self.link().call(&schedule).await? {
                Scheduled::Ok(_) => return Ok(id),
                Scheduled::Duplicate(_) => return Ok(id_of_known.unwrap_or(id)),
                Scheduled::Again if tries < KEY_TRIES => tries += 1,
                Scheduled::Again => {
                    let error = ReplyError::unexpected("a key that is not taken all the time", "");
                    return Err(self.link().misread("schedule", error));
                }
            }
        }
    }

    /// The notification that has a key, and for which user it is.
    async fn who_has(
        &self,
        bot: &BotId,
        key: &str,
    ) -> Result<Option<(NotificationId, String)>, StoreError> {
        let keys = self.keys_of(bot);
        let get = redis::Cmd::get(keys.notification_key(bot, key));
        let id = self.text("GET", get).await?;
        let Ok(id) = id.parse() else { return Ok(None) };
        let uid = redis::Cmd::hget(keys.notification(id), "uid");
        Ok(Some((id, self.text("HGET", uid).await?)))
    }

    /// The answer of one command; empty for nothing.
    async fn text(&self, name: &'static str, command: redis::Cmd) -> Result<String, StoreError> {
        let value = self.link().command(name, command).await?;
        let text = Reply::single(value).and_then(|mut reply| reply.text());
        text.map_err(|error| self.link().misread(name, error))
    }

    /// Judges the notifications whose events are handled; answers those that are to be sent.
    ///
    /// # Errors
    /// With [`StoreError::Unknown`] they may be begun, and come again after `hold`.
    pub async fn begin_sends(
        &self,
        bot: &BotId,
        events: &[(NotificationId, &str, Sequence)],
        throttle: &Throttle,
        hold: Duration,
        now: Duration,
    ) -> Result<Judged, StoreError> {
        let (keys, dead_max) = (self.keys_of(bot), self.limits().dead_max);
        self.link().call(&Begin { keys, now, bot, hold, throttle, dead_max, events }).await
    }

    /// Ends sends, all of one shard.
    ///
    /// # Errors
    /// With [`StoreError::Unknown`] they may or may not be ended; it can be repeated.
    pub async fn finish_sends(
        &self,
        shard: Shard,
        endings: &[(Begun, Ending)],
        remember: Duration,
        now: Duration,
    ) -> Result<Finished, StoreError> {
        let (keys, dead_max) = (self.keys(shard), self.limits().dead_max);
        self.link().call(&Finish { keys, now, dead_max, remember, endings }).await
    }

    /// Cancels or moves a notification that was looked up.
    ///
    /// # Errors
    /// With [`StoreError::Unknown`] it may or may not be done; it can be repeated.
    pub async fn amend(
        &self,
        kept: &Kept,
        amendment: Amendment,
        now: Duration,
    ) -> Result<Amended, StoreError> {
        let (keys, id, bot, uid) = (self.keys_of(&kept.bot), kept.id, &kept.bot, &*kept.uid);
        self.link().call(&Amend { keys, now, id, bot, uid, amendment }).await
    }

    /// Releases the notification that has waited longest for a user, if it is due and the last one
    /// was long enough ago. Answers whether there was one.
    ///
    /// # Errors
    /// With [`StoreError::Unknown`] one may or may not be released.
    pub async fn release_online(
        &self,
        bot: &BotId,
        uid: &str,
        threshold: Duration,
        now: Duration,
    ) -> Result<bool, StoreError> {
        let keys = self.keys_of(bot);
        self.link().call(&Release { keys, now, bot, uid, threshold }).await
    }

    /// A notification, if there is one of this id.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn notification(&self, id: NotificationId) -> Result<Option<Kept>, StoreError> {
        let Some(shard) = id.shard(self.shard_count()) else { return Ok(None) };
        let keys = self.keys(shard);
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("HMGET").arg(keys.notification(id)).arg(FIELDS);
        pipe.cmd("ZSCORE").arg(&keys.due).arg(id.to_string());
        let values = self.link().run_checked("HMGET", &pipe).await?;
        kept(id, values).map_err(|source| self.link().misread("HMGET", source))
    }

    /// The statistics of days or hours, by their number since 1970: per type and outcome how many.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn notification_stats(&self, span: Span) -> Result<Stats, StoreError> {
        let mut pipe = Pipeline::with_capacity(self.shards().len());
        for keys in self.shards().iter() {
            pipe.cmd("HGETALL").arg(match span {
                Span::Day(day) => keys.stats_of_day(day),
                Span::Hour(hour) => keys.stats_of_hour(hour),
            });
        }
        let mut stats = Stats::new();
        for value in self.link().run_checked("HGETALL", &pipe).await? {
            add(&mut stats, value).map_err(|error| self.link().misread("HGETALL", error))?;
        }
        Ok(stats)
    }

    /// The place of a type in the statistics: its own for the first [`KINDS_MAX`], `other` later.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn label(&self, kind: &str) -> Result<String, StoreError> {
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("SISMEMBER").arg(keys::KINDS).arg(kind);
        pipe.cmd("SCARD").arg(keys::KINDS);
        let values = self.link().run_checked("SISMEMBER", &pipe).await?;
        let mut reply = Reply::new(Value::Array(values))
            .map_err(|error| self.link().misread("SISMEMBER", error))?;
        let mut number =
            || reply.number::<i64>().map_err(|error| self.link().misread("SISMEMBER", error));
        let (known, count) = (number()? == 1, number()?);
        if known {
            return Ok(kind.to_owned());
        }
        // Several at once may make it a few more.
        if usize::try_from(count).is_ok_and(|count| count >= KINDS_MAX) {
            return Ok(OTHER_KINDS.to_owned());
        }
        let mut pipe = Pipeline::with_capacity(1);
        pipe.cmd("SADD").arg(keys::KINDS).arg(kind);
        self.link().run_checked("SADD", &pipe).await?;
        Ok(kind.to_owned())
    }
}

/// Whose statistics, by its number since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    /// A day.
    Day(u64),
    /// An hour.
    Hour(u64),
}

/// Per type and outcome how many.
pub type Stats = HashMap<String, HashMap<String, u64>>;

const FIELDS: &[&str] = &[
    "state", "bot", "uid", "type", "due", "expires", "created", "ended", "online", "attempts",
    "reason", "url",
];

fn kept(id: NotificationId, values: Vec<Value>) -> Result<Option<Kept>, ReplyError> {
    let mut values = values.into_iter();
    let mut next = || values.next().unwrap_or(Value::Nil);
    let (mut fields, mut next_due) = (Reply::new(next())?, Reply::single(next())?);
    let text = fields.text()?;
    if text.is_empty() {
        return Ok(None);
    }
    Ok(Some(Kept {
        id,
        state: text.parse().map_err(|_| ReplyError::unexpected("a state", &text))?,
        bot: fields.parsed()?,
        uid: fields.text()?,
        kind: fields.text()?,
        due_ms: fields.number()?,
        expires_ms: fields.number()?,
        created_ms: fields.number()?,
        ended_ms: fields.optional()?,
        waits: fields.text()? == "1",
        attempts: fields.number()?,
        reason: fields.text()?,
        url: fields.text()?,
        next_ms: next_due.score()?.and_then(|score| u64::try_from(score).ok()),
    }))
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
        // A type holds no control character, and an outcome no bar.
        let (kind, outcome) = name
            .rsplit_once('|')
            .ok_or_else(|| ReplyError::unexpected("a type and an outcome", &name))?;
        *stats.entry(kind.to_owned()).or_default().entry(outcome.to_owned()).or_default() += n;
    }
    Ok(())
}
