//! The systems that the bench compares.

use std::time::Duration;

use serde::Serialize;

/// Number of events that one call adds.
pub(super) const BATCH: usize = 500;
/// Number of events that a system may handle at a time while throughput is measured, if it keeps the
/// order of each tenant meanwhile.
const WORKERS: usize = 64;
/// The same while fairness is measured.
const SLOTS: usize = 8;
/// Time that the handler takes per event while fairness is measured.
pub(super) const HANDLING: Duration = Duration::from_millis(3);

/// A system with its form of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum System {
    /// Fairlane, with a queue per tenant.
    Fairlane,
    /// `GroupMQ`: one queue, with a group per tenant.
    Groupmq,
    /// `BullMQ`: one queue for all tenants, first in first out.
    Bullmq,
    /// `BullMQ`: a queue and a worker per tenant.
    BullmqPerTenant,
    /// A plain worker of a stream: the floor, without guarantees.
    Xreadgroup,
}

/// The measured property.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Measure {
    /// Rates of adding and handling, and the CPU time of Redis.
    Throughput,
    /// Waits of quiet tenants beside busy ones.
    Fairness,
    /// What a campaign of faults does to the events. The workers are processes.
    Faults,
}

impl System {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fairlane => "fairlane",
            Self::Groupmq => "groupmq",
            Self::Bullmq => "bullmq",
            Self::BullmqPerTenant => "bullmq-per-tenant",
            Self::Xreadgroup => "xreadgroup",
        }
    }

    /// Whether it is a program of Node.js.
    pub(super) fn is_node(self) -> bool {
        matches!(self, Self::Groupmq | Self::Bullmq | Self::BullmqPerTenant)
    }

    /// Number of events that it handles at a time. More would lose the order that it is used for.
    pub(super) fn concurrency(self, measure: Measure) -> usize {
        match (self, measure) {
            (Self::Fairlane | Self::Groupmq, Measure::Throughput) => WORKERS,
            (Self::Fairlane | Self::Groupmq | Self::Xreadgroup, Measure::Fairness)
            | (Self::Fairlane | Self::Groupmq, Measure::Faults) => SLOTS,
            // A second reader of the stream would overtake the first one. Under faults, each process
            // has one.
            (Self::Xreadgroup, Measure::Throughput | Measure::Faults)
            // Per queue, and thus per tenant in the second form.
            | (Self::Bullmq | Self::BullmqPerTenant, _) => 1,
        }
    }

    /// The events per tenant of a system that would otherwise take most of the time of the bench.
    pub(super) fn events_per_tenant(self, events: usize) -> usize {
        match self {
            Self::BullmqPerTenant => events.div_ceil(4),
            _ => events,
        }
    }

    /// The backlog of each busy tenant, so that all of them together keep this system busy for
    /// `time`.
    pub(super) fn backlog_per_tenant(self, busy: usize, time: Duration) -> usize {
        let slots = match self {
            // A slot per busy tenant. Redis and Node.js limit it to the rate of fewer slots.
            Self::BullmqPerTenant => busy.min(SLOTS),
            _ => self.concurrency(Measure::Fairness),
        };
        let per_slot =
            usize::try_from(time.as_micros() / HANDLING.as_micros()).unwrap_or(usize::MAX);
        slots.saturating_mul(per_slot).div_ceil(busy)
    }

    /// The order and the fairness that it promises in this form.
    pub(super) fn guarantees(self) -> &'static str {
        match self {
            Self::Fairlane => {
                "order per tenant, fair across tenants; leases with fences, retries, dead letters"
            }
            Self::Groupmq => {
                "order per tenant, the oldest job first across tenants; timeouts, retries"
            }
            Self::Bullmq => {
                "order over all tenants until a job is retried, no fairness; locks, retries"
            }
            Self::BullmqPerTenant => {
                "order per tenant until a job is retried, no limit over all tenants; locks, retries"
            }
            Self::Xreadgroup => "none: no order with a second worker, no fairness, no retries",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_keeps_each_system_busy_for_the_same_time() {
        let time = Duration::from_secs(6);
        for (system, slots) in [
            (System::Fairlane, 8),
            (System::Groupmq, 8),
            (System::Bullmq, 1),
            (System::BullmqPerTenant, 8),
            (System::Xreadgroup, 8),
        ] {
            let each = system.backlog_per_tenant(20, time);
            assert_eq!(each, slots * 100, "{system:?}");
        }
        assert_eq!(System::BullmqPerTenant.backlog_per_tenant(2, time), 2_000);
        assert_eq!(System::Bullmq.backlog_per_tenant(3, time), 667);
    }
}
