//! What a tenant sends forges no log line, floods no log, breaks no record, and takes up no list that
//! others need.

use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinSet;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, Response, metric};
use crate::support::instance::Instance;
use crate::support::notification_rig::{Rig, accept, bot, to};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;
use fairlane::notifications::kinds::{KINDS_MAX, KINDS_OF_BOT};
use fairlane::notifications::record::NewNotification;

const LONG: Duration = Duration::from_secs(30);

async fn invalid(process: &Served, reason: &str) -> f64 {
    let (_, text) = crate::support::http::get(&process.metrics(), "/metrics").await;
    metric(&text, "fairlane_bus_invalid_total", &[("reason", reason)]).unwrap_or_default()
}

#[tokio::test]
async fn the_log_has_the_values_of_tenants_and_nothing_that_they_could_pass_for() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("pipelines.test.handler", "\"log\"")]);
    let process = Served::start(&config).await;
    let hostile = "a\u{202e}b\u{2028}c id=7 \"type\"=x";
    add(&server, STREAM, &[event(hostile, "test\u{2066}", "1\u{200f}")]).await;
    eventually(LONG, "it is handled", async || process.log().contains("\"message\":\"event\""))
        .await;
    let log = process.log();
    let line = log.lines().find(|line| line.contains("\"message\":\"event\"")).unwrap();
    assert!(line.chars().all(|c| c.is_ascii_graphic() || c == ' '), "{line:?}");
    let line: Value = serde_json::from_str(line).unwrap();
    assert_eq!(line["fields"]["bot"], hostile);
    assert_eq!(line["fields"]["type"], "test\u{2066}");
}

#[tokio::test]
async fn a_thousand_entries_that_are_no_events_write_a_few_lines() {
    let server = RedisServer::start(Options::default());
    let process =
        Served::start(&config(&server, "test", &[("pipelines.test.handler", "\"log\"")])).await;
    let bad: Vec<String> = (0..1_000)
        .map(|number| if number % 2 == 0 { "{".to_owned() } else { event("", "test", number) })
        .collect();
    add(&server, STREAM, &bad).await;
    eventually(LONG, "all are put aside", async || {
        invalid(&process, "json").await + invalid(&process, "botid").await >= 1_000.0
    })
    .await;
    let log = process.log();
    let lines = log.lines().filter(|line| line.contains("an entry of the bus is no event")).count();
    // Ten seconds may have passed several times on a slow machine.
    assert!((2..=20).contains(&lines), "{lines} lines");
}

/// A CloudEvent as `MessagePack` with an extension attribute, nested so deep.
fn nested(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0x86];
    let mut text = |text: &str| {
        bytes.push(0xa0 | u8::try_from(text.len()).unwrap());
        bytes.extend(text.as_bytes());
    };
    for (name, value) in
        [("specversion", "1.0"), ("id", "1"), ("source", "s"), ("type", "t"), ("botid", "deep")]
    {
        text(name);
        text(value);
    }
    text("extra");
    bytes.extend(vec![0x91; depth - 1]);
    bytes.push(0x90);
    bytes
}

