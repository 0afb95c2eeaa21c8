//! Three processes behind a real HAProxy, with the recipe of `docs/edge.md`, are restarted one after the
//! other under load.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;

use crate::support::balancer::{Balancer, recipe, replaced};
use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, get, metric, until_ready};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{Options, RedisServer, free_port};
use crate::support::served::Served;
use crate::support::wait::{eventually, promised};

const LONG: Duration = Duration::from_secs(60);
/// Of the recipe: the interval of the checks, with some room.
const NOTICED: Duration = Duration::from_millis(1_500);

/// Publishes over HTTP until the end. Returns the accepted ids.
async fn publish(
    client: &Client,
    publisher: usize,
    over: &watch::Sender<bool>,
    sent: &AtomicUsize,
) -> Vec<String> {
    let mut accepted = Vec::new();
    while !*over.borrow() {
        let id = format!("{publisher}-{}", accepted.len());
        let body = event(&format!("bot-{publisher}"), "test.event", &id);
        let answer = client.publish("application/cloudevents+json", &body).await;
        assert_eq!(answer.code, 202, "{answer:?}");
        accepted.push(id);
        sent.fetch_add(1, Ordering::Relaxed);
    }
    accepted
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_behind_haproxy_loses_no_request_and_repeats_no_finished_slice() {
    restarts(1).await;
}

/// `make rolling` runs it. It takes some minutes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; make rolling"]
async fn rolling_restarts_during_100000_requests_lose_none_and_repeat_no_finished_slice() {
    restarts(100_000).await;
}

/// Restarts the three processes in turn, until all have been restarted and clients have sent so many
/// requests.
async fn restarts(requests: usize) {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::start(|_| async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        Reply::new(200, "")
    })
    .await;
    let url = format!("{:?}", receiver.url());
    let configure = |port: u16| {
        let settings = [
            ("http.listen", format!("\"127.0.0.1:{port}\"")),
            ("shutdown_delay", "\"2s\"".to_owned()),
            ("pipelines.test.handler", "\"push\"".to_owned()),
            ("pipelines.test.url", url.clone()),
        ];
        let settings: Vec<_> = settings.iter().map(|(key, value)| (*key, value.as_str())).collect();
        config(&server, "test", &settings)
    };
    let configs = [(); 3].map(|()| configure(free_port()));
    let mut processes = Vec::new();
    for config in &configs {
        processes.push(Served::start(config).await);
    }
    let mut text = recipe("HAProxy: a rolling restart");
    for (place, process) in
        ["10.0.0.5:8080", "10.0.0.6:8080", "10.0.0.7:8080"].iter().zip(&processes)
    {
        text = replaced(&text, place, &process.http());
    }
    let balancer = Balancer::haproxy(&text).await;
    let client = balancer.client();
    let over = watch::Sender::new(false);
    let sent = AtomicUsize::new(0);
    let publishing = join_all((0..6).map(|publisher| publish(&client, publisher, &over, &sent)));
    let restarting = async {
        let mut rounds = 0;
        while rounds == 0 || sent.load(Ordering::Relaxed) < requests {
            rounds += 1;
            for (process, config) in processes.iter_mut().zip(&configs) {
                process.sigterm();
                eventually(LONG, "it ends", async || !process.is_running()).await;
                let ended = process.wait_exit(Duration::ZERO).expect("it has ended");
                assert_eq!(ended.code(), Some(0), "{}", process.log());
                *process = Served::start(config).await;
                until_ready(&process.http()).await;
                promised(NOTICED).await;
            }
        }
        over.send_replace(true);
        rounds
    };
    let (accepted, rounds) = tokio::join!(publishing, restarting);
    let accepted: Vec<String> = accepted.into_iter().flatten().collect();
    println!("{} requests, {} restarts", accepted.len(), 3 * rounds);
    let counts = || {
        let mut counts = BTreeMap::<String, u32>::new();
        for id in receiver.calls().iter().flat_map(Call::ids) {
            *counts.entry(id).or_default() += 1;
        }
        counts
    };
    eventually(LONG * 5, "all are handled", async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let counts = counts();
        accepted.iter().all(|id| counts.contains_key(id))
    })
    .await;
    let repeated: Vec<_> = counts().into_iter().filter(|(_, count)| *count > 1).collect();
    assert_eq!(repeated, [], "of {}", accepted.len());
    for process in &processes {
        let (_, metrics) = get(&process.metrics(), "/metrics").await;
        let lost = metric(&metrics, "fairlane_leases_lost_total", &[("pipeline", "test")]);
        assert!(lost.is_none_or(|lost| lost < 1.0), "{lost:?}");
    }
}
