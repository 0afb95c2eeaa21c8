//! The spans of slices.

use crate::handler::Slice;
use crate::pool::Shared;
use crate::pool::commit::Committed;
use crate::trace::{SliceTrace, Span};

impl Shared {
    /// Starts the trace of a slice whose handler starts now.
    pub(super) fn trace(&self, slice: &mut Slice) {
        if !self.tracer.is_on() {
            return;
        }
        let events = slice.events.iter().map(|delivery| (delivery.sequence, &delivery.event));
        let whose = (&slice.bot, slice.attempt);
        slice.trace = SliceTrace::start(&self.tracer, self.queue.name(), whose, events);
    }
}

/// The commits of slices, each with the reason why it is tried again. They end when they are dropped,
/// and then the slices end. Without a trace, this allocates nothing.
pub(super) fn commits<'a>(
    slices: impl Iterator<Item = (&'a Slice, Option<&'a str>)>,
) -> Vec<Commit> {
    let commit = |(slice, failure): (&Slice, Option<&str>)| {
        let trace = slice.trace.clone()?;
        Some(Commit { span: trace.commit(failure), trace })
    };
    slices.filter_map(commit).collect()
}

/// Ends commits with their common result, and their slices.
pub(super) fn ended(commits: Vec<Commit>, committed: Committed) {
    let problem = match committed {
        Committed::Done | Committed::Full => None,
        Committed::Stale => Some("the lease was lost; nothing was committed"),
        Committed::Unknown => Some("Redis did not answer; the commit may have been done"),
    };
    for mut commit in commits {
        if let (Some(problem), Some(span)) = (problem, &mut commit.span) {
            span.fail(problem);
        }
    }
}

/// The commit of one slice.
pub(super) struct Commit {
    span: Option<Span>,
    trace: std::sync::Arc<SliceTrace>,
}

impl Drop for Commit {
    fn drop(&mut self) {
        // The commit ends before its slice.
        drop(self.span.take());
        self.trace.end();
    }
}
