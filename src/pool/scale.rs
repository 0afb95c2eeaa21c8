//! The number of workers that a process needs: a pure function of the number of ready bots, the age
//! of their events and the duration of a slice.
//!
//! Little's law gives the workers that clear the ready bots within a few milliseconds: few for
//! short slices, one per ready bot for long ones. Growth is immediate, because a waiting bot is
//! worse than an idle worker. Shrinking removes half the surplus per step, so that a pause between
//! two bursts does not cost a new start.

use std::time::Duration;

/// Ready bots should get a worker within this time.
const GOAL: Duration = Duration::from_millis(5);
/// An event older than this shows that the estimate was too low.
const OLD: Duration = Duration::from_secs(1);
/// Interval between two steps down.
const COOL_DOWN: Duration = Duration::from_secs(5);

/// The load of a pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct Load {
    /// Bots waiting for a worker.
    pub ready: u64,
    /// Workers in use.
    pub busy: u64,
    /// Age of the oldest recently claimed event.
    pub oldest_age: Duration,
    /// Average duration of a slice; zero: unknown.
    pub slice: Duration,
}

/// The bounds: `min..=max` workers.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Minimum number of workers.
    pub min: usize,
    /// Maximum number of workers.
    pub max: usize,
}

/// The number of workers that the load would keep busy, without the bounds.
#[must_use]
pub fn wanted(load: Load) -> u64 {
    let share = if load.slice.is_zero() || load.oldest_age > OLD {
        1.0
    } else {
        (load.slice.as_secs_f64() / GOAL.as_secs_f64()).min(1.0)
    };
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count of bots times a share between 0 and 1"
    )]
    let more = (load.ready as f64 * share).ceil() as u64;
    load.busy.saturating_add(more)
}

/// The target of one process over time.
#[derive(Debug)]
pub struct Scaler {
    bounds: Bounds,
    target: usize,
    /// When the target last changed, or was last fully needed, since the start.
    needed_at: Duration,
}

impl Scaler {
    /// Starts at the lower bound.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Self { bounds, target: bounds.min, needed_at: Duration::ZERO }
    }

    /// The target for `load` at `now`, a time that only grows.
    pub fn target(&mut self, load: Load, now: Duration) -> usize {
        let wanted = usize::try_from(wanted(load)).unwrap_or(usize::MAX);
        let wanted = wanted.clamp(self.bounds.min, self.bounds.max);
        if wanted >= self.target {
            self.target = wanted;
            self.needed_at = now;
        } else if now.saturating_sub(self.needed_at) >= COOL_DOWN {
            self.target -= (self.target - wanted).div_ceil(2);
            self.needed_at = now;
        }
        self.target
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads() -> impl Strategy<Value = Load> {
        (0_u64..100_000, 0_u64..1_000, 0_u64..100_000, 0_u64..100_000).prop_map(
            |(ready, busy, age, slice)| Load {
                ready,
                busy,
                oldest_age: Duration::from_millis(age),
                slice: Duration::from_micros(slice),
            },
        )
    }

    proptest! {
        #[test]
        fn the_target_stays_within_its_bounds(
            min in 1_usize..64, more in 0_usize..64, loads in prop::collection::vec(loads(), 1..50),
        ) {
            let mut scaler = Scaler::new(Bounds { min, max: min + more });
            for (second, load) in loads.into_iter().enumerate() {
                let target = scaler.target(load, Duration::from_secs(second as u64));
                prop_assert!((min..=min + more).contains(&target));
            }
        }

        #[test]
        fn more_ready_or_older_or_slower_never_wants_fewer(load in loads(), by in 1_u64..1_000) {
            let more = Load { ready: load.ready + by, ..load };
            let older = Load { oldest_age: load.oldest_age + Duration::from_millis(by), ..load };
            let slower = Load { slice: load.slice + Duration::from_micros(by), ..load };
            prop_assert!(wanted(more) >= wanted(load));
            prop_assert!(wanted(older) >= wanted(load));
            prop_assume!(!load.slice.is_zero());
            prop_assert!(wanted(slower) >= wanted(load));
        }

        #[test]
        fn an_idle_pool_shrinks_to_its_minimum(min in 1_usize..8, more in 0_usize..1_000) {
            let mut scaler = Scaler::new(Bounds { min, max: min + more });
            scaler.target(Load { ready: 100_000, ..Load::default() }, Duration::ZERO);
            let mut target = 0;
            for step in 1..=12 {
                target = scaler.target(Load::default(), COOL_DOWN * step);
            }
            prop_assert_eq!(target, min);
        }
    }

    #[test]
    fn waiting_bots_get_workers_immediately() {
        let mut scaler = Scaler::new(Bounds { min: 1, max: 64 });
        let slow = Load { ready: 30, slice: Duration::from_millis(50), ..Load::default() };
        assert_eq!(scaler.target(slow, Duration::ZERO), 30);
        let quick = Load { ready: 30, slice: Duration::from_micros(50), ..Load::default() };
        assert_eq!(Scaler::new(Bounds { min: 1, max: 64 }).target(quick, Duration::ZERO), 1);
        let unknown = Load { slice: Duration::ZERO, ..quick };
        let old = |oldest_age| Load { oldest_age, ..quick };
        assert_eq!(
            [unknown, old(OLD), old(OLD + Duration::from_millis(1))].map(wanted),
            [30, 1, 30],
            "an estimate that is missing, may hold, and does not hold"
        );
    }

    #[test]
    fn each_cool_down_removes_half_of_the_workers_that_were_not_needed() {
        let mut scaler = Scaler::new(Bounds { min: 1, max: 200 });
        let load = |ready| Load { ready, ..Load::default() };
        let target = |(second, ready)| scaler.target(load(ready), Duration::from_secs(second));
        // At 3 s, all of them are needed once more.
        let times = [(0, 101), (3, 101), (5, 1), (7, 1), (8, 1), (9, 1), (13, 1)];
        assert_eq!(times.map(target), [101, 101, 101, 101, 51, 51, 26]);
    }
}
