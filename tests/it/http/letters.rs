//! The page of the dead letters: the filter survives every action, many letters are redriven or dropped
//! after a question with their number, and everything works without scripts.

use std::time::Duration;

use fairlane::handler::{Failure, Outcomes};
use serde_json::json;

use crate::support::browser::{NONE, Page, button, css, link};
use crate::support::config::config;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::proxy::Proxy;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const HOSTILE: &str = "<script>alert(1)</script>\"'&";

fn text(server: &RedisServer) -> String {
    config(server, "test", &[("pipelines.test.batch", "1")])
}

async fn start(server: &RedisServer) -> Instance {
    start_with(&text(server)).await
}

/// Starts with a handler that fails for good, with the type of the event as the reason.
async fn start_with(config: &str) -> Instance {
    let handler = Log::default().handler(|slice| async move {
        match slice.events.iter().find(|delivery| delivery.event.kind() != "fine") {
            Some(delivery) => {
                Err(Failure::permanent(0, format!("it is {}", delivery.event.kind())))
            }
            None => Ok(Outcomes::done()),
        }
    });
    Instance::start(config, handler).await
}

/// Publishes events and waits until all letters of the pipeline are there.
async fn die(client: &Client, bot: &str, kind: &str, ids: std::ops::Range<u32>, all: u64) {
    let event = |id: u32| {
        json!({ "specversion": "1.0", "id": format!("{kind}-{id}"), "source": "test", "type": kind,
            "botid": bot })
    };
    let events: Vec<_> = ids.map(event).collect();
    for events in events.chunks(500) {
        let body = serde_json::to_vec(events).unwrap();
        let answer = client.publish("application/cloudevents-batch+json", body).await;
        assert_eq!(answer.code, 202, "{}", answer.problem());
    }
    eventually(LONG, "they are dead", async || dead(client).await == all).await;
}

async fn dead(client: &Client) -> u64 {
    client.get("/v1/pipelines/test").await.json()["dead"].as_u64().unwrap()
}

