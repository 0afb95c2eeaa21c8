//! One pipeline's queues. THE ORDERING CONTRACT:
//!
//! 1. Per bot and pipeline, events are *first* handled in the order in which they were queued. For
//!    events of one bus stream that is the order of the stream. Across streams and other sources it
//!    is the order in which Redis received them.
//! 2. An event is handled at least once. It leaves its queue only by a fenced completion: after its
//!    effect, or into the dead letters or the delayed events in the same script.
//! 3. A bot has at most one current lease. A worker that is suspended past its lease may still run
//!    its handler. It cannot commit, because completions carry the fence.
//! 4. A retry blocks the queue of that bot, and of no other bot. With an ordering key (`order_by`), it
//!    blocks only the events with that key, and 1. holds per bot, pipeline and key.
//! 5. There is no order across bots.
//!
//! The implementation: `lua/claim.lua` (one current lease), `lua/complete.lua` (fence and count),
//! `lua/enqueue.lua` (the copy from the bus happens once), `lua/recover.lua` (a Redis that lost its
//! last writes). The invariants of the keys are in `lua/shared.lua` and [`crate::redis::keys`].

mod aside;
mod attempts;
pub(crate) mod capability;
mod dead;
mod depth;
mod failure;
mod find;
mod follow;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod guarded;
mod holdings;
mod inspect;
mod known;
mod lease;
mod letters;
mod list;
pub(crate) mod memory;
mod next;
mod order;
mod pause;
mod push;
mod recent;
pub(crate) mod sample;
pub(crate) mod schedule;
mod sweep;
mod throttled;
pub(crate) mod wake;
mod why;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::aside::LaneAside;
pub use self::dead::{BulkStopped, DeadLetter, DeadOfBot, LetterOfBot};
pub use self::depth::Depth;
pub(crate) use self::failure::Noted;
pub use self::failure::{Failing, LastFailure};
pub(crate) use self::find::Search;
pub(crate) use self::follow::{Follower, News, Outcome, Wanted};
pub use self::holdings::Holdings;
pub use self::inspect::{BotState, BotView, PipelineView, QueuedEvent};
#[doc(hidden)]
pub use self::lease::{CLAIM_TTL, Lease, MARGIN, Sent};
pub use self::letters::{DeadGlimpses, DeadPage, PAGE_BYTES};
pub use self::list::{BotCursor, BotFilter, BotOrder, BotPage, Mark};
pub use self::next::{EventCursor, EventPage};
pub use self::order::OrderBy;
pub use self::pause::PauseNote;
pub use self::push::{PUSH_MAX, PushError, PushOptions};
pub(crate) use self::recent::Recent;
pub(crate) use self::sweep::{Bound, Deed, GROUPED, Reasons, Swept, Wish};
pub use self::throttled::Throttled;
pub use self::why::ListedBot;
use crate::id::{BotId, PipelineName, Shard, ShardCount};
use crate::ledger::Ledger;
use crate::pipeline::{Kind, Protected};
use crate::quotas::{NO_QUOTAS, Quotas};
use crate::rate::{BotRate, Change, Weight};
use crate::redis::Link;
pub use crate::redis::RedisError;
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Limits, Purge, Revoke, Set};
pub use crate::redis::scripts::{Pushed, Queued};

/// One slice in virtual time while bots compete. A bot whose last finish is at most this far ahead
/// of the clock counts as quiet. Slices shrink to this length while more bots are ready than there
/// are workers. It is short enough that one of eight workers becomes free about every millisecond.
pub const FAIR_SLICE: Duration = Duration::from_millis(10);

/// [`FAIR_SLICE`] in the unit of the scripts.
pub(crate) const FAIR_SLICE_US: u64 = 10_000;

/// Maximum number of bots of a shard for which something is set.
pub const SET_MAX: usize = 10_000;

/// A change of what is set for one bot.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BotChange {
    /// Its share; `None`: as it is.
    pub weight: Option<Weight>,
    /// Its rate.
    pub rate: Change<BotRate>,
    /// Maximum number of its events at once.
    pub burst: Change<u32>,
}

