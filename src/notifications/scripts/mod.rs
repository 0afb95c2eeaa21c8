//! The scripts of notifications: `schedule`, `begin`, `finish`, `amend`, `release`, `restore`,
//! `forget`.

mod change;

use std::time::Duration;

use redis::{Cmd, Value};

pub use self::change::{Amend, Amended, Amendment, Forget, Release, Restore};
use crate::clock::millis;
use crate::id::{BotId, Sequence};
use crate::notifications::record::{
    Begun, Cap, Caps, Duplicates, Ended, NewNotification, NotificationId, late_step,
};
use crate::quotas::{Quota, Quotas};
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Call, QUEUES, scripts};
use crate::redis::{Reply, ReplyError};
use crate::trace::TraceContext;

scripts! {
    SCRIPTS:
    schedule "schedule" NOTES, begin "begin" NOTES, finish "finish" NOTES, amend "amend" NOTES,
    release "release" NOTES, restore "restore" NOTES, forget "forget" &[],
}

const NOTES: &[&str] = &[QUEUES[0], include_str!("../../../lua/notifications.lua")];

/// Number of keys that every script declares first.
const KEYS: usize = 13;

fn begin(script: Index, keys: &ShardKeys, more: usize, now: Duration) -> Cmd {
    let mut cmd = evalsha(script, KEYS + more);
    cmd.arg(&keys.base).arg(&keys.due).arg(&keys.later).arg(&keys.dlq).arg(&keys.stats(now));
    cmd
}

/// `lua/schedule.lua`.
#[derive(Debug)]
pub struct Schedule<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The time, for the statistics.
    pub now: Duration,
    /// Its id.
    pub id: NotificationId,
    /// The notification to schedule.
    pub new: &'a NewNotification,
    /// Its type in the statistics.
    pub label: &'a str,
    /// The maximum that the bot may hold.
    pub quota: Quota,
    /// The notification that has the key, and its user.
    pub known: Option<(NotificationId, String)>,
}

/// The result of [`Schedule`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scheduled {
    /// Scheduled.
    Ok {
        /// Its due time, ms since 1970.
        due_ms: u64,
        /// The statistics type of the notification that it replaced.
        cancelled: Option<String>,
    },
    /// The existing notification with the key is kept. It is due at this time, ms since 1970.
    Duplicate(u64),
    /// Another notification got the key meanwhile.
    Again,
}

impl Call for Schedule<'_> {
    type Reply = Scheduled;
    const NAME: &'static str = "schedule";

    fn command(&self) -> Cmd {
        let Self { keys, new, .. } = self;
        let more = if new.key.is_some() { 7 } else { 2 };
        let mut cmd = begin(Index::schedule, keys, more, self.now);
        cmd.arg(keys.notification(self.id)).arg(keys.online(&new.bot, &new.uid));
        if let Some((key, _)) = &new.key {
            let (known, uid) =
                self.known.as_ref().map_or((self.id, &new.uid), |(id, uid)| (*id, uid));
            cmd.arg(keys.notification_key(&new.bot, key));
            cmd.arg(keys.notification(known)).arg(keys.online(&new.bot, uid));
            cmd.arg(keys.keys_meter(&new.bot)).arg(keys.results_meter(&new.bot));
        }
        let (at_ms, delay_ms) = new.when.parts();
        cmd.arg(self.id.to_string()).arg(new.bot.as_str()).arg(&new.uid).arg(&new.kind);
        cmd.arg(self.label).arg(at_ms).arg(delay_ms).arg(millis(new.expires_in));
        cmd.arg(u8::from(new.waits));
        cmd.arg(match &new.key {
            None => "",
            Some((_, Duplicates::Ignore)) => "ignore",
            Some((_, Duplicates::Replace)) => "replace",
            Some((_, Duplicates::Once)) => "once",
        });
        cmd.arg(self.known.as_ref().map_or_else(String::new, |(known, _)| known.to_string()));
        cmd.arg(self.quota.pending).arg(self.quota.pending_bytes);
        cmd.arg(self.quota.key_bytes).arg(self.quota.ended_bytes);
        let key = new.key.as_ref().map_or("", |(key, _)| key);
        let trace = new.trace.as_ref().map(TraceContext::to_text).unwrap_or_default();
        let more = [
            ("method", &*new.method),
            ("body", &new.body),
            ("recheck", &new.recheck),
            ("headers", &new.headers),
            ("trace", &trace),
        ];
        cmd.arg("url").arg(&new.url);
        for (name, value) in more.into_iter().chain([("key", key)]) {
            // Empty fields are left out, because a million records may wait in the memory of Redis.
            if !value.is_empty() {
                cmd.arg(name).arg(value);
            }
        }
        cmd
    }

    fn reply(value: Value) -> Result<Scheduled, ReplyError> {
        let mut reply = Reply::new(value)?;
        match &*reply.text()? {
            "OK" => {
                let due_ms = reply.number()?;
                let cancelled = Some(reply.text()?).filter(|label| !label.is_empty());
                Ok(Scheduled::Ok { due_ms, cancelled })
            }
            "DUP" => Ok(Scheduled::Duplicate(reply.number()?)),
            "AGAIN" => Ok(Scheduled::Again),
            other => Err(ReplyError::unexpected("a status", other)),
        }
    }
}

