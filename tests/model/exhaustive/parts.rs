//! The parts of the explored system, its state, and its steps.

use std::sync::Arc;

use crate::state_machine::{Attempts, Bot, Event, Granted, Server, Stream};

/// Maximum number of bots.
pub(super) const BOTS: usize = 3;
/// Maximum number of streams.
pub(super) const STREAMS: u8 = 2;

/// The parts of the system, how often each accident may happen, and the rule that is left out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct System {
    pub(crate) consumers: usize,
    /// The stream and the bot of each event. The number of an event is its index here.
    pub(crate) events: &'static [(Stream, Bot)],
    pub(crate) budget: Budget,
    pub(crate) without: Option<Rule>,
    pub(crate) turns: Turns,
    /// The burst of every bot. Without it, bots have no rate.
    pub(crate) burst: Option<u8>,
}

/// Which of the ready bots a claim gets.
#[cfg_attr(not(test), allow(dead_code, reason = "large systems are always reduced"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turns {
    /// The one whose turn it is.
    Kept,
    /// Any of them.
    Any,
    /// Any of them, and one of all states that are alike: see [`super::reduction`].
    AnyReduced,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    Recover,
    FenceCheck,
    /// A lease is named by its run and its fence, not by its fence alone.
    RunCheck,
    /// All holders of a bot take tokens from the same bucket.
    OneBucket,
    /// One call looks into the bucket and takes the tokens.
    TakeAtOnce,
}

/// How often each accident or command may still happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    pub(crate) crashes: u8,
    /// Consumers that are frozen beyond their lease.
    pub(crate) freezes: u8,
    pub(crate) lost_replies: u8,
    pub(crate) lost_tails: u8,
    pub(crate) failures: u8,
    pub(crate) purges: u8,
    pub(crate) pauses: u8,
}

/// A system in which nothing goes wrong.
pub(crate) const NOTHING_WRONG: Budget = Budget {
    crashes: 0,
    freezes: 0,
    lost_replies: 0,
    lost_tails: 0,
    failures: 0,
    purges: 0,
    pauses: 0,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SystemState {
    pub(super) server: Server,
    /// The state that a restart would find on disk.
    pub(super) saved: Option<Arc<Server>>,
    pub(super) run: u32,
    /// The offset of each stream up to which the fan-out believes it has copied.
    pub(super) copied: [u8; STREAMS as usize],
    /// In order: consumers are alike, so of all states that differ only in their order, one is
    /// explored.
    pub(super) consumers: Vec<Option<Held>>,
    pub(super) budget: Budget,
    /// Events that a handler has handled, as bits.
    pub(super) handled: u8,
    /// Events that an operator purged, as bits. They count neither as lost nor as out of order.
    pub(super) purged: u8,
    pub(super) buckets: [Bucket; BOTS],
    pub(super) broken: Option<&'static str>,
    pub(super) broken_invariant: Option<&'static str>,
}

/// The rate of a bot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Bucket {
    pub(super) tokens: u8,
    /// The tokens that have ever been in the bucket, without those of handled events.
    pub(super) allowed: u8,
}

/// A lease as its holder sees it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Held {
    pub(super) bot: Bot,
    pub(super) fence: u64,
    pub(super) run: u32,
    pub(super) acked: u32,
    pub(super) limit: u8,
    pub(super) slice: Option<Vec<Event>>,
    pub(super) handled: u32,
    /// A completion without a reply. It is repeated unchanged.
    pub(super) unanswered: Option<(Ending, u32)>,
    /// With a rate: whether the slice has tokens.
    pub(super) permit: Permit,
    /// Hidden from the holder: the server has ended this lease.
    pub(super) superseded: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Permit {
    Needed,
    /// Without [`Rule::TakeAtOnce`]: the bucket had this number of tokens.
    Seen(u8),
    /// `empty`: the bucket has no more tokens, so that the bot rests after the slice.
    Given {
        empty: bool,
    },
}

/// The maximum number of events in a slice, with a batch of two: as the pool has it.
fn slice_limit(attempts: Attempts) -> u8 {
    let counted = attempts.suspect + attempts.lost + attempts.failed > 0;
    if counted || attempts.isolate >= 2 { 1 } else { 2 }
}

impl Held {
    pub(super) fn of(granted: &Granted, run: u32) -> Self {
        Self {
            bot: granted.bot,
            fence: granted.fence,
            run,
            acked: 0,
            limit: slice_limit(granted.attempts),
            slice: None,
            handled: 0,
            unanswered: None,
            permit: Permit::Needed,
            superseded: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Ending {
    Keep,
    Release,
    Park,
    Fail,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// `taker`: the free consumer in the process of the copier, which takes a lease if it may.
    Enqueue {
        stream: Stream,
        taker: Option<usize>,
        reply_lost: bool,
    },
    /// `bot`: the bot that is leased, if bots take no turns.
    Claim {
        consumer: usize,
        bot: Option<Bot>,
        reply_lost: bool,
    },
    Peek {
        consumer: usize,
    },
    /// Takes tokens for the slice.
    Permit {
        consumer: usize,
        reply_lost: bool,
    },
    /// A bucket gets a token.
    Refill {
        bot: Bot,
    },
    Handle {
        consumer: usize,
    },
    Complete {
        consumer: usize,
        ending: Ending,
        reply_lost: bool,
    },
    Repeat {
        consumer: usize,
    },
    /// The deadline of a lease or a park passes.
    Deadline {
        bot: Bot,
    },
    Crash {
        consumer: usize,
    },
    Save,
    LoseTail,
    Purge {
        bot: Bot,
    },
    Pause {
        bot: Bot,
    },
    Resume {
        bot: Bot,
    },
}

impl System {
    /// A system in which nothing is left out and bots have no rate.
    pub(crate) fn new(
        consumers: usize,
        events: &'static [(Stream, Bot)],
        budget: Budget,
        turns: Turns,
    ) -> Self {
        Self { consumers, events, budget, without: None, turns, burst: None }
    }

    pub(super) fn bots(&self) -> Bot {
        self.events.iter().map(|&(_, bot)| bot + 1).max().unwrap_or(0)
    }

    pub(super) fn of_stream(&self, stream: Stream) -> impl Iterator<Item = (Bot, Event)> {
        let numbered = (0..).zip(self.events);
        numbered
            .filter(move |(_, event)| event.0 == stream)
            .map(|(number, event)| (event.1, number))
    }
}

pub(super) fn charge(state: &mut SystemState, step: &Step) {
    let budget = &mut state.budget;
    match *step {
        Step::Enqueue { reply_lost: true, .. }
        | Step::Claim { reply_lost: true, .. }
        | Step::Permit { reply_lost: true, .. }
        | Step::Complete { reply_lost: true, .. } => budget.lost_replies -= 1,
        Step::Complete { consumer, ending: Ending::Fail | Ending::Park, .. } => {
            // A bot without tokens is parked, too. That is no failure.
            let held = state.consumers[consumer].as_ref().unwrap();
            budget.failures -= u8::from(!held.rests());
        }
        Step::Crash { .. } => budget.crashes -= 1,
        Step::LoseTail => budget.lost_tails -= 1,
        Step::Purge { .. } => budget.purges -= 1,
        Step::Pause { .. } => budget.pauses -= 1,
        Step::Deadline { bot } => {
            let held = state.consumers.iter().flatten().any(|held| held.bot == bot);
            if held && state.server.own.contains_key(&bot) {
                budget.freezes -= 1;
            }
        }
        _ => {}
    }
}
