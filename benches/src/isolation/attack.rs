//! The hostile bots. They run on a thread of their own, so that they do not delay the quiet ones'
//! clients.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use fairlane::sandbox::{Producer, STREAM};
use futures_util::future::{join_all, pending};
use redis::Pipeline;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::client::{Client, closing, connect_from, read_away, request, with_body};
use super::deployment::{Deployment, EVENTS, FAILING, HOSTILE};
use super::load::{DAY, heavy_event};
use super::quiet::live_page;
use super::resource::Resource;
use crate::error::BenchError;

/// Hosts that accept connections and never answer, and the first calls to them.
const TARPITS: usize = 75;
const TARPIT_CALLS: usize = 1_200;
/// Connections with a slow body, and idle ones.
const SLOW_BODIES: u64 = 150;
const IDLE: u64 = 850;
/// Events in one burst of the bus.
const BURST: u64 = 20_000;
/// Bytes of a large event.
const LARGE: usize = 1_000_000;
/// More live pages than a process keeps.
const LIVE_PAGES: u64 = 128;
/// Pause of a client after an answer that refuses it.
const REFUSED: Duration = Duration::from_millis(20);

/// What the hostile bots need.
pub(super) struct Target {
    pub(super) http: SocketAddr,
    pub(super) receiver: SocketAddr,
    pub(super) client: Client,
    pub(super) producer: Producer,
}

impl Target {
    pub(super) fn new(deployment: &Deployment<'_>) -> Self {
        let (http, receiver) = (deployment.http, deployment.receiver.address);
        Self { http, receiver, client: Client::new(http), producer: deployment.rig.producer() }
    }

    /// Publishes events over HTTP.
    pub(super) async fn publish(&self, events: &[String]) -> u16 {
        let body = format!("[{}]", events.join(","));
        self.post("/v1/events", "application/cloudevents-batch+json", body.as_bytes()).await
    }

    async fn post(&self, path: &str, kind: &str, body: &[u8]) -> u16 {
        let sent = with_body("POST", path, self.http, Some(HOSTILE), kind, body);
        self.client.status(&sent).await
    }

    /// Schedules a notification in so many seconds.
    pub(super) async fn notify(&self, url: &str, delay: u64, body: &str) -> u16 {
        let sent = json!({ "bot": "hostile", "url": url, "delay": delay, "body": body });
        self.post("/send_delayed", "application/json", sent.to_string().as_bytes()).await
    }

    /// Puts events on the bus. An attack goes on if the bus refuses them.
    pub(super) async fn add(&self, events: impl Iterator<Item = String>) -> Result<(), BenchError> {
        let mut pipe = Pipeline::new();
        for event in events {
            pipe.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event);
            if pipe.len() >= 500 {
                self.producer.send(&pipe).await?;
                pipe.clear();
            }
        }
        if !pipe.is_empty() {
            self.producer.send(&pipe).await?;
        }
        Ok(())
    }
}

/// An event of a hostile bot, with so many bytes of data.
pub(super) fn event(bot: &str, kind: &str, n: u64, bytes: usize) -> String {
    json!({ "specversion": "1.0", "id": n.to_string(), "source": "bench", "type": kind,
        "botid": bot, "subject": "ann", "data": { "fill": "x".repeat(bytes) } })
    .to_string()
}

