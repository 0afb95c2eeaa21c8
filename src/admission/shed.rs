//! Statistics of shed requests and their callers, for operators.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{Class, Reason};

/// Maximum number of names per list.
const NAMES: usize = 64;

/// Refusals per class and reason, and the bots, tokens and addresses with the largest numbers of
/// them.
#[derive(Debug, Default)]
pub struct ShedCounts {
    counts: [[AtomicU64; Reason::ALL.len()]; 4],
    /// Bots, as named by paths, queries and bodies.
    pub bots: Top<Box<str>>,
    /// Tokens, by their names in the configuration.
    pub tokens: Top<Box<str>>,
    /// Client addresses; of IPv6 the /64 network.
    pub addresses: Top<IpAddr>,
}

impl ShedCounts {
    pub(super) fn note(&self, class: Class, reason: Reason) {
        self.counts[class as usize][reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The number of refusals of a class for a reason.
    #[must_use]
    pub fn of(&self, class: Class, reason: Reason) -> u64 {
        self.counts[class as usize][reason as usize].load(Ordering::Relaxed)
    }
}

/// The names with the largest numbers of refusals, in bounded memory.
///
/// Uses the space-saving algorithm (Metwally, Agrawal, El Abbadi): a new name replaces the lowest
/// one and takes over its count, so a count is too high by at most `over`.
#[derive(Debug)]
pub struct Top<K>(Mutex<Vec<Refused<K>>>);

impl<K> Default for Top<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// A name with refused requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused<K> {
    /// The name.
    pub name: K,
    /// Upper bound of its refusals.
    pub shed: u64,
    /// Maximum error of that bound.
    pub over: u64,
    /// The certain refusals, by reason.
    pub reasons: [u64; Reason::ALL.len()],
}

impl<K: Clone + Ord> Top<K> {
    /// Counts a refusal of a name. Skips it if another thread holds the lock: only the largest
    /// counts matter.
    pub fn note<Q>(&self, name: &Q, reason: Reason)
    where
        Q: ?Sized + PartialEq,
        K: AsName<Q>,
    {
        let Ok(mut names) = self.0.try_lock() else { return };
        let known = names.iter().position(|known| known.name.is(name));
        let full = names.len() >= NAMES;
        let place = match known {
            Some(place) => place,
            None if full => {
                let lowest = names.iter().enumerate().min_by_key(|(_, known)| known.shed);
                let (place, shed) = lowest.map_or((0, 0), |(place, known)| (place, known.shed));
                names[place] =
                    Refused { name: K::of(name), shed, over: shed, reasons: Default::default() };
                place
            }
            None => {
                let reasons = Default::default();
                names.push(Refused { name: K::of(name), shed: 0, over: 0, reasons });
                names.len() - 1
            }
        };
        names[place].shed += 1;
        names[place].reasons[reason as usize] += 1;
    }

    /// The names that `shown` accepts, those with the largest counts first.
    #[must_use]
    pub fn most(&self, max: usize, shown: impl Fn(&K) -> bool) -> Vec<Refused<K>> {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        names.retain(|refused| shown(&refused.name));
        names.sort_by(|a, b| b.shed.cmp(&a.shed).then_with(|| a.name.cmp(&b.name)));
        names.truncate(max);
        names
    }
}

/// A stored name that can be compared with a borrowed form.
pub trait AsName<Q: ?Sized> {
    /// Whether the stored name equals it.
    fn is(&self, name: &Q) -> bool;
    /// Stores it.
    fn of(name: &Q) -> Self;
}

impl AsName<str> for Box<str> {
    fn is(&self, name: &str) -> bool {
        **self == *name
    }

    fn of(name: &str) -> Self {
        name.into()
    }
}

impl AsName<IpAddr> for IpAddr {
    fn is(&self, name: &IpAddr) -> bool {
        self == name
    }

    fn of(name: &IpAddr) -> Self {
        *name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_with_the_maximum_is_found_among_many() {
        let counts = ShedCounts::default();
        for n in 0..5_000 {
            counts.bots.note(&*format!("light-{}", n % 500), Reason::Capacity);
            if n % 5 == 0 {
                counts.bots.note("heavy", Reason::Quota);
            }
        }
        let top = counts.bots.most(3, |_| true);
        assert_eq!(&*top[0].name, "heavy");
        assert!(top[0].shed >= 1_000 && top[0].shed - top[0].over <= 1_000, "{top:?}");
        assert_eq!(top[0].reasons[Reason::Quota as usize], top[0].shed - top[0].over);
        assert_eq!(top[0].reasons[Reason::Capacity as usize], 0);
        assert!(counts.bots.0.lock().unwrap().len() <= NAMES, "memory is bounded");
    }

    #[test]
    fn only_the_names_that_may_be_seen_are_told() {
        let counts = ShedCounts::default();
        for name in ["a", "b", "b"] {
            counts.tokens.note(name, Reason::Switch);
        }
        let seen = |shown: fn(&Box<str>) -> bool| {
            let most = counts.tokens.most(10, shown);
            most.iter().map(|refused| (refused.name.to_string(), refused.shed)).collect::<Vec<_>>()
        };
        assert_eq!(seen(|_| true), [("b".to_owned(), 2), ("a".to_owned(), 1)]);
        assert_eq!(seen(|name| **name == *"a"), [("a".to_owned(), 1)]);
    }

    #[test]
    fn a_list_has_at_most_so_many_names() {
        let counts = ShedCounts::default();
        for name in ["a", "b", "c"] {
            counts.bots.note(name, Reason::Quota);
        }
        assert_eq!(counts.bots.most(2, |_| true).len(), 2);
        assert_eq!(counts.of(Class::P2, Reason::Quota), 0);
        counts.note(Class::P2, Reason::Quota);
        assert_eq!(counts.of(Class::P2, Reason::Quota), 1);
    }
}
