//! The scripts for one notification that was accepted: `amend`, `forget`, `release`, `restore`.

use std::time::Duration;

use redis::{Cmd, Value};

use super::{Index, begin, evalsha};
use crate::clock::millis;
use crate::id::BotId;
use crate::notifications::record::{NotificationId, State, When};
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::Call;
use crate::redis::{Reply, ReplyError};

/// A change of a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amendment {
    /// Cancel it.
    Cancel,
    /// Move its due time.
    Move(When),
}

/// The result of [`Amend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amended {
    /// Changed.
    Done,
    /// Not changed: its state forbids it.
    Not(State),
    /// The notification does not exist.
    Gone,
}

/// `lua/amend.lua`.
#[derive(Debug)]
pub struct Amend<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The time, for the statistics.
    pub now: Duration,
    /// The id of the notification.
    pub id: NotificationId,
    /// The bot.
    pub bot: &'a BotId,
    /// The user.
    pub uid: &'a str,
    /// Its key; empty for none.
    pub key: &'a str,
    /// Maximum bytes of the ended notifications of the bot; 0: no quota.
    pub ended_bytes: u64,
    /// The change.
    pub amendment: Amendment,
}

impl Call for Amend<'_> {
    type Reply = Amended;
    const NAME: &'static str = "amend";

    fn command(&self) -> Cmd {
        let Self { keys, id, bot, uid, key, .. } = self;
        let more = if key.is_empty() { 3 } else { 4 };
        let mut cmd = begin(Index::amend, keys, more, self.now);
        cmd.arg(keys.notification(*id)).arg(keys.online(bot, uid)).arg(keys.results_meter(bot));
        if !key.is_empty() {
            cmd.arg(keys.notification_key(bot, key));
        }
        cmd.arg(id.to_string());
        match self.amendment {
            Amendment::Cancel => cmd.arg("cancel").arg(0).arg(0),
            Amendment::Move(when) => {
                let (at_ms, delay_ms) = when.parts();
                cmd.arg("move").arg(at_ms).arg(delay_ms)
            }
        };
        cmd.arg(self.ended_bytes);
        cmd
    }

    fn reply(value: Value) -> Result<Amended, ReplyError> {
        match &*Reply::single(value)?.text()? {
            "OK" => Ok(Amended::Done),
            "" => Ok(Amended::Gone),
            state => {
                let unexpected = |_| ReplyError::unexpected("a state", state);
                state.parse().map(Amended::Not).map_err(unexpected)
            }
        }
    }
}

/// `lua/forget.lua`. Returns whether the key ends earlier than before.
#[derive(Debug)]
pub struct Forget<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The bot.
    pub bot: &'a BotId,
    /// The id of the notification that has ended.
    pub id: NotificationId,
    /// Its key.
    pub key: &'a str,
}

impl Call for Forget<'_> {
    type Reply = bool;
    const NAME: &'static str = "forget";

    fn command(&self) -> Cmd {
        let Self { keys, bot, id, key } = self;
        let mut cmd = evalsha(Index::forget, 2);
        cmd.arg(keys.notification(*id)).arg(keys.notification_key(bot, key)).arg(id.to_string());
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// `lua/release.lua`. Returns whether a notification was released.
#[derive(Debug)]
pub struct Release<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The time, for the statistics.
    pub now: Duration,
    /// The bot.
    pub bot: &'a BotId,
    /// The user that is online.
    pub uid: &'a str,
    /// Minimum time since the user's last release.
    pub threshold: Duration,
}

impl Call for Release<'_> {
    type Reply = bool;
    const NAME: &'static str = "release";

    fn command(&self) -> Cmd {
        let Self { keys, bot, uid, .. } = self;
        let mut cmd = begin(Index::release, keys, 2, self.now);
        cmd.arg(keys.online(bot, uid)).arg(keys.user(bot, uid));
        cmd.arg(bot.as_str()).arg(uid).arg(millis(self.threshold));
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// `lua/restore.lua`. Returns whether the notification was lost.
#[derive(Debug)]
pub struct Restore<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The time, for the statistics.
    pub now: Duration,
    /// The id of the notification.
    pub id: NotificationId,
    /// The bot.
    pub bot: &'a BotId,
    /// The user.
    pub uid: &'a str,
    /// The sequence of the last handled event, at the time of the check.
    pub sequence: u64,
}

impl Call for Restore<'_> {
    type Reply = bool;
    const NAME: &'static str = "restore";

    fn command(&self) -> Cmd {
        let Self { keys, id, bot, uid, .. } = self;
        let mut cmd = begin(Index::restore, keys, 2, self.now);
        cmd.arg(keys.notification(*id)).arg(keys.online(bot, uid));
        cmd.arg(id.to_string()).arg(self.sequence);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}
