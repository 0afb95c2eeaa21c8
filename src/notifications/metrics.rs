//! The metrics of the notifications.

use metrics::{Gauge, Histogram, counter, gauge, histogram};

use super::record::{NO_KIND, OUTCOMES};
use crate::metrics::{
    NOTIFICATIONS, NOTIFICATIONS_DUE, NOTIFICATIONS_LATENESS, NOTIFICATIONS_OVERDUE,
};
use crate::outbound::breakers::prepare;

/// The outcome of a notification without a record.
const GONE: &str = "gone";

/// Metrics of the notifications.
#[derive(Clone)]
pub(crate) struct NotificationMetrics {
    /// Time from due to the first send.
    pub(crate) lateness: Histogram,
}

impl NotificationMetrics {
    /// Creates the handles and sets the series to 0.
    pub(crate) fn new() -> Self {
        for outcome in OUTCOMES.into_iter().chain([GONE]) {
            counter!(NOTIFICATIONS, "type" => NO_KIND, "outcome" => outcome).absolute(0);
        }
        prepare();
        Self { lateness: histogram!(NOTIFICATIONS_LATENESS) }
    }

    /// Counts an outcome of a notification, by its statistics type.
    pub(crate) fn count(kind: &str, outcome: &str) {
        let (kind, outcome) = (kind.to_owned(), outcome.to_owned());
        counter!(NOTIFICATIONS, "type" => kind, "outcome" => outcome).increment(1);
    }

    /// Counts notifications without a record. So their types are unknown.
    pub(crate) fn count_gone(count: u64) {
        counter!(NOTIFICATIONS, "type" => NO_KIND, "outcome" => GONE).increment(count);
    }
}

/// Metrics of the due times. Only the process that samples sets them.
#[derive(Clone)]
pub(crate) struct DueMetrics {
    pub(crate) due: Gauge,
    pub(crate) overdue: Gauge,
}

impl DueMetrics {
    /// Creates the handles and sets the series to 0.
    pub(crate) fn new() -> Self {
        let metrics =
            Self { due: gauge!(NOTIFICATIONS_DUE), overdue: gauge!(NOTIFICATIONS_OVERDUE) };
        metrics.due.set(0.0);
        metrics.overdue.set(0.0);
        metrics
    }
}
