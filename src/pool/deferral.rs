//! Copy first: while the bus is far behind, bots gather events before they are claimed. A visit of a
//! bot costs the same for one event and for ten, so a backlog drains faster, and all events behind it
//! are handled sooner.
//!
//! ```text
//! idle ── a copy is late, more is available ─▶ deferring ── caught up, in time, or enough ─▶ working
//!   ▲                                                                                         │
//!   └────────────────────────── the pool finds nobody ready ◀────────────────────────────────┘
//! ```

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Events that are less late are never deferred.
const LATE: Duration = Duration::from_millis(200);
/// Claims are deferred for at most as long as the first event is late already, and never longer than
/// this.
const MAX: Duration = Duration::from_secs(5);
/// When this number of bytes is copied, the bots are claimed: queues need more memory than the bus.
const BYTES_MAX: usize = 256 << 20;

#[derive(Debug, Default, Clone, Copy)]
enum State {
    #[default]
    Idle,
    Deferring {
        until: Instant,
        bytes: usize,
    },
    Working,
}

/// The deferral of the claims of one pool.
#[derive(Debug, Default)]
pub(super) struct Deferral {
    state: Mutex<State>,
    ended: Notify,
}

impl Deferral {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a copy of this number of bytes whose last event is this `late`, with more available.
    pub(super) fn behind(&self, late: Duration, bytes: usize) {
        let mut state = self.state();
        match &mut *state {
            State::Idle if late >= LATE => {
                *state = State::Deferring { until: Instant::now() + late.min(MAX), bytes };
            }
            State::Deferring { bytes: copied, .. } => {
                *copied += bytes;
                if late < LATE || *copied > BYTES_MAX {
                    *state = State::Working;
                    self.ended.notify_one();
                }
            }
            State::Idle | State::Working => {}
        }
    }

    /// Ends the deferral: no more entries are available, or the copier ended.
    pub(super) fn caught_up(&self) {
        let mut state = self.state();
        if matches!(*state, State::Deferring { .. }) {
            *state = State::Working;
            self.ended.notify_one();
        }
    }

    /// Until when claims are deferred, but at most until `deadline`: the end of a lease or park is not
    /// deferred.
    pub(super) fn until(&self, deadline: Option<Instant>) -> Option<Instant> {
        let mut state = self.state();
        let State::Deferring { until, .. } = *state else { return None };
        let until = deadline.map_or(until, |deadline| until.min(deadline));
        if until <= Instant::now() {
            *state = State::Working;
            return None;
        }
        Some(until)
    }

    /// Returns when a deferral ends before its time.
    pub(super) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// The pool found nobody ready.
    pub(super) fn drained(&self) {
        let mut state = self.state();
        if matches!(*state, State::Working) {
            *state = State::Idle;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn late_events_wait_at_most_as_long_again_and_a_bounded_time() {
        for (late, wait) in [(LATE, LATE), (SECOND, SECOND), (60 * SECOND, MAX)] {
            let deferral = Deferral::default();
            deferral.behind(late, 1);
            assert_eq!(deferral.until(None), Some(Instant::now() + wait));
            deferral.behind(late + SECOND, 1);
            assert_eq!(deferral.until(None), Some(Instant::now() + wait), "not prolonged");
            tokio::time::advance(wait).await;
            assert_eq!(deferral.until(None), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn events_that_are_hardly_late_never_wait() {
        let deferral = Deferral::default();
        deferral.behind(LATE / 2, 1);
        assert_eq!(deferral.until(None), None);
        deferral.behind(SECOND, 1);
        deferral.behind(LATE / 2, 1);
        assert_eq!(deferral.until(None), None);
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_when_all_is_copied_at_a_deadline_and_when_much_is_copied() {
        let ends: [fn(&Deferral) -> Option<Instant>; 3] = [
            |deferral| {
                deferral.caught_up();
                deferral.until(None)
            },
            |deferral| deferral.until(Some(Instant::now())),
            |deferral| {
                deferral.behind(SECOND, BYTES_MAX);
                deferral.until(None)
            },
        ];
        for end in ends {
            let deferral = Deferral::default();
            deferral.behind(SECOND, 1);
            assert!(deferral.until(None).is_some());
            assert_eq!(end(&deferral), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_one_begins_only_when_nobody_is_ready() {
        let deferral = Deferral::default();
        deferral.behind(SECOND, 1);
        deferral.caught_up();
        deferral.behind(SECOND, 1);
        assert_eq!(deferral.until(None), None, "the bots are not claimed yet");
        deferral.drained();
        deferral.behind(SECOND, 1);
        assert!(deferral.until(None).is_some());
    }
}
