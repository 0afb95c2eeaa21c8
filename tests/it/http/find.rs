//! Where is an event? Over HTTP, on the command line and on the page, for each answer that there is.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::handler::{Failure, Outcomes, Slice};
use serde_json::{Value, json};

use crate::support::bus::add;
use crate::support::cli::{Ran, run_in};
use crate::support::config::{STREAM, config};
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::proxy::distance::Distance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);

/// An event as JSON, with the id `<bot>-1` and so on.
fn event(bot: &str, n: u32, change: &Value) -> String {
    let mut event = json!({
        "specversion": "1.0", "id": format!("{bot}-{n}"), "source": "/test", "type": "test.event",
        "botid": bot, "data": { "keep": true },
    });
    event.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    event.to_string()
}

/// Ends slices as the name of their bot says.
async fn handle(slice: Slice) -> Result<Outcomes, Failure> {
    match slice.bot.as_str() {
        "failing" => Err(Failure::transient(0, "no stock").retry_after(LONG)),
        "dead" => Err(Failure::permanent(0, "wrong colour")),
        "busy" => {
            tokio::time::sleep(LONG).await;
            Ok(Outcomes::done())
        }
        _ => Ok(Outcomes::done()),
    }
}

struct Rig {
    server: RedisServer,
    config: String,
    instance: Option<Instance>,
}

impl Rig {
    async fn start() -> Self {
        Self::start_with(&[]).await
    }

    async fn start_with(settings: &[(&str, &str)]) -> Self {
        let server = RedisServer::start(Options::default());
        let pipeline = [
            ("pipelines.find.events", "[\"test.*\"]"),
            ("pipelines.find.filter", "\"event.data.keep\""),
            ("pipelines.find.batch", "1"),
            ("pipelines.find.max_attempts", "3"),
            ("pipelines.find.handler_timeout", "\"8s\""),
        ];
        let config = config(&server, "find", &[&pipeline, settings].concat());
        let instance = Instance::start(&config, Log::default().handler(handle)).await;
        Self { server, config, instance: Some(instance) }
    }

    fn client(&self) -> Client {
        self.instance.as_ref().unwrap().client()
    }

    /// What HTTP tells of an event.
    async fn found(&self, path: &str) -> Value {
        let response = self.client().get(&format!("/v1/events/{path}")).await;
        assert_eq!(response.code, 200, "{path}: {response:?}");
        response.json()
    }

    async fn state(&self, path: &str) -> String {
        let response = self.client().get(&format!("/v1/events/{path}")).await;
        let found = response.json();
        found["pipelines"][0]["state"].as_str().unwrap_or_default().to_owned()
    }

    async fn becomes(&self, path: &str, state: &str) -> Value {
        eventually(LONG, &format!("{path} is {state}"), async || self.state(path).await == state)
            .await;
        self.found(path).await
    }

    async fn command(&self, arguments: &[&str]) -> Ran {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("fairlane.toml"), &self.config).unwrap();
        let arguments = [&["events", "find"], arguments].concat().join("\n");
        let run = move || run_in(directory.path(), &arguments.split('\n').collect::<Vec<_>>(), "");
        tokio::task::spawn_blocking(run).await.unwrap()
    }

    /// Runs a script with each key of a pattern. Returns their number.
    async fn run(&self, script: &str, pattern: &str) -> usize {
        let mut connection = self.server.connection().await;
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut connection).await.unwrap();
        for key in &keys {
            let mut run = redis::cmd("EVAL");
            let () = run.arg(&[script, "1", key]).query_async(&mut connection).await.unwrap();
        }
        keys.len()
    }

    async fn page(&self, id: &str) -> String {
        let response = self.client().get(&format!("/events?id={id}")).await;
        assert_eq!(response.code, 200, "{response:?}");
        String::from_utf8(response.body).unwrap()
    }
}

