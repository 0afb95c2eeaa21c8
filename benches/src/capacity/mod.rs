//! `fairlane-bench plan`: what a load needs of Redis, Fairlane and MongoDB, from a measured model.
//!
//! Machines differ, and a shared one changes its speed. So the model is relative: it counts in
//! multiples of a yardstick, which is measured on the machine in the same run. `--check` measures
//! some loads on this machine and compares them with the model.

mod check;
mod measure;
mod model;

use fairlane::sandbox::Rig;
use serde::Serialize;

pub(crate) use self::check::{Check, check};
pub(crate) use self::measure::Shape;
use self::model::Density;
use crate::error::BenchError;
use crate::probe;

/// Largest number of primaries that is suggested.
const PRIMARIES_MAX: u32 = 1_000;
const MINUTE: f64 = 60.0;
/// Seconds of Redis' core in a µs.
const MICRO: f64 = 1e-6;

/// The wanted load.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Wanted {
    pub(crate) events_per_second: f64,
    /// Bots with events.
    pub(crate) bots: u64,
    /// Size of an event's JSON.
    pub(crate) bytes: u32,
    /// Primaries of Redis.
    pub(crate) primaries: u32,
    /// `redis.shards`.
    pub(crate) shards: u32,
    /// Share of a primary's core that may be used, 0 to 1.
    pub(crate) utilisation: f64,
    /// How long handlers or receivers are unavailable.
    pub(crate) outage_minutes: u32,
    /// `bus.retention`.
    pub(crate) retention_minutes: u32,
    /// Scheduled notifications.
    pub(crate) notifications: u64,
    pub(crate) notifications_per_second: f64,
    /// Rules of all bots together.
    pub(crate) rules: u64,
    /// Events for which rules are evaluated.
    pub(crate) rule_events_per_second: f64,
}

/// Where a figure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    /// Measured on this machine in this run.
    Measured,
    /// Named by the user.
    Given,
    /// The model, within what it was fitted to.
    Model,
    /// The model, beyond what it was fitted to.
    Extrapolated,
    /// A bound of the configuration.
    Configuration,
}

/// One figure.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) source: Source,
}

/// What the load needs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Plan {
    pub(crate) wanted: Wanted,
    pub(crate) lines: Vec<Line>,
    /// Whether one primary suffices.
    pub(crate) one_suffices: bool,
    /// Whether the wanted primaries suffice.
    pub(crate) fits: bool,
    /// The smallest number that suffices. `None`: no number does.
    pub(crate) primaries_needed: Option<u32>,
}

/// The yardstick on this machine, µs.
///
/// # Errors
/// If the private Redis fails.
pub(crate) async fn yardstick() -> Result<f64, BenchError> {
    Rig::with(async |rig| {
        // The first round warms up.
        probe::yardstick(rig).await?;
        probe::yardstick(rig).await
    })
    .await
}

/// Computes the plan. `yardstick`: in µs, and where it comes from.
pub(crate) fn plan(wanted: Wanted, yardstick: (f64, Source)) -> Plan {
    let (yardstick, yardstick_source) = yardstick;
    let mut lines = Lines { all: Vec::new(), source: source(&wanted, 1) };
    lines.add_as("yardstick", yardstick, "µs", yardstick_source);
    redis(&mut lines, &wanted, yardstick);
    memory(&mut lines, &wanted);
    others(&mut lines, &wanted, yardstick);
    let suffices = |primaries| load(&wanted, primaries, yardstick) <= wanted.utilisation;
    Plan {
        wanted,
        lines: lines.all,
        one_suffices: suffices(1),
        fits: suffices(wanted.primaries),
        // More primaries than shards gain nothing.
        primaries_needed: (1..=PRIMARIES_MAX.min(wanted.shards)).find(|number| suffices(*number)),
    }
}

struct Lines {
    all: Vec<Line>,
    /// The usual source.
    source: Source,
}

impl Lines {
    fn add(&mut self, name: &'static str, value: f64, unit: &'static str) {
        self.add_as(name, value, unit, self.source);
    }