#[tokio::test]
async fn every_accepted_event_can_be_read_back_however_deep_it_nests() {
    let server = RedisServer::start(Options::default());
    let process =
        Served::start(&config(&server, "test", &[("pipelines.test.handler", "\"log\"")])).await;
    let mut connection = server.connection().await;
    for depth in [101, 128, 1_000, 1_020, 1_021, 1_022, 100] {
        let mut add = redis::cmd("XADD");
        add.arg(STREAM).arg("*").arg("msgpack").arg(nested(depth));
        let _: String = add.query_async(&mut connection).await.unwrap();
    }
    eventually(LONG, "the last one is handled", async || {
        process.log().contains("\"message\":\"event\"")
    })
    .await;
    let refused = invalid(&process, "attribute").await + invalid(&process, "msgpack").await;
    assert!((refused - 6.0).abs() < 0.1, "{refused} refused");
    let (_, text) = crate::support::http::get(&process.metrics(), "/metrics").await;
    let dead = [("pipeline", "test"), ("outcome", "dead")];
    assert_eq!(metric(&text, "fairlane_events_total", &dead), Some(0.0), "no record is damaged");
    // A producer's "never".
    let never = event("b", "t", 1).replace('}', r#","expirytime":"9999-12-31T23:59:59Z"}"#);
    let answer = Client::new(&process.http()).publish("application/cloudevents+json", never).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
}

#[tokio::test]
async fn the_notification_types_of_one_bot_leave_room_in_the_statistics() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let new = |of: &str, kind: String| NewNotification {
        bot: bot(of),
        kind,
        when: fairlane::notifications::record::When::After(Duration::from_secs(3_600)),
        ..to("http://127.0.0.1:9/".to_owned())
    };
    for number in 0..KINDS_MAX + 10 {
        accept(&instance, &new("hostile", format!("squat-{number}"))).await;
    }
    accept(&instance, &new("quiet", "welcome".to_owned())).await;
    let stats = client.get("/v1/notifications/stats").await.json();
    let received = |wanted: &dyn Fn(&str) -> bool| -> (usize, u64) {
        let rows = stats["stats"].as_array().unwrap();
        let rows = rows.iter().filter(|row| wanted(row["type"].as_str().unwrap()));
        rows.fold((0, 0), |(n, sum), row| (n + 1, sum + row["received"].as_u64().unwrap()))
    };
    assert_eq!(received(&|kind| kind == "welcome"), (1, 1), "{stats}");
    assert_eq!(received(&|kind| kind.starts_with("squat-")).1, KINDS_OF_BOT as u64);
    assert_eq!(received(&|kind| kind == "other").1, (KINDS_MAX + 10 - KINDS_OF_BOT) as u64);
    instance.stop().await;
}

/// What a tenant sets for a bot, and every process keeps in memory.
#[derive(Debug, Clone, Copy)]
enum Marking {
    Pause,
    Weight,
}

impl Marking {
    async fn mark(self, client: &Client, bot: &str) -> Response {
        match self {
            Self::Pause => client.post(&path(bot, "/pause")).await,
            Self::Weight => set_weight(client, bot, "0.5").await,
        }
    }

    async fn undo(self, client: &Client, bot: &str) -> Response {
        match self {
            Self::Pause => client.post(&path(bot, "/resume")).await,
            Self::Weight => set_weight(client, bot, "1").await,
        }
    }
}

fn path(bot: &str, rest: &str) -> String {
    format!("/v1/pipelines/test/bots/{bot}{rest}")
}

async fn set_weight(client: &Client, bot: &str, weight: &str) -> Response {
    let (headers, body) =
        ([("content-type", "application/json")], format!("{{\"weight\":{weight}}}"));
    client.send("PUT", &path(bot, ""), &headers, body.as_bytes()).await
}

#[tokio::test]
async fn a_tenant_marks_a_bounded_number_of_bots_and_no_other_tenant_is_refused() {
    const MAX: usize = 1_000;
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, bots: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef\n")).unwrap();
        let file = file.display();
        format!(
            "{{ name = \"{name}\", token_file = \"{file}\", scopes = [\"operate\"], bots = [{bots:?}] }}"
        )
    };
    let tokens = [token("shop", "shop-*"), token("other", "other-*"), token("root", "*")];
    let tokens = format!("[{}]", tokens.join(", "));
    let settings = config(&server, "test", &[("auth.tokens", &tokens)]);
    let instance = Instance::start(&settings, Log::default().content()).await;
    let client = |name: &str| instance.client().with_token(&format!("{name}-0123456789abcdef"));
    for marking in [Marking::Pause, Marking::Weight] {
        let mut all = JoinSet::new();
        for start in 0..4 {
            let shop = client("shop");
            all.spawn(async move {
                for number in (start..MAX).step_by(4) {
                    let answer = marking.mark(&shop, &format!("shop-{number}")).await;
                    assert_eq!(answer.code, 204, "{number}: {}", answer.problem());
                }
            });
        }
        all.join_all().await;
        let mark = async |name: &str, bot: &str| marking.mark(&client(name), bot).await;
        let refused = mark("shop", "shop-more").await;
        assert_eq!((refused.code, refused.problem().as_str()), (409, "too-many-bots"));
        assert_eq!(mark("shop", "shop-7").await.code, 204, "{marking:?}: it is marked already");
        assert_eq!(mark("other", "other-1").await.code, 204, "{marking:?}");
        assert_eq!(mark("root", "shop-more").await.code, 204, "{marking:?}: an operator may");
        assert_eq!(marking.undo(&client("shop"), "shop-7").await.code, 204, "{marking:?}");
    }
    instance.stop().await;
}