#[tokio::test]
async fn an_event_is_found_in_each_state_over_http_by_command_and_on_the_page() {
    let mut rig = Rig::start().await;
    let events = [
        event("good", 1, &json!({})),
        event("good", 2, &json!({ "data": { "keep": false } })),
        event("good", 3, &json!({ "type": "other.event" })),
        event("good", 4, &json!({ "expirytime": "2020-01-01T00:00:00Z" })),
        event("failing", 1, &json!({})),
        event("failing", 2, &json!({})),
        event("dead", 1, &json!({})),
        event("busy", 1, &json!({})),
        event("busy", 2, &json!({})),
    ];
    add(&rig.server, STREAM, &events).await;
    let mut connection = rig.server.connection().await;
    let bad = r#"{"id":"broken-1","specversion":"1.0","type":"test.event"}"#;
    let () = redis::cmd("XADD")
        .arg(&[STREAM, "*", "event", bad])
        .query_async(&mut connection)
        .await
        .unwrap();

    let done = rig.becomes("good-1", "done").await;
    assert_eq!((&done["bot"], &done["bus"]["stream"]), (&json!("good"), &json!(STREAM)));
    assert_eq!(done["event"]["source"], "/test");
    assert_eq!(done["pipelines"][0]["attempts"][0]["result"], "done");
    for (id, state, words) in [
        ("good-1", "done", "done "),
        // For 8 s.
        ("busy-1", "in_flight", "being handled, at place 1 of 2"),
        ("busy-2", "waiting", "waiting at place 2 of 2"),
        ("good-2", "filtered_out", "the filter of the pipeline excludes it"),
        ("good-4", "expired", "its expirytime has passed"),
        ("failing-1", "parked", "no stock"),
        ("failing-2", "parked", "waiting at place 2 of 2"),
        ("dead-1", "dead", "wrong colour"),
        ("good-3", "other_type", "no pipeline takes"),
    ] {
        rig.becomes(id, state).await;
        let ran = rig.command(&[id]).await;
        assert_eq!(ran.code, 0, "{id}: {ran:?}");
        assert!(ran.out.contains(words), "{id}: {}", ran.out);
        let page = rig.page(id).await;
        let words = if id == "good-3" { "No pipeline takes" } else { words };
        assert!(page.contains(words), "{id}: {page}");
    }
    let dead = rig.found("dead-1").await;
    assert_eq!(dead["pipelines"][0]["attempts"][0]["reason"], "wrong colour");
    let letter = dead["pipelines"][0]["letter"].as_str().unwrap();
    let ran = rig.command(&["dead-1"]).await;
    assert!(ran.out.contains(&format!("fairlane dead show {letter}")), "{ran:?}");
    let failing = rig.found("failing-1?bot=failing").await;
    assert_eq!(failing["pipelines"][0]["attempts"][0]["result"], "failed");

    eventually(LONG, "the broken entry is put aside", async || {
        rig.client().get("/v1/events/broken-1").await.code == 200
    })
    .await;
    let broken = rig.found("broken-1").await;
    assert_eq!((&broken["known"], &broken["event"]), (&json!(true), &Value::Null));
    assert!(rig.command(&["broken-1"]).await.out.contains("invalid "));
    assert!(rig.page("broken-1").await.contains("Not an event"));

    let unknown = rig.client().get("/v1/events/nobody-1").await;
    assert_eq!(unknown.code, 404, "{unknown:?}");
    assert!(unknown.json()["detail"].as_str().unwrap().contains("name its bot"), "{unknown:?}");
    let ran = rig.command(&["nobody-1", "--bot", "good"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.out.contains("nothing is known of it") && ran.out.contains("entries of the bus"));

    rig.instance.take().unwrap().stop().await;
    add(&rig.server, STREAM, &[event("good", 9, &json!({}))]).await;
    let ran = rig.command(&["good-9"]).await;
    assert!(ran.out.contains("on the bus, not copied yet"), "{}", ran.out);
}

#[tokio::test]
async fn an_event_that_the_bus_has_forgotten_is_found_by_its_attempts_its_letter_and_its_queue() {
    let rig = Rig::start().await;
    let events = ["good", "dead", "failing"].map(|bot| event(bot, 1, &json!({})));
    add(&rig.server, STREAM, &events).await;
    rig.becomes("good-1", "done").await;
    rig.becomes("dead-1", "dead").await;
    rig.becomes("failing-1", "parked").await;
    let mut connection = rig.server.connection().await;
    let () = redis::cmd("XTRIM")
        .arg(&[STREAM, "MAXLEN", "0"])
        .query_async(&mut connection)
        .await
        .unwrap();
    for (id, state) in [("good-1", "done"), ("dead-1", "dead"), ("failing-1", "parked")] {
        let found = rig.found(id).await;
        assert_eq!(found["bus"], Value::Null);
        assert_eq!(found["pipelines"][0]["state"], state, "{found}");
    }
    // A paused bot has no attempt: its queue is searched if the bot is named.
    rig.instance.as_ref().unwrap().queue("find").pause(None).await.unwrap();
    add(&rig.server, STREAM, &[event("new", 1, &json!({}))]).await;
    rig.becomes("new-1", "paused").await;
    let () = redis::cmd("XTRIM")
        .arg(&[STREAM, "MAXLEN", "0"])
        .query_async(&mut connection)
        .await
        .unwrap();
    assert_eq!(rig.client().get("/v1/events/new-1").await.code, 404);
    assert_eq!(rig.state("new-1?bot=new").await, "paused");
}

/// The list of the lane has copies of its first event in front of the wanted one: more than are searched.
#[tokio::test]
async fn an_event_behind_more_events_of_its_lane_than_are_searched_is_not_said_to_have_left() {
    let rig = Rig::start_with(&[("pipelines.find.order_by", "\"subject\"")]).await;
    let events = [1, 2].map(|n| event("failing", n, &json!({ "subject": "bad" })));
    add(&rig.server, STREAM, &events).await;
    eventually(LONG, "both are set aside", async || {
        let bot = rig.client().get("/v1/pipelines/find/bots/failing").await;
        bot.code == 200 && bot.json()["set_aside"] == 2
    })
    .await;
    assert_eq!(rig.state("failing-2").await, "parked");
    let copy = "local one = redis.call('LINDEX', KEYS[1], 0) \
        for i = 1, 20000 do redis.call('LPUSH', KEYS[1], one) end";
    assert_eq!(rig.run(copy, "fl:{find:*}:a:*").await, 1);
    assert_eq!(rig.state("failing-1").await, "parked");
    assert_eq!(rig.state("failing-2").await, "unknown");
}

/// All attempts of a shard may have many MB, and Redis does nothing else while it reads them.
#[tokio::test]
async fn a_search_without_the_bot_reads_the_attempts_of_all_bots_a_page_at_a_time() {
    let rig = Rig::start().await;
    add(&rig.server, STREAM, &["good", "failing"].map(|bot| event(bot, 1, &json!({})))).await;
    rig.becomes("good-1", "done").await;
    rig.becomes("failing-1", "parked").await;
    let mut connection = rig.server.connection().await;
    eventually(LONG, "both attempts are kept", async || {
        let mut attempts = 0;
        for id in ["good-1", "failing-1"] {
            let found = rig.found(id).await;
            attempts += found["pipelines"][0]["attempts"].as_array().unwrap().len();
        }
        attempts == 2
    })
    .await;
    let () = redis::cmd("XTRIM")
        .arg(&[STREAM, "MAXLEN", "0"])
        .query_async(&mut connection)
        .await
        .unwrap();
    // What cannot be read takes room, too.
    let done = "for i = 1, 200 do redis.call('XADD', KEYS[1], '*', 'b', 'x') end";
    assert_eq!(rig.run(done, "fl:{find:*}:history").await, 1);
    let failed =
        "for i = 1, 200 do redis.call('HSET', KEYS[1], 'other-' .. i, string.rep('x', 99)) end";
    assert_eq!(rig.run(failed, "fl:{find:*}:history-failed").await, 1);
    rig.server.note_commands().await;
    for (id, state) in [("good-1", "done"), ("failing-1", "parked")] {
        assert_eq!(rig.found(id).await["pipelines"][0]["state"], state, "{id}");
    }
    // A search that finds nothing reads all pages.
    assert_eq!(rig.client().get("/v1/events/none-1").await.code, 404);
    let commands = rig.server.noted().await;
    // Of the shard with the most of them.
    let reads = |word: &str| {
        let mut of_shards = BTreeMap::<_, usize>::new();
        for words in commands.iter().filter(|words| words[0] == word) {
            if words[1].contains("}:history") {
                *of_shards.entry(&words[1]).or_default() += 1;
            }
        }
        of_shards.into_values().max().unwrap_or(0)
    };
    // Without pages, each of the three searches would read a shard once.
    assert!(reads("XREVRANGE") > 3 && reads("HSCAN") > 3, "{commands:?}");
    for words in &commands {
        let is_read = ["XRANGE", "XREVRANGE", "HGETALL"].contains(&words[0].as_str());
        let is_whole = is_read && !words.contains(&"COUNT".to_owned());
        assert!(!is_whole || !words[1].contains("}:history"), "{words:?}");
    }
}

#[tokio::test]
async fn a_token_for_certain_bots_finds_only_events_of_its_bots() {
    let tokens = Tokens::new(&[
        ("all", r#"scopes = ["read"], bots = ["*"]"#),
        ("good", r#"scopes = ["read"], bots = ["good"]"#),
    ]);
    let rig = Rig::start_with(&[("auth.tokens", &tokens.setting)]).await;
    let events = ["good", "failing"].map(|bot| event(bot, 1, &json!({})));
    add(&rig.server, STREAM, &events).await;
    let (all, good) =
        (rig.client().with_token(&text("all")), rig.client().with_token(&text("good")));
    for id in ["good-1", "failing-1"] {
        eventually(LONG, "the event is found", async || {
            all.get(&format!("/v1/events/{id}")).await.code == 200
        })
        .await;
    }
    for (path, code) in [
        ("/v1/events/good-1?bot=good", 200),
        // Without the bot, the answer could tell of events of others.
        ("/v1/events/good-1", 400),
        ("/v1/events/failing-1?bot=failing", 403),
        ("/v1/events/failing-1?bot=good", 404),
        ("/v1/pipelines/find/bots/good/attempts", 200),
        ("/v1/pipelines/find/bots/failing/attempts", 403),
    ] {
        let response = good.get(path).await;
        assert_eq!(response.code, code, "{path}: {response:?}");
    }
}

#[tokio::test]
async fn a_search_by_a_token_for_certain_bots_reads_the_bus_for_a_second() {
    let tokens = Tokens::new(&[("good", r#"scopes = ["read"], bots = ["good"]"#)]);
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let distance = Distance::start(server.tcp_addr()).await;
    let settings =
        [("pipelines.find.events", "[\"test.*\"]"), ("auth.tokens", tokens.setting.as_str())];
    let config = config(&server, "find", &settings).replace(&server.url(), &distance.url());
    let instance = Instance::start(&config, Log::default().handler(handle)).await;
    let good = instance.client().with_token(&text("good"));
    let find = async || good.get("/v1/events/good-1?bot=good").await;
    add(&server, STREAM, &[event("good", 1, &json!({}))]).await;
    // Its attempt is kept, so it is known although the search does not come to its entry.
    eventually(LONG, "it is handled", async || {
        let found = find().await;
        found.code == 200 && found.json()["pipelines"][0]["attempts"][0]["result"] == "done"
    })
    .await;
    let newer = (0..4_000).map(|n| event("other", n, &json!({ "type": "other.event" })));
    add(&server, STREAM, &newer.collect::<Vec<_>>()).await;
    // A read takes 100 ms and gives up to 64 entries.
    distance.set(Duration::from_millis(50));
    let found = find().await;
    assert_eq!(found.code, 200, "{found:?}");
    let searched = found.json()["searched"].clone();
    assert_eq!(searched["complete"], false, "{searched}");
    assert!(searched["entries"].as_u64().unwrap() < 800, "{searched}");
    drop(instance);
}

#[tokio::test]
async fn a_search_with_a_mistake_says_what_is_wrong() {
    let rig = Rig::start().await;
    let long = "x".repeat(1_025);
    for path in [long.as_str(), "e?bot=", "e?since_ms=soon", "e?wrong=1"] {
        let response = rig.client().get(&format!("/v1/events/{path}")).await;
        assert_eq!(response.code, 400, "{path}: {response:?}");
    }
}
