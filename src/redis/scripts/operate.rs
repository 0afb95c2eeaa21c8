//! The scripts for operators and for new connections, locks, and trimming of the bus.

use std::sync::Arc;

use redis::{Cmd, Value};

use super::{Call, Index, evalsha};
use crate::id::{BotId, Lane, Offset};
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

macro_rules! bot_call {
    ($(#[$doc:meta])* $type:ident $name:ident, $keys:literal, $reply:ty,
     |$self:ident, $cmd:ident| $args:block, |$value:ident| $read:block,
     { $($(#[$field_doc:meta])* $field:ident: $field_type:ty),* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $type<'a> {
            /// The shard.
            pub keys: &'a ShardKeys,
            $($(#[$field_doc])* pub $field: $field_type),*
        }
        impl Call for $type<'_> {
            type Reply = $reply;
            const NAME: &'static str = stringify!($name);
            fn command(&$self) -> Cmd {
                let mut $cmd = evalsha(Index::$name, $keys);
                $cmd.arg(&$self.keys.base);
                $args
                $cmd
            }
            fn reply(value: Value) -> Result<$reply, ReplyError> {
                let $value = Reply::single(value)?.number::<i64>()?;
                Ok($read)
            }
        }
    };
}

bot_call! {
    /// `lua/pause.lua`. Returns whether that changed something.
    Pause pause, 9, bool,
    |self, cmd| {
        cmd.arg(&self.keys.pauses).arg(self.bot.map_or("", BotId::as_str));
        cmd.arg(self.note).arg(u8::from(self.replaces));
    },
    |n| { n == 1 },
    { /// `None`: the whole shard.
      bot: Option<&'a BotId>,
      /// Who pauses it, and why, as JSON; or empty.
      note: &'a str,
      /// Whether the note replaces that of a pause.
      replaces: bool }
}

bot_call! {
    /// `lua/purge.lua`. Returns the number of deleted events.
    Purge purge, 73, u64,
    |self, cmd| {
        cmd.arg(self.keys.queue(self.bot));
        for lane in Lane::all() {
            cmd.arg(self.keys.lane(lane, self.bot));
        }
        cmd.arg(self.bot.as_str());
    },
    |n| { n.unsigned_abs() },
    { /// The bot of the queue.
      bot: &'a BotId }
}

bot_call! {
    /// `lua/redrive.lua`. Returns whether the dead letter existed, and could be handled again.
    Redrive redrive, 10, bool,
    |self, cmd| {
        cmd.arg(&self.keys.dlq).arg(self.keys.queue(self.bot));
        cmd.arg(self.id.to_string()).arg(self.bot.as_str()).arg(self.slice_us);
        cmd.arg(u8::from(self.renews));
    }, |n| { n == 1 },
    { /// The dead letter.
      id: Offset,
      /// The bot of the dead letter.
      bot: &'a BotId,
      /// One slice, µs.
      slice_us: u64,
      /// Whether it gets a new sequence.
      renews: bool }
}

bot_call! {
    /// `lua/revoke.lua`. Returns whether there was a lease or park.
    Revoke revoke, 9, bool,
    |self, cmd| {
        cmd.arg(self.keys.queue(self.bot)).arg(self.bot.as_str()).arg(self.slice_us);
    }, |n| { n == 1 },
    { /// The bot of the lease.
      bot: &'a BotId,
      /// One slice, µs.
      slice_us: u64 }
}

bot_call! {
    /// `lua/recover.lua`. Returns the number of revoked leases; `None`: the run is known.
    Recover recover, 8, Option<u64>,
    |self, cmd| { cmd.arg(self.run).arg(self.slice_us); }, |n| { u64::try_from(n).ok() },
    { /// The server's run id.
      run: &'a str,
      /// One slice, µs.
      slice_us: u64 }
}

/// `lua/resume.lua`. Returns whether that changed something.
#[derive(Debug)]
pub struct Resume<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// `None`: the whole shard.
    pub bot: Option<&'a BotId>,
    /// One slice, µs.
    pub slice_us: u64,
}

impl Call for Resume<'_> {
    type Reply = bool;
    const NAME: &'static str = "resume";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::resume, 9 + usize::from(self.bot.is_some()));
        cmd.arg(&self.keys.base).arg(&self.keys.pauses);
        if let Some(bot) = self.bot {
            cmd.arg(self.keys.queue(bot));
        }
        cmd.arg(self.bot.map_or("", BotId::as_str)).arg(self.slice_us);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// `lua/hold.lua`. Returns whether the caller holds the lock.
#[derive(Debug)]
pub struct Hold<'a> {
    /// The lock's key.
    pub key: &'a str,
    /// The token of the caller.
    pub token: &'a str,
    /// How long; 0 releases it.
    pub ttl_ms: u64,
}

impl Call for Hold<'_> {
    type Reply = bool;
    const NAME: &'static str = "hold";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::hold, 1);
        cmd.arg(self.key).arg(self.token).arg(self.ttl_ms);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// `lua/readers.lua`. Returns the places of the logs that the caller reads.
#[derive(Debug)]
pub struct Readers<'a> {
    /// The key of the bus.
    pub key: &'a str,
    /// The token of the caller.
    pub token: &'a str,
    /// How long the caller counts as a reader; 0: it reads nothing any more.
    pub ttl_ms: u64,
    /// The names of all logs.
    pub logs: &'a [Arc<str>],
}

impl Call for Readers<'_> {
    type Reply = Vec<usize>;
    const NAME: &'static str = "readers";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::readers, 1);
        cmd.arg(self.key).arg(self.token).arg(self.ttl_ms);
        for log in self.logs {
            cmd.arg(&**log);
        }
        cmd
    }

    fn reply(value: Value) -> Result<Vec<usize>, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut places = Vec::with_capacity(reply.len());
        while reply.len() > 0 {
            places.push(reply.number()?);
        }
        Ok(places)
    }
}

