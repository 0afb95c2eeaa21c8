//! Views of ads, counted by processes that are killed, frozen and cut off at every step of a flush.
//! Each view counts once, in the total and in its day.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use mongodb::bson::doc;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::watch;

use crate::support::counter_fleet::{Ad, Node, Stores, Sums, View, judge, letters};
use crate::support::http::Client;
use crate::support::interceptor::{Interception, Interceptor, Matcher};
use crate::support::kills::{Kill, Kills};
use crate::support::mongo_proxy::{on, on_any};
use crate::support::proxy::holds;
use crate::support::redis::{Persistence, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const TOTALS: &str = "counters_totals";
const DAILY: &str = "counters_daily";

/// Matches a completion that takes views of these ads out of a queue. `mode` says how it ends the
/// lease.
fn completion(ads: &'static str, mode: &'static str) -> Matcher {
    holds(["}:later\r\n", "}:acked:", ads, mode])
}

/// The steps of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    BeforeTheWrite,
    TotalsWritten,
    DaysWritten,
    BeforeTheCompletion,
    InTheCompletion,
    AfterTheCompletion,
}

const STEPS: [Step; 6] = [
    Step::BeforeTheWrite,
    Step::TotalsWritten,
    Step::DaysWritten,
    Step::BeforeTheCompletion,
    Step::InTheCompletion,
    Step::AfterTheCompletion,
];

impl Step {
    /// How long a process may take to reach this step. Only a process with a slice of more than 250
    /// views completes it in parts.
    fn patience(self) -> Duration {
        Duration::from_secs(if self == Self::InTheCompletion { 20 } else { 5 })
    }

    /// Sets interceptors that all catch something when the process is at this step.
    fn interceptors(self, node: &Node) -> Vec<Interceptor> {
        let mongo = |collection, interception| {
            node.mongo.intercept(on("update", collection), 1, interception)
        };
        let redis =
            |mode, interception| node.redis.intercept(completion("ad-", mode), 1, interception);
        match self {
            Self::BeforeTheWrite => {
                vec![
                    mongo(TOTALS, Interception::HoldCommand),
                    mongo(DAILY, Interception::HoldCommand),
                ]
            }
            Self::TotalsWritten => {
                vec![mongo(DAILY, Interception::HoldCommand), mongo(TOTALS, Interception::Watch)]
            }
            Self::DaysWritten => {
                vec![mongo(TOTALS, Interception::HoldCommand), mongo(DAILY, Interception::Watch)]
            }
            Self::BeforeTheCompletion => vec![redis("", Interception::HoldCommand)],
            Self::InTheCompletion => vec![redis("\r\nkeep\r\n", Interception::HoldReply)],
            Self::AfterTheCompletion => vec![redis("\r\nrelease\r\n", Interception::HoldReply)],
        }
    }
}

/// 2,000 ads of 24 bots.
const BOTS: u64 = 24;
const ADS: u64 = 2_000;
/// Maximum of views that are acknowledged and not stored yet. It keeps a slow machine from falling
/// behind, and is enough for slices that are completed in parts.
const OUTSTANDING_MAX: u64 = 20_000;

fn ad(number: u64) -> Ad {
    (format!("bot-{}", number % BOTS), format!("ad-{number}"))
}

/// State that the writers share.
struct Site<'a> {
    stores: &'a Stores,
    /// Clients of the current addresses of the processes.
    clients: RefCell<Vec<Client>>,
    kills: Kills<Step>,
    /// Changes with each kill.
    killed: watch::Sender<()>,
    acknowledged: RefCell<Sums>,
    /// The views that MongoDB has stored, and when it was asked.
    stored: Cell<(Instant, u64)>,
    /// How many processes wait to be killed in the middle of a completion.
    need_long_slices: Cell<u32>,
}

