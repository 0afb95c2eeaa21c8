//! The start of a process, before it reports that it is ready.
//!
//! 1. It registers itself. From then on the bus keeps all entries that its pipelines need.
//! 2. It records the names of its pipelines, for operators.
//! 3. It fixes in Redis where each pipeline starts in each log of the buses, regardless of the
//!    roles of this process. So all of its pipelines get the events that are published once it is
//!    ready, whichever process reads the bus.
//!
//! Everything else works meanwhile, so that operators can drain a full Redis. Only publishing over
//! HTTP waits a moment, and is then refused.
//!
//! A bus beside Redis that does not answer, or cannot say where a new pipeline starts, must not keep all else
//! from being served. After ten seconds the process is ready without it, says which new pipelines have
//! no start yet, and goes on until their starts are fixed.
//!
//! The same holds for a primary of a cluster while others serve: a process that runs stays ready without it
//! too. Without the primary that has the registry, no process trims a bus, so its entries are kept meanwhile.
//! If only this process cannot reach it, others do not know its new pipelines: they trim what these need after
//! the retention of the bus.

use std::sync::Arc;
use std::time::Duration;

use redis::{Pipeline, Value};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::bus::reader::{end_of, growth};
use crate::bus::{BusError, Source};
use crate::clock::{SharedClock, millis};
use crate::fanout::FanoutError;
use crate::fanout::starts::{self, Starts};
use crate::id::PipelineName;
use crate::lifecycle::Shutdown;
use crate::presence::Registration;
use crate::queue::Queue;
use crate::redis::{Link, RedisError, keys};
use crate::telemetry::OncePerMinute;

/// Pause before a failed step is retried, and once the process is ready.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_READY: Duration = Duration::from_secs(2);
/// How long a start waits for a bus that is not in Redis, and for a primary of a cluster while others serve.
const BUS: Duration = Duration::from_secs(10);
/// How long the primaries of a cluster are asked which of them do not serve.
const MISSING: Duration = Duration::from_secs(1);
/// Maximum time that a request waits for the end of the start.
const PATIENCE: Duration = Duration::from_millis(250);

/// The progress of a process's start. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Startup(watch::Receiver<State>);

#[derive(Debug, Clone, Default)]
struct State {
    /// What the process waits for; `None` after the start.
    pending: Option<String>,
    without: Vec<String>,
}

impl State {
    fn is_over(&self) -> bool {
        self.pending.is_none()
    }
}

impl Startup {
    /// What the process waits for; `None` after the start.
    pub(crate) fn pending(&self) -> Option<String> {
        self.0.borrow().pending.clone()
    }

    /// After the start: which new pipelines have no start on a bus yet, and why. They may miss events that
    /// are published until then.
    pub(crate) fn without(&self) -> Vec<String> {
        self.0.borrow().without.clone()
    }

    /// Waits for the end of the start, or of the process.
    pub(crate) async fn is_over(&self) {
        let mut state = self.0.clone();
        let _ = state.wait_for(State::is_over).await;
    }

    /// Waits a moment for the end of the start; otherwise returns what the process waits for.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn ended(&self) -> Result<(), String> {
        if self.0.borrow().is_over() {
            return Ok(());
        }
        let mut state = self.0.clone();
        let ended = tokio::time::timeout(PATIENCE, state.wait_for(State::is_over)).await;
        match ended {
            Ok(Ok(_)) => Ok(()),
            _ => self.pending().map_or(Ok(()), Err),
        }
    }
}

/// A pipeline that starts.
#[derive(Debug)]
pub(crate) struct Starting {
    /// Its queues.
    pub(crate) queue: Queue,
    /// Whether it starts at the first entry of a stream.
    pub(crate) from_earliest: bool,
}

/// What a process waits for.
struct Pending {
    what: String,
    cause: Option<BusError>,
}

/// What a process does later, because it must not wait for it.
#[derive(Debug, Default)]
struct Later {
    /// The new pipelines that have no start yet.
    without: Vec<String>,
    /// The primaries of a cluster that do not answer while others serve.
    primaries: Vec<String>,
}

impl Later {
    fn is_nothing(&self) -> bool {
        self.without.is_empty() && self.primaries.is_empty()
    }
}

/// The cause as text for clients. Addresses and texts of the stores appear only in the log.
fn in_words(cause: &BusError) -> &'static str {
    match cause {
        BusError::Redis(cause) if cause.is_full() => {
            ": Redis is full; raise its maxmemory, or let the queues be drained"
        }
        // One that runs may refuse for a while: its disk is full, or it is a replica.
        BusError::Redis(cause)
            if cause.is_passing() && !matches!(cause, RedisError::Refused { .. }) =>
        {
            ": Redis is unavailable"
        }
        BusError::Redis(_) => ": Redis refuses; the log has the reason",
        cause if cause.is_passing() => ": the bus is unavailable",
        _ => ": the bus refuses; the log has the reason",
    }
}