    fn add_as(&mut self, name: &'static str, value: f64, unit: &'static str, source: Source) {
        self.all.push(Line { name, value, unit, source });
    }
}

/// Whether the model was fitted to such a load.
fn source(wanted: &Wanted, primaries: u32) -> Source {
    let is_measured =
        f64::from(wanted.bytes) <= model::BYTES_MEASURED && primaries <= model::PRIMARIES_MEASURED;
    if is_measured { Source::Model } else { Source::Extrapolated }
}

/// Share of the core of the busiest of some primaries, if Redis is fully loaded.
fn load(wanted: &Wanted, primaries: u32, yardstick: f64) -> f64 {
    let bytes = f64::from(wanted.bytes);
    let event = model::busiest(flow(wanted), bytes, primaries, wanted.shards);
    // They are in shards, too.
    let other = wanted.notifications_per_second * model::NOTIFICATION
        + wanted.rule_events_per_second * model::RULE_EVENT;
    let other = other * model::busiest_share(wanted.shards, primaries);
    (wanted.events_per_second * event + other) * yardstick * MICRO
}

#[expect(clippy::cast_precision_loss, reason = "a number of bots")]
fn flow(wanted: &Wanted) -> Density {
    Density::of_flow(wanted.bots as f64)
}

/// The processor time of Redis.
#[expect(clippy::cast_precision_loss, reason = "a number of bots")]
fn redis(lines: &mut Lines, wanted: &Wanted, yardstick: f64) {
    let (rate, bots, bytes) =
        (wanted.events_per_second, wanted.bots as f64, f64::from(wanted.bytes));
    let (density, primaries) = (flow(wanted), wanted.primaries);
    let here = source(wanted, primaries);
    lines.add("events per visit", density.per_visit, "events");
    let event = (model::write(bytes) + model::handle(density, bytes)) * yardstick;
    lines.add("Redis per event, full load", event, "µs");
    lines.add("one primary: needed share", load(wanted, 1, yardstick) * 100.0, "%");
    // Above the measured rates, calls carry more events than the model knows.
    if model::RATES_MEASURED.contains(&rate) {
        let at_rate = model::at_rate(density, bytes, rate) * yardstick;
        lines.add("Redis per event, at this rate", at_rate, "µs");
        let seen = (at_rate * rate * MICRO).min(1.0) * 100.0;
        lines.add("one primary: share that you see", seen, "%");
    }
    lines.add("one primary: maximum rate", most(wanted, 1, yardstick), "events/s");
    if primaries > 1 {
        let share = load(wanted, primaries, yardstick) * 100.0;
        lines.add_as("busiest primary: needed share", share, "%", here);
        let most = most(wanted, primaries, yardstick);
        lines.add_as("all primaries: maximum rate", most, "events/s", here);
    }
    let backlog = rate * f64::from(wanted.outage_minutes) * MINUTE;
    if backlog > 0.0 {
        let density = Density::of_backlog(bots, backlog / bots);
        let event = model::busiest(density, bytes, primaries, wanted.shards);
        let capacity = wanted.utilisation / (event * yardstick * MICRO);
        lines.add_as("backlog: events per visit", density.per_visit, "events", here);
        // Fewer than the events that arrive: the backlog never ends.
        let minutes = backlog / (capacity - rate).max(0.0) / MINUTE;
        lines.add_as("backlog: drained in", minutes, "min", here);
    }
}

/// The rate of events at which the busiest primary has the wanted utilisation. Notifications and
/// rules stay as wanted.
fn most(wanted: &Wanted, primaries: u32, yardstick: f64) -> f64 {
    let rest = load(&Wanted { events_per_second: 0.0, ..*wanted }, primaries, yardstick);
    let event = load(&Wanted { events_per_second: 1.0, ..*wanted }, primaries, yardstick) - rest;
    (wanted.utilisation - rest).max(0.0) / event
}

