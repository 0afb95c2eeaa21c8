//! Rules evaluated by processes that are killed, frozen and cut off at every step of a slice. Each
//! action happens once, in MongoDB and on the bus, for exactly the right subscribers.

mod rate;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use self::steps::{STEPS, Step, emit, kill};
use crate::support::automation_rig::{
    LONG, RULES, depth, emitted, event, field, on_the_bus, profile, publish, put, settles, tag,
};
use crate::support::counter_fleet::{Node, Stores, Sums, total};
use crate::support::http::Client;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::kills::Kills;
use crate::support::mongo_proxy::writes_to;
use crate::support::proxy::{ProxyMode, holds};
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

const SUBSCRIBERS: &str = "subscribers";
const BOTS: u64 = 9;
const SUBJECTS: u64 = 20;
/// Each process is killed in its first slices, so some events are in ten of these. By default they would
/// become dead letters.
const PATIENT: (&str, &str) = ("pipelines.automations.max_attempts", "1000");
/// The pause after twelve published events.
const PAUSE: Duration = Duration::from_millis(30);
/// With so many queued events, every process meets every step. More would only be handled after all kills.
const ENOUGH: u64 = 300;

/// The expected profile of a subscriber and the expected events. It is computed without the code of
/// the product.
#[derive(Debug, Default)]
struct Expected {
    gender: Option<&'static str>,
    age: Option<u64>,
    tags: BTreeSet<&'static str>,
    /// Types of the events that rules put on the bus, in order.
    emitted: Vec<&'static str>,
    women: u64,
}

impl Expected {
    fn event(&mut self, kind: u32, random: &mut StdRng, at: &[&str; 3]) -> Value {
        let [bot, subject, id] = *at;
        match kind {
            0 => {
                self.tags.insert("x");
                if self.gender == Some("female") && self.age.is_some_and(|age| age > 30) {
                    self.women += 1;
                    self.emitted.push("women");
                }
                tag(bot, subject, id, "x")
            }
            1 => {
                let gender = ["female", "male"][random.random_range(0..2)];
                self.gender = Some(gender);
                field(bot, subject, id, "gender", json!(gender))
            }
            _ => {
                let age = random.random_range(28..36);
                self.age = Some(age);
                // A subscriber with the age of 30 gets a tag, and loses it at any other age.
                if age == 30 && self.tags.insert("thirty") {
                    self.emitted.push("tag.applied");
                }
                if age != 30 && self.tags.remove("thirty") {
                    self.emitted.push("tag.removed");
                }
                field(bot, subject, id, "age", json!(age))
            }
        }
    }

    fn profile(&self) -> Value {
        let mut fields = serde_json::Map::new();
        if let Some(age) = self.age {
            fields.insert("age".to_owned(), age.into());
        }
        if let Some(gender) = self.gender {
            fields.insert("gender".to_owned(), gender.into());
        }
        json!({ "tags": self.tags, "fields": fields })
    }
}

