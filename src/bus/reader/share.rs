//! Which process reads which logs of a bus. Each reads an equal share, see `lua/readers.lua`.
//!
//! This is only for efficiency. If two processes read one log for a short time, nothing is copied
//! twice, because each shard has its position.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::time::Instant;
use tracing::{info, warn};

use super::super::BusError;
use super::super::source::{Log, Source};
use super::growth::Growth;
use super::watch::Watch;
use crate::clock::millis;
use crate::fanout::{NewStart, Waiting, starts};
use crate::metrics::BusMetrics;
use crate::redis::scripts::Readers;
use crate::redis::{Link, RedisError, keys};
use crate::telemetry::OncePerMinute;

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
    /// Limits the log line about what is read.
    told: OncePerMinute,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The names of all logs, and when they were asked for.
    logs: Arc<[Arc<str>]>,
    asked: Option<Instant>,
    /// The logs that this process reads.
    read: Vec<Arc<str>>,
    /// Until when no other process takes them.
    until: Option<Instant>,
    /// The logs that it gave up: who reads them is not known yet.
    left: Vec<Arc<str>>,
    /// Those that it reads and the session leaves out, because their servers did not answer.
    left_out: Vec<Arc<str>>,
    /// The pipelines that the session leaves out, because they have no start.
    waiting: Vec<Waiting>,
    /// The server of one of these logs answers again, or one of these pipelines has a start.
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
        let (told, state) = <_>::default();
        Self { source, link, key, token, growth, watch, told, state }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this process has a share, as far as it knows.
    pub(super) fn has_some(&self) -> bool {
        !self.state().read.is_empty()
    }

    /// Whether no other process has taken the share of this one. To be checked before positions are noted:
    /// a process that was suspended continues before its timers fire.
    pub(super) fn is_held(&self) -> bool {
        self.state().until.is_some_and(|until| Instant::now() < until)
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
        // What the session before left out must not end the next one while it begins.
        self.leaves_out(Vec::new());
        let read = if logs.is_empty() { Vec::new() } else { self.call(&logs, TTL).await? };
        self.note(&read);
        Ok((!read.is_empty()).then_some(Shared(read)))
    }

    /// The session that begins leaves out these logs.
    pub(super) fn leaves_out(&self, logs: Vec<Arc<str>>) {
        let mut state = self.state();
        (state.left_out, state.waiting, state.is_back) = (logs, Vec::new(), false);
    }

    /// It leaves out these pipelines too.
    pub(super) fn waits(&self, pipelines: Vec<Waiting>) {
        self.state().waiting = pipelines;
    }

    /// Renews the share; returns when it has changed, or when a log or a pipeline that is left out can be
    /// read. The bus is asked for its logs meanwhile: one that answers slowly must not cost the share.
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

    /// Gives the share up at the stop: who reads the logs then reports their lag.
    pub(super) async fn leave(&self) {
        {
            let state = self.state();
            hide_lag(state.read.iter().chain(&state.left));
        }
        self.give_up().await;
    }

    /// Gives the share up while the process runs. It is taken again only after the bus has told its logs.
    /// Their lag stays shown until it is known who reads them.
    pub(super) async fn give_up(&self) {
        let logs = {
            let mut state = self.state();
            let read = std::mem::take(&mut state.read);
            state.left.extend(read);
            state.asked = None;
            state.waiting.clear();
            Arc::clone(&state.logs)
        };
        self.watch.gives_up();
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
        let told = self.source.logs().await.inspect_err(|error| self.watch.failed(error));
        self.watch.tells(told.is_ok());
        let mut logs = told?;
        let known: Vec<_> = logs.iter().filter(|log| log.unknown.is_none()).collect();
        {
            let mut state = self.state();
            let is_known = |name: &Arc<str>| known.iter().any(|log| log.name == *name);
            state.is_back |= state.left_out.iter().any(is_known);
        }
        if self.has_start(&logs).await {
            self.state().is_back = true;
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

    /// Whether a pipeline that waits has a start: the bus tells it now, or another process has fixed it.
    async fn has_start(&self, logs: &[Log]) -> bool {
        let waiting = self.state().waiting.clone();
        let is_told = |waiting: &Waiting| {
            let log = logs.iter().find(|log| log.name == waiting.log);
            log.is_some_and(|log| !matches!(log.start, NewStart::Unknown(_)))
        };
        if waiting.iter().any(is_told) {
            return true;
        }
        let fixed = waiting
            .iter()
            .map(|Waiting { pipeline, log, .. }| starts::fixed(&self.link, log, pipeline));
        // Together, so that it waits only once for a server that does not answer. The next listing asks again.
        join_all(fixed).await.iter().any(|fixed| matches!(fixed, Ok(Some(_))))
    }

    async fn call(&self, logs: &[Arc<str>], ttl: Duration) -> Result<Vec<Arc<str>>, RedisError> {
        let call = Readers { key: &self.key, token: &self.token, ttl_ms: millis(ttl), logs };
        let sent = Instant::now();
        let mut places = self.link.call(&call).await?;
        self.state().until = Some(sent + ttl);
        places.sort_unstable();
        Ok(places.into_iter().filter_map(|place| logs.get(place).cloned()).collect())
    }

    /// Logs which logs this process reads from now on, and stops showing the lag of others.
    fn note(&self, read: &[Arc<str>]) {
        self.watch.reads(read.len());
        let mut state = self.state();
        let left = std::mem::take(&mut state.left);
        hide_lag(left.iter().filter(|log| !read.contains(log)));
        if state.read == read {
            return;
        }
        hide_lag(state.read.iter().filter(|log| !read.contains(log)));
        let bus = self.source.name();
        if read.is_empty() {
            state.waiting.clear();
            warn!(bus, "another process reads the bus now");
        } else if left != read
            && let Some(suppressed) = self.told.take()
        {
            info!(bus, logs = read.len(), of = state.logs.len(), suppressed, "reading the bus");
        }
        state.read = read.to_vec();
    }
}

/// The process or instance that reads these logs now reports their lag.
fn hide_lag<'a>(logs: impl IntoIterator<Item = &'a Arc<str>>) {
    logs.into_iter().for_each(|log| BusMetrics::new(log).lag.set(0.0));
}

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;

    use super::super::super::source::{Fetched, Opened, Outgoing, Progress, Released, Standing};
    use super::*;
    use crate::clock::SystemClock;
    use crate::id::{Offset, PipelineName};
    use crate::presence::BusMeter;
    use crate::queue::Queue;

    /// A bus with one log, which may tell where new pipelines start.
    #[derive(Debug)]
    struct Telling(Mutex<NewStart>);

    impl Source for Telling {
        fn name(&self) -> &'static str {
            "telling"
        }

        fn topics(&self) -> Vec<Arc<str>> {
            Vec::new()
        }

        fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>> {
            let start = self.0.lock().unwrap().clone();
            let log = Log { name: "log".into(), start, ..Log::default() };
            async move { Ok(vec![log]) }.boxed()
        }

        fn open<'a>(&'a self, _: &'a [Standing]) -> BoxFuture<'a, Result<Vec<Opened>, BusError>> {
            unreachable!("nothing is read")
        }

        fn fetch(
            &self,
            _: usize,
            _: Duration,
        ) -> BoxFuture<'_, Result<Box<dyn Fetched>, BusError>> {
            unreachable!("nothing is read")
        }

        fn release<'a>(
            &'a self,
            _: &'a [Progress],
        ) -> BoxFuture<'a, Result<Vec<Released>, BusError>> {
            unreachable!("nothing is read")
        }

        fn publish<'a>(
            &'a self,
            _: &'a [Outgoing<'a>],
        ) -> BoxFuture<'a, Result<Vec<Offset>, BusError>> {
            unreachable!("no event is published")
        }
    }

    /// A share of such a bus, and where its state is noted.
    fn share(source: &Arc<Telling>) -> (Share, Arc<BusMeter>) {
        let link = Arc::clone(Queue::unreachable("p", 1).link());
        let meter = Arc::new(BusMeter::new("telling"));
        let watch = Watch::new(Some(Arc::clone(&meter)), Arc::new(SystemClock));
        (Share::new(Arc::clone(source) as Arc<dyn Source>, link, None, watch), meter)
    }

    #[tokio::test]
    async fn a_share_that_is_given_up_is_taken_again_only_after_the_bus_has_told_its_logs() {
        let (share, meter) = share(&Arc::new(Telling(Mutex::new(NewStart::Own))));
        let logs = share.logs().await.unwrap();
        share.note(&logs);
        assert!(share.has_some() && share.state().asked.is_some());
        assert_eq!(meter.state().logs, 1);
        share.give_up().await;
        assert!(!share.has_some() && share.state().asked.is_none());
        assert_eq!(meter.state().logs, 0, "operators see that it reads none");
    }

    #[tokio::test]
    async fn what_is_unread_stays_shown_until_it_is_known_who_reads_the_share_that_was_given_up() {
        let (share, meter) = share(&Arc::new(Telling(Mutex::new(NewStart::Own))));
        let logs: [Arc<str>; 1] = ["log".into()];
        share.note(&logs);
        share.watch.lags(7);
        let since = meter.state().unread_since_ms;
        let shown = || {
            let state = meter.state();
            (state.logs, state.unread, state.unread_since_ms == since)
        };
        // The second one finds that nothing was taken in between.
        for _ in 0..2 {
            share.give_up().await;
            assert_eq!((shown(), &*share.state().left), ((0, 7, true), &logs[..]));
        }
        share.note(&logs);
        assert_eq!((shown(), share.state().left.len()), ((1, 7, true), 0), "it reads on");
        share.give_up().await;
        share.note(&[]);
        assert_eq!((shown(), share.state().left.len()), ((0, 0, false), 0), "others read it now");
    }

    #[tokio::test(start_paused = true)]
    async fn a_share_that_is_taken_again_and_again_is_logged_once_a_minute() {
        let (share, _) = share(&Arc::new(Telling(Mutex::new(NewStart::Own))));
        let logs: [Arc<str>; 1] = ["log".into()];
        let minute = Duration::from_secs(60);
        share.note(&logs);
        tokio::time::advance(minute).await;
        share.give_up().await;
        share.note(&logs);
        assert_eq!(share.told.take(), Some(0), "between these, this process read nothing");
        tokio::time::advance(minute).await;
        for _ in 0..3 {
            share.note(&[]);
            share.note(&logs);
            share.give_up().await;
        }
        tokio::time::advance(minute).await;
        assert_eq!(share.told.take(), Some(2), "others had it meanwhile");
    }

    #[tokio::test]
    async fn a_bus_that_tells_its_logs_and_cannot_be_read_fails_since_the_first_failure() {
        let (share, meter) = share(&Arc::new(Telling(Mutex::new(NewStart::Own))));
        let cause = "no right to read".to_owned();
        share.watch.failed(&BusError::Refused { bus: "telling".to_owned(), cause });
        let failing = meter.state().failing;
        assert!(failing.is_some());
        share.logs().await.unwrap();
        assert_eq!(meter.state().failing, failing);
    }

    #[tokio::test]
    async fn what_a_session_left_out_does_not_end_the_next_one_while_it_begins() {
        let (share, _) = share(&Arc::new(Telling(Mutex::new(NewStart::Own))));
        share.leaves_out(vec!["log".into()]);
        share.give_up().await;
        assert!(share.take().await.is_err(), "Redis cannot be reached");
        assert!(!share.state().is_back, "no session leaves out a log that is back");
    }

    #[tokio::test]
    async fn a_pipeline_that_waits_for_its_start_ends_the_session_only_when_the_bus_tells_it() {
        let source = Arc::new(Telling(Mutex::new(NewStart::Unknown("no group".into()))));
        let (share, _) = share(&source);
        let waiting = |log: &str| Waiting::of(PipelineName::parse("new").unwrap(), log);
        let ends = async |log: &str| {
            share.state().asked = None;
            share.leaves_out(Vec::new());
            share.waits(vec![waiting(log)]);
            share.logs().await.unwrap();
            share.state().is_back
        };
        assert!(!ends("log").await, "its consumer group does not exist yet");
        *source.0.lock().unwrap() = NewStart::At(Offset::default());
        assert!(!ends("another").await);
        assert!(ends("log").await);
        share.leaves_out(Vec::new());
        share.state().asked = None;
        share.logs().await.unwrap();
        assert!(!share.state().is_back, "no pipeline waits");
    }
}
