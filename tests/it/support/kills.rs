//! Kills of processes at every step of a piece of work.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Debug;

use super::process::number;

/// How often processes are killed at each step: enough to see each step with either fate of the last
/// command. `make kills` sets more.
const TIMES: u32 = 3;

/// A kill of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kill<S> {
    /// The step at which the process is killed.
    pub(crate) step: S,
    /// Whether the last command that the process sent arrives after its death. Else it never does.
    pub(crate) arrives: bool,
}

/// The steps at which several processes are killed, and how often each was met. A process first meets
/// the steps in turn, except a rare one that another process has met. On a busy machine it may not reach a
/// step in time. Then there are more kills, up to six times as many, until each step was met often enough.
#[derive(Debug)]
pub(crate) struct Kills<S> {
    /// Each step, and how often it must be met.
    steps: Vec<(S, u32)>,
    processes: usize,
    met: RefCell<BTreeMap<S, u32>>,
    /// How many processes are killed no more.
    ended: Cell<usize>,
}

impl<S: Copy + Ord + Debug> Kills<S> {
    pub(crate) fn new(processes: usize, steps: &[S]) -> Self {
        let times = number("FAIRLANE_TEST_KILLS", TIMES);
        let steps = steps.iter().map(|step| (*step, times)).collect();
        Self { steps, processes, met: RefCell::default(), ended: Cell::default() }
    }

    /// Processes reach this step rarely. To have met it once is enough.
    pub(crate) fn rarely(mut self, rare: S) -> Self {
        for (step, least) in &mut self.steps {
            if *step == rare {
                *least = 1;
            }
        }
        self
    }

    /// The next kill of process `place`, which was killed `round` times. `None` ends its kills.
    pub(crate) fn next(&self, place: usize, round: usize) -> Option<Kill<S>> {
        let all: u32 = self.steps.iter().map(|(_, least)| *least).sum();
        let each = (all as usize).div_ceil(self.processes);
        let (turn, missing) = (round + 2 * place, self.missing());
        let (in_turn, least) = self.steps[turn % self.steps.len()];
        let step = if round < each && (least > 1 || missing.contains(&in_turn)) {
            in_turn
        } else if round < 6 * each && !missing.is_empty() {
            missing[turn % missing.len()]
        } else {
            self.ended.set(self.ended.get() + 1);
            return None;
        };
        Some(Kill { step, arrives: (round + place).is_multiple_of(2) })
    }

    /// Notes whether a process reached the step at which it was killed.
    pub(crate) fn note(&self, step: S, reached: bool) {
        *self.met.borrow_mut().entry(step).or_default() += u32::from(reached);
    }

    /// Whether all processes had their last kill.
    pub(crate) fn are_over(&self) -> bool {
        self.ended.get() >= self.processes
    }

    /// How often each step was met.
    pub(crate) fn met(&self) -> BTreeMap<S, u32> {
        self.met.borrow().clone()
    }

    /// The steps that were not met often enough yet.
    fn missing(&self) -> Vec<S> {
        let met = self.met.borrow();
        let is_missing = |(step, least): &&(S, u32)| met.get(step).copied().unwrap_or(0) < *least;
        self.steps.iter().filter(is_missing).map(|(step, _)| *step).collect()
    }

    pub(crate) fn assert_each_was_met(&self) {
        let missing = self.missing();
        assert!(missing.is_empty(), "{missing:?} were hardly met: {:?}", self.met());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rare_step_is_met_once_and_every_other_as_often_as_it_must_be_and_with_either_fate() {
        const RARE: usize = 4;
        let (steps, times) = ([0, 1, 2, 3, RARE, 5], number("FAIRLANE_TEST_KILLS", TIMES));
        let kills = Kills::new(3, &steps).rarely(RARE);
        let mut fates: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
        let (mut places, mut round) = (vec![0, 1, 2], 0);
        while !places.is_empty() {
            places.retain(|place| {
                let Some(kill) = kills.next(*place, round) else { return false };
                kills.note(kill.step, true);
                fates.entry(kill.step).or_default().push(kill.arrives);
                true
            });
            round += 1;
        }
        kills.assert_each_was_met();
        assert!(kills.are_over());
        assert_eq!(fates.remove(&RARE).map(|fates| fates.len()), Some(1));
        for fates in fates.values() {
            assert!(fates.len() >= times as usize, "{fates:?}");
            assert!(times < 3 || fates.contains(&true) && fates.contains(&false), "{fates:?}");
        }
    }
}