/// `lua/note.lua`.
#[derive(Debug)]
pub struct Note<'a> {
    /// The key of the note.
    pub key: &'a str,
    /// The offset of the last copied entry.
    pub offset: Offset,
    /// Number of entries ever added up to there.
    pub entries: u64,
    /// Number of entries behind it. `None`: not known, the number before stays.
    pub lag: Option<u64>,
}

impl Call for Note<'_> {
    type Reply = ();
    const NAME: &'static str = "note";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::note, 1);
        let lag = self.lag.map_or_else(String::new, |lag| lag.to_string());
        cmd.arg(self.key).arg(self.offset.to_string()).arg(self.entries).arg(lag);
        cmd
    }

    fn reply(value: Value) -> Result<(), ReplyError> {
        Reply::yes(value).map(drop)
    }
}

/// `lua/act.lua`.
#[derive(Debug)]
pub struct Act<'a> {
    /// The key of the ring.
    pub key: &'a str,
    /// The action, as JSON.
    pub action: &'a [u8],
    /// Number of actions that the ring keeps.
    pub kept: usize,
}

impl Call for Act<'_> {
    type Reply = ();
    const NAME: &'static str = "act";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::act, 1);
        cmd.arg(self.key).arg(self.action).arg(self.kept);
        cmd
    }

    fn reply(value: Value) -> Result<(), ReplyError> {
        Reply::yes(value).map(drop)
    }
}

/// `lua/trim.lua`. Returns the number of deleted entries.
#[derive(Debug)]
pub struct Trim<'a> {
    /// The stream's key.
    pub stream: &'a str,
    /// The lowest offset to keep.
    pub keep: Offset,
}

impl Call for Trim<'_> {
    type Reply = u64;
    const NAME: &'static str = "trim";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::trim, 1);
        cmd.arg(self.stream).arg(self.keep.to_string());
        cmd
    }

    fn reply(value: Value) -> Result<u64, ReplyError> {
        Reply::single(value)?.number()
    }
}

/// `lua/heads.lua`.
#[derive(Debug)]
pub struct Heads<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The bots, each with a lane that is set aside, or `None` for its queue; 1 to 500.
    pub lists: &'a [(&'a BotId, Option<Lane>)],
    /// Maximum number of bytes of first events that are read, which the last one may exceed. The reply
    /// ends there. 0: no event is read, and every sequence is 0.
    pub bytes: usize,
}

