//! The handler of automations: decides by the rules of a bot, stores the decisions and carries them
//! out.
//!
//! 1. Takes the rules from the cache and the profiles that this process used recently, and reads the
//!    other profiles with one query. If they are large, the slice ends before the first one that is
//!    not read.
//! 2. Takes the events one by one. An event up to the profile's sequence was decided before, and
//!    its decision is stored with the profile. All others are decided now.
//! 3. Writes profiles and decisions, each only as the successor of the state that was used. Recent
//!    profiles without a write are checked before. After a conflict everything starts again, because
//!    the other decision counts.
//! 4. Carries out the decisions. A failed action blocks the bot, and finished actions are not
//!    repeated.
//!
//! An unavailable MongoDB counts no attempt. If it is slow, fewer events are decided at a time, and
//! a write that still runs in the server is waited for.

mod kept;
mod work;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::kept::{decided_before, forget};
use self::work::{Source, Subject, Unwritten, Work};
use super::Automations;
use super::count::ProfileCounts;
use super::decide::{DUE, Decided, Decision, Note, RuleSet, decide, may_be_long};
use super::effects::{Effects, Failed, Task};
use super::heavy::Heavy;
use super::recent::Recent;
use super::subscribers::{Kept, Next, as_stored};
use crate::handler::portion::Portion;
use crate::handler::{
    Delivery, Environment, Failure, Handler, Outcomes, Slice, TURN_PATIENCE, store_patience,
};
use crate::id::{BotId, Lane};
use crate::metrics;
use crate::mongo::client::MongoError;
use crate::mongo::turns::Turn;

/// Number of attempts after write conflicts.
const TRIES: u32 = 5;
/// Maximum size of the decisions of a slice, in bytes, unless one event alone has more.
const DECIDED_MAX_BYTES: usize = 4 << 20;
/// Maximum size of the changed profiles of a slice in memory, in bytes, unless one event changes more.
const CHANGED_MAX_BYTES: usize = 16 << 20;
/// Maximum time that a slice waits for rules. A thousand long filters take minutes to compile. A longer
/// wait would keep its worker from other bots.
const RULES_PATIENCE: Duration = Duration::from_secs(1);
/// Minimum time that a slice may spend on decisions once it has profiles and rules.
const DECIDING_MIN: Duration = Duration::from_millis(20);

/// The handler `automation`.
pub(crate) struct AutomationHandler {
    automations: Automations,
    counts: ProfileCounts,
    heavy: Heavy,
    effects: Effects,
    recent: Recent,
    /// Whether the pipeline orders its events by subject.
    by_subject: bool,
    /// The timeout of all MongoDB calls for a slice. Below `handler_timeout`.
    patience: Duration,
    /// The number of events that are decided at a time.
    portion: Portion,
}

impl AutomationHandler {
    pub(crate) fn new(
        automations: Automations,
        counts: ProfileCounts,
        effects: Effects,
        handler_timeout: Duration,
        by_subject: bool,
    ) -> Self {
        let patience = store_patience(handler_timeout);
        let (portion, recent, heavy) = (Portion::new(), Recent::default(), Heavy::new());
        Self { automations, counts, heavy, effects, recent, by_subject, patience, portion }
    }

    /// The lane of a slice, if subscribers have an order each: then other lanes of the bot may run at
    /// the same time. They write other profiles.
    fn lane(&self, slice: &Slice) -> Option<Lane> {
        let first = slice.events.first().filter(|_| self.by_subject)?;
        Some(Lane::of(first.event.subject().unwrap_or_default()))
    }

    /// The rules of a bot. Without this caller, they are still read and compiled.
    async fn rules(&self, bot: &BotId) -> Result<Arc<RuleSet>, Failure> {
        let patience = RULES_PATIENCE.min(self.patience / 4);
        let rules = tokio::time::timeout(patience, self.automations.rules(bot)).await;
        let Ok(rules) = rules else {
            let reason = "the rules of this bot are still being read and compiled";
            return Err(Failure::unavailable(0, reason));
        };
        rules.map_err(|error| failure(&error))
    }