#[tokio::test]
async fn letters_are_grouped_selected_and_dropped_without_scripts_and_the_filter_stays() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server).await;
    let client = instance.client();
    die(&client, "one", "late", 0..5, 5).await;
    die(&client, "one", HOSTILE, 0..2, 7).await;
    die(&client, "other", "late", 5..6, 8).await;

    let page = Page::open(&client.address).await;
    page.scripts(false).await;
    page.goto("/pipelines/test/dead?bot=one").await;
    let rows = ".letters tbody tr";
    assert_eq!(page.count(rows).await, 7);
    assert_eq!(page.text(css("#reasons tbody tr:first-of-type td.number")).await, "5");
    page.follow(link(&format!("it is {HOSTILE}"))).await;
    assert_eq!(page.count(rows).await, 2);
    assert!(
        page.path().await.starts_with("/pipelines/test/dead?bot=one&reason=it%20is%20%3Cscript")
    );
    assert_eq!(page.barriers().await, NONE);

    // Nothing is selected: the list says so.
    let filtered = page.path().await;
    page.follow(button("Drop selected…")).await;
    page.sees("Nothing was selected.").await;
    assert_eq!(page.path().await, format!("{filtered}&done=nothing&n=0"));
    page.click(css(".letters tbody tr:first-of-type input[type=checkbox]")).await;
    page.follow(button("Drop selected…")).await;
    page.sees("Drop 1 dead letter that you selected in pipeline test?").await;
    assert_eq!(page.barriers().await, NONE);
    page.follow(link("Cancel")).await;
    assert_eq!((page.path().await, page.count(rows).await), (filtered.clone(), 2));
    page.click(css(".letters tbody tr:first-of-type input[type=checkbox]")).await;
    page.follow(button("Drop selected…")).await;
    page.follow(button("Drop them")).await;
    assert_eq!(page.path().await, format!("{filtered}&done=drop&n=1"));
    page.sees("Dropped 1 dead letter.").await;
    assert_eq!((page.count(rows).await, dead(&client).await), (1, 7));

    // All that the filter finds, and nothing else.
    page.goto("/pipelines/test/dead?reason=late").await;
    assert_eq!(page.count(rows).await, 6);
    page.follow(button("Drop all that the filter finds…")).await;
    page.sees("Drop 6 dead letters of all bots in pipeline test with \"late\" in their reason?")
        .await;
    page.follow(button("Drop them")).await;
    assert_eq!(page.path().await, "/pipelines/test/dead?reason=late&done=drop&n=6");
    page.sees("Dropped 6 dead letters.").await;
    assert_eq!(dead(&client).await, 1);
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn selected_letters_are_redriven_and_those_of_other_bots_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("shop");
    std::fs::write(&file, "shop-0123456789abcdef").unwrap();
    let tokens = format!(
        "[{{ name = \"shop\", token_file = {file:?}, scopes = [\"read\", \"operate\"], bots = [\"one\"] }}, \
         {{ name = \"root\", token_file = {root:?}, scopes = [\"read\", \"operate\", \"publish\"], bots = [\"*\"] }}]",
        root = {
            let root = directory.path().join("root");
            std::fs::write(&root, "root-0123456789abcdef").unwrap();
            root
        }
    );
    let server = RedisServer::start(Options::default());
    let handler = Log::default().handler(|_| async { Err(Failure::permanent(0, "never")) });
    let settings = [("auth.tokens", &*tokens)];
    let instance = Instance::start(&config(&server, "test", &settings), handler).await;
    let root = instance.client().with_token("root-0123456789abcdef");
    die(&root, "one", "a", 0..2, 2).await;
    die(&root, "other", "a", 2..3, 3).await;
    let letters = root.get("/v1/pipelines/test/dead").await.json();
    let ids: Vec<&str> = letters["dead_letters"]
        .as_array()
        .unwrap()
        .iter()
        .map(|letter| letter["id"].as_str().unwrap())
        .collect();
    let shop = instance.client().with_token("shop-0123456789abcdef");
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let selected: Vec<String> = ids.iter().map(|id| format!("letter-{id}=on")).collect();
    let body = format!("deed=drop&{}", selected.join("&"));
    let path = "/pipelines/test/dead/chosen";
    let answer = shop.send("POST", path, &form, body.as_bytes()).await;
    let page = String::from_utf8(answer.body).unwrap();
    assert!(page.contains("Drop 2 dead letters that you selected"), "{page}");
    let body = format!("{body}&confirmed=yes");
    let answer = shop.send("POST", path, &form, body.as_bytes()).await;
    assert_eq!(answer.header("location"), Some("/pipelines/test/dead?done=drop&n=2"));
    assert_eq!(dead(&root).await, 1, "that of the other bot");
    for (path, body) in [
        ("/pipelines/test/dead/drop", "until=9999999999999"),
        ("/pipelines/test/dead/drop", "bot=other&until=9999999999999"),
        ("/pipelines/test/dead/chosen", "deed=burn&letter-0.1-0=on"),
    ] {
        let answer = shop.send("POST", path, &form, body.as_bytes()).await;
        assert!(matches!(answer.code, 400 | 403), "{path} {body}: {answer:?}");
    }
    // A page of another site cannot use the session of a browser.
    let anonymous = instance.client();
    let login = anonymous.send("POST", "/login", &form, b"token=root-0123456789abcdef").await;
    let cookie = login.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    let foreign = [form[0], ("cookie", &*cookie), ("origin", "http://evil.example")];
    let answer = anonymous.send("POST", "/pipelines/test/dead/drop", &foreign, b"until=9").await;
    assert_eq!(answer.code, 403, "{answer:?}");
    assert_eq!(dead(&root).await, 1);
    instance.stop().await;
}

#[tokio::test]
async fn an_action_that_redis_interrupts_says_how_many_letters_are_done() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let instance = start_with(&text(&server).replace(&server.url(), &proxy.url())).await;
    let client = instance.client();
    die(&client, "one", "late", 0..300, 300).await;
    let form = [("content-type", "application/x-www-form-urlencoded")];
    for (deed, done) in [("redrive", "queued again"), ("drop", "dropped")] {
        eventually(LONG, "all are dead", async || dead(&client).await == 300).await;
        let letters = client.get("/v1/pipelines/test/dead?limit=300").await.json();
        // A step takes the oldest 100. The first letter of the second step:
        let id = letters["dead_letters"][199]["id"].as_str().unwrap();
        proxy.swallow(id.split_once('.').unwrap().1, 1);
        let path = format!("/pipelines/test/dead/{deed}");
        let answer = client.send("POST", &path, &form, b"until=9999999999999").await;
        let page = String::from_utf8_lossy(&answer.body);
        let told = format!("at least 100 of the dead letters are {done}; then Redis did not");
        assert!(answer.code == 503 && page.contains(&told), "{answer:?}");
        let trail = client.get("/v1/audit").await.json();
        let last = &trail["actions"][0];
        assert_eq!(last["action"], format!("{deed} all"), "{trail}");
        let result = last["result"].as_str().unwrap();
        assert!(result.starts_with(&format!("failed: {told}")), "{trail}");
    }
    instance.stop().await;
}