/// The state of a queue, or of a lane that is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Number of queued events.
    pub depth: u64,
    /// The sequence of the first event; 0 for none.
    pub sequence: u64,
}

impl Heads<'_> {
    /// Maximum number of queues per call.
    pub const MAX: usize = 500;
}

impl Call for Heads<'_> {
    type Reply = Vec<Head>;
    const NAME: &'static str = "heads";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::heads, self.lists.len());
        for &(bot, lane) in self.lists {
            cmd.arg(lane.map_or_else(|| self.keys.queue(bot), |lane| self.keys.lane(lane, bot)));
        }
        cmd.arg(self.lists.len()).arg(self.bytes);
        cmd
    }

    fn reply(value: Value) -> Result<Vec<Head>, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut heads = Vec::with_capacity(reply.len() / 2);
        while reply.len() > 0 {
            heads.push(Head { depth: reply.number()?, sequence: reply.number()? });
        }
        Ok(heads)
    }
}

/// `lua/reconcile.lua`.
#[derive(Debug)]
pub struct Reconcile<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The bots of the shard that may have events, each once.
    pub bots: &'a [BotId],
    /// Maximum number of bots with events for a comparison.
    pub bots_max: usize,
}

/// The result of comparing the depth of a shard with its queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reconciled {
    /// The depth is correct now.
    Set {
        /// The previous value.
        before: String,
        /// Number of events in the queues.
        depth: u64,
    },
    /// These bots were missing in the call.
    More(Vec<BotId>),
    /// The shard has too many bots with events.
    Many(u64),
}

impl Call for Reconcile<'_> {
    type Reply = Reconciled;
    const NAME: &'static str = "reconcile";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::reconcile, 8 + self.bots.len());
        cmd.arg(&self.keys.base);
        for bot in self.bots {
            cmd.arg(self.keys.queue(bot));
        }
        cmd.arg(self.bots_max).arg(self.bots.len());
        for bot in self.bots {
            cmd.arg(bot.as_str());
        }
        cmd
    }

    fn reply(value: Value) -> Result<Reconciled, ReplyError> {
        let mut reply = Reply::new(value)?;
        match reply.text()?.as_str() {
            "SET" => Ok(Reconciled::Set { before: reply.text()?, depth: reply.number()? }),
            "MANY" => Ok(Reconciled::Many(reply.number()?)),
            "MORE" => {
                let mut bots = Vec::with_capacity(reply.len());
                while reply.len() > 0 {
                    let bot = reply.text()?;
                    let parsed = BotId::parse(&bot);
                    bots.push(parsed.map_err(|_| ReplyError::unexpected("a bot id", &bot))?);
                }
                Ok(Reconciled::More(bots))
            }
            other => Err(ReplyError::unexpected("SET, MORE or MANY", other)),
        }
    }
}

/// `lua/beat.lua`.
#[derive(Debug)]
pub struct Beat<'a> {
    /// The key of the registry.
    pub key: &'a str,
    /// The process id.
    pub id: &'a str,
    /// Its state; empty: remove it.
    pub says: &'a str,
    /// Time without an update after which a process is removed, ms.
    pub ttl_ms: u64,
}

impl Call for Beat<'_> {
    type Reply = ();
    const NAME: &'static str = "beat";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::beat, 1);
        cmd.arg(self.key).arg(self.id).arg(self.says).arg(self.ttl_ms);
        cmd
    }

    fn reply(value: Value) -> Result<(), ReplyError> {
        Reply::yes(value).map(drop)
    }
}

/// `lua/present.lua`.
#[derive(Debug)]
pub struct Present<'a> {
    /// The key of the registry.
    pub key: &'a str,
    /// Time without an update after which a process is left out, ms.
    pub ttl_ms: u64,
}

impl Call for Present<'_> {
    type Reply = Vec<String>;
    const NAME: &'static str = "present";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::present, 1);
        cmd.arg(self.key).arg(self.ttl_ms);
        cmd
    }

    fn reply(value: Value) -> Result<Vec<String>, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut said = Vec::with_capacity(reply.len());
        while reply.len() > 0 {
            said.push(reply.text()?);
        }
        Ok(said)
    }
}
