//! The command line: the real binary against a private Redis.

use std::sync::Arc;
use std::time::Duration;

use fairlane::event::Event;
use fairlane::id::{BotId, PipelineName, Prefix, ShardCount};
use fairlane::queue::{BotState, PushOptions, Queue};
use fairlane::redis::keys::{self, ShardKeys};
use fairlane::redis::private::PrivateRedis;
use fairlane::redis::scripts::Limits;
use fairlane::redis::{Link, Target};
use serde_json::Value;

use crate::support::cli::{Ran, run_in};
use crate::support::redis::connect;

const SHARDS: u16 = 4;
const CONFIG: &str = r#"
data_dir = "data"
[redis]
shards = 4
[pipelines.log]
handler = "log"
events = ["*"]
"#;

/// A directory with a configuration, and the Redis of its data directory.
struct Installation {
    dir: tempfile::TempDir,
    redis: PrivateRedis,
}

impl Installation {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("fairlane.toml"), CONFIG).unwrap();
        let redis = PrivateRedis::start(&dir.path().join("data")).await.unwrap();
        Self { dir, redis }
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        run_in(self.dir.path(), arguments, "")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let ran = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        serde_json::from_str(&ran.out).unwrap()
    }

    async fn redis(&self, command: &[&str]) -> redis::Value {
        let target = Target::new(self.redis.url().expose()).unwrap();
        let mut connection = connect(target.client()).await;
        redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap()
    }

    /// The queues of a pipeline. A bot has at most `max_queue` queued events, and further events
    /// are dead-lettered.
    fn queue(&self, name: &str, max_queue: u64) -> Queue {
        let (name, count) = (PipelineName::parse(name).unwrap(), ShardCount::new(SHARDS).unwrap());
        let shards =
            count.shards().map(|shard| ShardKeys::new(&Prefix::default(), &name, shard)).collect();
        let target = Target::new(self.redis.url().expose()).unwrap();
        let link = Link::new(target, shards, 10_000, Duration::from_secs(10));
        let limits = Limits {
            slice_us: 10_000,
            linger_ms: 0,
            max_queue,
            overflow_dead: true,
            dead_max: 1_000,
            quota: fairlane::quotas::Quota::NONE,
        };
        Queue::new(name, count, limits, Arc::new(link))
    }

    async fn stop(self) {
        self.redis.stop().await.unwrap();
    }
}

fn bot(id: &str) -> BotId {
    BotId::parse(id).unwrap()
}

fn events(of: &BotId, ids: std::ops::Range<u32>) -> Vec<Event> {
    ids.map(|id| {
        let event = Event::builder("tag.applied", of).id(id.to_string());
        event.build().unwrap()
    })
    .collect()
}

