//! Logging to standard error, as text or as JSON.

#[cfg(test)]
pub(crate) mod captured;
mod fields;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IsTerminal as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use self::fields::{JsonLines, fields};
pub(crate) use self::fields::{harmless, harmless_json};
use tokio::time::Instant;
pub use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::FromEnvError;

/// The format of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// A line of text per event, coloured on a terminal.
    #[default]
    Text,
    /// A JSON object per event.
    Json,
}

/// Why logging cannot be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// `RUST_LOG` is not valid.
    #[error(
        "environment variable RUST_LOG is not usable: {0}; write a level such as \"debug\", or \"fairlane=debug,warn\""
    )]
    Filter(#[source] FromEnvError),
    /// Another logger is already set up.
    #[error("logging was set up before: {0}")]
    Taken(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Minimum interval of repeated log lines.
const EVERY: Duration = Duration::from_secs(60);
/// Minimum interval between the last logged failure and the first line about another outage.
const AGAIN: Duration = Duration::from_secs(10);

/// Lets one log line per minute through, and counts the others.
#[derive(Debug, Default)]
pub struct OncePerMinute(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    suppressed: u64,
}

impl OncePerMinute {
    /// No line was logged yet.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Lines { last: None, suppressed: 0 }))
    }

    /// Whether to log this line. If so, returns the number of lines suppressed since the last one.
    pub(crate) fn take(&self) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(EVERY)
    }
}

impl Lines {
    fn take(&mut self, every: Duration) -> Option<u64> {
        if self.last.is_none_or(|last| last.elapsed() >= every) {
            self.last = Some(Instant::now());
            return Some(std::mem::take(&mut self.suppressed));
        }
        self.suppressed += 1;
        None
    }
}

/// Lets one log line per reason and ten seconds through, and counts the others.
#[derive(Debug)]
pub(crate) struct PerReason(Mutex<BTreeMap<&'static str, Lines>>);

impl PerReason {
    /// No line was logged yet.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Whether to log this one; if so, the number of suppressed ones of the same reason since its
    /// last line.
    pub(crate) fn take(&self, reason: &'static str) -> Option<u64> {
        let mut reasons = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.entry(reason).or_default().take(AGAIN)
    }
}

/// Logs one line per subject and minute, and at most [`SUBJECTS_MAX`] lines per minute. A tenant can
/// therefore neither fill the log, nor use up the lines of others with one bot.
#[derive(Debug, Default)]
pub(crate) struct OncePerSubject(Mutex<Subjects>);

/// Number of subjects with a line in the same minute.
const SUBJECTS_MAX: usize = 60;

#[derive(Debug, Default)]
struct Subjects {
    since: Option<Instant>,
    told: BTreeSet<String>,
}

impl OncePerSubject {
    /// Nothing was logged yet.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Subjects { since: None, told: BTreeSet::new() }))
    }

    /// Whether to log this one.
    pub(crate) fn take(&self, subject: String) -> bool {
        let mut subjects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if subjects.since.is_none_or(|since| since.elapsed() >= EVERY) {
            *subjects = Subjects { since: Some(Instant::now()), told: BTreeSet::new() };
        }
        subjects.told.len() < SUBJECTS_MAX && subjects.told.insert(subject)
    }
}

/// Logs an outage that many calls detect. The first failure is logged immediately; then one line
/// per minute, with the number of suppressed ones; and the end once.
#[derive(Debug)]
pub(crate) struct Outage {
    /// A success ends the outage if the last failure is at least this long ago. If several callers
    /// share the outage, some may succeed while others still fail.
    settles: Duration,
    /// Avoids the lock for successes while there is no outage.
    lasts: AtomicBool,
    state: Mutex<OutageState>,
}

#[derive(Debug)]
struct OutageState {
    /// The first and the last failure of the current outage.
    failed: Option<(Instant, Instant)>,
    failures: u64,
    suppressed: u64,
    /// When a failure was last logged.
    logged: Option<Instant>,
    /// Whether the end of the logged outage is not logged yet.
    is_open: bool,
}

