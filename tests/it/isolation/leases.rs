//! Calls of a receiver for the leases that it took over with 202.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use crate::support::http::Client;
use crate::support::interceptor::Interception;
use crate::support::proxy::{Proxy, holds};
use crate::support::push::Push;
use crate::support::receiver::Reply;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const JSON: (&str, &str) = ("content-type", "application/json");
/// Concurrent calls for one lease: eight of them run or wait.
const CALLS: usize = 40;
const REFUSED_MIN: usize = 20;

#[tokio::test]
async fn calls_for_a_large_lease_take_turns_and_delay_no_call_for_another() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let url = format!("{:?}", proxy.url());
    let settings = [("redis.url", &*url), ("pipelines.test.lease_ttl", "\"60s\"")];
    let push = Push::on(server, &settings, |_| async { Reply::new(202, "") }).await;
    let large = json!({
        "specversion": "1.0", "id": "1", "source": "test", "type": "test.event", "botid": "large",
        "data": "x".repeat(400_000),
    });
    push.publish_events(&[large.to_string()]).await;
    push.publish("quiet", 7..8).await;
    let process = push.serve().await;
    eventually(LONG, "both leases are handed over", async || push.open().await == 2).await;
    let pushed = push.receiver.calls();
    let path = |bot: &str, what: &str| {
        let call = pushed.iter().find(|call| call.text("bot") == bot).unwrap();
        format!("/v1/leases/{}/{what}", call.text("lease"))
    };

    let client = Client::new(&process.http());
    let reading = proxy.intercept(holds(["LRANGE", ":q:large\r\n"]), 1, Interception::HoldReply);
    let mut calling = JoinSet::new();
    for _ in 0..CALLS {
        let (client, path) = (client.clone(), path("large", "fail"));
        calling.spawn(
            async move { client.send("POST", &path, &[JSON], b"{\"retry_after\":60}").await },
        );
    }
    assert!(reading.catches(LONG).await, "one of them reads the slice");
    // While it does, few others wait.
    let mut codes: BTreeMap<u16, usize> = BTreeMap::new();
    while codes.get(&429) < Some(&REFUSED_MIN) {
        let answer = calling.join_next().await.expect("most are refused").unwrap();
        if answer.code == 429 {
            let told = (answer.problem(), answer.header("retry-after"));
            assert_eq!(told, ("quota".to_owned(), Some("1")), "{answer:?}");
        }
        *codes.entry(answer.code).or_default() += 1;
    }
    let other = client.post(&path("quiet", "complete")).await;
    assert_eq!(other.code, 204, "{other:?}");
    reading.release();
    for answer in calling.join_all().await {
        *codes.entry(answer.code).or_default() += 1;
    }
    assert_eq!(codes.get(&204), Some(&1), "the lease ends once: {codes:?}");
    assert_eq!(codes.values().sum::<usize>(), CALLS);
}
