//! Logging: what is logged goes to standard error, as text for people or as JSON for collectors.

use std::io::{self, IsTerminal as _};
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

/// Lets one of many log lines through.
#[derive(Debug, Default)]
pub struct OncePerMinute(Mutex<Option<Instant>>);

impl OncePerMinute {
    /// None was logged yet.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether this one may be logged.
    pub(crate) fn take(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| last.elapsed() >= Duration::from_secs(60));
        if due {
            *last = Some(Instant::now());
        }
        due
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
