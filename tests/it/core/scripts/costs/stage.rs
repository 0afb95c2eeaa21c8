//! The stage of the situations: a server, a link to it, and a meter around single calls.

use std::time::Duration;

use fairlane::id::{BotId, Offset};
use fairlane::quotas::NO_QUOTAS;
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::{
    Call, Claim, Claimed, Complete, Completion, Enqueue, Limits, Mode, Recover, Span, Take, Verdict,
};
use fairlane::redis::{Link, Target};
use redis::Connection;

use super::super::{LIMITS, SLICE_US, bot, claim_all, completion, keys};
use super::situations;

/// An event. The queues of all situations stay below 4 KB, because the allocator of Redis takes a varying
/// number of instructions for larger blocks.
pub(super) const EVENT: [u8; 100] = [b'e'; 100];
/// The bytes of its record.
const RECORD: u64 = 111;

/// The cost of one call.
#[derive(Debug, Clone)]
pub(super) struct Cost {
    pub(super) count: u64,
    /// The parts of the count, for people.
    pub(super) detail: String,
}

/// Measures one call of a script.
pub(super) trait Meter {
    /// Before the call.
    fn start(&mut self);
    /// After the reply.
    fn stop(&mut self) -> Cost;
    /// What the counts depend on.
    fn conditions(&self) -> String;
}

/// Counts the commands that run inside a script.
pub(super) struct Commands(Connection);

impl Commands {
    pub(super) fn new(url: &str) -> Self {
        Self(connection(url))
    }
}

impl Meter for Commands {
    fn start(&mut self) {
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut self.0).unwrap();
    }

    fn stop(&mut self) -> Cost {
        let text: String = redis::cmd("INFO").arg("commandstats").query(&mut self.0).unwrap();
        let (mut count, mut scripts, mut parts) = (0, 0, Vec::new());
        for line in text.lines().filter_map(|line| line.strip_prefix("cmdstat_")) {
            let (name, rest) = line.split_once(":calls=").unwrap();
            let calls: u64 = rest.split(',').next().unwrap().parse().unwrap();
            match name {
                "evalsha" => scripts += calls,
                "config|resetstat" | "info" => {}
                _ => {
                    count += calls;
                    parts.push(format!("{calls} {}", name.to_uppercase()));
                }
            }
        }
        assert_eq!(scripts, 1, "one script between start and stop: {text}");
        parts.sort();
        Cost { count, detail: parts.join(", ") }
    }

    fn conditions(&self) -> String {
        String::new()
    }
}

pub(super) fn connection(url: &str) -> Connection {
    redis::Client::open(url).unwrap().get_connection().unwrap()
}

/// One shard on a private server, and the costs that were measured on it.
pub(super) struct Stage<M> {
    pub(super) keys: ShardKeys,
    pub(super) plain: Connection,
    link: Link,
    meter: M,
    found: Vec<(String, Cost)>,
    /// The position of the shard on the bus.
    at: Offset,
}

impl<M: Meter> Stage<M> {
    pub(super) async fn new(url: &str, meter: M) -> Self {
        situations::register();
        let link =
            Link::new(Target::new(url).unwrap(), Vec::new(), SLICE_US, Duration::from_secs(60));
        let (plain, found, at) = (connection(url), Vec::new(), Offset::default());
        let mut stage = Self { keys: keys("p"), plain, link, meter, found, at };
        stage.clear("p").await;
        stage
    }

    /// The costs since the last call, in the order of the situations.
    pub(super) fn found(&mut self) -> Vec<(String, Cost)> {
        std::mem::take(&mut self.found)
    }

    pub(super) fn conditions(&self) -> String {
        self.meter.conditions()
    }

    /// Empties the server. The following calls are for this pipeline.
    pub(super) async fn clear(&mut self, pipeline: &str) {
        redis::cmd("FLUSHALL").arg("SYNC").exec(&mut self.plain).unwrap();
        (self.keys, self.at) = (keys(pipeline), Offset { ms: 1, seq: 0 });
        let keys = &self.keys.clone();
        self.call(&Recover { keys, run: "a run id of a server", slice_us: SLICE_US }).await;
        let () = redis::Commands::hset(&mut self.plain, &keys.offsets, "events", "1-0").unwrap();
    }

