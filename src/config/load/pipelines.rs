//! `[pipelines.NAME]`.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{
    BackoffConfig, ConfigError, DeadConfig, OnOverflow, OrderBy, PipelineConfig, Start,
    WorkersConfig,
};
use crate::history::History;
use crate::outbound::{CheckedUrl, Policy};

pub(super) fn pipeline(read: &Reader<'_>) -> Result<PipelineConfig, ConfigError> {
    Ok(PipelineConfig {
        enabled: read.flag("enabled"),
        handler: read.text("handler").to_owned(),
        events: read.list("events"),
        start: read.choice("start", &[("new", Start::New), ("earliest", Start::Earliest)])?,
        filter: Some(read.text("filter").to_owned()).filter(|text| !text.trim().is_empty()),
        url: url(read)?,
        batch: read.positive("batch", limits::BATCH)?,
        slice_time: read.duration("slice_time")?,
        lease_ttl: read.duration("lease_ttl")?,
        handler_timeout: read.duration("handler_timeout")?,
        workers: WorkersConfig {
            min: read.positive("workers.min", limits::WORKERS)?,
            max: read.positive("workers.max", limits::WORKERS)?,
        },
        max_attempts: read.positive("max_attempts", limits::ATTEMPTS)?,
        backoff: BackoffConfig {
            initial: read.duration("backoff.initial")?,
            max: read.duration("backoff.max")?,
            jitter: read.fraction("backoff.jitter"),
        },
        linger: read.duration("linger")?,
        max_queue: NonZeroU64::new(read.number("max_queue", (0, limits::QUEUE))?),
        on_overflow: read.choice(
            "on_overflow",
            &[("dead", OnOverflow::Dead), ("drop_new", OnOverflow::DropNew)],
        )?,
        order_by: OrderBy::parse(read.text("order_by")),
        concurrency: read.positive("concurrency", limits::CONCURRENCY)?,
        rate: super::limits::rate(read, "rate")?,
        burst: NonZeroU32::new(read.count("burst", (0, limits::BURST))?),
        total_rate: super::limits::rate(read, "total_rate")?,
        total_concurrency: NonZeroUsize::new(
            read.count("total_concurrency", (0, limits::TOTAL_CONCURRENCY))?,
        ),
        max_age: Some(read.duration("max_age")?).filter(|age| !age.is_zero()),
        dead: DeadConfig {
            max: read.positive("dead.max", limits::DEAD)?,
            keep: read.duration("dead.keep")?,
        },
        history: History {
            slices: read.count("history.slices", (0, limits::HISTORY))?,
            keep: read.duration("history.keep")?,
            max_bytes: read.number("history.max_bytes", limits::HISTORY_BYTES)?,
        },
    })
}

fn url(read: &Reader<'_>) -> Result<Option<CheckedUrl>, ConfigError> {
    match read.text("url") {
        "" => Ok(None),
        text => CheckedUrl::parse(text, &Policy::Operator)
            .map(Some)
            .map_err(|error| read.invalid("url", error)),
    }
}
