//! A bus that answers slowly.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use tokio::net::TcpListener;

use super::{BOTS, Bus, LONG, shares};
use crate::support::fleet::Fleet;
use crate::support::kafka::KafkaBroker;
use crate::support::proxy::distance::Distance;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

/// The reader of each log.
async fn readers(fleet: &Fleet<RedisServer>) -> BTreeMap<String, String> {
    let mut connection = fleet.server.connection().await;
    let mut fields: BTreeMap<String, String> = redis::cmd("HGETALL")
        .arg("fl:{kafka:k}:readers")
        .query_async(&mut connection)
        .await
        .unwrap();
    fields.retain(|field, _| field.starts_with('l'));
    fields
}

/// A share lasts 1.5 s, and the broker needs longer to tell its partitions.
#[tokio::test]
async fn partitions_stay_with_their_readers_while_the_broker_answers_slowly() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broker = KafkaBroker::start_behind(listener.local_addr().unwrap().port());
    let distance = Distance::on(listener, broker.own_address());
    broker.create_topic("events", 2).await;
    let mut config: ClientConfig = broker.config();
    config.set("partitioner", "murmur2_random");
    let bus = Bus::Kafka(broker, config.create().unwrap());
    let mut fleet = bus.fleet(Options::default());
    fleet.start(2).await;
    eventually(LONG, "each reads one", async || shares(&fleet).await == [1, 1]).await;
    distance.set(Duration::from_millis(350));
    // A busy machine delays renewals too. Renewals that wait for the broker are late in each round.
    for round in 1.. {
        let (before, began) = (readers(&fleet).await, Instant::now());
        let mut is_same = true;
        while is_same && began.elapsed() < Duration::from_secs(15) {
            is_same = readers(&fleet).await == before;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        if is_same {
            break;
        }
        assert!(round < 10, "the partitions moved in each of {round} rounds");
    }
    bus.publish(&mut fleet.publisher, 5).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == 5 * BOTS, "{report}");
}
