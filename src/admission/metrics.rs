//! The metrics of admission control.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::{Class, Counted, Reason};
use crate::metrics::{
    ADMISSION, HTTP_DEMAND_RATIO, INFLIGHT, INFLIGHT_LIMIT, QUEUE_WAIT_SECONDS, SHED,
    SHED_FALSE_POSITIVES, SHED_SECONDS,
};

/// The metrics of admission control. Every series exists from the start, at 0; those of
/// `shed_total` only for [`Reason::of_capacity`], the others from the first refusal.
#[derive(Clone)]
pub(crate) struct AdmissionMetrics {
    decisions: [[Counter; Counted::ALL.len()]; 4],
    waits: [Histogram; 4],
    pub(crate) false_positives: Counter,
    pub(crate) in_flight: Gauge,
    pub(crate) limit: Gauge,
    pub(crate) demand_ratio: Gauge,
}

impl AdmissionMetrics {
    /// The handles, at 0.
    pub(crate) fn new() -> Self {
        let count = |class: Class, decision: Counted| {
            let counter =
                counter!(ADMISSION, "class" => class.as_str(), "decision" => decision.as_str());
            counter.absolute(0);
            counter
        };
        let metrics = Self {
            decisions: Class::ALL.map(|class| Counted::ALL.map(|decision| count(class, decision))),
            waits: Class::ALL
                .map(|class| histogram!(QUEUE_WAIT_SECONDS, "class" => class.as_str())),
            false_positives: counter!(SHED_FALSE_POSITIVES),
            in_flight: gauge!(INFLIGHT),
            limit: gauge!(INFLIGHT_LIMIT),
            demand_ratio: gauge!(HTTP_DEMAND_RATIO),
        };
        metrics.false_positives.absolute(0);
        for gauge in [&metrics.in_flight, &metrics.limit, &metrics.demand_ratio] {
            gauge.set(0.0);
        }
        metrics
    }

    pub(crate) fn decided(&self, class: Class, decision: Counted) {
        self.decisions[class as usize][decision as usize].increment(1);
    }

    pub(crate) fn waited(&self, class: Class, waited: Duration) {
        self.waits[class as usize].record(waited.as_secs_f64());
    }
}

impl std::fmt::Debug for AdmissionMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AdmissionMetrics")
    }
}

/// The refusals of one route of one class for one reason.
pub(crate) fn shed(class: Class, route: &str, reason: Reason) -> Counter {
    let route = route.to_owned();
    counter!(SHED, "class" => class.as_str(), "route" => route, "reason" => reason.as_str())
}

/// Time until a refusal was sent.
pub(crate) fn shed_seconds() -> Histogram {
    histogram!(SHED_SECONDS)
}
