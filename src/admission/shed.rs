//! What was shed, and whose it was: for operators.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{Class, Reason};

/// Tenants that are counted at once.
const TENANTS: usize = 64;

/// Refusals per class and reason, and the tenants with the most of them.
#[derive(Debug, Default)]
pub struct ShedCounts {
    counts: [[AtomicU64; Reason::ALL.len()]; 4],
    /// The space-saving algorithm (Metwally, Agrawal, El Abbadi): whoever is not there takes the
    /// place of the lowest and its count, so that a count is too high by at most `over`.
    tenants: Mutex<Vec<Tenant>>,
}

/// A tenant whose requests were shed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Its bot, or whatever else is known of the caller.
    pub name: Box<str>,
    /// Refusals, at most.
    pub shed: u64,
    /// By as much that may be too high.
    pub over: u64,
}

impl ShedCounts {
    pub(super) fn note(&self, class: Class, reason: Reason) {
        self.counts[class as usize][reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Refusals of a class for a reason.
    #[must_use]
    pub fn of(&self, class: Class, reason: Reason) -> u64 {
        self.counts[class as usize][reason as usize].load(Ordering::Relaxed)
    }

    /// Counts a refusal for a tenant, unless somebody else counts just now: what is looked for is who
    /// has the most.
    pub fn note_tenant(&self, name: &str) {
        let Ok(mut tenants) = self.tenants.try_lock() else { return };
        if let Some(known) = tenants.iter_mut().find(|tenant| *tenant.name == *name) {
            known.shed += 1;
            return;
        }
        if tenants.len() < TENANTS {
            tenants.push(Tenant { name: name.into(), shed: 1, over: 0 });
            return;
        }
        if let Some(lowest) = tenants.iter_mut().min_by_key(|tenant| tenant.shed) {
            let (shed, over) = (lowest.shed + 1, lowest.shed);
            *lowest = Tenant { name: name.into(), shed, over };
        }
    }

    /// The tenants with the most refusals, those that are sure to have had some.
    #[must_use]
    pub fn top(&self, max: usize) -> Vec<Tenant> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner).clone();
        tenants.sort_by(|a, b| b.shed.cmp(&a.shed).then_with(|| a.name.cmp(&b.name)));
        tenants.truncate(max);
        tenants
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_most_is_found_among_many() {
        let counts = ShedCounts::default();
        for n in 0..5_000 {
            counts.note_tenant(&format!("light-{}", n % 500));
            if n % 5 == 0 {
                counts.note_tenant("heavy");
            }
        }
        let top = counts.top(3);
        assert_eq!(&*top[0].name, "heavy");
        assert!(top[0].shed >= 1_000 && top[0].shed - top[0].over <= 1_000, "{top:?}");
    }
}
