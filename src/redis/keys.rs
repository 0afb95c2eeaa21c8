//! The table of all Redis keys of the core. No other module creates one. A product with further
//! keys has its own table, in its `keys.rs`.
//!
//! `fl` stands for `redis.prefix`, see [`Prefix`]: environments with different prefixes share a
//! Redis, but no keys. The bus streams have their own names (`bus.streams`). Their default names,
//! and that of the stream of unreadable entries, also start with the prefix, or with `fairlane` for
//! the prefix `fl`.
//!
//! All keys of one pipeline and shard share the hash tag `{<pipeline>:<shard>}`, so a script uses
//! one cluster slot. An idle bot has no key and no field (except `weight`, `paused` and keys with a
//! TTL).
//!
//! | key | type | meaning |
//! |---|---|---|
//! | `fl:{p:s}:meta` | hash | `v` virtual clock µs, `f` last fence, `seq` last sequence, `depth` events queued, `run` server run id, `paused` since when, by whom and why, `open` leases handed over to receivers, `lanes` bots with lanes that are set aside |
//! | `fl:{p:s}:ctl` | sorted set | the control set: ready bots, each once |
//! | `fl:{p:s}:busy` | sorted set | leased or parked bots → deadline, ms since 1970 |
//! | `fl:{p:s}:own` | hash | bot → `fence\|acked\|start\|confirmed` of the current lease; confirmed: 0, 1, 2 handed over |
//! | `fl:{p:s}:att` | hash | bot → `suspect\|lost\|failed\|isolate` since progress, and its lanes that are set aside |
//! | `fl:{p:s}:fin` | sorted set | bot → last virtual finish, while ahead of the clock |
//! | `fl:{p:s}:paused` | set | bots that an operator paused |
//! | `fl:{p:s}:paused-why` | hash | paused bot → time in ms, and as JSON who paused it and why |
//! | `fl:{p:s}:weight` | hash | what is set for bots: a weight, or `weight\|rate\|burst`; bounded |
//! | `fl:{p:s}:rate` | sorted set, TTL | bots with a rate → when their bucket is full again, µs |
//! | `fl:{p:s}:slow` | sorted set, TTL | bots whose events wait for tokens → since when, ms |
//! | `fl:{p:0}:slots` | hash, TTL | process → slices it may have under way, until when |
//! | `fl:{p:0}:tokens` | string, TTL | when the bucket of the pipeline is full again, µs |
//! | `fl:{p:s}:held` | hash | what bots hold, for their quotas: `q<bot>` bytes queued; `a<bot>` events of lanes that are set aside; `l<bot>`, `L<bot>` delayed events, their bytes; `d<bot>`, `D<bot>` dead letters, their bytes; `n<bot>`, `N<bot>` pending records of a product, their bytes |
//! | `fl:{p:s}:hwm` | hash | log of the bus → last offset copied into this shard |
//! | `fl:{p:s}:names-now`, `fl:{p:s}:names-before` | hash, TTL | names of the copied events, if repetitions are dropped |
//! | `fl:{p:s}:q:<bot>` | list | the records, oldest at the head |
//! | `fl:{p:s}:a:<lane>:<bot>` | list | the records of a lane that is set aside, oldest at the head |
//! | `fl:{p:s}:due` | sorted set | delayed events: id → ms since 1970 |
//! | `fl:{p:s}:later` | hash | delayed events: id → bot and event |
//! | `fl:{p:s}:dlq` | stream | dead letters |
//! | `fl:{p:s}:failure:<bot>` | string, TTL | when and why its handler failed last, for operators |
//! | `fl:{p:s}:failing:<bot>` | string, TTL | since when its handler fails, and the sequence of the event to retry, for operators |
//! | `fl:{p:s}:history` | stream, TTL | the attempts that completed their slices, several in an entry |
//! | `fl:{p:s}:history-failed` | hash, TTL | bot → its attempts that failed |
//! | `fl:{p:s}:history-bots` | sorted set, TTL | bots with attempts that failed → when last, ms |
//! | `fl:{p:s}:history-bytes` | hash, TTL | bytes of `done` and `failed` attempts |
//! | `fl:{p:s}:idem:<key>` | string, TTL | idempotency keys |
//! | `fl:{p:s}:replay:<id>` | hash, TTL | stream and bot → the offset of the last event that a replay put |
//! | `fl:{p:s}:keys:<bot>`, `fl:{p:s}:imports:<bot>` | string, TTL | meter of its idempotency keys: when the whole quota is free again, µs |
//! | `fl:{p:s}:unflushed:<bot>` | hash | ledger: `v<account>` amounts queued, `r<account>` replacements queued, `r` those of all accounts |
//! | `fl:{p:s}:total:<generation>:<bot>` | hash, TTL | ledger: account → `run\|total` cached; two generations of a day |
//! | `fl:{p:s}:acked:<bot>` | string, TTL | ledger: highest completed sequence |
//! | `fl:{p:s}:wake` | channel | scores, deadlines and due times that became lower |
//! | `fl:pipelines` | hash | names of all pipelines that have run → when they were first seen |
//! | `fl:replay:<id>` | string, TTL | a replay: what it puts, and how far it is |
//! | `fl:shards` | string | the number of shards, fixed when the data is created |
//! | `fl:formats` | hash | the formats of the data, and the version that started last |
//! | `fl:lease-key` | string | 32 random bytes that sign lease capabilities and list cursors |
//! | `fl:processes` | hash | running process → time and content of its last update |
//! | `fl:sampler` | string, TTL | the process that samples the shared values |
//! | `fl:audit` | stream | the last 1,000 actions of operators on pipelines, bots and dead letters |
//! | `fl:audit-often` | stream | the last 1,000 actions that may be frequent: by tokens for certain bots, and on the records of products |
//! | `fl:trend` | list, TTL | depth, age, rates and calls of the pipelines in the last 15 minutes, for charts |
//! | `fl:trend-minutes` | list, TTL | the same in the last 24 hours, a point a minute |
//! | `fl:{<bus>}:readers` | hash, TTL | the processes that read a bus → until when; its logs → the process that reads them |
//! | `fl:{<stream>}:seen:<id>` | string, TTL | ids of events that handlers published |
//! | `fl:{<bus>}:logs` | hash | logs of a bus that gets new ones → whether they may be read |
//! | `fl:{<log>}:read` | hash | the read position of a log of the bus: `offset`, `entries`, `lag` (all only for the lag), `copied` (for publishers) |
//! | `fl:{<log>}:starts` | hash | pipeline → the offset after which it takes the entries of a log |
//! | `fl:{replicas-<number>}` | string, TTL | written before replicas are waited for (`redis.wait_replicas`) |
//! | `fl:{check-<number>}:<id>` | any, TTL | test keys of `fairlane check` |
//! | `fairlane:invalid` | stream | bus entries that could not be read, bounded |