fn rules() -> [(&'static str, Value); 3] {
    let women = "event.data.tag == 'x' && has(subscriber.gender) && has(subscriber.age) && subscriber.gender == 'female' && subscriber.age > 30";
    [
        (
            "women",
            json!({ "on": ["tag.applied"], "filter": women,
                "actions": [{ "emit": { "type": "women" } }, { "count": { "ad": "women" } }] }),
        ),
        (
            "thirty",
            json!({ "on": ["field.changed"], "filter": "event.data.field == 'age' && subscriber.age == 30",
                "actions": [{ "set_tag": { "tag": "thirty" } }] }),
        ),
        (
            "not-thirty",
            json!({ "on": ["field.changed"], "filter": "event.data.field == 'age' && subscriber.age != 30",
                "actions": [{ "remove_tag": { "tag": "thirty" } }] }),
        ),
    ]
}

/// The published events.
#[derive(Debug, Default)]
struct Told {
    /// The expected state of each subscriber.
    people: BTreeMap<(String, String), Expected>,
    /// For each bot the subjects and types of the expected events, in the order of their causes.
    order: BTreeMap<String, Vec<(String, &'static str)>>,
    published: usize,
}

impl Told {
    /// An event that changes the expected state as `change` says.
    fn event(
        &mut self,
        [bot, subject]: [&str; 2],
        change: impl FnOnce(&mut Expected, &[&str; 3]) -> Value,
    ) -> Value {
        let person = self.people.entry((bot.to_owned(), subject.to_owned())).or_default();
        let before = person.emitted.len();
        let event = change(person, &[bot, subject, &self.published.to_string()]);
        let new = person.emitted[before..].iter().map(|kind| (subject.to_owned(), *kind));
        self.order.entry(bot.to_owned()).or_default().extend(new);
        self.published += 1;
        event
    }
}

/// Publishes until all kills are over.
async fn tell(stores: &Stores, kills: &Kills<Step>, pause: Duration) -> Told {
    let mut random = StdRng::seed_from_u64(7);
    let mut told = Told::default();
    while !kills.are_over() {
        if depth(stores).await > ENOUGH {
            tokio::time::sleep(pause).await;
            continue;
        }
        let mut events = Vec::new();
        for _ in 0..12 {
            let bot = format!("bot-{}", random.random_range(0..BOTS));
            let subject = format!("u{}", random.random_range(0..SUBJECTS));
            let kind = random.random_range(0..3);
            let change =
                |person: &mut Expected, at: &[&str; 3]| person.event(kind, &mut random, at);
            events.push(told.event([&bot, &subject], change));
        }
        publish(stores, &events).await;
        tokio::time::sleep(pause).await;
    }
    told
}

#[tokio::test]
async fn three_processes_killed_at_every_step_of_a_slice_do_each_action_once() {
    each_action_happens_once(RULES, PAUSE).await;
}

#[tokio::test]
async fn subscribers_in_parallel_get_each_action_once_although_processes_are_killed() {
    let by_subject = [
        ("pipelines.automations.order_by", "\"subject\""),
        ("pipelines.automations.concurrency", "4"),
    ];
    each_action_happens_once(&[RULES, &by_subject].concat(), PAUSE).await;
}

/// Returns the stores, and what was published.
async fn each_action_happens_once(settings: &[(&str, &str)], pause: Duration) -> (Stores, Told) {
    let stores = Stores::start(Persistence::Always);
    let settings = [settings, &[PATIENT]].concat();
    let nodes = join_all((0..3).map(|_| Node::start(&stores, &settings))).await;
    let client = nodes[0].client();
    for bot in 0..BOTS {
        for (id, rule) in rules() {
            assert_eq!(put(&client, &format!("bot-{bot}"), id, &rule).await.code, 201);
        }
    }
    let kills = Kills::new(nodes.len(), &STEPS);
    let killing = nodes.into_iter().enumerate().map(|(place, node)| kill(place, node, &kills));
    let (nodes, told) = join(join_all(killing), tell(&stores, &kills, pause)).await;
    let (people, published) = (&told.people, told.published);
    let expected: usize = people.values().map(|person| person.emitted.len()).sum();
    println!("{published} events, {expected} emitted, {:?}", kills.met());
    settles(&stores, published + expected).await;
    let client = nodes[0].client();
    for pipeline in ["automations", "counters"] {
        let letters = client.get(&format!("/v1/pipelines/{pipeline}/dead")).await.json();
        assert_eq!(letters["dead_letters"], json!([]), "{pipeline} gave up nothing");
    }

    let mut happened: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for event in on_the_bus(&stores).await {
        if event["source"] == "fairlane/automations" {
            let text = |key: &str| event[key].as_str().unwrap().to_owned();
            happened.entry((text("botid"), text("subject"))).or_default().push(text("type"));
        }
    }
    let mut women = Sums::new();
    for ((bot, subject), person) in people {
        let key = (bot.clone(), subject.clone());
        let emitted = happened.remove(&key).unwrap_or_default();
        assert_eq!(emitted, person.emitted, "{key:?}");
        assert_eq!(profile(&client, bot, subject).await, person.profile(), "{key:?}");
        if person.women > 0 {
            *women.entry((bot.clone(), "women".to_owned())).or_default() += person.women;
        }
    }
    assert!(happened.is_empty(), "{happened:?}");
    // Views that are being written may be missing from a total.
    stores.settles(&client, &women, LONG).await;
    kills.assert_each_was_met();
    (stores, told)
}

/// Kills a process after it has stored a decision and before it acts on it.
async fn dies_before_the_action(stores: &Stores, rule: &Value) -> Client {
    let mut first = Node::start(stores, RULES).await;
    let client = first.client();
    assert_eq!(put(&client, "b", "r", rule).await.code, 201);
    let interceptor = first.redis.intercept(holds([emit()]), 1, Interception::HoldCommand);
    publish(stores, &[event("b", "u", "1", "go", json!({}))]).await;
    assert!(interceptor.catches(LONG).await);
    first.served.kill9();
    drop(interceptor);
    client
}

#[tokio::test]
async fn a_stored_decision_is_carried_out_although_rule_and_profile_changed() {
    let stores = Stores::start(Persistence::Always);
    let rule = json!({ "on": ["go"], "filter": "!('gone' in subscriber.tags)", "actions": [
        { "set_tag": { "tag": "gone" } }, { "emit": { "type": "went" } },
    ] });
    dies_before_the_action(&stores, &rule).await;
    assert_eq!(on_the_bus(&stores).await.len(), 1, "nothing was done");
    // No process works while the rule is changed. The new rule would act differently, and its
    // filter no longer matches the profile that the old rule changed.
    let config = stores.direct(RULES);
    let editor = Served::start_as(&config, "http").await;
    let changed =
        json!({ "on": ["go"], "filter": "false", "actions": [{ "emit": { "type": "other" } }] });
    assert_eq!(put(&Client::new(&editor.http()), "b", "r", &changed).await.code, 200);
    let second = Served::start(&config).await;
    // One event, the tag that it applied, and the emit.
    settles(&stores, 3).await;
    let kinds: Vec<Value> =
        on_the_bus(&stores).await[1..].iter().map(|event| event["type"].clone()).collect();
    assert_eq!(kinds, ["tag.applied", "went"]);
    let client = Client::new(&second.http());
    assert_eq!(profile(&client, "b", "u").await["tags"], json!(["gone"]));
}

#[tokio::test]
async fn a_stored_decision_is_carried_out_although_the_rule_is_gone() {
    let stores = Stores::start(Persistence::Always);
    let rule = json!({ "on": ["go"], "actions": [{ "emit": { "type": "went" } }] });
    dies_before_the_action(&stores, &rule).await;
    let config = stores.direct(RULES);
    let editor = Served::start_as(&config, "http").await;
    let deleted =
        Client::new(&editor.http()).send("DELETE", "/v1/bots/b/automations/r", &[], b"").await;
    assert_eq!(deleted.code, 204);
    let _second = Served::start(&config).await;
    settles(&stores, 2).await;
    assert_eq!(emitted(&stores, "went").await.len(), 1);
}

#[tokio::test]
async fn a_process_frozen_before_its_write_writes_nothing_once_others_went_on() {
    let stores = Stores::start(Persistence::Always);
    let frozen = Node::start(&stores, RULES).await;
    let client = frozen.client();
    let rule = json!({ "on": ["go"], "actions": [
        { "set_field": { "field": "last", "value": "go" } }, { "emit": { "type": "went" } },
    ] });
    assert_eq!(put(&client, "b", "r", &rule).await.code, 201);
    let interceptor = frozen.mongo.intercept(writes_to(SUBSCRIBERS), 1, Interception::HoldCommand);
    publish(&stores, &[event("b", "u", "1", "go", json!({}))]).await;
    assert!(interceptor.catches(LONG).await);
    frozen.served.sigstop();
    let other = Node::start(&stores, RULES).await;
    // The event, the change of the profile, and the emit. Then the subscriber continues.
    settles(&stores, 3).await;
    publish(&stores, &[field("b", "u", "2", "last", json!("later"))]).await;
    settles(&stores, 4).await;
    frozen.served.sigcont();
    assert!(interceptor.completes(LONG).await);
    // The frozen process would do more now.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    settles(&stores, 4).await;
    assert_eq!(emitted(&stores, "went").await.len(), 1);
    assert_eq!(profile(&other.client(), "b", "u").await["fields"], json!({ "last": "later" }));
}

#[tokio::test]
async fn a_process_frozen_before_its_actions_repeats_none_that_others_did() {
    let stores = Stores::start(Persistence::Always);
    let frozen = Node::start(&stores, RULES).await;
    let rule = json!({ "on": ["go"], "actions": [
        { "emit": { "type": "went" } }, { "count": { "ad": "a" } },
    ] });
    assert_eq!(put(&frozen.client(), "b", "r", &rule).await.code, 201);
    let interceptor = frozen.redis.intercept(holds([emit()]), 1, Interception::HoldCommand);
    publish(&stores, &[event("b", "u", "1", "go", json!({}))]).await;
    assert!(interceptor.catches(LONG).await);
    frozen.served.sigstop();
    let other = Node::start(&stores, RULES).await;
    settles(&stores, 2).await;
    frozen.served.sigcont();
    assert!(interceptor.completes(LONG).await);
    // The frozen process would do more now.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    settles(&stores, 2).await;
    assert_eq!(emitted(&stores, "went").await.len(), 1);
    assert_eq!(total(&other.client(), &("b".to_owned(), "a".to_owned())).await, Some(1));
}

#[tokio::test]
async fn a_lost_answer_of_mongodb_changes_nothing() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, RULES).await;
    let rule = json!({ "on": ["go"], "actions": [{ "emit": { "type": "went" } }] });
    assert_eq!(put(&node.client(), "b", "r", &rule).await.code, 201);
    let interceptors: Vec<Interceptor> = (1..=3)
        .map(|nth| node.mongo.intercept(writes_to(SUBSCRIBERS), nth, Interception::LoseReply))
        .collect();
    let mut published = 0;
    while published < 100 || !interceptors.iter().all(Interceptor::has_caught) {
        let events: Vec<Value> = (published..published + 10)
            .map(|n| event("b", &format!("u{}", n % 7), &n.to_string(), "go", json!({})))
            .collect();
        published += 10;
        publish(&stores, &events).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    settles(&stores, 2 * published).await;
    assert_eq!(emitted(&stores, "went").await.len(), published);
}

#[tokio::test]
async fn redis_restarts_and_each_action_is_done_once() {
    let mut stores = Stores::start(Persistence::Always);
    let client = {
        let served = Served::start(&stores.direct(RULES)).await;
        let client = Client::new(&served.http());
        let rule = json!({ "on": ["go"], "actions": [
            { "emit": { "type": "went" } }, { "emit": { "type": "late", "delay": 2 } },
        ] });
        assert_eq!(put(&client, "b", "r", &rule).await.code, 201);
        let events: Vec<Value> =
            (0..300).map(|n| event("b", "u", &n.to_string(), "go", json!({}))).collect();
        publish(&stores, &events).await;
        eventually(LONG, "some are decided on", async || {
            emitted(&stores, "went").await.len() > 30 || depth(&stores).await > 0
        })
        .await;
        stores.redis.kill9();
        stores.redis.restart();
        settles(&stores, 900).await;
        client
    };
    drop(client);
    assert_eq!(emitted(&stores, "went").await.len(), 300);
    assert_eq!(emitted(&stores, "late").await.len(), 300);
}

#[tokio::test]
async fn profiles_behind_a_slow_line_are_kept_in_portions_that_go_through_and_nothing_gives_up() {
    const SUBJECTS: usize = 1_500;
    let stores = Stores::start(Persistence::Always);
    // A slice has ten times what the line carries within the handler timeout.
    let settings = [
        ("pipelines.automations.handler_timeout", "\"1s\""),
        ("pipelines.automations.batch", "1000"),
        ("pipelines.automations.slice_time", "\"1s\""),
        ("pipelines.automations.lease_ttl", "\"5s\""),
        ("pipelines.automations.max_attempts", "2"),
    ];
    let node = Node::start(&stores, &[RULES, &settings].concat()).await;
    let rule = json!({ "on": ["never"], "actions": [{ "emit": { "type": "no" } }] });
    put(&node.client(), "b", "r", &rule).await;
    node.mongo.set(ProxyMode::Refuse);
    node.mongo.cut();
    let text = "x".repeat(200);
    let events: Vec<Value> = (0..SUBJECTS)
        .map(|n| field("b", &format!("u{n}"), &n.to_string(), "text", json!(text)))
        .collect();
    publish(&stores, &events).await;
    eventually(LONG, "all are queued", async || depth(&stores).await == SUBJECTS as u64).await;
    node.mongo.set(ProxyMode::Rate(60_000));
    let (mut least, mut moved) = (u64::MAX, Instant::now());
    eventually(10 * LONG, "all are decided on", async || {
        let depth = depth(&stores).await;
        if depth < least {
            (least, moved) = (depth, Instant::now());
        }
        assert!(moved.elapsed() < LONG, "{depth} are left, and nothing moves");
        depth == 0
    })
    .await;
    node.mongo.set(ProxyMode::Pass);
    for n in [0, SUBJECTS / 2, SUBJECTS - 1] {
        let kept = profile(&node.client(), "b", &format!("u{n}")).await;
        assert_eq!(kept["fields"], json!({ "text": text }));
    }
    let dead = node.client().get("/v1/pipelines/automations/dead").await.json();
    assert_eq!(dead["dead_letters"], json!([]));
}
