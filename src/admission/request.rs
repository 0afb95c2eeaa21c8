//! What a request asks for, its class, and the reasons for which it is refused.

use std::time::Duration;

/// How much it matters that a request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Health, completions of what was begun: never shed, but bounded.
    P0,
    /// A caller waits for it: one thing looked up or changed.
    P1,
    /// It can be sent again, such as events.
    P2,
    /// It can wait: backfill, listings, exports.
    P3,
}

impl Class {
    /// All, the highest first.
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

    /// So many requests at most are in flight when one more of the class begins. The limit is for the
    /// lower classes, less of it for the lowest; the first finds room above it, since it is what all
    /// this is for: where it alone asks for too much, the limit follows.
    pub(super) fn allowed(self, limit: usize, max: usize) -> usize {
        match self {
            Self::P0 | Self::P1 => limit.saturating_mul(2).min(max).max(1),
            Self::P2 => (limit - limit.div_ceil(10)).max(1),
            Self::P3 => (limit - limit.div_ceil(4)).max(1),
        }
    }

    /// How long it may wait while waiting is the rule. The first class goes before all others, so that
    /// its queue is a short one while it alone does not ask for too much.
    pub(super) fn target(self) -> Duration {
        match self {
            Self::P0 | Self::P1 => Duration::from_millis(50),
            Self::P2 | Self::P3 => Duration::from_millis(1),
        }
    }

    /// How long it may wait while waiting is the exception.
    pub(super) fn interval(self) -> Duration {
        match self {
            Self::P0 | Self::P1 => Duration::from_millis(100),
            Self::P2 | Self::P3 => Duration::from_millis(20),
        }
    }
}

/// What is done with a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Requests are shed when there is no room.
    #[default]
    Enforce,
    /// What would be shed is counted and let through.
    Shadow,
    /// All are let through, and nothing is decided.
    Off,
    /// All are refused.
    Refuse,
}

impl Mode {
    pub(super) const ALL: [Self; 4] = [Self::Enforce, Self::Shadow, Self::Off, Self::Refuse];
}

/// Why a request was not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// No room, neither in flight nor to wait.
    Capacity,
    /// It waited too long.
    Wait,
    /// It waited, and a higher class took its place.
    Displaced,
    /// Its caller asks for much more than the others do, and there is not room for all.
    Share,
    /// Less time is left than it takes, or none.
    Deadline,
    /// Too many of the critical class at once.
    Critical,
    /// Its token or bot has a quota, which is used up.
    Quota,
    /// An operator switched the class off.
    Switch,
}

impl Reason {
    /// All.
    pub const ALL: [Self; 8] = [
        Self::Capacity,
        Self::Wait,
        Self::Displaced,
        Self::Share,
        Self::Deadline,
        Self::Critical,
        Self::Quota,
        Self::Switch,
    ];

    /// Its name, as a label and in headers.
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
        }
    }

    /// Whether it was for want of room: such a refusal can have been a mistake.
    pub(super) fn is_want_of_room(self) -> bool {
        matches!(self, Self::Capacity | Self::Wait | Self::Displaced | Self::Share)
    }
}

/// A kind of requests that take about as long: the number of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation(pub u16);

/// A request that wants to be begun.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// How much it matters.
    pub class: Class,
    /// What it is.
    pub operation: Operation,
    /// It goes on with something begun before: it ranks first in its class.
    pub continues: bool,
    /// Who asks, as a number; 0: nobody in particular.
    pub caller: u64,
    /// When the answer is worth nothing any more, in the time of the admission.
    pub deadline: Option<Duration>,
    /// As how many requests it counts while it is in flight, by its size; at most half of what its
    /// class may use. It starts where one place is free.
    pub places: usize,
}
