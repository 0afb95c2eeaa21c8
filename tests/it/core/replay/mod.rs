//! Replay: the events of a range of the bus go to the end of the queues of one pipeline, exactly once
//! and in order, whatever interrupts it.

mod interrupted;
mod kept;
mod range;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, rfc3339};
use fairlane::handler::{Handler, Outcomes};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::bus::{add, event};
use crate::support::cli::{Ran, run_in};
use crate::support::config::{STREAM, configs};
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const JSON: (&str, &str) = ("content-type", "application/json");

/// An event that a handler got: its bot, its id, and the replay that put it.
type Got = (String, String, Option<String>);

/// A Redis with two pipelines, and what their handlers got.
struct Rig {
    server: RedisServer,
    config: String,
    directory: TempDir,
    got: Arc<Mutex<Vec<Got>>>,
}

impl Rig {
    fn new(settings: &[(&str, &str)]) -> Self {
        let server = RedisServer::start(Options { tcp: true, ..Options::default() });
        let types = "[\"order.*\"]";
        let all = [&[("pipelines.work.events", types)], settings].concat();
        let config = configs(&server, &["work", "other"], &all);
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("fairlane.toml"), &config).unwrap();
        Self { server, config, directory, got: Arc::default() }
    }

    fn handler(&self) -> impl Handler + use<> {
        let got = Arc::clone(&self.got);
        Log::default().handler(move |slice| {
            let all = slice.events.iter().map(|delivery| {
                let mark = delivery.event.extension("fairlanereplay");
                (
                    slice.bot.to_string(),
                    delivery.event.id().to_owned(),
                    mark.and_then(Value::as_str).map(str::to_owned),
                )
            });
            got.lock().unwrap().extend(all);
            async { Ok(Outcomes::done()) }
        })
    }

    async fn instance(&self) -> Instance {
        Instance::start(&self.config, self.handler()).await
    }

    /// What the handlers got of a bot: ids, in order, of the replay or not.
    fn ids(&self, bot: &str, replayed: bool) -> Vec<String> {
        let got = self.got.lock().unwrap();
        let of_bot = got.iter().filter(|(of, _, mark)| of == bot && mark.is_some() == replayed);
        of_bot.map(|(_, id, _)| id.clone()).collect()
    }

    async fn got(&self, events: usize) {
        let what = format!("the handlers got {events} events");
        eventually(LONG, &what, async || self.got.lock().unwrap().len() >= events).await;
        // Others would come now.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(self.got.lock().unwrap().len(), events);
    }

    fn command(&self, arguments: &[&str]) -> Ran {
        run_in(self.directory.path(), &[&["replay"], arguments].concat(), "")
    }

    async fn in_background(&self, arguments: &[&str]) -> Ran {
        let directory = self.directory.path().to_owned();
        let arguments: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
        let run = move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            run_in(&directory, &[&["replay"], &arguments[..]].concat(), "")
        };
        tokio::task::spawn_blocking(run).await.unwrap()
    }

    /// The keys, with what they contain.
    async fn data(&self) -> BTreeMap<String, Vec<u8>> {
        let mut connection = self.server.connection().await;
        let names: Vec<String> =
            redis::cmd("KEYS").arg("*").query_async(&mut connection).await.unwrap();
        let mut data = BTreeMap::new();
        for name in names {
            let dump: Option<Vec<u8>> =
                redis::cmd("DUMP").arg(&name).query_async(&mut connection).await.unwrap();
            data.insert(name, dump.unwrap_or_default());
        }
        data
    }

    /// Number of queued events of the pipeline.
    async fn depth(&self) -> u64 {
        let mut connection = self.server.connection().await;
        let names: Vec<String> =
            redis::cmd("KEYS").arg("fl:{work:*}:q:*").query_async(&mut connection).await.unwrap();
        let mut depth = 0;
        for name in names {
            let length: u64 =
                redis::cmd("LLEN").arg(&name).query_async(&mut connection).await.unwrap();
            depth += length;
        }
        depth
    }
}

fn ids(numbers: std::ops::Range<u32>) -> Vec<String> {
    numbers.map(|n| n.to_string()).collect()
}

/// Events of several bots, mixed.
fn mixed(bots: &[&str], numbers: std::ops::Range<u32>) -> Vec<String> {
    numbers.flat_map(|n| bots.iter().map(move |bot| event(bot, "order.paid", n))).collect()
}

async fn replay(client: &Client, body: &Value) -> (u16, Value) {
    let path = "/v1/pipelines/work/replay";
    let response = client.send("POST", path, &[JSON], body.to_string().as_bytes()).await;
    (response.code, response.json())
}

