//! Converts a handler's answer into the end of a slice, as a pure function, and notes failures for
//! operators.

use std::time::Duration;

use tracing::{debug, warn};

use super::ending::Ending;
use crate::clock::millis;
use crate::event::Event;
use crate::handler::{Failure, FailureKind, Outcome, Outcomes};
use crate::id::{BotId, Lane, PipelineName, Sequence};
use crate::metrics::PipelineMetrics;
use crate::pool::retry::Backoff;
use crate::presence::Meter;
use crate::queue::{Noted, Queue};
use crate::redis::scripts::{Attempts, Exception, Fate, Mode};
use crate::telemetry::OncePerSubject;

/// Maximum pause that a handler may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(365 * 86_400);
/// Maximum length of a dead letter's reason, in bytes.
const REASON_MAX: usize = 1_000;

/// The state of an event of the slice before the handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fitness {
    /// The handler gets it.
    Fit,
    /// The event is too old: it becomes a dead letter, counted as expired.
    Expired(String),
    /// The event is unreadable, or has used all attempts: it becomes a dead letter.
    Spent(String),
    /// Its lane is set aside: it leaves the queue for the list of the lane.
    Aside(Lane),
}

/// Counts for the metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) done: u64,
    pub(super) dead: u64,
    pub(super) expired: u64,
    pub(super) later: u64,
    pub(super) retried: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.done += other.done;
        self.dead += other.dead;
        self.expired += other.expired;
        self.later += other.later;
        self.retried += other.retried;
    }

    /// Counts these events, and for each settled event the time from its arrival in the queue to
    /// `now`.
    pub(super) fn record(
        self,
        metrics: &PipelineMetrics,
        settled: impl Iterator<Item = Sequence>,
        now: Duration,
    ) {
        metrics.done.increment(self.done);
        metrics.dead.increment(self.dead);
        metrics.expired.increment(self.expired);
        metrics.later.increment(self.later);
        metrics.retried.increment(self.retried);
        for sequence in settled {
            let dwell = now.saturating_sub(Duration::from_micros(sequence.get()));
            metrics.dwell_seconds.record(dwell.as_secs_f64());
        }
    }
}

/// The end of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Settlement {
    /// Number of events that leave the queue.
    pub(super) n: usize,
    /// Number of settled events among those that the handler saw.
    pub(super) settled: usize,
    pub(super) mode: Mode,
    pub(super) exceptions: Vec<Exception>,
    pub(super) tally: Tally,
    /// Why it is not completely done, for the log.
    pub(super) failure: Option<String>,
    /// What the answer says about the attempt.
    pub(super) ending: Ending,
}

impl Settlement {
    /// Notes for operators why the handler failed, if it did. The slice is already settled, so an
    /// error here has no consequence. `first` is the first event of the slice, if known.
    pub(super) async fn note_failure(
        &self,
        (queue, meter): (&Queue, &Meter),
        bot: &BotId,
        first: Option<Sequence>,
        now: Duration,
    ) {
        if self.tally.done > 0 || self.failure.is_none() && self.settled > 0 {
            meter.calls.succeeded();
        }
        let Some(reason) = &self.failure else { return };
        if self.tally.done == 0 {
            meter.calls.failed(reason, millis(now));
        }
        let pause = match self.mode {
            Mode::Fail { ms, .. } | Mode::Park { ms } => Some(Duration::from_millis(ms)),
            _ => None,
        };
        let noted = Noted { reason, first, progress: self.tally.done > 0, pause, now };
        let noted = queue.note_failure(bot, noted).await;
        noted.unwrap_or_else(|error| debug!(%bot, %error, "cannot note why the handler failed"));
    }
}

/// The inputs of the decision besides the answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    pub(super) max_attempts: u32,
    pub(super) backoff: Backoff,
    /// Number of attempts counted before this one.
    pub(super) attempts: Attempts,
    /// How long the target has been unavailable.
    pub(super) unavailable: Duration,
    /// A random number in 0..1, for the jitter.
    pub(super) random: f64,
    /// The time since 1970.
    pub(super) now: Duration,
}