impl fmt::Display for BotChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = "";
        if let Some(weight) = self.weight {
            write!(f, "weight {weight}")?;
            before = ", ";
        }
        match self.rate {
            Change::Keep => {}
            Change::Reset => write!(f, "{before}rate default")?,
            Change::To(rate) => write!(f, "{before}rate {rate}")?,
        }
        if self.rate != Change::Keep {
            before = ", ";
        }
        match self.burst {
            Change::Keep => Ok(()),
            Change::Reset => write!(f, "{before}burst default"),
            Change::To(burst) => write!(f, "{before}burst {burst}"),
        }
    }
}

/// The queues of one pipeline, over one link. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Queue {
    name: PipelineName,
    shards: Arc<[ShardKeys]>,
    count: ShardCount,
    limits: Limits,
    quotas: Quotas,
    kind: Arc<Kind>,
    link: Arc<Link>,
}

/// The treatment of an event beyond the maximum length of its bot's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOverflow {
    /// The event becomes a dead letter.
    Dead,
    /// The event is dropped and counted.
    DropNew,
}

/// Maximum number of leases of a pipeline that receivers may hold.
pub const OPEN_MAX: u64 = 10_000;

/// The share of [`OPEN_MAX`] for each shard.
#[must_use]
pub(crate) fn open_max(shards: ShardCount) -> u64 {
    OPEN_MAX.div_ceil(u64::from(shards.get()))
}

impl Queue {
    /// The queues of `name`, of the default kind, over `link`.
    #[doc(hidden)]
    #[must_use]
    pub fn new(name: PipelineName, count: ShardCount, limits: Limits, link: Arc<Link>) -> Self {
        let shards =
            count.shards().map(|shard| ShardKeys::new(link.prefix(), &name, shard)).collect();
        let quotas = NO_QUOTAS.clone();
        Self { name, shards, count, limits, quotas, kind: Arc::default(), link }
    }

    /// The same queues with quotas of what bots may hold.
    #[doc(hidden)]
    #[must_use]
    pub fn with_quotas(self, quotas: Quotas) -> Self {
        Self { quotas, ..self }
    }

    /// The same queues over another link.
    #[doc(hidden)]
    #[must_use]
    pub fn over(&self, link: Arc<Link>) -> Self {
        Self { link, ..self.clone() }
    }

    /// The same queues, where an event beyond the maximum length is not kept, not even as a dead letter.
    pub(crate) fn dropping_new(&self) -> Self {
        let limits = Limits { overflow_dead: false, ..self.limits };
        Self { limits, ..self.clone() }
    }

    /// The same queues for a pipeline of this kind.
    #[doc(hidden)]
    #[must_use]
    pub fn of_kind(self, mut kind: Kind) -> Self {
        kind.ledger = kind.ledger.map(|ledger| guarded::guarded(&self.name, ledger));
        Self { kind: Arc::new(kind), ..self }
    }

    /// The ledger that events post to while they are queued.
    #[must_use]
    pub fn ledger(&self) -> Option<&dyn Ledger> {
        self.kind.ledger.as_deref()
    }

    /// The reason why events must not be deleted; `None`: they may be deleted.
    #[must_use]
    pub fn protected(&self) -> Option<Protected> {
        self.kind.protected
    }

    /// Whether no event of the bus is copied into these queues.
    pub(crate) fn is_off_bus(&self) -> bool {
        self.kind.off_bus
    }

    /// The pipeline's name.
    #[must_use]
    pub fn name(&self) -> &PipelineName {
        &self.name
    }

    /// The keys of every shard.
    #[doc(hidden)]
    #[must_use]
    pub fn shards(&self) -> &Arc<[ShardKeys]> {
        &self.shards
    }

    /// The keys of one shard.
    #[doc(hidden)]
    #[must_use]
    pub fn keys(&self, shard: Shard) -> &ShardKeys {
        &self.shards[shard.index()]
    }

    /// The shard of a bot.
    #[must_use]
    pub fn shard_of(&self, bot: &BotId) -> Shard {
        bot.shard(self.count)
    }

    /// The number of shards.
    #[must_use]
    pub fn shard_count(&self) -> ShardCount {
        self.count
    }

