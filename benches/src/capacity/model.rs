//! The model: what an event, a bot, a visit and a notification cost.
//!
//! Processor times are in yardsticks: multiples of the time that Redis needs for one step of a
//! script ([`crate::probe::yardstick`]). They were fitted to the measurements in
//! `docs/capacity.md`. Bytes are absolute.

use std::ops::RangeInclusive;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// Events that one round of the copy takes from the bus.
const ROUND: f64 = 2_000.0;
/// Maximum number of events of a slice: `batch`.
const SLICE_EVENTS: f64 = 100.0;
/// The largest events, the most primaries and the low rates that were measured. Beyond them the model
/// extrapolates.
pub(super) const BYTES_MEASURED: f64 = 10_000.0;
pub(super) const PRIMARIES_MEASURED: u32 = 6;
pub(super) const RATES_MEASURED: RangeInclusive<f64> = 500.0..=5_000.0;

/// A cost with a fixed part and one for each KB of an event.
#[derive(Debug, Clone, Copy)]
struct Sized {
    base: f64,
    per_kb: f64,
}

impl Sized {
    fn of(self, bytes: f64) -> f64 {
        self.base + self.per_kb * bytes / 1_000.0
    }
}

/// Putting an event on the bus, yardsticks.
const WRITE: Sized = Sized { base: 0.33, per_kb: 0.35 };
/// Reading it from the bus, yardsticks. In a cluster, this and the above load one primary.
const READ: Sized = Sized { base: 0.0, per_kb: 0.5 };
/// Each event in the queues, yardsticks.
const EVENT: Sized = Sized { base: 0.0, per_kb: 1.4 };
/// Each visit of a bot: its claim, read and completion, yardsticks.
const VISIT: f64 = 3.2;
/// Each bot that a round of the copy touches, yardsticks.
const TOUCH: f64 = 1.14;
/// Further cost of the queues with each further primary, as a share: calls carry fewer events.
const SPREAD: f64 = 0.065;
/// Further cost of an event at a low rate, because calls carry few events: yardsticks at 1,000
/// events/s, and how it falls with the rate.
const ALONE: f64 = 48.5;
const ALONE_FALLS: f64 = 0.317;

/// Fairlane's own processor time per event and per visit, yardsticks.
const OWN_EVENT: Sized = Sized { base: 0.62, per_kb: 1.3 };
const OWN_VISIT: f64 = 3.45;
/// That of the process that reads the bus, per event. Its bytes cost at most as much as all do.
const OWN_COPY: Sized = Sized { base: 0.8, per_kb: 1.3 };

/// Memory of an event on the bus: bytes, and bytes for each byte of its JSON.
const BUS_BYTES: (f64, f64) = (8.0, 1.013);
/// The same in a queue, where the envelope is shorter.
const QUEUE_BYTES: (f64, f64) = (-64.0, 1.1);
/// Memory of a bot with a queue.
const BOT_BYTES: f64 = 315.0;
/// Memory of the attempts that are kept, per pipeline at most: `history.max_bytes`.
pub(super) const HISTORY_BYTES: f64 = 67_108_864.0;

/// Memory of a scheduled notification, with a short URL and no body.
pub(super) const NOTIFICATION_BYTES: f64 = 662.0;
/// Scheduling and sending it, yardsticks of Redis.
pub(super) const NOTIFICATION: f64 = 200.0;

/// Evaluating the rules of a bot for an event, yardsticks of Redis, Fairlane and MongoDB.
pub(super) const RULE_EVENT: f64 = 11.0;
pub(super) const OWN_RULE_EVENT: f64 = 13.0;
pub(super) const MONGO_RULE_EVENT: f64 = 60.0;
/// Reading a rule from MongoDB at the start of a process, yardsticks of MongoDB.
pub(super) const MONGO_RULE: f64 = 15.0;

/// Network of Redis per event, and further bytes per visit.
const RECEIVED: Sized = Sized { base: 30.0, per_kb: 2_110.0 };
const RECEIVED_VISIT: f64 = 320.0;
const SENT: Sized = Sized { base: 26.0, per_kb: 2_010.0 };
const SENT_VISIT: f64 = 22.0;

/// How many events of a bot are handled and copied together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Density {
    /// Events of a visit.
    pub(super) per_visit: f64,
    /// Events of one bot in a round of the copy, if it has any.
    pub(super) per_round: f64,
}

impl Density {
    /// While Redis drains a backlog of so many events of each of `bots`.
    pub(super) fn of_backlog(bots: f64, events_per_bot: f64) -> Self {
        let each = events_per_bot.max(1.0);
        Self { per_visit: each.min(SLICE_EVENTS), per_round: per_round(bots).min(each) }
    }

    /// While Redis handles events of `bots` as they come, at full load: a bot has those of one
    /// round.
    pub(super) fn of_flow(bots: f64) -> Self {
        let per_round = per_round(bots);
        Self { per_visit: per_round.min(SLICE_EVENTS), per_round }
    }
}

/// The mean number of events of a bot in a round, among the bots that have any.
fn per_round(bots: f64) -> f64 {
    let bots = bots.max(1.0);
    // The probability that a round misses a bot, in a form that stays exact for many bots.
    let touched = bots * -((-1.0 / bots).ln_1p() * ROUND).exp_m1();
    ROUND / touched
}

/// Yardsticks of Redis for putting an event on the bus.
pub(super) fn write(bytes: f64) -> f64 {
    WRITE.of(bytes)
}

/// Yardsticks of Redis for an event from the bus to its completion, on one primary.
pub(super) fn handle(density: Density, bytes: f64) -> f64 {
    READ.of(bytes) + queues(density, bytes)
}