fn line(id: u32) -> String {
    format!(r#"{{"specversion":"1.0","id":"{id}","source":"s","type":"t","botid":"b"}}"#)
}

#[test]
fn bad_usage_exits_64_and_names_the_thing() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("bad.toml"), "[redis]\nshards = 0\n").unwrap();
    let kafka = "bus.streams = []\n[[bus.sources]]\nname = \"k\"\nkind = \"kafka\"\nbrokers = [\"h:1\"]\ntopics = [\"t\"]\n";
    std::fs::write(dir.path().join("kafka.toml"), kafka).unwrap();
    let no_stream = if cfg!(feature = "kafka") {
        "`fairlane generate` publishes to Redis streams"
    } else {
        "kafka.toml:4: bus.sources[0].kind = \"kafka\": this build has no Kafka"
    };
    let cases: [(&[&str], &str); 19] = [
        (&[], "Usage: fairlane"),
        (&["nonsense"], "nonsense"),
        (&["status", "--nonsense"], "--nonsense"),
        (&["serve", "--roles", "juggle"], "juggle"),
        (&["bots", "set", "b"], "--weight"),
        (&["bots", "set", "b", "--weight", "0"], "from 0.01 to 1000"),
        (&["bots", "set", "b", "--weight", "1001"], "from 0.01 to 1000"),
        (&["bots", "set", "b", "--rate", "10/d"], "such as \"10/s\""),
        (&["bots", "set", "b", "--burst", "0"], "from 1 to 1000000"),
        (&["bots", "show", ""], "bot id is empty"),
        (&["bots", "list", "--sort", "name"], "depth, age"),
        (&["bots", "pause", "b", "--pipeline", "A"], "a-z"),
        (&["dead", "redrive"], "<ID|--bot <BOT>|--all>"),
        (&["dead", "redrive", "0.7-0", "--all"], "--all"),
        (&["dead", "show", "seven"], "3.1700000000000-0"),
        (&["status", "--config", "missing.toml"], "missing.toml"),
        (&["status", "--config", "bad.toml"], "bad.toml:2: redis.shards"),
        (&["publish", "missing.ndjson"], "missing.ndjson"),
        (&["generate", "--config", "kafka.toml"], no_stream),
    ];
    for (arguments, named) in cases {
        let ran = run_in(dir.path(), arguments, "");
        assert_eq!(ran.code, 64, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(named), "{arguments:?}: {ran:?}");
        assert_eq!(ran.out, "", "{arguments:?}");
    }
    assert!(!dir.path().join("fairlane-data").exists(), "bad usage starts no Redis");
}

#[test]
fn help_version_and_defaults_exit_0_without_a_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &str); 4] = [
        (&["--help"], "Examples:"),
        (&["bots", "set", "--help"], "fairlane bots set shop-7 --weight 3"),
        (&["--version"], concat!("fairlane ", env!("CARGO_PKG_VERSION"))),
        (&["config"], "[redis]"),
    ];
    for (arguments, said) in cases {
        let ran = run_in(dir.path(), arguments, "");
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{arguments:?}: {ran:?}");
        assert!(ran.out.contains(said), "{arguments:?}: {ran:?}");
    }
}

#[test]
fn an_unavailable_redis_exits_69_and_the_message_names_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[redis]\nurl = \"redis://:secret@127.0.0.1:1\"\n[pipelines.log]\nhandler = \"log\"\nevents = [\"*\"]\n";
    std::fs::write(dir.path().join("fairlane.toml"), config).unwrap();
    let cases: [&[&str]; 7] = [
        &["serve"],
        &["status"],
        &["publish"],
        &["pipelines", "list"],
        &["bots", "list", "--json"],
        &["dead", "redrive", "--all", "--yes"],
        &["check"],
    ];
    for arguments in cases {
        let ran = run_in(dir.path(), arguments, &line(1));
        assert_eq!(ran.code, 69, "{arguments:?}: {ran:?}");
        let said = format!("{}{}", ran.out, ran.err);
        assert!(said.contains("redis.url") && !said.contains("secret"), "{arguments:?}: {ran:?}");
    }
}

#[tokio::test]
async fn bad_lines_are_reported_with_their_numbers_and_the_rest_is_published() {
    let place = Installation::new().await;
    let huge = "x".repeat(2 << 20);
    let input = format!("{}\n\nnonsense\n{}\r\n{huge}\n{{}}\n{}", line(1), line(2), line(3));
    let ran = run_in(place.dir.path(), &["publish", "-"], &input);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(ran.out, "published 3 events to fairlane:events, 3 lines refused\n");
    for said in ["line 3: ", "line 5: longer than", "line 6: the required attribute", "3 lines"] {
        assert!(ran.err.contains(said), "{said}: {}", ran.err);
    }
    assert!(ran.err.len() < 2_000, "the huge line is not quoted");

    let range = place.redis(&["XRANGE", "fairlane:events", "-", "+"]).await;
    let entries: Vec<(String, Vec<(String, String)>)> = redis::from_redis_value(range).unwrap();
    let stored: Vec<_> = entries.into_iter().map(|(_, fields)| fields).collect();
    let expected: Vec<_> = (1..4).map(|id| vec![("event".to_owned(), line(id))]).collect();
    assert_eq!(stored, expected);

    std::fs::write(place.dir.path().join("e.ndjson"), line(4) + "\n").unwrap();
    let ran = place.json(&["publish", "e.ndjson", "--stream", "other"]);
    assert_eq!(ran, serde_json::json!({"stream": "other", "published": 1, "refused": 0}));
    place.stop().await;
}