#[tokio::test]
async fn a_replay_beside_live_traffic_is_exact_in_order_and_for_one_pipeline_only() {
    let rig = Rig::new(&[("pipelines.work.filter", "\"event.id != '3'\"")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b", "c"], 0..50)).await;
    add(&rig.server, STREAM, &[event("a", "tag.applied", 99), "{}".to_owned()]).await;
    // The pipeline `other` takes all types and has no filter.
    rig.got(3 * 50 + 1 + 3 * 49).await;
    // The range ends behind the last millisecond of an event.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let until = rfc3339(fairlane::clock::millis(SystemClock.now()));
    rig.got.lock().unwrap().clear();

    let arguments =
        ["--pipeline", "work", "--from", "1h ago", "--to", &until, "--rate", "400/s", "--yes"];
    let live = async {
        for n in 1_000..1_040 {
            add(&rig.server, STREAM, &mixed(&["a", "b", "c"], n..n + 1)).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let (ran, ()) = tokio::join!(rig.in_background(&arguments), live);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("put 147 events at the end"), "{ran:?}");
    rig.got(147 + 2 * 120).await;
    let expected: Vec<String> = ids(0..50).into_iter().filter(|id| id != "3").collect();
    for bot in ["a", "b", "c"] {
        assert_eq!(rig.ids(bot, true), expected, "{bot}");
        // Each live event twice: once per pipeline, each in order.
        let live = rig.ids(bot, false);
        let distinct: BTreeSet<&String> = live.iter().collect();
        assert_eq!((live.len(), distinct.len()), (80, 40), "{bot}");
    }
    let marks: BTreeSet<_> =
        rig.got.lock().unwrap().iter().filter_map(|got| got.2.clone()).collect();
    assert_eq!(marks.len(), 1);
    assert!(ran.err.contains(marks.first().unwrap()), "{ran:?}");
    instance.stop().await;
}

#[tokio::test]
async fn live_events_keep_their_order_while_a_replay_runs() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..200)).await;
    rig.got(400).await;
    rig.got.lock().unwrap().clear();
    let until = rfc3339(fairlane::clock::millis(SystemClock.now()) + 1);
    // The live events are behind it.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let arguments = ["-p", "work", "--from", "1h", "--to", &until, "--bot", "a", "--yes"];
    let live = async {
        for n in 1_000..1_100 {
            add(&rig.server, STREAM, &mixed(&["a", "b"], n..n + 1)).await;
        }
    };
    let (ran, ()) = tokio::join!(rig.in_background(&arguments), live);
    assert_eq!(ran.code, 0, "{ran:?}");
    rig.got(200 + 200).await;
    assert_eq!((rig.ids("a", true), rig.ids("b", true)), (ids(0..200), Vec::new()));
    for bot in ["a", "b"] {
        assert_eq!(rig.ids(bot, false), ids(1_000..1_100), "{bot}");
    }
    instance.stop().await;
}

#[tokio::test]
async fn a_replay_that_is_killed_again_and_again_puts_each_event_once() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    let bots = ["a", "b", "c", "d"];
    add(&rig.server, STREAM, &mixed(&bots, 0..100)).await;
    rig.got(400).await;
    instance.stop().await;
    rig.got.lock().unwrap().clear();

    let notes = rig.directory.path().join("notes");
    let start = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_fairlane"))
            .arg("replay")
            .args(arguments)
            .current_dir(rig.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&notes).unwrap())
            .spawn()
            .unwrap()
    };
    let mut child = start(&["-p", "work", "--from", "1h", "--rate", "150/s", "--yes"]);
    let mut id = String::new();
    for round in 1..=4 {
        let before = rig.depth().await;
        eventually(LONG, "the replay puts events", async || rig.depth().await > before + 20).await;
        child.kill().unwrap();
        child.wait().unwrap();
        if round == 1 {
            let note = std::fs::read_to_string(&notes).unwrap();
            id = note.split_whitespace().last().unwrap().to_owned();
        }
        assert!(rig.depth().await < 400);
        child = start(&["--continue", &id, "--rate", "150/s"]);
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(rig.depth().await, 400);
    let again = rig.command(&["--continue", &id, "--json"]);
    let told: Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!((again.code, &told["put"], &told["put_in_all"]), (0, &json!(0), &json!(400)));
    assert_eq!(rig.depth().await, 400);
    let instance = rig.instance().await;
    rig.got(400).await;
    for bot in bots {
        assert_eq!(rig.ids(bot, true), ids(0..100), "{bot}");
    }
    instance.stop().await;
}

