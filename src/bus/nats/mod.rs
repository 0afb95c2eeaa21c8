//! The bus on NATS `JetStream`: one stream is one log, `nats:NAME/STREAM`.
//!
//! An offset is the time at which the stream was made, and the sequence: see `incarnation`. The
//! stream is never made by Fairlane. One that does not exist yet is read once it does.

mod facts;
mod falls;
mod incarnation;
mod link;
mod opening;
mod publishing;
mod reading;
mod received;
mod releasing;
mod settings;
mod singly;
mod survey;
mod tls;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tracing::error;

use self::facts::Facts;
use self::incarnation::Incarnations;
use self::link::{Connected, Link};
use self::reading::Reading;
use self::received::{Messages, Received};
pub use self::settings::{NatsLogin, NatsSettings};
use self::singly::Breaks;
pub use self::survey::{NatsStream, NatsSurvey};
use super::BusError;
use super::source::{Fetched, Log, Opened, Outgoing, Progress, Released, Source, Standing};
use crate::clock::SharedClock;
use crate::fanout::NewStart;
use crate::id::Offset;
use crate::metrics::BusMetrics;

/// The last sequence counts as delivered if the server has no more to deliver after this time.
const SETTLED: Duration = Duration::from_secs(1);

/// One stream of NATS `JetStream`.
#[derive(Debug)]
pub struct NatsSource {
    link: Link,
    /// `nats:NAME`.
    name: String,
    log: Arc<str>,
    clock: Clock,
    metrics: BusMetrics,
    /// The consumer, unless a fetch has it.
    reading: Mutex<Option<Reading>>,
    open: Mutex<Option<Arc<Open>>>,
    known: Mutex<Known>,
    breaks: Mutex<Breaks>,
    /// When it was last trimmed, and when the lag could not be found out last.
    trimmed: Mutex<Option<Instant>>,
    lag_failed: Mutex<Option<Instant>>,
}

struct Clock(SharedClock);

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// The stream that is read now.
#[derive(Debug)]
struct Open {
    connected: Connected,
    stream: Arc<Incarnations>,
    consumer: String,
    /// The last sequence that was fetched.
    fetched: AtomicU64,
    /// The last sequence of the stream, and when it was seen. Only if no replica can be behind.
    last: Mutex<Option<(u64, Instant)>>,
}

/// What this process knows of the stream.
#[derive(Debug, Default)]
struct Known {
    /// When it was last asked for.
    stream: Option<(Instant, Arc<Facts>, Arc<Incarnations>)>,
    /// The highest sequence that was seen of it.
    highest: u64,
    /// Of the stream that was replaced by this one: when it was made, and its last sequence.
    former: Option<(u64, u64)>,
    /// The last message that was fetched.
    read: Option<Read>,
}

#[derive(Debug, Clone, Copy)]
struct Read {
    created: u64,
    seq: u64,
    time_ns: u64,
}

impl NatsSource {
    /// The stream of these settings. Connects when it is first used.
    #[must_use]
    pub fn new(settings: NatsSettings, clock: SharedClock) -> Self {
        let log = settings.log();
        Self {
            metrics: BusMetrics::new(&log),
            log: log.into(),
            name: format!("nats:{}", settings.name),
            link: Link::new(Arc::new(settings)),
            clock: Clock(clock),
            reading: Mutex::default(),
            open: Mutex::default(),
            known: Mutex::default(),
            breaks: Mutex::default(),
            trimmed: Mutex::default(),
            lag_failed: Mutex::default(),
        }
    }

    /// The stream as it is now; `None` if it does not exist.
    async fn look(
        &self,
        connected: &Connected,
    ) -> Result<Option<(Arc<Facts>, Arc<Incarnations>)>, BusError> {
        let Some(facts) = Facts::of(connected, &self.link).await? else { return Ok(None) };
        let known = lock(&self.known).stream.clone();
        let known = known.map(|(_, _, stream)| stream);
        let stream = match known.filter(|stream| stream.created() == facts.created()) {
            Some(stream) => stream,
            None => Arc::new(falls::read(connected, &self.link, facts.created()).await?),
        };
        let facts = Arc::new(facts);
        self.learn(&facts, &stream);
        Ok(Some((facts, stream)))
    }

    fn learn(&self, facts: &Arc<Facts>, stream: &Arc<Incarnations>) {
        let mut known = lock(&self.known);
        let learnt = (Instant::now(), Arc::clone(facts), Arc::clone(stream));
        if let Some((_, before, _)) = known.stream.replace(learnt)
            && before.created() != facts.created()
        {
            known.former = Some((before.created(), known.highest));
            known.highest = 0;
        }
        known.highest = known.highest.max(facts.state.last_seq);
    }

    async fn tell_logs(&self) -> Result<Vec<Log>, BusError> {
        let connected = self.link.connected().await?;
        let Some((facts, stream)) = self.look(&connected).await? else { return Ok(Vec::new()) };
        let start = match &self.link.settings.group {
            Some(group) => match self.handled(&connected, &stream, group).await {
                Ok(handled) => NewStart::At(handled),
                // Only new pipelines need it.
                Err(BusError::Refused { cause, .. }) => NewStart::Unknown(cause.into()),
                Err(error) => return Err(error),
            },
            None => NewStart::Own,
        };
        Ok(vec![Log {
            name: Arc::clone(&self.log),
            first: (facts.state.messages > 0).then(|| stream.offset(facts.first())),
            last: stream.reached(facts.state.last_seq),
            start,
            before: (stream.reached(facts.first() - 1), stream.reached(facts.base() - 1)),
            ..Log::default()
        }])
    }

