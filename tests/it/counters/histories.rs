//! Random histories of views, edits and faults. A seed repeats a history as far as real servers
//! allow. At the end, every total is the sum of its days and of the acknowledged views.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::RwLock;

use super::edits::Edit;
use crate::support::counter_fleet::{Ad, Node, Stores, Sums, View, acknowledged};
use crate::support::http::Client;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::mongo;
use crate::support::mongo_proxy::on_any;
use crate::support::process::{number, variable};
use crate::support::proxy::holds;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
/// Names the variable that repeats one history.
const SEED: &str = "FAIRLANE_TEST_SEED";
/// Names the variable with the number of histories. `make kills` sets more than one.
const HISTORIES: &str = "FAIRLANE_TEST_HISTORIES";
const FAULTS: u32 = 14;
const WRITERS: u64 = 3;
/// Ads of each writer.
const ADS: u64 = 12;

struct History {
    /// Tasks that use Redis directly hold the read lock, so that a restart waits for them.
    stores: RwLock<Stores>,
    clients: RefCell<Vec<Client>>,
    over: Cell<bool>,
}

impl History {
    fn pick(&self, random: &mut StdRng) -> Client {
        let clients = self.clients.borrow();
        clients[random.random_range(0..clients.len())].clone()
    }

    /// Views and edits the writer's own ads, one request after the other, so that the result is
    /// known.
    async fn write(&self, writer: u64, mut random: StdRng) -> Sums {
        let mut expected = Sums::new();
        while !self.over.get() {
            let number = random.random_range(0..ADS);
            let bot = format!("bot-{}", number % 4);
            let ad: Ad = (bot.clone(), format!("ad-{writer}-{number}"));
            let before = expected.get(&ad).copied().unwrap_or(0);
            // Ads that are viewed over the bus are never edited: the time at which the bus is read
            // is unknown.
            let now = match random.random_range(0..100) {
                0..12 if number % 3 == 0 => {
                    let burst = random.random_range(1..300);
                    let burst: Vec<View> = (0..burst).map(|_| View::new(&bot, &ad.1, 1)).collect();
                    self.stores.read().await.publish(&burst).await;
                    before + burst.len() as u64
                }
                choice @ 0..6 if number % 3 > 0 => {
                    let total = random.random_range(0..1_000);
                    let edit = [Edit::Reset, Edit::Put(total), Edit::Delete][choice % 3];
                    let client = async || edit.send(&self.pick(&mut random), &ad).await;
                    acknowledged(client).await;
                    edit.total()
                }
                _ => {
                    let view = View::new(&bot, &ad.1, random.random_range(1..=5));
                    let told = view.count(|| self.pick(&mut random)).await;
                    let sum = before + view.n;
                    let right = told == Some(sum) || number % 3 == 0;
                    assert!(told.is_none() || right, "{ad:?}: told {told:?}, it is {sum}");
                    sum
                }
            };
            expected.insert(ad, now);
        }
        expected
    }

    /// Causes one fault after another.
    async fn harm(&self, mut nodes: Vec<Node>, mut random: StdRng) -> Vec<Node> {
        let mut late: Vec<Interceptor> = Vec::new();
        for _ in 0..FAULTS {
            let place = random.random_range(0..nodes.len());
            let fault = random.random_range(0..9);
            let nth = random.random_range(1..4);
            let node = &mut nodes[place];
            let began = Instant::now();
            match fault {
                0 => node.restart().await,
                1 => {
                    // Killed in the middle of a flush. The command that it sent arrives after its
                    // death.
                    let interceptor = flush(node, nth, Interception::HoldCommand).await;
                    node.restart().await;
                    interceptor.release();
                    late.push(interceptor);
                }
                2 => {
                    let interceptor =
                        node.redis.intercept(completion(), nth, Interception::HoldReply);
                    interceptor.catches(Duration::from_secs(1)).await;
                    node.restart().await;
                }
                3 => {
                    // Frozen beyond its lease in the middle of a flush.
                    let interceptor = flush(node, 1, Interception::HoldCommand).await;
                    node.served.sigstop();
                    rest(Duration::from_millis(1_300)).await;
                    interceptor.release();
                    node.served.sigcont();
                    late.push(interceptor);
                }
                4 => {
                    node.served.sigstop();
                    rest(Duration::from_millis(1_300)).await;
                    node.served.sigcont();
                }
                5 => drop(flush(node, nth, Interception::LoseReply).await),
                6 => {
                    let interceptor =
                        node.redis.intercept(completion(), nth, Interception::LoseReply);
                    interceptor.catches(Duration::from_secs(1)).await;
                }
                7 => self.stores.write().await.redis.restart(),
                _ => {
                    node.mongo.cut();
                    self.stores.write().await.mongo.restart(mongo::Options::default());
                }
            }
            println!("fault {fault} at process {place}: {:?}", began.elapsed());
            self.clients.borrow_mut()[place] = nodes[place].client();
        }
        nodes
    }
}

fn completion() -> crate::support::interceptor::Matcher {
    holds(["}:later\r\n", "}:acked:", "ad-"])
}

/// Waits up to a second until a process is in a flush.
async fn flush(node: &Node, nth: u32, interception: Interception) -> Interceptor {
    let interceptor = node.mongo.intercept(on_any("update", "counters_"), nth, interception);
    interceptor.catches(Duration::from_secs(1)).await;
    interceptor
}

/// Waits for the length of a fault.
async fn rest(time: Duration) {
    let until = Instant::now() + time;
    eventually(LONG, "the fault is over", async || Instant::now() > until).await;
}

async fn happens(seed: u64) {
    println!("{SEED}={seed}");
    let stores = Stores::start(Persistence::Always);
    let nodes = join_all((0..2).map(|_| Node::start(&stores, &[]))).await;
    let history = History {
        stores: RwLock::new(stores),
        clients: RefCell::new(nodes.iter().map(Node::client).collect()),
        over: Cell::new(false),
    };
    let random = |part| StdRng::seed_from_u64(seed.wrapping_mul(31).wrapping_add(part));
    let harming = async {
        let nodes = history.harm(nodes, random(0)).await;
        history.over.set(true);
        nodes
    };
    let writing = join_all((0..WRITERS).map(|writer| history.write(writer, random(writer + 1))));
    let (nodes, expected) = join(harming, writing).await;
    let expected: Sums = expected.into_iter().flatten().collect();
    println!("{} ads, {} views", expected.len(), expected.values().sum::<u64>());
    for node in &nodes {
        history.stores.read().await.settles(&node.client(), &expected, LONG).await;
    }
}

#[tokio::test]
async fn in_any_history_totals_are_the_sums_of_days_and_of_acknowledged_views() {
    if let Some(seed) = variable(SEED) {
        return happens(seed.parse().unwrap()).await;
    }
    for _ in 0..number(HISTORIES, 1) {
        happens(rand::random()).await;
    }
}