impl Site<'_> {
    /// Waits up to 300 ms for the next kill. Returns whether the writers should continue.
    async fn goes_on(&self) -> bool {
        let mut killed = self.killed.subscribe();
        let next = tokio::time::timeout(Duration::from_millis(300), killed.changed());
        let _ = next.await;
        !self.kills.are_over()
    }

    /// Whether there is enough work queued. Asks MongoDB once a second, because it is slow. In between, more
    /// may be stored than it said.
    async fn is_busy(&self) -> bool {
        let acknowledged: u64 = self.acknowledged.borrow().values().sum();
        let (asked, mut stored) = self.stored.get();
        if asked.elapsed() > Duration::from_secs(1) {
            // The other publisher does not ask meanwhile.
            self.stored.set((Instant::now(), stored));
            stored = self.stores.stored_views().await;
            self.stored.set((Instant::now(), stored));
        }
        acknowledged.saturating_sub(stored) > OUTSTANDING_MAX
    }

    fn acknowledge(&self, view: &View) -> u64 {
        let mut all = self.acknowledged.borrow_mut();
        let sum = all.entry(view.ad.clone()).or_default();
        *sum += view.n;
        *sum
    }

    /// Counts views over HTTP. Some ads belong to this caller alone, and every total of those must
    /// be right.
    async fn call(&self, writer: u64) {
        let mut random = StdRng::seed_from_u64(writer);
        while self.goes_on().await {
            for _ in 0..15 {
                let number = random.random_range(0..ADS);
                // Each caller has a quarter of the ads to itself, and all writers share half of
                // them.
                let number = if number % 4 < 2 { number / 4 * 4 + writer } else { number };
                let (bot, id) = ad(number);
                let view = View::new(&bot, &id, random.random_range(1..=3));
                let pick = || {
                    let clients = self.clients.borrow();
                    clients[random.random_range(0..clients.len())].clone()
                };
                let told = view.count(pick).await;
                let sum = self.acknowledge(&view);
                // Views of shared ads may still be on the bus.
                let right = told == Some(sum) || number % 4 >= 2;
                assert!(told.is_none() || right, "{view:?}: told {told:?}, {sum} acknowledged");
            }
        }
    }

    /// Publishes bursts on the bus. Each burst has views of a few ads of one bot.
    async fn publish(&self, writer: u64) {
        let mut random = StdRng::seed_from_u64(100 + writer);
        while self.goes_on().await {
            if self.is_busy().await {
                continue;
            }
            let bot = random.random_range(0..BOTS);
            // While the first views of the burst are written, the others become one long slice.
            let views = if self.need_long_slices.get() > 0 { 2_000 } else { 150 };
            let burst: Vec<View> = (0..views)
                .map(|_| {
                    let number = bot + BOTS * random.random_range(0..ADS / BOTS / 4);
                    // Only shared ads.
                    let number = if number % 4 < 2 { (number + 2) % ADS } else { number };
                    let (bot, id) = ad(number);
                    View::new(&bot, &id, 1)
                })
                .collect();
            self.stores.publish(&burst).await;
            for view in &burst {
                self.acknowledge(view);
            }
        }
    }

    /// Kills a process at every step.
    async fn kill(&self, place: usize, mut node: Node) -> Node {
        let mut round = 0;
        while let Some(Kill { step, arrives }) = self.kills.next(place, round) {
            let interceptors = step.interceptors(&node);
            let needs_long = u32::from(step == Step::InTheCompletion);
            self.need_long_slices.update(|others| others + needs_long);
            let mut caught = true;
            for interceptor in &interceptors {
                caught &= interceptor.catches(step.patience()).await;
            }
            self.need_long_slices.update(|all| all - needs_long);
            self.kills.note(step, caught);
            node.served.kill9();
            if arrives {
                for interceptor in &interceptors {
                    interceptor.release();
                }
            }
            node.restart().await;
            self.clients.borrow_mut()[place] = node.client();
            self.killed.send_replace(());
            round += 1;
        }
        node
    }
}

