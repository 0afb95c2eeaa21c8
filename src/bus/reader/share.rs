//! Which process reads which logs of a bus. Each reads an equal share, see `lua/readers.lua`.
//!
//! This is only for efficiency. If two processes read one log for a short time, nothing is copied
//! twice, because each shard has its position.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;
use tracing::{info, warn};

use super::super::BusError;
use super::super::source::Source;
use super::growth::Growth;
use super::watch::Watch;
use crate::clock::millis;
use crate::metrics::BusMetrics;
use crate::redis::scripts::Readers;
use crate::redis::{Link, RedisError, keys};

/// How long a share lasts without renewal. A reader that is only slow may lose it too early, and
/// another process reads instead: this costs a session, but copies nothing twice.
const TTL: Duration = Duration::from_millis(1_500);
/// Interval of renewals.
const RENEW: Duration = Duration::from_millis(500);
/// Interval of attempts to get a share.
pub(super) const ASK: Duration = Duration::from_millis(250);
/// How long the names of the logs are used; without any, they are asked for again after [`NONE`].
const KNOWN: Duration = Duration::from_secs(5);
const NONE: Duration = Duration::from_secs(1);

/// The share of this process.
pub(super) struct Share {
    source: Arc<dyn Source>,
    link: Arc<Link>,
    key: String,
    /// The id of this reader.
    token: String,
    growth: Option<Growth>,
    watch: Watch,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The names of all logs, and when they were asked for.
    logs: Arc<[Arc<str>]>,
    asked: Option<Instant>,
    /// The logs that this process reads.
    read: Vec<Arc<str>>,
    /// Those of them that the session leaves out, because their servers did not answer.
    left_out: Vec<Arc<str>>,
    /// The server of one of these answers again.
    is_back: bool,
}

/// The logs that this process reads now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shared(Vec<Arc<str>>);

impl Shared {
    pub(super) fn reads(&self, log: &str) -> bool {
        self.0.iter().any(|name| **name == *log)
    }
}

impl Share {
    pub(super) fn new(
        source: Arc<dyn Source>,
        link: Arc<Link>,
        growth: Option<Growth>,
        watch: Watch,
    ) -> Self {
        let key = keys::readers(link.prefix(), source.name());
        let token = uuid::Uuid::now_v7().to_string();
        Self { source, link, key, token, growth, watch, state: Mutex::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes or renews a share. `None`: other processes read all logs, or there are none.
    pub(super) async fn take(&self) -> Result<Option<Shared>, BusError> {
        let has_some = {
            let state = self.state();
            !state.read.is_empty() && !state.logs.is_empty()
        };
        // Slow answers of the bus must not cost the share that a session before had.
        let logs = tokio::select! {
            biased;
            logs = self.logs() => logs?,
            error = self.hold(), if has_some => return Err(error.into()),
        };
        let read = if logs.is_empty() { Vec::new() } else { self.call(&logs, TTL).await? };
        self.note(&read);
        Ok((!read.is_empty()).then_some(Shared(read)))
    }

    /// The session that begins leaves out these logs.
    pub(super) fn leaves_out(&self, logs: Vec<Arc<str>>) {
        let mut state = self.state();
        (state.left_out, state.is_back) = (logs, false);
    }

    /// Renews the share; returns when it has changed, or when a log that is left out can be read. The bus is asked for its logs meanwhile: one that
    /// answers slowly must not cost the share.
    pub(super) async fn keep(&self, shared: &Shared) -> Result<(), BusError> {
        tokio::select! {
            biased;
            kept = self.renew(shared) => kept,
            error = self.list().boxed() => Err(error),
        }
    }

    /// Renews the share of the logs that are known; returns as [`Self::keep`].
    async fn renew(&self, shared: &Shared) -> Result<(), BusError> {
        loop {
            tokio::time::sleep(RENEW).await;
            let logs = {
                let state = self.state();
                if state.is_back {
                    return Ok(());
                }
                Arc::clone(&state.logs)
            };
            let read = self.call(&logs, TTL).await?;
            if read != shared.0 {
                self.note(&read);
                return Ok(());
            }
        }
    }

    /// Renews the share until it is known whether it has changed; returns only when Redis fails.
    async fn hold(&self) -> RedisError {
        loop {
            let logs = Arc::clone(&self.state().logs);
            if let Err(error) = self.call(&logs, TTL).await {
                return error;
            }
            tokio::time::sleep(RENEW).await;
        }
    }

    /// Keeps the names of the logs up to date; returns only when Redis fails. The logs are read on while
    /// the bus does not tell their names.
    async fn list(&self) -> BusError {
        loop {
            tokio::time::sleep(RENEW).await;
            if let Err(error @ BusError::Redis(_)) = self.logs().await {
                return error;
            }
        }
    }

    /// Gives the share up.
    pub(super) async fn leave(&self) {
        let logs = {
            let state = self.state();
            hide_lag(&state.read);
            Arc::clone(&state.logs)
        };
        if !logs.is_empty() {
            let _ = self.call(&logs, Duration::ZERO).await;
        }
    }

    /// The names of all logs.
    async fn logs(&self) -> Result<Arc<[Arc<str>]>, BusError> {
        let (logs, asked) = {
            let state = self.state();
            (Arc::clone(&state.logs), state.asked)
        };
        let fresh = if logs.is_empty() { NONE } else { KNOWN };
        if asked.is_some_and(|asked| asked.elapsed() < fresh) {
            return Ok(logs);
        }
        let mut logs = self.source.logs().await.inspect_err(|error| self.watch.failed(error))?;
        self.watch.answers();
        let known: Vec<_> = logs.iter().filter(|log| log.unknown.is_none()).collect();
        {
            let mut state = self.state();
            let is_known = |name: &Arc<str>| known.iter().any(|log| log.name == *name);
            state.is_back |= state.left_out.iter().any(is_known);
        }
        if let Some(growth) = &self.growth {
            logs = growth.readable(&self.link, self.source.name(), logs).await?;
        }
        let mut names: Vec<_> = logs.into_iter().map(|log| log.name).collect();
        names.sort_unstable();
        let logs: Arc<[Arc<str>]> = names.into();
        let mut state = self.state();
        (state.logs, state.asked) = (Arc::clone(&logs), Some(Instant::now()));
        Ok(logs)
    }

    async fn call(&self, logs: &[Arc<str>], ttl: Duration) -> Result<Vec<Arc<str>>, RedisError> {
        let call = Readers { key: &self.key, token: &self.token, ttl_ms: millis(ttl), logs };
        let mut places = self.link.call(&call).await?;
        places.sort_unstable();
        Ok(places.into_iter().filter_map(|place| logs.get(place).cloned()).collect())
    }

    /// Logs which logs this process reads from now on, and stops showing the lag of others.
    fn note(&self, read: &[Arc<str>]) {
        self.watch.reads(read.len());
        let mut state = self.state();
        if state.read == read {
            return;
        }
        hide_lag(state.read.iter().filter(|log| !read.contains(log)));
        let bus = self.source.name();
        if read.is_empty() {
            warn!(bus, "another process reads the bus now");
        } else {
            info!(bus, logs = read.len(), of = state.logs.len(), "reading the bus");
        }
        state.read = read.to_vec();
    }
}

/// The process or instance that reads these logs now reports their lag.
fn hide_lag<'a>(logs: impl IntoIterator<Item = &'a Arc<str>>) {
    logs.into_iter().for_each(|log| BusMetrics::new(log).lag.set(0.0));
}
