//! The figures, and whether each is within its bound.

use std::collections::{BTreeMap, BTreeSet};

use fairlane::sandbox::quantile_ms;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::Options;
use super::receiver::Arrived;

/// Duration of a window, in seconds; shorter in a short run.
const WINDOW: u64 = 5;
/// The least and the most that a bot may get in a window, relative to its rate.
const LEAST: f64 = 0.98;
const MOST: f64 = 1.005;
/// Events above the bucket: one may reach the receiver a little later than it got its token.
const ABOVE: f64 = 2.0;
/// The waits of quiet bots: this many times those alone, or this much above, in ms.
const RATIO: f64 = 1.5;
const ABOVE_MS: f64 = 25.0;
/// Scripts while all bots wait: this many times those while idle, and this many above. The sampler of
/// metrics has a part in both, at times of its own. A poll of each waiting bot would exceed it by far.
const SCRIPTS_RATIO: f64 = 1.25;
const SCRIPTS_ABOVE: f64 = 2.0;
/// A bot whose events rest for this long from the kill on was interrupted by it, µs.
const INTERRUPTED_US: u64 = 500_000;
/// Events of a killed process may arrive this long after the kill, µs.
const AFTERMATH_US: u64 = 100_000;

/// Calls a second by command.
pub(super) type Rates = BTreeMap<String, f64>;

/// What was measured.
pub(super) struct Measured {
    pub(super) limited: BTreeMap<String, Arrived>,
    /// When the pipeline was resumed.
    pub(super) begun_us: u64,
    /// When a process was killed.
    pub(super) killed_us: u64,
    pub(super) idle_commands: Rates,
    pub(super) parked_commands: Rates,
    pub(super) paused_commands: Rates,
    pub(super) alone: Histogram<u64>,
    pub(super) beside: Histogram<u64>,
    pub(super) after_kill: Histogram<u64>,
    /// Number of events of quiet bots that never arrived.
    pub(super) lost: u64,
    pub(super) sender_late_max_ms: f64,
}

/// A figure and its bound.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) measured: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) least: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) most: Option<f64>,
    /// Absent: the figure has no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) held: Option<bool>,
}

impl Figure {
    fn within(name: &'static str, measured: f64, least: Option<f64>, most: Option<f64>) -> Self {
        let held =
            least.is_none_or(|least| measured >= least) && most.is_none_or(|most| measured <= most);
        Self { name, measured, least, most, held: Some(held) }
    }

    fn free(name: &'static str, measured: f64) -> Self {
        Self { name, measured, least: None, most: None, held: None }
    }
}

/// One bot with a rate.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct OfBot {
    pub(crate) bot: String,
    pub(crate) events: usize,
    pub(crate) least_per_second: f64,
    pub(crate) most_per_second: f64,
    /// When the window with the most began, relative to the kill.
    pub(crate) most_after_kill_seconds: f64,
    pub(crate) above_bucket: f64,
    pub(crate) reordered: u64,
    pub(crate) repeated: u64,
    /// How long the kill stopped its events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rest_seconds: Option<f64>,
}

/// Calls of a command a second.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Calls {
    pub(crate) command: String,
    pub(crate) idle: f64,
    /// While all bots wait for their next token.
    pub(crate) parked: f64,
    /// With the same events in a paused pipeline.
    pub(crate) paused: f64,
}

impl Calls {
    fn all(measured: &Measured) -> Vec<Self> {
        let rates = [&measured.idle_commands, &measured.parked_commands, &measured.paused_commands];
        let names: BTreeSet<&String> = rates.iter().flat_map(|rates| rates.keys()).collect();
        let calls = |command: &String| {
            let [idle, parked, paused] =
                rates.map(|rates| rates.get(command).copied().unwrap_or_default());
            Self { command: command.clone(), idle, parked, paused }
        };
        let all = names.into_iter().map(calls);
        all.filter(|calls| calls.idle + calls.parked + calls.paused > 0.0).collect()
    }
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) bots: u64,
    pub(crate) rate: u64,
    pub(crate) seconds: u64,
    pub(crate) processes: usize,
    pub(crate) window_seconds: u64,
    /// How late the bench itself sent an event, at most. The rate of a window shows it too.
    pub(crate) sender_late_max_ms: f64,
    pub(crate) figures: Vec<Figure>,
    pub(crate) per_command: Vec<Calls>,
    pub(crate) per_bot: Vec<OfBot>,
}