/// The memory of Redis.
#[expect(clippy::cast_precision_loss, reason = "counts of a plan")]
fn memory(lines: &mut Lines, wanted: &Wanted) {
    const MB: f64 = 1e6;
    let (rate, bots, bytes) =
        (wanted.events_per_second, wanted.bots as f64, f64::from(wanted.bytes));
    let bus = rate * f64::from(wanted.retention_minutes) * MINUTE * model::bus_bytes(bytes);
    let events = rate * f64::from(wanted.outage_minutes) * MINUTE;
    let queues = model::queue_bytes(bots, events, bytes);
    let notifications = wanted.notifications as f64 * model::NOTIFICATION_BYTES;
    lines.add("memory: bus, its retention", bus / MB, "MB");
    lines.add("memory: queues after the outage", queues / MB, "MB");
    lines.add("memory: notifications", notifications / MB, "MB");
    lines.add_as(
        "memory: attempts of a pipeline, at most",
        model::HISTORY_BYTES / MB,
        "MB",
        Source::Configuration,
    );
    let divided = queues + notifications + model::HISTORY_BYTES;
    let share = model::busiest_share(wanted.shards, wanted.primaries);
    let all = (bus + divided) / MB;
    lines.add("memory: all", all, "MB");
    let here = source(wanted, wanted.primaries);
    lines.add_as("memory: busiest primary", (bus + divided * share) / MB, "MB", here);
    let (received, sent) = model::network(flow(wanted), bytes);
    lines.add("network: Redis receives", rate * received / MB, "MB/s");
    lines.add("network: Redis sends", rate * sent / MB, "MB/s");
}

