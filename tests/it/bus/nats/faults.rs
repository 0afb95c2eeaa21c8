//! A server that is killed, frozen or not there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlane::bus::BusError;
use fairlane::bus::source::{Source as _, Standing};
use fairlane::id::Offset;
use tokio::task::JoinSet;

use super::{Copy, LONG, SECOND, config, fetch, ids, log, make, open, publish, settings, source};
use crate::support::nats::{NatsServer, Options};
use crate::support::wait::{Stopwatch, eventually};

#[tokio::test]
async fn kills_of_the_server_lose_repeat_and_reorder_nothing() {
    const BATCHES: u32 = 150;
    const SIZE: u32 = 20;
    let mut server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let producer = Arc::new(source(settings(&server)));
    let mut publishing = JoinSet::new();
    publishing.spawn(async move {
        for batch in 0..BATCHES {
            let ids = ids(batch * SIZE..(batch + 1) * SIZE);
            let began = Instant::now();
            while let Err(error) = publish(&producer, &ids).await {
                assert!(error.is_passing() && began.elapsed() < LONG, "{error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let source = source(settings(&server));
    let mut copy = Copy::default();
    for kill in 1..=3 {
        copy.until_at_least(&source, kill * 500).await;
        server.restart();
    }
    let count = usize::try_from(BATCHES * SIZE).unwrap();
    assert_eq!(copy.until(&source, count).await, ids(0..BATCHES * SIZE));
    publishing.join_next().await.unwrap().unwrap();
    assert_eq!(copy.lost, 0);
    assert!(copy.errors >= 1);
}

#[tokio::test]
async fn a_frozen_server_holds_up_no_call_for_long() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..5)).await.unwrap();
    let before = log(&source).await;
    open(&source, Offset::default(), Offset::default()).await;
    server.sigstop();
    let timed = async |what: &str, call: &mut dyn AsyncCall| {
        let watch = Stopwatch::start();
        let error = call.call(&source).await.unwrap_err();
        watch.within_steps(SECOND * 8, 2, what);
        assert!(error.is_passing(), "{what}: {error}");
    };
    let standing =
        [Standing { log: before, lowest: Offset::default(), highest: Offset::default() }];
    timed("fetch", &mut Fetch).await;
    timed("open", &mut Open(&standing)).await;
    timed("publish", &mut Publish).await;
    timed("logs", &mut Logs).await;
    server.sigcont();
    assert_eq!(Copy::default().until_at_least(&source, 5).await[..5], ids(0..5));
}

trait AsyncCall {
    fn call<'a>(
        &'a mut self,
        source: &'a fairlane::bus::nats::NatsSource,
    ) -> futures_util::future::LocalBoxFuture<'a, Result<(), BusError>>;
}

macro_rules! call {
    ($name:pat, $type:ty, $source:ident, $call:expr) => {
        impl AsyncCall for $type {
            fn call<'a>(
                &'a mut self,
                $source: &'a fairlane::bus::nats::NatsSource,
            ) -> futures_util::future::LocalBoxFuture<'a, Result<(), BusError>> {
                let $name = self;
                Box::pin(async move { $call.await.map(drop) })
            }
        }
    };
}

struct Fetch;
struct Open<'s>(&'s [Standing]);
struct Publish;
struct Logs;
call!(_, Fetch, source, fetch(source, 10, SECOND));
call!(open, Open<'_>, source, source.open(open.0));
call!(_, Publish, source, publish(source, &ids(5..7)));
call!(_, Logs, source, source.logs());

#[tokio::test]
async fn a_killed_server_fails_a_waiting_fetch_at_once() {
    let mut server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    open(&source, Offset::default(), Offset::default()).await;
    let waiting = fetch(&source, 10, LONG);
    let kill = async {
        // The fetch waits by then. On a slow machine it does not, and this shows nothing.
        tokio::time::sleep(Duration::from_millis(200)).await;
        server.kill9();
        Stopwatch::start()
    };
    let (failed, killed) = tokio::join!(waiting, kill);
    assert!(matches!(failed.unwrap_err(), BusError::Unknown { .. }));
    killed.within(SECOND * 2, "the fetch fails");
    let gone = source.logs().await.unwrap_err();
    assert!(matches!(gone, BusError::Connect { .. }), "{gone}");
    server.restart();
    eventually(LONG, "it connects again", async || source.logs().await.is_ok()).await;
}

#[tokio::test]
async fn another_server_of_the_list_is_used_if_the_first_is_not_there() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    for _ in 0..3 {
        let mut settings = settings(&server);
        settings.servers.insert(0, "nats://127.0.0.1:1".to_owned());
        log(&source(settings)).await;
    }
}
