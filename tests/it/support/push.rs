//! A push pipeline, its receiver, and the processes that push.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fairlane::id::BotId;
use fairlane::outbound::{
    CheckedUrl, HeaderMap, HeaderValue, Method, Outbound, Policy, Request, Settings,
};
use serde_json::Value;
use tokio::time::Instant;

use super::bus::{add, event};
use super::config::{SHARDS, STREAM, config};
use super::http;
use super::receiver::{Call, Receiver, Reply};
use super::redis::{Options, RedisServer};
use super::served::Served;
use super::wait::eventually;

pub(crate) const LONG: Duration = Duration::from_secs(30);

/// The pipeline `test`, whose events go to the receiver.
pub(crate) struct Push {
    pub(crate) server: RedisServer,
    pub(crate) receiver: Receiver,
    pub(crate) config: String,
    published: AtomicU64,
}

impl Push {
    /// Prepares the pipeline without a process that pushes. `settings` are as in [`config`].
    pub(crate) async fn new<F, R>(settings: &[(&str, &str)], answer: F) -> Self
    where
        F: Fn(Call) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send,
    {
        Self::on(RedisServer::start(Options::default()), settings, answer).await
    }

    /// The same on a server with other options.
    pub(crate) async fn on<F, R>(server: RedisServer, settings: &[(&str, &str)], answer: F) -> Self
    where
        F: Fn(Call) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send,
    {
        let receiver = Receiver::start(answer).await;
        let config = pushing(&server, &receiver.url(), settings);
        Self { server, receiver, config, published: AtomicU64::new(0) }
    }

    pub(crate) async fn serve(&self) -> Served {
        Served::start(&self.config).await
    }

    /// Publishes one event for each id, all of `bot`.
    pub(crate) async fn publish(&self, bot: &str, ids: impl IntoIterator<Item = u32>) {
        let events = ids.into_iter().map(|id| event(bot, "test.event", id));
        self.publish_events(&events.collect::<Vec<_>>()).await;
    }

    /// Publishes events in JSON.
    pub(crate) async fn publish_events(&self, events: &[String]) {
        add(&self.server, STREAM, events).await;
        self.published.fetch_add(events.len() as u64, Ordering::Relaxed);
    }

    /// Waits for `count` calls and returns all calls.
    pub(crate) async fn calls(&self, count: usize) -> Vec<Call> {
        let what = format!("{count} calls");
        eventually(LONG, &what, async || self.receiver.called() >= count).await;
        self.receiver.calls()
    }

    /// Waits until this process has copied every published event, and no event is queued or leased.
    pub(crate) async fn drains(&self, served: &Served) {
        let published = self.published.load(Ordering::Relaxed);
        eventually(LONG, "everything is copied", async || {
            let (_, text) = http::get(&served.metrics(), "/metrics").await;
            let copied = http::metric(&text, "fairlane_bus_events_total", &[("stream", STREAM)]);
            whole(copied) >= published
        })
        .await;
        eventually(LONG, "the queues are empty", async || {
            self.sum("HGET", "meta", Some("depth")).await + self.sum("HLEN", "own", None).await == 0
        })
        .await;
    }

    /// The number of queued events.
    pub(crate) async fn depth(&self) -> u64 {
        self.sum("HGET", "meta", Some("depth")).await
    }

    /// The number of leases that are handed over.
    pub(crate) async fn open(&self) -> u64 {
        self.sum("HGET", "meta", Some("open")).await
    }

    /// Asks every shard for a number and returns the sum.
    async fn sum(&self, command: &str, key: &str, argument: Option<&str>) -> u64 {
        let mut connection = self.server.connection().await;
        let mut pipe = redis::Pipeline::new();
        for shard in 0..SHARDS {
            pipe.cmd(command).arg(format!("fl:{{test:{shard}}}:{key}")).arg(argument);
        }
        let numbers: Vec<Option<u64>> = pipe.query_async(&mut connection).await.unwrap();
        numbers.into_iter().flatten().sum()
    }

    /// Sets the number of open leases of every shard, without such leases.
    pub(crate) async fn pretend_open(&self, count: i64) {
        let mut connection = self.server.connection().await;
        let mut pipe = redis::Pipeline::new();
        for shard in 0..SHARDS {
            pipe.hset(format!("fl:{{test:{shard}}}:meta"), "open", count).ignore();
        }
        let () = pipe.query_async(&mut connection).await.unwrap();
    }

    /// Dead letters as `(id of the event, reason, attempts)`, in the order of their arrival.
    pub(crate) async fn dead(&self) -> Vec<(String, String, u32)> {
        let mut letters = super::instance::queue(&recording(&self.config), "test")
            .await
            .dead_letters(None, 100)
            .await
            .unwrap();
        letters.reverse();
        let id = |letter: &fairlane::queue::DeadLetter| {
            letter.event.as_ref().map_or_else(String::new, |event| event.id().to_owned())
        };
        letters.iter().map(|l| (id(l), l.reason.clone(), l.attempts)).collect()
    }
}

/// The configuration of a process that pushes to `url`.
pub(crate) fn pushing(server: &RedisServer, url: &str, settings: &[(&str, &str)]) -> String {
    let url = format!("{url:?}");
    let push = [("pipelines.test.handler", "\"push\""), ("pipelines.test.url", &url)];
    config(server, "test", &[&push[..], settings].concat())
}

/// The same without a receiver, for reading the queues.
fn recording(config: &str) -> String {
    let lines = config.lines().filter(|line| !line.starts_with("pipelines.test.url"));
    let lines: Vec<_> = lines.map(|line| line.replace("\"push\"", "\"recorder\"")).collect();
    lines.join("\n")
}

pub(crate) async fn publish(server: &RedisServer, bot: &str, ids: impl IntoIterator<Item = u32>) {
    let events: Vec<_> = ids.into_iter().map(|id| event(bot, "test.event", id)).collect();
    add(server, STREAM, &events).await;
}

/// The answer of a server.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: u16,
    /// `null` if there is no body.
    pub(crate) body: Value,
}

/// Posts to `path` of a server. `null` sends no body.
pub(crate) async fn post(address: &str, path: &str, body: Value) -> Said {
    let outbound = Outbound::new(&Settings::default()).unwrap();
    let url = CheckedUrl::parse(&format!("http://{address}{path}"), &Policy::Operator).unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let deadline = Instant::now() + LONG;
    let (method, place_by) = (Method::POST, deadline);
    let bot = &BotId::parse("test").unwrap();
    let url = &url;
    let (keep_connection, tell_deadline) = (false, false);
    let request = Request {
        bot,
        method,
        url,
        headers,
        body,
        deadline,
        place_by,
        keep_connection,
        tell_deadline,
    };
    let answer = outbound.call(request).await.unwrap();
    let body = serde_json::from_slice(&answer.body).unwrap_or_default();
    Said { status: answer.status.as_u16(), body }
}

/// A counter or gauge of a process, or 0 if it is absent.
pub(crate) async fn metric(process: &Served, name: &str, labels: &[(&str, &str)]) -> u64 {
    let (_, text) = http::get(&process.metrics(), "/metrics").await;
    let labels = [&[("pipeline", "test")], labels].concat();
    whole(http::metric(&text, &format!("fairlane_{name}"), &labels))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
fn whole(number: Option<f64>) -> u64 {
    number.unwrap_or_default() as u64
}

/// Counters that only grow when a lease or a completion was lost.
pub(crate) async fn losses(served: &Served) -> u64 {
    metric(served, "leases_lost_total", &[]).await
        + metric(served, "stale_completions_total", &[]).await
}
