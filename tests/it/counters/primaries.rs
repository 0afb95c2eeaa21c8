//! The counters on a Redis Cluster.

use std::time::Duration;

use fairlane::id::{BotId, ShardCount};
use serde_json::json;

use crate::support::cluster::Cluster;
use crate::support::config::{SHARDS, configs};
use crate::support::counter_fleet::{View, path};
use crate::support::http::Client;
use crate::support::mongo::{self, MongoServer};
use crate::support::redis::Options;
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

/// A bot whose views are on this primary.
async fn bot_on(cluster: &Cluster, place: usize) -> String {
    let count = ShardCount::new(SHARDS).unwrap();
    let mut number = 0;
    loop {
        let bot = BotId::parse(&format!("bot-{number}")).unwrap();
        let slot = cluster.slot_of(&format!("{{counters:{}}}", bot.shard(count))).await;
        if usize::from(slot) * 3 / 16_384 == place {
            return bot.to_string();
        }
        number += 1;
    }
}

/// The totals and days of its ad: the status code, and whether the answer is stale.
async fn read(client: &Client, bot: &str) -> [(u16, bool); 2] {
    let days = path(&(bot.to_owned(), "ad".to_owned()), "/daily?from=2026-01-01&to=2026-12-31");
    let totals = client.get(&format!("/v1/bots/{bot}/counters?ids=ad")).await;
    let days = client.get(&days).await;
    [totals, days].map(|answer| (answer.code, answer.json()["stale"] == json!(true)))
}

#[tokio::test]
async fn a_frozen_primary_makes_no_totals_and_days_of_bots_on_the_others_stale() {
    let cluster = Cluster::start(Options::default(), 3, false).await;
    let mongo = MongoServer::start(mongo::Options::default());
    let url = format!("{:?}", mongo.url());
    // Half of it passes before a breaker opens: no busy machine makes an answer that late.
    let settings = [("mongodb.url", &*url), ("counters.read_timeout", "\"6s\"")];
    let process = Served::start(&configs(&cluster, &[], &settings)).await;
    let client = Client::new(&process.http());
    let (lost, other) = (bot_on(&cluster, 0).await, bot_on(&cluster, 2).await);
    for bot in [&lost, &other] {
        View::new(bot, "ad", 1).count(|| client.clone()).await;
        eventually(LONG, "nothing is stale", async || {
            read(&client, bot).await == [(200, false); 2]
        })
        .await;
    }
    cluster.nodes[0].sigstop();
    for _ in 0..3 {
        assert_eq!(read(&client, &lost).await, [(200, true); 2]);
        assert_eq!(read(&client, &other).await, [(200, false); 2]);
    }
    cluster.nodes[0].sigcont();
    eventually(LONG, "nothing is stale", async || read(&client, &lost).await == [(200, false); 2])
        .await;
}
