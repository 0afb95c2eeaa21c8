//! One typed call per `lua/*.lua`, with the same name. No other code runs a script.
//!
//! A [`Call`] knows its script, its command and how to parse the reply; [`super::Link`] sends
//! calls.

mod assemble;
mod copy;
mod history;
mod holdings;
mod lease;
mod ledger;
mod limits;
mod operate;
mod read;
mod replay;

use std::sync::{LazyLock, Once, PoisonError, RwLock};

use redis::{Cmd, Value};

use self::assemble::assemble;
pub use self::copy::{
    Advance, Advanced, Due, Emit, Enqueue, Enqueued, EventName, FindDue, Promote, Promoted, Push,
    Pushed, Repeats, Span, Take, Taken, TakenLease,
};
pub use self::history::{Kept, Record};
pub use self::holdings::{Audit, Audited, DropLetters, Dropped, Dropping};
pub use self::lease::{
    AsideChange, Attempts, Claim, Claimed, Complete, Completed, Completion, Exception, Fate, Grant,
    Mode, Verdict,
};
pub use self::ledger::{Postings, Recount};
pub use self::limits::{Budget, Budgeted, Permit, Permitted, Set};
pub use self::operate::{
    Act, Beat, Head, Heads, Hold, Note, Pause, Present, Purge, Readers, Reconcile, Reconciled,
    Recover, Redrive, Resume, Revoke, Trim,
};
pub use self::read::{
    Arrived, LetterPortion, Letters, Part, Peek, Peeked, RawLetter, ReadLane, ReadSlice,
};
pub use self::replay::{Refused, Replay, Replayed};
use super::reply::{Reply, ReplyError};
use crate::quotas::{NAMES, Quota, QuotaExceeded};

/// A script as it is loaded.
pub(crate) struct Script {
    pub(super) code: String,
    sha: String,
}

impl Script {
    #[expect(clippy::disallowed_methods, reason = "the one place that knows scripts")]
    pub(crate) fn new(file: &str, shared: &[&str]) -> Self {
        let code = assemble(file, shared);
        let sha = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha }
    }
}

/// The scripts of the core, or those of a product. See `scripts!`.
pub struct Table {
    scripts: LazyLock<Vec<Script>>,
    registered: Once,
}

/// All tables in use.
static TABLES: RwLock<Vec<&'static Table>> = RwLock::new(Vec::new());

impl Table {
    pub(crate) const fn new(scripts: fn() -> Vec<Script>) -> Self {
        Self { scripts: LazyLock::new(scripts), registered: Once::new() }
    }

    /// Registers the scripts, so that all later connections load them. An earlier connection is
    /// renewed when it first calls one of them, as after `SCRIPT FLUSH`.
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

/// All registered scripts.
pub(super) fn all() -> impl Iterator<Item = &'static Script> {
    SCRIPTS.register();
    let tables = TABLES.read().unwrap_or_else(PoisonError::into_inner).clone();
    tables.into_iter().flat_map(|table| table.scripts.iter())
}

