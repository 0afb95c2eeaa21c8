//! The volume of values, by which copies are charged.
//!
//! An evaluation copies values: into lists, maps and the variables of macros, into sums, and into the
//! error of an operator that cannot take them. The volume of a part of an expression is that of all values
//! which it gives in all rounds of the macros around it. In all rounds, the variable of a macro gives
//! no more than the list that the macro goes over.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::FILTER_MAX_MACROS;

const POWERS: usize = FILTER_MAX_MACROS + 1;

/// A volume before the facts are known. The rounds of a macro are at most the entries of the longest
/// list: each number counts once, times these entries, times their square.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Volume {
    /// Number of values that the text of the expression makes.
    made: Times,
    /// Number of copies of each value of the facts, by its names, such as `event`, `data` and `price`.
    facts: BTreeMap<Arc<[String]>, Times>,
}

type Times = [u64; POWERS];

/// So often, within so many macros.
fn times(number: u64, macros: usize) -> Times {
    let mut times = Times::default();
    times[macros] = number;
    times
}

fn add(sums: &mut Times, more: Times) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum = sum.saturating_add(more);
    }
}

impl Volume {
    /// So many values, made within so many macros.
    pub(super) fn made(values: u64, macros: usize) -> Self {
        Self { made: times(values, macros), ..Self::default() }
    }

    /// The value of the facts with these names, within so many macros.
    pub(super) fn facts(names: Vec<String>, macros: usize) -> Self {
        Self { facts: BTreeMap::from([(names.into(), times(1, macros))]), ..Self::default() }
    }

    pub(super) fn add(&mut self, more: Self) {
        add(&mut self.made, more.made);
        for (names, times) in more.facts {
            add(self.facts.entry(names).or_default(), times);
        }
    }

    /// Both together.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.add(other);
        self
    }

    /// The same in each round of so many more macros.
    pub(super) fn within(&self, macros: usize) -> Self {
        let within = |times: &Times| {
            let mut within = Times::default();
            for (power, times) in times.iter().enumerate() {
                // There is no higher power: a macro goes over no list of a map that makes lists.
                let raised = &mut within[(power + macros).min(POWERS - 1)];
                *raised = raised.saturating_add(*times);
            }
            within
        };
        let facts = self.facts.iter().map(|(names, times)| (Arc::clone(names), within(times)));
        Self { made: within(&self.made), facts: facts.collect() }
    }

    /// What counts times each power of the rounds, if the values of the facts have these volumes.
    pub(super) fn by_power(&self, volume_of: impl Fn(&[String]) -> u64) -> [u64; POWERS] {
        let mut sums = self.made;
        for (names, times) in &self.facts {
            let volume = volume_of(names);
            add(&mut sums, times.map(|times| times.saturating_mul(volume)));
        }
        sums
    }
}
