//! The gauges while few requests are answered. A window sets them when it is complete, which takes
//! answered requests: the demand of the last burst would otherwise show until the next one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::request::Rank;
use super::{Admission, small};
use crate::lifecycle::Shutdown;

/// Interval of looking, and the time without a complete window that counts as a lull.
const LULL: Duration = Duration::from_secs(2);

/// Keeps the gauges of `admission` current until the soft stop, or until the next instance has taken over:
/// then they are its gauges.
pub(crate) async fn watch(admission: Arc<Admission>, shutdown: Shutdown) {
    let mut shed = 0;
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = shutdown.handed.cancelled() => break,
            () = tokio::time::sleep(LULL) => shed = admission.look(shed),
        }
    }
}

impl Admission {
    /// Sets the gauges. Takes and returns the number of refusals since the last window, at the
    /// previous look and now.
    fn look(&self, shed_before: u64) -> u64 {
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        self.metrics.in_flight.set(small(in_flight));
        let shed = self.shed_lately.load(Ordering::Relaxed);
        // If the lock is taken, a request was just answered. It is kept until the ratio is set, so
        // that no window ends meanwhile.
        let Ok(limiter) = self.limiter.try_lock() else { return shed };
        let now = self.now();
        let is_recent = limiter.begun().is_some_and(|begun| now.saturating_sub(begun) < LULL);
        if is_recent || shed != shed_before || self.ahead(Rank::Last) > 0 {
            return shed;
        }
        // No request waits and none is refused: the demand is what is in flight.
        let limit = self.limit.load(Ordering::Relaxed).max(1);
        self.metrics.demand_ratio.set(small(in_flight) / small(limit));
        if in_flight > 0 {
            return shed;
        }
        // They belong to the burst. The next window may begin much later.
        self.is_bound.store(false, Ordering::Relaxed);
        self.shed_lately.store(0, Ordering::Relaxed);
        0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use crate::admission::{Class, Decision, Operation, Reason, Request, Settings, Ticks};
    use crate::metrics::{HTTP_DEMAND_RATIO, INFLIGHT};

    fn ask(class: Class) -> Request {
        Request {
            class,
            operation: Operation(1),
            continues: false,
            caller: 0,
            asks_again: false,
            is_stranger: false,
            deadline: None,
            places: 1,
        }
    }

    #[test]
    fn after_a_burst_the_demand_is_what_is_in_flight() {
        let clock = Arc::new(AtomicU64::new(0));
        let read = Arc::clone(&clock);
        let ticks: Ticks = Arc::new(move || Duration::from_millis(read.load(Ordering::Relaxed)));
        let pass = |ms| {
            clock.fetch_add(ms, Ordering::Relaxed);
        };
        let recorder = PrometheusBuilder::new().build_recorder();
        let admission = ::metrics::with_local_recorder(&recorder, || {
            Admission::new(Settings::default(), ticks)
        });
        let gauge = |name: &str| -> Option<f64> {
            let text = recorder.handle().render();
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
            text.lines().find_map(value)
        };
        let begin = |class| match admission.ask(&ask(class)) {
            Decision::Begin(permit) => permit,
            other => panic!("{other:?}"),
        };

        admission.is_bound.store(true, Ordering::Relaxed);
        for _ in 0..20 {
            let permit = begin(Class::P1);
            admission.refused(Class::P1, Reason::Capacity);
            pass(10);
            permit.answered();
        }
        let burst = gauge(HTTP_DEMAND_RATIO);
        assert!(burst > Some(1.0), "{burst:?}");
        assert_eq!(admission.look(0), 4, "refused since the window");
        pass(2_000);
        assert_eq!(
            (admission.look(3), gauge(HTTP_DEMAND_RATIO)),
            (4, burst),
            "one more is refused"
        );
        assert_eq!((admission.look(4), gauge(HTTP_DEMAND_RATIO)), (0, Some(0.0)));

        assert_eq!(admission.state().limit, 8);
        let mut permits = Vec::from([Class::P1; 4].map(begin));
        assert_eq!(admission.look(0), 0);
        assert_eq!((gauge(INFLIGHT), gauge(HTTP_DEMAND_RATIO)), (Some(4.0), Some(0.5)));
        permits.push(begin(Class::P1));
        let Decision::Wait(waiting) = admission.ask(&ask(Class::P3)) else { panic!("it starts") };
        assert_eq!(admission.look(0), 0);
        assert_eq!(
            (gauge(INFLIGHT), gauge(HTTP_DEMAND_RATIO)),
            (Some(5.0), Some(0.5)),
            "one waits"
        );
        drop((waiting, permits));

        admission.refused(Class::P1, Reason::Capacity);
        admission.is_bound.store(true, Ordering::Relaxed);
        assert_eq!([admission.look(0), admission.look(1)], [1, 0]);
        pass(60_000);
        begin(Class::P1).answered();
        let ratio = gauge(HTTP_DEMAND_RATIO);
        assert!(ratio.is_some_and(|ratio| ratio < 0.1), "without those of the burst: {ratio:?}");
    }
}
