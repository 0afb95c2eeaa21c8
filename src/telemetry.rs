//! Logging: what is logged goes to standard error, as text for people or as JSON for collectors.

use std::io::{self, IsTerminal as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::FromEnvError;

use crate::config;

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text each, coloured on a terminal.
    #[default]
    Text,
    /// One JSON object each.
    Json,
}

/// Why logging cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `RUST_LOG` cannot be read.
    #[error(
        "environment variable RUST_LOG is not usable: {0}; write a level such as \"debug\", or \"fairlane=debug,warn\""
    )]
    Filter(#[source] FromEnvError),
    /// Something else logs already.
    #[error("logging was set up before: {0}")]
    Taken(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// What happens again and again is logged this often.
const EVERY: Duration = Duration::from_secs(60);
/// An outage that begins so soon after a line of the one before is not logged before [`EVERY`].
const AGAIN: Duration = Duration::from_secs(10);

/// Lets one of many log lines through each minute, and counts the others.
#[derive(Debug, Default)]
pub struct OncePerMinute(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    suppressed: u64,
}

impl OncePerMinute {
    /// None was logged yet.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Lines { last: None, suppressed: 0 }))
    }

    /// Whether this one is to be logged; then with how many were not since the last that was.
    pub(crate) fn take(&self) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.last.is_none_or(|last| last.elapsed() >= EVERY) {
            lines.last = Some(Instant::now());
            return Some(std::mem::take(&mut lines.suppressed));
        }
        lines.suppressed += 1;
        None
    }
}

/// Tells the log of an outage that is met again and again: the first failure immediately, then one
/// a minute with a count of the others, and once that it is over.
#[derive(Debug)]
pub(crate) struct Outage {
    /// A success ends the outage when the last failure is at least so long ago. Where several
    /// callers share the outage, some succeed while others still fail.
    settles: Duration,
    /// Spares a success the lock while there is no outage.
    lasts: AtomicBool,
    state: Mutex<OutageState>,
}

#[derive(Debug)]
struct OutageState {
    /// The first and the last failure of the outage that lasts.
    failed: Option<(Instant, Instant)>,
    failures: u64,
    suppressed: u64,
    /// When a failure was last logged, and whether the end of that outage is still to be.
    logged: Option<Instant>,
    is_open: bool,
}

/// An outage that is over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Recovered {
    /// From its first failure to its last.
    pub(crate) lasted: Duration,
    pub(crate) failures: u64,
}

impl Outage {
    /// None is known. See [`Self::settles`].
    pub(crate) const fn new(settles: Duration) -> Self {
        let state =
            OutageState { failed: None, failures: 0, suppressed: 0, logged: None, is_open: false };
        Self { settles, lasts: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// For what several pipelines, shards or tasks meet together.
    pub(crate) const fn shared() -> Self {
        Self::new(Duration::from_secs(2))
    }

    /// Notes a failure. Whether it is to be logged; then with how many were not since the last that
    /// was.
    pub(crate) fn failed(&self) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        self.lasts.store(true, Ordering::Relaxed);
        let first = state.failed.map_or(now, |(first, _)| first);
        state.failed = Some((first, now));
        state.failures += 1;
        let pause = if state.is_open { EVERY } else { AGAIN };
        if state.logged.is_none_or(|logged| now.duration_since(logged) >= pause) {
            (state.logged, state.is_open) = (Some(now), true);
            return Some(std::mem::take(&mut state.suppressed));
        }
        state.suppressed += 1;
        None
    }

    /// Notes a success. Whether it ends an outage that was logged.
    pub(crate) fn succeeded(&self) -> Option<Recovered> {
        if !self.lasts.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, last) = state.failed?;
        if last.elapsed() < self.settles {
            return None;
        }
        self.lasts.store(false, Ordering::Relaxed);
        let recovered = Recovered { lasted: last.duration_since(first), failures: state.failures };
        (state.failed, state.failures, state.suppressed) = (None, 0, 0);
        std::mem::take(&mut state.is_open).then_some(recovered)
    }
}

/// Sets up logging for the whole process. `RUST_LOG` wins over `level`.
///
/// # Errors
/// When `RUST_LOG` cannot be read, or logging was set up before.
pub fn init(format: LogFormat, level: LevelFilter) -> Result<(), TelemetryError> {
    let filter = EnvFilter::builder()
        .with_default_directive(level.into())
        .try_from_env()
        .or_else(|error| match std::error::Error::source(&error) {
            Some(cause) if cause.is::<tracing_subscriber::filter::ParseError>() => Err(error),
            _ => Ok(EnvFilter::new(level.to_string())),
        })
        .map_err(TelemetryError::Filter)?;
    let colour = io::stderr().is_terminal() && !config::no_colour();
    // A line that cannot be written is lost. To complain of it on the same standard error would
    // panic, in the task that listens for signals too.
    let lines = tracing_subscriber::fmt().log_internal_errors(false);
    let lines = lines.with_env_filter(filter).with_writer(io::stderr).with_ansi(colour);
    match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().with_ansi(false).try_init(),
    }
    .map_err(TelemetryError::Taken)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn one_line_a_minute_says_how_many_were_suppressed() {
        let lines = OncePerMinute::new();
        assert_eq!(lines.take(), Some(0));
        for _ in 0..59 {
            advance(SECOND).await;
            assert_eq!(lines.take(), None);
        }
        advance(SECOND).await;
        assert_eq!([lines.take(), lines.take()], [Some(59), None]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_logged_first_then_each_minute_and_when_it_is_over() {
        let outage = Outage::new(Duration::ZERO);
        assert_eq!(outage.succeeded(), None, "nothing failed");
        let mut logged = Vec::new();
        for second in 0..130 {
            logged.extend(outage.failed().map(|suppressed| (second, suppressed)));
            advance(SECOND).await;
        }
        assert_eq!(logged, [(0, 0), (60, 59), (120, 59)]);
        let recovered = Recovered { lasted: SECOND * 129, failures: 130 };
        assert_eq!([outage.succeeded(), outage.succeeded()], [Some(recovered), None]);
        advance(SECOND).await;
        assert_eq!(outage.failed(), Some(0), "another outage");
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_lasts_while_some_callers_fail_and_others_succeed() {
        let outage = Outage::shared();
        for second in 0..30 {
            assert_eq!(outage.failed(), (second == 0).then_some(0));
            advance(SECOND).await;
            assert_eq!(outage.succeeded(), None, "another failed a second ago");
        }
        advance(SECOND).await;
        let recovered = Recovered { lasted: SECOND * 29, failures: 30 };
        assert_eq!(outage.succeeded(), Some(recovered));
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_and_goes_is_logged_twelve_times_a_minute_at_most() {
        let outage = Outage::new(Duration::ZERO);
        let mut lines = 0;
        for _ in 0..600 {
            lines += usize::from(outage.failed().is_some());
            lines += usize::from(outage.succeeded().is_some());
            advance(Duration::from_millis(100)).await;
        }
        assert_eq!(lines, 12);
    }
}