/// Decides. `slice` contains all claimed events, `answer` concerns the fit ones among them.
pub(super) fn settle(
    slice: &[Fitness],
    answer: Result<Outcomes, Failure>,
    policy: Policy,
) -> Settlement {
    let fit: Vec<usize> = (0..slice.len()).filter(|&index| slice[index] == Fitness::Fit).collect();
    // The position in the queue of the fit event `k`; past the last one, the end of the slice.
    let place = |k: usize| fit.get(k).copied().unwrap_or(slice.len());
    let mut exceptions: Vec<Exception> = Vec::new();
    let mut tally = Tally::default();
    let mut mode = Mode::Release;
    let mut failure = None;
    let ending = Ending::of(&answer);
    let (settled, n) = match answer {
        Ok(outcomes) => {
            let settled = outcomes.settled.unwrap_or(fit.len()).min(fit.len());
            for (k, outcome) in outcomes.exceptions {
                // An exception beyond the settled events is contradictory: that event stays queued.
                if k >= settled || exceptions.iter().any(|known| known.index == place(k)) {
                    continue;
                }
                let fate = match outcome {
                    Outcome::Dead(reason) => {
                        tally.dead += 1;
                        Fate::Dead {
                            reason: shorten(&reason),
                            attempts: policy.attempts.counted() + 1,
                        }
                    }
                    Outcome::Later(delay) => {
                        tally.later += 1;
                        Fate::Later {
                            at_ms: crate::clock::millis(policy.now + delay.min(PAUSE_MAX)),
                        }
                    }
                };
                exceptions.push(Exception { index: place(k), fate });
            }
            tally.done += (settled - exceptions.len()) as u64;
            if let Some(rest) = outcomes.rest.filter(|_| settled < fit.len()) {
                mode = Mode::Park { ms: crate::clock::millis(rest.min(PAUSE_MAX)) };
            } else if settled == 0 && !fit.is_empty() {
                // No progress and no failure: an immediate retry would be a busy loop.
                let pause = policy.backoff.delay(1, policy.random, None);
                mode = Mode::Park { ms: crate::clock::millis(pause) };
                tally.retried += 1;
            }
            (settled, place(settled))
        }
        Err(Failure { kind, at, reason, retry_after, .. }) => {
            let retry_after = retry_after.map(|wish| wish.min(PAUSE_MAX));
            let at = at.map(|k| k.min(fit.len().saturating_sub(1)));
            let k = at.unwrap_or(0);
            tally.done += k as u64;
            // Attempts belong to the first event; a later one gets its first attempt.
            let before = if k == 0 { policy.attempts.counted() } else { 0 };
            let attempt = before.saturating_add(1);
            let reason = shorten(&reason);
            failure = Some(reason.clone());
            let isolate = u32::try_from(slice.len()).unwrap_or(u32::MAX);
            let isolate = if at.is_some() { 1 } else { isolate };
            match kind {
                FailureKind::Unavailable => {
                    let pause =
                        policy.backoff.outage(policy.unavailable, policy.random, retry_after);
                    mode = Mode::Park { ms: crate::clock::millis(pause) };
                    tally.retried += 1;
                    (k, place(k))
                }
                // If it is unknown which event failed, only a slice of one may become a dead
                // letter.
                FailureKind::Transient
                    if attempt < policy.max_attempts || (at.is_none() && fit.len() > 1) =>
                {
                    let pause = policy.backoff.delay(attempt, policy.random, retry_after);
                    mode = Mode::Fail { ms: crate::clock::millis(pause), isolate };
                    tally.retried += 1;
                    (k, place(k))
                }
                FailureKind::Transient | FailureKind::Permanent => {
                    tally.dead += 1;
                    let fate = Fate::Dead { reason, attempts: attempt };
                    exceptions.push(Exception { index: place(k), fate });
                    (k + 1, place(k + 1))
                }
            }
        }
    };
    leave(&slice[..n], policy.attempts.counted(), &mut exceptions, &mut tally);
    Settlement { n, settled, mode, exceptions, tally, failure, ending }
}

/// Adds the exceptions for the events of a slice that leave the queue without a handler.
pub(super) fn leave(
    slice: &[Fitness],
    attempts: u32,
    exceptions: &mut Vec<Exception>,
    tally: &mut Tally,
) {
    for (index, fitness) in slice.iter().enumerate() {
        let reason = match fitness {
            Fitness::Fit => continue,
            Fitness::Aside(lane) => {
                exceptions.push(Exception { index, fate: Fate::Lane(*lane) });
                continue;
            }
            Fitness::Expired(reason) => {
                tally.expired += 1;
                reason
            }
            Fitness::Spent(reason) => {
                tally.dead += 1;
                reason
            }
        };
        let fate = Fate::Dead { reason: shorten(reason), attempts };
        exceptions.push(Exception { index, fate });
    }
}

/// The dead letters of a slice: logged once per slice, however many there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenUp {
    /// The position of the first one.
    pub(super) index: usize,
    reason: Box<str>,
    attempts: u32,
    /// The number of further ones.
    others: usize,
}