#[tokio::test]
async fn events_that_do_not_fit_wait_in_order_until_the_replay_continues() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false"), ("pipelines.work.max_queue", "5")]);
    let instance = rig.instance().await;
    for n in 0..12 {
        add(&rig.server, STREAM, &mixed(&["full"], n..n + 1)).await;
        rig.got(n as usize + 1).await;
    }
    add(&rig.server, STREAM, &mixed(&["few"], 0..3)).await;
    rig.got(15).await;
    instance.stop().await;
    rig.got.lock().unwrap().clear();

    let ran = rig.command(&["-p", "work", "--from", "1h", "--yes"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("put 8 events"), "{ran:?}");
    assert!(ran.out.contains("7 events of 1 bot wait"), "{ran:?}");
    assert!(ran.out.contains("full (max_queue)"), "{ran:?}");
    let id = ran.err.split_whitespace().last().unwrap().to_owned();
    assert!(ran.err.contains(&format!("when they have room: fairlane replay --continue {id}")));
    let ran = rig.command(&["--continue", &id]);
    assert!(ran.out.contains("put 0 events"), "{ran:?}");
    for (put, code) in [(5, 1), (2, 0)] {
        let before = rig.got.lock().unwrap().len();
        let instance = rig.instance().await;
        eventually(LONG, "the queues are empty", async || rig.depth().await == 0).await;
        instance.stop().await;
        assert!(rig.got.lock().unwrap().len() > before);
        let ran = rig.command(&["--continue", &id]);
        assert!(ran.out.contains(&format!("put {put} events")), "{ran:?}");
        assert_eq!(ran.code, code, "{ran:?}");
    }
    let instance = rig.instance().await;
    rig.got(15).await;
    assert_eq!((rig.ids("full", true), rig.ids("few", true)), (ids(0..12), ids(0..3)));
    instance.stop().await;
}

#[tokio::test]
async fn a_dry_run_counts_and_changes_nothing() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a"], 0..30)).await;
    add(&rig.server, STREAM, &mixed(&["b", "a"], 30..40)).await;
    rig.got(50).await;
    let client = instance.client();
    let asked = json!({ "from": "1h ago", "dry_run": true });
    let (code, told) = replay(&client, &asked).await;
    assert_eq!((code, &told["done"], &told["put"]), (200, &json!(true), &json!(0)), "{told}");
    let found = &told["found"];
    assert_eq!(
        (&found["events"], &found["bots"], &found["entries"]),
        (&json!(50), &json!(2), &json!(50))
    );
    assert_eq!(found["top"], json!([{ "bot": "a", "events": 40 }, { "bot": "b", "events": 10 }]));
    assert_eq!(found["gone_until_ms"], Value::Null);
    instance.stop().await;

    let mut connection = rig.server.connection().await;
    let () = redis::cmd("XTRIM")
        .arg(&[STREAM, "MAXLEN", "25"])
        .query_async(&mut connection)
        .await
        .unwrap();
    let before = rig.data().await;
    let ran = rig.command(&["-p", "work", "--from", "1h ago", "--dry-run"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("25 events of 2 bots would be put"), "{ran:?}");
    assert!(ran.out.contains("the bus no longer has all entries from before"), "{ran:?}");
    let types = rig.command(&["-p", "work", "--from", "1h", "--type", "order.x*", "--dry-run"]);
    assert!(types.out.contains("0 events of 0 bots"), "{types:?}");
    assert_eq!(rig.data().await, before);
    let ran = rig.command(&["-p", "work", "--from", "1h ago"]);
    assert_eq!(ran.code, 64, "{ran:?}");
    assert!(ran.err.contains("replaying events needs a confirmation"), "{ran:?}");
    assert_eq!(rig.data().await, before);
}

#[tokio::test]
async fn a_refused_replay_names_the_reason_and_the_remedy() {
    let rig = Rig::new(&[("pipelines.other.enabled", "false")]);
    rig.instance().await.stop().await;
    let mut connection = rig.server.connection().await;
    let () = redis::cmd("HSET")
        .arg(&["fl:pipelines", "counters", "1", "notifications", "1", "left", "1"])
        .query_async(&mut connection)
        .await
        .unwrap();
    let before = rig.data().await;
    for (arguments, code, words) in [
        (&["-p", "counters", "--from", "1h"][..], 64, "would count it twice; its dead letters"),
        (&["-p", "notifications", "--from", "1h"], 64, "takes nothing from the bus"),
        (&["-p", "left", "--from", "1h"], 64, "not in this configuration"),
        (&["-p", "other", "--from", "1h"], 64, "set pipelines.other.enabled = true"),
        (&["-p", "none", "--from", "1h"], 64, "there is no pipeline"),
        (&["-p", "work", "--from", "14:00"], 64, "--from: \"14:00\" is not a time; write"),
        (&["-p", "work", "--from", "1h", "--to", "x"], 64, "--to: \"x\" is not a time"),
        (&["-p", "work", "--from", "1h", "--to", "2h"], 64, "the range of time is empty"),
        (&["-p", "work"], 64, "--from"),
        (&["--continue", "x"], 64, "there is no replay \"x\""),
        (&["--continue", "x", "--from", "1h"], 64, "cannot be used with"),
        (&["-p", "work", "--from", "1h", "--rate", "fast"], 64, "events per second"),
    ] {
        let ran = rig.command(&[arguments, &["--yes"]].concat());
        assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(words), "{arguments:?}: {ran:?}");
    }
    assert_eq!(rig.data().await, before);
}

