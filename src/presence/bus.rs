//! How one process reads a bus beside Redis: how many logs, how much of them is unread, and why they
//! cannot be read. Redis does not know this, so each process reports its share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::Process;

/// Maximum length of a kept reason, in bytes.
const REASON_MAX: usize = 300;

/// The state of a bus in one process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusState {
    /// Its name: `nats:NAME` or `kafka:NAME`.
    pub bus: String,
    /// Number of its logs that this process reads.
    pub logs: usize,
    /// Number of entries of these logs that are not read yet.
    pub unread: u64,
    /// Since when there are some without a break, ms since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unread_since_ms: Option<u64>,
    /// Why the bus cannot be read now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<BusFailure>,
}

/// Why a bus cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusFailure {
    /// Since when, ms since 1970.
    pub since_ms: u64,
    /// The last reason.
    pub reason: String,
}

/// A bus beside Redis, over all processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BusView {
    /// Its name: `nats:NAME` or `kafka:NAME`.
    pub bus: String,
    /// Number of processes that are to read it.
    pub processes: usize,
    /// Number of its logs that are read.
    pub logs: usize,
    /// Number of entries of these logs that are not read yet.
    pub unread: u64,
    /// Since when there are some without a break, ms since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread_since_ms: Option<u64>,
    /// Why a process cannot read it now, since the earliest failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failing: Option<BusFailure>,
}

impl BusView {
    /// What these processes say of a bus.
    pub(crate) fn of(bus: &str, processes: &[Process]) -> Self {
        let states: Vec<_> = processes
            .iter()
            .flat_map(|process| &process.buses)
            .filter(|state| state.bus == bus)
            .collect();
        let failing = states.iter().filter_map(|state| state.failing.as_ref());
        // One that gave its share up may not know that others read it now, and how far.
        let is_read = states.iter().any(|state| state.logs > 0);
        let known: Vec<_> = states.iter().filter(|state| state.logs > 0 || !is_read).collect();
        Self {
            bus: bus.to_owned(),
            processes: states.len(),
            logs: states.iter().map(|state| state.logs).sum(),
            unread: known.iter().map(|state| state.unread).sum(),
            unread_since_ms: known.iter().filter_map(|state| state.unread_since_ms).min(),
            failing: failing.min_by_key(|failing| failing.since_ms).cloned(),
        }
    }
}

/// Where the reader of a bus notes its state.
#[derive(Debug)]
pub struct BusMeter(Mutex<BusState>);

impl BusMeter {
    /// Nothing is read yet.
    #[must_use]
    pub fn new(bus: &str) -> Self {
        Self(Mutex::new(BusState { bus: bus.to_owned(), ..BusState::default() }))
    }

    /// The bus is read, or other processes read all of it.
    pub(crate) fn answers(&self) {
        self.lock().failing = None;
    }

    /// This process reads so many of its logs, as far as it knows.
    pub(crate) fn reads(&self, logs: usize) {
        let mut state = self.lock();
        state.logs = logs;
        if logs == 0 {
            (state.unread, state.unread_since_ms) = (0, None);
        }
    }

    /// It gave them up, and it is not known who reads them.
    pub(crate) fn gives_up(&self) {
        self.lock().logs = 0;
    }

    /// So many entries of these logs are not read yet.
    pub(crate) fn lags(&self, unread: u64, now_ms: u64) {
        let mut state = self.lock();
        state.unread = unread;
        state.unread_since_ms =
            if unread > 0 { state.unread_since_ms.or(Some(now_ms)) } else { None };
    }

    /// The bus cannot be read.
    pub(crate) fn failed(&self, reason: &str, now_ms: u64) {
        let end =
            (0..=REASON_MAX.min(reason.len())).rev().find(|&end| reason.is_char_boundary(end));
        let reason = reason[..end.unwrap_or(0)].to_owned();
        let mut state = self.lock();
        let since_ms = state.failing.as_ref().map_or(now_ms, |before| before.since_ms);
        state.failing = Some(BusFailure { since_ms, reason });
    }

    /// The current state.
    pub(crate) fn state(&self) -> BusState {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, BusState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether operators must hear of a change without delay.
pub(super) fn is_news(before: &[BusState], now: &[BusState]) -> bool {
    let shown =
        |all: &[BusState]| all.iter().map(|of| (of.logs, of.failing.is_some())).collect::<Vec<_>>();
    shown(before) != shown(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_lasts_until_the_bus_answers() {
        let meter = BusMeter::new("nats:orders");
        meter.reads(2);
        meter.failed("no answer", 10);
        meter.failed(&"é".repeat(REASON_MAX), 20);
        let failing = meter.state().failing.unwrap();
        assert_eq!((failing.since_ms, failing.reason.len()), (10, REASON_MAX));
        meter.lags(7, 20);
        let state = meter.state();
        assert_eq!(
            (state.unread, state.failing.is_some()),
            (7, true),
            "others of its logs are read"
        );
        meter.answers();
        assert_eq!((meter.state().logs, meter.state().failing), (2, None));
        meter.failed("no answer", 40);
        meter.reads(2);
        assert_eq!(
            meter.state().failing.unwrap().since_ms,
            40,
            "who reads says nothing of the bus"
        );
        meter.answers();
        assert_eq!(meter.state().failing, None);
    }

    #[test]
    fn entries_are_unread_since_the_first_look_that_found_some() {
        let meter = BusMeter::new("nats:orders");
        meter.reads(1);
        for (unread, now, since) in [(0, 1, None), (5, 2, Some(2)), (9, 3, Some(2)), (0, 4, None)] {
            meter.lags(unread, now);
            assert_eq!(meter.state().unread_since_ms, since, "{unread}");
        }
        meter.lags(5, 5);
        meter.reads(0);
        let state = meter.state();
        assert_eq!((state.unread, state.unread_since_ms), (0, None), "others read it now");
    }

    #[test]
    fn entries_are_counted_once_also_if_a_process_that_gave_its_share_up_still_shows_them() {
        let of = |states: &[(usize, u64, u64)]| {
            let process = |&(logs, unread, since): &(usize, u64, u64)| -> Process {
                let (bus, since) = ("nats:orders".to_owned(), Some(since));
                let state = BusState { bus, logs, unread, unread_since_ms: since, failing: None };
                let says = serde_json::json!({
                    "id": "p", "host": "h", "pid": 1, "version": "1", "roles": [], "started_ms": 0,
                    "pipelines": {}, "buses": [state],
                });
                serde_json::from_value(says).unwrap()
            };
            let processes: Vec<Process> = states.iter().map(process).collect();
            let view = BusView::of("nats:orders", &processes);
            (view.logs, view.unread, view.unread_since_ms)
        };
        assert_eq!(of(&[(2, 5, 20), (1, 3, 30)]), (3, 8, Some(20)));
        assert_eq!(of(&[(0, 5, 20), (1, 5, 30)]), (1, 5, Some(30)), "the other one has its share");
        assert_eq!(of(&[(0, 5, 20), (0, 3, 30)]), (0, 8, Some(20)), "an outage of the whole bus");
    }

    #[test]
    fn only_a_failure_or_another_share_is_news() {
        let of = |logs, unread| BusState { logs, unread, ..BusState::default() };
        assert!(!is_news(&[of(1, 5)], &[of(1, 9)]));
        assert!(is_news(&[of(1, 5)], &[of(2, 5)]));
        let failing = Some(BusFailure { since_ms: 1, reason: "gone".to_owned() });
        assert!(is_news(&[of(1, 5)], &[BusState { failing, ..of(1, 5) }]));
    }
}