    /// Decides on the first `count` events and stores the decisions; `None` after a write conflict.
    async fn decide_and_keep(
        &self,
        slice: &Slice,
        count: usize,
        rules: &RuleSet,
        turn: &Turn,
    ) -> Result<Option<Work>, Failure> {
        let failed = |error| self.failed(&error, count);
        let mut work = self.decide(slice, count, rules).await?;
        let subscribers = self.automations.subscribers();
        let unsure = work.unwritten.iter().filter(|state| state.unsure);
        let unsure: Vec<_> =
            unsure.map(|state| (&*state.subscriber, state.kept.sequence)).collect();
        // Before the write, so that nothing is written if the slice starts again.
        let kept = (unsure.is_empty()
            || subscribers.still(&slice.bot, &unsure).await.map_err(failed)?)
            && (work.writes.is_empty()
                || subscribers.write(turn, &slice.bot, &work.writes).await.map_err(failed)?);
        if !kept {
            if work.guessed {
                self.recent.was_wrong();
            }
            return Ok(None);
        }
        let new = work.writes.iter().filter(|next| next.after.is_none()).count();
        self.counts.created(&slice.bot, new as u64);
        self.remember(slice, &mut work);
        Ok(Some(work))
    }

    /// Keeps the states that MongoDB has confirmed, for the next slice.
    fn remember(&self, slice: &Slice, work: &mut Work) {
        let read = std::mem::take(&mut work.read);
        let written = std::mem::take(&mut work.writes).into_iter().map(|mut next| {
            if next.changed {
                as_stored(&mut next.kept.profile);
            }
            (next.subscriber, next.kept)
        });
        let unwritten = std::mem::take(&mut work.unwritten).into_iter();
        let states = written
            .chain(unwritten.map(|state| (state.subscriber, state.kept)))
            .filter(|(_, kept)| kept.sequence.is_some())
            .filter_map(|(subscriber, kept)| {
                let read = *read.get(&subscriber)?;
                Some((subscriber, kept, read))
            });
        self.recent.keep(&slice.bot, states);
    }

