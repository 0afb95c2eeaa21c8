//! The judgement of a worker's log: lost, repeated and reordered events, and the waits.

use serde::Serialize;

/// The start or the end of a handling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) tenant: u32,
    /// The position among the events of the tenant.
    pub(super) position: u32,
    pub(super) is_end: bool,
    /// Time since the event was due, µs. 0 for an end.
    pub(super) wait_us: u32,
    /// Time since the worker started, µs.
    pub(super) at_us: u32,
}

/// Numbers of events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Verdict {
    /// Never handled.
    pub(crate) lost: u64,
    /// Handlings of an event after its first.
    pub(crate) repeated: u64,
    /// Started before an earlier event of the tenant was handled.
    pub(crate) reordered: u64,
}

impl Entry {
    /// The entries in a file of a program of Node.js: four numbers of 32 bits for each.
    pub(super) fn parse(bytes: &[u8]) -> Vec<Self> {
        let number = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().unwrap_or_default());
        let entry = |bytes: &[u8]| Self {
            tenant: number(&bytes[..4]),
            position: number(&bytes[4..8]) / 2,
            is_end: number(&bytes[4..8]) % 2 == 1,
            wait_us: number(&bytes[8..12]),
            at_us: number(&bytes[12..]),
        };
        bytes.chunks_exact(16).map(entry).collect()
    }
}

impl Verdict {
    /// Judges the handlings, in their order, of tenants that have these numbers of events.
    pub(super) fn of(log: &[Entry], per_tenant: &[u32]) -> Self {
        struct Tenant {
            seen: Vec<bool>,
            next: usize,
            running: usize,
        }
        let tenant =
            |events: &u32| Tenant { seen: vec![false; *events as usize], next: 0, running: 0 };
        let mut tenants: Vec<_> = per_tenant.iter().map(tenant).collect();
        let mut verdict = Self::default();
        for entry in log {
            let position = entry.position as usize;
            let tenant = tenants.get_mut(entry.tenant as usize);
            let Some(tenant) = tenant.filter(|tenant| position < tenant.seen.len()) else {
                // No such event was added.
                verdict.reordered += 1;
                continue;
            };
            if entry.is_end {
                tenant.running = tenant.running.saturating_sub(1);
                continue;
            }
            if std::mem::replace(&mut tenant.seen[position], true) {
                verdict.repeated += 1;
            } else if position > tenant.next || tenant.running > 0 {
                verdict.reordered += 1;
            }
            tenant.next = tenant.next.max(position + 1);
            tenant.running += 1;
        }
        let missing = tenants.iter().flat_map(|tenant| &tenant.seen).filter(|seen| !**seen);
        verdict.lost = missing.count() as u64;
        verdict
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            lost: self.lost + other.lost,
            repeated: self.repeated + other.repeated,
            reordered: self.reordered + other.reordered,
        }
    }
}

/// The waits of the tenants from `busy`, in ascending order, µs.
pub(super) fn quiet_waits(log: &[Entry], busy: usize) -> Vec<u32> {
    let is_quiet = |entry: &&Entry| !entry.is_end && entry.tenant as usize >= busy;
    let mut waits: Vec<_> = log.iter().filter(is_quiet).map(|entry| entry.wait_us).collect();
    waits.sort_unstable();
    waits
}

/// When the last event of the tenants before `busy` started, in seconds since the worker started.
pub(super) fn backlog_seconds(log: &[Entry], busy: usize) -> f64 {
    let starts = log.iter().filter(|entry| !entry.is_end && (entry.tenant as usize) < busy);
    starts.map(|entry| f64::from(entry.at_us) / 1e6).fold(0.0, f64::max)
}

/// Milliseconds at a quantile of ascending waits: the smallest wait that this share does not exceed.
/// `None` without waits.
pub(super) fn quantile_ms(waits: &[u32], quantile: f64) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a count of events")]
    let rank = (quantile * waits.len() as f64).ceil();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at most the count"
    )]
    let index = (rank as usize).max(1) - 1;
    waits.get(index).map(|wait| f64::from(*wait) / 1_000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(tenant: u32, position: u32) -> Entry {
        Entry { tenant, position, is_end: false, wait_us: 5, at_us: 0 }
    }

    fn end(tenant: u32, position: u32) -> Entry {
        Entry { tenant, position, is_end: true, wait_us: 0, at_us: 0 }
    }

    fn verdict(lost: u64, repeated: u64, reordered: u64) -> Verdict {
        Verdict { lost, repeated, reordered }
    }

    #[test]
    fn tenants_may_mix_while_each_of_them_is_in_order() {
        let log =
            [start(0, 0), start(1, 0), end(1, 0), start(1, 1), end(0, 0), end(1, 1), start(0, 1)];
        assert_eq!(Verdict::of(&log, &[2, 2]), verdict(0, 0, 0));
    }

    #[test]
    fn an_event_that_starts_beside_an_earlier_one_is_reordered() {
        let log = [start(0, 0), start(0, 1), end(0, 0), end(0, 1)];
        assert_eq!(Verdict::of(&log, &[2]), verdict(0, 0, 1));
    }

    #[test]
    fn an_event_that_overtakes_is_reordered_once() {
        let log = [1, 0, 2].map(|position| [start(0, position), end(0, position)]).concat();
        assert_eq!(Verdict::of(&log, &[3]), verdict(0, 0, 1));
    }

    #[test]
    fn missing_and_repeated_events_are_counted() {
        let log = [0, 0, 2].map(|position| [start(0, position), end(0, position)]).concat();
        assert_eq!(Verdict::of(&log, &[4, 1]), verdict(3, 1, 1));
        assert_eq!(Verdict::of(&[start(7, 0), start(0, 9)], &[1]), verdict(1, 0, 2));
    }

    #[test]
    fn a_log_of_numbers_is_read() {
        let numbers = [3_u32, 14, 250, 900, 3, 15, 0, 950];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let started = Entry { wait_us: 250, at_us: 900, ..start(3, 7) };
        let ended = Entry { at_us: 950, ..end(3, 7) };
        assert_eq!(Entry::parse(&bytes), [started, ended]);
    }

    #[test]
    fn waits_of_busy_tenants_and_ends_do_not_count() {
        let log = [(2, 30), (0, 999), (3, 10), (2, 20)];
        let mut log = log.map(|(tenant, wait_us)| Entry { wait_us, ..start(tenant, 0) }).to_vec();
        log.push(end(2, 0));
        assert_eq!(quiet_waits(&log, 2), [10, 20, 30]);
    }

    #[test]
    fn a_backlog_ends_with_the_last_start_of_a_busy_tenant() {
        let at = |tenant, at_us| Entry { at_us, ..start(tenant, 0) };
        let log = [at(0, 1_000), at(1, 2_500_000), at(2, 9_000_000), end(1, 0)];
        assert!((backlog_seconds(&log, 2) - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_quantile_is_a_wait_that_occurred() {
        let waits: Vec<u32> = (1..=200).map(|n| n * 1_000).collect();
        for (quantile, wait) in [(0.0, 1.0), (0.5, 100.0), (0.99, 198.0), (1.0, 200.0)] {
            assert_eq!(quantile_ms(&waits, quantile), Some(wait), "{quantile}");
        }
        assert_eq!(quantile_ms(&[], 0.5), None);
    }
}