    /// What a durable consumer has handled.
    async fn handled(
        &self,
        connected: &Connected,
        stream: &Incarnations,
        group: &str,
    ) -> Result<Offset, BusError> {
        let facts = reading::facts(connected, &self.link, group).await?;
        let facts = facts.ok_or_else(|| {
            let NatsSettings { name, stream, .. } = &*self.link.settings;
            self.link.refused(format_args!(
                "the stream {stream:?} has no consumer {group:?}; correct `start` of the source \
                 {name:?}, or remove it if all pipelines have begun"
            ))
        })?;
        Ok(stream.reached(facts.ack_floor.stream_seq))
    }

    async fn read(&self, max: usize, wait: Duration) -> Result<Messages, BusError> {
        let reading = lock(&self.reading).take();
        let mut reading = reading.ok_or_else(|| {
            self.link.unknown(
                "the connection broke, or an earlier read failed; the log must be opened again",
            )
        })?;
        let open = lock(&self.open).clone();
        let open = open.ok_or_else(|| self.link.unknown("the log is not open"))?;
        let before = reading.at;
        let at = reading.stream.reached(before);
        if let Some(messages) = self.read_singly(&reading, max).await? {
            return Ok(messages);
        }
        let last = *lock(&open.last);
        let began = Instant::now();
        let pulled = reading.pull(&self.link, max, wait).await.inspect_err(|error| {
            if matches!(error, BusError::Unknown { .. }) {
                lock(&self.breaks).broke(at);
            }
        })?;
        if let Some(last) = pulled.received.last() {
            self.check_gaps(&reading, before, &pulled.received).await?;
            open.fetched.store(last.seq, Ordering::Relaxed);
            self.has_read(&reading.stream, last);
        }
        let mut end = reading.at;
        // Messages of other subjects, and deleted ones, are passed over.
        if pulled.is_all
            && let Some((last, seen)) = last
            && began.duration_since(seen) >= SETTLED
        {
            end = end.max(last);
        }
        let is_all = pulled.is_all;
        let messages = self.messages(&reading.stream, pulled.received, end);
        // With some messages, the server may have more that it has not looked at.
        let is_all = is_all && messages.received.is_empty();
        let messages = Messages { is_all, ..messages };
        if !pulled.ended {
            *lock(&self.reading) = Some(reading);
        }
        Ok(messages)
    }

    fn has_read(&self, stream: &Incarnations, last: &Received) {
        let (created, seq, time_ns) = (stream.created(), last.seq, last.time_ns);
        let mut known = lock(&self.known);
        // Old messages, which only some shards need, do not tell whether the stream lost its last ones.
        let is_old = known.read.is_some_and(|read| {
            read.created == created && seq < read.seq && time_ns <= read.time_ns
        });
        if !is_old {
            known.read = Some(Read { created, seq, time_ns });
        }
    }

    fn now_reads(&self, reading: Reading) {
        let open = Open {
            connected: reading.connected.clone(),
            stream: Arc::clone(&reading.stream),
            consumer: reading.consumer.clone(),
            fetched: AtomicU64::new(reading.at),
            last: Mutex::default(),
        };
        *lock(&self.open) = Some(Arc::new(open));
        *lock(&self.reading) = Some(reading);
    }

    fn messages(&self, stream: &Arc<Incarnations>, received: Vec<Received>, end: u64) -> Messages {
        let settings = Arc::clone(&self.link.settings);
        Messages { stream: Arc::clone(stream), settings, received, end, is_all: false }
    }

    /// Reports messages that the stream deleted before they were read, because it reached a limit.
    async fn check_gaps(
        &self,
        reading: &Reading,
        before: u64,
        received: &[Received],
    ) -> Result<(), BusError> {
        let last = received.last().map_or(before, |last| last.seq);
        if last - before == received.len() as u64 {
            return Ok(());
        }
        let facts = Facts::of(&reading.connected, &self.link).await?;
        let same = facts.filter(|facts| facts.created() == reading.stream.created());
        let facts = same.ok_or_else(|| self.link.unknown("the stream was made anew"))?;
        // Single messages were deleted, or have other subjects, unless the stream begins behind.
        let first = facts.first();
        let mut next = before + 1;
        let mut missing = 0;
        for seq in received.iter().map(|received| received.seq) {
            missing += seq.min(first).saturating_sub(next);
            next = seq + 1;
        }
        if missing > 0 {
            self.metrics.gap.increment(1);
            error!(
                stream = &*self.log,
                start = before,
                first,
                missing,
                "the stream was trimmed beyond what was read: events are missing"
            );
        }
        Ok(())
    }

    /// Deletes the consumer, if there is one.
    async fn close(&self) {
        lock(&self.reading).take();
        let open = lock(&self.open).take();
        if let Some(open) = open
            && open.connected.is_alive()
        {
            // The server does it later if this fails.
            let _ = reading::delete(&open.connected, &self.link, &open.consumer).await;
        }
    }
}

impl Source for NatsSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn topics(&self) -> Vec<Arc<str>> {
        vec![Arc::clone(&self.log)]
    }

    fn deletes_elsewhere(&self) -> bool {
        true
    }

    fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>> {
        self.tell_logs().boxed()
    }

    fn open<'a>(&'a self, from: &'a [Standing]) -> BoxFuture<'a, Result<Vec<Opened>, BusError>> {
        self.begin(from).boxed()
    }

    fn fetch(
        &self,
        max: usize,
        wait: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Fetched>, BusError>> {
        async move { Ok(Box::new(self.read(max, wait).await?) as Box<dyn Fetched>) }.boxed()
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