    pub(super) async fn call<C: Call>(&self, call: &C) -> C::Reply {
        self.link.call(call).await.unwrap()
    }

    /// Measures this call.
    pub(super) async fn measure<C: Call>(&mut self, situation: &str, call: &C) -> C::Reply {
        self.meter.start();
        let reply = self.call(call).await;
        let cost = self.meter.stop();
        self.found.push((format!("{}: {situation}", C::NAME), cost));
        reply
    }

    /// Measures this call if the situation has a name.
    pub(super) async fn run<C: Call>(&mut self, situation: Option<&str>, call: &C) -> C::Reply {
        match situation {
            Some(situation) => self.measure(situation, call).await,
            None => self.call(call).await,
        }
    }

    /// A call that copies this number of events to each of these bots.
    pub(super) fn copy<'a>(
        &mut self,
        keys: &'a ShardKeys,
        bots: &[BotId],
        events: usize,
        limits: Limits,
    ) -> Enqueue<'a> {
        let prev = self.at;
        self.at.seq += 1;
        let bots = bots.iter().map(|bot| (bot.clone(), vec![&EVENT[..]; events])).collect();
        let (last, quotas) = (self.at, &NO_QUOTAS);
        let (postings, take) = (None, Take::default());
        Enqueue {
            keys,
            spans: vec![Span { log: "events", prev, last }],
            repeats: None,
            limits,
            quotas,
            bots,
            postings,
            take,
        }
    }

    /// Copies this number of events to each of these bots.
    pub(super) async fn fill(&mut self, bots: &[BotId], events: usize) {
        let keys = &self.keys.clone();
        let call = self.copy(keys, bots, events, LIMITS);
        self.call(&call).await;
    }

    pub(super) async fn claim(&mut self) -> Claimed {
        let keys = &self.keys.clone();
        self.call(&claim_all(keys)).await
    }

    /// Leases of these bots, each with this number of events, on an empty server.
    pub(super) async fn leases(&mut self, bots: usize, events: usize) -> Claimed {
        self.clear("p").await;
        self.fill(&some(bots), events).await;
        let claimed = self.claim().await;
        assert_eq!(claimed.leases.len(), bots);
        claimed
    }

    /// Completes the items, which must be current.
    pub(super) async fn complete(&mut self, situation: &str, items: &[Completion]) {
        let keys = &self.keys.clone();
        let ledger = items.iter().any(|item| item.leaving.is_some());
        let call = Complete { keys, dead_max: 100, quotas: &NO_QUOTAS, ledger, items };
        let done = self.measure(situation, &call).await;
        assert!(
            done.verdicts.iter().all(|verdict| *verdict == Verdict::Ok),
            "{situation}: {done:?}"
        );
    }

    /// Measures a completion of the first `n` events of each of these leases.
    pub(super) async fn end(&mut self, situation: &str, claimed: &Claimed, n: usize, mode: Mode) {
        let items: Vec<Completion> =
            (0..claimed.leases.len()).map(|at| ended(claimed, at, n, mode)).collect();
        self.complete(situation, &items).await;
    }

    /// A claim of the expired leases and parks too.
    pub(super) async fn claim_expiring(&mut self, ttl_ms: u64) -> Claimed {
        let keys = &self.keys.clone();
        self.call(&Claim { ttl_ms, ..claim_all(keys) }).await
    }
}

/// A completion with the bytes and a cost, as a worker reports it.
pub(super) fn ended(claimed: &Claimed, lease: usize, n: usize, mode: Mode) -> Completion {
    let bytes = RECORD * u64::try_from(n).unwrap();
    Completion { bytes, cost: 1_000, ..completion(claimed, lease, n, mode) }
}

/// This number of bots.
pub(super) fn some(bots: usize) -> Vec<BotId> {
    (0..bots).map(|n| bot(&format!("bot-{n}"))).collect()
}