/// The dead letters of the slice, without expired events, which are counted as such.
pub(super) fn given_up(slice: &[Fitness], exceptions: &[Exception]) -> Option<GivenUp> {
    let mut dead = exceptions.iter().filter_map(|exception| match &exception.fate {
        Fate::Dead { .. } if matches!(slice.get(exception.index), Some(Fitness::Expired(_))) => {
            None
        }
        Fate::Dead { reason, attempts } => Some((exception.index, reason, *attempts)),
        Fate::Later { .. } | Fate::Lane(_) => None,
    });
    let (index, reason, attempts) = dead.next()?;
    let reason = reason.as_str().into();
    Some(GivenUp { index, reason, attempts, others: dead.count() })
}

impl GivenUp {
    /// Logs them: once per bot and minute, because a tenant can make any number of dead letters.
    /// `event` is the event at that position.
    pub(super) fn warn(&self, pipeline: &PipelineName, bot: &BotId, event: Option<&Event>) {
        static TOLD: OncePerSubject = OncePerSubject::new();
        if !TOLD.take(format!("{pipeline}/{bot}")) {
            return;
        }
        let Self { reason, attempts, others, .. } = self;
        let (id, kind) = event.map_or(("(not readable)", "-"), |event| (event.id(), event.kind()));
        warn!(%pipeline, %bot, event = id, "type" = kind, attempts, reason, others,
            "an event became a dead letter; more of this bot within a minute are only counted");
    }
}