#[tokio::test]
async fn over_http_a_client_loops_and_a_repeated_call_puts_nothing_twice() {
    let all = r#"scopes = ["publish", "read", "operate"]"#;
    let tokens = Tokens::new(&[
        ("root", &format!("{all}, bots = [\"*\"]")),
        ("shop", &format!("{all}, bots = [\"a\"]")),
        ("reader", "scopes = [\"read\"], bots = [\"*\"]"),
    ]);
    let rig = Rig::new(&[("pipelines.other.enabled", "false"), ("auth.tokens", &tokens.setting)]);
    let instance = rig.instance().await;
    add(&rig.server, STREAM, &mixed(&["a", "b"], 0..20)).await;
    rig.got(40).await;
    rig.got.lock().unwrap().clear();
    let by = |name: &str| instance.client().with_token(&text(name));
    let root = by("root");

    let asked = json!({ "from": "1h ago", "to": "2100-01-01T00:00:00Z", "id": "r-1", "limit": 7 });
    let (code, mut told) = replay(&by("root"), &asked).await;
    assert_eq!((code, &told["put"], &told["id"]), (200, &json!(7), &json!("r-1")), "{told}");
    let (mut put, mut calls) = (7, 1);
    while let Some(cursor) = told["cursor"].as_str() {
        let next = json!({ "cursor": cursor, "limit": 7 });
        // As after a lost answer: the second call goes on behind the first one.
        let (first, second) = tokio::join!(replay(&root, &next), replay(&root, &next));
        put += first.1["put"].as_u64().unwrap() + second.1["put"].as_u64().unwrap();
        told = if second.1["done"] == true { second.1 } else { first.1 };
        calls += 1;
        assert!(calls < 50);
    }
    assert_eq!((put, &told["done"]), (40, &json!(true)), "{told}");
    let (code, told) = replay(&by("root"), &json!({ "id": "r-1" })).await;
    assert_eq!((code, &told["put"], &told["done"]), (200, &json!(0), &json!(true)), "{told}");
    rig.got(40).await;
    assert_eq!((rig.ids("a", true), rig.ids("b", true)), (ids(0..20), ids(0..20)));

    for (name, asked, code, words) in [
        ("shop", json!({ "from": "1h" }), 400, "name the bot"),
        ("shop", json!({ "from": "1h", "bot": "b" }), 403, "is not for bot"),
        ("shop", json!({ "id": "r-1" }), 400, "write when the events were published"),
        ("shop", json!({ "from": "1h", "id": "r-1", "bot": "a" }), 409, "other settings"),
        ("reader", json!({ "from": "1h", "dry_run": true }), 403, "no scope"),
        ("root", json!({}), 400, "write when the events were published"),
        ("root", json!({ "from": "yesterday" }), 400, "is not a time"),
        ("root", json!({ "from": "1h", "to": "2h" }), 400, "the range of time is empty"),
        ("root", json!({ "from": "1h", "id": "r-1", "bot": "a" }), 409, "other settings"),
        ("root", json!({ "from": "1h", "id": "r 1" }), 400, "letters, digits"),
        ("root", json!({ "cursor": "x" }), 400, "not a cursor"),
        ("root", json!({ "from": "1h", "limit": 0 }), 400, "limit"),
    ] {
        let (got, told) = replay(&by(name), &asked).await;
        assert_eq!(got, code, "{asked}: {told}");
        assert!(told["detail"].as_str().unwrap().contains(words), "{asked}: {told}");
    }
    let (code, told) = replay(&by("shop"), &json!({ "from": "1h", "bot": "a", "limit": 10 })).await;
    assert_eq!((code, &told["put"]), (200, &json!(10)), "{told}");
    rig.got(50).await;
    instance.stop().await;
}
