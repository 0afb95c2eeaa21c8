//! The promises of each script, on real servers.

mod bounds;
mod costs;
mod delays;
mod history;
mod holdings;
mod hygiene;
mod lanes;
mod limits;
mod notifications;
mod quotas;
mod servers;
mod small;
mod views;

use std::sync::Arc;

use fairlane::id::{BotId, Offset, PipelineName, Prefix, ShardCount};
use fairlane::quotas::{NO_QUOTAS, Quota};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::{
    Call, Claim, Claimed, Complete, Completed, Completion, Enqueue, Enqueued, Exception, Fate,
    Limits, Mode, Push, Pushed, Span, Take,
};
use redis::Commands;

use crate::support::redis::{Options, RedisServer};
use crate::support::script_harness::ScriptHarness;

/// A time as servers have it: more than 2^50 µs, so that a float would lose digits.
const NOW: i64 = 1_760_000_000_000_001;
const TTL_MS: u64 = 30_000;
const SLICE_US: u64 = 10_000;

const LIMITS: Limits = Limits {
    slice_us: SLICE_US,
    linger_ms: 0,
    max_queue: 0,
    overflow_dead: true,
    dead_max: 100,
    quota: Quota::NONE,
};

fn keys(pipeline: &str) -> ShardKeys {
    let shard = ShardCount::new(1).unwrap().shards().next().unwrap();
    ShardKeys::new(&Prefix::default(), &PipelineName::parse(pipeline).unwrap(), shard)
}

fn bot(text: &str) -> BotId {
    BotId::parse(text).unwrap()
}

/// A claim of every ready bot.
fn claim_all(keys: &ShardKeys) -> Claim<'_> {
    Claim {
        keys,
        max: 64,
        bound: None,
        ttl_ms: TTL_MS,
        seen: 0,
        slice_us: SLICE_US,
        alone: false,
        isolate: 4,
    }
}

/// The completion of a lease that has removed no event yet.
fn completion(claimed: &Claimed, lease: usize, n: usize, mode: Mode) -> Completion {
    let grant = &claimed.leases[lease];
    let (bot, run, fence) = (grant.bot.clone(), Arc::clone(&claimed.run), grant.fence);
    Completion {
        bot,
        run,
        fence,
        before: 0,
        n,
        bytes: 0,
        mode,
        cost: 0,
        exceptions: Vec::new(),
        leaving: None,
        aside: None,
    }
}

fn dead(index: usize) -> Exception {
    Exception { index, fate: Fate::Dead { reason: "refused".into(), attempts: 1 } }
}

/// One shard on a private server, with a clock that the test sets.
struct Shard {
    harness: ScriptHarness,
    keys: ShardKeys,
    /// Whether its queues have a ledger.
    ledger: bool,
    _server: RedisServer,
}

impl Shard {
    fn new() -> Self {
        Self::of("p")
    }

    fn of(pipeline: &str) -> Self {
        let server = RedisServer::start(Options::default());
        let ledger = pipeline == fairlane::counters::PIPELINE;
        Self { harness: ScriptHarness::new(&server), keys: keys(pipeline), ledger, _server: server }
    }

    fn call<C: Call>(&mut self, now_us: i64, call: &C) -> C::Reply {
        self.harness.call(now_us, call).0
    }

    fn push(&mut self, now_us: i64, to: &str, events: &[&str], limits: Limits) -> Pushed {
        self.push_heard(now_us, to, events, limits).0
    }

    /// Like `push`, and also returns what the script published.
    fn push_heard(
        &mut self,
        now_us: i64,
        to: &str,
        events: &[&str],
        limits: Limits,
    ) -> (Pushed, Vec<String>) {
        let (keys, bot) = (&self.keys.clone(), &bot(to));
        let events: Vec<Vec<u8>> = events.iter().map(|event| event.as_bytes().to_vec()).collect();
        let call = Push { keys, limits, bot, events: &events, due_ms: 0, idempotency: None };
        self.harness.call(now_us, &call)
    }

    fn enqueue(&mut self, prev: Offset, last: Offset, bots: &[BotId], event: &str) -> Enqueued {
        let keys = &self.keys.clone();
        let bots = bots.iter().map(|bot| (bot.clone(), vec![event.as_bytes()])).collect();
        let call = Enqueue {
            keys,
            spans: vec![Span { log: "events", prev, last }],
            repeats: None,
            limits: LIMITS,
            quotas: &NO_QUOTAS,
            bots,
            postings: None,
            take: Take::default(),
        };
        self.call(NOW, &call)
    }

    fn claim(&mut self, now_us: i64) -> Claimed {
        let keys = self.keys.clone();
        self.call(now_us, &claim_all(&keys))
    }

    fn complete(&mut self, now_us: i64, dead_max: u64, items: &[Completion]) -> Completed {
        let keys = &self.keys.clone();
        let ledger = self.ledger;
        let quotas = &NO_QUOTAS;
        self.call(now_us, &Complete { keys, dead_max, quotas, ledger, items })
    }

    /// Dead-letters the first `n` events of the only ready bot.
    fn kill(&mut self, now_us: i64, n: usize, dead_max: u64) -> Completed {
        let claimed = self.claim(now_us);
        let item = completion(&claimed, 0, n, Mode::Release);
        let item = Completion { exceptions: (0..n).map(dead).collect(), ..item };
        self.complete(now_us, dead_max, &[item])
    }

    /// The sequences and the events of a queue.
    fn queue(&mut self, of: &str) -> Vec<(u64, String)> {
        let key = self.keys.queue(&bot(of));
        let records: Vec<Vec<u8>> = self.harness.plain().lrange(key, 0, -1).unwrap();
        let read = |record: Vec<u8>| {
            let sequence = u64::from_be_bytes(record[3..11].try_into().unwrap());
            (sequence, String::from_utf8(record[11..].to_vec()).unwrap())
        };
        records.into_iter().map(read).collect()
    }

    fn events(&mut self, of: &str) -> Vec<String> {
        self.queue(of).into_iter().map(|(_, event)| event).collect()
    }

    /// The ids of the dead letters.
    fn letters(&mut self) -> Vec<Offset> {
        let mut command = redis::cmd("XRANGE");
        command.arg(&self.keys.dlq).arg("-").arg("+");
        let letters: Vec<(String, redis::Value)> = command.query(self.harness.plain()).unwrap();
        letters.into_iter().map(|(id, _)| id.parse().unwrap()).collect()
    }
}