/// Whether the log is this stream, or a partition of this topic.
fn is_of(log: &str, topic: &str) -> bool {
    log == topic || topic.ends_with('/') && log.starts_with(topic)
}

/// The start of a process, as a task.
pub(crate) struct Start {
    /// All pipelines of the process.
    pub(crate) names: Vec<PipelineName>,
    /// The pipelines that take events of the bus.
    pub(crate) pipelines: Vec<Starting>,
    pub(crate) buses: Vec<Arc<dyn Source>>,
    pub(crate) starts: Arc<Starts>,
    pub(crate) link: Arc<Link>,
    pub(crate) clock: SharedClock,
    /// Whether the other processes know of this one.
    pub(crate) heard: watch::Receiver<Registration>,
}

impl Start {
    /// Runs the start. Retries failed steps until the soft stop.
    pub(crate) fn begin(self, shutdown: &Shutdown) -> Startup {
        let pending = Some("it has just started".to_owned());
        let (state, startup) = watch::channel(State { pending, ..State::default() });
        let shutdown_too = shutdown.clone();
        shutdown.spawn(async move {
            tokio::select! {
                biased;
                () = shutdown_too.soft.cancelled() => {}
                () = self.run(&state) => {}
            }
        });
        Startup(startup)
    }

    async fn run(mut self, state: &watch::Sender<State>) {
        let (logged, missed) = (OncePerMinute::default(), OncePerMinute::default());
        let (mut failed, began) = (false, Instant::now());
        loop {
            let round = self.round(began).await;
            let is_over = state.borrow().is_over();
            let pause = if is_over { RETRY_READY } else { RETRY };
            match round {
                Ok(later) => {
                    let is_done = later.is_nothing();
                    let Later { without, primaries } = later;
                    if !primaries.is_empty()
                        && let Some(suppressed) = missed.take()
                    {
                        warn!(
                            ?primaries,
                            suppressed,
                            "ready for the others, although these primaries of Redis do not answer"
                        );
                    }
                    if let Some(first) = without.first()
                        && let Some(suppressed) = logged.take()
                    {
                        warn!(
                            first,
                            count = without.len(),
                            suppressed,
                            "ready, but the start of new pipelines is not known: with start = \"new\" they miss the events published until it is"
                        );
                    }
                    if failed && is_done {
                        info!("ready");
                    }
                    state.send_replace(State { pending: None, without });
                    if is_done {
                        return;
                    }
                }
                Err(Pending { what, cause }) => {
                    // The reason is known in a moment.
                    let is_told = cause.is_some() || began.elapsed() > BUS;
                    if is_told && let Some(suppressed) = logged.take() {
                        let error = cause.as_ref().map(tracing::field::display);
                        warn!(what, error, suppressed, "not ready yet; retrying");
                    }
                    // A process that is ready stays ready.
                    if !is_over {
                        let cause = cause.as_ref().map_or("", in_words);
                        let pending = Some(format!("{what}{cause}"));
                        state.send_replace(State { pending, ..State::default() });
                    }
                }
            }
            failed = true;
            tokio::time::sleep(pause).await;
        }
    }

    /// Makes all steps. Returns what is left of them, if the process must not wait for it.
    async fn round(&mut self, began: Instant) -> Result<Later, Pending> {
        let (goes_on, mut later) = (began.elapsed() > BUS, Later::default());
        let heard = tokio::time::timeout(RETRY, self.heard.wait_for(Registration::is_done));
        let is_heard = matches!(heard.await, Ok(Ok(_)));
        if !is_heard {
            let what = "this process is not registered in Redis yet".to_owned();
            let cause = self.heard.borrow().failure().cloned().map(BusError::from);
            self.postpone(Pending { what, cause }, goes_on, &mut later).await?;
        }
        if let Err(error) = self.note_names().await {
            let what = "its pipelines are not registered in Redis yet".to_owned();
            let pending = Pending { what, cause: Some(error.into()) };
            self.postpone(pending, goes_on, &mut later).await?;
        }
        for bus in &self.buses {
            let mut without = Vec::new();
            if let Err(pending) = self.place(bus, goes_on, &mut without).await {
                let cause = pending.cause.as_ref().map_or("", in_words);
                self.postpone(pending, goes_on, &mut later).await?;
                // Which of them are new is not known.
                let on = |starting: &Starting| {
                    format!("pipeline {} on bus {:?}{cause}", starting.queue.name(), bus.name())
                };
                without = self.pipelines.iter().map(on).collect();
            }
            later.without.append(&mut without);
        }
        Ok(later)
    }

