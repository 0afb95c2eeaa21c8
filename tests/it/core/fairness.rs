//! Each bot gets service in proportion to its weight. `fairlane-bench fairness` shows the exact
//! shares. These tests show that the parts work together.

use std::collections::HashMap;
use std::time::Duration;

use fairlane::handler::{Outcomes, Slice};
use fairlane::id::BotId;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::{Log, Noting};
use crate::support::redis::{Options, RedisBackend, RedisServer};
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(30);
const HANDLING: Duration = Duration::from_millis(3);

fn slow(
    log: &Log,
) -> Noting<impl Fn(Slice) -> futures_util::future::BoxFuture<'static, HandlerResult> + use<>> {
    log.handler(|slice: Slice| -> futures_util::future::BoxFuture<'static, HandlerResult> {
        Box::pin(async move {
            // The sleep simulates work.
            tokio::time::sleep(HANDLING * u32::try_from(slice.events.len()).unwrap()).await;
            Ok(Outcomes::done())
        })
    })
}

type HandlerResult = Result<Outcomes, fairlane::handler::Failure>;

#[tokio::test]
async fn a_bot_of_weight_three_gets_three_times_the_service() {
    weighed(RedisServer::start(Options::default())).await;
}

/// One of six bots has weight three.
pub(crate) async fn weighed(server: impl RedisBackend) {
    let log = Log::default();
    let settings = [("pipelines.weights.workers.max", "2"), ("pipelines.weights.batch", "10")];
    let instance = Instance::start(&config(&server, "weights", &settings), slow(&log)).await;
    let queue = instance.queue("weights");
    queue.set_weight(&BotId::parse("bot-0").unwrap(), 3).await.unwrap();
    queue.pause(None).await.unwrap();
    let events: Vec<String> = (0..3_000_usize)
        .map(|number| event(&format!("bot-{}", number % 6), "test", number / 6))
        .collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 3_000
    })
    .await;
    queue.resume(None).await.unwrap();
    // Stops while every bot still has a backlog.
    eventually(LONG, "half is done", async || log.len() >= 1_200).await;
    let mut shares: HashMap<String, f64> = HashMap::new();
    for seen in log.all() {
        *shares.entry(seen.bot).or_default() += 1.0;
    }
    let heavy = shares.remove("bot-0").unwrap();
    assert_eq!(shares.len(), 5);
    for (bot, share) in shares {
        let ratio = heavy / share;
        assert!((2.0..4.0).contains(&ratio), "bot-0 had {ratio} times the service of {bot}");
    }
}

#[tokio::test]
async fn a_quiet_bot_does_not_wait_for_a_busy_one() {
    undisturbed(RedisServer::start(Options::default())).await;
}

/// A quiet bot beside a busy one.
pub(crate) async fn undisturbed(server: impl RedisBackend) {
    let log = Log::default();
    let settings = [("pipelines.quiet.workers.max", "2")];
    let instance = Instance::start(&config(&server, "quiet", &settings), slow(&log)).await;
    let flood: Vec<String> = (0..20_000).map(|id| event("busy", "test", id)).collect();
    add(&server, STREAM, &flood).await;
    eventually(LONG, "the busy bot is at work", async || log.len() > 50).await;
    for id in 0..20 {
        let before = log.len();
        add(&server, STREAM, &[event("quiet", "test", id)]).await;
        let done = async || log.all().iter().filter(|seen| seen.bot == "quiet").count() > id;
        let asked = Stopwatch::start();
        eventually(LONG, "the quiet bot had its turn", done).await;
        asked.within(Duration::from_secs(2), "the quiet bot had its turn");
        assert!(log.len() < 20_000, "there was a backlog all the time, from {before}");
    }
    assert!(instance.queue("quiet").view(Duration::ZERO).await.unwrap().depth > 0);
}
