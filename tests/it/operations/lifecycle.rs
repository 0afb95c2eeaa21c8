//! A process that is asked to stop finishes its slices and leaves no other process waiting.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::fleet::{Fleet, metrics_address};
use crate::support::http::{self, Client, Response, metric};
use crate::support::mongo::{self, MongoServer};
use crate::support::process::WorkerProcess;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stalls, Stopwatch, eventually, judged, tried};

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn sigterm_under_load_repeats_nothing_and_delays_no_other_process() {
    tried(3, stops_under_load).await;
}

/// False: a process lost a lease, so events came again.
async fn stops_under_load(is_last: bool) -> bool {
    let settings = [("pipelines.test.workers.max", "8"), ("pipelines.test.lease_ttl", "\"30s\"")];
    let mut fleet = Fleet::new(Options::default(), 60, &settings);
    fleet.behaviour.delay = Duration::from_millis(3);
    fleet.start(2).await;
    fleet.publish(300).await;
    let (stalls, mut any_lost) = (Stalls::watch(), false);
    for round in 1..=3 {
        fleet.settles(round * 3_000, LONG).await;
        let place = round % 2;
        fleet.workers[place].sigterm();
        let status = fleet.workers[place].wait_exit(LONG).expect("it ends");
        assert_eq!(status.code(), Some(0), "{:?}", fleet.workers[place].lines());
        any_lost |= fleet.workers[place].lost_a_lease();
        fleet.restart(place).await;
    }
    fleet.drains(LONG).await;
    let stall = stalls.longest();
    any_lost |= fleet.workers.iter().any(WorkerProcess::lost_a_lease);
    let (report, (rest, usual)) = (fleet.report(), fleet.rests());
    assert!(report.is_clean() && report.sent == 18_000, "{report}");
    // On a slow machine every bot waits longer for its turn.
    let usual = usual.min(Duration::from_secs(10));
    judged(!is_last && any_lost, || {
        assert_eq!((report.handled, report.overlaps), (18_000, 0), "{report}");
        // A renewed lease that is not released would block its bot for 20 to 30 s.
        assert!(
            rest < Duration::from_secs(2) + usual + stall,
            "a bot waited {rest:?}, usually {usual:?}, and the machine stood still for {stall:?}"
        );
    })
}

/// A slow network keeps claims in flight at the time of the signal.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_process_that_stopped_leaves_no_lease_behind() {
    tried(3, leaves_no_lease).await;
}

/// False: a process lost a lease, so events came again, and the lease ended later.
async fn leaves_no_lease(is_last: bool) -> bool {
    let options = Options { tcp: true, ..Options::default() };
    let mut fleet = Fleet::new(options, 100, &[("pipelines.test.lease_ttl", "\"30s\"")]);
    let proxy = Proxy::start(fleet.server.tcp_addr()).await;
    fleet.config = fleet.config.replace(&fleet.server.url(), &proxy.url());
    proxy.set(ProxyMode::Delay(Duration::from_millis(2)));
    fleet.behaviour.delay = Duration::from_millis(1);
    fleet.publish(200).await;
    fleet.start(1).await;
    let mut any_lost = false;
    for round in 1..=5 {
        fleet.settles(round * 500, LONG).await;
        fleet.workers[0].sigterm();
        let status = fleet.workers[0].wait_exit(LONG).expect("it ends");
        assert_eq!(status.code(), Some(0), "{:?}", fleet.workers[0].lines());
        any_lost |= fleet.workers[0].lost_a_lease();
        let (left, lines) = (fleet.leases().await, fleet.workers[0].lines());
        if !judged(!is_last && any_lost, || assert_eq!(left, 0, "round {round}: {lines:#?}")) {
            return false;
        }
        fleet.restart(0).await;
    }
    any_lost |= fleet.workers[0].lost_a_lease();
    let report = fleet.report();
    assert_eq!((report.reordered, report.stale_commits), (0, 0), "{report}");
    assert_eq!(report.duplicates_unexplained, 0, "{report}");
    judged(!is_last && any_lost, || {
        assert_eq!((report.overlaps, report.duplicates_explained), (0, 0), "{report}");
    })
}

#[tokio::test]
async fn a_second_signal_stops_immediately_and_a_long_slice_comes_again() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.behaviour.delay = Duration::from_secs(4);
    fleet.start(1).await;
    fleet.publish(1).await;
    let busy = ("fairlane_workers", [("state", "busy")]);
    eventually(LONG, "the handler runs", async || {
        http::metric(&fleet.metrics(0).await, busy.0, &busy.1) == Some(1.0)
    })
    .await;
    fleet.workers[0].sigterm();
    let address = metrics_address(&fleet.workers[0]).unwrap();
    eventually(LONG, "it says that it is stopping", async || {
        let (code, body) = http::get(&address, "/readyz").await;
        code == 503 && body.contains("stopping")
    })
    .await;
    assert_eq!(http::get(&address, "/healthz").await.0, 200, "alive until the end");
    let signalled = Stopwatch::start();
    fleet.workers[0].sigterm();
    assert_eq!(fleet.workers[0].wait_exit(LONG).unwrap().code(), Some(0));
    // The handler would take up to four seconds.
    signalled.within(Duration::from_secs(2), "it stops");
    fleet.behaviour.delay = Duration::ZERO;
    fleet.restart(0).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.handled == 1, "{report}");
}

async fn serve_with_delay(server: &RedisServer, delay: &str) -> Served {
    let settings = [("pipelines.test.handler", "\"log\""), ("shutdown_delay", delay)];
    Served::start(&config(server, "test", &settings)).await
}

