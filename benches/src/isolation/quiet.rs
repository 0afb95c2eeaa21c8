//! The quiet bots: a steady rate of work, sent by the clock.

use std::sync::Arc;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros, rfc3339};
use fairlane::sandbox::{Producer, STREAM};
use redis::Pipeline;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::client::{Client, open, request, with_body};
use super::deployment::{Deployment, QUIET};
use super::figures::{PATIENCE, Phase, Tally};
use super::resource::{Quiet, Resource};
use crate::error::BenchError;

/// Number of quiet bots.
pub(super) const BOTS: u64 = 10;
/// Pieces of work per second, of all quiet bots together.
const RATE: u64 = 50;
/// Live pages are expensive.
const PAGES_RATE: u64 = 10;
/// Time from scheduling a notification to its due time.
const LEAD: Duration = Duration::from_millis(500);

/// A quiet bot's name.
pub(super) fn bot(n: u64) -> String {
    format!("quiet-{}", n % BOTS)
}

/// Everything that a piece of work needs.
struct Work {
    http: std::net::SocketAddr,
    host: String,
    phase: u64,
    client: Client,
    producer: Producer,
    tally: Arc<Tally>,
}

/// The figures of the quiet bots over a time.
pub(super) async fn measure(
    deployment: &Deployment<'_>,
    resource: Resource,
    phase: u64,
    lasts: Duration,
) -> Result<Phase, BenchError> {
    let tally = deployment.receiver.behaviour.begin(phase);
    let receiver = deployment.receiver.address;
    // With a name where names are the resource.
    let host = match resource {
        Resource::Dns => format!("quiet.example.com:{}", receiver.port()),
        _ => receiver.to_string(),
    };
    let work = Arc::new(Work {
        http: deployment.http,
        host,
        phase,
        client: Client::new(deployment.http),
        producer: deployment.rig.producer(),
        tally: Arc::clone(&tally),
    });
    deployment.forget_memory();
    let lines = deployment.log_lines();
    let mut running = JoinSet::new();
    for quiet in resource.quiet() {
        running.spawn(send(Arc::clone(&work), *quiet, lasts));
    }
    while running.join_next().await.is_some() {}
    let lines = deployment.log_lines().saturating_sub(lines);
    let sent = Instant::now();
    while !tally.is_complete() && sent.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    let log_lines = lines as f64 / lasts.as_secs_f64();
    Ok(Phase { memory_mb: deployment.memory_mb(), log_lines, ..tally.take() })
}

/// Sends the work for a time, and waits for the answers to its requests.
async fn send(work: Arc<Work>, quiet: Quiet, lasts: Duration) {
    let rate = if quiet == Quiet::LivePages { PAGES_RATE } else { RATE };
    let step = Duration::from_micros(1_000_000 / rate);
    let (origin, origin_us) = (Instant::now(), micros(SystemClock.now()));
    let mut asked = JoinSet::new();
    let (mut n, mut due) = (0, Duration::ZERO);
    while due < lasts {
        tokio::time::sleep_until(origin + due).await;
        asked.spawn(one(Arc::clone(&work), quiet, n, origin_us + micros(due)));
        while asked.try_join_next().is_some() {}
        (n, due) = (n + 1, due + step);
    }
    // A request that is never answered counts as lost.
    let answered = async { while asked.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(PATIENCE, answered).await;
}

/// One piece of work, due at a time in µs since 1970.
async fn one(work: Arc<Work>, quiet: Quiet, n: u64, due: u64) {
    let Work { http, host, phase, client, producer, tally } = &*work;
    let (http, bot) = (*http, bot(n));
    tally.expect();
    let kind = if quiet == Quiet::Ruled { "ruled" } else { "bench.quiet" };
    let event = || {
        json!({ "specversion": "1.0", "id": format!("{phase}-{n}"), "source": "bench",
            "type": kind, "botid": bot, "subject": "ann", "data": { "phase": phase, "due": due } })
        .to_string()
    };
    let is_accepted = match quiet {
        Quiet::Events | Quiet::Ruled => {
            let mut pipe = Pipeline::new();
            pipe.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event());
            producer.send(&pipe).await.is_ok()
        }
        Quiet::Published => {
            let kind = "application/cloudevents+json";
            let body = event();
            let sent = with_body("POST", "/v1/events", http, Some(QUIET), kind, body.as_bytes());
            client.status(&sent).await == 202
        }
        Quiet::Notifications => {
            // Whole milliseconds, as in Redis.
            let at_ms = (due + micros(LEAD)) / 1_000;
            let url = format!("http://{host}/quiet/{phase}/{}", at_ms * 1_000);
            let body = json!({ "bot": bot, "at": rfc3339(at_ms), "url": url }).to_string();
            let kind = "application/json";
            let sent = with_body("POST", "/send_delayed", http, Some(QUIET), kind, body.as_bytes());
            client.status(&sent).await == 200
        }
        Quiet::Requests | Quiet::Totals => {
            let path = match quiet {
                Quiet::Totals => format!("/v1/bots/{bot}/counters?ids=ad-1,ad-2"),
                _ => format!("/v1/pipelines/{}/bots/{bot}", super::deployment::EVENTS),
            };
            let is_good = client.status(&request("GET", &path, http, Some(QUIET))).await == 200;
            if is_good {
                tally.done(due);
            }
            is_good
        }
        Quiet::LivePages => {
            let asked = live_page(http, &bot, QUIET);
            let is_good = matches!(open(http, &asked).await, Ok((200, _)));
            if is_good {
                tally.done(due);
            }
            is_good
        }
    };
    if !is_accepted {
        tally.refused();
    }
}

/// The request of a browser that keeps the page of a bot up to date.
pub(super) fn live_page(http: std::net::SocketAddr, bot: &str, token: &str) -> Vec<u8> {
    format!(
        "GET /bots/{bot} HTTP/1.1\r\nhost: {http}\r\naccept: text/event-stream\r\n\
         authorization: Bearer {token}\r\n\r\n"
    )
    .into_bytes()
}
