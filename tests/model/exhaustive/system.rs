//! The effect of each step.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::parts::{Ending, Held, Permit, Rule, STREAMS, Step, System, SystemState, Turns};
use crate::state_machine::{
    Bot, Claim, Completed, Completion, Enqueued, Event, Mode, Stream, Take,
};

pub(super) const FAR_MS: i64 = 1 << 40;

impl System {
    /// The first command on every connection. A restart closes all connections, so here each
    /// command starts with it.
    fn connect(&self, state: &mut SystemState) {
        if self.without != Some(Rule::Recover) {
            state.server.recover(Self::NOW_US, state.run);
        }
    }

    /// The clock stands still. That keeps the number of states small and is the worst case: fences
    /// that were lost with a tail are granted again.
    pub(super) const NOW_US: i64 = 0;

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

    fn claim(&self, state: &mut SystemState, consumer: usize, bot: Option<Bot>, reply_lost: bool) {
        self.connect(state);
        let last = state.server.f;
        let claim = Claim {
            max: 1,
            bound: i64::MAX,
            ttl_ms: FAR_MS,
            seen: 0,
            isolate: 2,
            idle_elsewhere: true,
        };
        // The others have their turns later.
        let mut others = BTreeMap::new();
        if bot.is_some() {
            state.server.reap(Self::NOW_US, claim.isolate);
            others = std::mem::take(&mut state.server.ctl);
            state.server.ctl.extend(bot.and_then(|bot| others.remove_entry(&bot)));
        }
        let reply = state.server.claim(Self::NOW_US, claim);
        state.server.ctl.extend(others);
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
        let bot = held.bot;
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
        if self.burst.is_some() {
            state.spend(bot);
        }
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
            Ending::Fail => Mode::Fail { until_ms: FAR_MS, isolate: 2 },
        };
        let run = if self.without == Some(Rule::RunCheck) { state.run } else { held.run };
        let call = Completion {
            bot: held.bot,
            run: Some(run),
            fence: held.fence,
            before: held.acked,
            n,
            // Without turns, virtual time has no meaning.
            cost: if self.turns == Turns::Kept { i64::from(n) } else { 0 },
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
            let permit = Permit::Needed;
            state.consumers[consumer] = Some(Held { unanswered: None, permit, ..fresh });
        }
    }

    pub(super) fn apply(&self, state: &mut SystemState, step: &Step) {
        match *step {
            Step::Enqueue { stream, taker, reply_lost } => {
                self.enqueue(state, stream, taker, reply_lost);
            }
            Step::Claim { consumer, bot, reply_lost } => {
                self.claim(state, consumer, bot, reply_lost);
            }
            Step::Permit { consumer, reply_lost } => self.permit(state, consumer, reply_lost),
            Step::Refill { bot } => state.refill(bot),
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
            Step::Save => {
                let mut server = state.server.clone();
                self.reduce_saved(&mut server, state.run);
                state.saved = Some(Arc::new(server));
            }
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
        (0..STREAMS).all(|stream| {
            let copied = state.server.offsets.get(&stream).copied().unwrap_or(0);
            (1..).zip(self.of_stream(stream)).all(|(offset, (bot, event))| {
                let queued = state.server.queues.get(&bot).into_iter().flatten();
                offset > copied
                    || (state.handled | state.purged) & (1 << event) != 0
                    || queued.into_iter().any(|&(_, other)| other == event)
            })
        })
    }
}
