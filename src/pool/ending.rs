//! What the answer of a handler says about its attempt.

use crate::handler::{Failure, FailureKind, Outcomes};
use crate::history::{Attempt, AttemptResult, kept_text};
use crate::outbound::Response;

/// What the answer of a handler says about its attempt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ending {
    kind: Option<FailureKind>,
    timed_out: bool,
    response: Option<Response>,
}

impl Ending {
    pub(super) fn of(answer: &Result<Outcomes, Failure>) -> Self {
        match answer {
            Ok(outcomes) => {
                Self { kind: None, timed_out: false, response: outcomes.response.clone() }
            }
            Err(failure) => Self {
                kind: Some(failure.kind),
                timed_out: failure.timed_out,
                response: failure.response.clone(),
            },
        }
    }

    /// How an attempt ended of whose `events` this number is `settled`, some of them as dead letters.
    fn result(&self, events: usize, settled: usize, dead: bool) -> AttemptResult {
        match self.kind {
            _ if dead => AttemptResult::Dead,
            None if settled >= events => AttemptResult::Done,
            Some(FailureKind::Unavailable) => AttemptResult::Unavailable,
            _ if settled > 0 => AttemptResult::Partial,
            None => AttemptResult::Partial,
            Some(_) if self.timed_out => AttemptResult::Timeout,
            Some(_) => AttemptResult::Failed,
        }
    }

    /// Completes the note of an attempt. `reason`: why it is not done.
    pub(super) fn finish(self, mut note: Attempt, dead: bool, reason: Option<&str>) -> Attempt {
        note.result = self.result(note.events as usize, note.settled as usize, dead);
        note.reason = reason.map(kept_text);
        if let Some(Response { status, body }) = self.response {
            note.status = Some(status);
            let says = note.result != AttemptResult::Done && !body.is_empty();
            note.answer = says.then(|| kept_text(&body));
        }
        note
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_ends_as_its_answer_says() {
        let failure = |failure: Failure| Ending::of(&Err(failure));
        let transient = || Failure::transient(0, "no");
        let late = || Failure { timed_out: true, ..Failure::unknown("late".to_owned()) };
        let ok = || Ending::of(&Ok(Outcomes::done()));
        for (ending, settled, dead, expected) in [
            (ok(), 3, false, AttemptResult::Done),
            (ok(), 3, true, AttemptResult::Dead),
            (ok(), 1, false, AttemptResult::Partial),
            (ok(), 0, false, AttemptResult::Partial),
            (failure(transient()), 0, false, AttemptResult::Failed),
            (failure(transient()), 2, false, AttemptResult::Partial),
            (failure(Failure::permanent(0, "no")), 1, true, AttemptResult::Dead),
            (failure(Failure::unavailable(0, "no")), 0, false, AttemptResult::Unavailable),
            (failure(late()), 0, false, AttemptResult::Timeout),
        ] {
            assert_eq!(ending.result(3, settled, dead), expected, "{ending:?} {settled}");
        }
    }

    #[test]
    fn the_answer_of_a_receiver_is_kept_unless_all_is_done() {
        for (settled, result, answer) in [
            (0, AttemptResult::Failed, Some("oops".to_owned())),
            (1, AttemptResult::Partial, Some("oops".to_owned())),
        ] {
            let response = Some(Response { status: 500, body: "oops".to_owned() });
            let ending = Ending { kind: Some(FailureKind::Transient), timed_out: false, response };
            let note = ending.finish(note(settled), false, Some("no"));
            assert_eq!((note.status, note.result, note.answer), (Some(500), result, answer));
            assert_eq!(note.reason.as_deref(), Some("no"));
        }
        let response = Some(Response { status: 200, body: "fine".to_owned() });
        let ending = Ending { kind: None, timed_out: false, response };
        let done = ending.finish(note(3), false, None);
        assert_eq!((done.status, done.result, done.answer), (Some(200), AttemptResult::Done, None));
    }

    /// An attempt at three events.
    fn note(settled: u32) -> Attempt {
        Attempt {
            time_ms: 1,
            duration_us: Some(1),
            result: AttemptResult::Done,
            attempt: 1,
            lost: 0,
            slices: 1,
            events: 3,
            settled,
            first_id: String::new(),
            last_id: String::new(),
            first_sequence: 1,
            last_sequence: 3,
            status: None,
            reason: None,
            answer: None,
            retry_ms: None,
            process: String::new(),
            ids: crate::history::Ids::default(),
        }
    }
}
