//! Statistics of rules, collected in the process and added to Redis every second. A killed process
//! loses its last second.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tracing::debug;

use super::decide::Note;
use crate::automations::metrics::AutomationMetrics;
use crate::automations::queue::{LastError, RuleStats};
use crate::clock::{SharedClock, millis};
use crate::id::{BotId, RuleId};
use crate::lifecycle::Shutdown;
use crate::queue::Queue;
use crate::telemetry::OncePerMinute;

/// Interval of writes.
const EVERY: Duration = Duration::from_secs(1);
/// Maximum number of rules per write.
const BATCH: usize = 500;
/// Maximum number of rules with notes between two writes.
const RULES_MAX: usize = 100_000;
/// Maximum length of a reason.
const WHY_MAX: usize = 500;

/// The notes about rules since the last write.
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

    /// Notes the result of an event.
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
                    let why = shortened(why);
                    let name = rule.as_ref().map(tracing::field::display);
                    if let Some(suppressed) = self.warned.take() {
                        tracing::warn!(%bot, rule = name, event, why, suppressed,
                            "an automation failed on an event; further failures within a minute are only counted");
                    } else {
                        debug!(%bot, rule = name, event, why, "an automation failed on an event");
                    }
                    let Some(rule) = rule else { continue };
                    let at_ms = millis(self.clock.now());
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

    /// Writes the notes. A write without an answer is not repeated: losing a second is better than
    /// counting it twice.
    async fn flush(&self, queue: &Queue) {
        for notes in self.take().chunks(BATCH) {
            if let Err(error) = queue.note_rules(notes).await {
                debug!(%error, "lost statistics of rules");
            }
        }
    }
}

/// A reason, cut to a length for logs, answers and statistics.
pub(crate) fn shortened(mut why: String) -> String {
    if why.len() > WHY_MAX {
        why = why.chars().take(WHY_MAX).chain(['…']).collect();
    }
    why
}

/// Writes until the last slice has ended.
pub(crate) async fn run(notes: Arc<RuleNotes>, queue: Queue, shutdown: Shutdown) {
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = tokio::time::sleep(EVERY) => notes.flush(&queue).await,
        }
    }
    // Slices in progress end after the soft stop; each one holds the notes.
    while Arc::strong_count(&notes) > 1 && !shutdown.hard.is_cancelled() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    notes.flush(&queue).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::telemetry::captured::Lines;

    #[test]
    fn a_long_reason_is_short_in_the_log_and_in_the_statistics() {
        let notes = RuleNotes::new(Arc::new(SystemClock));
        let (bot, rule) = (BotId::parse("shop").unwrap(), RuleId::parse("r").unwrap());
        let lines = Lines::default();
        tracing::subscriber::with_default(lines.subscriber(), || {
            let why = "x".repeat(1 << 20);
            notes.note(&bot, "e-7", vec![Note::Failed { rule: Some(rule), why }]);
        });
        let log = lines.text();
        assert!(log.contains("event=\"e-7\"") && log.len() < 1_000, "{log:.2000}");
        let taken = notes.take();
        let [(_, _, stats)] = &taken[..] else { panic!("{} rules have notes", taken.len()) };
        assert!(stats.last.as_ref().unwrap().why.len() <= 600);
    }
}