    async fn decide(&self, slice: &Slice, count: usize, rules: &RuleSet) -> Result<Work, Failure> {
        let allowed = slice.deadline.saturating_duration_since(Instant::now());
        let mut subjects = self.read(slice, count).await?;
        // A slow store must not make slices smaller: that would only cause more calls.
        let deadline = Instant::now() + allowed.max(DECIDING_MIN);
        // A wait for a turn leaves enough time to store the decisions.
        let turn_by = Instant::now() + self.patience / 2;
        let mut work = Work::default();
        let (mut bytes, mut changed_bytes, mut new) = (0, 0, 0);
        for (at, Delivery { sequence, event }) in slice.events[..count].iter().enumerate() {
            let is_full = bytes > DECIDED_MAX_BYTES || changed_bytes > CHANGED_MAX_BYTES;
            if at > 0 && (Instant::now() >= deadline || is_full) {
                break;
            }
            if event.extension(DUE).is_some() {
                work.decisions.push(Decision::default());
                continue;
            }
            // It is read with the next slice: the profiles before it are large.
            let Some(subject) = subjects.get_mut(event.subject().unwrap_or_default()) else {
                break;
            };
            subject.used = true;
            if subject.kept.sequence.is_some_and(|last| *sequence <= last) {
                match decided_before(&subject.kept, *sequence) {
                    Ok((decision, stored)) => {
                        bytes += stored;
                        // A read does not tell whether a majority has it. So it is written again
                        // before its actions.
                        subject.dirty |= subject.source == Source::Read;
                        work.decisions.push(decision);
                    }
                    // The events before it are carried out first.
                    Err(_) if at > 0 => break,
                    Err(reason) => return Err(Failure::transient(at, reason)),
                }
                continue;
            }
            let profile = &mut subject.kept.profile;
            let until = if at == 0 { turn_by } else { deadline };
            let is_long = may_be_long(event, profile, rules);
            let decide = || decide(event, profile, rules);
            let decided = self.heavy.decide(&slice.bot, until, is_long, decide).await;
            let Some(Decided { decision, notes, changed }) = decided else {
                if at > 0 {
                    break; // The decisions so far are stored.
                }
                let reason = "rules of other bots that take long are being decided";
                return Err(Failure::unavailable(0, reason));
            };
            let changed = subject.kept.note_deletion(event, changed);
            if changed || !decision.is_nothing() {
                if subject.before.is_none() && !subject.dirty {
                    if let Some(why) = self.full(slice, count, new).await? {
                        subject.kept = Kept::default();
                        work.decisions.push(Decision { dead: Some(why), ..Decision::default() });
                        continue;
                    }
                    new += 1;
                }
                subject.dirty = true;
                if changed {
                    changed_bytes += subject.grown();
                }
                subject.kept.sequence = Some(*sequence);
            }
            if !decision.is_nothing() {
                // Strings and numbers always serialise.
                let text = serde_json::to_string(&decision).unwrap_or_default();
                bytes += text.len();
                subject.kept.decided.push((*sequence, text));
            }
            work.notes.push((at, notes));
            work.decisions.push(decision);
        }
        let first = slice.events.first().map_or(0, |delivery| delivery.sequence.get());
        for (subscriber, subject) in subjects {
            let Subject { mut kept, before, read, source, used, dirty, changed, .. } = subject;
            let (guessed, subscriber) = (source == Source::Recent, subscriber.to_owned());
            work.guessed |= guessed;
            work.read.insert(subscriber.clone(), read);
            if dirty {
                forget(&mut kept.decided, first);
                work.writes.push(Next { subscriber, after: before, changed, kept });
            } else if used || guessed {
                // What was read and not used may lack a majority: it is not remembered.
                work.unwritten.push(Unwritten { subscriber, kept, unsure: guessed && used });
            }
        }
        Ok(work)
    }

    /// Why the bot may not create one more profile after `new` new ones; `None` if it may.
    async fn full(&self, slice: &Slice, count: usize, new: u64) -> Result<Option<String>, Failure> {
        let subscribers = self.automations.subscribers();
        let exceeded = self.counts.exceeded(subscribers, &slice.bot, new).await;
        let exceeded = exceeded.map_err(|error| self.failed(&error, count))?;
        Ok(exceeded.map(|exceeded| {
            metrics::quota_refused(exceeded.name, 1);
            exceeded.to_string()
        }))
    }