impl Report {
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    pub(super) fn new(options: Options, measured: &Measured) -> Self {
        let Options { bots, rate, seconds, processes } = options;
        let window_seconds = WINDOW.min(seconds / 3).max(1);
        let until_us = measured.begun_us + seconds * 1_000_000;
        let per_bot: Vec<OfBot> = measured
            .limited
            .iter()
            .map(|(bot, arrived)| {
                let mut times = arrived.times_us.clone();
                times.retain(|at| *at <= until_us);
                let mut of = of_bot(&times, rate, window_seconds, measured.killed_us);
                of.bot.clone_from(bot);
                (of.reordered, of.repeated) = (arrived.reordered, arrived.repeated);
                of
            })
            .collect();
        let missing = bots.saturating_sub(per_bot.len() as u64);
        let least = per_bot.iter().map(|bot| bot.least_per_second).fold(f64::INFINITY, f64::min);
        let least = if missing > 0 { 0.0 } else { least };
        let most = |of: fn(&OfBot) -> f64| per_bot.iter().map(of).fold(0.0, f64::max);
        let sum = |of: fn(&OfBot) -> u64| per_bot.iter().map(of).sum::<u64>() as f64;
        let rate_of = |part: f64| Some(rate as f64 * part);
        let quiet = |waits: &Histogram<u64>| quantile_ms(waits, 0.99);
        let (alone, beside) = (quiet(&measured.alone), quiet(&measured.beside));
        let sums = [&measured.idle_commands, &measured.parked_commands, &measured.paused_commands];
        let [idle, parked, paused] = sums.map(|rates| rates.values().sum::<f64>());
        // Claims, permits, promotions and copies are scripts.
        let scripts = |rates: &Rates| rates.get("evalsha").copied().unwrap_or_default();
        let idle_scripts = scripts(&measured.idle_commands);
        let figures = vec![
            Figure::within("least events/s of a bot", least, rate_of(LEAST), None),
            Figure::within(
                "most events/s of a bot",
                most(|bot| bot.most_per_second),
                None,
                rate_of(MOST),
            ),
            Figure::within(
                "events above the bucket",
                most(|bot| bot.above_bucket),
                None,
                Some(ABOVE),
            ),
            Figure::within("events out of order", sum(|bot| bot.reordered), None, Some(0.0)),
            Figure::within(
                "quiet p99 ms beside",
                beside,
                None,
                Some((alone * RATIO).max(alone + ABOVE_MS)),
            ),
            Figure::free("quiet p99 ms alone", alone),
            Figure::within("quiet events lost", measured.lost as f64, None, Some(0.0)),
            Figure::within(
                "scripts/s while all wait",
                scripts(&measured.parked_commands),
                None,
                Some(idle_scripts * SCRIPTS_RATIO + SCRIPTS_ABOVE),
            ),
            Figure::free("scripts/s while idle", idle_scripts),
            // The sampler of metrics reads queues with events more often.
            Figure::free("commands/s while all wait", parked),
            Figure::free("commands/s while idle", idle),
            Figure::free("commands/s while all are paused", paused),
            Figure::free("events repeated by the kill", sum(|bot| bot.repeated)),
            Figure::free(
                "bots interrupted by the kill",
                sum(|bot| u64::from(bot.rest_seconds.is_some())),
            ),
            Figure::free(
                "longest rest of them, s",
                most(|bot| bot.rest_seconds.unwrap_or_default()),
            ),
            Figure::free("quiet max ms after the kill", quantile_ms(&measured.after_kill, 1.0)),
        ];
        let sender_late_max_ms = measured.sender_late_max_ms;
        let per_command = Calls::all(measured);
        Self {
            bots,
            rate,
            seconds,
            processes,
            window_seconds,
            sender_late_max_ms,
            figures,
            per_command,
            per_bot,
        }
    }

    /// The figures outside their bounds, in words.
    pub(crate) fn missed(&self) -> Vec<String> {
        let missed = self.figures.iter().filter(|figure| figure.held == Some(false));
        missed.map(|figure| format!("{} is {:.2}", figure.name, figure.measured)).collect()
    }
}

