//! The explored system: its state, and the effect of each step.

use std::sync::Arc;

use crate::model::state_machine::{
    Bot, Claim, Completed, Completion, Enqueued, Event, Granted, Mode, Server, Stream, Take,
};

const BOTS: u8 = 2;
const FAR_MS: i64 = 1 << 40;

/// The parts of the system, how often each accident may happen, and the rule that is left out.
#[derive(Debug, Clone)]
pub(super) struct System {
    /// The stream and the bot of each event. The number of an event is its index here.
    pub(super) events: &'static [(Stream, Bot)],
    pub(super) budget: Budget,
    pub(super) without: Option<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    Recover,
    FenceCheck,
    /// A lease is named by its run and its fence, not by its fence alone.
    RunCheck,
}

/// How often each accident or command may still happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Budget {
    pub(super) crashes: u8,
    /// Consumers that are frozen beyond their lease.
    pub(super) freezes: u8,
    pub(super) lost_replies: u8,
    pub(super) lost_tails: u8,
    pub(super) failures: u8,
    pub(super) purges: u8,
    pub(super) pauses: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct SystemState {
    pub(super) server: Server,
    /// The state that a restart would find on disk.
    pub(super) saved: Option<Arc<Server>>,
    pub(super) run: u32,
    /// The offset of each stream up to which the fan-out believes it has copied.
    pub(super) copied: [u8; 2],
    pub(super) consumers: [Option<Held>; 2],
    pub(super) budget: Budget,
    /// Events that a handler has handled, as bits.
    pub(super) handled: u8,
    /// Events that an operator purged, as bits. They count neither as lost nor as out of order.
    pub(super) purged: u8,
    pub(super) broken: Option<&'static str>,
}

/// A lease as its holder sees it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Held {
    pub(super) bot: Bot,
    pub(super) fence: u64,
    pub(super) run: u32,
    acked: u32,
    limit: u8,
    slice: Option<Vec<Event>>,
    handled: u32,
    /// A completion without a reply. It is repeated unchanged.
    unanswered: Option<(Ending, u32)>,
    /// Hidden from the holder: the server has ended this lease.
    pub(super) superseded: bool,
}

