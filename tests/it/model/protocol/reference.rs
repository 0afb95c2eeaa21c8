//! The model with the knowledge of a caller. It turns an [`Operation`] into an exact call and the
//! exact answer that the scripts must give.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest_state_machine::ReferenceStateMachine;

use super::copier::{Copied, Copier, Copy};
use super::operation::{
    Bound, Counting, Ending, Operation, What, again_or, any_operation, any_operation_with_lanes,
    any_operation_with_names, first_limits, window_ms,
};
use super::published::published;
use crate::model::state_machine::{
    Bot, Change, Claim, Claimed, Completed, Completion, Enqueued, Event, Fate, Granted, Key, Lane,
    Limits, Mode, Pushed, Refused, Server, Take, lane_of,
};

/// A time as servers have it: more than 2^50 µs.
const START_US: i64 = 1_760_000_000_000_000;
pub(super) const SLICE_US: i64 = 10_000;

/// A call of one script, or a plain command.
#[derive(Debug, Clone)]
pub(super) enum Action {
    Nothing,
    Enqueue(Copy),
    Push {
        bot: Bot,
        events: Vec<Event>,
        due_ms: Option<i64>,
        key: Option<Key>,
    },
    Forget(Key),
    Claim(Claim),
    Complete(Vec<Completion>),
    Pause(Option<Bot>),
    Resume(Option<Bot>),
    Purge(Bot),
    Revoke(Bot),
    Redrive(Option<usize>, Bot),
    Promote(Vec<(u64, Bot)>),
    Recover(u32),
    Weight(Bot, u32),
    Save,
    /// The server is as it was saved, in another run. The first command is a recovery.
    LoseTail(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ScriptReply {
    Nothing,
    /// With the offsets of the shard, and the run that granted the leases.
    Enqueued(Enqueued, Vec<u64>, Option<u32>),
    Pushed(Pushed),
    Refused(Refused),
    /// With the run that granted the leases.
    Claimed(Claimed, Option<u32>),
    Completed {
        verdicts: Vec<Verdict>,
        v: i64,
        lowest: Option<i64>,
        deadline_ms: Option<i64>,
        letters_removed: u64,
    },
    Changed(bool),
    Purged(u64),
    Promoted(u64, Option<i64>),
    Recovered(Option<u64>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Ok,
    Stale,
    Bad,
    Full,
}

/// One step: the call and its required effect.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) now_us: i64,
    pub(super) limits: Limits,
    pub(super) action: Action,
    pub(super) answer: ScriptReply,
    /// The publications, in this order.
    pub(super) published: Vec<String>,
}

/// A lease as its holder knows it.
#[derive(Debug, Clone)]
struct Held {
    bot: Bot,
    fence: u64,
    run: Option<u32>,
    removed: u32,
    /// The last completion of it, and its time in ms.
    last: Option<(i64, Completion)>,
}

#[derive(Debug, Clone)]
pub(super) struct ReferenceState {
    pub(super) server: Server,
    pub(super) step: Option<Step>,
    now_us: i64,
    /// Every lease ever granted, the latest last.
    held: Vec<Held>,
    next_event: Event,
    runs: u32,
    /// Whether the pipeline has lanes.
    has_lanes: bool,
    pub(super) copier: Copier,
    /// What a restart would find.
    saved: Option<Box<(Server, Copied)>>,
}

pub(super) struct Reference;

impl ReferenceStateMachine for Reference {
    type State = ReferenceState;
    type Transition = Operation;

    fn init_state() -> BoxedStrategy<ReferenceState> {
        let state = ReferenceState {
            server: Server::new(SLICE_US),
            step: None,
            now_us: START_US,
            held: Vec::new(),
            next_event: 0,
            runs: 0,
            has_lanes: false,
            copier: Copier::default(),
            saved: None,
        };
        (any::<bool>(), window_ms(), first_limits())
            .prop_map(move |(has_lanes, window_ms, limits)| {
                let server = Server { limits, ..state.server.clone() };
                let copier = Copier::new(window_ms);
                ReferenceState { server, has_lanes, copier, ..state.clone() }
            })
            .boxed()
    }

    fn transitions(state: &ReferenceState) -> BoxedStrategy<Operation> {
        let any = match (state.has_lanes, state.copier.window_ms) {
            (true, _) => any_operation_with_lanes(),
            (_, 0) => any_operation(),
            _ => any_operation_with_names(),
        };
        match state.copier.again() {
            Some(again) => again_or(again, any),
            None => any,
        }
    }

    fn apply(mut state: ReferenceState, operation: &Operation) -> ReferenceState {
        let action = state.action(operation);
        state.server.names.expire(state.now_us);
        let before = state.server.clone();
        let answer = state.perform(&action);
        let published = published(&before, &state.server, state.now_us, &action);
        let (now_us, limits) = (state.now_us, state.server.limits);
        state.step = Some(Step { now_us, limits, action, answer, published });
        state
    }
}

impl ReferenceState {
    fn now_ms(&self) -> i64 {
        self.now_us / 1_000
    }

    fn events(&mut self, count: u8) -> Vec<Event> {
        let first = self.next_event;
        self.next_event += Event::from(count);
        (first..self.next_event).collect()
    }

    /// The call that the operation means in the current state.
    fn action(&mut self, operation: &Operation) -> Action {
        match *operation {
            Operation::Pass { us } => {
                self.now_us += us;
                if us < 0 {
                    self.copier.set_back_clock();
                }
                Action::Nothing
            }
            Operation::Limit(limits) => {
                self.server.limits = limits;
                Action::Nothing
            }
            Operation::Enqueue { ref spans, ref bots, take: (max, ttl_ms, seen), ref repeats } => {
                let spans = Copier::spans(&self.server, spans);
                let bots = bots.iter().map(|&(bot, count)| (bot, self.events(count))).collect();
                let take = Take { max, ttl_ms, seen: self.seen(seen) };
                Action::Enqueue(self.copier.read(spans, bots, take, repeats))
            }
            Operation::SendAgain(again) => {
                self.copier.send_again(again).map_or(Action::Nothing, Action::Enqueue)
            }
            Operation::Window { ms } => {
                self.copier.set_window(ms);
                Action::Nothing
            }
            Operation::Save => Action::Save,
            Operation::LoseTail => self.lose_tail(),
            Operation::Push { bot, events, key } => {
                Action::Push { bot, events: self.events(events), due_ms: None, key }
            }
            Operation::Delay { bot, after_ms, key } => {
                let due_ms = Some(self.now_ms() + after_ms);
                Action::Push { bot, events: self.events(1), due_ms, key }
            }
            Operation::Forget { key } => Action::Forget(key),
            Operation::Claim { max, bound, seen, ttl_ms, isolate, alone } => {
                let v = self.server.v;
                let bound = match bound {
                    Bound::Any => i64::MAX,
                    Bound::Quiet => -1,
                    Bound::Clock(us) => v + us,
                };
                let seen = self.seen(seen);
                Action::Claim(Claim { max, bound, ttl_ms, seen, isolate, idle_elsewhere: alone })
            }
            Operation::Complete(ref endings) => {
                let mut calls: Vec<Completion> = Vec::new();
                for ending in endings {
                    let call = self.completion(ending);
                    calls.extend(call.filter(|c| calls.iter().all(|other| other.bot != c.bot)));
                }
                if calls.is_empty() { Action::Nothing } else { Action::Complete(calls) }
            }
            Operation::Pause(bot) => Action::Pause(bot),
            Operation::Resume(bot) => Action::Resume(bot),
            Operation::Purge(bot) => Action::Purge(bot),
            Operation::Revoke(bot) => Action::Revoke(bot),
            Operation::Redrive { letter, other_bot, gone } => {
                if gone || self.server.dead.is_empty() {
                    return Action::Redrive(None, 0);
                }
                let place = letter.index(self.server.dead.len());
                Action::Redrive(Some(place), other(self.server.dead[place].bot, other_bot))
            }
            Operation::Promote { ahead_ms, other_bot } => self.promotion(ahead_ms, other_bot),
            Operation::Recover { restarted } => {
                self.runs += u32::from(restarted);
                Action::Recover(self.runs)
            }
            Operation::Weight { bot, weight } => Action::Weight(bot, weight),
        }
    }

    fn lose_tail(&mut self) -> Action {
        let Some(saved) = self.saved.take() else { return Action::Nothing };
        let (server, copied) = *saved;
        let limits = self.server.limits;
        self.server = Server { limits, ..server };
        self.copier.lost(copied);
        self.runs += 1;
        Action::LoseTail(self.runs)
    }

    /// The clock that a caller saw.
    fn seen(&self, ahead: Option<i64>) -> i64 {
        ahead.map_or(0, |ahead| (self.server.v + ahead).max(0))
    }

    fn hold<'a>(&mut self, granted: impl Iterator<Item = &'a Granted>) {
        let run = self.server.run;
        let held = |granted: &Granted| {
            let Granted { bot, fence, .. } = *granted;
            Held { bot, fence, run, removed: 0, last: None }
        };
        self.held.extend(granted.map(held));
    }

    /// Includes events that are not due yet, and an event that another process has moved.
    fn promotion(&self, ahead_ms: i64, other_bot: bool) -> Action {
        let mut due: Vec<(i64, u64, Bot)> = self
            .server
            .later
            .iter()
            .filter(|(_, (due_ms, ..))| *due_ms <= self.now_ms() + ahead_ms)
            .map(|(&id, &(due_ms, bot, _))| (due_ms, id, bot))
            .collect();
        due.sort_unstable();
        let mut events = vec![(1, 0)];
        events.extend(due.into_iter().map(|(_, id, bot)| (id, other(bot, other_bot))));
        Action::Promote(events)
    }

    fn completion(&self, ending: &Ending) -> Option<Completion> {
        let is_live = |held: &&Held| {
            self.server.own.get(&held.bot).is_some_and(|lease| lease.fence == held.fence)
        };
        // With lanes, most calls are of current holders: only these meet lanes.
        let any =
            !self.has_lanes || ending.lease > 2 || !self.held.iter().any(|held| is_live(&held));
        let leases: Vec<&Held> = self.held.iter().filter(|held| any || is_live(held)).collect();
        let held = leases[leases.len().checked_sub(1)? - ending.lease % leases.len()];
        let until_ms = |ms: i64| self.now_ms() + ms;
        let mode = match ending.what {
            What::Keep { ms } => Mode::Keep { until_ms: until_ms(ms) },
            What::Hand { ms, max } => Mode::Hand { until_ms: until_ms(ms), max },
            What::Release => Mode::Release,
            What::Park { ms } => Mode::Park { until_ms: until_ms(ms) },
            What::Fail { ms, isolate } => Mode::Fail { until_ms: until_ms(ms), isolate },
        };
        let aside = self.server.aside.get(&held.bot).map_or(&[][..], Vec::as_slice);
        let chosen = ending.lanes.list.filter(|_| !aside.is_empty());
        let of = chosen.map(|at| aside[at.index(aside.len())].0);
        let length = self.server.list(held.bot, of).map_or(0, VecDeque::len);
        let length = u32::try_from(length).unwrap();
        let (mut before, mut n) = (held.removed, ending.n.min(length));
        match (ending.counting, &held.last) {
            (Counting::Right, _) | (_, None) => {}
            (Counting::Beyond, _) => n = ending.n,
            (Counting::Repeated, Some((at_ms, last))) => {
                let mode = last.mode.put_off(self.now_ms() - at_ms);
                return Some(Completion { mode, ..last.clone() });
            }
            (Counting::RepeatedOtherwise, Some((_, last))) => (before, n) = (last.before, last.n),
            (Counting::Off, _) => before += 1 + ending.n,
        }
        let mut exceptions: Vec<(u32, _)> = ending
            .exceptions
            .iter()
            .filter(|&&(index, _)| n > 0 && index <= n)
            .map(|&(index, exception)| (index, exception.fate(self.now_ms())))
            .collect();
        exceptions.sort_by_key(|&(index, _)| index);
        exceptions.dedup_by_key(|&mut (index, _)| index);
        let run = if ending.other_run { Some(u32::MAX) } else { held.run };
        let Held { bot, fence, .. } = *held;
        let repeats = matches!(ending.counting, Counting::RepeatedOtherwise);
        let aside = if repeats {
            // A worker changes no lane with a repeated count.
            let lanes = aside.to_vec();
            (!lanes.is_empty()).then_some(Change { lanes, next_ms: 0, list: None })
        } else {
            self.lanes_after(ending, (bot, of), n, &mut exceptions)
        };
        let cost = ending.cost;
        Some(Completion { bot, run, fence, before, n, cost, mode, exceptions, aside })
    }

    /// The lanes after a slice, as a worker sets them. Events of lanes that fail, or failed before, move
    /// to the lists of these lanes. A lane with events left stays set aside.
    fn lanes_after(
        &self,
        ending: &Ending,
        (bot, list): (Bot, Option<Lane>),
        n: u32,
        exceptions: &mut Vec<(u32, Fate)>,
    ) -> Option<Change> {
        let before = self.server.aside.get(&bot).map_or(&[][..], Vec::as_slice);
        let mut lanes = before.to_vec();
        let due_ms = self.now_ms() + ending.lanes.due_ms;
        let set = |lanes: &mut Vec<(Lane, i64)>, lane| {
            lanes.retain(|&(other, _)| other != lane);
            lanes.push((lane, due_ms));
            lanes.sort_by_key(|&(_, due_ms)| due_ms);
        };
        let events = self.server.list(bot, list);
        if let Some(lane) = list {
            if let Some(first) = ending.lanes.first.filter(|_| n > 0 && exceptions.is_empty()) {
                exceptions.push((0, first.fate(self.now_ms())));
            }
            lanes.retain(|&(other, _)| other != lane);
            if events.is_some_and(|events| events.len() > n as usize) {
                set(&mut lanes, lane);
            }
        } else if self.has_lanes {
            for (at, &(_, event)) in (0..n).zip(events.into_iter().flatten()) {
                let lane = lane_of(event);
                let is_aside = lanes.iter().any(|&(other, _)| other == lane);
                let fails = ending.lanes.fail >> lane & 1 == 1;
                if (is_aside || fails) && exceptions.iter().all(|&(index, _)| index != at) {
                    exceptions.push((at, Fate::Lane(lane)));
                    set(&mut lanes, lane);
                }
            }
            exceptions.sort_by_key(|&(index, _)| index);
        }
        let changes = !lanes.is_empty() || !before.is_empty();
        changes.then_some(Change { lanes, next_ms: ending.lanes.next_ms, list })
    }

    fn perform(&mut self, action: &Action) -> ScriptReply {
        let (now_us, server) = (self.now_us, &mut self.server);
        match *action {
            Action::Nothing => ScriptReply::Nothing,
            Action::Enqueue(ref copy) => {
                let (reply, queued) = copy.send(now_us, server);
                let at = server.stands(&copy.spans);
                self.copier.receive(now_us / 1_000, copy, (&reply, &queued));
                let mut run = None;
                if let Enqueued::Stored(_, taken) = &reply
                    && !taken.is_empty()
                {
                    run = self.server.run;
                    self.hold(taken.iter().map(|taken| &taken.granted));
                }
                ScriptReply::Enqueued(reply, at, run)
            }
            Action::Push { bot, ref events, due_ms, key } => {
                match server.push_once(now_us, key, due_ms, (bot, events)) {
                    Ok(pushed) => ScriptReply::Pushed(pushed),
                    Err(refused) => ScriptReply::Refused(refused),
                }
            }
            Action::Forget(key) => {
                server.keys.remove(&key);
                ScriptReply::Nothing
            }
            Action::Claim(claim) => {
                let (claimed, run) = (server.claim(now_us, claim), server.run);
                self.hold(claimed.granted.iter());
                ScriptReply::Claimed(claimed, run)
            }
            Action::Complete(ref calls) => self.complete(calls),
            Action::Pause(Some(bot)) => ScriptReply::Changed(server.pause(bot)),
            Action::Pause(None) => ScriptReply::Changed(server.pause_shard(true)),
            Action::Resume(Some(bot)) => ScriptReply::Changed(server.resume(now_us, bot)),
            Action::Resume(None) => ScriptReply::Changed(server.pause_shard(false)),
            Action::Purge(bot) => ScriptReply::Purged(server.purge(bot).len() as u64),
            Action::Revoke(bot) => ScriptReply::Changed(server.revoke(now_us, bot)),
            Action::Redrive(place, bot) => ScriptReply::Changed(server.redrive(now_us, place, bot)),
            Action::Promote(ref events) => {
                let (moved, next_ms) = server.promote(now_us, events);
                ScriptReply::Promoted(moved, next_ms)
            }
            Action::Recover(run) | Action::LoseTail(run) => {
                ScriptReply::Recovered(server.recover(now_us, run))
            }
            Action::Save => {
                self.copier.saved();
                self.saved = Some(Box::new((self.server.clone(), self.copier.copied.clone())));
                ScriptReply::Nothing
            }
            Action::Weight(bot, weight) => {
                server.weight.remove(&bot);
                if weight != 1 {
                    server.weight.insert(bot, weight);
                }
                ScriptReply::Nothing
            }
        }
    }

    fn complete(&mut self, calls: &[Completion]) -> ScriptReply {
        let (letters_before, mut letters) = (self.server.dead.len(), 0);
        let ready_before = self.server.ctl.len();
        let mut verdicts = Vec::new();
        for call in calls {
            let reply = self.server.complete(self.now_us, call);
            let holds = |held: &&mut Held| held.fence == call.fence && held.bot == call.bot;
            if let Some(held) = self.held.iter_mut().rev().find(holds) {
                held.last = Some((self.now_us / 1_000, call.clone()));
                if let Completed::Removed(_) | Completed::Full { replay: false } = reply {
                    held.removed = call.before + call.n;
                }
            }
            if let Completed::Removed(_) | Completed::Full { replay: false } = reply {
                let dead = |(_, fate): &&(u32, _)| matches!(fate, Fate::Dead { .. });
                letters += call.exceptions.iter().filter(dead).count();
            }
            verdicts.push(match reply {
                Completed::Removed(_) | Completed::Replay => Verdict::Ok,
                Completed::Stale => Verdict::Stale,
                Completed::Bad => Verdict::Bad,
                Completed::Full { .. } => Verdict::Full,
            });
        }
        let server = &self.server;
        let goes_on = |(call, verdict): (&Completion, &Verdict)| {
            (call.mode != Mode::Release || server.busy.contains_key(&call.bot))
                && matches!(verdict, Verdict::Ok | Verdict::Full)
        };
        let busy = calls.iter().zip(&verdicts).any(goes_on);
        let lowest = |times: &std::collections::BTreeMap<Bot, i64>| times.values().copied().min();
        ScriptReply::Completed {
            verdicts,
            v: server.v,
            // Only what changed is told.
            lowest: lowest(&server.ctl).filter(|_| server.ctl.len() > ready_before),
            deadline_ms: lowest(&server.busy).filter(|_| busy),
            letters_removed: (letters_before + letters - server.dead.len()) as u64,
        }
    }
}

fn other(bot: Bot, other: bool) -> Bot {
    if other { (bot + 1) % super::operation::BOTS } else { bot }
}
