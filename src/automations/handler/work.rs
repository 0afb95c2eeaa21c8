//! The work on a slice: its decisions, and the profiles that they change.

use std::collections::HashMap;

use tokio::time::Instant;

use crate::automations::decide::{Decision, Note};
use crate::automations::recent::size_of;
use crate::automations::subscribers::{Kept, Next};
use crate::id::Sequence;

/// A slice with its decisions so far.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// The decisions to carry out, by event.
    pub(super) decisions: Vec<Decision>,
    /// The new decisions' notes for the statistics of the rules.
    pub(super) notes: Vec<(usize, Vec<Note>)>,
    pub(super) writes: Vec<Next>,
    /// The states without a write.
    pub(super) unwritten: Vec<Unwritten>,
    /// When the document of each subscriber was read.
    pub(super) read: HashMap<String, Instant>,
    /// Whether a state was a guess.
    pub(super) guessed: bool,
}

/// A profile being changed.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) kept: Kept,
    /// The state from MongoDB.
    pub(super) before: Option<Sequence>,
    pub(super) read: Instant,
    pub(super) source: Source,
    /// An event was decided by it.
    pub(super) used: bool,
    /// Whether a decision or a change is to be written.
    pub(super) dirty: bool,
    /// Whether the profile itself changed.
    pub(super) changed: bool,
    /// Its size after the last change; 0 before the first.
    pub(super) bytes: usize,
}

impl Subject {
    pub(super) fn new(kept: Kept, read: Instant, source: Source) -> Self {
        let (before, bytes) = (kept.sequence, 0);
        let (used, dirty, changed) = (false, false, false);
        Self { kept, before, read, source, used, dirty, changed, bytes }
    }

    /// Notes a change. Returns by how many bytes the changed profiles of the slice have grown.
    pub(super) fn grown(&mut self) -> usize {
        self.changed = true;
        let before = std::mem::replace(&mut self.bytes, size_of("", &self.kept));
        self.bytes.saturating_sub(before)
    }
}

/// Where a state is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// MongoDB, in this slice.
    Read,
    /// An earlier slice, so it may be outdated.
    Recent,
}

/// A state that needs no write.
#[derive(Debug)]
pub(super) struct Unwritten {
    pub(super) subscriber: String,
    pub(super) kept: Kept,
    /// Events were decided by a guess.
    pub(super) unsure: bool,
}
