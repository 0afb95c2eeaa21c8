//! What the random operations did at the limits of bots and shards.

use super::Coverage;
use crate::model::protocol::reference::{Action, ScriptReply, Step};
use crate::model::state_machine::{Enqueued, Queued, Refused, Server};

/// Everything that must happen at limits.
pub(super) const WANTED: &[&str] = &[
    "a push is refused: queued_bytes",
    "a delayed event is refused: queued_bytes",
    "a delayed event is refused: delayed_events",
    "a delayed event is refused: delayed_bytes",
    "an idempotency key is repeated",
    "events exceed the quota of a bot",
    "events exceed the maximum of a queue",
    "a letter exceeds the quota of its bot",
    "a full shard deletes its oldest letters",
    "a claim finds finishes behind and ahead of its clock",
];

impl Coverage {
    pub(super) fn note_limits(&mut self, before: &Server, step: &Step) {
        match (&step.action, &step.answer) {
            (Action::Push { due_ms, .. }, ScriptReply::Refused(Refused(name, ..))) => {
                self.add(match *name {
                    "queued_bytes" if due_ms.is_none() => "a push is refused: queued_bytes",
                    "queued_bytes" => "a delayed event is refused: queued_bytes",
                    "delayed_events" => "a delayed event is refused: delayed_events",
                    _ => "a delayed event is refused: delayed_bytes",
                });
            }
            (Action::Push { .. }, ScriptReply::Pushed(pushed)) if pushed.duplicate => {
                self.add("an idempotency key is repeated");
            }
            (Action::Push { .. }, ScriptReply::Pushed(pushed)) => self.note_queued(pushed.queued),
            (Action::Enqueue(_), ScriptReply::Enqueued(Enqueued::Stored(queued, _), ..)) => {
                self.note_queued(*queued);
            }
            (Action::Claim(_), ScriptReply::Claimed(claimed, _))
                if is_between_finishes(before, claimed.v) =>
            {
                self.add("a claim finds finishes behind and ahead of its clock");
            }
            _ => {}
        }
    }

    fn note_queued(&mut self, queued: Queued) {
        if queued.over_quota > 0 {
            self.add("events exceed the quota of a bot");
        }
        if queued.dead + queued.dropped > queued.over_quota {
            self.add("events exceed the maximum of a queue");
        }
        if queued.letters_over_quota > 0 {
            self.add("a letter exceeds the quota of its bot");
        }
        if queued.letters_removed > queued.letters_over_quota {
            self.add("a full shard deletes its oldest letters");
        }
    }
}

fn is_between_finishes(server: &Server, v: i64) -> bool {
    let finishes = || server.fin.values();
    finishes().any(|&finish| finish <= v) && finishes().any(|&finish| finish > v)
}