impl Held {
    fn of(granted: &Granted, run: u32) -> Self {
        Self {
            bot: granted.bot,
            fence: granted.fence,
            run,
            acked: 0,
            limit: if granted.attempts.isolate > 0 { 1 } else { 2 },
            slice: None,
            handled: 0,
            unanswered: None,
            superseded: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Ending {
    Keep,
    Release,
    Park,
    Fail,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// `taker`: the free consumer in the process of the copier, which takes a lease if it may.
    Enqueue {
        stream: Stream,
        taker: Option<usize>,
        reply_lost: bool,
    },
    Claim {
        consumer: usize,
        reply_lost: bool,
    },
    Peek {
        consumer: usize,
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
    fn of_stream(&self, stream: Stream) -> impl Iterator<Item = (Bot, Event)> {
        let numbered = (0..).zip(self.events);
        numbered
            .filter(move |(_, event)| event.0 == stream)
            .map(|(number, event)| (event.1, number))
    }

    /// The steps that are possible without a fault while time passes.
    pub(super) fn progress(&self, state: &SystemState, steps: &mut Vec<Step>) {
        for stream in 0..2 {
            let copied = state.copied[usize::from(stream)];
            let missing =
                state.server.offsets.get(&stream).copied().unwrap_or(0) < u64::from(copied);
            if missing || usize::from(copied) < self.of_stream(stream).count() {
                steps.push(Step::Enqueue { stream, taker: None, reply_lost: false });
                let taker = state.consumers.iter().position(Option::is_none);
                if taker.is_some() {
                    steps.push(Step::Enqueue { stream, taker, reply_lost: false });
                }
            }
        }
        for (consumer, held) in state.consumers.iter().enumerate() {
            let Some(held) = held else {
                let due = |&deadline: &i64| deadline <= Self::NOW_US / 1_000;
                if !state.server.ctl.is_empty() || state.server.busy.values().any(due) {
                    steps.push(Step::Claim { consumer, reply_lost: false });
                }
                continue;
            };
            if held.unanswered.is_some() {
                steps.push(Step::Repeat { consumer });
                continue;
            }
            let Some(slice) = &held.slice else {
                steps.push(Step::Peek { consumer });
                continue;
            };
            if (held.handled as usize) < slice.len() {
                steps.push(Step::Handle { consumer });
            }
            if held.handled > 0 || slice.is_empty() {
                let ending = Ending::Release;
                steps.push(Step::Complete { consumer, ending, reply_lost: false });
            }
            if held.handled > 0 {
                let ending = Ending::Keep;
                steps.push(Step::Complete { consumer, ending, reply_lost: false });
            }
        }
        for bot in 0..BOTS {
            let held = state.consumers.iter().flatten().any(|held| held.bot == bot);
            let leased = state.server.own.contains_key(&bot);
            let running = state.server.busy.get(&bot).is_some_and(|&deadline| deadline > 0);
            if running && !(leased && held) {
                steps.push(Step::Deadline { bot });
            }
            if state.server.paused.contains(&bot) {
                steps.push(Step::Resume { bot });
            }
        }
    }

    pub(super) fn accidents(state: &SystemState, steps: &mut Vec<Step>) {
        let budget = state.budget;
        if budget.lost_replies > 0 {
            let lost = steps.iter().filter_map(|step| match *step {
                Step::Enqueue { stream, taker, .. } => {
                    Some(Step::Enqueue { stream, taker, reply_lost: true })
                }
                Step::Claim { consumer, .. } => Some(Step::Claim { consumer, reply_lost: true }),
                Step::Complete { consumer, ending, .. } => {
                    Some(Step::Complete { consumer, ending, reply_lost: true })
                }
                _ => None,
            });
            let lost: Vec<Step> = lost.collect();
            steps.extend(lost);
        }
        for (consumer, held) in state.consumers.iter().enumerate() {
            let Some(held) = held else { continue };
            if budget.crashes > 0 {
                steps.push(Step::Crash { consumer });
            }
            if budget.freezes > 0 && state.server.busy.get(&held.bot).is_some_and(|&at| at > 0) {
                steps.push(Step::Deadline { bot: held.bot });
            }
            let more =
                held.slice.as_ref().is_some_and(|slice| (held.handled as usize) < slice.len());
            if budget.failures > 0 && more && held.unanswered.is_none() {
                for ending in [Ending::Fail, Ending::Park] {
                    steps.push(Step::Complete { consumer, ending, reply_lost: false });
                }
            }
        }
        if budget.lost_tails > 0 {
            steps.push(if state.saved.is_none() { Step::Save } else { Step::LoseTail });
        }
        if budget.purges > 0 && state.server.queues.contains_key(&0) {
            steps.push(Step::Purge { bot: 0 });
        }
        if budget.pauses > 0 {
            steps.push(Step::Pause { bot: 0 });
        }
    }

    /// The first command on every connection. A restart closes all connections, so here each
    /// command starts with it.
    fn connect(&self, state: &mut SystemState) {
        if self.without != Some(Rule::Recover) {
            state.server.recover(Self::NOW_US, state.run);
        }
    }

    /// The clock stands still. That keeps the number of states small and is the worst case: fences
    /// that were lost with a tail are granted again.
    const NOW_US: i64 = 0;

    fn enqueue(
        &self,
        state: &mut SystemState,
        stream: Stream,
        taker: Option<usize>,
        reply_lost: bool,
    ) {
        self.connect(state);
        let last_fence = state.server.f;
        let events: Vec<(Bot, Event)> = self.of_stream(stream).collect();
        let copied = &mut state.copied[usize::from(stream)];
        // If nothing is new, the last event is offered again. The answer tells which events are
        // missing.
        let next = usize::from(*copied).min(events.len() - 1);
        let chain = (next as u64, next as u64 + 1);
        let take = Take { max: usize::from(taker.is_some()), ttl_ms: FAR_MS, seen: 0 };
        let reply = state.server.enqueue(
            Self::NOW_US,
            &[(stream, chain)],
            &events[next..=next],
            None,
            take,
        );
        if !reply_lost {
            *copied = match &reply {
                Enqueued::Stored(..) | Enqueued::Dup => u8::try_from(next + 1).unwrap(),
                Enqueued::Gap(stands) => u8::try_from(stands[0]).unwrap(),
                Enqueued::Repeated(_) => unreachable!("no name is noted"),
            };
        }
        let Enqueued::Stored(_, leases) = reply else { return };
        let (Some(lease), Some(consumer)) = (leases.first(), taker) else { return };
        if lease.granted.fence <= last_fence {
            state.broken = Some("a fence did not rise");
        }
        if !reply_lost {
            // It has the events, so it does not read the queue.
            let slice = Some(vec![events[next].1]);
            let held = Held { slice, ..Held::of(&lease.granted, state.run) };
            state.consumers[consumer] = Some(held);
        }
    }

    fn claim(&self, state: &mut SystemState, consumer: usize, reply_lost: bool) {
        self.connect(state);
        let last = state.server.f;
        let claim = Claim {
            max: 1,
            bound: i64::MAX,
            ttl_ms: FAR_MS,
            seen: 0,
            batch: 2,
            idle_elsewhere: true,
        };
        let reply = state.server.claim(Self::NOW_US, claim);
        let Some(granted) = reply.granted.first() else { return };
        if granted.fence <= last {
            state.broken = Some("a fence did not rise");
        }
        if !reply_lost {
            state.consumers[consumer] = Some(Held::of(granted, state.run));
        }
    }

    fn handle(&self, state: &mut SystemState, consumer: usize) {
        let held = state.consumers[consumer].as_mut().unwrap();
        let event = held.slice.as_ref().unwrap()[held.handled as usize];
        held.handled += 1;
        let of = self.events[usize::from(event)];
        let settled = state.handled | state.purged;
        let skipped = (0..event)
            .any(|other| self.events[usize::from(other)] == of && settled & (1 << other) == 0);
        if settled & (1 << event) == 0 && skipped {
            state.broken = Some("a first handling was out of order");
        }
        state.handled |= 1 << event;
    }

    fn complete(
        &self,
        state: &mut SystemState,
        consumer: usize,
        (ending, n): (Ending, u32),
        reply_lost: bool,
    ) {
        self.connect(state);
        let mut held = state.consumers[consumer].take().unwrap();
        let mode = match ending {
            Ending::Keep => Mode::Keep { until_ms: FAR_MS },
            Ending::Release => Mode::Release,
            Ending::Park => Mode::Park { until_ms: FAR_MS },
            Ending::Fail => Mode::Fail { until_ms: FAR_MS, isolate: 1 },
        };
        let run = if self.without == Some(Rule::RunCheck) { state.run } else { held.run };
        let call = Completion {
            bot: held.bot,
            run: Some(run),
            fence: held.fence,
            before: held.acked,
            n,
            cost: i64::from(n),
            mode,
            exceptions: Vec::new(),
            aside: None,
        };
        let reply = match state.server.own.get(&held.bot) {
            Some(&lease) if self.without == Some(Rule::FenceCheck) => {
                state.server.complete_held(Self::NOW_US, lease, &call)
            }
            _ => state.server.complete(Self::NOW_US, &call),
        };
        if let Completed::Removed(events) = &reply {
            if held.superseded {
                state.broken = Some("a stale fence committed");
            }
            if held.slice.as_ref().unwrap()[..n as usize] != events[..] {
                state.broken = Some("an event left its queue without its effect");
            }
        }
        if reply_lost {
            held.unanswered = Some((ending, n));
            state.consumers[consumer] = Some(held);
        } else if ending == Ending::Keep
            && matches!(reply, Completed::Removed(_) | Completed::Replay)
        {
            let fresh = Held { acked: held.acked + n, slice: None, handled: 0, ..held };
            state.consumers[consumer] = Some(Held { unanswered: None, ..fresh });
        }
    }

    pub(super) fn apply(&self, state: &mut SystemState, step: &Step) {
        match *step {
            Step::Enqueue { stream, taker, reply_lost } => {
                self.enqueue(state, stream, taker, reply_lost);
            }
            Step::Claim { consumer, reply_lost } => self.claim(state, consumer, reply_lost),
            Step::Peek { consumer } => {
                let held = state.consumers[consumer].as_mut().unwrap();
                held.slice = Some(state.server.peek(held.bot, usize::from(held.limit)));
            }
            Step::Handle { consumer } => self.handle(state, consumer),
            Step::Complete { consumer, ending, reply_lost } => {
                let n = state.consumers[consumer].as_ref().unwrap().handled;
                self.complete(state, consumer, (ending, n), reply_lost);
            }
            Step::Repeat { consumer } => {
                let held = state.consumers[consumer].as_ref().unwrap();
                self.complete(state, consumer, held.unanswered.unwrap(), false);
            }
            Step::Deadline { bot } => {
                state.server.busy.insert(bot, 0);
            }
            Step::Crash { consumer } => state.consumers[consumer] = None,
            Step::Save => state.saved = Some(Arc::new(state.server.clone())),
            Step::LoseTail => {
                state.server = Arc::unwrap_or_clone(state.saved.take().unwrap());
                state.run += 1;
            }
            Step::Purge { bot } => {
                self.connect(state);
                for event in state.server.purge(bot) {
                    state.purged |= 1 << event;
                }
            }
            Step::Pause { bot } => {
                state.server.pause(bot);
            }
            Step::Resume { bot } => {
                state.server.resume(Self::NOW_US, bot);
            }
        }
    }

    pub(super) fn nothing_is_lost(&self, state: &SystemState) -> bool {
        (0..2).all(|stream| {
            let copied = state.server.offsets.get(&stream).copied().unwrap_or(0);
            (1..).zip(self.of_stream(stream)).all(|(offset, (bot, event))| {
                let queued = state.server.queues.get(&bot).into_iter().flatten();
                offset > copied
                    || (state.handled | state.purged) & (1 << event) != 0
                    || queued.into_iter().any(|&(_, other)| other == event)
            })
        })
    }

    pub(super) fn rests_only_when_done(&self, state: &SystemState) -> bool {
        let mut steps = Vec::new();
        self.progress(state, &mut steps);
        let all = (1_u8 << self.events.len()) - 1;
        !steps.is_empty() || state.handled | state.purged == all
    }
}

pub(super) fn charge(state: &mut SystemState, step: &Step) {
    let budget = &mut state.budget;
    match *step {
        Step::Enqueue { reply_lost: true, .. }
        | Step::Claim { reply_lost: true, .. }
        | Step::Complete { reply_lost: true, .. } => budget.lost_replies -= 1,
        Step::Complete { ending: Ending::Fail | Ending::Park, .. } => budget.failures -= 1,
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
