//! What the random operations did with events that were copied before.

use super::Coverage;
use crate::model::protocol::copier::Copy;
use crate::model::protocol::reference::{Action, ReferenceState, ScriptReply, Step};
use crate::model::state_machine::{Enqueued, Name, Noted, Server};

/// Everything that must happen to repetitions.
pub(super) const WANTED: &[&str] = &[
    "an event was copied in this window",
    "an event was copied in the window before",
    "a call has repetitions and other events",
    "a call has only repetitions",
    "a call of several logs has repetitions",
    "the rest of a call is copied",
    "the position passes repetitions alone",
    "the rest of a call is too late",
    "the rest of a call is refused, because a copy is lost or too old",
    "a window ends in a copy",
    "a window ends in a call with repetitions",
    "an event is forgotten and copied again",
    "a call without events notes no name",
    "a call that was copied before notes no name",
    "a call that does not fit notes no name",
    "a name is noted of an event above the maximum of a queue",
    "a copier takes a lease and notes names",
    "a lost tail takes names",
    "an event is copied again after a lost tail",
    "a repetition is found again after a lost tail",
];

impl Coverage {
    pub(super) fn note_names(
        &mut self,
        before: &ReferenceState,
        after: &ReferenceState,
        step: &Step,
    ) {
        match (&step.action, &step.answer) {
            (Action::Enqueue(copy), ScriptReply::Enqueued(reply, ..)) if copy.window_ms > 0 => {
                self.note_copy(&before.server, &after.server, copy, reply);
                let was_copied = |name: &Name| before.copier.was_copied(*name);
                if matches!(reply, Enqueued::Stored(..)) && copy.names.iter().any(was_copied) {
                    self.add("an event is forgotten and copied again");
                }
            }
            (Action::LoseTail(_), _) => self.note_loss(&before.server, &after.server),
            _ => {}
        }
    }

    fn note_loss(&mut self, before: &Server, after: &Server) {
        let all = |server: &Server| {
            let both = [&server.names.now, &server.names.before].map(Clone::clone);
            both.into_iter().flatten().flat_map(|noted| noted.names).collect::<Vec<Name>>()
        };
        let (had, has) = (all(before), all(after));
        if had.iter().any(|name| !has.contains(name)) {
            self.add("a lost tail takes names");
        }
    }

    fn note_copy(&mut self, before: &Server, after: &Server, copy: &Copy, reply: &Enqueued) {
        let knows = |noted: &Option<Noted>, name: &Name| {
            noted.as_ref().is_some_and(|noted| noted.names.contains(name))
        };
        let window_ended = before.names.now.is_some() && before.names.now != after.names.now && {
            after.names.before == before.names.now
        };
        match reply {
            Enqueued::Repeated(places) => {
                for name in places.iter().map(|place| copy.names[*place]) {
                    if knows(&before.names.now, &name) {
                        self.add("an event was copied in this window");
                    } else {
                        self.add("an event was copied in the window before");
                    }
                }
                self.add(if places.len() < copy.names.len() {
                    "a call has repetitions and other events"
                } else {
                    "a call has only repetitions"
                });
                if copy.spans.len() > 1 {
                    self.add("a call of several logs has repetitions");
                }
                if window_ended {
                    self.add("a window ends in a call with repetitions");
                }
                if copy.was_lost {
                    self.add("a repetition is found again after a lost tail");
                }
            }
            Enqueued::Stored(queued, taken) => {
                match (&copy.rest_of, &copy.names[..]) {
                    (Some(_), []) => self.add("the position passes repetitions alone"),
                    (Some(_), _) => self.add("the rest of a call is copied"),
                    (None, []) => self.add("a call without events notes no name"),
                    _ => {}
                }
                if window_ended {
                    self.add("a window ends in a copy");
                }
                if queued.dropped + queued.dead > 0 {
                    self.add("a name is noted of an event above the maximum of a queue");
                }
                if !taken.is_empty() && !copy.names.is_empty() {
                    self.add("a copier takes a lease and notes names");
                }
                if copy.was_lost && !copy.names.is_empty() {
                    self.add("an event is copied again after a lost tail");
                }
            }
            Enqueued::Gap(stands)
                if !copy.left_out.is_empty()
                    && copy.spans.iter().zip(stands).all(|((_, (prev, _)), at)| prev == at) =>
            {
                self.add("the rest of a call is refused, because a copy is lost or too old");
            }
            Enqueued::Dup | Enqueued::Gap(_) if copy.names.is_empty() => {}
            Enqueued::Dup | Enqueued::Gap(_) if copy.rest_of.is_some() => {
                self.add("the rest of a call is too late");
            }
            Enqueued::Dup => self.add("a call that was copied before notes no name"),
            Enqueued::Gap(_) => self.add("a call that does not fit notes no name"),
        }
    }
}