/// A table of scripts by the names of their files in `lua/`, each with the shared code before its
/// body; and `evalsha`, which creates the command that calls one.
macro_rules! scripts {
    ($table:ident: $($const:ident $name:literal $before:expr),+ $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        #[expect(non_camel_case_types, reason = "named as the files are")]
        enum Index { $($const),+ }

        pub(crate) static $table: $crate::redis::scripts::Table =
            $crate::redis::scripts::Table::new(|| vec![$(
                $crate::redis::scripts::Script::new(
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
    promote "promote" QUEUES, due "due" QUEUES, pause "pause" QUEUES, resume "resume" QUEUES, purge "purge" QUEUES,
    redrive "redrive" QUEUES, recount "recount" LEDGERS, revoke "revoke" QUEUES,
    recover "recover" QUEUES, reconcile "reconcile" QUEUES, drop_letters "drop_letters" QUEUES,
    audit "audit" QUEUES,
    advance "advance" OFFSETS, trim "trim" OFFSETS, note "note" ALONE,
    emit "emit" ALONE, hold "hold" ALONE, readers "readers" ALONE, heads "heads" ALONE, slice "slice" ALONE, beat "beat" ALONE,
    present "present" ALONE,
    peek "peek" ALONE, arrived "arrived" ALONE, letters "letters" ALONE,
    record "record" ALONE, replay "replay" REPLAYS,
    permit "permit" QUEUES, set "set" QUEUES, budget "budget" QUEUES, act "act" ALONE,
}

/// The shared code before the body of a script.
const ALONE: &[&str] = &[];
const OFFSETS: &[&str] = &[include_str!("../../../lua/offsets.lua")];
const REPLAYS: &[&str] = &[QUEUES[0], OFFSETS[0]];
const COPIES: &[&str] =
    &[LEDGERS[0], LEDGERS[1], OFFSETS[0], include_str!("../../../lua/repeats.lua")];
/// The shared code of scripts that work on queues.
pub(crate) const QUEUES: &[&str] = &[include_str!("../../../lua/shared.lua")];
/// The shared code of scripts that work on queues with a ledger.
pub(crate) const LEDGERS: &[&str] = &[QUEUES[0], include_str!("../../../lua/ledger.lua")];

/// A call of one script.
pub trait Call {
    /// The type of the parsed reply.
    type Reply;
    /// The name of the script: file, metric label.
    const NAME: &'static str;
    /// Whether its result is used only once replicas have the write, if the target asks for that.
    /// False for reads, and for writes whose loss in a failover is harmless: leases, locks,
    /// samples, positions of trimming.
    const LASTING: bool = true;
    /// The same for one call.
    fn is_lasting(&self) -> bool {
        Self::LASTING
    }
    /// The command that runs it.
    fn command(&self) -> Cmd;
    /// Parses the reply.
    ///
    /// # Errors
    /// If the reply does not have the structure of the script's contract.
    fn reply(value: Value) -> Result<Self::Reply, ReplyError>;
}

/// The refusal `{'QUOTA', name, held, limit}`, which any script that adds data may answer.
#[must_use]
pub fn exceeded(value: &Value) -> Option<QuotaExceeded> {
    let Value::Array(parts) = value else { return None };
    let [Value::BulkString(verdict), Value::BulkString(name), Value::Int(held), Value::Int(limit)] =
        &parts[..]
    else {
        return None;
    };
    let name = NAMES.into_iter().find(|known| known.as_bytes() == name.as_slice())?;
    let (held, limit) = (held.unsigned_abs(), limit.unsigned_abs());
    (verdict == b"QUOTA").then_some(QuotaExceeded { name, held, limit })
}

/// The limits of a queue and of its dead letters.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How far ahead of the clock the last finish of a quiet bot may be, µs.
    pub slice_us: u64,
    /// How long a bot that becomes ready waits for more events, ms.
    pub linger_ms: u64,
    /// Maximum number of events per bot; 0: no bound.
    pub max_queue: u64,
    /// Whether events beyond `max_queue` become dead letters; otherwise they are dropped.
    pub overflow_dead: bool,
    /// Maximum number of dead letters per shard.
    pub dead_max: u64,
    /// The maximum that a bot may hold.
    pub quota: Quota,
}

impl Limits {
    fn overflow(self) -> &'static str {
        if self.overflow_dead { "dead" } else { "drop_new" }
    }
}

/// The result of queueing events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queued {
    /// Number of queued events.
    pub appended: u64,
    /// Number of events that became dead letters because a queue was full.
    pub dead: u64,
    /// Number of events that were dropped because a queue was full.
    pub dropped: u64,
    /// Number of dead letters that were deleted.
    pub letters_removed: u64,
    /// Number of events that exceeded the quota of their bot.
    pub over_quota: u64,
    /// Number of deleted dead letters that exceeded the quota of their bot.
    pub letters_over_quota: u64,
    /// The sum of the amounts that were posted to the ledger: none of events that were not queued.
    pub posted: u64,
}

impl Queued {
    fn read(reply: &mut Reply) -> Result<Self, ReplyError> {
        Ok(Self {
            appended: reply.number()?,
            dead: reply.number()?,
            dropped: reply.number()?,
            letters_removed: reply.number()?,
            over_quota: reply.number()?,
            letters_over_quota: reply.number()?,
            posted: 0,
        })
    }
}
