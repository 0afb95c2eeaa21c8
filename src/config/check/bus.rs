//! `[bus]`.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Fault;
use super::bounds::{TEN_YEARS, WEEK, names, within};
use super::sources::key_of;
use crate::config::{BusConfig, Config, SOURCES, SourceKind};

const STREAMS_MAX: usize = 64;

impl Config {
    pub(super) fn check_bus(&self) -> Result<(), Fault> {
        let bus = &self.bus;
        within("bus.retention", bus.retention, Duration::ZERO..=TEN_YEARS)?;
        within("bus.dedup", bus.dedup, Duration::ZERO..=WEEK)?;
        names("bus.streams", &bus.streams, STREAMS_MAX, "stream")?;
        if bus.streams.is_empty() && bus.sources.is_empty() {
            let remedy = "name at least one stream, or add a source ([[bus.sources]])";
            return Err(Fault::new("bus.streams", format!("is empty; {remedy}")));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = bus.streams.iter().find(|stream| !seen.insert(*stream)) {
            return Err(Fault::new(
                "bus.streams",
                format!("names {twice:?} twice; name each stream once"),
            ));
        }
        // Reading that stream would copy unreadable events back to it forever.
        let invalid = self.redis.prefix.invalid_stream();
        if bus.streams.contains(&invalid) {
            let problem = format!("names {invalid:?}, where unreadable events are put; remove it");
            return Err(Fault::new("bus.streams", problem));
        }
        self.check_sources()?;
        check_names(bus)?;
        check_publish(bus)
    }
}

/// Positions of streams and sources are stored side by side, and `bus.publish` names either.
fn check_names(bus: &BusConfig) -> Result<(), Fault> {
    for (place, source) in bus.sources.iter().enumerate() {
        if bus.streams.contains(&source.name) {
            let problem = format!("is {:?}, as is one of bus.streams; rename it", source.name);
            return Err(Fault::new(key_of(place, "name"), problem).or("bus.streams"));
        }
        let prefix = source.log_prefix();
        if let Some(stream) = bus.streams.iter().find(|stream| stream.starts_with(&prefix)) {
            let problem = format!(
                "names {stream:?}, but positions of the source {:?} are stored under such names; rename the source",
                source.name
            );
            return Err(Fault::new("bus.streams", problem).or(key_of(place, "name")));
        }
    }
    Ok(())
}

fn check_publish(bus: &BusConfig) -> Result<(), Fault> {
    if bus.published_stream().is_some() {
        return Ok(());
    }
    let Some(source) = bus.published_source() else {
        let known: Vec<_> =
            bus.sources.iter().map(|source| &source.name).chain(&bus.streams).collect();
        let problem = format!(
            "is {:?}, which is neither in bus.streams nor the name of a source; write one of {known:?}",
            bus.published()
        );
        return Err(Fault::new("bus.publish", problem).or(SOURCES));
    };
    if let SourceKind::Nats(nats) = &source.kind
        && nats.publish_subject.is_none()
    {
        let place = bus.sources.iter().position(|other| other.name == source.name).unwrap_or(0);
        let problem = "is not set, but HTTP and rules publish to this source (bus.publish); write a subject of the stream, such as \"events.{bot}\"";
        return Err(Fault::new(key_of(place, "publish_subject"), problem).or("bus.publish"));
    }
    Ok(())
}
