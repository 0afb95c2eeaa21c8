//! Reads of profiles over HTTP.

use mongodb::bson::{Document, doc};
use serde_json::json;

use crate::support::automation_rig::{LONG, RULES};
use crate::support::counter_fleet::{Node, Stores};
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::on;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const PATH: &str = "/v1/bots/hostile/subscribers/u";

#[tokio::test]
async fn a_profile_that_is_late_opens_no_breaker_and_is_read_without_decisions() {
    let stores = Stores::start(Persistence::Always);
    let node =
        Node::start(&stores, &[RULES, &[("counters.read_timeout", "\"2s\"")]].concat()).await;
    let client = node.client();
    let database = mongodb::Client::with_uri_str(stores.mongo.url()).await.unwrap();
    let subscribers = database.database("fairlane").collection::<Document>("subscribers");
    let decided = doc! { "s": 1_i64, "d": "x".repeat(2 << 20) };
    let profile = doc! {
        "_id": "hostile\u{1f}u", "bot": "hostile", "id": "u", "tags": ["a"], "fields": {},
        "s": 1_i64, "decided": [decided],
    };
    subscribers.insert_one(profile).await.unwrap();

    let is_find = on("find", "subscribers");
    let leaves_out = move |message: &[u8]| {
        is_find(message) && message.windows(b"decided".len()).any(|part| part == b"decided")
    };
    let without = node.mongo.intercept(Box::new(leaves_out), 1, Interception::Watch);
    eventually(LONG, "it is read", async || {
        let answer = client.get(PATH).await;
        answer.code == 200 && answer.json()["tags"] == json!(["a"])
    })
    .await;
    assert!(without.catches(LONG).await, "the query leaves out the decisions");

    let held = node.mongo.intercept(on("find", "subscribers"), 1, Interception::HoldReply);
    let late = client.get(PATH).await;
    assert_eq!((late.code, late.problem().as_str()), (503, "mongodb-away"));
    assert!(held.has_caught());
    let other = client.get("/v1/bots/quiet/subscribers/u").await;
    assert_eq!((other.code, other.problem().as_str()), (404, "no-subscriber"), "it is not refused");
}