/// An outage that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Recovered {
    /// From its first failure to its last.
    pub(crate) lasted: Duration,
    pub(crate) failures: u64,
}

impl Outage {
    /// No outage yet. See [`Self::settles`].
    pub(crate) const fn new(settles: Duration) -> Self {
        let state =
            OutageState { failed: None, failures: 0, suppressed: 0, logged: None, is_open: false };
        Self { settles, lasts: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// For an outage that several pipelines, shards or tasks detect.
    pub(crate) const fn shared() -> Self {
        Self::new(Duration::from_secs(2))
    }

    /// Notes a failure. If it should be logged, returns the number of failures suppressed since the
    /// last line.
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

    /// Notes a success. Returns the outage if it has ended and was logged.
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
        (state.failed, state.failures) = (None, 0);
        let was_told = std::mem::take(&mut state.is_open);
        if was_told {
            state.suppressed = 0;
        }
        was_told.then_some(recovered)
    }
}

/// Sets up logging for the whole process, as `fairlane` does. `RUST_LOG` overrides `level`. A program
/// without this call logs nothing, unless it installs a subscriber of `tracing` itself.
///
/// # Errors
/// If `RUST_LOG` is not valid, or logging was already set up.
pub fn init(format: LogFormat, level: LevelFilter) -> Result<(), TelemetryError> {
    let filter = EnvFilter::builder()
        .with_default_directive(level.into())
        .try_from_env()
        .or_else(|error| match std::error::Error::source(&error) {
            Some(cause) if cause.is::<tracing_subscriber::filter::ParseError>() => Err(error),
            _ => Ok(EnvFilter::new(level.to_string())),
        })
        .map_err(TelemetryError::Filter)?;
    let colour = io::stderr().is_terminal() && !no_colour();
    // A line that cannot be written is lost without a message about it: writing that message to the
    // same standard error would panic, also in the task that listens for signals.
    let lines = tracing_subscriber::fmt().log_internal_errors(false);
    let lines = lines.with_env_filter(filter);
    match format {
        LogFormat::Text => {
            lines.fmt_fields(fields()).with_writer(io::stderr).with_ansi(colour).try_init()
        }
        LogFormat::Json => {
            lines.json().with_writer(|| JsonLines(io::stderr())).with_ansi(false).try_init()
        }
    }
    .map_err(TelemetryError::Taken)
}

/// Whether the user asked for output without colours, see <https://no-color.org>.
#[expect(clippy::disallowed_methods, reason = "a wish about the terminal, not a setting")]
pub(crate) fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
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
    async fn each_reason_has_a_line_every_ten_seconds() {
        let lines = PerReason::new();
        assert_eq!([lines.take("a"), lines.take("b"), lines.take("a")], [Some(0), Some(0), None]);
        advance(SECOND * 9).await;
        assert_eq!([lines.take("a"), lines.take("b")], [None, None]);
        advance(SECOND).await;
        assert_eq!([lines.take("a"), lines.take("b"), lines.take("a")], [Some(2), Some(1), None]);
    }

    #[tokio::test(start_paused = true)]
    async fn each_subject_has_a_line_in_a_minute_and_all_have_a_bounded_number() {
        let lines = OncePerSubject::new();
        let take = |subject: &str| lines.take(subject.to_owned());
        assert_eq!([take("a"), take("a"), take("b")], [true, false, true]);
        let more = (0..2 * SUBJECTS_MAX).filter(|n| take(&n.to_string())).count();
        assert_eq!(more, SUBJECTS_MAX - 2);
        advance(SECOND * 60).await;
        assert_eq!([take("a"), take("a"), take("c")], [true, false, true]);
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
    async fn an_intermittent_outage_is_logged_up_to_twelve_times_a_minute() {
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
