//! Rules whose events go to a bus beside Redis, evaluated by processes that are killed.

use std::time::Duration;

use serde_json::json;

use super::{Bus, LONG};
use crate::support::automation_rig::{RULES, event, put};
use crate::support::counter_fleet::{Node, Stores, total};
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const BOTS: u64 = 6;
const SALES: u64 = 60;
const KILLS: usize = 8;

/// Each sale makes one rule emit an event, which a second rule counts. A rule that a killed process
/// carried out is carried out again, so its event may be published twice.
async fn each_emitted_event_counts_once(bus: Bus, name: &str) {
    let stores = Stores::start(Persistence::Always);
    let (sources, publish) = (bus.sources(), format!("{name:?}"));
    let settings = [
        RULES,
        &[
            ("bus.streams", "[]"),
            ("bus.sources", &sources),
            ("bus.publish", &publish),
            ("bus.dedup", "\"10m\""),
            // The ledger of such a rule is written per event, so a kill often hits one.
            ("pipelines.automations.batch", "4"),
        ],
    ]
    .concat();
    let mut nodes = [Node::start(&stores, &settings).await, Node::start(&stores, &settings).await];
    let bots: Vec<String> = (0..BOTS).map(|bot| format!("shop-{bot}")).collect();
    for bot in &bots {
        let sale = json!({ "on": ["sale.made"], "actions": [
            { "emit": { "type": "sale.seen" } }, { "count": { "ad": "made" } } ] });
        put(&nodes[0].client(), bot, "made", &sale).await;
        let seen = json!({ "on": ["sale.seen"], "actions": [{ "count": { "ad": "seen" } }] });
        put(&nodes[0].client(), bot, "seen", &seen).await;
    }
    let counted = async |nodes: &[Node; 2], ad: &str| {
        let mut sum = 0;
        for bot in &bots {
            let ad = (bot.clone(), ad.to_owned());
            sum += total(&nodes[1].client(), &ad).await.unwrap_or_default();
        }
        sum
    };
    for round in 0..KILLS {
        let (mut of, mut texts) = (Vec::new(), Vec::new());
        let per_round = SALES.div_ceil(KILLS as u64);
        let first = round as u64 * per_round;
        for sale in first..SALES.min(first + per_round) {
            for bot in &bots {
                let (subject, id) = (format!("u{}", sale % 5), format!("s{sale}"));
                of.push(bot.clone());
                texts.push(event(bot, &subject, &id, "sale.made", json!({})).to_string());
            }
        }
        bus.add(&of, &texts).await;
        // In the middle of the work: each sale takes several round trips.
        tokio::time::sleep(Duration::from_millis(20 + 40 * (round as u64 % 4))).await;
        nodes[round % 2].restart().await;
    }
    let all = BOTS * SALES;
    eventually(LONG * 2, "every sale is seen", async || counted(&nodes, "seen").await >= all).await;
    // A repeated event would be counted now.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((counted(&nodes, "made").await, counted(&nodes, "seen").await), (all, all));
}

#[tokio::test]
async fn events_that_rules_put_on_nats_count_once_while_processes_are_killed() {
    each_emitted_event_counts_once(Bus::nats().await, "n").await;
}

#[tokio::test]
async fn events_that_rules_put_on_kafka_count_once_while_processes_are_killed() {
    each_emitted_event_counts_once(Bus::kafka(4).await, "k").await;
}
