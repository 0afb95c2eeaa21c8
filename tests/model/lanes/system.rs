//! The bot of the model: its state, and the effect of each step.

/// The lane of each event, in the order of the bus. A small system has the first events only.
const LANES: [usize; 5] = [0, 1, 0, 2, 1];
/// Number of lanes.
pub(super) const COUNT: usize = 3;
pub(super) const SLICE: usize = 2;

/// A rule that is left out, to show that the checker would find it missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Later events of a lane that is set aside join its list.
    Follow,
    Fence,
    /// The last event of a list takes its lane out of the text.
    Forget,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    pub(crate) crashes: u8,
    pub(crate) freezes: u8,
    pub(crate) lost_replies: u8,
    pub(crate) failures: u8,
    pub(crate) purges: u8,
    pub(crate) pauses: u8,
    pub(crate) revokes: u8,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Bot {
    pub(crate) consumers: usize,
    /// Number of events.
    pub(crate) events: usize,
    pub(crate) budget: Budget,
    pub(crate) without: Option<Rule>,
}

/// Where the bot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Place {
    /// In no set. A bot with events is here only while it is paused.
    Rest,
    Ready,
    Parked,
    Leased {
        fence: u8,
        acked: u8,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum List {
    Queue,
    Lane(usize),
}

/// The end of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Completion {
    pub(super) list: List,
    pub(super) before: u8,
    pub(super) n: usize,
    /// Those among the n that move to the list of their lane.
    pub(super) moved: Vec<u8>,
    /// The lanes that are set aside from now on.
    pub(super) aside: [bool; COUNT],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Held {
    pub(super) fence: u8,
    /// The lanes that are set aside, as the claim returned them.
    pub(super) aside: [bool; COUNT],
    /// The list and its slice, once it is read.
    pub(super) read: Option<(List, Vec<u8>)>,
    /// The number of events of the list when it was read.
    pub(super) length: usize,
    pub(super) done: [usize; COUNT],
    pub(super) failed: [bool; COUNT],
    pub(super) unanswered: Option<Completion>,
    pub(super) superseded: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(super) queue: Vec<u8>,
    pub(super) lists: [Vec<u8>; COUNT],
    /// The lanes that the text of the bot has.
    pub(super) aside: [bool; COUNT],
    pub(super) place: Place,
    pub(super) paused: bool,
    pub(super) fence: u8,
    pub(super) published: u8,
    pub(super) consumers: Vec<Option<Held>>,
    pub(super) budget: Budget,
    pub(super) handled: u8,
    pub(super) removed: u8,
    pub(super) purged: u8,
    pub(super) broken: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    Publish,
    Claim {
        consumer: usize,
        reply_lost: bool,
    },
    Read {
        consumer: usize,
        list: List,
    },
    Handle {
        consumer: usize,
        lane: usize,
    },
    Fail {
        consumer: usize,
        lane: usize,
    },
    Complete {
        consumer: usize,
        reply_lost: bool,
    },
    Repeat {
        consumer: usize,
    },
    Crash {
        consumer: usize,
    },
    /// The deadline of the lease or of the park passes.
    Deadline,
    Purge,
    Pause,
    Resume,
    Revoke,
}

pub(super) fn bit(event: u8) -> u8 {
    1 << event
}

pub(super) fn lane(event: u8) -> usize {
    LANES[usize::from(event)]
}

impl Held {
    /// The events of a lane that a handler gets. Those of lanes that are set aside get none.
    fn of_lane(&self, wanted: usize, without: Option<Rule>) -> Vec<u8> {
        let Some((list, slice)) = &self.read else { return Vec::new() };
        let follows = *list == List::Queue && self.aside[wanted] && without != Some(Rule::Follow);
        slice.iter().copied().filter(|event| lane(*event) == wanted && !follows).collect()
    }

    fn is_over(&self, wanted: usize, without: Option<Rule>) -> bool {
        self.failed[wanted] || self.done[wanted] == self.of_lane(wanted, without).len()
    }

    fn completion(&self, without: Option<Rule>) -> Completion {
        let (list, slice) = self.read.clone().unwrap();
        let mut completion =
            Completion { list, before: 0, n: slice.len(), moved: Vec::new(), aside: self.aside };
        match list {
            List::Queue => {
                for &event in &slice {
                    let done = self.of_lane(lane(event), without);
                    if !done[..self.done[lane(event)].min(done.len())].contains(&event) {
                        completion.moved.push(event);
                        completion.aside[lane(event)] = true;
                    }
                }
            }
            List::Lane(own) => {
                completion.n = self.done[own];
                let forgets = without != Some(Rule::Forget);
                completion.aside[own] = completion.n < self.length || !forgets;
            }
        }
        completion
    }
}

impl State {
    pub(super) fn holds_events(&self) -> bool {
        !self.queue.is_empty() || self.aside != [false; COUNT]
    }

    /// Ready, unless it is paused or has nothing.
    fn join(&mut self) {
        let may = self.holds_events() && !self.paused;
        self.place = if may { Place::Ready } else { Place::Rest };
    }

    fn publish(&mut self) {
        let was_empty = self.queue.is_empty();
        self.queue.push(self.published);
        self.published += 1;
        if was_empty && matches!(self.place, Place::Rest | Place::Parked) {
            self.join();
        }
    }

    fn claim(&mut self, consumer: usize, reply_lost: bool) {
        self.fence += 1;
        self.place = Place::Leased { fence: self.fence, acked: 0 };
        if !reply_lost {
            self.consumers[consumer] = Some(Held {
                fence: self.fence,
                aside: self.aside,
                read: None,
                length: 0,
                done: [0; COUNT],
                failed: [false; COUNT],
                unanswered: None,
                superseded: false,
            });
        }
    }

    fn list(&mut self, list: List) -> &mut Vec<u8> {
        match list {
            List::Queue => &mut self.queue,
            List::Lane(lane) => &mut self.lists[lane],
        }
    }

    fn handle(&mut self, consumer: usize, wanted: usize, without: Option<Rule>) {
        let held = self.consumers[consumer].as_mut().unwrap();
        let event = held.of_lane(wanted, without)[held.done[wanted]];
        held.done[wanted] += 1;
        if !held.superseded && self.removed & bit(event) != 0 {
            self.broken = Some("an event was handled after its completion");
        }
        let settled = self.handled | self.purged;
        let skipped = (0..event).any(|other| lane(other) == wanted && settled & bit(other) == 0);
        if settled & bit(event) == 0 && skipped {
            self.broken = Some("a first handling was out of order");
        }
        self.handled |= bit(event);
    }

    /// `lua/complete.lua`, mode release.
    fn complete(&mut self, held: &Held, call: &Completion, without: Option<Rule>) {
        let Place::Leased { fence, acked } = self.place else { return };
        if (fence != held.fence && without != Some(Rule::Fence)) || acked != call.before {
            return;
        }
        if held.superseded {
            self.broken = Some("a stale fence committed");
        }
        let list = self.list(call.list);
        if call.n > list.len() {
            return;
        }
        let leaving: Vec<u8> = list.drain(..call.n).collect();
        for event in leaving {
            if call.moved.contains(&event) {
                self.lists[lane(event)].push(event);
            } else {
                if self.handled & bit(event) == 0 {
                    self.broken = Some("an event left without its effect");
                }
                self.removed |= bit(event);
            }
        }
        self.aside = call.aside;
        // With lanes alone, the bot is parked until the first is due.
        if self.queue.is_empty() && self.aside != [false; COUNT] {
            self.place = Place::Parked;
        } else {
            self.join();
        }
    }
}

impl Bot {
    /// All events, as bits.
    pub(super) fn all(&self) -> u8 {
        (1 << self.events) - 1
    }

    pub(super) fn progress(&self, state: &State, steps: &mut Vec<Step>) {
        if usize::from(state.published) < self.events {
            steps.push(Step::Publish);
        }
        for (consumer, held) in state.consumers.iter().enumerate() {
            let Some(held) = held else {
                if state.place == Place::Ready {
                    steps.push(Step::Claim { consumer, reply_lost: false });
                }
                continue;
            };
            if held.unanswered.is_some() {
                steps.push(Step::Repeat { consumer });
                continue;
            }
            if held.read.is_none() {
                // Any lane may be due, or none of them.
                if !state.queue.is_empty() || held.aside == [false; COUNT] || held.superseded {
                    steps.push(Step::Read { consumer, list: List::Queue });
                }
                for lane in (0..COUNT).filter(|lane| held.aside[*lane]) {
                    steps.push(Step::Read { consumer, list: List::Lane(lane) });
                }
                continue;
            }
            let over = [0, 1, 2].map(|lane| held.is_over(lane, self.without));
            for lane in (0..COUNT).filter(|lane| !over[*lane]) {
                steps.push(Step::Handle { consumer, lane });
            }
            if over == [true; COUNT] {
                steps.push(Step::Complete { consumer, reply_lost: false });
            }
        }
        let held = state.consumers.iter().flatten().any(|held| !held.superseded);
        if state.place == Place::Parked || (matches!(state.place, Place::Leased { .. }) && !held) {
            steps.push(Step::Deadline);
        }
        if state.paused {
            steps.push(Step::Resume);
        }
    }

    pub(super) fn accidents(&self, state: &State, steps: &mut Vec<Step>) {
        let budget = state.budget;
        if budget.lost_replies > 0 {
            let lost = steps.iter().filter_map(|step| match *step {
                Step::Claim { consumer, .. } => Some(Step::Claim { consumer, reply_lost: true }),
                Step::Complete { consumer, .. } => {
                    Some(Step::Complete { consumer, reply_lost: true })
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
            let running = held.read.is_some() && held.unanswered.is_none();
            for lane in 0..COUNT {
                if budget.failures > 0 && running && !held.is_over(lane, self.without) {
                    steps.push(Step::Fail { consumer, lane });
                }
            }
        }
        let held = state.consumers.iter().flatten().any(|held| !held.superseded);
        let leased = matches!(state.place, Place::Leased { .. });
        if budget.freezes > 0 && leased && held {
            steps.push(Step::Deadline);
        }
        if budget.purges > 0 && state.holds_events() {
            steps.push(Step::Purge);
        }
        if budget.pauses > 0 && !state.paused {
            steps.push(Step::Pause);
        }
        if budget.revokes > 0 && !matches!(state.place, Place::Rest | Place::Ready) {
            steps.push(Step::Revoke);
        }
    }

    pub(super) fn apply(&self, state: &mut State, step: &Step) {
        let without = self.without;
        match *step {
            Step::Publish => state.publish(),
            Step::Claim { consumer, reply_lost } => {
                state.budget.lost_replies -= u8::from(reply_lost);
                state.claim(consumer, reply_lost);
            }
            Step::Read { consumer, list } => {
                let all = state.list(list).clone();
                let held = state.consumers[consumer].as_mut().unwrap();
                if held.superseded {
                    // It finds out before its handler starts: its deadline has passed, or it confirms
                    // the lease, unless that was granted less than 50 ms ago.
                    state.consumers[consumer] = None;
                    return;
                }
                held.length = all.len();
                held.read = Some((list, all.into_iter().take(SLICE).collect()));
            }
            Step::Handle { consumer, lane } => state.handle(consumer, lane, without),
            Step::Fail { consumer, lane } => {
                state.budget.failures -= 1;
                state.consumers[consumer].as_mut().unwrap().failed[lane] = true;
            }
            Step::Complete { consumer, reply_lost } => {
                let mut held = state.consumers[consumer].take().unwrap();
                let call = held.completion(without);
                state.complete(&held, &call, without);
                if reply_lost {
                    state.budget.lost_replies -= 1;
                    held.unanswered = Some(call);
                    state.consumers[consumer] = Some(held);
                }
            }
            Step::Repeat { consumer } => {
                let held = state.consumers[consumer].take().unwrap();
                let call = held.unanswered.clone().unwrap();
                state.complete(&held, &call, without);
            }
            Step::Crash { consumer } => {
                state.budget.crashes -= 1;
                state.consumers[consumer] = None;
            }
            Step::Deadline => {
                let held = state.consumers.iter().flatten().any(|held| !held.superseded);
                if matches!(state.place, Place::Leased { .. }) && held {
                    state.budget.freezes -= 1;
                }
                state.join();
            }
            Step::Purge => {
                state.budget.purges -= 1;
                let all = state
                    .queue
                    .drain(..)
                    .chain(state.lists.iter_mut().flat_map(|list| list.drain(..)));
                state.purged |= all.fold(0, |purged, event| purged | bit(event));
                state.aside = [false; COUNT];
                state.place = Place::Rest;
            }
            Step::Pause => {
                state.budget.pauses -= 1;
                state.paused = true;
                if state.place == Place::Ready {
                    state.place = Place::Rest;
                }
            }
            Step::Resume => {
                state.paused = false;
                if state.place == Place::Rest {
                    state.join();
                }
            }
            Step::Revoke => {
                state.budget.revokes -= 1;
                state.join();
            }
        }
    }
}