#[tokio::test]
async fn a_full_redis_stops_publishing_and_the_accepted_events_are_the_first_ones() {
    let place = Installation::new().await;
    place.redis(&["CONFIG", "SET", "maxmemory", "4mb"]).await;
    let input: String = (0..100_000).map(|id| line(id) + "\n").collect();
    let ran = run_in(place.dir.path(), &["publish"], &input);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.err.contains("OOM") && ran.err.contains("maxmemory"), "{}", ran.err);

    let last = place.redis(&["XREVRANGE", "fairlane:events", "+", "-", "COUNT", "1"]).await;
    let last: Vec<(String, Vec<(String, String)>)> = redis::from_redis_value(last).unwrap();
    let length = place.redis(&["XLEN", "fairlane:events"]).await;
    let length: u32 = redis::from_redis_value(length).unwrap();
    assert!(length > 0);
    assert_eq!(last[0].1[0].1, line(length - 1), "without a gap");
    let said = format!("{length} events were accepted (up to line {length})");
    assert!(ran.err.contains(&said), "{said}: {}", ran.err);

    let ran = place.run(&["generate", "--seconds", "60"]);
    assert_eq!(ran.code, 69, "{ran:?}");
    assert!(ran.err.contains("raise maxmemory") && ran.err.contains(" accepted"), "{}", ran.err);
    place.stop().await;
}

#[tokio::test]
async fn a_key_that_is_no_stream_takes_no_events_and_fails_the_check() {
    let place = Installation::new().await;
    place.redis(&["SET", "fairlane:events", "1"]).await;
    for command in ["publish", "generate"] {
        let ran = run_in(place.dir.path(), &[command], &line(1));
        assert_eq!(ran.code, 1, "{ran:?}");
        let said = ran.err.contains("WRONGTYPE") && ran.err.contains("no event was accepted");
        assert!(said, "{ran:?}");
    }

    let ran = place.run(&["check"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("fail   bus fairlane:events"), "{}", ran.out);
    place.stop().await;
}

/// Without this note, a command would silently show an empty Redis that it has just started.
#[test]
fn a_command_in_a_directory_without_configuration_says_so_once() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run_in(dir.path(), &["status", "--json"], "");
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.err.matches("note: no fairlane.toml here").count(), 1, "{ran:?}");
    assert!(ran.err.contains("./fairlane-data") && ran.err.contains("--config FILE"), "{ran:?}");
    assert!(serde_json::from_str::<Value>(&ran.out).is_ok(), "{ran:?}");

    std::fs::write(dir.path().join("fairlane.toml"), "[redis]\nshards = 4\n").unwrap();
    let ran = run_in(dir.path(), &["status"], "");
    assert!(ran.code == 0 && ran.err.is_empty(), "{ran:?}");
}

