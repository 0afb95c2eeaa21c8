//! The bus on NATS `JetStream`, through the trait that the reader uses.

mod faults;
mod losses;
mod publishing;
mod reading;
mod speed;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::stream::{self, Stream};
use fairlane::bus::nats::{NatsLogin, NatsSettings, NatsSource};
use fairlane::bus::record::{Mapping, Mode};
use fairlane::bus::source::{Batch, Log, Opened, Outgoing, Progress, Source as _, Standing};
use fairlane::bus::{BusError, Entry};
use fairlane::clock::SystemClock;
use fairlane::id::Offset;
use serde_json::json;

use crate::support::nats::NatsServer;

const SECOND: Duration = Duration::from_secs(1);
/// Longer than any test needs on a busy machine.
const LONG: Duration = Duration::from_secs(60);
const STREAM: &str = "EVENTS";

fn settings(server: &NatsServer) -> NatsSettings {
    NatsSettings {
        name: "main".to_owned(),
        servers: vec![server.url()],
        login: NatsLogin::None,
        ca_file: None,
        cert_file: None,
        key_file: None,
        stream: STREAM.to_owned(),
        subjects: Vec::new(),
        publish_subject: Some("events.{bot}".to_owned()),
        mode: Mode::Structured,
        trim: None,
        group: None,
        mapping: Mapping::events_only("main"),
        reserved: Vec::new(),
    }
}

fn source(settings: NatsSettings) -> NatsSource {
    NatsSource::new(settings, Arc::new(SystemClock))
}

fn config() -> stream::Config {
    let subjects = vec!["events.>".to_owned()];
    stream::Config { name: STREAM.to_owned(), subjects, ..stream::Config::default() }
}

async fn make(server: &NatsServer, config: stream::Config) -> Stream {
    server.jetstream().await.create_stream(config).await.unwrap()
}

/// A `CloudEvent` as JSON.
fn event(id: &str, bot: &str, data: &str) -> String {
    json!({
        "specversion": "1.0", "id": id, "source": "/tests", "type": "t", "botid": bot, "data": data,
    })
    .to_string()
}

/// Publishes one event for each id, all of one bot.
async fn publish(source: &NatsSource, ids: &[String]) -> Result<Vec<Offset>, BusError> {
    let json: Vec<String> = ids.iter().map(|id| event(id, "b", "")).collect();
    let events: Vec<Outgoing<'_>> =
        json.iter().map(|json| Outgoing { json: json.as_bytes(), bot: "b" }).collect();
    source.publish(&events).await
}

fn ids(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|number| format!("e{number}")).collect()
}

/// The only log.
async fn log(source: &NatsSource) -> Log {
    let mut logs = source.logs().await.unwrap();
    assert_eq!(logs.len(), 1);
    logs.remove(0)
}

async fn open(source: &NatsSource, lowest: Offset, highest: Offset) -> Opened {
    let standing = Standing { log: log(source).await, lowest, highest };
    source.open(&[standing]).await.unwrap()[0]
}

async fn fetch(source: &NatsSource, max: usize, wait: Duration) -> Result<Batch, BusError> {
    let batches = source.fetch(max, wait).await?.decode()?;
    assert_eq!(batches.len(), 1);
    Ok(batches.into_iter().next().unwrap())
}

fn id(entry: &Entry) -> String {
    entry
        .event
        .as_ref()
        .map_or_else(|invalid| format!("? {}", invalid.error), |event| event.id().to_owned())
}

/// Reads on like the reader: after an error it opens the log again behind the last entry.
#[derive(Debug, Default)]
struct Copy {
    position: Offset,
    ids: Vec<String>,
    lost: u64,
    errors: u32,
    is_open: bool,
}

impl Copy {
    /// Behind this position.
    fn behind(position: Offset) -> Self {
        Self { position, ..Self::default() }
    }

    /// Reads until there are `count` entries, and no more.
    async fn until(&mut self, source: &NatsSource, count: usize) -> &[String] {
        self.until_at_least(source, count).await;
        assert_eq!(self.ids.len(), count, "{:?}", self.ids);
        &self.ids
    }

    /// Reads until there are `count` entries or more.
    async fn until_at_least(&mut self, source: &NatsSource, count: usize) -> &[String] {
        let began = Instant::now();
        while self.ids.len() < count {
            assert!(began.elapsed() < LONG, "{} of {count} entries: {self:?}", self.ids.len());
            if let Err(error) = self.step(source).await {
                assert!(error.is_passing(), "{error}");
                self.errors += 1;
                self.is_open = false;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        &self.ids
    }

    async fn step(&mut self, source: &NatsSource) -> Result<(), BusError> {
        if !self.is_open {
            let Some(log) = source.logs().await?.pop() else { return Ok(()) };
            let standing = Standing { log, lowest: self.position, highest: self.position };
            let opened = source.open(&[standing]).await?[0];
            assert!(opened.at >= self.position);
            (self.position, self.is_open) = (opened.at, true);
            self.lost += opened.lost;
        }
        let batch = fetch(source, 256, SECOND).await?;
        for entry in &batch.entries {
            assert!(entry.offset > self.position, "{} after {}", entry.offset, self.position);
            self.position = entry.offset;
            self.ids.push(id(entry));
        }
        assert!(batch.end >= self.position);
        self.position = batch.end;
        Ok(())
    }
}

fn progress(source: &Log, read: Offset, keep: Option<Offset>) -> [Progress; 1] {
    [Progress { log: Arc::clone(&source.name), read, copied: read, entries: (0, 0), keep }]
}
