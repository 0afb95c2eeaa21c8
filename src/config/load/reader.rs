//! Converts one setting to its type.

use std::fmt::Display;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use crate::config::check::between;
use crate::config::error::ConfigError;
use crate::config::layers::{Layers, Value};

/// Converts the settings below `prefix` to their types.
pub(super) struct Reader<'a> {
    pub(super) layers: &'a Layers,
    pub(super) prefix: &'a str,
}

impl<'a> Reader<'a> {
    fn value(&self, key: &str) -> &'a Value {
        let setting = self.layers.settings.get(&format!("{}{key}", self.prefix));
        &setting.expect("every key has a default: tests load them").value
    }

    pub(super) fn invalid(&self, key: &str, problem: impl Display) -> ConfigError {
        let key = format!("{}{key}", self.prefix);
        let at = self.layers.origin(std::slice::from_ref(&key));
        ConfigError::Invalid { at, key, problem: problem.to_string() }
    }

    // The layers hold each value in the type of its default, so the other arms are unreachable.

    pub(super) fn text(&self, key: &str) -> &'a str {
        match self.value(key) {
            Value::Text(text) => text,
            other => unreachable!("{key} is a text by default, not {other:?}"),
        }
    }

    pub(super) fn flag(&self, key: &str) -> bool {
        match self.value(key) {
            Value::Flag(flag) => *flag,
            other => unreachable!("{key} is a flag by default, not {other:?}"),
        }
    }

    pub(super) fn list(&self, key: &str) -> Vec<String> {
        match self.value(key) {
            Value::List(items) => items.clone(),
            other => unreachable!("{key} is a list by default, not {other:?}"),
        }
    }

    pub(super) fn tables(&self, key: &str) -> usize {
        match self.value(key) {
            Value::Tables(count) => *count,
            other => unreachable!("{key} is a list of tables by default, not {other:?}"),
        }
    }

    pub(super) fn fraction(&self, key: &str) -> f64 {
        match self.value(key) {
            Value::Float(number) => *number,
            other => unreachable!("{key} is a fraction by default, not {other:?}"),
        }
    }

    fn whole(&self, key: &str) -> i64 {
        match self.value(key) {
            Value::Integer(number) => *number,
            other => unreachable!("{key} is a whole number by default, not {other:?}"),
        }
    }

    pub(super) fn number(&self, key: &str, (least, most): (u64, u64)) -> Result<u64, ConfigError> {
        let number = self.whole(key);
        u64::try_from(number)
            .ok()
            .filter(|number| (least..=most).contains(number))
            .ok_or_else(|| self.invalid(key, format_args!("is {number}; {}", between(least, most))))
    }

    /// A number, or `general` where it is -1.
    pub(super) fn number_or(
        &self,
        key: &str,
        bounds: (u64, u64),
        general: u64,
    ) -> Result<u64, ConfigError> {
        if self.whole(key) == -1 { Ok(general) } else { self.number(key, bounds) }
    }

    /// A number whose bounds fit its type.
    pub(super) fn count<T: TryFrom<u64>>(
        &self,
        key: &str,
        bounds: (u64, u64),
    ) -> Result<T, ConfigError> {
        let number = self.number(key, bounds)?;
        T::try_from(number).map_err(|_| {
            self.invalid(key, format_args!("is {number}; {}", between(bounds.0, bounds.1)))
        })
    }

    pub(super) fn positive<T: TryFrom<NonZeroU64>>(
        &self,
        key: &str,
        most: u64,
    ) -> Result<T, ConfigError> {
        let number = self.number(key, (1, most))?;
        NonZeroU64::new(number)
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| self.invalid(key, format_args!("is {number}; {}", between(1, most))))
    }

    pub(super) fn duration(&self, key: &str) -> Result<Duration, ConfigError> {
        let text = self.text(key);
        humantime::parse_duration(text.trim()).map_err(|error| {
            let remedy = "write a number with a unit, such as \"200ms\", \"30s\" or \"7d\"";
            self.invalid(key, format_args!("is {text:?}, not a duration ({error}); {remedy}"))
        })
    }

    pub(super) fn address<T: FromStr>(&self, key: &str) -> Result<T, ConfigError> {
        let text = self.text(key);
        text.parse().map_err(|_| {
            let remedy = "write IP:PORT, such as \"127.0.0.1:8080\" or \"[::]:8080\"";
            self.invalid(key, format_args!("is {text:?}; {remedy}"))
        })
    }

    pub(super) fn choice<T: Copy>(
        &self,
        key: &str,
        choices: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        let text = self.text(key);
        choices.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice).ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
            self.invalid(key, format_args!("is {text:?}; write {}", names.join(" or ")))
        })
    }
}
