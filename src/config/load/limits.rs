//! `[[limits.bots]]`, and the limits of a pipeline.

use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{BotLimitsConfig, ConfigError};
use crate::id::{BotId, PipelineName};
use crate::rate::{BotLimits, Rate, Weight};

pub(super) fn bots(top: &Reader<'_>) -> Result<Vec<BotLimitsConfig>, ConfigError> {
    let mut bots = Vec::new();
    for place in 0..top.tables("limits.bots") {
        let prefix = format!("limits.bots[{place}].");
        bots.push(of_bot(&Reader { layers: top.layers, prefix: &prefix })?);
    }
    Ok(bots)
}

fn of_bot(read: &Reader<'_>) -> Result<BotLimitsConfig, ConfigError> {
    let bot = BotId::parse(read.text("bot")).map_err(|error| read.invalid("bot", error))?;
    let pipeline = PipelineName::parse(read.text("pipeline"))
        .map_err(|error| read.invalid("pipeline", error))?;
    let weight = read.fraction("weight");
    let limits = BotLimits {
        weight: Some(
            Weight::try_from(weight)
                .map_err(|error| read.invalid("weight", format_args!("is {weight}; {error}")))?,
        ),
        rate: limit(read, "rate")?,
        burst: Some(read.count("burst", (0, limits::BURST))?).filter(|burst| *burst > 0),
    };
    Ok(BotLimitsConfig { bot, pipeline, limits })
}

/// A rate, or `None` for an empty text.
pub(super) fn rate(read: &Reader<'_>, key: &str) -> Result<Option<Rate>, ConfigError> {
    limit(read, key)
}

fn limit<T: std::str::FromStr<Err: std::fmt::Display>>(
    read: &Reader<'_>,
    key: &str,
) -> Result<Option<T>, ConfigError> {
    match read.text(key) {
        "" => Ok(None),
        text => text
            .parse()
            .map(Some)
            .map_err(|error| read.invalid(key, format_args!("is {text:?}; {error}"))),
    }
}