use super::slot::slot_of;
use crate::id::{BotId, Lane, PipelineName, Prefix, Shard};

macro_rules! global {
    ($($(#[$doc:meta])* $name:ident $key:literal),+ $(,)?) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(prefix: &Prefix) -> String {
            format!(concat!("{}:", $key), prefix)
        })+
    };
}
global! {
    /// The names of all pipelines that have run.
    pipelines "pipelines",
    /// The number of shards.
    shards "shards",
    /// The formats of the data.
    formats "formats",
    /// The key that signs lease capabilities and list cursors.
    signing_key "lease-key",
    /// The registry of running processes.
    processes "processes",
    /// The lock of the process that samples shared values.
    sampler "sampler",
    /// The recent state of the pipelines.
    trend "trend",
    /// The state of the pipelines in the last 24 hours.
    trend_minutes "trend-minutes",
    /// Actions of operators.
    audit "audit",
    /// Actions that may be frequent.
    audit_often "audit-often",
}

/// The readers of a bus, and the logs that each reads.
#[must_use]
pub fn readers(prefix: &Prefix, bus: &str) -> String {
    format!("{prefix}:{{{bus}}}:readers")
}

/// The logs of a bus, and whether they may be read.
#[must_use]
pub fn logs(prefix: &Prefix, bus: &str) -> String {
    format!("{prefix}:{{{bus}}}:logs")
}

