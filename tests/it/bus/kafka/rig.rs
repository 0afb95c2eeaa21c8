//! A source on a private broker, and what the tests do with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlane::bus::kafka::{KafkaSettings, KafkaSource};
use fairlane::bus::source::{Log, Opened, Outgoing, Progress, Released, Source as _, Standing};
use fairlane::bus::{BusError, Entry};
use fairlane::id::Offset;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use crate::support::kafka::{Engine, KafkaBroker};
use crate::support::wait::eventually;

/// For what takes at most a second on an idle machine.
pub(super) const LONG: Duration = Duration::from_secs(20);
/// The longest wait of one fetch.
pub(super) const WAIT: Duration = Duration::from_millis(500);

/// A broker of the table in `support::kafka`, or the one inside the client library.
pub(super) enum Cluster {
    Process(KafkaBroker),
    Mock(MockCluster<'static, DefaultProducerContext>),
}

impl Cluster {
    /// One of each kind, with this topic.
    pub(super) async fn all(topic: &str, partitions: i32) -> Vec<(String, Self)> {
        let mock = MockCluster::new(3).unwrap();
        mock.create_topic(topic, partitions, 3).unwrap();
        let mut all = vec![("mock".to_owned(), Self::Mock(mock))];
        for engine in [Engine::Noida, Engine::Tansu] {
            let broker = KafkaBroker::start(engine);
            broker.create_topic(topic, partitions).await;
            all.push((format!("{engine:?}"), Self::Process(broker)));
        }
        all
    }

    pub(super) fn brokers(&self) -> String {
        match self {
            Self::Process(broker) => broker.brokers(),
            Self::Mock(mock) => mock.bootstrap_servers(),
        }
    }

    pub(super) fn source(&self, topic: &str) -> Rig {
        Rig::new(settings(&self.brokers(), topic))
    }
}

pub(super) fn settings(brokers: &str, topic: &str) -> KafkaSettings {
    let brokers = brokers.split(',').map(str::to_owned).collect();
    KafkaSettings::new("test", brokers, vec![topic.to_owned()])
}

/// A source and the positions of its only shard.
pub(super) struct Rig {
    pub(super) source: KafkaSource,
    /// The position of each log, by name.
    pub(super) positions: HashMap<Arc<str>, Offset>,
    /// The names of the open logs, in order.
    pub(super) open: Vec<Arc<str>>,
    /// Number of records that the source said are lost.
    pub(super) lost: u64,
}

impl Rig {
    pub(super) fn new(settings: KafkaSettings) -> Self {
        let source = KafkaSource::new(settings).unwrap();
        Self { source, positions: HashMap::new(), open: Vec::new(), lost: 0 }
    }

    /// The logs, once there is this number.
    pub(super) async fn logs(&self, count: usize) -> Vec<Log> {
        let mut logs = Vec::new();
        eventually(LONG, "the logs are there", async || {
            logs = self.source.logs().await.unwrap_or_default();
            logs.len() == count && logs.iter().all(|log| log.unknown.is_none())
        })
        .await;
        logs.sort_by(|a, b| a.name.cmp(&b.name));
        logs
    }

    /// Opens these logs at the known positions, at the start if there is none.
    pub(super) async fn open(&mut self, logs: &[Log]) -> Result<Vec<Opened>, BusError> {
        let standing = |log: &Log| {
            let at = self.positions.get(&log.name).copied().unwrap_or_default();
            Standing { log: log.clone(), lowest: at, highest: at }
        };
        let from: Vec<_> = logs.iter().map(standing).collect();
        let opened = self.source.open(&from).await?;
        self.open = logs.iter().map(|log| Arc::clone(&log.name)).collect();
        for (log, opened) in logs.iter().zip(&opened) {
            self.positions.insert(Arc::clone(&log.name), opened.at);
            self.lost += opened.lost;
        }
        Ok(opened)
    }