/// Limits of notifications per user.
#[derive(Debug, Clone)]
pub struct Throttle {
    /// Minimum time since the user's last notification.
    pub threshold: Duration,
    /// Types with their own `threshold`.
    pub by_kind: Vec<(String, Duration)>,
    /// The caps.
    pub caps: Caps,
    /// Whether a notification that comes too soon is deferred; otherwise it is dropped.
    pub defers: bool,
}

impl Throttle {
    /// How long the send times of a user are kept after a notification of this bot and type.
    #[must_use]
    pub fn remember(&self, bot: &BotId, kind: &str) -> Duration {
        let thresholds = self.by_kind.iter().map(|(_, time)| *time).chain([self.threshold]);
        let (all, own) = self.counted(bot, kind);
        let windows = all.iter().chain(own).map(|cap| cap.window);
        thresholds.chain(windows).max().unwrap_or_default()
    }

    /// The caps that count a notification: those of its bot, and those of its type.
    fn counted(&self, bot: &BotId, kind: &str) -> (&[Cap], &[Cap]) {
        match self.caps.of_kind(kind) {
            None => (self.caps.of_bot(bot), &[]),
            Some([]) => (&[], &[]),
            Some(own) => (self.caps.of_bot(bot), own),
        }
    }
}

/// How long a started send belongs to its process.
#[derive(Debug, Clone, Copy)]
pub struct SendHold {
    /// Time in which the send should end.
    pub send: Duration,
    /// Additional time until another process may start the send again, because the sender may have
    /// been unable to report the result.
    pub patience: Duration,
}

/// `lua/begin.lua`.
#[derive(Debug)]
pub struct Begin<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The time, for the statistics.
    pub now: Duration,
    /// The bot.
    pub bot: &'a BotId,
    /// When a send without a result is started again.
    pub hold: SendHold,
    /// The limits per user.
    pub throttle: &'a Throttle,
    /// Maximum number of dead letters of the shard.
    pub dead_max: u64,
    /// The maximum that the bot may hold.
    pub quota: Quota,
    /// The queued notifications: id, user, sequence of the event.
    pub events: &'a [(NotificationId, &'a str, Sequence)],
}

/// The result of [`Begin`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// Number of dead letters that were deleted.
    pub letters_removed: u64,
    /// Number of deleted dead letters that exceeded the quota of their bot.
    pub letters_over_quota: u64,
    /// The notifications to send.
    pub begun: Vec<Begun>,
    /// Those that ended.
    pub ended: Vec<EndedEarly>,
    /// Number of events whose notifications have no record.
    pub gone: u64,
}

/// A notification that ended without a send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedEarly {
    /// Its id.
    pub id: NotificationId,
    /// How it ended.
    pub outcome: String,
    /// Its type in the statistics.
    pub label: String,
    /// The caller's key for it; empty for none.
    pub key: String,
}

impl Call for Begin<'_> {
    type Reply = Judged;
    const NAME: &'static str = "begin";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let Self { keys, bot, throttle, events, .. } = self;
        let mut cmd = begin(Index::begin, keys, 1 + 3 * events.len(), self.now);
        cmd.arg(keys.results_meter(bot));
        for (id, uid, _) in *events {
            cmd.arg(keys.notification(*id)).arg(keys.user(bot, uid)).arg(keys.online(bot, uid));
        }
        cmd.arg(millis(self.hold.send)).arg(millis(self.hold.patience)).arg(self.dead_max);
        cmd.arg(self.quota.of_records());
        cmd.arg(if throttle.defers { "defer" } else { "drop" }).arg(millis(throttle.threshold));
        cmd.arg(throttle.by_kind.len());
        for (kind, threshold) in &throttle.by_kind {
            cmd.arg(kind).arg(millis(*threshold));
        }
        let caps = throttle.caps.of_bot(bot);
        cmd.arg(caps.len());
        for cap in caps {
            cmd.arg(cap.n).arg(millis(cap.window));
        }
        let none = Some((0, 0));
        let of_kinds = throttle.caps.by_kind.iter().flat_map(|(kind, caps)| {
            // An empty list is sent too, as one cap of 0.
            let none = none.into_iter().filter(|_| caps.is_empty());
            let caps = caps.iter().map(|cap| (cap.n, millis(cap.window)));
            caps.chain(none).map(move |cap| (kind, cap))
        });
        let of_kinds: Vec<_> = of_kinds.collect();
        cmd.arg(of_kinds.len());
        for (kind, (n, window)) in of_kinds {
            cmd.arg(kind).arg(n).arg(window);
        }
        for (id, _, sequence) in *events {
            cmd.arg(id.to_string()).arg(sequence.get());
        }
        cmd
    }

    fn reply(value: Value) -> Result<Judged, ReplyError> {
        let mut reply = Reply::new(value)?;
        let (letters_removed, letters_over_quota) = (reply.number()?, reply.number()?);
        let (mut begun, mut ended, mut gone) = (Vec::new(), Vec::new(), 0);
        while let Some(event) = reply.next() {
            if let Value::Array(_) = event {
                let mut reply = Reply::new(event)?;
                if reply.len() == 4 {
                    let (outcome, label) = (reply.text()?, reply.text()?);
                    let (id, key) = (reply.parsed()?, reply.text()?);
                    ended.push(EndedEarly { id, outcome, label, key });
                } else {
                    begun.push(sent(&mut reply)?);
                }
            } else if event == Value::Int(1) {
                gone += 1;
            }
        }
        Ok(Judged { letters_removed, letters_over_quota, begun, ended, gone })
    }
}