/// The figures of a bot whose events arrived at these times, in their order.
///
/// The rate of a window is the number of events from one to the first that comes at least a window
/// later, divided by the time between the two. So it does not depend on where a window begins between
/// two events.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
fn of_bot(times: &[u64], rate: u64, window_seconds: u64, killed_us: u64) -> OfBot {
    let seconds = |us: u64| us as f64 / 1e6;
    let rest = times.windows(2).map(|pair| (pair[0], pair[1])).find(|(from, to)| {
        to - from >= INTERRUPTED_US && *from <= killed_us + AFTERMATH_US && *to >= killed_us
    });
    let burst = usize::try_from(rate).unwrap_or(usize::MAX);
    let after = times.get(burst..).unwrap_or_default();
    let (mut least, mut most, mut to) = (f64::INFINITY, 0.0_f64, 0);
    let mut most_at = killed_us;
    for (from, begin) in after.iter().enumerate() {
        // Of events that came at once, the last.
        if after.get(from + 1) == Some(begin) {
            continue;
        }
        while to < after.len() && after[to] - begin < window_seconds * 1_000_000 {
            to += 1;
        }
        let Some(end) = after.get(to) else { break };
        if rest.is_some_and(|(rests, goes_on)| *begin <= goes_on && *end > rests) {
            continue;
        }
        let rate = (to - from) as f64 / seconds(end - begin);
        if rate > most {
            (most, most_at) = (rate, *begin);
        }
        least = least.min(rate);
    }
    let mut above = 0.0_f64;
    // The most that any start leaves for the events from it on.
    let mut best = f64::NEG_INFINITY;
    for (place, at) in times.iter().enumerate() {
        let level = place as f64 - rate as f64 * seconds(at - times[0]);
        best = best.max(-level);
        above = above.max(level + 1.0 + best - rate as f64);
    }
    // Without a window nothing is known, and nothing is promised.
    let least_per_second = if least.is_finite() { least } else { 0.0 };
    OfBot {
        bot: String::new(),
        events: times.len(),
        least_per_second,
        most_per_second: most,
        most_after_kill_seconds: most_at as f64 / 1e6 - seconds(killed_us),
        above_bucket: above,
        reordered: 0,
        repeated: 0,
        rest_seconds: rest.map(|(from, to)| seconds(to - from)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000;

    /// A burst of ten, then one every 100 ms.
    fn even(count: u64) -> Vec<u64> {
        std::iter::repeat_n(0, 10).chain((1..=count).map(|n| n * 100 * MS)).collect()
    }

    #[test]
    fn even_events_have_exactly_their_rate() {
        let bot = of_bot(&even(100), 10, 5, 60_000 * MS);
        assert!((bot.least_per_second - 10.0).abs() < 1e-9, "{bot:?}");
        assert!((bot.most_per_second - 10.0).abs() < 1e-9, "{bot:?}");
        assert!(bot.above_bucket.abs() < 1e-9 && bot.rest_seconds.is_none(), "{bot:?}");
    }

    #[test]
    fn events_above_the_bucket_and_a_faster_rate_show() {
        let mut times = even(100);
        times.splice(60..60, std::iter::repeat_n(times[60], 3));
        let bot = of_bot(&times, 10, 5, 60_000 * MS);
        assert!((bot.above_bucket - 3.0).abs() < 1e-9, "{bot:?}");
        assert!(bot.most_per_second > 10.5, "{bot:?}");
    }

    #[test]
    fn a_rest_counts_for_the_rate_unless_the_kill_began_it() {
        let mut times = even(300);
        times.retain(|at| !(12_000 * MS..15_000 * MS).contains(at));
        let bot = of_bot(&times, 10, 5, 60_000 * MS);
        assert!(bot.least_per_second < 8.0 && bot.rest_seconds.is_none(), "{bot:?}");
        let bot = of_bot(&times, 10, 5, 11_950 * MS);
        assert!((bot.least_per_second - 10.0).abs() < 1e-9, "{bot:?}");
        assert!(bot.rest_seconds.is_some_and(|rest| (3.0..3.3).contains(&rest)), "{bot:?}");
    }
}
