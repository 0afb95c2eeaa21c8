//! The command line of operators: the audit trail, pauses with a reason, and lists of bots that need
//! help.

use std::time::Duration;

use fairlane::event::Event;
use fairlane::id::{BotId, PipelineName, Prefix, ShardCount};
use fairlane::queue::{PushOptions, Queue};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::private::PrivateRedis;
use fairlane::redis::scripts::Limits;
use fairlane::redis::{Link, Target};
use redis::AsyncCommands as _;
use serde_json::Value;

use crate::support::cli::{Ran, run_in};
use crate::support::redis::connect;

const CONFIG: &str = "data_dir = \"data\"\n[redis]\nshards = 4\n\
                      [pipelines.log]\nhandler = \"log\"\nevents = [\"*\"]\n";

/// A directory with a configuration, the Redis of its data directory, and the queues of a pipeline.
struct Place {
    dir: tempfile::TempDir,
    redis: PrivateRedis,
    queue: Queue,
}

impl Place {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("fairlane.toml"), CONFIG).unwrap();
        let redis = PrivateRedis::start(&dir.path().join("data")).await.unwrap();
        let (name, count) = (PipelineName::parse("log").unwrap(), ShardCount::new(4).unwrap());
        let keys = count.shards().map(|shard| ShardKeys::new(&Prefix::default(), &name, shard));
        let target = Target::new(redis.url().expose()).unwrap();
        let link = Link::new(target, keys.collect(), 10_000, Duration::from_secs(10));
        let limits = Limits {
            slice_us: 10_000,
            linger_ms: 0,
            max_queue: 2,
            overflow_dead: true,
            dead_max: 1_000,
            quota: fairlane::quotas::Quota::NONE,
        };
        let queue = Queue::new(name, count, limits, link.into());
        Self { dir, redis, queue }
    }

    async fn push(&self, id: &str, events: usize) {
        let bot = BotId::parse(id).unwrap();
        let events: Vec<_> = (0..events)
            .map(|id| Event::builder("t", &bot).id(id.to_string()).build().unwrap())
            .collect();
        self.queue.push(&bot, &events, PushOptions::default()).await.unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let ran = run_in(self.dir.path(), arguments, "");
        assert_eq!(ran.code, 0, "{ran:?}");
        ran
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.run(&[arguments, &["--json"]].concat()).out).unwrap()
    }

    async fn stop(self) {
        drop(self.queue);
        self.redis.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_pause_with_a_reason_is_shown_everywhere_and_is_in_the_trail() {
    let place = Place::new().await;
    place.push("shop-7", 1).await;
    place.run(&["bots", "pause", "shop-7", "--reason", "the shop asked"]);
    let shown = place.run(&["bots", "show", "shop-7"]).out;
    let note = shown.lines().find(|line| line.starts_with("Paused by cli:")).unwrap();
    assert!(note.ends_with(" ago: the shop asked; 1 event waits"), "{shown}");
    let listed = place.run(&["bots", "list", "--state", "paused"]).out;
    assert!(listed.contains("REASON") && listed.contains("paused by cli:"), "{listed}");

    place.run(&["pipelines", "pause", "log", "--reason", "the mail server moves"]);
    let listed = place.run(&["pipelines", "list"]).out;
    let note = listed.lines().last().unwrap();
    assert!(note.starts_with("pipeline log is paused by cli:"), "{listed}");
    assert!(note.ends_with(" ago: the mail server moves"), "{listed}");
    let status = place.run(&["status"]).out;
    assert!(status.contains("pipeline log is paused by cli:"), "{status}");
    let refused = run_in(place.dir.path(), &["bots", "pause", "b", "--reason", "a\nb"], "");
    assert_eq!(refused.code, 64, "{refused:?}");
    assert!(refused.err.contains("1 to 200 characters"), "{refused:?}");

    place.run(&["bots", "set", "shop-7", "--weight", "3"]);
    place.run(&["bots", "purge", "shop-7", "--yes"]);
    let trail = place.json(&["audit"]);
    let text = |at: usize, field: &str| trail[at][field].as_str().unwrap_or("-").to_owned();
    let seen: Vec<_> = (0..trail.as_array().unwrap().len())
        .map(|at| {
            [text(at, "action"), text(at, "bot"), text(at, "reason"), text(at, "result")].join("|")
        })
        .collect();
    let expected = [
        "purge|shop-7|-|done: 1",
        "set|shop-7|-|done",
        "pause|-|the mail server moves|done",
        "pause|shop-7|the shop asked|done",
    ];
    assert_eq!(seen, expected);
    let (user, host) = trail[0]["who"].as_str().unwrap().split_once('@').unwrap();
    assert!(user.starts_with("cli:") && user.len() > 4 && !host.is_empty(), "{trail}");
    let table = place.run(&["audit", "--bot", "shop-7", "-n", "2"]).out;
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.contains("weight 3") && !table.contains("mail server"), "{table}");
    assert_eq!(place.json(&["audit", "--pipeline", "other"]), Value::Array(Vec::new()));
    assert_eq!(place.json(&["audit", "--since", "1h ago"]).as_array().unwrap().len(), 4);
    let nothing = place.run(&["audit", "--pipeline", "other"]).out;
    assert_eq!(nothing, "no action of an operator is kept\n");
    place.stop().await;
}

