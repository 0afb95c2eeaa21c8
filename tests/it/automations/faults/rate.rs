//! Rules of bots with a rate: each action happens once and in order, and no bot exceeds its rate.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::each_action_happens_once;
use crate::support::automation_rig::{LONG, RULES, publish, put, settles, tag};
use crate::support::config::STREAM;
use crate::support::counter_fleet::{Node, Stores};
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const PER_SECOND: f64 = 30.0;
const BURST: f64 = 5.0;
/// The time between the token of an event and its action. A busy machine makes it longer.
const LATE: f64 = 0.5;
/// Slower than without a rate, because the rate bounds how soon all is handled.
const PAUSE: Duration = Duration::from_millis(50);
const LIMITS: [(&str, &str); 2] =
    [("pipelines.automations.rate", "\"30/s\""), ("pipelines.automations.burst", "5")];

/// An action on the bus.
struct Emitted {
    at_ms: u64,
    subject: String,
    kind: String,
}

/// The events that rules put on the bus, for each bot, with the time of Redis.
async fn actions(stores: &Stores) -> BTreeMap<String, Vec<Emitted>> {
    let mut connection = stores.redis.connection().await;
    let mut command = redis::cmd("XRANGE");
    command.arg(STREAM).arg("-").arg("+");
    let entries: Vec<(String, BTreeMap<String, String>)> =
        command.query_async(&mut connection).await.unwrap();
    let mut actions: BTreeMap<String, Vec<Emitted>> = BTreeMap::new();
    for (id, fields) in entries {
        let event: Value = serde_json::from_str(&fields["event"]).unwrap();
        if event["source"] == "fairlane/automations" {
            let text = |key: &str| event[key].as_str().unwrap().to_owned();
            let at_ms = id.split_once('-').unwrap().0.parse().unwrap();
            let (subject, kind) = (text("subject"), text("type"));
            actions.entry(text("botid")).or_default().push(Emitted { at_ms, subject, kind });
        }
    }
    actions
}

/// Asserts that no window has more actions than the bucket of the bot has tokens.
#[expect(clippy::cast_precision_loss, reason = "a few seconds")]
fn assert_within_rate(bot: &str, actions: &[Emitted]) {
    for (from, first) in actions.iter().enumerate() {
        for (count, last) in (1_u32..).zip(&actions[from..]) {
            let seconds = (last.at_ms - first.at_ms) as f64 / 1e3;
            let allowed = BURST + PER_SECOND * (seconds + LATE) + 2.0;
            assert!(f64::from(count) <= allowed, "{bot}: {count} actions in {seconds} s");
        }
    }
}

#[tokio::test]
async fn with_a_rate_each_action_happens_once_and_in_order_although_processes_are_killed() {
    let (stores, told) = each_action_happens_once(&[RULES, &LIMITS].concat(), PAUSE).await;
    for (bot, actions) in actions(&stores).await {
        assert_within_rate(&bot, &actions);
        let order = actions.iter().map(|action| (&*action.subject, &*action.kind));
        let expected = told.order[&bot].iter().map(|(subject, kind)| (&**subject, *kind));
        assert!(order.eq(expected), "the actions of {bot} have the order of its events");
    }
}

#[tokio::test]
async fn with_a_rate_and_an_order_by_subject_each_action_happens_once_although_processes_are_killed()
 {
    let by_subject = [
        ("pipelines.automations.order_by", "\"subject\""),
        ("pipelines.automations.concurrency", "4"),
    ];
    let settings = [RULES, &LIMITS, &by_subject].concat();
    let (stores, _) = each_action_happens_once(&settings, PAUSE).await;
    for (bot, actions) in actions(&stores).await {
        assert_within_rate(&bot, &actions);
    }
}

#[tokio::test]
async fn the_actions_of_a_backlog_come_at_the_rate_of_its_bot_although_a_process_is_killed() {
    const EVENTS: u32 = 120;
    let stores = Stores::start(Persistence::Always);
    let settings = [RULES, &LIMITS].concat();
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Node::start(&stores, &settings).await);
    }
    // Each event has one action. The events that they put on the bus take tokens too.
    let rule = json!({ "on": ["tag.applied"], "actions": [{ "emit": { "type": "went" } }] });
    assert_eq!(put(&nodes[0].client(), "b", "r", &rule).await.code, 201);
    let events: Vec<Value> =
        (0..EVENTS).map(|id| tag("b", &format!("u{}", id % 7), &id.to_string(), "x")).collect();
    publish(&stores, &events).await;
    let third = EVENTS as usize / 3;
    eventually(LONG, "a third has its actions", async || {
        actions(&stores).await.get("b").is_some_and(|actions| actions.len() >= third)
    })
    .await;
    nodes[0].restart().await;
    settles(&stores, events.len() + EVENTS as usize).await;
    let actions = actions(&stores).await.remove("b").unwrap();
    assert_eq!(actions.len(), EVENTS as usize);
    assert_within_rate("b", &actions);
    let lasted = Duration::from_millis(actions[actions.len() - 1].at_ms - actions[0].at_ms);
    // The rate bounds the time: without it, all are handled within a second.
    let least = (f64::from(EVENTS) - BURST) / PER_SECOND - LATE;
    assert!(lasted.as_secs_f64() >= least, "{lasted:?}");
}
