//! The pages of one bot: its state in words, its rates, its rules, its notifications; and the list of
//! bots. They stay quick and small whatever the bot holds.

use std::time::Duration;

use fairlane::handler::{Failure, Outcomes};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::automation_rig::Rig as RulesRig;
use crate::support::browser::{NONE, Page, button, css, field, link};
use crate::support::config::config;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::notification_rig::{LONG, Rig};
use crate::support::receiver::{Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const HOSTILE: &str = "<script>alert(1)</script>\"'&";
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");

async fn publish(client: &Client, bot: &str, kind: &str, ids: std::ops::Range<u32>) {
    let event = |id: u32| json!({ "specversion": "1.0", "id": format!("{kind}-{id}"), "source": "test", "type": kind, "botid": bot });
    let events: Vec<Value> = ids.map(event).collect();
    let body = serde_json::to_vec(&events).unwrap();
    let answer = client.publish("application/cloudevents-batch+json", body).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
}

async fn text(client: &Client, path: &str) -> String {
    let answer = client.get(path).await;
    assert_eq!(answer.code, 200, "{path}: {answer:?}");
    String::from_utf8(answer.body).unwrap()
}

async fn says(client: &Client, path: &str, wanted: &str) {
    eventually(LONG, &format!("{path} says {wanted}"), async || {
        text(client, path).await.contains(wanted)
    })
    .await;
}

#[tokio::test]
async fn the_page_says_in_words_what_the_bot_does_and_counts_its_events() {
    let server = RedisServer::start(Options::default());
    let handler = Log::default().handler(|slice| async move {
        match slice.events[0].event.kind() {
            "fails" => Err(Failure::transient(0, "no answer of <b>anyone</b>")
                .retry_after(Duration::from_secs(300))),
            "broken" => Err(Failure::permanent(0, "never")),
            "slow" => {
                tokio::time::sleep(Duration::from_secs(60)).await;
                Ok(Outcomes::done())
            }
            _ => Ok(Outcomes::done()),
        }
    });
    let settings = [("pipelines.test.handler_timeout", "\"90s\""), ("shutdown_grace", "\"100s\"")];
    let instance = Instance::start(&config(&server, "test", &settings), handler).await;
    let client = instance.client();
    assert!(text(&client, "/bots/nosuch").await.contains("Never seen, or not in the last 1 d"));

    publish(&client, "shop", "fine", 0..30).await;
    says(&client, "/bots/shop", "Nothing waits; last completed").await;
    says(&client, "/bots/shop", "<dt>In, last minute</dt><dd>30</dd>").await;
    let page = text(&client, "/bots/shop").await;
    assert!(page.contains("<dt>Out, last minute</dt><dd>30</dd>"), "{page}");
    assert!(
        page.contains("Events a minute in and out of test, last 15 minutes: at most 30"),
        "{page}"
    );
    publish(&client, "shop", "broken", 0..2).await;
    says(&client, "/bots/shop", "; 2 dead letters.").await;

    publish(&client, "bad", "fails", 0..3).await;
    says(&client, "/bots/bad", "Retrying in 4 min, attempt 2 of 10: no answer of &lt;b&gt;").await;
    let page = text(&client, "/bots?sort=failing").await;
    assert!(page.contains("/bots/bad") && page.contains("no answer of &lt;b&gt;"), "{page}");
    assert!(!page.contains("/bots/shop"), "{page}");
    let page = text(&client, "/bots?sort=rate").await;
    assert!(page.contains("/bots/shop") && page.contains(">30<"), "{page}");

    // A third of its lease later, the process that handles a long slice is named.
    publish(&client, "slow", "slow", 0..1).await;
    says(&client, "/bots/slow", "Being handled since ").await;
    says(&client, "/bots/slow", &format!("-{}.", std::process::id())).await;
    // The slice ends with its lease.
    for action in ["pause", "release"] {
        let path = format!("/v1/pipelines/test/bots/slow/{action}");
        assert_eq!(client.post(&path).await.code, 204);
    }
    instance.stop().await;
}

#[tokio::test]
async fn bots_are_filtered_by_state_and_prefix_and_paged() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let client = instance.client();
    assert_eq!(client.post("/v1/pipelines/test/pause").await.code, 204);
    for n in 0..60 {
        publish(&client, &format!("shop-{n}"), "a", 0..1).await;
    }
    publish(&client, "other", "a", 0..7).await;
    eventually(LONG, "they wait", async || {
        client.get("/v1/pipelines/test").await.json()["depth"] == 67
    })
    .await;
    assert_eq!(client.post("/v1/pipelines/test/bots/shop-7/pause").await.code, 204);
    let page = Page::open(&client.address).await;
    page.scripts(false).await;
    page.goto("/bots").await;
    page.fill(field("Id starts with"), "shop-").await;
    page.follow(button("List")).await;
    assert_eq!(page.count("tbody tr").await, 50);
    page.sees_no("other").await;
    assert_eq!(page.barriers().await, NONE);
    page.follow(link("Next 50")).await;
    assert_eq!(page.count("tbody tr").await, 10);
    page.goto("/bots?sort=depth").await;
    assert_eq!(page.text(css("tbody tr:first-of-type th")).await, "other");
    page.goto("/bots?sort=age&state=paused").await;
    assert_eq!(page.count("tbody tr").await, 1);
    assert_eq!(page.text(css("tbody th")).await, "shop-7");
    page.goto("/bots?sort=depth&prefix=%22%3E%3Cscript%3E").await;
    page.sees("No bot fits.").await;
    assert_eq!(page.text(field("Id starts with")).await, "\"><script>");
    assert_eq!(page.problems(), NONE);
    instance.stop().await;
}