#[tokio::test]
async fn three_processes_killed_at_every_step_of_the_flush_count_every_view_once() {
    let stores = Stores::start(Persistence::Always);
    let nodes = join_all((0..3).map(|_| Node::start(&stores, &[]))).await;
    let site = Site {
        stores: &stores,
        clients: RefCell::new(nodes.iter().map(Node::client).collect()),
        // Only a slice that is large is completed in parts.
        kills: Kills::new(nodes.len(), &STEPS).rarely(Step::InTheCompletion),
        killed: watch::Sender::default(),
        acknowledged: RefCell::default(),
        stored: Cell::new((Instant::now(), 0)),
        need_long_slices: Cell::default(),
    };
    let started = Instant::now();
    let killing = join_all(nodes.into_iter().zip(0..).map(|(node, place)| site.kill(place, node)));
    let calling = join_all((0..2).map(|writer| site.call(writer)));
    let publishing = join_all((0..2).map(|writer| site.publish(writer)));
    let (killed, _) = join(killing, join(calling, publishing)).await;

    let expected = site.acknowledged.take();
    let met = site.kills.met();
    let views: u64 = expected.values().sum();
    println!("{views} views of {} ads, {:?}, {met:?}", expected.len(), started.elapsed());
    stores.settles(&killed[0].client(), &expected, LONG).await;
    site.kills.assert_each_was_met();
    assert_eq!(letters(&killed[0].client()).await.len(), 0, "a view is never given up");
}

#[tokio::test]
async fn a_consumer_frozen_past_its_lease_with_its_writes_under_way_changes_nothing_when_it_wakes()
{
    let stores = Stores::start(Persistence::Always);
    let (frozen, other) = join(Node::start(&stores, &[]), Node::start(&stores, &[])).await;
    let ads: Vec<Ad> = (0..40).map(|at| (format!("bot-{}", at % 4), format!("ad-{at}"))).collect();
    let mut expected = Sums::new();
    let mut publish = async |n| {
        let views: Vec<View> = ads.iter().map(|(bot, ad)| View::new(bot, ad, n)).collect();
        stores.publish(&views).await;
        for view in views {
            *expected.entry(view.ad).or_default() += n;
        }
        expected.clone()
    };
    for round in 0..5 {
        let holds: &[&'static str] = [&[TOTALS, DAILY][..], &[TOTALS], &[DAILY]][round % 3];
        let set = |name: &&'static str| {
            frozen.mongo.intercept(on("update", name), 1, Interception::HoldCommand)
        };
        let interceptors: Vec<Interceptor> = holds.iter().map(set).collect();
        // It is one of two processes, so it may take several rounds until it flushes some of these
        // views.
        let mut sums = Sums::new();
        eventually(LONG, "its flush is held", async || {
            sums = publish(2).await;
            let mut caught = true;
            for interceptor in &interceptors {
                caught &= interceptor.catches(Duration::from_millis(100)).await;
            }
            caught
        })
        .await;
        frozen.served.sigstop();
        stores.settles(&other.client(), &sums, LONG).await;
        sums = publish(1).await;
        stores.settles(&other.client(), &sums, LONG).await;
        for interceptor in &interceptors {
            assert!(interceptor.completes(LONG).await, "the late write was executed");
        }
        let wrong = judge(&sums, &stores.said(&other.client(), &sums).await);
        assert!(wrong.is_empty(), "after the late write in round {round}: {wrong:?}");
        frozen.served.sigcont();
        stores.settles(&frozen.client(), &sums, LONG).await;
    }
    let sums = publish(1).await;
    stores.settles(&frozen.client(), &sums, LONG).await;
}

