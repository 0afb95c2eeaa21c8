//! How many leases a process holds, and how many it may hold. The dispatcher and the copier share
//! the places.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// All accesses are sequentially consistent: a place that becomes free either is seen by the
/// dispatcher, or wakes it.
#[derive(Debug, Default)]
pub(super) struct Occupancy {
    held: AtomicUsize,
    /// Maximum number that the copier may reach.
    limit: AtomicUsize,
    /// Whether the dispatcher waits for places.
    wanted: AtomicBool,
}

impl Occupancy {
    /// Number of leases that the process holds, with reserved places.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Sets how many leases the copier may reach; 0: it takes none.
    pub(super) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::SeqCst);
    }

    /// The dispatcher will wait for places, or not. To be called with `true` before it counts the
    /// free ones.
    pub(super) fn set_wanted(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::SeqCst);
    }

    /// Takes this number of places for leases.
    pub(super) fn take(&self, places: usize) {
        self.held.fetch_add(places, Ordering::SeqCst);
    }

    /// Takes up to `max` places below the limit, or below `at_least`; returns how many.
    pub(super) fn reserve(&self, max: usize, at_least: usize) -> usize {
        let limit = match self.limit.load(Ordering::SeqCst) {
            0 => 0,
            limit => limit.max(at_least),
        };
        let mut places = 0;
        let more = |held: usize| {
            places = max.min(limit.saturating_sub(held));
            (places > 0).then_some(held + places)
        };
        let _ = self.held.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        places
    }

    /// Frees places; returns whether the dispatcher waits for them.
    pub(super) fn free(&self, places: usize) -> bool {
        self.held.fetch_sub(places, Ordering::SeqCst);
        self.wanted.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copier_stays_below_the_limit_and_leaves_places_to_the_dispatcher() {
        let occupancy = Occupancy::default();
        assert_eq!(occupancy.reserve(4, 0), 0, "nothing is known yet");
        occupancy.set_limit(5);
        occupancy.take(2);
        assert_eq!(occupancy.reserve(2, 0), 2);
        assert_eq!(occupancy.reserve(2, 0), 1);
        assert_eq!(occupancy.reserve(2, 0), 0);
        occupancy.take(3); // The dispatcher may exceed the limit of an earlier moment.
        assert_eq!(occupancy.reserve(1, 0), 0);
        assert_eq!(occupancy.reserve(1, 9), 1, "a sparse backlog has more places");
        assert!(!occupancy.free(5));
        occupancy.set_wanted(true);
        assert!(occupancy.free(1));
        assert_eq!((occupancy.held(), occupancy.reserve(9, 0)), (3, 2));
    }
}
