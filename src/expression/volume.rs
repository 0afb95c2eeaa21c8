//! The volume of values, by which copies are charged.
//!
//! An evaluation copies values: into lists, maps and the variables of macros, into sums, and into the
//! error of an operator that cannot take them. The volume of a part of an expression is that of all values
//! which it gives in all rounds of the macros around it. In all rounds, the variable of a macro gives
//! no more than the list that the macro goes over.

use super::FILTER_MAX_MACROS;

const POWERS: usize = FILTER_MAX_MACROS + 1;

/// A volume before the facts are known. The rounds of a macro are at most the entries of the longest
/// list: each number counts once, times these entries, times their square.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Volume {
    /// Number of values that the text of the expression makes.
    made: [u64; POWERS],
    /// Number of copies of the facts.
    facts: [u64; POWERS],
}

impl Volume {
    /// So many values, made within so many macros.
    pub(super) fn made(values: u64, macros: usize) -> Self {
        let mut volume = Self::default();
        volume.made[macros] = values;
        volume
    }

    /// Any part of the facts, within so many macros.
    pub(super) fn facts(macros: usize) -> Self {
        let mut volume = Self::default();
        volume.facts[macros] = 1;
        volume
    }

    /// Both together.
    pub(super) fn and(self, other: Self) -> Self {
        let sum = |these: [u64; POWERS], those: [u64; POWERS]| {
            std::array::from_fn(|power| these[power].saturating_add(those[power]))
        };
        Self { made: sum(self.made, other.made), facts: sum(self.facts, other.facts) }
    }

    /// The same in each round of so many more macros.
    pub(super) fn within(self, macros: usize) -> Self {
        (0..POWERS).fold(Self::default(), |mut within, power| {
            // There is no higher power: a macro goes over no list of a map that makes lists.
            let raised = (power + macros).min(POWERS - 1);
            within.made[raised] = within.made[raised].saturating_add(self.made[power]);
            within.facts[raised] = within.facts[raised].saturating_add(self.facts[power]);
            within
        })
    }

    /// What counts times this power of the rounds, if the facts have this volume.
    pub(super) fn of_power(&self, power: usize, facts: u64) -> u64 {
        self.made[power].saturating_add(self.facts[power].saturating_mul(facts))
    }
}
