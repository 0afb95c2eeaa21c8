//! The arguments of `fairlane-bench plan`, and its tables.

use std::fmt::Write as _;

use clap::Args;
use fairlane::cli::{Output, Table};

use crate::capacity::{self, Check, Plan, Shape, Source, Wanted};
use crate::error::CommandError;

pub(super) const EXAMPLES: &str = "\
Examples:
  fairlane-bench plan --events-per-second 20000 --bots 50000
  fairlane-bench plan --events-per-second 100000 --bots 1000000 --bytes 1000 --primaries 3 --json
  fairlane-bench plan --events-per-second 5000 --bots 1000 --notifications 1000000 \\
    --notifications-per-second 200 --rules 20000 --rule-events-per-second 500
  fairlane-bench plan --events-per-second 20000 --bots 50000 --yardstick 2.4
  fairlane-bench plan --check
  fairlane-bench plan --check --shape 20000x10x200 --shape 2000x10x5000 --rounds 3 --json

The yardstick is the time that Redis needs for one step of a script: an RPUSH of 200 bytes and an HINCRBY.
The plan measures it on this machine, on a private Redis. Exit code 1: the primaries do not suffice, or the model deviates.";

/// Arguments of `fairlane-bench plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Events per second of all bots together.
    #[arg(long, value_name = "EVENTS_PER_S", value_parser = rate)]
    events_per_second: Option<f64>,
    /// Number of bots that have events.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    bots: Option<u64>,
    /// Size of an event's JSON on the bus.
    #[arg(long, value_name = "BYTES", default_value = "200", conflicts_with = "check",
        value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    bytes: u32,
    /// Primaries of Redis: 1, or those of a cluster.
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "check",
        value_parser = clap::value_parser!(u32).range(1..=1_000))]
    primaries: u32,
    /// `redis.shards`.
    #[arg(long, value_name = "N", default_value = "16", conflicts_with = "check",
        value_parser = clap::value_parser!(u32).range(1..=1_024))]
    shards: u32,
    /// Share of a primary's core that may be used. The rest is for peaks and failures.
    #[arg(long, value_name = "PERCENT", default_value = "60", conflicts_with = "check",
        value_parser = clap::value_parser!(u32).range(1..=100))]
    utilisation: u32,
    /// How long handlers or receivers are unavailable, while events come in. Their events then wait.
    #[arg(long, value_name = "MINUTES", default_value = "10", conflicts_with = "check",
        value_parser = clap::value_parser!(u32).range(0..=100_000))]
    outage: u32,
    /// `bus.retention`.
    #[arg(long, value_name = "MINUTES", default_value = "10", conflicts_with = "check",
        value_parser = clap::value_parser!(u32).range(0..=5_256_000))]
    retention: u32,
    /// Number of notifications that are scheduled and not yet sent.
    #[arg(long, value_name = "N", default_value = "0", conflicts_with = "check",
        value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    notifications: u64,
    /// Notifications sent per second.
    #[arg(long, value_name = "PER_S", default_value = "0", conflicts_with = "check",
        value_parser = rate_or_none)]
    notifications_per_second: f64,
    /// Number of rules of all bots together.
    #[arg(long, value_name = "N", default_value = "0", conflicts_with = "check",
        value_parser = clap::value_parser!(u64).range(0..=100_000_000))]
    rules: u64,
    /// Events per second of the types that rules are about.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "0", conflicts_with = "check",
        value_parser = rate_or_none)]
    rule_events_per_second: f64,
    /// The yardstick in µs, such as that of another machine. Default: measured on this machine.
    #[arg(long, value_name = "US", conflicts_with = "check", value_parser = yardstick)]
    yardstick: Option<f64>,
    /// Measure some loads on this machine, and compare the model with them.
    #[arg(long, conflicts_with_all = ["events_per_second", "bots"])]
    check: bool,
    /// With --check: bots x events per bot x bytes per event. Can be repeated.
    #[arg(long, value_name = "BOTSxEVENTSxBYTES", conflicts_with = "events_per_second",
        value_parser = shape, default_values = ["1000x200x200", "20000x10x200", "200000x1x200"])]
    shape: Vec<Shape>,
    /// With --check: number of rounds. Figures are medians.
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "events_per_second",
        value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

impl PlanArgs {
    /// The wanted load. `None`: check the model instead.
    ///
    /// # Errors
    /// If the arguments contradict each other.
    fn wanted(&self) -> Result<Option<Wanted>, CommandError> {
        let (events_per_second, bots) = match (self.events_per_second, self.bots) {
            _ if self.check => return Ok(None),
            (Some(rate), Some(bots)) => (rate, bots),
            _ => return Err(CommandError::NoLoad),
        };
        let Self { primaries, shards, .. } = *self;
        if primaries > shards {
            return Err(CommandError::FewShards { primaries, shards });
        }
        if self.rule_events_per_second > events_per_second {
            return Err(CommandError::ManyRuleEvents {
                rules: self.rule_events_per_second,
                all: events_per_second,
            });
        }
        Ok(Some(Wanted {
            events_per_second,
            bots,
            bytes: self.bytes,
            primaries,
            shards,
            utilisation: f64::from(self.utilisation) / 100.0,
            outage_minutes: self.outage,
            retention_minutes: self.retention,
            notifications: self.notifications,
            notifications_per_second: self.notifications_per_second,
            rules: self.rules,
            rule_events_per_second: self.rule_events_per_second,
        }))
    }

