//! The creation of the indexes of rules, which waits for members of the replica set.

use fairlane::automations::store::AUTOMATIONS;
use serde_json::json;

use crate::support::automation_rig::{LONG, RULES, emitted, event, publish, put};
use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, get, metric};
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::{MongoProxy, on};
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

/// More than the attempts during this test. Each takes some seconds.
const ATTEMPTS: usize = 200;

#[tokio::test]
async fn rules_are_known_while_the_creation_of_their_indexes_hangs() {
    let stores = Stores::start(Persistence::Always);
    let proxy = MongoProxy::start_before(stores.mongo.address()).await;
    let hang = || proxy.intercept(on("createIndexes", AUTOMATIONS), 1, Interception::HoldCommand);
    let hanging: Vec<_> = std::iter::repeat_with(hang).take(ATTEMPTS).collect();
    let config = stores.config(&stores.redis.url(), &proxy.mongo_url(), RULES);
    let process = Served::start(&config).await;
    assert!(hanging[0].catches(LONG).await);
    let rule = json!({ "on": ["step"], "actions": [{ "emit": { "type": "stepped" } }] });
    put(&Client::new(&process.http()), "has", "r", &rule).await;
    let in_doubt = async || {
        let text = get(&process.metrics(), "/metrics").await.1;
        metric(&text, "fairlane_automation_doubtful_total", &[]).unwrap()
    };
    let mut round = 0;
    eventually(LONG, "an event without a rule is not copied", async || {
        round += 1;
        let (before, id) = (in_doubt().await, round.to_string());
        let unwanted = event("none", "u", &id, "other", json!({}));
        publish(&stores, &[unwanted, event("has", "u", &id, "step", json!({}))]).await;
        // The fan-out has met both then.
        eventually(LONG, "the second one is decided", async || {
            emitted(&stores, "stepped").await.len() == round
        })
        .await;
        in_doubt().await - before < 0.5
    })
    .await;
    drop(hanging);
    eventually(LONG, "the indexes are created", async || {
        stores.indexes(AUTOMATIONS).await.iter().any(|name| name == "place")
    })
    .await;
}
