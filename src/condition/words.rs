//! The sentence.

use super::{Condition, Handled};
use crate::history::{Attempt, AttemptResult};
use crate::problems::text::count;
use crate::queue::BotState;

/// Formats a time in ms for people.
type Spoken = fn(u64) -> String;

/// Maximum number of characters of a reason.
const REASON_MAX: usize = 200;
/// A time above this, in ms, is said without its parts of a second.
const WHOLE_MS: u64 = 10_000;

impl Condition<'_> {
    /// The state in words, as a sentence without its end.
    pub(crate) fn words(&self, now_ms: u64, spoken: Spoken) -> String {
        if self.is_unseen() {
            return self.never(spoken);
        }
        let mut text = self.state(now_ms, spoken);
        if self.look.set_aside > 0 {
            let events = count(self.look.set_aside, "event");
            text.extend(["; ", &events, " set aside after failures"]);
        }
        if self.holds.dead_letters > 0 {
            text.extend(["; ", &count(self.holds.dead_letters, "dead letter")]);
        }
        let later = self.holds.delayed_events.max(self.holds.pending);
        if later > 0 {
            text.extend(["; ", &count(later, "delayed event")]);
        }
        text
    }

    fn never(&self, spoken: Spoken) -> String {
        match self.terms.kept_ms {
            Some(kept) => format!("Never seen, or not in the last {}", spoken(kept)),
            None => "Never seen, or no trace of it is kept".to_owned(),
        }
    }

    fn state(&self, now_ms: u64, spoken: Spoken) -> String {
        let waits = || match self.look.depth {
            0 => "nothing waits".to_owned(),
            1 => "1 event waits".to_owned(),
            depth => format!("{} wait", count(depth, "event")),
        };
        match self.look.state {
            BotState::Leased => self.handled(now_ms, spoken),
            BotState::Parked => self.parked(now_ms, spoken),
            BotState::Paused => format!("{}; {}", self.pause(now_ms, spoken), waits()),
            BotState::Ready if self.stopped => format!("The pipeline is paused; {}", waits()),
            BotState::Ready if self.look.attempts > 0 => {
                format!("Waiting for its turn{}{}", self.next_attempt(), self.why(": "))
            }
            BotState::Ready => "Waiting for its turn".to_owned(),
            BotState::Idle => format!("Nothing waits{}", self.completed(now_ms, spoken)),
        }
    }

    fn handled(&self, now_ms: u64, spoken: Spoken) -> String {
        let by = match self.handled {
            Some(Handled { since_ms, process: (host, pid) }) => {
                let since = spoken(whole(now_ms.saturating_sub(since_ms)));
                format!(" since {since} by {host}-{pid}")
            }
            // The end of a lease tells when it was renewed last, and not when the slice started.
            None => String::new(),
        };
        let attempt = if self.look.attempts > 0 { self.next_attempt() } else { String::new() };
        format!("Being handled{by}{attempt}")
    }

    fn parked(&self, now_ms: u64, spoken: Spoken) -> String {
        let rest = self.look.until_ms.map(|until| whole(until.saturating_sub(now_ms)));
        let next = |before: &str| {
            rest.map_or_else(String::new, |rest| match rest {
                0 => format!("{before}now"),
                rest => format!("{before}in {}", spoken(rest)),
            })
        };
        if self.look.throttled_since_ms.is_some() {
            let rate = self.look.rate.map(|rate| rate.to_string()).or(self.terms.rate.clone());
            let rate = rate
                .map_or_else(String::new, |rate| format!(": {}", rate.replace('/', " events/")));
            return format!("Throttled{rate}{}", next(", next "));
        }
        if self.look.attempts > 0 {
            return format!("Retrying{}{}{}", next(" "), self.next_attempt(), self.why(": "));
        }
        match self.failure {
            // What is unavailable costs no attempt.
            Some(_) => format!("Retrying{}{}", next(" "), self.why(": ")),
            None => format!("Waiting for more events{}", next(", next slice ")),
        }
    }

    /// `Paused by ops, 12 min ago: …`.
    fn pause(&self, now_ms: u64, spoken: Spoken) -> String {
        match &self.look.pause {
            Some(note) => note.words(now_ms, spoken).replacen("paused", "Paused", 1),
            None => "Paused".to_owned(),
        }
    }

    /// `, attempt 9 of 10`.
    fn next_attempt(&self) -> String {
        let number = self.look.attempts.saturating_add(1);
        match self.terms.attempts_max {
            // The last failure of an event that is given up counts, too.
            Some(most) => format!(", attempt {} of {most}", number.min(most)),
            None => format!(", attempt {number}"),
        }
    }

    /// Why it is tried again: `500 from receiver.example`, or the reason of the handler.
    fn why(&self, before: &str) -> String {
        let last = self.attempts.first().filter(|last| last.result.is_failure());
        let answered = last.and_then(|last| last.status);
        match (answered, self.failure) {
            (Some(status), _) => {
                let target = self.terms.target.as_deref().unwrap_or("the receiver");
                format!("{before}{status} from {target}")
            }
            (None, Some(failure)) => format!("{before}{}", short(&failure.reason)),
            (None, None) => match last.and_then(|last| last.reason.as_deref()) {
                Some(reason) => format!("{before}{}", short(reason)),
                None => String::new(),
            },
        }
    }

    /// `; last completed 2 min ago: 12 events`.
    fn completed(&self, now_ms: u64, spoken: Spoken) -> String {
        let Some(last) = self.attempts.iter().find(|attempt| attempt.settled > 0) else {
            return String::new();
        };
        let ago = spoken(whole(now_ms.saturating_sub(end_ms(last))));
        let events = count(last.settled.into(), "event");
        match last.result {
            AttemptResult::Dead => {
                let reason = last.reason.as_deref().map(|reason| format!(": {}", short(reason)));
                format!("; gave up {ago} ago{}", reason.unwrap_or_default())
            }
            _ => format!("; last completed {ago} ago: {events}"),
        }
    }
}

