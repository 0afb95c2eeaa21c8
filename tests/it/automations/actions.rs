//! The actions of rules, and rules that fail.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::automation_rig::{LONG, Rig, emitted, event, on_the_bus, profile, tag};
use crate::support::receiver::{Receiver, Reply};
use crate::support::wait::eventually;

#[tokio::test]
async fn every_action_is_done_once_and_the_profile_shows_it() {
    let rig = Rig::start(&[]).await;
    let receiver = Receiver::content().await;
    let url = |path: &str| format!("{}/{path}", receiver.url());
    let rule = json!({ "on": ["sale.made"], "filter": "event.data.price > 10", "actions": [
        { "set_tag": { "tag": "buyer" } }, { "remove_tag": { "tag": "lead" } },
        { "set_field": { "field": "last", "value": { "price": [1, null] } } },
        { "emit": { "type": "sale.seen", "data": { "a": 1 } } },
        { "emit": { "type": "sale.later", "delay": 1 } },
        { "notify": { "url": url("notified") } },
        { "push": { "url": url("pushed") } },
        { "count": { "ad": "sales", "n": 3 } },
    ] });
    rig.put("shop", "sales", &rule).await;
    let sale = event("shop", "u1", "s1", "sale.made", json!({ "price": 11 }));
    let cheap = event("shop", "u1", "s2", "sale.made", json!({ "price": 1 }));
    let begun = Instant::now();
    rig.publish(&[tag("shop", "u1", "t", "lead"), sale.clone(), cheap]).await;
    // Five events of the rules: tag applied, tag removed, field changed, seen, later.
    rig.settles(3 + 5).await;
    assert!(begun.elapsed() >= Duration::from_secs(1), "never early");
    let kinds: Vec<String> = on_the_bus(&rig.stores).await[3..]
        .iter()
        .map(|event| event["type"].as_str().unwrap().to_owned())
        .collect();
    let expected = ["tag.applied", "tag.removed", "field.changed", "sale.seen", "sale.later"];
    assert_eq!(kinds, expected);
    let later = emitted(&rig.stores, "sale.later").await.remove(0);
    assert_eq!((&later["subject"], &later["automationrule"]), (&json!("u1"), &json!("sales")));
    assert_eq!(later.get("automationdue"), None);
    let fields = json!({ "last": { "price": [1, null] } });
    assert_eq!(
        profile(&rig.client, "shop", "u1").await,
        json!({ "tags": ["buyer"], "fields": fields })
    );
    eventually(LONG, "both calls", async || receiver.called() == 2).await;
    let mut calls = receiver.calls();
    calls.sort_by(|a, b| a.line.cmp(&b.line));
    let told = calls[0].json();
    assert_eq!(
        (&told["botid"], &told["subject"], &told["rule"]),
        (&json!("shop"), &json!("u1"), &json!("sales"))
    );
    assert_eq!(told["event"]["id"], "s1");
    assert_eq!(calls[1].json(), sale);
    let totals = rig.client.get("/v1/bots/shop/counters?ids=sales").await.json();
    assert_eq!(totals["totals"]["sales"], 3);
    eventually(LONG, "the statistics", async || rig.stats("shop", "sales").await["matched"] == 1)
        .await;
    assert_eq!(
        rig.stats("shop", "sales").await,
        json!({ "matched": 1, "actions": 8, "errors": 0 })
    );
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_rule_sends_the_headers_that_it_names_for_their_bots_only() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("crm.headers");
    std::fs::write(&file, "Authorization: Bearer s3cret-of-the-crm\nX-Tenant: 7\n").unwrap();
    let receiver = Receiver::content().await;
    let sets = format!(
        "[{{ name = \"crm\", headers_file = {file:?}, bots = [\"shop\"], hosts = [\"127.0.0.1:{}\"] }}]",
        receiver.address.port()
    );
    let rig = Rig::start(&[("callbacks.headers", &sets)]).await;
    let rule = |path: &str, set: Option<&str>| {
        let url = format!("{}/{path}", receiver.url());
        // Each rule has a separate user, because a user gets one notification in half an hour.
        let mut notify = json!({ "url": url, "method": "POST", "uid": path });
        if let Some(set) = set {
            notify["headers_from"] = set.into();
        }
        json!({ "on": ["sale.made"], "actions": [{ "notify": notify }] })
    };
    rig.put("shop", "named", &rule("named", Some("crm"))).await;
    rig.put("shop", "plain", &rule("plain", None)).await;
    rig.put("other", "named", &rule("foreign", Some("crm"))).await;
    rig.publish(&[
        event("other", "u", "1", "sale.made", json!({})),
        event("shop", "u", "2", "sale.made", json!({})),
    ])
    .await;
    eventually(LONG, "both calls", async || receiver.called() == 2).await;
    eventually(LONG, "the other bot is told why", async || {
        rig.stats("other", "named").await["errors"] == 1
    })
    .await;
    let stats = rig.stats("other", "named").await;
    let why = stats["last_error"]["reason"].as_str().unwrap();
    assert!(why.contains("headers_from") && why.contains("no set of this name"), "{why}");
    let mut calls = receiver.calls();
    calls.sort_by(|a, b| a.line.cmp(&b.line));
    assert!(calls[0].line.contains("/named") && calls[1].line.contains("/plain"), "{calls:?}");
    assert_eq!(calls[0].headers["authorization"], "Bearer s3cret-of-the-crm");
    assert_eq!(calls[0].headers["x-tenant"], "7");
    assert_eq!(calls[0].json()["rule"], "named");
    assert!(!calls[1].headers.contains_key("authorization"), "{:?}", calls[1]);
    let shown = rig.client.get("/v1/bots/shop/automations").await;
    assert!(!String::from_utf8_lossy(&shown.body).contains("s3cret"), "{shown:?}");
    rig.instance.stop().await;
}