/// The part of [`handle`] that a cluster divides by shard.
fn queues(density: Density, bytes: f64) -> f64 {
    EVENT.of(bytes) + VISIT / density.per_visit + TOUCH / density.per_round
}

/// Yardsticks per event of the busiest of some primaries: the one with the bus, and with more
/// shards than the others.
pub(super) fn busiest(density: Density, bytes: f64, primaries: u32, shards: u32) -> f64 {
    let spread = 1.0 + SPREAD * f64::from(primaries - 1);
    let share = busiest_share(shards, primaries);
    WRITE.of(bytes) + READ.of(bytes) + queues(density, bytes) * spread * share
}

/// Yardsticks per event of one primary at a low rate, as a dashboard shows them.
pub(super) fn at_rate(density: Density, bytes: f64, rate: f64) -> f64 {
    let alone = ALONE * (rate / 1_000.0).powf(-ALONE_FALLS);
    write(bytes) + handle(density, bytes) + alone
}

/// Yardsticks of Fairlane per event, without its handler.
pub(super) fn own(density: Density, bytes: f64) -> f64 {
    OWN_EVENT.of(bytes) + OWN_VISIT / density.per_visit
}

/// The part of it in the one process that reads a stream.
pub(super) fn own_copy(bytes: f64) -> f64 {
    OWN_COPY.of(bytes)
}

/// Memory of an event on the bus.
pub(super) fn bus_bytes(bytes: f64) -> f64 {
    BUS_BYTES.0 + BUS_BYTES.1 * bytes
}

/// Memory of the queues of `bots` with so many events together.
pub(super) fn queue_bytes(bots: f64, events: f64, bytes: f64) -> f64 {
    bots.min(events) * BOT_BYTES + events * (QUEUE_BYTES.0 + QUEUE_BYTES.1 * bytes)
}

/// Bytes that Redis receives and sends per event.
pub(super) fn network(density: Density, bytes: f64) -> (f64, f64) {
    let visits = 1.0 / density.per_visit;
    (RECEIVED.of(bytes) + RECEIVED_VISIT * visits, SENT.of(bytes) + SENT_VISIT * visits)
}

/// The share of the shards that the busiest of some primaries has, on average: the hash of its name
/// places a shard.
pub(super) fn busiest_share(shards: u32, primaries: u32) -> f64 {
    const TRIALS: u32 = 500;
    let places = usize::try_from(primaries).unwrap_or(usize::MAX);
    // A fixed seed, so that the same question has the same answer.
    let mut random = SmallRng::seed_from_u64(7);
    let mut sum = 0;
    for _ in 0..TRIALS {
        let mut count = vec![0_u32; places];
        for _ in 0..shards {
            count[random.random_range(0..places)] += 1;
        }
        sum += count.into_iter().max().unwrap_or_default();
    }
    f64::from(sum) / f64::from(TRIALS) / f64::from(shards)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(value: f64, wanted: f64) -> bool {
        (value - wanted).abs() <= wanted.abs() * 1e-3
    }

    #[test]
    fn few_bots_have_several_events_in_a_round_and_many_have_one() {
        assert!(near(Density::of_flow(1.0).per_round, 2_000.0));
        assert!(near(Density::of_flow(1.0).per_visit, 100.0), "a slice has a bound");
        assert!(near(Density::of_flow(1_000.0).per_round, 2.313));
        assert!(near(Density::of_flow(1e9).per_round, 1.0));
        assert!(near(Density::of_flow(1e9).per_visit, 1.0));
    }

    #[test]
    fn a_backlog_fills_visits_up_to_the_size_of_a_slice() {
        for (bots, each, per_visit) in
            [(200_000.0, 1.0, 1.0), (20_000.0, 10.0, 10.0), (10.0, 1e6, 100.0)]
        {
            let density = Density::of_backlog(bots, each);
            assert!(near(density.per_visit, per_visit), "{bots} {each}: {density:?}");
        }
        let thin = Density::of_backlog(10.0, 1.0);
        assert!(near(thin.per_round, 1.0), "a round has no events that the bots do not have");
    }

    #[test]
    fn an_event_costs_less_in_larger_visits_and_more_with_more_bytes() {
        let cost = |bots, each, bytes| handle(Density::of_backlog(bots, each), bytes);
        assert!(cost(1e5, 1.0, 200.0) > cost(1e5, 10.0, 200.0));
        assert!(cost(1e5, 10.0, 200.0) > cost(100.0, 100.0, 200.0));
        assert!(cost(1e5, 10.0, 1_000.0) > cost(1e5, 10.0, 200.0));
        assert!(queue_bytes(1.0, 100.0, 1_000.0) > queue_bytes(1.0, 100.0, 200.0));
        // Bots without events take no memory.
        assert!(near(queue_bytes(1e9, 5.0, 200.0), queue_bytes(5.0, 5.0, 200.0)));
    }

    #[test]
    fn the_busiest_primary_has_more_than_an_equal_share_of_the_shards() {
        assert!(near(busiest_share(16, 1), 1.0));
        for primaries in [2, 3, 6, 10, 16] {
            let share = busiest_share(16, primaries);
            assert!(share > 1.0 / f64::from(primaries) && share < 1.0, "{primaries}: {share}");
            assert!(share > busiest_share(256, primaries), "more shards are more even");
            assert!(near(share, busiest_share(16, primaries)), "the same answer again");
        }
    }

    #[test]
    fn a_cluster_divides_the_queues_but_not_the_bus() {
        let density = Density::of_flow(1e5);
        let one = busiest(density, 200.0, 1, 256);
        assert!(near(one, write(200.0) + handle(density, 200.0)));
        let ten = busiest(density, 200.0, 10, 256);
        assert!(ten < one / 2.0 && ten > write(200.0) + READ.of(200.0), "{one} {ten}");
    }
}
