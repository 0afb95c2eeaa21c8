//! What the rules of one tenant take: the memory of a process, and turns of reading them from MongoDB.

use std::time::{Duration, Instant};

use fairlane::automations::store::{AUTOMATIONS, document};
use fairlane::id::{BotId, RuleId};
use mongodb::bson::Document;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::automation_rig::{LONG, RULES, Rig, event, profile, put};
use crate::support::counter_fleet::{Node, Stores};
use crate::support::interceptor::{Interception, Matcher};
use crate::support::mongo_proxy::on;
use crate::support::redis::Persistence;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::{eventually, judged, promised, tried};

/// A slow machine may need several tries: after 5 s, a process no longer waits for MongoDB.
const TRIES: usize = 10;
const STILL: Duration = Duration::from_secs(3);
/// The limits of the query for a short list, and of that for any list.
const SHORT: u16 = 11;
const ANY: u16 = 2_000;

/// Rules of a bot, as an earlier version wrote them.
fn stored(bot: &str, rule: &Value, count: usize) -> Vec<Document> {
    let bot = BotId::parse(bot).unwrap();
    let stored = (0..count).map(|number| {
        let id = RuleId::parse(&format!("r{number:02}")).unwrap();
        document(&bot, &id, &serde_json::from_value(rule.clone()).unwrap())
    });
    stored.collect()
}

#[tokio::test]
async fn rules_that_would_take_too_much_memory_are_refused_and_earlier_ones_say_why_they_do_nothing()
 {
    let rig = Rig::start(&[]).await;
    let tag = json!({ "set_tag": { "tag": "t" } });
    let emit = json!({ "emit": { "type": "large", "data": vec![0; 8_000] } });
    // It has 48 KB of JSON, and takes about 1.5 MB of memory.
    let large = json!({ "on": ["hit"], "actions": [tag, emit, emit, emit] });
    for number in 0..21 {
        rig.put("hostile", &format!("r{number}"), &large).await;
    }
    let refused = put(&rig.client, "hostile", "more", &large).await;
    assert_eq!((refused.code, refused.problem().as_str()), (409, "too-many-rules"), "{refused:?}");
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    for part in ["bytes of memory", "at most 33554432", "shorter filters"] {
        assert!(detail.contains(part), "{detail}");
    }

    let rules = rig.stores.collection(AUTOMATIONS).await;
    // They take more than 64 MiB. Most have no event.
    let mut earlier =
        stored("earlier", &json!({ "on": ["no.such"], "actions": large["actions"] }), 45);
    let loud = stored("earlier", &large, 45);
    for number in [30, 43, 44] {
        earlier[number].clone_from(&loud[number]);
    }
    rules.insert_many(earlier).await.unwrap();
    rig.put("quiet", "rule", &json!({ "on": ["hit"], "actions": [tag] })).await;
    // They were not announced, and are found within a second.
    promised(Duration::from_secs(1)).await;
    let hit = |bot: &str| event(bot, "u", &format!("hit-{bot}"), "hit", json!({}));
    rig.publish(&[hit("earlier"), hit("quiet")]).await;
    for bot in ["earlier", "quiet"] {
        eventually(LONG, &format!("the rules of {bot} act"), async || {
            profile(&rig.client, bot, "u").await["tags"] == json!(["t"])
        })
        .await;
    }
    eventually(LONG, "a rule above the bound for writes matched", async || {
        rig.stats("earlier", "r30").await["matched"] == 1
    })
    .await;
    for rule in ["r43", "r44"] {
        eventually(LONG, &format!("{rule} says why it does nothing"), async || {
            let stats = rig.stats("earlier", rule).await;
            let reason = stats["last_error"]["reason"].as_str().unwrap_or_default();
            stats["matched"] == 0 && reason.contains("more than 67108864 bytes of memory")
        })
        .await;
    }

    let small = json!({ "on": ["hit"], "actions": [tag] });
    let refused = put(&rig.client, "earlier", "more", &small).await;
    assert_eq!((refused.code, refused.problem().as_str()), (409, "too-many-rules"), "{refused:?}");
    let disabled = json!({ "on": ["hit"], "actions": large["actions"], "enabled": false });
    for (rule, body) in [("r44", &disabled), ("r00", &small)] {
        let answer = put(&rig.client, "earlier", rule, body).await;
        assert_eq!(answer.code, 200, "the rules take no more than before: {answer:?}");
    }
    rig.instance.stop().await;
}