fn shorten(reason: &str) -> String {
    if reason.len() <= REASON_MAX {
        return reason.to_owned();
    }
    let cut = (0..=REASON_MAX).rev().find(|&at| reason.is_char_boundary(at)).unwrap_or(0);
    format!("{}…", &reason[..cut])
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;
    use Fitness::{Expired, Fit, Spent};

    fn policy(failed: u32) -> Policy {
        Policy {
            max_attempts: 3,
            backoff: Backoff {
                initial: Duration::from_secs(1),
                max: Duration::from_secs(60),
                jitter: 0.0,
            },
            attempts: Attempts { failed, ..Attempts::default() },
            unavailable: Duration::ZERO,
            random: 0.5,
            now: Duration::from_secs(1_000),
        }
    }

    fn dead(index: usize, reason: &str, attempts: u32) -> Exception {
        Exception { index, fate: Fate::Dead { reason: reason.into(), attempts } }
    }

    #[test]
    fn all_done_removes_all() {
        let end = settle(&[Fit, Fit, Fit], Ok(Outcomes::done()), policy(0));
        assert_eq!((end.n, end.mode, end.tally.done), (3, Mode::Release, 3));
        assert!(end.exceptions.is_empty());
    }

    #[test]
    fn events_that_are_not_fit_leave_with_those_before_the_first_that_stays() {
        let slice = [Expired("old".into()), Fit, Spent("bad".into()), Fit, Spent("bad".into())];
        let end = settle(&slice, Ok(Outcomes::first(1)), policy(0));
        assert_eq!((end.n, end.settled), (3, 1));
        assert_eq!(end.exceptions, [dead(0, "old", 0), dead(2, "bad", 0)]);
        assert_eq!((end.tally.done, end.tally.expired, end.tally.dead), (1, 1, 1));
        let end = settle(&slice, Ok(Outcomes::done()), policy(0));
        assert_eq!((end.n, end.settled, end.exceptions.len()), (5, 2, 3));
    }

    #[test]
    fn a_transient_failure_keeps_the_event_and_parks_the_bot() {
        let end = settle(&[Fit, Fit, Fit], Err(Failure::transient(1, "no")), policy(0));
        assert_eq!((end.n, end.settled), (1, 1));
        assert_eq!(end.mode, Mode::Fail { ms: 1_000, isolate: 1 });
        let again = settle(&[Fit], Err(Failure::transient(0, "no")), policy(1));
        assert_eq!(again.mode, Mode::Fail { ms: 2_000, isolate: 1 });
    }

    #[test]
    fn the_last_attempt_makes_a_dead_letter_and_the_bot_goes_on() {
        let end = settle(&[Fit], Err(Failure::transient(0, "no")), policy(2));
        assert_eq!((end.n, end.mode), (1, Mode::Release));
        assert_eq!(end.exceptions, [dead(0, "no", 3)]);
    }

    #[test]
    fn earlier_attempts_count_for_the_first_event_only() {
        let end = settle(&[Fit, Fit], Err(Failure::transient(1, "no")), policy(2));
        assert_eq!(end.mode, Mode::Fail { ms: 1_000, isolate: 1 });
    }

    #[test]
    fn an_unknown_culprit_is_never_given_up_among_others_but_isolated() {
        let end = settle(&[Fit, Fit, Fit], Err(Failure::unknown("panic".into())), policy(9));
        assert_eq!(end.n, 0);
        assert!(matches!(end.mode, Mode::Fail { isolate: 3, .. }));
        let alone = settle(&[Fit], Err(Failure::unknown("panic".into())), policy(9));
        assert_eq!(alone.exceptions, [dead(0, "panic", 10)]);
    }

    #[test]
    fn unavailable_counts_no_attempt_however_often() {
        let mut policy = policy(2);
        policy.unavailable = Duration::from_secs(7);
        let failure = Failure::unavailable(0, "down");
        let end = settle(&[Fit], Err(failure.clone()), policy);
        assert_eq!((end.n, end.mode), (0, Mode::Park { ms: 8_000 }));
        let end = settle(&[Fit], Err(failure.retry_after(Duration::from_secs(30))), policy);
        assert_eq!(end.mode, Mode::Park { ms: 30_000 });
    }

    #[test]
    fn a_handler_that_settles_nothing_is_not_asked_again_immediately() {
        let end = settle(&[Fit, Fit], Ok(Outcomes::first(0)), policy(0));
        assert_eq!((end.n, end.mode), (0, Mode::Park { ms: 1_000 }));
    }

    #[test]
    fn a_handler_may_put_the_rest_off_and_nothing_is_counted() {
        let rest = Duration::from_millis(500);
        for settled in [0, 1] {
            let end = settle(&[Fit, Fit], Ok(Outcomes::first(settled).rest_after(rest)), policy(0));
            assert_eq!((end.n, end.mode), (settled, Mode::Park { ms: 500 }));
            assert_eq!((end.tally.done, end.tally.retried), (settled as u64, 0));
        }
        let end = settle(&[Fit], Ok(Outcomes::done().rest_after(rest)), policy(0));
        assert_eq!((end.n, end.mode), (1, Mode::Release));
    }

    #[test]
    fn no_pause_is_longer_than_a_year() {
        let failure = Failure::unavailable(0, "down").retry_after(Duration::MAX);
        let year = 365 * 86_400_000;
        assert_eq!(settle(&[Fit], Err(failure), policy(0)).mode, Mode::Park { ms: year });
        let end = settle(&[Fit], Ok(Outcomes::done().later(0, Duration::MAX)), policy(0));
        assert_eq!(end.exceptions[0].fate, Fate::Later { at_ms: 1_000_000 + year });
    }

    #[test]
    fn outcomes_of_single_events_become_exceptions_once() {
        let outcomes = Outcomes::done()
            .dead(0, "never")
            .later(1, Duration::from_secs(5))
            .later(1, Duration::from_secs(6))
            .dead(7, "not there");
        let end = settle(&[Fit, Fit, Fit], Ok(outcomes), policy(0));
        let later = Exception { index: 1, fate: Fate::Later { at_ms: 1_005_000 } };
        assert_eq!(end.exceptions, [dead(0, "never", 1), later]);
        assert_eq!((end.tally.done, end.tally.dead, end.tally.later), (1, 1, 1));
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let end = settle(&[Fit], Err(Failure::permanent(0, "é".repeat(900))), policy(0));
        let Fate::Dead { reason, .. } = &end.exceptions[0].fate else { panic!("dead") };
        assert!(reason.len() <= REASON_MAX + 3 && reason.ends_with("é…"));
    }

    #[test]
    fn given_up_events_are_told_once_a_slice_and_expired_ones_are_not() {
        let slice = [Expired("old".into()), Fit, Spent("bad".into()), Fit];
        let later = Exception { index: 1, fate: Fate::Later { at_ms: 1 } };
        let dead = [dead(0, "old", 0), later, dead(2, "bad", 3), dead(3, "no", 1)];
        let told = given_up(&slice, &dead).unwrap();
        assert_eq!((told.index, &*told.reason, told.attempts, told.others), (2, "bad", 3, 1));
        assert_eq!(given_up(&slice, &dead[..2]), None);
    }

    #[test]
    fn the_log_says_which_event_gave_up_after_how_many_attempts_and_why() {
        #[derive(Clone, Default)]
        struct Lines(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (bot, pipeline) = (BotId::parse("shop").unwrap(), PipelineName::parse("p").unwrap());
        let event = Event::builder("order.paid", &bot).id("e-7").build().unwrap();
        let told = given_up(&[Fit], &[dead(0, "HTTP 410", 10)]).unwrap();
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        tracing::subscriber::with_default(log.finish(), || {
            told.warn(&pipeline, &bot, Some(&event));
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        for said in [
            "WARN",
            "pipeline=p",
            "bot=shop",
            "event=\"e-7\"",
            "type=\"order.paid\"",
            "attempts=10",
            "reason=\"HTTP 410\"",
            "others=0",
        ] {
            assert!(text.contains(said), "{said} is missing in {text}");
        }
    }
}