#[tokio::test]
async fn a_rule_is_written_tested_corrected_and_deleted_without_scripts() {
    let rig = RulesRig::start(&[("pipelines.automations.workers.max", "1")]).await;
    let page = Page::open(&rig.client.address).await;
    page.scripts(false).await;
    page.goto("/bots/shop").await;
    page.follow(link("New rule")).await;
    assert_eq!(page.barriers().await, NONE);
    page.fill(field("Id"), "10-vip").await;
    page.fill(field("Rule"), "{\"on\": [\"tag.applied\"], \"actions\": [], \"speed\": 1}").await;
    assert_eq!(page.follow(button("Save the rule")).await, 400);
    assert!(page.text(css("#rule-wrong")).await.contains("speed"));
    assert_eq!(page.text(field("Id")).await, "10-vip", "what was typed stays");
    assert_eq!(page.barriers().await, NONE);
    let rule = json!({ "name": HOSTILE, "on": ["tag.applied"], "filter": "event.data.tag == \"vip\"",
        "actions": [{ "set_field": { "field": "stage", "value": HOSTILE } }] });
    page.fill(field("Rule"), &rule.to_string()).await;
    page.fill(
        field("Event for a test"),
        "{\"type\": \"tag.applied\", \"subject\": \"u1\", \"data\": {\"tag\": \"vip\"}}",
    )
    .await;
    assert_eq!(page.follow(button("Test with the event")).await, 200);
    page.sees("The rule matches.").await;
    page.sees("set_field").await;
    assert_eq!(page.barriers().await, NONE);
    page.fill(field("Event for a test"), "{\"type\": \"tag.applied\", \"data\": {\"tag\": \"x\"}}")
        .await;
    page.follow(button("Test with the event")).await;
    page.sees("The rule does not match this event.").await;
    page.fill(field("Event for a test"), "{\"data\": 1}").await;
    assert_eq!(page.follow(button("Test with the event")).await, 400);
    assert!(page.text(css("#event-wrong")).await.contains("type"));
    assert_eq!(page.follow(button("Save the rule")).await, 200);
    page.sees("Saved.").await;
    assert_eq!(page.path().await, "/bots/shop/rule?id=10-vip&saved=true");
    let stored = rig.client.get("/v1/bots/shop/automations/10-vip").await.json();
    assert_eq!(stored["name"], HOSTILE);

    // Somebody else changes it meanwhile: nothing is lost.
    rig.put("shop", "10-vip", &json!({ "on": ["a"], "actions": [{ "set_tag": { "tag": "t" } }] }))
        .await;
    assert_eq!(page.follow(button("Save the rule")).await, 400);
    page.sees("Nothing was saved: the rule was changed or deleted meanwhile.").await;
    let stored = rig.client.get("/v1/bots/shop/automations/10-vip").await.json();
    assert_eq!(stored["on"], json!(["a"]));
    page.goto("/bots/shop/rules").await;
    page.follow(link("10-vip")).await;
    page.click(css("summary")).await;
    page.follow(button("Delete the rule 10-vip")).await;
    assert_eq!(page.path().await, "/bots/shop/rules");
    page.sees("None.").await;
    assert_eq!(rig.client.get("/v1/bots/shop/automations/10-vip").await.code, 404);
    let nothing = "document.querySelectorAll('main script, main img').length";
    assert_eq!(page.eval::<usize>(nothing).await, 0);
    rig.instance.stop().await;
}

