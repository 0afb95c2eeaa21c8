//! The start of a process in a cluster without one of its primaries.

use std::collections::HashMap;
use std::time::Duration;

use fairlane::id::{BotId, ShardCount};

use crate::support::bus::{add, event};
use crate::support::cluster::Cluster;
use crate::support::config::{SHARDS, STREAM, config};
use crate::support::http::{get, metric};
use crate::support::redis::{Options, Persistence};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const ROLES: &str = "ingest,work,http,schedule";
/// The primaries of what a start reads and writes.
const KEY: usize = 0;
const BUS: usize = 1;
const NAMES: usize = 2;

/// A cluster with data, and the configuration of its processes.
async fn with_data(persistence: Persistence) -> (Cluster, String) {
    let options = Options { persistence, ..Options::default() };
    let cluster = Cluster::start(options, 3, false).await;
    for (key, place) in
        [("fl:lease-key", KEY), (STREAM, BUS), ("fl:formats", NAMES), ("fl:processes", NAMES)]
    {
        assert_eq!(usize::from(cluster.slot_of(key).await) * 3 / 16_384, place, "{key}");
    }
    let text = config(&cluster, "test", &[("pipelines.test.handler", "\"log\"")]);
    let first = Served::start(&text).await;
    drop(first);
    (cluster, text)
}

async fn runs(process: &mut Served) {
    eventually(LONG, "it runs", async || {
        assert!(process.is_running(), "{}", process.log());
        process.log().contains("fairlane is running")
    })
    .await;
}

/// Waits until the answer of `/readyz` is 200 and has all of these words and none of those.
async fn says(process: &Served, words: &[&str], not: &[&str]) {
    eventually(LONG, &format!("it says {words:?}"), async || {
        let (code, said) = get(&process.metrics(), "/readyz").await;
        let has = |word: &&str| said.contains(*word);
        code == 200 && words.iter().all(has) && !not.iter().any(has)
    })
    .await;
}

#[tokio::test]
async fn a_process_starts_while_the_primary_of_the_bus_is_frozen_and_says_which_one_is_missing() {
    let (cluster, text) = with_data(Persistence::None).await;
    cluster.nodes[BUS].sigstop();
    let mut process = Served::spawn(&text, ROLES);
    runs(&mut process).await;
    let degraded = ["\"degraded\"", "\"primaries_down\":1", "\"without_start\":[\"pipeline test"];
    says(&process, &degraded, &[]).await;
    let lost = cluster.nodes[BUS].tcp_addr().to_string();
    for words in ["starting although these", "ready for the others"] {
        let log = process.log();
        let line = log.lines().find(|line| line.contains(words));
        assert!(line.is_some_and(|line| line.contains(&lost)), "{words}: {log}");
    }
    cluster.nodes[BUS].sigcont();
    says(&process, &["\"ready\""], &["primaries_down", "without_start"]).await;
}

/// The formats of the data, and the names of the processes and pipelines, are on that primary.
#[tokio::test]
async fn a_process_starts_while_the_primary_of_all_names_is_down_and_works_for_the_others() {
    let (mut cluster, text) = with_data(Persistence::None).await;
    let mut place = HashMap::new();
    for shard in 0..SHARDS {
        let slot = cluster.slot_of(&format!("{{test:{shard}}}")).await;
        place.insert(shard.to_string(), usize::from(slot) * 3 / 16_384);
    }
    let count = ShardCount::new(SHARDS).unwrap();
    let mut bots = (0..).map(|number| BotId::parse(&format!("bot-{number}")).unwrap());
    let bot = bots.find(|bot| place[&bot.shard(count).to_string()] == KEY).unwrap();
    cluster.nodes[NAMES].kill9();
    let mut process = Served::spawn(&text, ROLES);
    runs(&mut process).await;
    says(&process, &["\"degraded\"", "\"primaries_down\":1"], &[]).await;
    add(&cluster, STREAM, &[event(bot.as_str(), "test", 1)]).await;
    eventually(LONG, "the event is handled", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let labels = [("pipeline", "test"), ("outcome", "done")];
        metric(&text, "fairlane_events_total", &labels) >= Some(1.0)
    })
    .await;
    cluster.nodes[NAMES].restart();
    says(&process, &["\"ready\""], &["primaries_down"]).await;
    eventually(LONG, "the process is registered", async || {
        cluster.ask(NAMES, &["HLEN", "fl:processes"]).await == "1"
    })
    .await;
}

#[tokio::test]
async fn a_process_that_started_without_the_formats_ends_if_they_turn_out_to_be_later_ones() {
    let (mut cluster, text) = with_data(Persistence::Always).await;
    cluster.tell(NAMES, &["HSET", "fl:formats", "queues:9", "9 9.0.0 1"]).await;
    cluster.nodes[NAMES].kill9();
    let mut process = Served::spawn(&text, ROLES);
    runs(&mut process).await;
    cluster.nodes[NAMES].restart();
    let status = process.wait_exit(2 * LONG).expect("it ends");
    assert!(!status.success() && process.log().contains("queues:9"), "{}", process.log());
}

/// Without the key, no process could verify the tokens of the others.
#[tokio::test]
async fn a_process_ends_at_its_start_if_the_primary_of_the_signing_key_is_down() {
    let (mut cluster, text) = with_data(Persistence::None).await;
    cluster.nodes[KEY].kill9();
    let mut process = Served::spawn(&text, ROLES);
    let status = process.wait_exit(2 * LONG).expect("it ends");
    let (log, lost) = (process.log(), cluster.nodes[KEY].tcp_addr().to_string());
    assert_eq!(status.code(), Some(69), "{log}");
    let error = format!("error: cannot connect to Redis at {lost}");
    assert!(log.contains(&error), "{log}");
}