#[tokio::test]
async fn the_welcome_flow_notifies_users_without_a_reply() {
    let rig = Rig::start(&[]).await;
    let receiver = Receiver::content().await;
    let welcome = json!({ "on": ["tag.applied"], "filter": "event.data.tag == 'new'",
        "actions": [{ "emit": { "type": "welcome.check", "delay": 1 } }] });
    rig.put("shop", "10-welcome", &welcome).await;
    let check = json!({ "on": ["welcome.check"], "filter": "!('replied' in subscriber.tags)",
        "actions": [{ "notify": { "url": receiver.url(), "type": "welcome" } }] });
    rig.put("shop", "20-check", &check).await;
    rig.publish(&[
        tag("shop", "silent", "1", "new"),
        tag("shop", "quick", "2", "new"),
        tag("shop", "quick", "3", "replied"),
    ])
    .await;
    rig.settles(3 + 2).await;
    eventually(LONG, "the notification", async || receiver.called() == 1).await;
    assert_eq!(receiver.calls()[0].json()["subject"], "silent");
    rig.instance.stop().await;
}

/// A new type costs further round trips, so a second notification would overtake the first one.
#[tokio::test]
async fn of_two_notifications_to_a_subscriber_the_throttle_keeps_the_first() {
    const SUBSCRIBERS: usize = 9;
    let rig = Rig::start(&[]).await;
    let receiver = Receiver::content().await;
    let url = |path: &str| format!("{}/{path}", receiver.url());
    for number in 0..SUBSCRIBERS {
        let rule = json!({ "on": [format!("x{number}")], "actions": [
            { "notify": { "url": url("first"), "type": format!("new-{number}") } },
            { "notify": { "url": url("second") } },
        ] });
        rig.put("shop", &format!("r{number}"), &rule).await;
    }
    let events: Vec<Value> = (0..SUBSCRIBERS)
        .map(|at| event("shop", &format!("u{at}"), &format!("{at}"), &format!("x{at}"), json!({})))
        .collect();
    rig.publish(&events).await;
    rig.settles(SUBSCRIBERS).await;
    eventually(LONG, "one each", async || receiver.called() >= SUBSCRIBERS).await;
    let calls = receiver.calls();
    assert!(calls.iter().all(|call| call.line.contains("/first")), "{calls:?}");
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_loop_of_events_ends_as_a_dead_letter_at_depth_16() {
    let rig = Rig::start(&[]).await;
    let rule = json!({ "on": ["ping"], "actions": [{ "emit": { "type": "ping" } }] });
    rig.put("shop", "loop", &rule).await;
    rig.publish(&[event("shop", "u", "first", "ping", json!({}))]).await;
    rig.settles(1 + 16).await;
    let queue = rig.instance.queue("automations");
    let letters = queue.dead_letters(None, 10).await.unwrap();
    let [letter] = letters.as_slice() else { panic!("{letters:?}") };
    assert!(letter.reason.contains("as number 17 of a chain"), "{}", letter.reason);
    let last = emitted(&rig.stores, "ping").await.pop().unwrap();
    assert_eq!(last["automationdepth"], 16);
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_filter_that_fails_is_counted_and_shown_and_its_bot_goes_on() {
    let rig = Rig::start(&[]).await;
    let rule = json!({ "on": ["sale"], "filter": "event.data.price > 10",
        "actions": [{ "emit": { "type": "dear" } }] });
    rig.put("shop", "price", &rule).await;
    let sale = |id: &str, data: Value| event("shop", "u", id, "sale", data);
    rig.publish(&[
        sale("1", json!({})),
        sale("2", json!({ "price": 11 })),
        sale("3", json!({ "price": "x" })),
    ])
    .await;
    rig.settles(3 + 1).await;
    eventually(LONG, "it is shown", async || rig.stats("shop", "price").await["errors"] == 2).await;
    let stats = rig.stats("shop", "price").await;
    assert_eq!((&stats["matched"], &stats["last_error"]["event"]), (&json!(1), &json!("3")));
    let reason = stats["last_error"]["reason"].as_str().unwrap();
    assert!(reason.contains("cannot be evaluated"), "{reason}");
    rig.instance.stop().await;
}

#[tokio::test]
async fn an_action_that_fails_is_tried_again_and_the_others_are_not() {
    let rig = Rig::start(&[]).await;
    let failing = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let seen = std::sync::Arc::clone(&failing);
    let receiver = Receiver::start(move |_| {
        let nth = seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        async move { Reply::new(if nth == 0 { 500 } else { 200 }, "") }
    })
    .await;
    let rule = json!({ "on": ["x"], "actions": [
        { "emit": { "type": "one" } },
        { "push": { "url": receiver.url() } },
        { "emit": { "type": "two" } },
    ] });
    rig.put("shop", "r", &rule).await;
    rig.publish(&[event("shop", "u", "1", "x", json!({}))]).await;
    rig.settles(3).await;
    assert_eq!(emitted(&rig.stores, "one").await.len(), 1);
    eventually(LONG, "the push is tried again", async || receiver.called() == 2).await;
    let ids: Vec<String> =
        receiver.calls().iter().map(|call| call.headers["webhook-id"].clone()).collect();
    assert_eq!(ids[0], ids[1]);
    rig.instance.stop().await;
}