/// The read position of `stream`.
#[must_use]
pub fn read(prefix: &Prefix, stream: &str) -> String {
    format!("{prefix}:{{{stream}}}:read")
}

/// The start of each pipeline on `stream`.
#[must_use]
pub fn starts(prefix: &Prefix, stream: &str) -> String {
    format!("{prefix}:{{{stream}}}:starts")
}

/// The pattern of the keys of [`starts`]. Other keys may match too: use [`is_starts`].
#[must_use]
pub fn all_starts(prefix: &Prefix) -> String {
    format!("{prefix}:{{*}}:starts")
}

/// Whether `key` is one of [`starts`].
#[must_use]
pub fn is_starts(prefix: &Prefix, key: &[u8]) -> bool {
    let stream = within(prefix, key).and_then(|key| key.strip_suffix(b"}:starts"));
    // The name of a bot may look like the end of such a key.
    stream.is_some_and(|stream| !stream.contains(&b'}'))
}

/// The pattern of the keys of [`shards`] of every environment.
pub(super) const ALL_SHARDS: &str = "*:shards";
/// A pattern for the keys of [`read`] and [`starts`] of every environment. A few other keys match
/// too.
pub(super) const ALL_READ: &str = "*}:[rs]*[ds]";

/// The environment of a key of [`shards`].
pub(super) fn environment(key: &[u8]) -> Option<Prefix> {
    Prefix::parse(std::str::from_utf8(key).ok()?.strip_suffix(":shards")?).ok()
}

/// The environment and the stream of a key of [`read`] or [`starts`].
pub(super) fn reading(key: &[u8]) -> Option<(Prefix, &str)> {
    let (prefix, rest) = std::str::from_utf8(key).ok()?.split_once(":{")?;
    let (stream, name) = rest.split_once("}:")?;
    let prefix = Prefix::parse(prefix).ok()?;
    matches!(name, "read" | "starts").then_some((prefix, stream))
}

/// The key that remembers that a handler published the event `id` to `stream`.
#[must_use]
pub fn seen(prefix: &Prefix, stream: &str, id: &str) -> String {
    format!("{prefix}:{{{stream}}}:seen:{id}")
}

/// A replay.
#[must_use]
pub fn replay(prefix: &Prefix, id: &str) -> String {
    format!("{prefix}:replay:{id}")
}

/// A test key. `number` determines its slot, `id` separates concurrent tests.
#[must_use]
pub fn check(prefix: &Prefix, number: u32, id: &str) -> String {
    format!("{prefix}:{{check-{number}}}:{id}")
}

/// The key that is written before replicas are waited for. `number` determines its slot.
#[must_use]
pub fn replicas(prefix: &Prefix, number: u32) -> String {
    format!("{prefix}:{{replicas-{number}}}")
}

/// A pattern for `SCAN` that every key of `pipeline` matches. Other keys may match too: use
/// [`belongs_to`].
#[must_use]
pub fn pattern(prefix: &Prefix, pipeline: &PipelineName) -> String {
    // Neither the characters of a pipeline's name nor braces are special in a pattern.
    format!("{prefix}:{{{pipeline}:*}}:*")
}

/// Whether `key` is one of the keys of `pipeline`.
///
/// The keys of a bus stream named like the pipeline (`fl:{log:events}:read`) are not.
#[must_use]
pub fn belongs_to(prefix: &Prefix, pipeline: &PipelineName, key: &[u8]) -> bool {
    let name = pipeline.as_str().as_bytes();
    let rest = within(prefix, key).and_then(|key| key.strip_prefix(name));
    let Some(rest) = rest.and_then(|rest| rest.strip_prefix(b":")) else { return false };
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let name = rest[digits..].strip_prefix(b"}:");
    digits > 0
        && name.is_some_and(|name| !matches!(name, b"logs" | b"read" | b"readers" | b"starts"))
}

/// The part of a key after its hash tag.
fn within<'a>(prefix: &Prefix, key: &'a [u8]) -> Option<&'a [u8]> {
    key.strip_prefix(prefix.as_str().as_bytes())?.strip_prefix(b":{")
}