fn sent(reply: &mut Reply) -> Result<Begun, ReplyError> {
    Ok(Begun {
        id: reply.parsed()?,
        token: reply.number()?,
        bot: reply.parsed()?,
        uid: reply.text()?,
        kind: reply.text()?,
        label: reply.text()?,
        url: reply.text()?,
        method: reply.text()?,
        body: reply.text()?,
        recheck: reply.text()?,
        due_ms: reply.number()?,
        expires_ms: reply.number()?,
        attempts: reply.number()?,
        ready_ms: reply.number()?,
        counts_late: reply.number::<u8>()? == 1,
        headers: reply.text()?,
        key: reply.text()?,
        postponed: reply.number::<u8>()? == 1,
        trace: reply.text()?,
    })
}

/// `lua/finish.lua`.
#[derive(Debug)]
pub struct Finish<'a> {
    /// The shard of the bots.
    pub keys: &'a ShardKeys,
    /// The time, for the statistics.
    pub now: Duration,
    /// Maximum number of dead letters of the shard.
    pub dead_max: u64,
    /// The maximum that bots may hold.
    pub quotas: &'a Quotas,
    /// The limits per user. They determine how long the send times are kept.
    pub throttle: &'a Throttle,
    /// The sends and their results.
    pub endings: &'a [Ended],
}

/// The result of [`Finish`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// Number of dead letters that were deleted.
    pub letters_removed: u64,
    /// Number of deleted dead letters that exceeded the quota of their bot.
    pub letters_over_quota: u64,
    /// The outcome of each send, in the words of `lua/finish.lua`; `None`: the send was considered
    /// lost before.
    pub outcomes: Vec<Option<String>>,
}

impl Call for Finish<'_> {
    type Reply = Finished;
    const NAME: &'static str = "finish";

    fn command(&self) -> Cmd {
        let Self { keys, endings, throttle, .. } = self;
        let mut cmd = begin(Index::finish, keys, 3 * endings.len(), self.now);
        for Ended { begun, .. } in *endings {
            cmd.arg(keys.notification(begun.id)).arg(keys.user(&begun.bot, &begun.uid));
            cmd.arg(keys.results_meter(&begun.bot));
        }
        cmd.arg(self.dead_max).arg(self.quotas.general().of_records());
        let kept = |caps: &[Cap]| caps.iter().map(|cap| cap.n).max().unwrap_or_default();
        for Ended { begun, ending, late } in *endings {
            let (outcome, pause, reason) = ending.parts();
            cmd.arg(begun.id.to_string()).arg(begun.token).arg(outcome);
            cmd.arg(millis(pause)).arg(reason);
            cmd.arg(late.map(|late| format!("late{}", late_step(late))).unwrap_or_default());
            let (all, own) = throttle.counted(&begun.bot, &begun.kind);
            cmd.arg(millis(throttle.remember(&begun.bot, &begun.kind)));
            cmd.arg(kept(all)).arg(kept(own));
            let own = self.quotas.own(&begun.bot);
            cmd.arg(own.map_or_else(String::new, |own| own.of_records()));
        }
        cmd
    }

    fn reply(value: Value) -> Result<Finished, ReplyError> {
        let mut reply = Reply::new(value)?;
        let (letters_removed, letters_over_quota) = (reply.number()?, reply.number()?);
        let mut outcomes = Vec::with_capacity(reply.len());
        for _ in 0..reply.len() {
            outcomes.push(Some(reply.text()?).filter(|outcome| outcome != "STALE"));
        }
        Ok(Finished { letters_removed, letters_over_quota, outcomes })
    }
}