    /// Plans or checks, and prints the result.
    ///
    /// # Errors
    /// If a server fails, the primaries do not suffice, or the model deviates.
    pub(super) async fn run(
        self,
        json: bool,
        watch: impl FnMut(&'static str, u64),
        done: impl FnOnce(),
    ) -> Result<(), CommandError> {
        let Some(wanted) = self.wanted()? else {
            let rounds = usize::try_from(self.rounds).unwrap_or(usize::MAX);
            let check = Box::pin(capacity::check(&self.shape, rounds, watch)).await?;
            done();
            return print_check(json, &check);
        };
        let yardstick = match self.yardstick {
            Some(given) => (given, Source::Given),
            None => (Box::pin(capacity::yardstick()).await?, Source::Measured),
        };
        done();
        print_plan(json, &capacity::plan(wanted, yardstick))
    }
}

fn print_plan(json: bool, plan: &Plan) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(plan, |plan| {
        let mut table = Table::new(&["FIGURE", ">VALUE", "UNIT", "SOURCE"]);
        for line in &plan.lines {
            table.row(&[
                line.name.to_owned(),
                number(line.value),
                line.unit.to_owned(),
                source(line.source).to_owned(),
            ]);
        }
        format!("{}\n\n{}", output.table(&table), verdict(plan))
    })?;
    let Wanted { primaries, shards, .. } = plan.wanted;
    if plan.fits { Ok(()) } else { Err(CommandError::FewPrimaries { primaries, shards }) }
}

/// The answer in sentences.
fn verdict(plan: &Plan) -> String {
    let percent = plan.wanted.utilisation * 100.0;
    let one = if plan.one_suffices { "One primary suffices" } else { "One primary is too small" };
    let mut text = format!("{one} at {percent:.0} % of its core.");
    match plan.primaries_needed {
        Some(1) => {}
        Some(needed) => {
            let _ = write!(text, " A cluster of {needed} primaries suffices.");
        }
        None => {
            let _ = write!(
                text,
                " No cluster suffices with {} shards and one stream. Set redis.shards higher, and divide the events over several bus.streams.",
                plan.wanted.shards
            );
        }
    }
    text
}

fn source(source: Source) -> &'static str {
    match source {
        Source::Measured => "measured now",
        Source::Given => "given",
        Source::Model => "model",
        Source::Extrapolated => "model, extrapolated",
        Source::Configuration => "configuration",
    }
}

/// A number with three or more digits that matter.
fn number(value: f64) -> String {
    match value {
        value if !value.is_finite() => "never".to_owned(),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

fn print_check(json: bool, check: &Check) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(check, |check| {
        let mut table = Table::new(&[
            "LOAD",
            "FIGURE",
            ">MODEL",
            ">MEASURED",
            ">LEAST",
            ">MOST",
            "UNIT",
            ">DEVIATION",
            "JUDGED",
        ]);
        for figure in &check.figures {
            let judged = match (figure.is_judged, figure.is_within()) {
                (false, _) => "",
                (true, true) => "within 20 %",
                (true, false) => "outside",
            };
            table.row(&[
                format!("{}x{}x{}", figure.bots, figure.events_per_bot, figure.bytes),
                figure.name.to_owned(),
                number(figure.model),
                number(figure.measured),
                number(figure.least),
                number(figure.most),
                figure.unit.to_owned(),
                format!("{:+.0} %", figure.deviation * 100.0),
                judged.to_owned(),
            ]);
        }
        output.table(&table)
    })?;
    let missed = check.missed().count();
    if missed > 0 { Err(CommandError::ModelDeviates(missed)) } else { Ok(()) }
}

/// Parses a rate above zero.
fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok().filter(|rate| (0.001..=1e8).contains(rate));
    rate.ok_or("write a number from 0.001 to 100000000")
}

fn rate_or_none(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok().filter(|rate| (0.0..=1e8).contains(rate));
    rate.ok_or("write a number from 0 to 100000000")
}

fn yardstick(text: &str) -> Result<f64, &'static str> {
    let yardstick = text.parse().ok().filter(|us| (0.05..=100.0).contains(us));
    yardstick.ok_or("write µs from 0.05 to 100, as `fairlane-bench plan` prints them")
}

/// Parses `BOTSxEVENTSxBYTES`.
fn shape(text: &str) -> Result<Shape, &'static str> {
    const EVENTS_MAX: usize = 5_000_000;
    const BYTES_MAX: usize = 1 << 30;
    let mistake = "write BOTSxEVENTSxBYTES, such as 20000x10x200: at least 1x1x100, and at most \
        5000000 events and 1 GiB in all";
    let parts: Result<Vec<usize>, _> = text.split('x').map(str::parse).collect();
    let Ok(&[bots, events_per_bot, bytes]) = parts.as_deref() else { return Err(mistake) };
    let events =
        bots.checked_mul(events_per_bot).filter(|events| (1..=EVENTS_MAX).contains(events));
    let all = events.and_then(|events| events.checked_mul(bytes));
    let is_legal = bytes >= 100 && all.is_some_and(|all| all <= BYTES_MAX);
    if is_legal { Ok(Shape { bots, events_per_bot, bytes }) } else { Err(mistake) }
}