    /// The profiles of the first `count` events, or if they are large, of some from the first event
    /// on. Every event needs one, because an earlier decision counts even if its rules are deleted by
    /// now.
    async fn read<'a>(
        &self,
        slice: &'a Slice,
        count: usize,
    ) -> Result<HashMap<&'a str, Subject>, Failure> {
        let mut seen = HashSet::new();
        let mut subscribers: Vec<&str> = slice.events[..count]
            .iter()
            .map(|delivery| &delivery.event)
            .filter(|event| event.extension(DUE).is_none())
            .map(|event| event.subject().unwrap_or_default())
            .filter(|subscriber| seen.insert(*subscriber))
            .collect();
        let mut subjects = HashMap::with_capacity(subscribers.len());
        subscribers.retain(|subscriber| {
            let known = self.recent.take(&slice.bot, subscriber);
            let Some((kept, read)) = known else { return true };
            subjects.insert(*subscriber, Subject::new(kept, read, Source::Recent));
            false
        });
        if !subscribers.is_empty() {
            let now = Instant::now();
            let kept = self.automations.subscribers().read(&slice.bot, &subscribers).await;
            let kept = kept.map_err(|error| self.failed(&error, count))?;
            let read = subscribers.into_iter().zip(kept);
            subjects.extend(
                read.map(|(subscriber, kept)| (subscriber, Subject::new(kept, now, Source::Read))),
            );
        }
        Ok(subjects)
    }

    fn failed(&self, error: &MongoError, count: usize) -> Failure {
        if error.is_timeout() {
            self.portion.too_much(count);
        }
        failure(error)
    }

    /// Carries out the decisions, and returns the outcome of the slice.
    async fn finish(&self, slice: &Slice, work: Work) -> Result<Outcomes, Failure> {
        let mut tasks = Vec::new();
        for (at, (delivery, decision)) in slice.events.iter().zip(&work.decisions).enumerate() {
            let event = &delivery.event;
            if event.extension(DUE).is_some() {
                tasks.push((at, Task::Due(event)));
            }
            let effects = decision.effects.iter();
            let share = decision.share;
            tasks.extend(effects.map(|effect| (at, Task::Effect(event, effect, share))));
        }
        let notes = &self.effects.notes;
        let note = |at: usize, happened: Vec<Note>| {
            notes.note(&slice.bot, slice.events[at].event.id(), happened);
        };
        for (at, happened) in work.notes {
            note(at, happened);
        }
        let settled = if tasks.is_empty() {
            work.decisions.len()
        } else {
            match self.effects.carry_out(&tasks, slice.trace.as_deref()).await {
                Ok(refused) => {
                    for (at, happened) in refused {
                        note(at, vec![happened]);
                    }
                    work.decisions.len()
                }
                Err(Failed { at: 0, away: true, reason }) => {
                    return Err(Failure::unavailable(0, reason));
                }
                Err(Failed { at: 0, away: false, reason }) => {
                    return Err(Failure::transient(0, reason));
                }
                // The events before it are done; in the retry it is the first one.
                Err(Failed { at, .. }) => at,
            }
        };
        let dead = work.decisions.into_iter().take(settled).enumerate();
        let dead = dead.filter_map(|(at, decision)| Some((at, decision.dead?)));
        Ok(dead.fold(Outcomes::first(settled), |outcomes, (at, why)| outcomes.dead(at, why)))
    }
}

impl Handler for AutomationHandler {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let until = Instant::now() + self.patience;
        let patience = humantime::format_duration(self.patience);
        let turn = self.automations.subscribers().turn(&slice.bot, self.lane(slice));
        let Ok(turn) = tokio::time::timeout(TURN_PATIENCE.min(self.patience), turn).await else {
            let reason = "an earlier write of this bot is still in progress in MongoDB";
            return Err(Failure::unavailable(0, reason));
        };
        for _ in 0..TRIES {
            let rules = self.rules(&slice.bot).await?;
            let count = slice.events.len().min(self.portion.now());
            let started = Instant::now();
            let deciding = self.decide_and_keep(slice, count, &rules, &turn);
            let Ok(work) = tokio::time::timeout_at(until, deciding).await else {
                self.portion.too_much(count);
                let reason = format!("MongoDB did not store the decisions within {patience}");
                return Err(Failure::unavailable(0, reason));
            };
            if let Some(work) = work? {
                self.portion.taken(count, started.elapsed(), self.patience);
                return self.finish(slice, work).await;
            }
        }
        Err(Failure::transient(0, "concurrent writes to the profiles of this slice do not end"))
    }

    /// Slices of all bots share their reads and writes of MongoDB.
    fn shares_calls(&self) -> bool {
        true
    }
}

/// An unavailable MongoDB counts no attempt. A refusal by MongoDB does, so that a bot does not wait
/// for ever.
fn failure(error: &MongoError) -> Failure {
    if error.is_passing() {
        Failure::unavailable(0, error.to_string())
    } else {
        Failure::transient(0, error.to_string())
    }
}
