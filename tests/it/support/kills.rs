//! Kills of processes at every step of a piece of work.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Debug;

use super::process::variable;

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
/// the steps in turn. On a busy machine it may not reach a step in time. Then there are more kills, up to
/// six times as many, until each step was met often enough.
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
        let times = variable("FAIRLANE_TEST_KILLS").map_or(TIMES, |times| {
            times.parse().expect("FAIRLANE_TEST_KILLS is the number of kills at each step")
        });
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
        let steps = if round < each {
            self.steps.iter().map(|(step, _)| *step).collect()
        } else if round < 6 * each {
            self.missing()
        } else {
            Vec::new()
        };
        if steps.is_empty() {
            self.ended.set(self.ended.get() + 1);
            return None;
        }
        let step = steps[(round + 2 * place) % steps.len()];
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
