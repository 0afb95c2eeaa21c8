//! A process that stands still between what it reads of Redis and what it writes.

use redis::AsyncCommands as _;

use super::*;
use crate::support::interceptor::Interception;
use crate::support::proxy::{Proxy, holds};

/// The key with the notes of the partitions.
const LOGS: &str = "fl:{kafka:k}:logs";

/// Otherwise the partition would wait for `partition_wait` again.
#[tokio::test]
async fn a_process_that_was_paused_replaces_no_note_of_a_new_partition() {
    let bus = Bus::kafka(1).await;
    let Bus::Kafka(broker, _) = &bus else { unreachable!() };
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let (url, sources) = (format!("{:?}", proxy.url()), bus.sources());
    let settings = [("redis.url", &*url), ("bus.streams", "[]"), ("bus.sources", &*sources)];
    let text = config(&server, "paused", &settings);
    let instance = Instance::start(&text, Log::default().content()).await;
    let state = async |partition: &str| -> Option<String> {
        server.connection().await.hget(LOGS, partition).await.unwrap()
    };
    let (old, new) = ("kafka:k/events/0", "kafka:k/events/1");
    eventually(LONG, "the first one is noted", async || state(old).await.is_some()).await;
    let noting = proxy.intercept(holds([new, "{\"new\":"]), 1, Interception::HoldCommand);
    let more = NewPartitions::new("events", 2);
    let made = broker.admin().create_partitions([&more], &patient()).await.unwrap();
    made[0].clone().unwrap();
    assert!(noting.catches(LONG).await, "it is found");
    // Another process notes it, with a time far ahead, so that it stays.
    let noted = "{\"new\":4102444800000}";
    let () = server.connection().await.hset(LOGS, new, noted).await.unwrap();
    assert!(noting.completes(LONG).await);
    assert_eq!(state(new).await.as_deref(), Some(noted));
    instance.stop().await;
}
