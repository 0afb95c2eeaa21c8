//! Checks that the types cannot express: bounds, and contradictions between settings.

mod auth;
mod bots;
mod bounds;
mod bus;
mod callbacks;
mod http;
pub(super) mod limits;
mod notifications;
mod pipelines;
mod quotas;
mod sources;
mod stores;
mod subjects;
mod tracing;

use std::time::Duration;

pub(super) use self::bounds::between;
use self::bounds::{HOUR, MILLISECOND, SECOND, number, within};
use super::Config;
use super::error::{ConfigError, Origin};
use super::layers::Layers;

/// A violated rule. The error names the first key; any of the keys may be the cause.
#[derive(Debug)]
pub(super) struct Fault {
    keys: Vec<String>,
    problem: String,
}

impl Fault {
    fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { keys: vec![key.into()], problem: problem.into() }
    }

    fn or(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    /// The error, located where one of the keys was set.
    pub(super) fn into_error(self, layers: &Layers) -> ConfigError {
        let at = layers.origin(&self.keys);
        self.error_at(at)
    }

    fn error_at(mut self, at: Origin) -> ConfigError {
        ConfigError::Invalid { at, key: self.keys.swap_remove(0), problem: self.problem }
    }
}

impl Config {
    /// Checks the bounds that the types leave open. Loading already did. Call it again for a
    /// configuration that was changed in code.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the first setting that is out of bounds or contradicts another
    /// one.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.find_fault().map_or(Ok(()), |fault| Err(fault.error_at(Origin::Code)))
    }

    pub(super) fn find_fault(&self) -> Option<Fault> {
        self.check_top().err().or_else(|| {
            self.pipelines.iter().find_map(|(name, pipeline)| {
                let prefix = format!("pipelines.{name}.");
                pipelines::check(name, pipeline, &prefix, self.shutdown_grace).err()
            })
        })
    }

    fn check_top(&self) -> Result<(), Fault> {
        if self.data_dir.as_os_str().is_empty() {
            return Err(Fault::new("data_dir", "is empty; name a directory"));
        }
        within("shutdown_grace", self.shutdown_grace, MILLISECOND..=HOUR)?;
        within("shutdown_delay", self.shutdown_delay, Duration::ZERO..=HOUR)?;
        self.check_stores()?;
        self.check_bus()?;
        self.check_callbacks()?;
        self.check_notifications()?;
        number("counters.cached_ads", self.counters.cached_ads, limits::CACHED_ADS)?;
        let read_timeout = self.counters.read_timeout;
        within("counters.read_timeout", read_timeout, 10 * MILLISECOND..=10 * SECOND)?;
        self.check_http()?;
        self.check_tracing()?;
        self.check_admission()?;
        self.check_quotas()?;
        self.check_limited_bots()?;
        self.check_headers()?;
        self.check_auth()
    }
}
