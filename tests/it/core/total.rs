//! The limit of slices at once of all processes together, and a network that is silent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fairlane::handler::Outcomes;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(40);

/// Counts when it is dropped.
struct Told(Arc<AtomicUsize>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Other processes use its place after five seconds, long before its lease ends.
#[tokio::test]
async fn a_slice_ends_with_its_place_also_while_its_lease_is_being_renewed() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let counts = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let [started, ended] = counts.clone();
    let handler = Log::default().handler(move |_| {
        let [started, ended] = counts.clone();
        async move {
            let _told = Told(ended);
            started.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
            Ok(Outcomes::done())
        }
    });
    let url = format!("{:?}", proxy.url());
    let settings = [
        ("pipelines.test.total_concurrency", "1"),
        ("pipelines.test.lease_ttl", "\"15s\""),
        ("pipelines.test.handler_timeout", "\"30s\""),
        ("shutdown_grace", "\"30s\""),
        ("redis.url", &*url),
    ];
    let instance = Instance::start(&config(&server, "test", &settings), handler).await;
    add(&server, STREAM, &[event("bot", "test", 0)]).await;
    eventually(LONG, "it begins", async || started.load(Ordering::SeqCst) == 1).await;
    // The first renewal comes after 0.6 s, and the second one after five more. Then the place lasts for
    // less than 5 s, and the lease for 8.
    tokio::time::sleep(Duration::from_millis(5_300)).await;
    assert_eq!(ended.load(Ordering::SeqCst), 0);
    proxy.set(ProxyMode::Hold);
    let silent = Stopwatch::start();
    eventually(LONG, "it ends", async || ended.load(Ordering::SeqCst) == 1).await;
    silent.within(Duration::from_secs(7), "it ends");
    proxy.set(ProxyMode::Pass);
    instance.stop().await;
}