/// The keys of one pipeline and shard.
#[derive(Debug, Clone)]
pub struct ShardKeys {
    prefix: String,
    slot: u16,
    /// The eight keys that every queue script declares first, in the order of `lua/shared.lua`.
    pub base: [String; 8],
    /// Weights, rates and bursts of single bots.
    pub weight: String,
    /// Who paused bots, when, and why.
    pub pauses: String,
    /// When the buckets of bots with a rate are full again.
    pub rate: String,
    /// Bots whose events wait for tokens, and since when.
    pub slow: String,
    /// The slices that processes may have under way; of the first shard.
    pub slots: String,
    /// When the bucket of the pipeline is full again; of the first shard.
    pub tokens: String,
    /// Offsets.
    pub offsets: String,
    /// The names of the last copied events, and of those before them.
    pub names_now: String,
    /// See [`Self::names_now`].
    pub names_before: String,
    /// Dead letters.
    pub dlq: String,
    /// Due times.
    pub due: String,
    /// Delayed events.
    pub later: String,
    /// What is kept of attempts, in the order of `lua/record.lua`.
    pub history: [String; 4],
    wake: String,
}

impl ShardKeys {
    /// The keys of `shard` of `pipeline`.
    #[must_use]
    pub fn new(prefix: &Prefix, pipeline: &PipelineName, shard: Shard) -> Self {
        let prefix = format!("{prefix}:{{{pipeline}:{shard}}}:");
        let key = |name: &str| format!("{prefix}{name}");
        Self {
            base: ["meta", "ctl", "busy", "own", "att", "fin", "paused", "held"].map(key),
            weight: key("weight"),
            pauses: key("paused-why"),
            rate: key("rate"),
            slow: key("slow"),
            slots: key("slots"),
            tokens: key("tokens"),
            offsets: key("hwm"),
            names_now: key("names-now"),
            names_before: key("names-before"),
            dlq: key("dlq"),
            due: key("due"),
            later: key("later"),
            history: ["history", "history-failed", "history-bots", "history-bytes"].map(key),
            wake: key("wake"),
            slot: slot_of(prefix.as_bytes()),
            prefix,
        }
    }

    /// The prefix of all keys of the shard.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Their cluster slot.
    #[must_use]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Clock, fence, sequence, depth.
    #[must_use]
    pub fn meta(&self) -> &str {
        &self.base[0]
    }

    /// The control set.
    #[must_use]
    pub fn ready(&self) -> &str {
        &self.base[1]
    }

    /// Leased and parked bots.
    #[must_use]
    pub fn busy(&self) -> &str {
        &self.base[2]
    }

    /// Leases.
    #[must_use]
    pub fn owners(&self) -> &str {
        &self.base[3]
    }

    /// Attempts.
    #[must_use]
    pub fn attempts(&self) -> &str {
        &self.base[4]
    }

    /// Virtual finishes.
    #[must_use]
    pub fn finishes(&self) -> &str {
        &self.base[5]
    }

    /// Paused bots.
    #[must_use]
    pub fn paused(&self) -> &str {
        &self.base[6]
    }

    /// What bots hold.
    #[must_use]
    pub fn held(&self) -> &str {
        &self.base[7]
    }

    /// The wake channel.
    #[must_use]
    pub fn wake(&self) -> &str {
        &self.wake
    }

    /// The queue of one bot.
    #[must_use]
    pub fn queue(&self, bot: &BotId) -> String {
        self.of_bot("q:", bot)
    }

    /// The events of one lane of one bot that is set aside.
    #[must_use]
    pub fn lane(&self, lane: Lane, bot: &BotId) -> String {
        self.of_bot(&format!("a:{lane}:"), bot)
    }

    /// When and why the handler of one bot failed last.
    #[must_use]
    pub fn failure(&self, bot: &BotId) -> String {
        self.of_bot("failure:", bot)
    }

    /// Since when the handler of one bot fails.
    #[must_use]
    pub fn failing(&self, bot: &BotId) -> String {
        self.of_bot("failing:", bot)
    }

    /// The ledger of one bot's queue, in the order of `lua/ledger.lua`.
    #[must_use]
    pub fn ledger(&self, bot: &BotId) -> [String; 4] {
        ["unflushed:", "total:0:", "total:1:", "acked:"].map(|name| self.of_bot(name, bot))
    }

