//! The steps that are possible in a state.

use super::parts::{Ending, STREAMS, Step, System, SystemState, Turns};
use crate::state_machine::{Bot, Server};

impl System {
    /// The steps that are possible without a fault while time passes.
    pub(super) fn progress(&self, state: &SystemState, steps: &mut Vec<Step>) {
        for stream in 0..STREAMS {
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
                // Free consumers are alike: the first one claims.
                if consumer == 0 {
                    self.claims(state, steps);
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
            if self.needs_permit(held) {
                steps.push(Step::Permit { consumer, reply_lost: false });
                continue;
            }
            if (held.handled as usize) < slice.len() {
                steps.push(Step::Handle { consumer });
            }
            if held.handled > 0 || slice.is_empty() {
                let ending = if held.rests() { Ending::Park } else { Ending::Release };
                steps.push(Step::Complete { consumer, ending, reply_lost: false });
            }
            if held.handled > 0 {
                let ending = Ending::Keep;
                steps.push(Step::Complete { consumer, ending, reply_lost: false });
            }
        }
        for bot in 0..self.bots() {
            let held = state.consumers.iter().flatten().any(|held| held.bot == bot);
            let leased = state.server.own.contains_key(&bot);
            let running = state.server.busy.get(&bot).is_some_and(|&deadline| deadline > 0);
            if running && !(leased && held) {
                steps.push(Step::Deadline { bot });
            }
            if state.server.paused.contains(&bot) {
                steps.push(Step::Resume { bot });
            }
            if self.burst.is_some_and(|burst| state.buckets[usize::from(bot)].tokens < burst) {
                steps.push(Step::Refill { bot });
            }
        }
    }

    fn claims(&self, state: &SystemState, steps: &mut Vec<Step>) {
        let Server { ctl, busy, paused, .. } = &state.server;
        let is_due = |&(_, &deadline): &(&Bot, &i64)| deadline <= Self::NOW_US / 1_000;
        let due: Vec<Bot> = busy.iter().filter(is_due).map(|(&bot, _)| bot).collect();
        let ready = ctl.keys().chain(due.iter().filter(|bot| !paused.contains(bot)));
        let claim = |bot| Step::Claim { consumer: 0, bot, reply_lost: false };
        let before = steps.len();
        if self.turns != Turns::Kept {
            steps.extend(ready.map(|&bot| claim(Some(bot))));
        }
        if steps.len() == before && !(ctl.is_empty() && due.is_empty()) {
            steps.push(claim(None));
        }
    }

    pub(super) fn accidents(&self, state: &SystemState, steps: &mut Vec<Step>) {
        let budget = state.budget;
        if budget.lost_replies > 0 {
            let lost = steps.iter().filter_map(|step| match *step {
                Step::Enqueue { stream, taker, .. } => {
                    Some(Step::Enqueue { stream, taker, reply_lost: true })
                }
                Step::Claim { consumer, bot, .. } => {
                    Some(Step::Claim { consumer, bot, reply_lost: true })
                }
                Step::Permit { consumer, .. } => Some(Step::Permit { consumer, reply_lost: true }),
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
            let runs = held.unanswered.is_none() && !self.needs_permit(held) && !held.rests();
            if budget.failures > 0 && more && runs {
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

    pub(super) fn rests_only_when_done(&self, state: &SystemState) -> bool {
        let mut steps = Vec::new();
        self.progress(state, &mut steps);
        let all = (1_u8 << self.events.len()) - 1;
        // Tokens alone are no work.
        steps.iter().any(|step| !matches!(step, Step::Refill { .. }))
            || state.handled | state.purged == all
    }
}