    /// The limits of the queues, with the quotas of bots without their own, at present.
    #[doc(hidden)]
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits { quota: self.quotas.general(), ..self.limits }
    }

    /// The limits of the queue of a bot, with its quotas at present.
    #[doc(hidden)]
    #[must_use]
    pub fn limits_of(&self, bot: &BotId) -> Limits {
        Limits { quota: self.quotas.of(bot), ..self.limits }
    }

    /// How much bots may hold.
    #[doc(hidden)]
    #[must_use]
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// The link in use.
    #[doc(hidden)]
    #[must_use]
    pub fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(crate) fn keys_of(&self, bot: &BotId) -> &ShardKeys {
        self.keys(self.shard_of(bot))
    }

    /// Deletes the queue of a bot, revokes its lease, and returns the number of deleted events. Does not
    /// look whether the pipeline is [protected](Self::protected): the caller must.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn purge(&self, bot: &BotId) -> Result<u64, RedisError> {
        self.link.call(&Purge { keys: self.keys_of(bot), bot }).await
    }

    /// Breaks the lease of a bot or ends its park. Returns whether there was one.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn revoke(&self, bot: &BotId) -> Result<bool, RedisError> {
        let slice_us = self.limits.slice_us;
        self.link.call(&Revoke { keys: self.keys_of(bot), bot, slice_us }).await
    }

    /// Sets the weight of a bot, relative to 1. Takes effect at the next claim.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn set_weight(
        &self,
        bot: &BotId,
        weight: impl Into<Weight>,
    ) -> Result<(), RedisError> {
        let change = BotChange { weight: Some(weight.into()), ..BotChange::default() };
        self.set(bot, change).await.map(drop)
    }

    /// Changes what is set for a bot. Takes effect at the next claim. Returns whether there was room:
    /// a shard has at most [`SET_MAX`] such bots, because the settings stay without the bot.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    #[doc(hidden)]
    pub async fn set(&self, bot: &BotId, change: BotChange) -> Result<bool, RedisError> {
        let BotChange { weight, rate, burst } = change;
        let (keys, slice_us) = (self.keys_of(bot), self.limits.slice_us);
        self.link.call(&Set { keys, bot, slice_us, max: SET_MAX, weight, rate, burst }).await
    }
}

/// The bot of a delayed event, stored as `<length of the bot id>:<bot id><event>`.
fn delayed_bot(entry: &[u8]) -> Option<BotId> {
    let colon = entry.iter().position(|&byte| byte == b':')?;
    let length: usize = std::str::from_utf8(&entry[..colon]).ok()?.parse().ok()?;
    let bot = entry.get(colon + 1..)?.get(..length)?;
    BotId::parse(std::str::from_utf8(bot).ok()?).ok()
}

#[cfg(test)]
impl Queue {
    /// A queue whose Redis cannot be reached, for tests.
    pub(crate) fn unreachable(name: &str, shards: u16) -> Self {
        let target = crate::redis::Target::new("redis://127.0.0.1:1").expect("an address");
        let link = Link::new(target, Vec::new(), 0, std::time::Duration::from_secs(1));
        let limits = Limits {
            slice_us: 0,
            linger_ms: 0,
            max_queue: 0,
            overflow_dead: false,
            dead_max: 0,
            quota: crate::quotas::Quota::NONE,
        };
        let name = PipelineName::parse(name).expect("a name");
        let count = ShardCount::new(shards).expect("in bounds");
        Self::new(name, count, limits, Arc::new(link))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_a_bot_names_what_it_changes_and_nothing_else() {
        let change =
            BotChange { weight: Some(Weight::from(3)), rate: Change::Reset, burst: Change::To(5) };
        assert_eq!(change.to_string(), "weight 3, rate default, burst 5");
        let change =
            BotChange { rate: Change::To("10/s".parse().unwrap()), ..BotChange::default() };
        assert_eq!(change.to_string(), "rate 10/s");
        assert_eq!(BotChange::default().to_string(), "");
    }

    #[test]
    fn the_bot_of_a_delayed_event_is_read_back_whatever_its_id_holds() {
        for id in ["b", "12:34", ":", "日本:"] {
            let entry = format!("{}:{id}\u{98}rest", id.len());
            assert_eq!(delayed_bot(entry.as_bytes()).unwrap().as_str(), id);
        }
        let endless = format!("{}:b", usize::MAX);
        for damaged in ["", ":", "9:short", "x:abc", "-1:a", &endless] {
            assert_eq!(delayed_bot(damaged.as_bytes()), None, "{damaged}");
        }
    }
}
