//! What happens to rules, gathered here and added up in Redis every second. A process that is
//! killed takes its last second with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing::debug;

use super::decide::Note;
use crate::automations::queue::{LastError, RuleStats};
use crate::clock::{SharedClock, millis};
use crate::id::{BotId, RuleId};
use crate::lifecycle::Shutdown;
use crate::metrics::AutomationMetrics;
use crate::queue::Queue;
use crate::telemetry::OncePerMinute;

/// How often they are added up.
const EVERY: Duration = Duration::from_secs(1);
/// Rules of a write.
const BATCH: usize = 500;
/// Rules that are noted between two additions.
const RULES_MAX: usize = 100_000;
/// Longest reason that is kept.
const WHY_MAX: usize = 500;

/// What happened to the rules since it was last added up.
pub(crate) struct RuleNotes {
    clock: SharedClock,
    metrics: AutomationMetrics,
    pending: Mutex<HashMap<(BotId, RuleId), RuleStats>>,
    warned: OncePerMinute,
}

impl std::fmt::Debug for RuleNotes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RuleNotes")
    }
}

impl RuleNotes {
    pub(crate) fn new(clock: SharedClock) -> Self {
        let (metrics, warned) = (AutomationMetrics::new(), OncePerMinute::new());
        Self { clock, metrics, pending: Mutex::default(), warned }
    }

    /// Notes what happened on an event.
    pub(crate) fn note(&self, bot: &BotId, event: &str, notes: Vec<Note>) {
        for note in notes {
            match note {
                Note::Matched { rule, actions } => {
                    self.metrics.matches.increment(1);
                    for action in &actions {
                        AutomationMetrics::action(action);
                    }
                    self.add(bot, rule, |stats| {
                        stats.matched += 1;
                        stats.actions += actions.len() as u64;
                    });
                }
                Note::Failed { rule, why } => {
                    self.metrics.errors.increment(1);
                    let name = rule.as_ref().map(tracing::field::display);
                    if let Some(suppressed) = self.warned.take() {
                        tracing::warn!(%bot, rule = name, event, why, suppressed,
                            "an automation failed on an event; more such within a minute are only counted");
                    } else {
                        debug!(%bot, rule = name, event, why, "an automation failed on an event");
                    }
                    let Some(rule) = rule else { continue };
                    let at_ms = millis(self.clock.now());
                    let why = shortened(why);
                    let last = LastError { at_ms, event: event.to_owned(), why };
                    self.add(bot, rule, |stats| {
                        stats.errors += 1;
                        stats.last = Some(last);
                    });
                }
            }
        }
    }

    fn add(&self, bot: &BotId, rule: RuleId, change: impl FnOnce(&mut RuleStats)) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (bot.clone(), rule);
        if pending.len() < RULES_MAX || pending.contains_key(&key) {
            change(pending.entry(key).or_default());
        }
    }

    fn take(&self) -> Vec<(BotId, RuleId, RuleStats)> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *pending).into_iter().map(|((bot, rule), s)| (bot, rule, s)).collect()
    }

    /// Adds up what there is. Without an answer it is not repeated: rather a second too few than
    /// one twice.
    async fn flush(&self, queue: &Queue) {
        for notes in self.take().chunks(BATCH) {
            if let Err(error) = queue.note_rules(notes).await {
                debug!(%error, "statistics of rules are lost");
            }
        }
    }
}

fn shortened(mut why: String) -> String {
    if why.len() > WHY_MAX {
        why = why.chars().take(WHY_MAX).chain(['…']).collect();
    }
    why
}

/// Adds up until the last slice has ended.
pub(crate) async fn run(notes: Arc<RuleNotes>, queue: Queue, shutdown: Shutdown) {
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = tokio::time::sleep(EVERY) => notes.flush(&queue).await,
        }
    }
    // Slices that were begun are finished after the soft stop; each holds the notes.
    while Arc::strong_count(&notes) > 1 && !shutdown.hard.is_cancelled() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    notes.flush(&queue).await;
}
