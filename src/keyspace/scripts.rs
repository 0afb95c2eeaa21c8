//! One typed call per `lua/*.lua`, by the same name. Nothing else runs a script.
//!
//! A [`Call`] knows its script, its command and how to read the reply; [`super::Link`] sends one
//! or many of them.

mod copy;
mod lease;
mod notify;
mod operate;
mod views;

use std::sync::LazyLock;

use redis::{Cmd, Value};

pub use self::copy::{Advance, Advanced, Emit, Enqueue, Enqueued, Promote, Promoted, Push, Pushed};
pub use self::lease::{
    Attempts, Claim, Claimed, Complete, Completed, Completion, Exception, Fate, Grant, Mode,
    Verdict,
};
pub use self::notify::{
    Amend, Amended, Amendment, Begin, Finish, Finished, Judged, Release, Restore, Schedule,
    Scheduled, SendHold, Throttle,
};
pub use self::operate::{
    Beat, Head, Heads, Hold, Note, Pause, Purge, Reconcile, Reconciled, Recover, Redrive, Resume,
    Revoke, Trim,
};
pub use self::views::{
    Counted, Counting, Import, IncrementIfExists, Recount, Replace, Taken, Upsert, Viewed, Views,
};
use super::reply::{Reply, ReplyError};

/// A script as it is loaded: its first line, of `lua/shared.lua`, `lua/views.lua`,
/// `lua/notifications.lua` and `lua/offsets.lua` those that it needs, its body.
pub(super) struct Script {
    pub(super) code: String,
    sha: String,
}

macro_rules! scripts {
    ($($const:ident $name:literal $shared:expr),+ $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        #[expect(non_camel_case_types, reason = "named as the files are")]
        enum Index { $($const),+ }

        /// Every script, in one table.
        pub(super) static SCRIPTS: LazyLock<Vec<Script>> = LazyLock::new(|| {
            vec![$(Script::new(include_str!(concat!("../../lua/", $name, ".lua")), $shared)),+]
        });
    };
}
scripts! {
    enqueue "enqueue" COPIES, push "push" QUEUES, claim "claim" QUEUES, complete "complete" VIEWS,
    promote "promote" QUEUES, pause "pause" QUEUES, resume "resume" QUEUES, purge "purge" QUEUES,
    redrive "redrive" QUEUES, revoke "revoke" QUEUES, recover "recover" QUEUES, reconcile "reconcile" QUEUES,
    increment_if_exists "increment_if_exists" VIEWS, upsert "upsert" VIEWS,
    replace "replace" VIEWS, import "import" VIEWS, recount "recount" VIEWS,
    schedule "schedule" NOTES, begin "begin" NOTES, finish "finish" NOTES, amend "amend" NOTES,
    release "release" NOTES, restore "restore" NOTES,
    advance "advance" OFFSETS, trim "trim" OFFSETS, note "note" ALONE,
    emit "emit" ALONE, hold "hold" ALONE, heads "heads" ALONE, beat "beat" ALONE,
}

/// What is placed before the body of a script.
const ALONE: &[&str] = &[];
const QUEUES: &[&str] = &[include_str!("../../lua/shared.lua")];
const VIEWS: &[&str] = &[QUEUES[0], include_str!("../../lua/views.lua")];
const OFFSETS: &[&str] = &[include_str!("../../lua/offsets.lua")];
const COPIES: &[&str] = &[VIEWS[0], VIEWS[1], OFFSETS[0]];
const NOTES: &[&str] = &[QUEUES[0], include_str!("../../lua/notifications.lua")];

impl Script {
    #[expect(clippy::disallowed_methods, reason = "the one place that knows scripts")]
    fn new(file: &str, before: &[&str]) -> Self {
        let (first, body) = file.split_once('\n').unwrap_or((file, ""));
        let code = format!("{first}\n{}\n{body}", before.join("\n"));
        let sha = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha }
    }
}

/// A call of one script.
pub trait Call {
    /// What it answers.
    type Reply;
    /// The script's name: file, metric label.
    const NAME: &'static str;
    /// The command that runs it.
    fn command(&self) -> Cmd;
    /// Reads the reply.
    ///
    /// # Errors
    /// When the reply has another shape than the script's contract says.
    fn reply(value: Value) -> Result<Self::Reply, ReplyError>;
}

fn evalsha(script: Index, keys: usize) -> Cmd {
    let mut cmd = redis::cmd("EVALSHA");
    cmd.arg(&SCRIPTS[script as usize].sha).arg(keys);
    cmd
}

/// What bounds a queue and its dead letters.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How far ahead of the clock a bot's last finish may be and the bot still counts as quiet, µs.
    pub slice_us: u64,
    /// How long a bot that becomes ready waits for more events, ms.
    pub linger_ms: u64,
    /// Most events per bot; 0: no bound.
    pub max_queue: u64,
    /// Whether events beyond `max_queue` become dead letters; else they are dropped.
    pub overflow_dead: bool,
    /// Most dead letters per shard.
    pub dead_max: u64,
}

impl Limits {
    fn overflow(self) -> &'static str {
        if self.overflow_dead { "dead" } else { "drop_new" }
    }
}

/// What became of events that were to be queued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queued {
    /// Appended to queues.
    pub appended: u64,
    /// Made dead letters because a queue was full.
    pub dead: u64,
    /// Dropped because a queue was full.
    pub dropped: u64,
    /// Old dead letters that had to go.
    pub letters_removed: u64,
}

impl Queued {
    fn read(reply: &mut Reply) -> Result<Self, ReplyError> {
        Ok(Self {
            appended: reply.number()?,
            dead: reply.number()?,
            dropped: reply.number()?,
            letters_removed: reply.number()?,
        })
    }
}