/// Redis serves no other client while it deletes some.
#[tokio::test]
async fn large_letters_are_deleted_4_mib_at_a_time() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server).await;
    let queue = instance.queue("test");
    let record = "x".repeat(1 << 20);
    let bury = async || {
        let (mut redis, mut ids) = (server.connection().await, Vec::<String>::new());
        for _ in 0..9 {
            let mut add = redis::cmd("XADD");
            add.arg(&queue.shards()[0].dlq).arg("*").arg(&[("bot", "one"), ("record", &*record)]);
            ids.push(add.query_async(&mut redis).await.unwrap());
        }
        ids
    };

    let selected = bury().await.iter().map(|id| format!("letter-0.{id}=on")).collect::<Vec<_>>();
    let body = format!("deed=drop&confirmed=yes&{}", selected.join("&"));
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let path = "/pipelines/test/dead/chosen";
    let answer = instance.client().send("POST", path, &form, body.as_bytes()).await;
    assert_eq!(answer.header("location"), Some("/pipelines/test/dead?done=drop&n=9"));
    let dropped = server.calls("xdel").await;
    assert!(dropped >= 3, "{dropped} times");

    bury().await;
    let mut expired = 0;
    eventually(LONG, "they are older than a millisecond", async || {
        expired += queue.expire_dead_letters(Duration::ZERO).await.unwrap();
        expired == 9
    })
    .await;
    let expired = server.calls("xdel").await - dropped;
    assert!(expired >= 3, "{expired} times");
    instance.stop().await;
}

#[tokio::test]
async fn many_large_letters_are_listed_quickly_and_acted_on_in_steps() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server).await;
    let client = instance.client();
    // 300 letters of 1 MB in the shard of one bot.
    let data = "x".repeat(900_000);
    for n in 0..3 {
        let event = json!({ "specversion": "1.0", "id": format!("big-{n}"), "source": "test",
            "type": "big", "botid": "one", "data": data });
        let body = serde_json::to_vec(&event).unwrap();
        let answer = client.publish("application/cloudevents+json", body).await;
        assert_eq!(answer.code, 202, "{}", answer.problem());
    }
    eventually(LONG, "they are dead", async || dead(&client).await == 3).await;
    let mut redis = server.connection().await;
    let keys: Vec<String> =
        redis::cmd("KEYS").arg("fl:{test:*}:dlq").query_async(&mut redis).await.unwrap();
    let copy = "local all = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 3) \
        for i = 1, 100 do for _, entry in ipairs(all) do \
        redis.call('XADD', KEYS[1], '*', unpack(entry[2])) end end";
    let _: redis::Value =
        redis::cmd("EVAL").arg(copy).arg(1).arg(&keys[0]).query_async(&mut redis).await.unwrap();
    let started = tokio::time::Instant::now();
    let answer = client.get("/pipelines/test/dead?reason=nothing+of+the+kind").await;
    let page = String::from_utf8(answer.body).unwrap();
    assert!(page.contains("None."), "{page}");
    let answer = client.get("/pipelines/test/dead?bot=one").await;
    assert!(answer.body.len() < 60_000, "{} bytes", answer.body.len());
    let answer = client.get("/bots/one").await;
    assert!(answer.body.len() < 60_000, "{} bytes", answer.body.len());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let answer = client.get("/pipelines/test/dead/drop?bot=one").await;
    let page = String::from_utf8(answer.body).unwrap();
    assert!(page.contains("303 dead letters") || page.contains("at least"), "{page}");
    let form = [("content-type", "application/x-www-form-urlencoded")];
    while dead(&client).await > 0 {
        let body = b"bot=one&until=9999999999999";
        let answer = client.send("POST", "/pipelines/test/dead/drop", &form, body).await;
        assert_eq!(answer.code, 303, "{answer:?}");
    }
    instance.stop().await;
}
