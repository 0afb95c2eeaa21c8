//! What the random operations did with lanes that are set aside.

use super::Coverage;
use crate::model::protocol::reference::{Action, ScriptReply, Step, Verdict};
use crate::model::state_machine::{Completion, Fate, Mode, Server};

/// Everything that must happen to lanes.
pub(super) const WANTED: &[&str] = &[
    "an event moves to a lane",
    "events of a lane are done",
    "an event of a lane is dead-lettered",
    "an event of a lane is delayed",
    "a repeated completion of a lane",
    "a stale completion of a lane",
    "the last lane is done",
    "a bot waits for its lane",
    "a claim grants lanes",
    "a lease with lanes is lost",
    "recovery revokes a lease with lanes",
    "a copy to a bot with lanes",
    "a push to a bot with lanes",
    "a due event of a bot with lanes",
    "a pause with lanes",
    "a resume with lanes",
    "a purge with lanes",
    "a revocation with lanes",
    "a redrive with lanes",
];

impl Coverage {
    pub(super) fn note_lanes(&mut self, before: &Server, after: &Server, step: &Step) {
        let aside = |bot| before.aside.contains_key(bot);
        let leased = || before.own.keys().any(aside);
        let noted = match (&step.action, &step.answer) {
            (Action::Complete(calls), ScriptReply::Completed { verdicts, .. }) => {
                for (call, verdict) in calls.iter().zip(verdicts) {
                    self.note_completion(before, after, call, *verdict);
                }
                None
            }
            (Action::Claim(_), ScriptReply::Claimed(claimed, _)) => {
                if claimed.granted.iter().any(|granted| aside(&granted.bot)) {
                    self.add("a claim grants lanes");
                }
                let lost = |(bot, lease): (_, &crate::model::state_machine::Lease)| {
                    aside(bot) && after.own.get(bot).is_none_or(|now| now.fence != lease.fence)
                };
                before.own.iter().any(lost).then_some("a lease with lanes is lost")
            }
            (Action::Recover(_), ScriptReply::Recovered(Some(_))) => {
                leased().then_some("recovery revokes a lease with lanes")
            }
            (Action::Enqueue(copy), ScriptReply::Enqueued(..)) => {
                let copied = after.seq > before.seq && copy.bots.iter().any(|(bot, _)| aside(bot));
                copied.then_some("a copy to a bot with lanes")
            }
            (Action::Push { bot, due_ms: None, .. }, ScriptReply::Pushed(_)) => {
                aside(bot).then_some("a push to a bot with lanes")
            }
            (Action::Promote(events), ScriptReply::Promoted(1.., _)) => events
                .iter()
                .any(|(id, bot)| before.later.contains_key(id) && aside(bot))
                .then_some("a due event of a bot with lanes"),
            (Action::Pause(Some(bot)), _) => aside(bot).then_some("a pause with lanes"),
            (Action::Resume(Some(bot)), ScriptReply::Changed(true)) => {
                aside(bot).then_some("a resume with lanes")
            }
            (Action::Purge(bot), _) => aside(bot).then_some("a purge with lanes"),
            (Action::Revoke(bot), _) => aside(bot).then_some("a revocation with lanes"),
            (Action::Redrive(_, bot), ScriptReply::Changed(true)) => {
                aside(bot).then_some("a redrive with lanes")
            }
            _ => None,
        };
        if let Some(what) = noted {
            self.add(what);
        }
    }

    fn note_completion(
        &mut self,
        before: &Server,
        after: &Server,
        call: &Completion,
        verdict: Verdict,
    ) {
        let Some(change) = &call.aside else { return };
        if verdict == Verdict::Stale && change.list.is_some() {
            self.add("a stale completion of a lane");
        }
        if !matches!(verdict, Verdict::Ok | Verdict::Full) {
            return;
        }
        let lease = &before.own[&call.bot];
        if call.n > 0 && lease.acked != call.before {
            return self.add("a repeated completion of a lane");
        }
        for (_, fate) in &call.exceptions {
            match (fate, change.list) {
                (Fate::Lane(_), _) => self.add("an event moves to a lane"),
                (Fate::Dead { .. }, Some(_)) => self.add("an event of a lane is dead-lettered"),
                (Fate::Later { .. }, Some(_)) => self.add("an event of a lane is delayed"),
                _ => {}
            }
        }
        if call.n > 0 && change.list.is_some() {
            self.add("events of a lane are done");
        }
        if change.lanes.is_empty() && before.aside.contains_key(&call.bot) {
            self.add("the last lane is done");
        }
        if call.mode == Mode::Release && after.busy.contains_key(&call.bot) {
            self.add("a bot waits for its lane");
        }
    }
}