    /// A key of one bot that starts with `name`.
    pub(crate) fn of_bot(&self, name: &str, bot: &BotId) -> String {
        let mut key = String::with_capacity(self.prefix.len() + name.len() + bot.as_str().len());
        key.push_str(&self.prefix);
        key.push_str(name);
        key.push_str(bot.as_str());
        key
    }

    /// The meter of the idempotency keys of one bot.
    #[must_use]
    pub fn keys_meter(&self, bot: &BotId) -> String {
        self.of_bot("keys:", bot)
    }

    /// The meter of the keys of imports of one bot.
    #[must_use]
    pub fn imports_meter(&self, bot: &BotId) -> String {
        self.of_bot("imports:", bot)
    }

    /// The positions of the bots in a replay.
    #[must_use]
    pub fn replay(&self, id: &str) -> String {
        format!("{}replay:{id}", self.prefix)
    }

    /// The key that remembers an idempotency key.
    #[must_use]
    pub fn idempotency(&self, key: &str) -> String {
        format!("{}idem:{key}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ShardCount;

    #[test]
    fn the_environments_of_a_redis_are_told_by_their_keys() {
        let other = Prefix::parse("staging").unwrap();
        assert_eq!(environment(shards(&other).as_bytes()), Some(other.clone()));
        for key in ["shards", "a:b:shards", ":shards", "fl:{x:1}:q::shards"] {
            assert_eq!(environment(key.as_bytes()), None, "{key}");
        }
        for key in [read(&other, "fairlane:events"), starts(&other, "fairlane:events")] {
            let expected = Some((other.clone(), "fairlane:events"));
            assert_eq!(reading(key.as_bytes()), expected, "{key}");
        }
        let pipeline = PipelineName::parse("log").unwrap();
        let shard = ShardCount::new(1).unwrap().shards().next().unwrap();
        let keys = ShardKeys::new(&other, &pipeline, shard);
        let bot = BotId::parse("}:read").unwrap();
        assert_eq!(reading(keys.queue(&bot).as_bytes()), None);
        for wrong in ["", "a:b", "a{b", "a}", "a b", "a*", &"a".repeat(33)] {
            assert!(Prefix::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_key_of_a_bot_is_taken_for_the_starts_of_a_stream() {
        let prefix = Prefix::default();
        assert!(is_starts(&prefix, starts(&prefix, "fairlane:events").as_bytes()));
        let pipeline = PipelineName::parse("log").unwrap();
        let keys = ShardKeys::new(
            &prefix,
            &pipeline,
            ShardCount::new(1).unwrap().shards().next().unwrap(),
        );
        let bot = BotId::parse("}:starts").unwrap();
        for key in
            [keys.queue(&bot), keys.failure(&bot), read(&prefix, "log:3"), "fl:shards".to_owned()]
        {
            assert!(!is_starts(&prefix, key.as_bytes()), "{key}");
        }
    }

    #[test]
    fn a_pipeline_owns_the_keys_of_its_shards_and_no_others() {
        let (prefix, pipeline) = (Prefix::default(), PipelineName::parse("log").unwrap());
        let bot = BotId::parse("} strange: *").unwrap();
        for shard in ShardCount::new(12).unwrap().shards() {
            let keys = ShardKeys::new(&prefix, &pipeline, shard);
            for key in keys.base.iter().chain([&keys.dlq, &keys.queue(&bot)]) {
                assert!(belongs_to(&prefix, &pipeline, key.as_bytes()), "{key}");
            }
        }
        for foreign in [
            "fl:{log2:0}:meta",
            "fl:{lo:0}:meta",
            "fl:{log:0x}:meta",
            "fl:{log:}:meta",
            "fl:pipelines",
            "fl2:{log:0}:meta",
            "other:{log:0}:meta",
            &read(&prefix, "log:events"),
            &readers(&prefix, "log:events"),
            &read(&prefix, "log:3"),
            &readers(&prefix, "log:3"),
            &starts(&prefix, "log:3"),
        ] {
            assert!(!belongs_to(&prefix, &pipeline, foreign.as_bytes()), "{foreign}");
        }
    }
}
