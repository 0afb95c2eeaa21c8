//! Checks of single values, shared by all sections.

use std::ops::RangeInclusive;
use std::time::Duration;

use humantime::format_duration;

use super::Fault;

pub(super) const MILLISECOND: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const MINUTE: Duration = Duration::from_secs(60);
pub(super) const HOUR: Duration = Duration::from_secs(3_600);
pub(super) const MONTH: Duration = Duration::from_secs(30 * 86_400);
pub(super) const DAY: Duration = Duration::from_secs(86_400);
pub(super) const WEEK: Duration = Duration::from_secs(7 * 86_400);
/// Maximum duration. A longer time is a typing error, and would overflow sums of times.
pub(super) const TEN_YEARS: Duration = Duration::from_secs(3_650 * 86_400);

pub(super) const NETS_MAX: usize = 1_000;
pub(super) const HOSTS_MAX: usize = 100;
pub(super) const TOKEN_BOTS_MAX: usize = 1_000;
const NAME_MAX_BYTES: usize = 1_024;

pub(super) fn within(
    key: &str,
    time: Duration,
    bounds: RangeInclusive<Duration>,
) -> Result<(), Fault> {
    if bounds.contains(&time) {
        return Ok(());
    }
    let (least, most) = bounds.into_inner();
    let problem = format!(
        "is {}; write a duration from {} to {}",
        format_duration(time),
        plain(least),
        plain(most),
    );
    Err(Fault::new(key, problem))
}

/// A bound in the units of the documentation: `3650d`, not `9years 11months …`.
fn plain(time: Duration) -> String {
    match time.as_secs() {
        secs if secs > 0 && secs % 86_400 == 0 => format!("{}d", secs / 86_400),
        _ => format_duration(time).to_string(),
    }
}

pub(super) fn at_least(key: &str, time: Duration, least: Duration) -> Result<(), Fault> {
    if time >= least {
        return Ok(());
    }
    let problem =
        format!("is {}; write at least {}", format_duration(time), format_duration(least));
    Err(Fault::new(key, problem))
}

pub(super) fn number(key: &str, number: u64, (least, most): (u64, u64)) -> Result<(), Fault> {
    if (least..=most).contains(&number) {
        return Ok(());
    }
    Err(Fault::new(key, format!("is {number}; {}", between(least, most))))
}

/// The remedy for a number out of bounds.
pub(in super::super) fn between(least: u64, most: u64) -> String {
    format!("write a whole number from {least} to {most}")
}

pub(super) fn at_most(key: &str, entries: usize, most: usize) -> Result<(), Fault> {
    if entries <= most {
        return Ok(());
    }
    Err(Fault::new(key, format!("has {entries} entries; at most {most} are allowed")))
}

pub(super) fn names(key: &str, names: &[String], most: usize, what: &str) -> Result<(), Fault> {
    at_most(key, names.len(), most)?;
    let bad = |name: &&String| {
        name.is_empty() || name.len() > NAME_MAX_BYTES || name.chars().any(char::is_control)
    };
    match names.iter().find(bad) {
        Some(_) => {
            let rule = format!("1 to {NAME_MAX_BYTES} bytes without control characters");
            Err(Fault::new(key, format!("holds an unusable {what}; each has {rule}")))
        }
        None => Ok(()),
    }
}