#[tokio::test]
async fn a_write_whose_reply_was_lost_is_repeated_and_counts_once() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let mut expected = Sums::new();
    let mut lost = 0;
    for collection in [TOTALS, DAILY, "counters_"] {
        // Several interceptors, while more views arrive.
        let set =
            |_| node.mongo.intercept(on_any("update", collection), 1, Interception::LoseReply);
        let interceptors: Vec<Interceptor> = (0..4).map(set).collect();
        for number in 0..50 {
            let view = View::new(&format!("bot-{}", number % 3), &format!("ad-{number}"), 2);
            view.count(|| node.client()).await;
            *expected.entry(view.ad).or_default() += view.n;
        }
        if collection.ends_with('_') {
            // The two commands run concurrently, and the second is abandoned with the first. Its
            // connection may then be closed, so that its reply cannot be lost.
            stores.settles(&node.client(), &expected, LONG).await;
            let mut caught = 0;
            for interceptor in &interceptors {
                caught += u64::from(interceptor.catches(Duration::ZERO).await);
            }
            assert!(caught > 0, "replies of both collections are lost");
            continue;
        }
        for interceptor in &interceptors {
            assert!(interceptor.catches(LONG).await, "a reply of {collection} is lost");
        }
        lost += interceptors.len() as u64;
        stores.settles(&node.client(), &expected, LONG).await;
    }
    assert!(node.mongo.swallowed() > lost);
}

#[tokio::test]
async fn a_redis_that_lost_its_tail_counts_nothing_twice_and_loses_no_more_than_the_tail() {
    let mut stores = Stores::start(Persistence::EverySecond);
    let node = Node::start(&stores, &[]).await;
    let (mut before, mut after) = (Sums::new(), Sums::new());
    for round in 0..3 {
        // The tail is shorter than the second that Redis may lose, and falls in the middle of
        // flushes.
        let began = Instant::now();
        let mut tail = None;
        // A busy machine may count no view for a while.
        let is_short = |redis: &RedisServer, (at, kept): (Instant, u64)| {
            at.elapsed() < Duration::from_millis(700) || redis.aof_bytes() <= kept
        };
        while tail.is_none_or(|tail| is_short(&stores.redis, tail)) {
            if tail.is_none() && began.elapsed() > Duration::from_secs(3) {
                tail = Some((Instant::now(), stores.redis.aof_bytes()));
                before = after.clone();
            }
            let number = rand::rng().random_range(0..60);
            let view = View::new(&format!("bot-{}", number % 5), &format!("ad-{number}"), 1);
            view.count(|| node.client()).await;
            *after.entry(view.ad).or_default() += view.n;
        }
        let (_, kept) = tail.unwrap();
        stores.redis.kill9();
        let cut = stores.redis.aof_bytes() - kept;
        assert!(cut > 0, "there was a tail");
        stores.redis.truncate_aof(cut);
        stores.redis.restart();
        eventually(LONG, "everything is flushed", async || stores.depth().await == 0).await;
        // From here on, the totals that survived count.
        let (totals, _) = stores.stored().await;
        stores.settles(&node.client(), &totals, LONG).await;
        let mut lost = 0;
        for (ad, acknowledged) in &after {
            let counted = totals.get(ad).copied().unwrap_or(0);
            let least = before.get(ad).copied().unwrap_or(0);
            assert!(counted >= least, "{ad:?}: {counted}, {least} were older than the tail");
            assert!(counted <= *acknowledged, "{ad:?}: {counted} of {acknowledged}: twice");
            lost += acknowledged - counted;
        }
        println!("round {round}: {cut} bytes cut, {lost} views lost of {}", after.len());
        after = totals;
    }
}

#[tokio::test]
async fn the_judge_finds_a_fault_that_was_put_into_the_stores() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let view = View::new("b", "x", 3);
    view.count(|| node.client()).await;
    let expected = Sums::from([(view.ad, 3)]);
    stores.settles(&node.client(), &expected, LONG).await;
    for (collection, field) in [(TOTALS, "total"), (DAILY, "days.30")] {
        for n in [1, -1] {
            stores.tamper(collection, doc! { "ad": "x" }, doc! { "$inc": { field: n } }).await;
            let wrong = judge(&expected, &stores.said(&node.client(), &expected).await);
            assert_eq!(wrong.is_empty(), n == -1, "{wrong:?}");
        }
    }
}
