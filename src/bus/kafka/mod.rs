//! The bus on Apache Kafka, and what speaks its protocol: some topics of one cluster.
//!
//! A log is a partition, with the name `kafka:SOURCE/TOPIC/PARTITION`. An offset is (incarnation,
//! Kafka's offset + 1), see `position`.
//!
//! No consumer group reads: which process reads a partition, and from where, is decided by the reader,
//! and positions are kept with the data. Offsets are committed only so that tools show the lag.
//! Records are deleted by Kafka, never by Fairlane.
//!
//! Events are published with the bot as the key and Java's default partitioner. Producers that key by
//! bot in other languages must use it too (librdkafka: `partitioner=murmur2_random`), or the events of
//! a bot have no order among producers.
//!
//! Calls of the client library that wait run in threads for blocking calls, at most four seconds each.

mod asker;
mod context;
mod counting;
mod error;
mod handled;
mod incarnations;
mod leaders;
mod position;
mod publish;
mod raw;
mod reading;
mod releasing;
mod settings;
mod survey;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rdkafka::config::ClientConfig;
use tokio::time::{Instant, timeout};
use tracing::{error, warn};

use self::asker::Asker;
use self::counting::Counting;
use self::handled::Handled;
use self::leaders::Leaders;
use self::position::{Committed, Ends, FIRST, Start, is_shorter, newest_ms, offset, start};
use self::publish::Publisher;
use self::raw::Raw;
use self::reading::Reading;
pub use self::settings::{KafkaLogin, KafkaSettings, KafkaTls, Password};
pub use self::survey::{KafkaSample, KafkaSurvey, KafkaTopic};
use super::BusError;
use super::source::{Fetched, Log, Opened, Outgoing, Progress, Released, Source, Standing};
use crate::clock::{Clock as _, SystemClock, millis};
use crate::fanout::NewStart;
use crate::id::Offset;
use crate::telemetry::PerReason;

/// Maximum wait for what was committed before, when reading starts. Mostly it is not needed.
const COMMITTED_WITHIN: Duration = Duration::from_secs(2);

/// When it was last logged what is not possible.
static FAILED: PerReason = PerReason::new();

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Partition {
    topic: Arc<str>,
    number: i32,
}

/// Some topics of one cluster.
pub struct KafkaSource {
    settings: Arc<KafkaSettings>,
    /// `kafka:NAME`.
    name: String,
    /// Asks and commits; made when it is needed first.
    asker: Mutex<Option<Asker>>,
    /// Counts what is not read yet.
    counter: Mutex<Option<Asker>>,
    /// Asks for the offsets of the consumer group where new pipelines start.
    starter: Mutex<Option<Asker>>,
    publisher: tokio::sync::Mutex<Option<Arc<Publisher>>>,
    /// What is open for reading.
    reading: tokio::sync::Mutex<Option<Reading>>,
    /// The logs of the last `open`, in its order.
    logs: Mutex<Vec<OpenLog>>,
    /// The incarnations above the first one that are known.
    incarnations: Mutex<HashMap<Partition, u64>>,
    /// When the incarnations were read last.
    incarnations_read: Mutex<Option<Instant>>,
    incarnations_failed: Mutex<Option<Instant>>,
    /// Topics without the right to see them, and the error that says so.
    forbidden: Mutex<Vec<String>>,
    problem: Mutex<Option<BusError>>,
    /// The open partitions that cannot be read.
    failed: Mutex<Vec<(Partition, BusError)>>,
    leaders: Mutex<Leaders>,
    counting: tokio::sync::Mutex<Counting>,
}

struct OpenLog {
    name: Arc<str>,
    partition: Partition,
    incarnation: u64,
    /// No entry that was read is newer than this, ms since 1970, at most now; 0: not known. `None`: what was
    /// committed before could not be read, and must not be overwritten.
    newest_ms: Option<u64>,
    /// What was committed last, and when.
    committed: Option<(i64, Instant)>,
}

