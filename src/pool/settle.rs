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
use crate::pool::retry::{Backoff, isolate_after_failure};
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
    /// Counts the call of the handler as a success or a failure.
    pub(super) fn count(&self, meter: &Meter, now: Duration) {
        if self.tally.done > 0 || self.failure.is_none() && self.settled > 0 {
            meter.calls.succeeded();
        }
        if let Some(reason) = &self.failure
            && self.tally.done == 0
        {
            meter.calls.failed(reason, millis(now));
        }
    }

    /// Notes for operators why the handler failed, if it did. The slice is already settled, so an
    /// error here has no consequence. `first` is the first event of the slice, if known. `had_lanes`: whether
    /// lanes of the bot were set aside before.
    pub(super) async fn note_failure(
        &self,
        queue: &Queue,
        (bot, had_lanes): (&BotId, bool),
        first: Option<Sequence>,
        now: Duration,
    ) {
        let Some(reason) = &self.failure else { return };
        let pause = match self.mode {
            Mode::Fail { ms, .. } | Mode::Park { ms } => Some(Duration::from_millis(ms)),
            _ => None,
        };
        let noted = Noted { reason, first, progress: self.tally.done > 0, had_lanes, pause, now };
        let noted = queue.note_failure(bot, noted).await;
        noted.unwrap_or_else(|error| debug!(%bot, %error, "cannot note why the handler failed"));
    }
}

/// The inputs of the decision besides the answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    pub(super) max_attempts: u32,
    pub(super) backoff: Backoff,
    /// Maximum number of events in a slice.
    pub(super) batch: usize,
    /// Number of attempts counted before this one.
    pub(super) attempts: Attempts,
    /// How long the target has been unavailable.
    pub(super) unavailable: Duration,
    /// A random number in 0..1, for the jitter.
    pub(super) random: f64,
    /// The time since 1970 by the clock of Redis, for due times.
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
    let mut exceptions;
    let mut tally = Tally::default();
    let mut mode = Mode::Release;
    let mut failure = None;
    let ending = Ending::of(&answer);
    let (settled, n) = match answer {
        Ok(outcomes) => {
            let settled = outcomes.settled.unwrap_or(fit.len()).min(fit.len());
            exceptions = not_done(outcomes.exceptions, &fit[..settled], &policy, &mut tally);
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
        Err(Failure { kind, at, reason, retry_after, before, .. }) => {
            let retry_after = retry_after.map(|wish| wish.min(PAUSE_MAX));
            let at = at.map(|k| k.min(fit.len().saturating_sub(1)));
            let k = at.unwrap_or(0);
            exceptions = not_done(before, &fit[..k], &policy, &mut tally);
            // Attempts belong to the first event; a later one gets its first attempt.
            let counted = if k == 0 { policy.attempts.counted() } else { 0 };
            let attempt = counted.saturating_add(1);
            let reason = shorten(&reason);
            failure = Some(reason.clone());
            let is_known = at.is_some() || fit.len() == 1;
            let isolate = if is_known { 1 } else { isolate_after_failure(policy.batch) };
            match kind {
                FailureKind::Unavailable => {
                    // A target that says when it can be asked again was reached: the outage of others does
                    // not count.
                    let backoff = policy.backoff;
                    let pause = if retry_after.is_some() {
                        backoff.delay(1, policy.random, retry_after)
                    } else {
                        backoff.outage(policy.unavailable, policy.random)
                    };
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

/// The exceptions that the handler made of settled events; the others are done. `settled`: their places
/// in the queue.
fn not_done(
    outcomes: Vec<(usize, Outcome)>,
    settled: &[usize],
    policy: &Policy,
    tally: &mut Tally,
) -> Vec<Exception> {
    let mut exceptions: Vec<Exception> = Vec::new();
    for (k, outcome) in outcomes {
        // An exception beyond the settled events is contradictory: that event stays queued.
        let Some(&index) = settled.get(k) else { continue };
        if exceptions.iter().any(|known| known.index == index) {
            continue;
        }
        let fate = match outcome {
            Outcome::Dead(reason) => {
                tally.dead += 1;
                Fate::Dead { reason: shorten(&reason), attempts: policy.attempts.counted() + 1 }
            }
            Outcome::Later(delay) => {
                tally.later += 1;
                Fate::Later { at_ms: millis(policy.now + delay.min(PAUSE_MAX)) }
            }
        };
        exceptions.push(Exception { index, fate });
    }
    tally.done += (settled.len() - exceptions.len()) as u64;
    exceptions
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
mod tests;