/// When an attempt ended, ms since 1970.
fn end_ms(attempt: &Attempt) -> u64 {
    attempt.time_ms.saturating_add(attempt.duration_us.unwrap_or(0) / 1_000)
}

/// A longer time in whole seconds.
fn whole(ms: u64) -> u64 {
    if ms < WHOLE_MS { ms / 100 * 100 } else { ms / 1_000 * 1_000 }
}

/// The start of a long text.
fn short(text: &str) -> String {
    let mut shown: String = text.chars().take(REASON_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::super::{Terms, Tone};
    use super::*;
    use crate::id::BotId;
    use crate::queue::{BotView, Holdings, LastFailure, PauseNote};
    use crate::rate::Weight;

    const NOW: u64 = 1_000_000_000;

    fn spoken(ms: u64) -> String {
        crate::problems::text::duration(ms)
    }

    fn look(state: BotState) -> BotView {
        BotView {
            bot: BotId::parse("b").unwrap(),
            state,
            depth: 12,
            set_aside: 0,
            oldest_age_ms: 1,
            fence: None,
            until_ms: Some(NOW + 180_500),
            attempts: 0,
            weight: Weight::ONE,
            rate: None,
            burst: None,
            throttled_since_ms: None,
            pause: None,
        }
    }

    fn attempt(result: AttemptResult, status: Option<u16>) -> Attempt {
        Attempt {
            time_ms: NOW - 121_000,
            duration_us: Some(1_000_000),
            result,
            attempt: 8,
            lost: 0,
            slices: 1,
            events: 12,
            settled: if result.is_failure() { 0 } else { 12 },
            first_id: String::new(),
            last_id: String::new(),
            first_sequence: 1,
            last_sequence: 2,
            status,
            reason: Some("the receiver answered 500".to_owned()),
            answer: None,
            retry_ms: None,
            process: String::new(),
            ids: crate::history::Ids::default(),
        }
    }

    /// The parts of a condition, to be changed by a test.
    struct Case {
        look: BotView,
        failure: Option<LastFailure>,
        attempts: Vec<Attempt>,
        holds: Holdings,
        stopped: bool,
        handled: Option<Handled<'static>>,
        terms: Terms,
    }

    impl Case {
        fn new(state: BotState) -> Self {
            let terms = Terms {
                attempts_max: Some(10),
                rate: None,
                kept_ms: Some(86_400_000),
                target: Some("receiver.example".to_owned()),
            };
            Self {
                look: look(state),
                failure: None,
                attempts: Vec::new(),
                holds: Holdings::default(),
                stopped: false,
                handled: None,
                terms,
            }
        }

        fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
            change(&mut self);
            self
        }

        fn condition(&self) -> Condition<'_> {
            let Self { look, failure, attempts, holds, stopped, handled, terms } = self;
            Condition {
                look,
                failure: failure.as_ref(),
                attempts,
                holds,
                stopped: *stopped,
                handled: *handled,
                terms,
            }
        }

        fn says(&self) -> String {
            self.condition().words(NOW, spoken)
        }
    }

    fn failed(reason: &str) -> LastFailure {
        LastFailure { reason: reason.to_owned(), time_ms: 0, since_ms: 0 }
    }

    #[test]
    fn a_retry_says_when_which_attempt_and_why() {
        let retried = || {
            Case::new(BotState::Parked).with(|case| {
                case.look.attempts = 8;
                case.failure = Some(failed("the receiver answered 500: oops"));
                case.attempts = vec![attempt(AttemptResult::Failed, Some(500))];
            })
        };
        assert_eq!(retried().says(), "Retrying in 3m, attempt 9 of 10: 500 from receiver.example");
        assert_eq!(retried().condition().tone(), Tone::Bad);
        let hidden = retried().with(|case| case.terms.target = None);
        assert_eq!(hidden.says(), "Retrying in 3m, attempt 9 of 10: 500 from the receiver");
        let unanswered = retried().with(|case| case.attempts.clear());
        assert_eq!(
            unanswered.says(),
            "Retrying in 3m, attempt 9 of 10: the receiver answered 500: oops"
        );
        let due = unanswered.with(|case| case.look.state = BotState::Ready);
        assert_eq!(
            due.says(),
            "Waiting for its turn, attempt 9 of 10: the receiver answered 500: oops"
        );
        let away =
            Case::new(BotState::Parked).with(|case| case.failure = Some(failed("MongoDB is down")));
        assert_eq!(away.says(), "Retrying in 3m: MongoDB is down");
        let unknown = Case::new(BotState::Parked).with(|case| {
            case.look.attempts = 2;
            case.terms = Terms::default();
        });
        assert_eq!(unknown.says(), "Retrying in 3m, attempt 3");
    }

    #[test]
    fn a_bot_that_waits_says_for_what() {
        assert_eq!(Case::new(BotState::Ready).says(), "Waiting for its turn");
        let stopped = Case::new(BotState::Ready).with(|case| case.stopped = true);
        assert_eq!(stopped.says(), "The pipeline is paused; 12 events wait");
        let throttled = Case::new(BotState::Parked).with(|case| {
            case.look.throttled_since_ms = Some(NOW);
            case.look.until_ms = Some(NOW + 430);
            case.terms.rate = Some("10/s".to_owned());
        });
        assert_eq!(throttled.says(), "Throttled: 10 events/s, next in 400ms");
        let own = throttled.with(|case| case.look.rate = Some("30/m".parse().unwrap()));
        assert_eq!(own.says(), "Throttled: 30 events/m, next in 400ms");
        let batching = Case::new(BotState::Parked);
        assert_eq!(batching.says(), "Waiting for more events, next slice in 3m");
        let due = Case::new(BotState::Parked).with(|case| case.look.until_ms = Some(NOW));
        assert_eq!(due.says(), "Waiting for more events, next slice now");
    }

    #[test]
    fn a_pause_says_since_when_and_why_if_that_is_known() {
        let paused = || Case::new(BotState::Paused);
        assert_eq!(paused().says(), "Paused; 12 events wait");
        let known = paused().with(|case| {
            let reason = Some("too many".to_owned());
            let by = "ops".to_owned();
            case.look.depth = 1;
            case.look.pause = Some(PauseNote { since_ms: NOW - 720_000, by, reason });
        });
        assert_eq!(known.says(), "Paused by ops, 12m ago: too many; 1 event waits");
    }

    #[test]
    fn a_lease_says_since_when_and_by_whom_once_its_process_is_known() {
        let leased = |left_ms| {
            Case::new(BotState::Leased).with(|case| case.look.until_ms = Some(NOW + left_ms))
        };
        // Not renewed yet, and renewed three seconds ago.
        for left_ms in [1_500, 27_000] {
            assert_eq!(leased(left_ms).says(), "Being handled");
        }
        let known = leased(27_000).with(|case| {
            case.handled = Some(Handled { since_ms: NOW - 65_000, process: ("host", 7) });
            case.look.attempts = 2;
        });
        assert_eq!(known.says(), "Being handled since 1m 5s by host-7, attempt 3 of 10");
    }

    #[test]
    fn a_bot_without_events_says_what_it_did_last_and_what_it_still_holds() {
        let idle = || Case::new(BotState::Idle).with(|case| case.look.depth = 0);
        assert_eq!(idle().says(), "Never seen, or not in the last 1d");
        let forgotten = idle().with(|case| case.terms = Terms::default());
        assert_eq!(forgotten.says(), "Never seen, or no trace of it is kept");
        let done = || idle().with(|case| case.attempts = vec![attempt(AttemptResult::Done, None)]);
        assert_eq!(done().says(), "Nothing waits; last completed 2m ago: 12 events");
        assert_eq!(done().condition().tone(), Tone::Good);
        let dead = done().with(|case| case.holds.dead_letters = 23);
        assert_eq!(dead.says(), "Nothing waits; last completed 2m ago: 12 events; 23 dead letters");
        assert_eq!(dead.condition().tone(), Tone::Bad);
        let gave_up = idle().with(|case| {
            case.holds.dead_letters = 1;
            case.holds.pending = 2;
            case.attempts = vec![Attempt { settled: 1, ..attempt(AttemptResult::Dead, Some(500)) }];
        });
        assert_eq!(
            gave_up.says(),
            "Nothing waits; gave up 2m ago: the receiver answered 500; 1 dead letter; 2 delayed events"
        );
    }

    #[test]
    fn a_long_reason_is_cut() {
        let case =
            Case::new(BotState::Parked).with(|case| case.failure = Some(failed(&"é".repeat(999))));
        let text = case.says();
        assert!(text.ends_with("é…") && text.chars().count() < 230, "{text}");
    }
}