/// Runs until dropped.
pub(super) struct Attack {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Attack {
    pub(super) fn start(resource: Resource, target: Target) -> Result<Self, BenchError> {
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("hostile".to_owned()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            // It starts no thread, so it cannot fail.
            let Ok(runtime) = runtime else { unreachable!("a runtime without threads") };
            runtime.block_on(async {
                tokio::select! {
                    () = run(resource, &target) => {}
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Repeats `one` in so many endless loops, with a pause after each.
async fn forever<F: Future>(loops: u64, pause: Duration, one: impl Fn(u64) -> F) {
    join_all((0..loops).map(|first| repeat(first, loops, pause, &one))).await;
}

/// One of the loops: every `step`th number. The loops start one after the other, because no client
/// sends all of its requests in the same moment.
async fn repeat<F: Future>(first: u64, step: u64, pause: Duration, one: &impl Fn(u64) -> F) {
    let parts = |n: u64| u32::try_from(n).unwrap_or(1);
    tokio::time::sleep(pause * parts(first) / parts(step)).await;
    let mut n = first;
    loop {
        one(n).await;
        n += step;
        // Also without a pause, others get their turn.
        if pause.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(pause).await;
        }
    }
}

async fn run(resource: Resource, at: &Target) {
    let ms = Duration::from_millis;
    match resource {
        // All of it was done before.
        Resource::Queue | Resource::Leases => pending().await,
        Resource::Publish => {
            let events: Vec<_> =
                (0..100).map(|n| event("hostile", "bench.burst", n, 100)).collect();
            forever(4, Duration::ZERO, |_| async { back_off(at.publish(&events).await).await })
                .await;
        }
        Resource::Bus => {
            forever(1, ms(800), |n| async move {
                let events =
                    (0..BURST).map(|m| event("hostile", "bench.burst", n * BURST + m, 100));
                drop(at.add(events).await);
            })
            .await;
        }
        Resource::LargeEvents => {
            let large = [event("hostile", "bench.large", 0, LARGE)];
            forever(4, ms(300), |_| at.publish(&large)).await;
        }
        Resource::Dns => {
            forever(8, ms(60), |n| async move {
                at.notify(&format!("http://dead-{n}.example.com/"), 0, "").await
            })
            .await;
        }
        Resource::Tarpits => tarpits(at).await,
        Resource::SharedHost => {
            let url = format!("http://{}/fail", at.receiver);
            forever(4, ms(60), |_| at.notify(&url, 0, "")).await;
        }
        Resource::Listings => {
            let path = format!("/v1/pipelines/{FAILING}/dead?bot=hostile&limit=1000");
            let asked = closing(&request("GET", &path, at.http, Some(HOSTILE)));
            forever(4, ms(20), |_| read_away(at.http, &asked)).await;
        }
        Resource::LivePages => {
            let asked = live_page(at.http, "hostile", HOSTILE);
            forever(LIVE_PAGES, ms(100), |_| read_away(at.http, &asked)).await;
        }
        Resource::Connections => connections(at.http).await,
        Resource::Tokens => {
            forever(8, Duration::ZERO, |n| async move {
                let token = format!("invented-token-{n:016}");
                let path = format!("/v1/pipelines/{EVENTS}/bots/invented-{n}");
                at.client.status(&request("GET", &path, at.http, Some(&token))).await
            })
            .await;
        }
        Resource::Rules => {
            let events = vec![heavy_event(); 10];
            forever(2, ms(100), |_| at.publish(&events)).await;
        }
        Resource::DeadLetters => {
            forever(4, ms(10), |n| at.add([event("hostile", "failing.flood", n, 100)].into_iter()))
                .await;
        }
        Resource::RedisMemory => {
            forever(8, Duration::ZERO, |_| async { back_off(at.hoard().await).await }).await;
        }
        Resource::Exports => {
            let path = format!("/v1/bots/hostile/counters/export?day={DAY}");
            let asked = closing(&request("GET", &path, at.http, Some(HOSTILE)));
            forever(4, Duration::ZERO, |_| read_away(at.http, &asked)).await;
        }
        Resource::LogFlood => forever(8, ms(10), |n| bad_input(at, n)).await,
    }
}

async fn back_off(status: u16) {
    if !matches!(status, 200 | 202) {
        tokio::time::sleep(REFUSED).await;
    }
}

impl Target {
    /// Schedules a large notification that is due in about a year.
    pub(super) async fn hoard(&self) -> u16 {
        let url = format!("http://{}/fail", self.receiver);
        self.notify(&url, 30_000_000, &"x".repeat(60_000)).await
    }
}

/// Calls hosts that accept connections and never answer.
async fn tarpits(at: &Target) {
    let (mut urls, mut holding) = (Vec::new(), JoinSet::new());
    for _ in 0..TARPITS {
        let Ok(listener) = TcpListener::bind(("127.0.0.1", 0)).await else { continue };
        urls.extend(listener.local_addr().map(|address| format!("http://{address}/")));
        holding.spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                open.push(stream);
            }
        });
    }
    if urls.is_empty() {
        return;
    }
    let urls = &urls;
    let call = |n: usize| at.notify(&urls[n % urls.len()], 0, "");
    join_all((0..8).map(|first| async move {
        for n in (first..TARPIT_CALLS).step_by(8) {
            call(n).await;
        }
    }))
    .await;
    forever(8, Duration::from_millis(80), |n| call(usize::try_from(n).unwrap_or(0))).await;
}

/// Bodies that arrive slowly, and connections that send nothing. None has a token.
async fn connections(http: SocketAddr) {
    let again = Duration::from_millis(100);
    futures_util::join!(
        forever(SLOW_BODIES, again, |n| slow_body(http, n)),
        forever(IDLE, again, |n| silent(http, n)),
    );
}

/// A connection that sends nothing, until the server closes it.
async fn silent(http: SocketAddr, n: u64) -> std::io::Result<()> {
    connect_from(address(n), http).await?.read_u8().await.map(drop)
}

/// The last byte of the address that a connection comes from.
fn address(n: u64) -> u8 {
    u8::try_from(2 + n % 8).unwrap_or(2)
}

async fn slow_body(http: SocketAddr, n: u64) -> std::io::Result<()> {
    const LENGTH: usize = 1_000_000;
    const FIRST: usize = 900_000;
    let mut stream = connect_from(address(n), http).await?;
    let head = format!(
        "POST /v1/events HTTP/1.1\r\nhost: {http}\r\ncontent-type: application/cloudevents+json\r\n\
         content-length: {LENGTH}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(&vec![b' '; FIRST]).await?;
    for _ in FIRST..LENGTH {
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(b" ").await?;
    }
    Ok(())
}

/// Bad input of every kind, in turn.
async fn bad_input(at: &Target, n: u64) {
    match n % 5 {
        0 => {
            at.post("/v1/events", "application/cloudevents+json", b"{\"specversion\":").await;
        }
        1 => {
            at.notify("http://10.0.0.1/internal", 0, "").await;
        }
        2 => {
            at.post("/v1/bots/hostile/automations/test", "application/json", b"{}").await;
        }
        3 => {
            let asked = request("GET", "/v1/pipelines", at.http, Some("an-unknown-token-000"));
            at.client.status(&asked).await;
        }
        // An operator's producer passes on whatever a tenant sends.
        _ => drop(at.add((0..50).map(|n| format!("no event {n} \u{202e} bot=quiet-1"))).await),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_events_of_hostile_bots_are_events() {
        let text = event("hostile", "bench.large", 7, LARGE);
        let read = fairlane::event::Event::from_json(text.as_bytes()).expect("an event");
        assert_eq!((read.bot().as_str(), read.kind()), ("hostile", "bench.large"));
        assert!(text.len() < 1 << 20, "it fits into a request");
    }
}