/// What Fairlane and MongoDB need.
#[expect(clippy::cast_precision_loss, reason = "a number of rules")]
fn others(lines: &mut Lines, wanted: &Wanted, yardstick: f64) {
    let (rate, bytes) = (wanted.events_per_second, f64::from(wanted.bytes));
    let cores = |yardsticks: f64| yardsticks * yardstick * MICRO;
    let events = cores(rate * model::own(flow(wanted), bytes));
    lines.add("Fairlane without its handlers", events, "cores");
    lines.add("of it, the reader of the bus", cores(rate * model::own_copy(bytes)), "cores");
    if wanted.rule_events_per_second > 0.0 {
        let rules = wanted.rule_events_per_second;
        lines.add("Fairlane: rules", cores(rules * model::OWN_RULE_EVENT), "cores");
        lines.add("MongoDB: rules", cores(rules * model::MONGO_RULE_EVENT), "cores");
    }
    if wanted.rules > 0 {
        let reading = cores(wanted.rules as f64 * model::MONGO_RULE);
        lines.add("MongoDB: reading all rules, per process", reading, "core-seconds");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted {
        events_per_second: 10_000.0,
        bots: 50_000,
        bytes: 200,
        primaries: 1,
        shards: 64,
        utilisation: 0.6,
        outage_minutes: 10,
        retention_minutes: 10,
        notifications: 0,
        notifications_per_second: 0.0,
        rules: 0,
        rule_events_per_second: 0.0,
    };

    fn with(wanted: Wanted) -> Plan {
        plan(wanted, (1.25, Source::Given))
    }

    fn line<'a>(plan: &'a Plan, name: &str) -> &'a Line {
        plan.lines.iter().find(|line| line.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    #[test]
    fn the_share_of_a_core_grows_with_the_rate_and_with_the_yardstick() {
        let share = |plan: &Plan| line(plan, "one primary: needed share").value;
        let once = share(&with(WANTED));
        let twice = share(&with(Wanted { events_per_second: 20_000.0, ..WANTED }));
        let slow = share(&plan(WANTED, (2.5, Source::Given)));
        assert!(once > 0.0 && (twice / once - 2.0).abs() < 1e-9, "{once} {twice}");
        assert!((slow / once - 2.0).abs() < 1e-9, "{once} {slow}");
    }

    #[test]
    fn at_its_maximum_rate_a_primary_is_used_as_wanted() {
        let busy = Wanted { notifications_per_second: 100.0, ..WANTED };
        let most = line(&with(busy), "one primary: maximum rate").value;
        let share = |rate| {
            let plan = with(Wanted { events_per_second: rate, ..busy });
            (line(&plan, "one primary: needed share").value, plan.one_suffices)
        };
        assert!((share(most).0 - 60.0).abs() < 1e-6, "{most}");
        assert_eq!((share(most * 0.999).1, share(most * 1.001).1), (true, false));
    }

    #[test]
    fn the_suggested_number_of_primaries_is_the_smallest_that_suffices() {
        let mut last = 0;
        for rate in [10_000.0, 50_000.0, 100_000.0] {
            let wanted = Wanted { events_per_second: rate, ..WANTED };
            let Some(needed) = with(wanted).primaries_needed else { panic!("{rate}: none") };
            assert!(
                needed >= last && with(Wanted { primaries: needed, ..wanted }).fits,
                "{needed}"
            );
            let fewer = Wanted { primaries: needed - 1, ..wanted };
            assert!(needed == 1 || !with(fewer).fits, "{rate}: {needed}");
            last = needed;
        }
        assert!(last > 1);
        let bus_alone = with(Wanted { events_per_second: 1e8, ..WANTED });
        assert_eq!(bus_alone.primaries_needed, None);
        assert!(!bus_alone.fits);
    }

    #[test]
    fn memory_is_the_bus_and_the_backlog_and_the_notifications() {
        let plan = with(Wanted { notifications: 1_000_000, ..WANTED });
        let value = |name| line(&plan, name).value;
        let events = 10_000.0 * 600.0;
        let near = |name, bytes: f64| {
            let value = value(name);
            assert!((value * 1e6 / bytes - 1.0).abs() < 1e-9, "{name}: {value} of {bytes}");
        };
        near("memory: bus, its retention", events * model::bus_bytes(200.0));
        near("memory: queues after the outage", model::queue_bytes(50_000.0, events, 200.0));
        near("memory: notifications", 1e6 * model::NOTIFICATION_BYTES);
        let parts = ["bus, its retention", "queues after the outage", "notifications"]
            .map(|part| plan.lines.iter().find(|line| line.name.ends_with(part)).map(|l| l.value));
        let parts: f64 = parts.into_iter().flatten().sum();
        let all = value("memory: all");
        assert!((parts + model::HISTORY_BYTES / 1e6 - all).abs() < 1e-6, "{parts} {all}");
        assert!((value("memory: busiest primary") - all).abs() < 1e-6, "one has everything");
    }

    #[test]
    fn a_backlog_ends_only_if_redis_has_capacity_left() {
        let drained = |rate| {
            let plan = with(Wanted { events_per_second: rate, ..WANTED });
            line(&plan, "backlog: drained in").value
        };
        assert!(drained(1_000.0).is_finite() && drained(1_000.0) < drained(10_000.0));
        assert!(drained(1e6).is_infinite());
        let none = with(Wanted { outage_minutes: 0, ..WANTED });
        assert!(none.lines.iter().all(|line| !line.name.starts_with("backlog")));
    }

    #[test]
    fn figures_that_were_not_measured_are_called_extrapolated() {
        let source = |wanted, name| line(&with(wanted), name).source;
        let event = "Redis per event, full load";
        assert_eq!(source(WANTED, event), Source::Model);
        assert_eq!(source(Wanted { bytes: 500_000, ..WANTED }, event), Source::Extrapolated);
        let many = Wanted { primaries: 50, ..WANTED };
        assert_eq!(source(many, event), Source::Model);
        assert_eq!(source(many, "busiest primary: needed share"), Source::Extrapolated);
        assert_eq!(source(WANTED, "yardstick"), Source::Given);
        let seen = |rate| {
            let plan = with(Wanted { events_per_second: rate, ..WANTED });
            plan.lines.iter().any(|line| line.name == "one primary: share that you see")
        };
        assert!(seen(5_000.0) && !seen(5_001.0), "no low rate was measured above that");
    }
}