#[tokio::test]
async fn notifications_of_a_bot_are_listed_cancelled_and_sent_now() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let client = instance.client();
    let receiver = Receiver::start(async |_| Reply::new(200, "")).await;
    let send = async |bot: &str, delay: u32| {
        let body = json!({ "delay": delay, "url": receiver.url(), "bot": bot, "type": HOSTILE });
        let kind = [("content-type", "application/json")];
        let answer = client.send("POST", "/send_delayed", &kind, body.to_string().as_bytes()).await;
        answer.header("x-event-id").expect("it is accepted").to_owned()
    };
    let (first, second) = (send("shop", 7_200).await, send("shop", 3_600).await);
    let other = send("other", 60).await;
    let page = Page::open(&client.address).await;
    page.scripts(false).await;
    page.goto("/bots/shop").await;
    page.sees("Nothing waits; 2 delayed events").await;
    page.follow(link("2 scheduled notifications")).await;
    assert_eq!(page.count("tbody tr").await, 2);
    assert_eq!(page.barriers().await, NONE);
    let keys = "[...document.querySelectorAll('tbody tr')].map(row => row.dataset.key)";
    assert_eq!(page.eval::<Vec<String>>(keys).await, [second.clone(), first.clone()]);
    page.follow(button(&format!("Cancel {first}"))).await;
    page.sees("Cancelled 1 notification.").await;
    assert_eq!(page.count("tbody tr").await, 1);
    page.follow(button(&format!("Send now {second}"))).await;
    page.sees("is due now").await;
    eventually(LONG, "it is sent", async || receiver.called() == 1).await;
    for (id, state) in [(&first, "cancelled"), (&other, "scheduled")] {
        let one = client.get(&format!("/v1/notifications/{id}")).await.json();
        assert_eq!(one["state"], state);
    }
    assert_eq!(page.problems(), NONE);
    let answer = client.send("POST", &format!("/notifications/{first}/send"), &[FORM], b"").await;
    assert_eq!(answer.code, 409, "it has ended: {answer:?}");
    instance.stop().await;
}

#[tokio::test]
async fn the_page_of_a_bot_with_a_long_queue_is_quick_and_small() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let client = instance.client();
    assert_eq!(client.post("/v1/pipelines/test/pause").await.code, 204);
    publish(&client, "crowd", "a", 0..2).await;
    let mut redis = server.connection().await;
    let mut queue: Vec<String> = Vec::new();
    eventually(LONG, "they wait", async || {
        client.get("/v1/pipelines/test").await.json()["depth"] == 2
    })
    .await;
    queue.extend::<Vec<String>>(
        redis::cmd("KEYS").arg("fl:{test:*}:q:crowd").query_async(&mut redis).await.unwrap(),
    );
    let copy = "local one = redis.call('LINDEX', KEYS[1], -1) \
        for i = 1, 100000 do redis.call('RPUSH', KEYS[1], one) end";
    let _: redis::Value =
        redis::cmd("EVAL").arg(copy).arg(1).arg(&queue[0]).query_async(&mut redis).await.unwrap();
    let started = Instant::now();
    for _ in 0..5 {
        let page = text(&client, "/bots/crowd").await;
        assert!(page.contains("The pipeline is paused; 100,002 events wait"), "{page}");
        assert!(page.contains("<dt>In, last minute</dt><dd>100,002</dd>"), "{page}");
        assert!(page.len() < 30_000, "{} bytes", page.len());
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    instance.stop().await;
}
