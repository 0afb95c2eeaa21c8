//! `[counters]`.

use jiff::tz::TimeZone;

use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{ConfigError, CountersConfig};

pub(super) fn counters(top: &Reader<'_>) -> Result<CountersConfig, ConfigError> {
    let name = top.text("counters.time_zone");
    // "Etc/Unknown" is in the database too.
    let known = TimeZone::get(name).ok().filter(|zone| !zone.is_unknown());
    let time_zone = known.ok_or_else(|| {
        let remedy = "write an IANA name, such as \"UTC\" or \"Europe/Berlin\"";
        let problem = format_args!("is {name:?}, which is no known time zone; {remedy}");
        top.invalid("counters.time_zone", problem)
    })?;
    let cached_ads = top.number("counters.cached_ads", limits::CACHED_ADS)?;
    let read_timeout = top.duration("counters.read_timeout")?;
    Ok(CountersConfig { time_zone, cached_ads, read_timeout })
}