#[tokio::test]
async fn bots_that_need_help_are_listed_and_a_strange_bot_is_said_to_be_unknown() {
    let place = Place::new().await;
    place.push("shop-7", 1).await;
    // The third event exceeds the length of the queue and becomes a dead letter.
    place.push("full", 3).await;
    let names = |list: &Value| -> Vec<String> {
        let bots = list.as_array().unwrap().iter();
        bots.map(|bot| bot["bot"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&place.json(&["bots", "list"])), ["full", "shop-7"]);
    let failing = place.json(&["bots", "list", "--failing"]);
    assert_eq!(names(&failing), ["full"]);
    assert_eq!(failing[0]["reason"], "dead letters: 1");
    assert_eq!(names(&place.json(&["bots", "list", "--prefix", "shop-"])), ["shop-7"]);
    assert_eq!(names(&place.json(&["bots", "list", "--state", "ready"])), ["full", "shop-7"]);
    assert_eq!(place.run(&["bots", "list", "--state", "leased"]).out, "no such bot\n");

    let shown = place.run(&["bots", "show", "shop-8"]);
    assert_eq!(
        shown.out,
        "bot shop-8 was never seen in pipeline log, or left nothing there; did you mean shop-7?\n"
    );
    let shown = place.run(&["bots", "show", "nothing-like-it"]).out;
    assert_eq!(
        shown,
        "bot nothing-like-it was never seen in pipeline log, or left nothing there\n"
    );
    assert_eq!(place.json(&["bots", "show", "shop-8"])["unknown"]["near"][0], "shop-7");
    place.run(&["bots", "pause", "warehouse"]);
    assert_eq!(place.json(&["bots", "show", "warehose"])["unknown"]["near"][0], "warehouse");
    assert_eq!(place.json(&["bots", "show", "shop-7"])["unknown"], Value::Null);
    place.stop().await;
}

#[tokio::test]
async fn an_action_on_dead_letters_that_stops_midway_says_how_many_it_did() {
    let place = Place::new().await;
    let shards = ShardCount::new(4).unwrap();
    let in_shard = |shard: usize| {
        let is_there = |id: &String| BotId::parse(id).unwrap().shard(shards).index() == shard;
        (0..10_000).map(|id: u32| format!("bot-{id}")).find(is_there).unwrap()
    };
    // The third event and those behind it become dead letters.
    place.push(&in_shard(0), 5).await;
    place.push(&in_shard(3), 3).await;
    let target = Target::new(place.redis.url().expose()).unwrap();
    let mut connection = connect(target.client()).await;
    let held = "fl:{log:3}:held";
    let () = connection.set(held, "damaged").await.unwrap();
    let drop_all = || run_in(place.dir.path(), &["dead", "drop", "--all", "--yes"], "");
    let ran = drop_all();
    assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{ran:?}");
    for said in ["WRONGTYPE", "deleted at least 3 dead letters, then stopped: ", "; repeating"] {
        assert!(ran.err.contains(said), "{said}: {ran:?}");
    }
    let () = connection.del(held).await.unwrap();
    assert_eq!(drop_all().code, 0);
    assert_eq!(place.run(&["dead", "list"]).out, "no dead letters\n");
    // The last client stops the server.
    drop(connection);
    place.stop().await;
}
