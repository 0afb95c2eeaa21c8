//! One typed call per `lua/*.lua`, by the same name. Nothing else runs a script.
//!
//! A [`Call`] knows its script, its command and how to read the reply; [`super::Link`] sends one
//! or many of them.

mod copy;
mod lease;
mod ledger;
mod operate;

use std::sync::{LazyLock, Once, PoisonError, RwLock};

use redis::{Cmd, Value};

pub use self::copy::{Advance, Advanced, Emit, Enqueue, Enqueued, Promote, Promoted, Push, Pushed};
pub use self::lease::{
    Attempts, Claim, Claimed, Complete, Completed, Completion, Exception, Fate, Grant, Mode,
    Verdict,
};
pub use self::ledger::{Postings, Recount};
pub use self::operate::{
    Beat, Head, Heads, Hold, Note, Pause, Purge, Reconcile, Reconciled, Recover, Redrive, Resume,
    Revoke, Trim,
};
use super::reply::{Reply, ReplyError};

/// A script as it is loaded: its first line, what it shares with others, its body.
pub(crate) struct Script {
    pub(super) code: String,
    sha: String,
}

impl Script {
    #[expect(clippy::disallowed_methods, reason = "the one place that knows scripts")]
    pub(crate) fn new(file: &str, before: &[&str]) -> Self {
        let (first, body) = file.split_once('\n').unwrap_or((file, ""));
        let code = format!("{first}\n{}\n{body}", before.join("\n"));
        let sha = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha }
    }
}

/// The scripts of the core, or those of a product. See [`scripts!`].
pub struct Table {
    scripts: LazyLock<Vec<Script>>,
    registered: Once,
}

/// Every table that is in use.
static TABLES: RwLock<Vec<&'static Table>> = RwLock::new(Vec::new());

impl Table {
    pub(crate) const fn new(scripts: fn() -> Vec<Script>) -> Self {
        Self { scripts: LazyLock::new(scripts), registered: Once::new() }
    }

    /// Has every connection that is made from now on load these scripts. One that was made before
    /// is made again when it is first asked for one of them, as after `SCRIPT FLUSH`.
    pub(crate) fn register(&'static self) {
        self.registered.call_once(|| {
            TABLES.write().unwrap_or_else(PoisonError::into_inner).push(self);
        });
    }

    pub(crate) fn evalsha(&'static self, script: usize, keys: usize) -> Cmd {
        self.register();
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.scripts[script].sha).arg(keys);
        cmd
    }
}

/// Every script that is to be loaded.
pub(super) fn all() -> impl Iterator<Item = &'static Script> {
    SCRIPTS.register();
    let tables = TABLES.read().unwrap_or_else(PoisonError::into_inner).clone();
    tables.into_iter().flat_map(|table| table.scripts.iter())
}

/// A table of scripts by the names of their files in `lua/`, each with what is placed before its
/// body; and `evalsha`, the command that calls one.
macro_rules! scripts {
    ($table:ident: $($const:ident $name:literal $before:expr),+ $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        #[expect(non_camel_case_types, reason = "named as the files are")]
        enum Index { $($const),+ }

        pub(crate) static $table: $crate::keyspace::scripts::Table =
            $crate::keyspace::scripts::Table::new(|| vec![$(
                $crate::keyspace::scripts::Script::new(
                    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/lua/", $name, ".lua")),
                    $before,
                )
            ),+]);

        fn evalsha(script: Index, keys: usize) -> redis::Cmd {
            $table.evalsha(script as usize, keys)
        }
    };
}
pub(crate) use scripts;

scripts! {
    SCRIPTS:
    enqueue "enqueue" COPIES, push "push" QUEUES, claim "claim" QUEUES, complete "complete" LEDGERS,
    promote "promote" QUEUES, pause "pause" QUEUES, resume "resume" QUEUES, purge "purge" QUEUES,
    redrive "redrive" QUEUES, recount "recount" LEDGERS, revoke "revoke" QUEUES,
    recover "recover" QUEUES, reconcile "reconcile" QUEUES,
    advance "advance" OFFSETS, trim "trim" OFFSETS, note "note" ALONE,
    emit "emit" ALONE, hold "hold" ALONE, heads "heads" ALONE, beat "beat" ALONE,
}

/// What is placed before the body of a script.
const ALONE: &[&str] = &[];
const OFFSETS: &[&str] = &[include_str!("../../lua/offsets.lua")];
const COPIES: &[&str] = &[LEDGERS[0], LEDGERS[1], OFFSETS[0]];
/// What is placed before a script that works on queues.
pub(crate) const QUEUES: &[&str] = &[include_str!("../../lua/shared.lua")];
/// What is placed before a script that works on queues with a ledger.
pub(crate) const LEDGERS: &[&str] = &[QUEUES[0], include_str!("../../lua/ledger.lua")];

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
