//! The properties of a request, its class, and the reasons for refusals.

use std::time::Duration;

/// The importance of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Health, completions of started work: never shed, but bounded.
    P0,
    /// A caller waits for it: it reads or changes one thing.
    P1,
    /// It can be sent again, such as events.
    P2,
    /// It can wait: backfill, listings, exports.
    P3,
}

impl Class {
    /// All classes, the highest first.
    pub const ALL: [Self; 4] = [Self::P0, Self::P1, Self::P2, Self::P3];

    /// Its name in the configuration, in headers and as a label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::P0 => "p0",
            Self::P1 => "p1",
            Self::P2 => "p2",
            Self::P3 => "p3",
        }
    }

    /// The rank of requests of the class.
    pub(super) fn rank(self) -> Rank {
        match self {
            Self::P0 => Rank::P0,
            Self::P1 => Rank::P1,
            Self::P2 => Rank::P2,
            Self::P3 => Rank::P3,
        }
    }
}

/// The order in which requests start: that of the classes, and behind them heavy callers and
/// strangers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    P0,
    P1,
    P2,
    P3,
    Last,
}

impl Rank {
    /// All ranks, the highest first.
    pub(super) const ALL: [Self; 5] = [Self::P0, Self::P1, Self::P2, Self::P3, Self::Last];

    /// Maximum number of requests in flight at which one more of the rank may start. The lower
    /// ranks may use the limit or less of it. The first class may exceed it, because admission
    /// control protects this class first; if it alone causes overload, the limit itself shrinks.
    pub(super) fn allowed(self, limit: usize, max: usize) -> usize {
        match self {
            Self::P0 | Self::P1 => limit.saturating_mul(2).min(max).max(1),
            Self::P2 => (limit - limit.div_ceil(10)).max(1),
            Self::P3 => (limit - limit.div_ceil(4)).max(1),
            Self::Last => (limit - limit.div_ceil(3)).max(1),
        }
    }

    /// Maximum waiting time under persistent overload. The first class goes before all others, so
    /// its queue is short unless it alone causes the overload.
    pub(super) fn target(self) -> Duration {
        match self {
            Self::P0 | Self::P1 => Duration::from_millis(50),
            Self::P2 | Self::P3 | Self::Last => Duration::from_millis(1),
        }
    }

    /// Maximum waiting time otherwise.
    pub(super) fn interval(self) -> Duration {
        match self {
            Self::P0 | Self::P1 => Duration::from_millis(100),
            Self::P2 | Self::P3 | Self::Last => Duration::from_millis(20),
        }
    }
}

/// The handling of a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Requests are shed when capacity is short.
    #[default]
    Enforce,
    /// Requests that would be shed are counted and admitted.
    Shadow,
    /// All requests are admitted without a decision.
    Off,
    /// All requests are refused.
    Refuse,
}

impl Mode {
    pub(super) const ALL: [Self; 4] = [Self::Enforce, Self::Shadow, Self::Off, Self::Refuse];
}

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// There is no free place, neither in flight nor in the queue.
    Capacity,
    /// It waited too long.
    Wait,
    /// It waited, and a higher class took its place.
    Displaced,
    /// Its caller sends much more than the others, and capacity is short.
    Share,
    /// The deadline passed, or the remaining time is shorter than the request usually takes.
    Deadline,
    /// Too many critical requests in flight.
    Critical,
    /// The quota of its token or bot is used up.
    Quota,
    /// An operator set the mode `refuse` for the class.
    Switch,
    /// Its sender has too many events on the bus that are not copied yet.
    Bus,
    /// Too many bytes of answers are not read by their client yet.
    Unread,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::Capacity,
        Self::Wait,
        Self::Displaced,
        Self::Share,
        Self::Deadline,
        Self::Critical,
        Self::Quota,
        Self::Switch,
        Self::Bus,
        Self::Unread,
    ];

    /// Its name as a label and in headers.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Capacity => "capacity",
            Self::Wait => "wait",
            Self::Displaced => "displaced",
            Self::Share => "share",
            Self::Deadline => "deadline",
            Self::Critical => "critical",
            Self::Quota => "quota",
            Self::Switch => "switch",
            Self::Bus => "bus",
            Self::Unread => "unread",
        }
    }

    /// The reasons for which a class is refused only because the process has too little capacity.
    /// The others concern what one caller does.
    pub(crate) fn of_capacity(class: Class) -> &'static [Self] {
        match class {
            Class::P0 => &[Self::Critical],
            Class::P1 | Class::P2 | Class::P3 => &[Self::Capacity, Self::Wait, Self::Displaced],
        }
    }

    /// Whether the reason is a lack of capacity: such a refusal can turn out to be unnecessary.
    pub(super) fn is_want_of_room(self) -> bool {
        matches!(self, Self::Capacity | Self::Wait | Self::Displaced | Self::Share)
    }
}

/// A kind of requests with similar durations: the number of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation(pub u16);

/// A request before the decision.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Its importance.
    pub class: Class,
    /// Its kind.
    pub operation: Operation,
    /// It continues started work, so it ranks first in its class.
    pub continues: bool,
    /// The caller as a number; 0: no particular caller.
    pub caller: u64,
    /// It was admitted before and gave its places back, so it does not count for its caller again.
    pub asks_again: bool,
    /// Its sender proved nothing: it ranks below all others, and starts only if no request waits.
    pub is_stranger: bool,
    /// The time after which the answer is useless, on the clock of the admission.
    pub deadline: Option<Duration>,
    /// The number of requests that it counts as while in flight, by its size; at most half of those
    /// that its class may use. It can start when one place is free.
    pub places: usize,
}
