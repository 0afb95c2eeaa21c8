//! The metric of open breakers. All instances of a process share it: after a reload, two of them work
//! for some seconds, and each may find a host unavailable.

use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, Mutex, PoisonError};

use metrics::gauge;

use crate::metrics::BREAKER_OPEN;

/// Maximum number of hosts with their own series.
const NAMED_MAX: usize = 20;
/// It stands for all other hosts.
const OTHER: &str = "other";

static SHOWN: LazyLock<Mutex<Shown>> = LazyLock::new(Mutex::default);

#[derive(Debug, Default)]
struct Shown {
    /// Hosts with their own series.
    named: HashSet<String>,
    /// The number of instances that have an open breaker of a host.
    open: HashMap<String, usize>,
}

impl Shown {
    /// An instance has its first open breaker of a host, or none any more. Returns the series that
    /// changes, and its value.
    fn turn(&mut self, host: String, opens: bool) -> (String, usize) {
        if opens && self.named.len() < NAMED_MAX {
            self.named.insert(host.clone());
        }
        let count = self.open.entry(host.clone()).or_default();
        *count = if opens { *count + 1 } else { count.saturating_sub(1) };
        self.open.retain(|_, count| *count > 0);
        if self.named.contains(&host) {
            let open = usize::from(self.open.contains_key(&host));
            return (host, open);
        }
        let others = self.open.keys().filter(|host| !self.named.contains(*host)).count();
        (OTHER.to_owned(), others)
    }
}

/// Shows that an instance has its first open breaker of a host, or none any more.
pub(super) fn show(host: String, opens: bool) {
    let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    // Set under the lock: a later value must not be overwritten by an earlier one.
    let (series, open) = shown.turn(host, opens);
    #[expect(clippy::cast_precision_loss, reason = "a count of hosts")]
    gauge!(BREAKER_OPEN, "host" => series).set(open as f64);
}

/// Makes the series of all other hosts.
pub(crate) fn prepare() {
    gauge!(BREAKER_OPEN, "host" => OTHER).increment(0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_open_until_no_instance_has_an_open_breaker() {
        let mut shown = Shown::default();
        let turns = [true, true, false, false].map(|opens| shown.turn("a:80".to_owned(), opens).1);
        assert_eq!(turns, [1, 1, 1, 0]);
        assert!(shown.open.is_empty());
    }

    #[test]
    fn the_first_hosts_have_their_own_series_and_the_others_are_counted() {
        let mut shown = Shown::default();
        for number in 0..NAMED_MAX {
            let host = format!("h{number}:80");
            assert_eq!(shown.turn(host.clone(), true), (host, 1));
        }
        let other = |open| (OTHER.to_owned(), open);
        assert_eq!(shown.turn("x:80".to_owned(), true), other(1));
        assert_eq!(shown.turn("y:80".to_owned(), true), other(2));
        assert_eq!(shown.turn("x:80".to_owned(), false), other(1));
        assert_eq!(shown.turn("h3:80".to_owned(), false), ("h3:80".to_owned(), 0));
        assert_eq!(shown.turn("h3:80".to_owned(), true), ("h3:80".to_owned(), 1), "it has its own");
    }
}