/// The query for a list of up to so many rules of a bot whose name begins like this.
fn lists(most: u16, name: &'static str) -> Matcher {
    let is_find = on("find", AUTOMATIONS);
    let limit = [b"limit\0".as_slice(), &u32::from(most).to_le_bytes()].concat();
    Box::new(move |message| {
        let has = |part: &[u8]| message.windows(part.len()).any(|found| found == part);
        is_find(message) && has(name.as_bytes()) && has(&limit)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn long_lists_of_rules_of_one_token_leave_a_place_to_others_and_short_ones_need_none() {
    const BOTS: usize = 12;
    let of = |name: &str| format!("scopes = [\"read\"], bots = [\"{name}-*\"]");
    let names = ["shop", "other", "third"];
    let tokens = names.map(|name| (name, of(name)));
    let tokens = Tokens::new(&tokens.each_ref().map(|(name, rest)| (*name, rest.as_str())));
    let stores = Stores::start(Persistence::Always);
    let rule = json!({ "on": ["no.such"], "actions": [{ "set_tag": { "tag": "t" } }] });
    let mut rules = stored("other-short", &rule, usize::from(SHORT) - 1);
    let shops = (0..BOTS).map(|number| format!("shop-{number}"));
    for bot in shops.chain(["other-long", "third-long"].map(str::to_owned)) {
        rules.extend(stored(&bot, &rule, usize::from(SHORT)));
    }
    stores.collection(AUTOMATIONS).await.insert_many(rules).await.unwrap();
    let settings = [("auth.tokens", &*tokens.setting), ("counters.read_timeout", "\"10s\"")];
    let node = Node::start(&stores, &[RULES, &settings].concat()).await;
    let [shop, other, third] = names.map(|name| node.client().with_token(&text(name)));
    let path = |bot: &str| format!("/v1/bots/{bot}/automations");

    tried(TRIES, async |is_last| {
        let (begun, mut asking) = (Instant::now(), JoinSet::new());
        let hold = |name| node.mongo.intercept(lists(ANY, name), 1, Interception::HoldReply);
        let (first, second, third_held) = (hold("shop-"), hold("shop-"), hold("third-"));
        let count = u32::try_from(BOTS).unwrap();
        let come = node.mongo.intercept(lists(SHORT, "shop-"), count, Interception::Watch);
        for number in 0..BOTS {
            let (client, path) = (shop.clone(), path(&format!("shop-{number}")));
            asking.spawn(async move { client.get(&path).await });
        }
        assert!(come.catches(LONG).await && first.catches(LONG).await);
        let long = other.get(&path("other-long")).await;
        let is_one = !second.has_caught();
        let (client, of_third) = (third.clone(), path("third-long"));
        asking.spawn(async move { client.get(&of_third).await });
        assert!(third_held.catches(LONG).await, "it has the second place");
        let short = other.get(&path("other-short")).await;
        judged(!is_last && begun.elapsed() > STILL, || {
            assert!(is_one, "one list of a tenant is read at a time");
            for (answer, rules) in [(long, SHORT), (short, SHORT - 1)] {
                assert_eq!(answer.code, 200, "{answer:?}");
                let listed = answer.json()["automations"].as_array().map(Vec::len);
                assert_eq!(listed, Some(usize::from(rules)));
            }
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_few_rules_that_are_large_together_takes_its_turn_as_a_long_one() {
    let stores = Stores::start(Persistence::Always);
    let emit = json!({ "emit": { "type": "t", "data": "x".repeat(15_000) } });
    let rule = json!({ "on": ["no.such"], "actions": [emit, emit] });
    let rules = [stored("small", &rule, 2), stored("large", &rule, 3)].concat();
    stores.collection(AUTOMATIONS).await.insert_many(rules).await.unwrap();
    let node = Node::start(&stores, RULES).await;
    let turns =
        ["small", "large"].map(|bot| node.mongo.intercept(lists(ANY, bot), 1, Interception::Watch));
    for (bot, rules) in [("small", 2), ("large", 3)] {
        let mut listed = None;
        eventually(LONG, "the rules are listed", async || {
            let answer = node.client().get(&format!("/v1/bots/{bot}/automations")).await;
            listed = answer.json()["automations"].as_array().map(Vec::len);
            answer.code == 200
        })
        .await;
        assert_eq!(listed, Some(rules), "{bot}");
    }
    assert_eq!(turns.map(|turn| turn.has_caught()), [false, true]);
}