impl fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl KafkaSource {
    /// A source with these settings. Connects when it is used first.
    ///
    /// # Errors
    /// If a setting is not allowed.
    pub fn new(settings: KafkaSettings) -> Result<Self, BusError> {
        settings.check().map_err(|cause| BusError::Refused { bus: settings.bus(), cause })?;
        Ok(Self {
            name: format!("kafka:{}", settings.name),
            settings: Arc::new(settings),
            asker: Mutex::default(),
            counter: Mutex::default(),
            starter: Mutex::default(),
            publisher: tokio::sync::Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            logs: Mutex::default(),
            incarnations: Mutex::default(),
            incarnations_read: Mutex::default(),
            incarnations_failed: Mutex::default(),
            forbidden: Mutex::default(),
            problem: Mutex::default(),
            failed: Mutex::default(),
            leaders: Mutex::default(),
            counting: tokio::sync::Mutex::default(),
        })
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &KafkaSettings {
        &self.settings
    }

    fn refused(&self, cause: impl Into<String>) -> BusError {
        BusError::Refused { bus: self.settings.bus(), cause: cause.into() }
    }

    fn log_name(&self, partition: &Partition) -> Arc<str> {
        let Partition { topic, number } = partition;
        format!("kafka:{}/{topic}/{number}", self.settings.name).into()
    }

    fn partition(&self, log: &str) -> Option<Partition> {
        let rest = log.strip_prefix("kafka:")?.strip_prefix(&*self.settings.name)?;
        let (topic, number) = rest.strip_prefix('/')?.rsplit_once('/')?;
        Some(Partition { topic: topic.into(), number: number.parse().ok()? })
    }

    /// A client that asks, made in a thread where blocking is allowed: it reads certificates.
    async fn client(
        &self,
        slot: &Mutex<Option<Asker>>,
        config: impl FnOnce(&KafkaSettings) -> ClientConfig,
    ) -> Result<Asker, BusError> {
        if let Some(asker) = &*lock(slot) {
            return Ok(asker.clone());
        }
        let (settings, config) = (Arc::clone(&self.settings), config(&self.settings));
        let made = blocking(&self.settings, move || Asker::new(&settings, &config)).await?;
        // Two callers may make one each; the first is kept.
        Ok(lock(slot).get_or_insert(made).clone())
    }

    async fn asker(&self) -> Result<Asker, BusError> {
        self.client(&self.asker, |settings| settings.asking(&settings.group)).await
    }

    fn incarnation(&self, partition: &Partition) -> u64 {
        lock(&self.incarnations).get(partition).copied().unwrap_or(FIRST)
    }

    async fn all_logs(&self) -> Result<Vec<Log>, BusError> {
        let asker = self.asker().await?;
        let found = self.permitted(asker.partitions(&self.settings.topics).await?)?;
        lock(&self.leaders).learn(&found);
        let partitions: Vec<_> = found.into_iter().map(|(partition, _)| partition).collect();
        let ends = self.ends(&asker, &partitions).await?;
        let handled = match &self.settings.start_group {
            Some(group) => Some((group, self.handled(group, &partitions).await)),
            None => None,
        };
        let are_known = self.read_incarnations(&asker, &partitions).await;
        let logs = partitions.iter().zip(ends).map(|(partition, ends)| {
            let incarnation = self.incarnation(partition);
            let (name, zero) = (self.log_name(partition), offset(incarnation, 0));
            let ends = match ends {
                Ok(ends) => ends,
                Err(error) => {
                    let cause = leaders::cause(&error);
                    let (start, unknown) = (NewStart::Unknown(Arc::clone(&cause)), Some(cause));
                    let before = (zero, zero);
                    return Log { name, start, before, unknown, ..Log::default() };
                }
            };
            let start = match &handled {
                // A pipeline that is new would start in a partition that was made anew since.
                _ if !are_known => {
                    NewStart::Unknown("the group does not tell which topics were made anew".into())
                }
                Some((group, Ok(handled))) => handled.start(group, partition, incarnation, ends),
                Some((_, Err(error))) => NewStart::Unknown(error.to_string().into()),
                None => NewStart::Own,
            };
            Log {
                name,
                first: (ends.first < ends.next).then(|| offset(incarnation, ends.first + 1)),
                last: offset(incarnation, ends.next),
                start,
                before: (offset(incarnation, ends.first), zero),
                is_doubtful: !are_known,
                unknown: None,
            }
        });
        Ok(logs.collect())
    }

    /// The partitions of the topics that may be seen. The others do not keep these from being read.
    ///
    /// # Errors
    /// If none may be seen.
    fn permitted<T>(&self, found: Vec<Option<Vec<T>>>) -> Result<Vec<T>, BusError> {
        let topics = self.settings.topics.iter().zip(&found);
        let forbidden = topics.filter(|(_, found)| found.is_none());
        let forbidden: Vec<String> = forbidden.map(|(topic, _)| topic.clone()).collect();
        let all = forbidden.len() == found.len();
        let problem = (!forbidden.is_empty()).then(|| {
            let names = forbidden.join(", ");
            self.refused(format!("no right to read these topics: {names}; permit Read on them"))
        });
        *lock(&self.forbidden) = forbidden;
        match problem {
            Some(problem) if all => Err(problem),
            problem => {
                *lock(&self.problem) = problem;
                Ok(found.into_iter().flatten().flatten().collect())
            }
        }
    }

    /// What the consumer group has handled where new pipelines start.
    async fn handled(&self, group: &str, partitions: &[Partition]) -> Result<Handled, BusError> {
        let found = self
            .client(&self.starter, |settings| settings.asking(group))
            .await?
            .committed(partitions)
            .await?;
        Ok(Handled::new(partitions, found))
    }

    async fn start_reading(&self, from: &[Standing]) -> Result<Vec<Opened>, BusError> {
        *self.reading.lock().await = None;
        lock(&self.logs).clear();
        lock(&self.failed).clear();
        let partitions: Vec<_> = from
            .iter()
            .map(|standing| {
                let name = &standing.log.name;
                self.partition(name).ok_or_else(|| self.refused(format!("{name} is no log of it")))
            })
            .collect::<Result<_, _>>()?;
        let asker = self.asker().await?;
        let ends = self.ends(&asker, &partitions).await?;
        let ends = ends.into_iter().collect::<Result<Vec<_>, _>>()?;
        let answer = timeout(COMMITTED_WITHIN, asker.committed(&partitions)).await;
        let committed = answer.unwrap_or_else(|_| {
            Err(BusError::Unknown { bus: self.settings.bus(), cause: "no answer in time".into() })
        });
        let mut starts = Vec::with_capacity(from.len());
        let mut logs = Vec::with_capacity(from.len());
        for (place, (standing, ends)) in from.iter().zip(ends).enumerate() {
            let partition = &partitions[place];
            let committed = committed.as_ref().map(|committed| committed[place]);
            let start = self.start(&asker, standing, (partition, ends), committed).await?;
            let name = Arc::clone(&standing.log.name);
            if start.incarnation > FIRST {
                lock(&self.incarnations).insert(partition.clone(), start.incarnation);
            }
            logs.push(OpenLog {
                name: Arc::clone(&name),
                partition: partition.clone(),
                incarnation: start.incarnation,
                newest_ms: committed.ok().map(|before| newest_ms(before, start.incarnation)),
                committed: None,
            });
            starts.push((partition.clone(), name, start));
        }
        let opened = starts
            .iter()
            .map(|(_, _, start)| Opened {
                at: offset(start.incarnation, start.next),
                entries: u64::try_from(start.next).unwrap_or(0),
                lost: start.lost,
                noted: None,
            })
            .collect();
        if !starts.is_empty() {
            let settings = Arc::clone(&self.settings);
            let made = blocking(&self.settings, move || Reading::new(&settings, &starts)).await?;
            *self.reading.lock().await = Some(made);
        }
        *lock(&self.logs) = logs;
        Ok(opened)
    }

    /// Where to read a partition from, see `position`.
    async fn start(
        &self,
        asker: &Asker,
        standing: &Standing,
        (partition, ends): (&Partition, Ends),
        committed: Result<Option<Committed>, &BusError>,
    ) -> Result<Start, BusError> {
        let shorter = is_shorter(standing, ends);
        let truncated =
            shorter && self.is_truncated(asker, standing, (partition, ends), committed).await?;
        let start = start(standing, ends, truncated);
        let (log, highest) = (&standing.log.name, standing.highest);
        if truncated {
            error!(%log, %highest, end = ends.next,
                "the partition lost its last records, of which copies exist; going on at its end");
        } else if shorter {
            error!(%log, %highest, first = ends.first, end = ends.next, lost = start.lost,
                "the partition ends before what was read of it: its topic was made anew; reading it \
                 from its first record");
        } else if start.lost > 0 {
            warn!(%log, lowest = %standing.lowest, first = ends.first, lost = start.lost,
                "records were deleted before they were read");
        }
        Ok(start)
    }

    /// Whether a partition that is too short was truncated; if not certain, it was made anew.
    async fn is_truncated(
        &self,
        asker: &Asker,
        standing: &Standing,
        (partition, ends): (&Partition, Ends),
        committed: Result<Option<Committed>, &BusError>,
    ) -> Result<bool, BusError> {
        let committed = match committed {
            Ok(committed) => committed,
            Err(error) if error.is_passing() => return Err(error.clone()),
            Err(error) => {
                warn!(log = %standing.log.name, %error, "cannot read committed offsets");
                None
            }
        };
        let incarnation = standing.highest.ms.max(FIRST);
        match committed {
            Some(Committed { next, incarnation: of, newest_ms })
                if next > ends.next && of == incarnation && newest_ms > 0 =>
            {
                asker.is_older(partition, newest_ms).await
            }
            _ => Ok(false),
        }
    }

    async fn read(&self, max: usize, wait: Duration) -> Result<Box<dyn Fetched>, BusError> {
        let mut slot = self.reading.lock().await;
        // Put back only if all went well: entries may be lost otherwise.
        let mut reading = slot.take().ok_or_else(|| self.refused("no log is open"))?;
        let batches = reading.fetch(max, wait).await?;
        *lock(&self.failed) = reading.problems();
        *slot = Some(reading);
        drop(slot);
        // Clocks of producers may be ahead; a later time would say nothing.
        let now = millis(SystemClock.now());
        let mut logs = lock(&self.logs);
        for batch in &batches {
            if let Some(log) = logs.get_mut(batch.log) {
                let newest = batch.newest_ms.min(now);
                if newest > 0 {
                    log.newest_ms = Some(log.newest_ms.unwrap_or(0).max(newest));
                }
            }
        }
        drop(logs);
        Ok(Box::new(Raw { batches, settings: Arc::clone(&self.settings) }))
    }

    async fn publisher(&self) -> Result<Arc<Publisher>, BusError> {
        let mut slot = self.publisher.lock().await;
        if let Some(publisher) = slot.as_ref().filter(|publisher| !publisher.is_broken()) {
            return Ok(Arc::clone(publisher));
        }
        let settings = Arc::clone(&self.settings);
        let made = blocking(&self.settings, move || Publisher::new(&settings)).await?;
        let made = Arc::new(made);
        *slot = Some(Arc::clone(&made));
        Ok(made)
    }

    async fn add(&self, events: &[Outgoing<'_>]) -> Result<Vec<Offset>, BusError> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let publisher = self.publisher().await?;
        let stored = publisher.publish(events).await?;
        let topic = publisher.topic();
        let offsets = stored.into_iter().map(|stored| {
            let partition = Partition { topic: Arc::clone(topic), number: stored.partition };
            offset(self.incarnation(&partition), stored.offset + 1)
        });
        Ok(offsets.collect())
    }
}

impl Source for KafkaSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn topics(&self) -> Vec<Arc<str>> {
        let KafkaSettings { name, topics, .. } = &*self.settings;
        let forbidden = lock(&self.forbidden);
        let seen = topics.iter().filter(|topic| !forbidden.contains(topic));
        seen.map(|topic| format!("kafka:{name}/{topic}/").into()).collect()
    }

    fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>> {
        self.all_logs().boxed()
    }

    fn open<'a>(&'a self, from: &'a [Standing]) -> BoxFuture<'a, Result<Vec<Opened>, BusError>> {
        self.start_reading(from).boxed()
    }

    fn fetch(
        &self,
        max: usize,
        wait: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Fetched>, BusError>> {
        self.read(max, wait).boxed()
    }

    fn release<'a>(
        &'a self,
        progress: &'a [Progress],
    ) -> BoxFuture<'a, Result<Vec<Released>, BusError>> {
        self.progress(progress).boxed()
    }

    fn publish<'a>(
        &'a self,
        events: &'a [Outgoing<'a>],
    ) -> BoxFuture<'a, Result<Vec<Offset>, BusError>> {
        self.add(events).boxed()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a client where blocking is allowed.
async fn blocking<T: Send + 'static>(
    settings: &KafkaSettings,
    make: impl FnOnce() -> Result<T, BusError> + Send + 'static,
) -> Result<T, BusError> {
    match tokio::task::spawn_blocking(make).await {
        Ok(client) => client,
        Err(cause) => Err(BusError::Unknown { bus: settings.bus(), cause: cause.to_string() }),
    }
}