    /// Leaves a step for later if a primary of a cluster is its reason, and others serve.
    async fn postpone(
        &self,
        pending: Pending,
        goes_on: bool,
        later: &mut Later,
    ) -> Result<(), Pending> {
        let primaries = match &pending.cause {
            Some(BusError::Redis(error)) if goes_on => {
                self.link.missing_behind(error, MISSING).await
            }
            _ => Vec::new(),
        };
        if primaries.is_empty() {
            return Err(pending);
        }
        later.primaries = primaries;
        Ok(())
    }

    /// Fixes where each pipeline starts in each log of a bus. Adds those that have no start to `without`, if the
    /// process goes on without the bus when that cannot be found out.
    async fn place(
        &self,
        bus: &Arc<dyn Source>,
        goes_on: bool,
        without: &mut Vec<String>,
    ) -> Result<(), Pending> {
        let unknown = |error| {
            let what = format!("the end of the bus {:?} is not known yet", bus.name());
            Pending { what, cause: Some(error) }
        };
        let logs = match bus.logs().await {
            // Otherwise an outage of one bus would keep all else from being served.
            Err(error) if !matches!(error, BusError::Redis(_)) && goes_on => {
                let new = self.new_to(bus).await.map_err(|error| unknown(error.into()))?;
                let on =
                    |name| format!("pipeline {name} on bus {:?}{}", bus.name(), in_words(&error));
                without.extend(new.into_iter().map(on));
                return Ok(());
            }
            logs => logs.map_err(unknown)?,
        };
        for topic in bus.topics() {
            if !logs.iter().any(|log| is_of(&log.name, &topic)) {
                for Starting { queue, .. } in &self.pipelines {
                    let noting = self.starts.absent(&self.link, &topic, queue.name()).await;
                    noting.map_err(|error| unknown(error.into()))?;
                }
            }
        }
        let settled = growth::settled(&self.link, bus.name(), logs).await;
        for log in settled.map_err(|error| unknown(error.into()))? {
            let log = end_of(&log);
            for Starting { queue, from_earliest } in &self.pipelines {
                let placing = self.starts.positions(queue, &log, *from_earliest).await;
                let (name, log) = (queue.name(), &log.name);
                // Shards that are unavailable now start there too after they recover.
                match placing {
                    Ok(_) => {}
                    // As an outage of the bus. Its reader reports it too, and does not start the pipeline.
                    Err(FanoutError::NoStart { cause, .. }) if goes_on => {
                        without.push(format!("pipeline {name} on {log}: {cause}"));
                    }
                    Err(error) => {
                        let what = format!(
                            "where pipeline {name} starts on stream {log:?} is not fixed yet"
                        );
                        return Err(Pending { what, cause: Some(error.into()) });
                    }
                }
            }
        }
        Ok(())
    }

    /// The pipelines that have no start in a log of this bus, as far as it was read before.
    async fn new_to(&self, bus: &Arc<dyn Source>) -> Result<Vec<&PipelineName>, RedisError> {
        let mut logs = growth::known(&self.link, bus.name()).await?;
        if logs.is_empty() {
            logs.extend(bus.topics().iter().map(ToString::to_string));
        }
        let mut new = Vec::new();
        for Starting { queue, .. } in &self.pipelines {
            for log in &logs {
                if starts::fixed(&self.link, log, queue.name()).await?.is_none() {
                    new.push(queue.name());
                    break;
                }
            }
        }
        Ok(new)
    }

    /// Records the names of new pipelines.
    async fn note_names(&self) -> Result<(), RedisError> {
        if self.names.is_empty() {
            return Ok(());
        }
        let mut known = redis::cmd("HMGET");
        let key = keys::pipelines(self.link.prefix());
        known.arg(&key);
        for name in &self.names {
            known.arg(name.as_str());
        }
        let known = match self.link.command("HMGET", known).await? {
            Value::Array(known) => known,
            _ => Vec::new(),
        };
        let mut pipe = Pipeline::new();
        for (at, name) in self.names.iter().enumerate() {
            if matches!(known.get(at), None | Some(Value::Nil)) {
                let first_seen = millis(self.clock.now());
                pipe.cmd("HSETNX").arg(&key).arg(name.as_str()).arg(first_seen);
            }
        }
        if pipe.is_empty() {
            return Ok(());
        }
        self.link.run_checked("HSETNX", &pipe).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redis_that_runs_and_refuses_is_not_called_unavailable() {
        let target = || "127.0.0.1:6379".to_owned();
        let refused = |message: &str| {
            let message = message.to_owned();
            RedisError::Refused { target: target(), command: "beat", message }
        };
        let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into();
        for (error, words) in [
            (refused("MISCONF Errors writing to the AOF file"), "the log has the reason"),
            (refused("READONLY You can't write against a replica"), "the log has the reason"),
            (refused("NOPERM No permissions to access a key"), "the log has the reason"),
            (refused("OOM command not allowed"), "Redis is full"),
            (RedisError::Connect { target: target(), source }, "Redis is unavailable"),
        ] {
            let said = in_words(&error.into());
            assert!(said.contains(words), "{said}");
        }
    }
}
