//! Quotas of tokens and of bots: maximum requests per second and in flight. Each process enforces
//! them for the requests that it serves.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::{FxBuildHasher, FxHashMap};

/// Number of parts of the table, each with its own lock.
const PARTS: usize = 16;
/// Number of entries in a part at which idle ones are removed.
const PART_MAX: usize = 4_096;

/// The quota of each name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quota {
    /// Requests per second, and the burst after idle time; 0: no bound.
    pub rate: u32,
    /// Requests in flight; 0: no bound.
    pub in_flight: u32,
}

/// Usage by name.
#[derive(Debug)]
pub struct Quotas {
    parts: [Mutex<FxHashMap<Box<str>, Used>>; PARTS],
}

#[derive(Debug, Clone, Copy, Default)]
struct Used {
    /// When all used requests are paid for (the theoretical arrival time of GCRA).
    paid_at: Duration,
    in_flight: u32,
}

/// The quota is exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    /// When the next request is allowed.
    pub retry_after: Duration,
}

impl Default for Quotas {
    fn default() -> Self {
        Self { parts: std::array::from_fn(|_| Mutex::new(HashMap::with_hasher(FxBuildHasher))) }
    }
}

impl Quotas {
    /// Takes `n` requests of `name`, in flight until the guard is dropped. If the quota is
    /// exceeded, takes nothing and returns when to retry. A request larger than a second's quota is
    /// allowed once, and paid for afterwards.
    ///
    /// # Errors
    /// If the quota is exceeded.
    pub fn take(
        self: &Arc<Self>,
        name: &str,
        n: u32,
        quota: Quota,
        now: Duration,
    ) -> Result<Option<Taken>, Exceeded> {
        if quota == Quota::default() || n == 0 {
            return Ok(None);
        }
        let number = Self::number(name);
        let mut part = self.part(number);
        if part.len() >= PART_MAX && !part.contains_key(name) {
            part.retain(|_, used| used.in_flight > 0 || used.paid_at > now);
        }
        let used = match part.get_mut(name) {
            Some(used) => used,
            None => part.entry(name.into()).or_default(),
        };
        if quota.in_flight > 0 && used.in_flight >= quota.in_flight {
            return Err(Exceeded { retry_after: Duration::from_secs(1) });
        }
        if quota.rate > 0 {
            let one = Duration::from_secs(1) / quota.rate;
            let begin = used.paid_at.max(now);
            // Up to a second's quota may be used ahead; the first request is always allowed.
            let ahead = begin.saturating_sub(now);
            if ahead + one > Duration::from_secs(1) + one / 2 {
                let retry_after = (ahead + one).saturating_sub(Duration::from_secs(1));
                return Err(Exceeded { retry_after });
            }
            used.paid_at = begin + one * n;
        }
        used.in_flight += 1;
        Ok(Some(Taken { quotas: Arc::clone(self), number, name: name.into() }))
    }

    fn number(name: &str) -> usize {
        (FxBuildHasher.hash_one(name) >> 40) as usize % PARTS
    }

    fn part(&self, number: usize) -> MutexGuard<'_, FxHashMap<Box<str>, Used>> {
        self.parts[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in flight. Dropping it ends the request.
#[derive(Debug)]
pub struct Taken {
    quotas: Arc<Quotas>,
    number: usize,
    name: Box<str>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(used) = self.quotas.part(self.number).get_mut(&self.name) {
            used.in_flight = used.in_flight.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn in_a_second_there_is_as_much_as_the_quota_says_and_then_it_is_told_when_there_is_more() {
        let quotas = Arc::new(Quotas::default());
        let quota = Quota { rate: 10, in_flight: 0 };
        let taken = (0..20).filter(|_| quotas.take("a", 1, quota, at(0)).is_ok()).count();
        assert_eq!(taken, 10);
        let exceeded = quotas.take("a", 1, quota, at(0)).unwrap_err();
        assert_eq!(exceeded.retry_after, at(100));
        assert!(quotas.take("a", 1, quota, at(100)).is_ok());
        assert!(quotas.take("b", 1, quota, at(0)).is_ok(), "another one's is its own");
    }

    #[test]
    fn requests_in_flight_are_limited_and_ended_ones_make_room() {
        let quotas = Arc::new(Quotas::default());
        let quota = Quota { rate: 0, in_flight: 2 };
        let first = quotas.take("a", 1, quota, at(0)).unwrap();
        let _second = quotas.take("a", 1, quota, at(0)).unwrap();
        assert!(quotas.take("a", 1, quota, at(0)).is_err());
        drop(first);
        assert!(quotas.take("a", 1, quota, at(0)).is_ok());
    }

    proptest! {
        #[test]
        fn over_any_time_no_more_than_rate_times_time_and_a_second_pass(
            rate in 1_u32..200, gaps in prop::collection::vec(0_u64..300, 1..300),
        ) {
            let quotas = Arc::new(Quotas::default());
            let quota = Quota { rate, in_flight: 0 };
            let (mut now, mut passed) = (0, 0_u64);
            for gap in gaps {
                now += gap;
                passed += u64::from(quotas.take("a", 1, quota, at(now)).is_ok());
                prop_assert!(passed <= u64::from(rate) * (now + 1_000) / 1_000 + 1);
            }
        }
    }

    #[test]
    fn nothing_is_taken_without_a_quota_or_without_a_request() {
        let quotas = Arc::new(Quotas::default());
        let quota = Quota { rate: 1, in_flight: 1 };
        assert!(quotas.take("a", 0, quota, at(0)).unwrap().is_none());
        assert!(quotas.take("a", 1, Quota::default(), at(0)).unwrap().is_none());
        assert!(quotas.take("a", 1, quota, at(0)).unwrap().is_some());
    }

    #[test]
    fn a_request_is_allowed_up_to_half_a_request_ahead_of_the_second() {
        let quotas = Arc::new(Quotas::default());
        let quota = Quota { rate: 2, in_flight: 0 };
        let is_taken = |ms| quotas.take("a", 1, quota, at(ms)).is_ok();
        assert!(is_taken(0) && is_taken(0) && !is_taken(249));
        assert!(is_taken(250), "750 ms are used ahead, and one takes 500 ms");
    }

    #[test]
    fn idle_names_are_forgotten_when_there_are_many_and_the_others_are_not() {
        let quotas = Arc::new(Quotas::default());
        let quota = Quota { rate: 10, in_flight: 1 };
        let take = |name: &str, n, ms| quotas.take(name, n, quota, at(ms));
        let held = || (0..PARTS).map(|part| quotas.part(part).len()).collect::<Vec<_>>();
        let _in_flight = take("busy", 1, 0).unwrap();
        drop(take("owing", 100, 0).unwrap());
        let mut names = 0;
        while held().iter().any(|held| *held < PART_MAX) {
            for _ in 0..256 {
                names += 1;
                drop(take(&format!("idle-{names}"), 1, 0).unwrap());
            }
        }
        // Each part gets a further name.
        let mut more = 0;
        while held().iter().any(|held| *held >= PART_MAX) {
            more += 1;
            drop(take(&format!("new-{more}"), 1, 5_000).unwrap());
        }
        assert_eq!(held().iter().sum::<usize>(), more + 2);
        assert!(take("busy", 1, 5_000).is_err(), "it is still in flight");
        assert!(take("owing", 1, 5_000).is_err(), "it has 5 s to pay");
    }
}