async fn says_stopping(address: &str) -> bool {
    let (code, body) = http::get(address, "/readyz").await;
    code == 503 && body.contains("\"stopping\"")
}

#[tokio::test]
async fn during_the_shutdown_delay_it_is_not_ready_but_accepts_answers_and_handles_everything() {
    const DELAY: Duration = Duration::from_secs(4);
    let server = RedisServer::start(Options::default());
    let mut process = serve_with_delay(&server, "\"4s\"").await;
    let (http, metrics) = (process.http(), process.metrics());
    let client = Client::new(&http);
    let publish =
        async |n| client.publish("application/cloudevents+json", event("bot-1", "e", n)).await.code;
    assert_eq!(publish(0).await, 202);
    assert_eq!(client.get("/readyz").await.code, 200);
    // Opened before the signal, as a balancer keeps its connections open.
    let mut kept = TcpStream::connect(&http).await.unwrap();

    let signalled = Instant::now();
    process.sigterm();
    let (mut accepted, mut told) = (1, 0);
    eventually(LONG, "both listeners say so", async || {
        says_stopping(&http).await && says_stopping(&metrics).await
    })
    .await;
    while signalled.elapsed() < DELAY * 3 / 4 {
        assert_eq!(publish(accepted).await, 202, "after {:?}", signalled.elapsed());
        accepted += 1;
        assert!(says_stopping(&http).await, "{:?}", signalled.elapsed());
        told += 1;
        assert_eq!(client.get("/healthz").await.code, 200, "it is alive");
    }
    assert!(told > 0 && accepted > 1);
    let done = [("pipeline", "test"), ("outcome", "done")];
    eventually(Duration::from_millis(300), "its workers go on", async || {
        let (_, text) = http::get(&metrics, "/metrics").await;
        metric(&text, "fairlane_events_total", &done) == Some(f64::from(accepted))
    })
    .await;

    // The kept connection gets an answer and is then closed properly.
    kept.write_all(client.head("GET", "/healthz", &[]).as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    kept.read_to_end(&mut answer).await.unwrap();
    let (answer, _) = Response::parse(&answer).unwrap();
    assert_eq!((answer.code, answer.header("connection")), (200, Some("close")));

    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0), "{}", process.log());
    assert!(signalled.elapsed() >= DELAY, "{:?}", signalled.elapsed());
    assert!(TcpStream::connect(&http).await.is_err(), "nothing is accepted any more");
}

#[tokio::test]
async fn a_second_signal_ends_the_shutdown_delay() {
    let server = RedisServer::start(Options::default());
    let mut process = serve_with_delay(&server, "\"1h\"").await;
    let metrics = process.metrics();
    process.sigterm();
    eventually(LONG, "it is leaving", async || says_stopping(&metrics).await).await;
    assert!(process.is_running());
    process.sigterm();
    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0), "{}", process.log());
}

/// However long the stop waits, a probe learns of it while it can still connect.
#[tokio::test]
async fn without_a_shutdown_delay_it_is_not_ready_before_connections_are_refused() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.behaviour.delay = Duration::from_secs(3);
    fleet.start(1).await;
    fleet.publish(1).await;
    eventually(LONG, "the handler runs", async || {
        let busy = [("state", "busy")];
        metric(&fleet.metrics(0).await, "fairlane_workers", &busy) == Some(1.0)
    })
    .await;
    let address = metrics_address(&fleet.workers[0]).unwrap();
    fleet.workers[0].sigterm();
    let mut codes = Vec::new();
    eventually(LONG, "it refuses connections", async || {
        let (code, _) = http::get(&address, "/readyz").await;
        if codes.last() != Some(&code) {
            codes.push(code);
        }
        code == 0
    })
    .await;
    // The process may have answered once before it saw the signal.
    codes.retain(|code| *code != 200);
    assert_eq!(codes, [503, 0]);
}

/// The supervisors of the documentation kill a process that runs longer.
#[tokio::test]
async fn with_stores_that_hang_it_ends_within_5_s_after_the_grace_period() {
    const GRACE: Duration = Duration::from_secs(2);
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let mongo = MongoServer::start(mongo::Options::default());
    let url = format!("{:?}", mongo.url());
    let settings = [
        ("mongodb.url", &*url),
        ("pipelines.test.handler", "\"log\""),
        ("pipelines.test.handler_timeout", "\"1s\""),
        ("pipelines.automations.enabled", "true"),
        ("pipelines.automations.handler_timeout", "\"1s\""),
        ("pipelines.notifications.enabled", "true"),
        ("pipelines.notifications.handler_timeout", "\"1s\""),
        ("shutdown_grace", "\"2s\""),
    ];
    let mut process = Served::start(&config(&server, "test", &settings)).await;
    let client = Client::new(&process.http());
    eventually(LONG, "both stores are used", async || {
        let view = client.post("/v1/bots/bot-1/counters/ad/views").await.code;
        let event = client.publish("application/cloudevents+json", event("bot-1", "e", 1)).await;
        (view, event.code) == (200, 202)
    })
    .await;
    // Requests that wait for the stores when the signal comes.
    server.sigstop();
    mongo.sigstop();
    let mut waiting = tokio::task::JoinSet::new();
    for path in ["/v1/bots/bot-1/counters/ad/views", "/v1/bots/bot-2/counters/ad/views"] {
        let client = client.clone();
        waiting.spawn(async move { client.post(path).await });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let signalled = Stopwatch::start();
    process.sigterm();
    let status = process.wait_exit(LONG);
    assert!(status.is_some(), "it still runs: {}", process.log());
    signalled.within(GRACE + Duration::from_secs(5), &process.log());
}
