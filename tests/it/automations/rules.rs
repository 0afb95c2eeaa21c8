//! Rules: their decisions, their order, and how fast every process learns of a change.

use std::time::{Duration, Instant};

use fairlane::automations::store::{AUTOMATIONS, Expected, RuleStore, WriteError, document};
use fairlane::config::MongoUrl;
use fairlane::id::{BotId, RuleId};
use fairlane::mongo::client::Mongo;
use mongodb::bson::Document;
use serde_json::{Value, json};

use crate::support::automation_rig::{
    LONG, RULES, Rig, depth, emitted, event, field, on_the_bus, profile, publish, put, tag,
};
use crate::support::counter_fleet::Stores;
use crate::support::http::{get, metric};
use crate::support::instance::Instance;
use crate::support::mongo;
use crate::support::recorder::Log;
use crate::support::redis::Persistence;
use crate::support::wait::{Stalls, eventually, promised};

#[tokio::test]
async fn women_over_30_with_a_tag_trigger_exactly_and_in_order_whatever_comes_first() {
    let rig = Rig::start(&[]).await;
    let filter = "'x' in subscriber.tags && has(subscriber.gender) && subscriber.gender == 'female' && has(subscriber.age) && subscriber.age > 30";
    let rule = json!({
        "on": ["tag.applied", "field.changed"], "filter": filter,
        "actions": [{ "emit": { "type": "matched" } }],
    });
    rig.put("shop", "women", &rule).await;
    let (mut events, mut expected) = (Vec::new(), Vec::new());
    for (person, (gender, age)) in
        [("female", 31), ("female", 30), ("male", 40), ("female", 99)].into_iter().enumerate()
    {
        for (turn, order) in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
            .into_iter()
            .enumerate()
        {
            let subject = format!("u{person}-{turn}");
            let id = |n: usize| format!("{subject}-{n}");
            let all = [
                field("shop", &subject, &id(0), "gender", json!(gender)),
                field("shop", &subject, &id(1), "age", json!(age)),
                tag("shop", &subject, &id(2), "x"),
            ];
            events.extend(order.map(|at| all[at].clone()));
            if gender == "female" && age > 30 {
                expected.push(subject);
            }
        }
    }
    rig.publish(&events).await;
    rig.settles(events.len() + expected.len()).await;
    let matched = emitted(&rig.stores, "matched").await;
    let subjects: Vec<&str> =
        matched.iter().map(|event| event["subject"].as_str().unwrap()).collect();
    assert_eq!(subjects, expected, "in the order of the bot");
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_bot_has_a_thousand_rules_and_no_more() {
    let rig = Rig::start(&[]).await;
    let rule = |n: usize| {
        json!({ "on": ["hit"], "filter": format!("event.data.n == {n}"),
            "actions": [{ "set_field": { "field": format!("f{}", n % 100), "value": n } }] })
    };
    // Each request reads the sizes of all rules, so most of them are stored without one.
    let bot = BotId::parse("shop").unwrap();
    let stored = (0..980).map(|n| {
        let id = RuleId::parse(&format!("r{n:04}")).unwrap();
        document(&bot, &id, &serde_json::from_value(rule(n)).unwrap())
    });
    rig.stores.collection(AUTOMATIONS).await.insert_many(stored).await.unwrap();
    for n in 980..1_000 {
        rig.put("shop", &format!("r{n:04}"), &rule(n)).await;
    }
    let more = put(&rig.client, "shop", "one-more", &rule(1)).await;
    assert_eq!(
        (more.code, more.problem().contains("too-many-rules")),
        (409, true),
        "{}",
        more.problem()
    );
    assert_eq!(
        put(&rig.client, "shop", "r0007", &rule(7)).await.code,
        200,
        "an old one may change"
    );
    let events: Vec<Value> = (0..50)
        .map(|n| {
            event("shop", &format!("u{}", n % 5), &n.to_string(), "hit", json!({ "n": n * 20 }))
        })
        .collect();
    rig.publish(&events).await;
    rig.settles(50 + 50).await;
    let first = profile(&rig.client, "shop", "u0").await;
    assert_eq!(first["fields"], json!({ "f0": 900 }), "{first}");
    let count = async || {
        let all = rig.client.get("/v1/bots/shop/automations").await.json();
        all["automations"].as_array().unwrap().len()
    };
    assert_eq!(count().await, 1_000);
    // Concurrent writes find room for ten.
    for n in 0..10 {
        let path = format!("/v1/bots/shop/automations/r{n:04}");
        let deleted = rig.client.send("DELETE", &path, &[], b"").await;
        assert_eq!(deleted.code, 204, "{}", deleted.problem());
    }
    let writes = (0..30)
        .map(async |n: usize| put(&rig.client, "shop", &format!("new-{n}"), &rule(n)).await.code);
    let codes = futures_util::future::join_all(writes).await;
    let of = |code: u16| codes.iter().filter(|given| **given == code).count();
    assert_eq!((of(201), of(409)), (10, 20), "{codes:?}");
    assert_eq!(count().await, 1_000);
}

/// Creates a rule. Returns the number of rules that are new: 0 if the bot has its maximum.
async fn create(store: &RuleStore, bot: &BotId, name: &str) -> usize {
    let rule = serde_json::from_value(versioned(1)).unwrap();
    let id = RuleId::parse(name).unwrap();
    loop {
        match store.put(bot, &id, &rule, &Expected::Nothing).await {
            Ok(_) => return 1,
            Err(WriteError::TooMany) => return 0,
            Err(WriteError::Contended) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Each checks the rules of the bot and then writes. None waits for the others.
#[tokio::test]
async fn processes_that_write_rules_of_a_bot_together_leave_it_a_thousand() {
    let server = mongo::MongoServer::start(mongo::Options::default());
    let mongo = Mongo::open(&MongoUrl::parse(&server.url()).unwrap(), "fairlane").await.unwrap();
    // The stores of eight processes.
    let stores: Vec<_> = (0..8).map(|_| RuleStore::new(mongo.clone())).collect();
    stores[0].prepare().await.unwrap();
    let bot = BotId::parse("shop").unwrap();
    // Rules of an earlier version.
    let earlier = (0..990).map(|n| {
        let id = RuleId::parse(&format!("earlier-{n}")).unwrap();
        document(&bot, &id, &serde_json::from_value(versioned(1)).unwrap())
    });
    let client = mongodb::Client::with_uri_str(server.url()).await.unwrap();
    let rules = client.database("fairlane").collection::<Document>(AUTOMATIONS);
    rules.insert_many(earlier).await.unwrap();

    let together = async |round: usize| {
        let writes = (0..16)
            .map(async |n: usize| create(&stores[n % 8], &bot, &format!("new-{round}-{n}")).await);
        futures_util::future::join_all(writes).await.into_iter().sum::<usize>()
    };
    assert_eq!(together(1).await, 10);
    let all = stores[0].list(&bot).await.unwrap();
    assert_eq!(all.len(), 1_000);
    let new = all.into_iter().map(|rule| rule.id).filter(|id| id.as_str().starts_with("new-"));
    for gone in new.take(2).chain([RuleId::parse("earlier-7").unwrap()]) {
        assert!(stores[0].delete(&bot, &gone, &Expected::Something).await.unwrap());
    }
    assert_eq!(together(2).await, 3);
    assert_eq!(stores[0].list(&bot).await.unwrap().len(), 1_000);
}

/// The rule at the given version. Its emits must agree.
fn versioned(version: u64) -> Value {
    json!({ "on": ["tick"], "filter": format!("{version} == {version}"), "actions": [
        { "emit": { "type": "first", "data": { "v": version } } },
        { "set_field": { "field": "v", "value": version } },
        { "emit": { "type": "second", "data": { "v": version } } },
    ] })
}

#[tokio::test]
async fn a_rule_changed_under_load_decides_within_a_second_everywhere_and_never_half() {
    let rig = Rig::start(&[]).await;
    let others = [rig.another().await, rig.another().await];
    let bots: Vec<String> = (0..12).map(|n| format!("bot-{n}")).collect();
    for bot in &bots {
        rig.put(bot, "r", &versioned(0)).await;
    }
    let mut published = 0_usize;
    let mut late: Vec<(String, u64)> = Vec::new();
    for version in 1..=5 {
        for bot in &bots {
            rig.put(bot, "r", &versioned(version)).await;
        }
        let (changed, stalls, mut late_rounds) = (Instant::now(), Stalls::watch(), 0);
        while changed.elapsed() < Duration::from_millis(1_300) + stalls.longest() || late_rounds < 3
        {
            let is_late = changed.elapsed() >= Duration::from_secs(1) + stalls.longest();
            late_rounds += usize::from(is_late);
            let events: Vec<Value> = bots
                .iter()
                .map(|bot| {
                    published += 1;
                    let id = format!("{published}");
                    if is_late {
                        late.push((id.clone(), version));
                    }
                    event(bot, "u", &id, "tick", json!({ "id": id }))
                })
                .collect();
            rig.publish(&events).await;
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }
    // Each event makes two emits, and each change of the version one more event. To read the bus takes long.
    eventually(LONG, "all is decided", async || {
        depth(&rig.stores).await == 0 && emitted(&rig.stores, "second").await.len() == published
    })
    .await;
    let all = on_the_bus(&rig.stores).await;
    let pairs = |kind: &str| -> Vec<(Value, Value)> {
        let of = all.iter().filter(|event| event["type"] == kind);
        of.map(|event| (event["botid"].clone(), event["data"]["v"].clone())).collect()
    };
    let (mut first, mut second) = (pairs("first"), pairs("second"));
    first.sort_by_key(|(bot, _)| bot.to_string());
    second.sort_by_key(|(bot, _)| bot.to_string());
    assert_eq!(first, second, "both actions of an event are of one version");
    // The n-th tick of a bot made its n-th emit. Ticks published a second after a change saw the
    // new version.
    let mut of_bot: std::collections::BTreeMap<String, Vec<u64>> =
        std::collections::BTreeMap::new();
    for (bot, version) in &second {
        of_bot.entry(bot.as_str().unwrap().to_owned()).or_default().push(version.as_u64().unwrap());
    }
    let mut nth: std::collections::BTreeMap<String, usize> = std::collections::BTreeMap::new();
    let mut checked = 0;
    for tick in all.iter().filter(|event| event["type"] == "tick") {
        let bot = tick["botid"].as_str().unwrap().to_owned();
        let place = nth.entry(bot.clone()).or_default();
        let version = of_bot[&bot][*place];
        *place += 1;
        if let Some((_, expected)) = late.iter().find(|(id, _)| tick["id"] == **id) {
            // A tick that waited a little may have seen the next version.
            assert!(version >= *expected, "a second after the change: {version}, {tick}");
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked} came a second after a change");
    for other in others {
        other.stop().await;
    }
}

#[tokio::test]
async fn an_unannounced_change_is_found_within_a_second() {
    let rig = Rig::start(&[]).await;
    let url = MongoUrl::parse(&rig.stores.mongo.url()).unwrap();
    let store = RuleStore::new(Mongo::open(&url, "fairlane").await.unwrap());
    let (bot, id) = (BotId::parse("shop").unwrap(), RuleId::parse("r").unwrap());
    // Writes the rule like a process that died before it could announce the change.
    for version in 1..=3 {
        let rule = serde_json::from_value(versioned(version)).unwrap();
        store.put(&bot, &id, &rule, &Expected::Anything).await.unwrap();
        promised(Duration::from_secs(1)).await;
        rig.publish(&[event("shop", "u", &version.to_string(), "tick", json!({}))]).await;
        eventually(LONG, "it decides", async || {
            let second = emitted(&rig.stores, "second").await;
            second.last().is_some_and(|event| event["data"]["v"] == version)
        })
        .await;
    }
    store.delete(&bot, &id, &Expected::Anything).await.unwrap();
    promised(Duration::from_secs(1)).await;
    rig.publish(&[event("shop", "u", "4", "tick", json!({}))]).await;
    // Three ticks with two emits and one change each, and one more tick without effect.
    rig.settles(3 * 4 + 1).await;
    rig.instance.stop().await;
}

#[tokio::test]
async fn rules_that_take_long_to_compile_are_waited_for_without_a_complaint_about_mongodb() {
    let rig = Rig::start(&[("pipelines.automations.handler_timeout", "\"1s\"")]).await;
    let url = MongoUrl::parse(&rig.stores.mongo.url()).unwrap();
    let store = RuleStore::new(Mongo::open(&url, "fairlane").await.unwrap());
    let bot = BotId::parse("shop").unwrap();
    for n in 0..60 {
        let filter = format!("event.data.n in [{n}{}]", ",1".repeat(900));
        let rule =
            json!({ "on": ["tick"], "filter": filter, "actions": [{ "set_tag": { "tag": "t" } }] });
        let id = RuleId::parse(&format!("r{n}")).unwrap();
        let rule = serde_json::from_value(rule).unwrap();
        store.put(&bot, &id, &rule, &Expected::Anything).await.unwrap();
    }
    // They were not announced, and are found within a second.
    promised(Duration::from_secs(1)).await;
    rig.publish(&[event("shop", "u", "1", "tick", json!({ "n": 59 }))]).await;
    let mut complaint = String::new();
    eventually(LONG, "the event waits", async || {
        let answer = rig.client.get("/v1/pipelines/automations/bots/shop").await;
        complaint = String::from_utf8_lossy(&answer.body).into_owned();
        complaint.contains("still being read and compiled")
    })
    .await;
    assert!(!complaint.contains("MongoDB"), "{complaint}");
    eventually(LONG, "it is decided on", async || {
        profile(&rig.client, "shop", "u").await["tags"] == json!(["t"])
    })
    .await;
    rig.instance.stop().await;
}

#[tokio::test]
async fn only_events_that_a_bot_has_rules_for_are_copied_and_in_doubt_all() {
    let mut stores = Stores::start(Persistence::Always);
    let config = stores.direct(RULES);
    let instance = Instance::start(&config, Log::default().content()).await;
    let client = instance.client();
    let copies = async |instance: &Instance| {
        let text = get(&instance.address.to_string(), "/metrics").await.1;
        metric(&text, "fairlane_fanout_copies_total", &[("pipeline", "automations")]).unwrap_or(0.0)
    };
    let rule = json!({ "on": ["cart.*"], "actions": [{ "set_tag": { "tag": "cart" } }] });
    put(&client, "has", "r", &rule).await;
    let off =
        json!({ "on": ["cart.*"], "enabled": false, "actions": [{ "set_tag": { "tag": "x" } }] });
    put(&client, "off", "r", &off).await;
    // While the index of rules may be stale, everything is copied.
    let read = async |instance: &Instance| {
        let text = get(&instance.address.to_string(), "/metrics").await.1;
        metric(&text, "fairlane_bus_events_total", &[]).unwrap_or(0.0)
    };
    // `has` gets two events. `off` gets the event that changes a profile. Events that a rule
    // emitted for a change of a profile are not copied.
    let mut round = 0;
    eventually(LONG, "three of nine are copied", async || {
        let (before, seen) = (copies(&instance).await, read(&instance).await);
        round += 1;
        let mut events = Vec::new();
        for bot in ["has", "off", "none"] {
            for kind in ["cart.left", "other", "tag.applied"] {
                let id = format!("{bot} {kind} {round}");
                events.push(event(bot, "u", &id, kind, json!({ "tag": "t" })));
            }
        }
        publish(&stores, &events).await;
        eventually(LONG, "they are read", async || read(&instance).await - seen > 8.5).await;
        // A copy of an event that a rule emitted would come now.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let more = copies(&instance).await - before;
        assert!(more > 2.9, "what is wanted is copied, whatever the doubt");
        more < 3.1
    })
    .await;
    eventually(LONG, "what concerns a profile is kept", async || {
        profile(&client, "off", "u").await["tags"] == json!(["t"])
    })
    .await;
    assert_eq!(profile(&client, "none", "u").await, Value::Null);
    instance.stop().await;

    // MongoDB is unavailable from the start, so the process cannot know which bots have rules.
    stores.mongo.kill9();
    let blind = Instance::start(&config, Log::default().content()).await;
    let before = copies(&blind).await;
    publish(
        &stores,
        &[
            event("none", "u", "7", "other", json!({})),
            event("has", "u", "8", "cart.left", json!({})),
        ],
    )
    .await;
    eventually(LONG, "both are copied", async || copies(&blind).await - before >= 2.0).await;
    let text = get(&blind.address.to_string(), "/metrics").await.1;
    assert!(metric(&text, "fairlane_automation_doubtful_total", &[]).unwrap() >= 2.0);
    stores.mongo.restart(mongo::Options::default());
    eventually(LONG, "they are handled", async || depth(&stores).await == 0).await;
    assert_eq!(profile(&blind.client(), "has", "u").await["tags"], json!(["cart", "t"]));
    assert_eq!(profile(&blind.client(), "none", "u").await, Value::Null);
    blind.stop().await;
}

#[tokio::test]
async fn while_mongodb_is_unavailable_queues_wait_in_order_and_others_are_not_slowed() {
    let mut stores = Stores::start(Persistence::Always);
    let mut settings = RULES.to_vec();
    settings.extend([
        ("pipelines.plain.handler", "\"recorder\""),
        ("pipelines.plain.events", "[\"step\"]"),
        ("pipelines.plain.start", "\"earliest\""),
        ("pipelines.plain.handler_timeout", "\"5s\""),
    ]);
    let log = Log::default();
    let instance = Instance::start(&stores.direct(&settings), log.content()).await;
    let client = instance.client();
    let rule = json!({ "on": ["step"], "actions": [{ "emit": { "type": "stepped" } }] });
    for bot in ["a", "b"] {
        put(&client, bot, "r", &rule).await;
    }
    // The rules are known then.
    promised(Duration::from_millis(700)).await;
    stores.mongo.kill9();
    let step = |n: usize| {
        event(
            if n.is_multiple_of(2) { "a" } else { "b" },
            &format!("u{n}"),
            &n.to_string(),
            "step",
            json!({}),
        )
    };
    let events: Vec<Value> = (0..200).map(step).collect();
    for part in events.chunks(20) {
        publish(&stores, part).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    eventually(LONG, "the other pipeline has all", async || log.len() >= 200).await;
    assert_eq!(depth(&stores).await, 200, "the last known rules say that they are wanted");
    stores.mongo.restart(mongo::Options::default());
    eventually(LONG, "they catch up", async || emitted(&stores, "stepped").await.len() == 200)
        .await;
    for (bot, parity) in [("a", 0), ("b", 1)] {
        let subjects: Vec<String> = emitted(&stores, "stepped")
            .await
            .iter()
            .filter(|event| event["botid"] == bot)
            .map(|event| event["subject"].as_str().unwrap().to_owned())
            .collect();
        let expected: Vec<String> = (0..100).map(|n| format!("u{}", 2 * n + parity)).collect();
        assert_eq!(subjects, expected, "in order");
    }
    assert!(instance.queue("automations").dead_letters(None, 1).await.unwrap().is_empty());
    instance.stop().await;
}

#[tokio::test]
async fn a_redriven_event_is_decided_on_anew_at_the_end_of_its_queue() {
    let rig = Rig::start(&[("pipelines.automations.max_attempts", "2")]).await;
    let rule = json!({ "on": ["ping", "mark"], "actions": [{ "emit": { "type": "ping" } }] });
    rig.put("shop", "loop", &rule).await;
    rig.publish(&[event("shop", "u", "first", "ping", json!({}))]).await;
    rig.settles(1 + 16).await;
    // The subscriber's events continue, and the rule is mended.
    let mended =
        json!({ "on": ["ping"], "actions": [{ "set_field": { "field": "end", "value": true } }] });
    rig.put("shop", "loop", &mended).await;
    rig.publish(&[tag("shop", "u", "t", "later")]).await;
    rig.settles(18).await;
    let queue = rig.instance.queue("automations");
    let letter = queue.dead_letters(None, 1).await.unwrap().remove(0);
    assert!(queue.redrive(&letter.bot, letter.id).await.unwrap());
    let known = async || profile(&rig.client, "shop", "u").await["fields"]["end"] == true;
    eventually(LONG, "it is decided on", known).await;
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_profile_that_is_put_keeps_its_place_among_the_events() {
    let rig = Rig::start(&[]).await;
    rig.put("shop", "r", &json!({ "on": ["x"], "actions": [{ "count": { "ad": "a" } }] })).await;
    // The rule is known then.
    promised(Duration::from_millis(700)).await;
    rig.publish(&[tag("shop", "u", "1", "before")]).await;
    eventually(LONG, "it is applied", async || {
        profile(&rig.client, "shop", "u").await["tags"] == json!(["before"])
    })
    .await;
    let body = json!({ "tags": ["set"], "fields": { "age": 7 } }).to_string();
    let headers = [("content-type", "application/json")];
    let answer =
        rig.client.send("PUT", "/v1/bots/shop/subscribers/u", &headers, body.as_bytes()).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
    rig.publish(&[tag("shop", "u", "2", "after")]).await;
    let expected = json!({ "tags": ["after", "set"], "fields": { "age": 7 } });
    eventually(LONG, "it is set", async || profile(&rig.client, "shop", "u").await == expected)
        .await;
    rig.instance.stop().await;
}
