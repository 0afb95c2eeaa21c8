//! What the random operations met: a test that never meets an accident proves nothing about it.

mod lanes;
mod limits;
mod names;

use std::collections::BTreeMap;

use super::reference::{ReferenceState, Step};

#[derive(Debug, Default)]
pub(super) struct Coverage(BTreeMap<&'static str, u32>);

impl Coverage {
    pub(super) fn note(&mut self, before: &ReferenceState, after: &ReferenceState, step: &Step) {
        self.note_lanes(&before.server, &after.server, step);
        self.note_names(before, after, step);
        self.note_limits(&before.server, step);
    }

    fn add(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    /// Panics if something never happened.
    pub(super) fn check(&self) {
        println!("{self:#?}");
        for what in lanes::WANTED.iter().chain(names::WANTED).chain(limits::WANTED) {
            assert!(self.0.contains_key(what), "never happened: {what}; {self:?}");
        }
    }
}
