//! Estimates the duration of slices and events.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Number of events in a slice while their duration is unknown.
const FEW: usize = 8;

/// Moving averages of handling times, in nanoseconds; 0: unknown.
#[derive(Debug, Default)]
pub(super) struct Estimate {
    slice: AtomicU64,
    event: AtomicU64,
    /// Number of events in a slice whose handler mostly waits; 0: no slice was handled yet.
    waiting: AtomicUsize,
}

impl Estimate {
    pub(super) fn observe(&self, took: Duration, events: usize) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        // Relaxed and not atomic as a whole: a lost sample does not matter to an average.
        for (average, sample) in [(&self.slice, nanos), (&self.event, nanos / events.max(1) as u64)]
        {
            let old = average.load(Ordering::Relaxed);
            let new = if old == 0 { sample } else { old - old / 8 + sample / 8 };
            average.store(new.max(1), Ordering::Relaxed);
        }
    }

    /// A call to a receiver or a store takes long before its first event is handled. Dividing its time
    /// by the number of events would lead to slices of one event, and keep them that small. Instead,
    /// slices of handlers that mostly wait double while calls are short, and halve when calls are long.
    pub(super) fn observe_wait(&self, took: Duration, events: usize, time: Duration) {
        let now = self.waiting();
        let next = match took {
            took if took > time => now / 2,
            took if took <= time / 2 && events >= now => now.saturating_mul(2),
            _ => return,
        };
        // Not atomic as a whole, like the averages.
        self.waiting.store(next.max(1), Ordering::Relaxed);
    }

    /// The maximum number of events in a slice whose handler mostly waits.
    pub(super) fn waiting(&self) -> usize {
        match self.waiting.load(Ordering::Relaxed) {
            0 => FEW,
            events => events,
        }
    }

    pub(super) fn slice(&self) -> Duration {
        Duration::from_nanos(self.slice.load(Ordering::Relaxed))
    }

    /// The number of events that fit into `time`; a few while their duration is unknown.
    pub(super) fn events_in(&self, time: Duration) -> usize {
        match self.event.load(Ordering::Relaxed) {
            0 => FEW,
            event => usize::try_from(time.as_nanos() / u128::from(event)).unwrap_or(usize::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_waiting_handlers_grow_while_calls_are_short_and_shrink_when_they_are_long() {
        let time = Duration::from_millis(200);
        let estimate = Estimate::default();
        let call = |millis, events| {
            estimate.observe_wait(Duration::from_millis(millis), events, time);
            estimate.waiting()
        };
        assert_eq!(estimate.waiting(), FEW);
        assert_eq!([call(90, 8), call(90, 16), call(90, 8)], [16, 32, 32], "8 say nothing of 32");
        assert_eq!([call(150, 32), call(201, 32), call(201, 1)], [32, 16, 8]);
        assert_eq!([call(200, 8), call(101, 8), call(100, 8)], [8, 8, 16], "the bounds");
        call(201, 16);
        for _ in 0..9 {
            call(9_000, 1);
        }
        assert_eq!(estimate.waiting(), 1);
        assert_eq!(call(1, 1), 2);
    }

    #[test]
    fn averages_move_an_eighth_of_the_way_to_each_sample() {
        let estimate = Estimate::default();
        let time = Duration::from_micros(1);
        assert_eq!((estimate.slice(), estimate.events_in(time)), (Duration::ZERO, FEW), "unknown");
        estimate.observe(Duration::from_nanos(800), 8);
        assert_eq!((estimate.slice(), estimate.events_in(time)), (Duration::from_nanos(800), 10));
        estimate.observe(Duration::from_nanos(1_600), 1);
        assert_eq!(estimate.slice(), Duration::from_nanos(900));
        assert_eq!(estimate.events_in(Duration::from_nanos(2_879)), 9, "an event takes 288 ns");
        assert_eq!(estimate.events_in(Duration::from_nanos(2_880)), 10);
        estimate.observe(Duration::ZERO, 0);
        assert!(estimate.slice() > Duration::ZERO, "known, however short");
    }
}
