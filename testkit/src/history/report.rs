//! What the check found.

use std::fmt;

/// Maximum number of faults that a report describes in words.
const EXAMPLES_MAX: usize = 10;

/// The result of the check. Every number is a count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of bots.
    pub bots: usize,
    /// Number of sent events.
    pub sent: usize,
    /// Number of handlings, including repeated and failed ones.
    pub handled: usize,
    /// Number of committed events.
    pub committed: usize,
    /// Sent events that were neither done nor committed.
    pub lost: usize,
    /// Events whose first handling was before that of an earlier event, or while an earlier one
    /// waited for its retry.
    pub reordered: usize,
    /// Commits that were confirmed although a newer lease was active: two holders.
    pub stale_commits: usize,
    /// Handlings that started under an older fence than an earlier handling.
    pub fence_regressions: usize,
    /// The same where it is no fault: a call was under way, or an operator had released the lease.
    pub late: usize,
    /// Events done again although an earlier holder's commit of them was confirmed.
    pub duplicates_unexplained: usize,
    /// Committed events that were never handled.
    pub unhandled: usize,
    /// Handlings that started while one under another fence was still running. This is no fault if
    /// workers are frozen past their lease. Otherwise it is one, which the caller must check.
    pub overlaps: usize,
    /// Events done again because an earlier holder never committed them. Not a fault: at least
    /// once.
    pub duplicates_explained: usize,
    /// Events committed without being done: dead letters. Not a fault.
    pub given_up: usize,
    /// Handled events without a record of sending: the sender never got its reply. Not a fault.
    pub unannounced: usize,
    /// The first few faults in words.
    pub examples: Vec<String>,
}

impl Report {
    /// Whether every guarantee held. Overlaps are not included, see [`Self::overlaps`].
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.faults().iter().all(|&(_, count)| count == 0)
    }

    fn faults(&self) -> [(&'static str, usize); 6] {
        [
            ("lost", self.lost),
            ("reordered", self.reordered),
            ("stale commits", self.stale_commits),
            ("fence regressions", self.fence_regressions),
            ("unexplained duplicates", self.duplicates_unexplained),
            ("committed unhandled", self.unhandled),
        ]
    }

    pub(super) fn describe(&mut self, text: impl FnOnce() -> String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(text());
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_clean() { "clean" } else { "BROKEN" };
        writeln!(f, "{:<24}{verdict}", "history")?;
        let facts = [
            ("bots", self.bots),
            ("sent", self.sent),
            ("handled", self.handled),
            ("committed", self.committed),
        ];
        let remarks = [
            ("overlapping holders", self.overlaps),
            ("late handlings", self.late),
            ("explained duplicates", self.duplicates_explained),
            ("given up", self.given_up),
            ("sent without a reply", self.unannounced),
        ];
        for (name, count) in facts.into_iter().chain(self.faults()).chain(remarks) {
            writeln!(f, "{name:<24}{count}")?;
        }
        for example in &self.examples {
            writeln!(f, "  {example}")?;
        }
        Ok(())
    }
}