    /// Opens all logs.
    pub(super) async fn open_all(&mut self, count: usize) -> Vec<Opened> {
        let logs = self.logs(count).await;
        self.open(&logs).await.unwrap()
    }

    /// The entries of one fetch. Checks that offsets grow and that batches cover them.
    pub(super) async fn fetch(&mut self) -> Result<Vec<(usize, Entry)>, BusError> {
        let fetched = self.source.fetch(1_000, WAIT).await?;
        let mut found = Vec::new();
        for batch in fetched.decode()? {
            let at = self.positions.get_mut(&self.open[batch.log]).unwrap();
            let mut last = *at;
            for entry in batch.entries {
                assert!(entry.offset > last, "{} follows {last}", entry.offset);
                last = entry.offset;
                found.push((batch.log, entry));
            }
            assert!(batch.end >= last, "{} ends before {last}", batch.end);
            *at = batch.end;
        }
        Ok(found)
    }

    /// Reads on until there are `count` events, and opens again after an error, as the reader does.
    /// Returns their ids by log.
    pub(super) async fn read(&mut self, count: usize) -> HashMap<usize, Vec<String>> {
        let started = Instant::now();
        let (mut ids, mut total) = (HashMap::<_, Vec<_>>::new(), 0);
        let mut last = None;
        while total < count {
            assert!(started.elapsed() < 4 * LONG, "{total} of {count} events; {last:?}");
            match self.fetch().await {
                Ok(entries) => {
                    for (log, entry) in entries {
                        ids.entry(log).or_default().push(entry.event.unwrap().id().to_owned());
                        total += 1;
                    }
                }
                Err(error) => {
                    assert!(error.is_passing(), "{error}");
                    last = Some(error);
                    self.reopen().await;
                }
            }
        }
        assert_eq!(total, count);
        ids
    }

    /// Opens the open logs again, as soon as that is possible.
    pub(super) async fn reopen(&mut self) {
        let started = Instant::now();
        let names = self.open.clone();
        loop {
            let logs = self.source.logs().await;
            let told = format!("{logs:?}");
            let logs = logs.unwrap_or_default();
            let of = |name: &Arc<str>| logs.iter().find(|log| log.name == *name).cloned();
            let logs: Vec<_> = names.iter().filter_map(of).collect();
            if logs.len() == names.len() && self.open(&logs).await.is_ok() {
                return;
            }
            assert!(started.elapsed() < 4 * LONG, "the logs cannot be opened: {told}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Releases everything that was read, with this retention.
    pub(super) async fn release(&self) -> Result<Vec<Released>, BusError> {
        let progress = |name: &Arc<str>| {
            let at = self.positions[name];
            let keep = Some(Offset { ms: at.ms, seq: at.seq + 1 });
            Progress { log: Arc::clone(name), read: at, copied: at, entries: (0, 0), keep }
        };
        self.source.release(&self.open.iter().map(progress).collect::<Vec<_>>()).await
    }

    /// The number of entries that are not read, over all open logs.
    pub(super) async fn lag(&self) -> u64 {
        self.release().await.unwrap().iter().map(|released| released.lag.unwrap()).sum()
    }

    /// Publishes one event for each (bot, id).
    pub(super) async fn publish(&self, events: &[(&str, &str)]) -> Result<Vec<Offset>, BusError> {
        let json: Vec<_> = events.iter().map(|(bot, id)| event(bot, id, "")).collect();
        let outgoing: Vec<_> =
            events.iter().zip(&json).map(|((bot, _), json)| Outgoing { json, bot }).collect();
        self.source.publish(&outgoing).await
    }
}

/// An event as JSON.
pub(super) fn event(bot: &str, id: &str, data: &str) -> Vec<u8> {
    let event = serde_json::json!({
        "specversion": "1.0", "id": id, "source": "/test", "type": "a", "botid": bot, "data": data,
    });
    event.to_string().into_bytes()
}
