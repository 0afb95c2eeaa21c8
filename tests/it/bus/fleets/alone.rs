//! A process that alone cannot reach a bus, and one that may not read it.

use fairlane::presence::processes;
use tokio::time::sleep;

use super::*;
use crate::support::bus::wire;
use crate::support::nats::{PASSWORD, USER};
use crate::support::proxy::distance::Distance;

async fn add(bus: &Bus, ids: std::ops::Range<u32>) {
    let events: Vec<_> = ids.map(|id| event("b", "t", id)).collect();
    bus.add(&vec!["b".to_owned(); events.len()], &events).await;
}

#[tokio::test]
async fn a_process_that_alone_cannot_reach_nats_leaves_it_to_the_others() {
    let bus = Bus::nats().await;
    let Bus::Nats(nats) = &bus else { unreachable!() };
    let server = RedisServer::start(Options::default());
    let way = Distance::start(nats.address()).await;
    let near = bus.sources();
    let far = near.replace(&nats.url(), &format!("nats://{}", way.address()));
    let log = Log::default();
    let start = async |sources: &str| {
        let settings = [("bus.streams", "[]"), ("bus.sources", sources)];
        Instance::start(&config(&server, "all", &settings), log.content()).await
    };
    let first = start(&far).await;
    add(&bus, 0..5).await;
    eventually(LONG, "the first one reads", async || log.len() == 5).await;
    let second = start(&near).await;
    drop(way);
    add(&bus, 5..10).await;
    eventually(LONG, "the other one reads", async || log.len() >= 10).await;
    assert_eq!(log.ids("all"), (0..10).map(|id| id.to_string()).collect::<Vec<_>>());
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_bus_that_only_tells_its_logs_cannot_be_read_since_the_first_failure() {
    let users = format!(
        "authorization {{ users: [ {{ user: admin, password: \"{PASSWORD}\" }}, \
         {{ user: \"{USER}\", password: \"{PASSWORD}\", permissions: {{ publish: {{ \
         deny: [\"$JS.API.CONSUMER.CREATE.>\"] }} }} }} ] }}"
    );
    let nats = NatsServer::start(NatsOptions { more: users, ..NatsOptions::default() });
    let admin = async_nats::ConnectOptions::new()
        .user_and_password("admin".to_owned(), PASSWORD.to_owned())
        .connect(nats.url())
        .await
        .unwrap();
    async_nats::jetstream::new(admin).create_stream(Bus::stream()).await.unwrap();
    let server = RedisServer::start(Options::default());
    let sources = format!(
        "[{{ name = \"n\", kind = \"nats\", servers = [\"{}\"], stream = \"EVENTS\", \
         publish_subject = \"events.{{bot}}\", user = \"{USER}\", password = \"{PASSWORD}\" }}]",
        nats.url()
    );
    let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
    let start = async || {
        Instance::start(&config(&server, "all", &settings), Log::default().content()).await
    };
    let (first, second) = (start().await, start().await);
    let link = wire(&server);
    let since = async || -> Option<u64> {
        let found = processes(&link).await.unwrap();
        let states = found.iter().flat_map(|process| &process.buses);
        states.filter_map(|state| Some(state.failing.as_ref()?.since_ms)).min()
    };
    eventually(LONG, "operators see it", async || since().await.is_some()).await;
    let failed = since().await;
    // The logs are asked for every five seconds, and each process tells what it knows as often. After five
    // seconds, the first one leaves the log to the other one, which then leaves it to the first one.
    sleep(Duration::from_secs(16)).await;
    assert_eq!(since().await, failed);
    first.stop().await;
    second.stop().await;
}