#[tokio::test]
async fn status_shows_each_problem_and_the_command_that_helps() {
    let place = Installation::new().await;
    let log = place.queue("log", 2);
    log.push(&bot("a"), &events(&bot("a"), 0..5), PushOptions::default()).await.unwrap();
    log.pause(None).await.unwrap();
    place.redis(&["HSET", &keys::pipelines(&Prefix::default()), "old", "1"]).await;
    place.redis(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;

    let ran = place.run(&["status"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    for said in [
        "maxmemory-policy noeviction",
        "fairlane dead list --pipeline log",
        "fairlane pipelines resume log",
        "fairlane pipelines drop old",
    ] {
        assert!(ran.out.contains(said), "{said}: {}", ran.out);
    }
    assert!(!ran.out.contains('\u{1b}'), "no colours outside a terminal");

    let status = place.json(&["status"]);
    assert_eq!(status["redis"]["eviction"], "allkeys-lru");
    assert_eq!(status["pipelines"][0]["depth"], 2);
    assert_eq!(status["pipelines"][0]["dead"], 3);
    assert_eq!(status["pipelines"][1]["state"], "unconfigured");
    drop(log);
    place.stop().await;
}

#[tokio::test]
async fn bots_are_listed_shown_and_changed() {
    let place = Installation::new().await;
    let log = place.queue("log", 0);
    let (full, odd) = (bot("full"), bot("-odd * {}"));
    log.push(&full, &events(&full, 0..3), PushOptions::default()).await.unwrap();
    log.push(&odd, &events(&odd, 0..1), PushOptions::default()).await.unwrap();
    let now = Duration::from_secs(1);
    let state = async |bot: &BotId| log.view_bot(bot, now).await.unwrap();

    let list = place.json(&["bots", "list"]);
    let names: Vec<_> = list.as_array().unwrap().iter().map(|bot| &bot["bot"]).collect();
    assert_eq!(names, ["full", "-odd * {}"]);
    let list = place.json(&["bots", "list", "--sort", "age", "--limit", "1"]);
    assert_eq!(list.as_array().unwrap().len(), 1);

    let shown = place.run(&["bots", "show", "full", "--limit", "2"]);
    for said in [
        "full in pipeline log\nWaiting for its turn\n",
        "state     ready",
        "depth     3",
        "tag.applied",
    ] {
        assert!(shown.out.contains(said), "{said}: {}", shown.out);
    }
    assert_eq!(place.json(&["bots", "show", "full"])["next"][2]["event"]["id"], "2");
    let unseen = place.run(&["bots", "show", "nosuch"]);
    let said = "bot nosuch was never seen in pipeline log, or left nothing there\n";
    assert_eq!(unseen.out, said);

    place.json(&["bots", "set", "full", "--weight", "3"]);
    assert_eq!(state(&full).await.weight, 3);
    assert_eq!(place.json(&["bots", "pause", "full"])["changed"], true);
    assert_eq!(place.json(&["bots", "pause", "full"])["changed"], false);
    assert_eq!(state(&full).await.state, BotState::Paused);
    assert_eq!(place.json(&["bots", "resume", "full"])["changed"], true);
    assert_eq!(state(&full).await.state, BotState::Ready);
    let ran = place.run(&["bots", "release", "full"]);
    assert_eq!(ran.out, "bot full of pipeline log was neither leased nor parked\n");
    let ran = place.run(&["bots", "purge", "--", "-odd * {}"]);
    assert_eq!((ran.code, ran.out.as_str()), (64, ""), "{ran:?}");
    assert!(ran.err.contains("add --yes"), "{ran:?}");
    assert_eq!(state(&odd).await.depth, 1, "nothing was done");
    let ran = place.run(&["bots", "purge", "--yes", "--", "-odd * {}"]);
    assert_eq!(ran.out, "bot -odd * {} of pipeline log is purged: deleted 1 event\n");
    assert_eq!(state(&odd).await.depth, 0);

    place.redis(&["HSET", &keys::pipelines(&Prefix::default()), "other", "1"]).await;
    let ran = place.run(&["bots", "pause", "full"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("--pipeline: log, other"), "{ran:?}");
    assert_eq!(place.run(&["bots", "pause", "full", "--pipeline", "log"]).code, 0);
    let ran = place.run(&["bots", "pause", "full", "--pipeline", "nope"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("\"nope\"") && ran.err.contains("log, other"), "{ran:?}");
    drop(log);
    place.stop().await;
}

#[tokio::test]
async fn dead_letters_are_put_back_in_order_or_dropped() {
    let place = Installation::new().await;
    let log = place.queue("log", 1);
    let (a, b) = (bot("a"), bot("b"));
    log.push(&a, &events(&a, 0..151), PushOptions::default()).await.unwrap();
    log.push(&b, &events(&b, 0..3), PushOptions::default()).await.unwrap();

    let list = place.json(&["dead", "list", "--limit", "1000"]);
    assert_eq!(list.as_array().unwrap().len(), 152);
    let list = place.json(&["dead", "list", "--bot", "b"]);
    let ids: Vec<_> = list.as_array().unwrap().iter().map(|l| l["id"].as_str().unwrap()).collect();
    let [newer, older] = ids[..] else { panic!("{list}") };
    let shown = place.run(&["dead", "show", newer]);
    assert!(
        shown.out.contains("max_queue = 1") && shown.out.contains("\"id\": \"2\""),
        "{shown:?}"
    );
    let ran = place.run(&["dead", "show", "0.1-0"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("0.1-0") && ran.err.contains("fairlane dead list"), "{ran:?}");

    assert_eq!(place.json(&["dead", "redrive", newer])["letters"], 1);
    assert_eq!(place.run(&["dead", "redrive", newer]).code, 1);
    assert_eq!(place.json(&["dead", "drop", older])["letters"], 1);
    let ran = place.run(&["dead", "redrive", "--bot", "a"]);
    assert_eq!((ran.code, ran.out.as_str()), (64, ""), "{ran:?}");
    assert!(ran.err.contains("all dead letters of a bot"), "{ran:?}");
    assert!(ran.err.contains("nothing was done") && ran.err.contains("add --yes"), "{ran:?}");
    assert_eq!(log.next_events(&a, 1_000).await.unwrap().len(), 1, "nothing was done");
    assert_eq!(place.json(&["dead", "redrive", "--bot", "a", "--yes"])["letters"], 150);
    let queued = log.next_events(&a, 1_000).await.unwrap();
    let handled_in: Vec<_> =
        queued.iter().map(|e| e.event.as_ref().unwrap().id().to_owned()).collect();
    assert_eq!(handled_in, (0..151).map(|id| id.to_string()).collect::<Vec<_>>());

    // A bot may queue one event here, and further events are dead-lettered.
    log.push(&b, &events(&b, 3..6), PushOptions::default()).await.unwrap();
    log.push(&a, &events(&a, 200..201), PushOptions::default()).await.unwrap();
    let shown = place.run(&["bots", "show", "b"]).out;
    for said in
        ["dead      3 dead letters", " 5, ", "max_queue = 1", "dead list --pipeline log --bot=b"]
    {
        assert!(shown.contains(said), "{said}: {shown}");
    }
    let shown = place.json(&["bots", "show", "b"])["dead_letters"].clone();
    assert_eq!((&shown["count"], &shown["at_least"]), (&3.into(), &false.into()), "{shown}");
    assert_eq!(shown["newest"][0]["event"], "5");
    assert_eq!(shown["newest"][0]["type"], "tag.applied");
    for bulk in [
        &["dead", "drop", "--all"][..],
        &["dead", "drop", "--bot", "b"],
        &["dead", "redrive", "--all"],
    ] {
        let ran = place.run(bulk);
        assert_eq!((ran.code, ran.out.as_str()), (64, ""), "{ran:?}");
        assert!(ran.err.contains("nothing was done") && ran.err.contains("add --yes"), "{ran:?}");
    }
    assert_eq!(place.json(&["dead", "drop", "--bot", "b", "--yes"])["letters"], 3);
    assert_eq!(place.json(&["dead", "redrive", "--all", "--yes"])["letters"], 1);
    log.push(&b, &events(&b, 6..8), PushOptions::default()).await.unwrap();
    assert_eq!(place.json(&["dead", "drop", "--all", "--yes"])["letters"], 2);
    assert_eq!(place.run(&["dead", "list"]).out, "no dead letters\n");
    drop(log);
    place.stop().await;
}

#[tokio::test]
async fn a_dropped_pipeline_leaves_nothing_and_takes_nothing_else() {
    let place = Installation::new().await;
    let (old, log) = (place.queue("old", 2), place.queue("log", 0));
    for queue in [&old, &log] {
        queue.push(&bot("a"), &events(&bot("a"), 0..5), PushOptions::default()).await.unwrap();
    }
    place.redis(&["HSET", &keys::pipelines(&Prefix::default()), "old", "1", "log", "1"]).await;
    // A key of a bus stream whose name starts like the pipeline.
    place.redis(&["HSET", &keys::read(&Prefix::default(), "old:events"), "entries", "1"]).await;

    let ran = place.run(&["pipelines", "drop", "log", "--yes"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("enabled = false"), "{ran:?}");
    let ran = place.run(&["pipelines", "drop", "old"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("--yes"), "{ran:?}");
    let ran = place.run(&["pipelines", "drop", "old", "--yes"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.out, "dropped pipeline old: deleted 2 events and 3 dead letters\n");

    let left = place.redis(&["KEYS", "fl:{old:*"]).await;
    let left: Vec<String> = redis::from_redis_value(left).unwrap();
    assert_eq!(left, [keys::read(&Prefix::default(), "old:events")]);
    let known = place.json(&["pipelines", "list"]);
    assert_eq!(known.as_array().unwrap().len(), 1);
    assert_eq!((&known[0]["name"], &known[0]["depth"]), (&"log".into(), &5.into()));

    assert_eq!(place.json(&["pipelines", "pause", "log"])["changed"], true);
    assert_eq!(place.json(&["pipelines", "list"])[0]["state"], "paused");
    assert_eq!(place.json(&["pipelines", "resume", "log"])["changed"], true);
    assert_eq!(place.json(&["pipelines", "list"])[0]["state"], "enabled");
    drop((old, log));
    place.stop().await;
}

#[tokio::test]
async fn another_number_of_shards_is_refused() {
    let place = Installation::new().await;
    place.redis(&["SET", &keys::shards(&Prefix::default()), "8"]).await;
    for arguments in [&["bots", "list"][..], &["check"]] {
        let ran = place.run(arguments);
        assert_eq!(ran.code, 64, "{ran:?}");
        assert!(format!("{}{}", ran.out, ran.err).contains("set redis.shards = 8"), "{ran:?}");
    }
    place.redis(&["SET", &keys::shards(&Prefix::default()), "4"]).await;
    assert_eq!(place.run(&["bots", "list"]).code, 0);
    place.stop().await;
}

#[tokio::test]
async fn a_filter_that_cannot_be_compiled_fails_the_check() {
    let place = Installation::new().await;
    let config = format!("{CONFIG}filter = \"event.type ==\"\n");
    std::fs::write(place.dir.path().join("fairlane.toml"), config).unwrap();
    let ran = place.run(&["check"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.out.contains("pipelines.log.filter"), "{}", ran.out);
    place.stop().await;
}

#[tokio::test]
async fn check_reports_a_risk_of_loss_and_a_forbidden_command() {
    let place = Installation::new().await;
    assert_eq!(place.run(&["check"]).code, 0);
    place.redis(&["CONFIG", "SET", "appendonly", "no"]).await;
    let findings = place.json(&["check"]);
    let warned: Vec<_> =
        findings.as_array().unwrap().iter().filter(|f| f["state"] == "warn").collect();
    assert_eq!(warned.len(), 1, "{findings}");
    assert_eq!(warned[0]["check"], "durability");

    place.redis(&["ACL", "SETUSER", "default", "-evalsha"]).await;
    let ran = place.run(&["check"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("fail   scripts") && ran.out.contains("ACL SETUSER"), "{}", ran.out);
    let left = place.redis(&["KEYS", "fl:{check-*"]).await;
    assert_eq!(redis::from_redis_value::<Vec<String>>(left).unwrap(), [""; 0]);
    place.stop().await;
}
