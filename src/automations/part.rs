//! The automations in one process.

use std::sync::Arc;

use super::effects::Effects;
use super::handler::AutomationHandler;
use super::stats::{self, RuleNotes};
use super::{Automations, RulesEar, watch};
use crate::fanout::Interest;
use crate::handler::AnyHandler;
use crate::pressure::Pressure;
use crate::product::{Part, Seat};
use crate::queue::wake::Listener;

/// Runs the automations.
pub(crate) struct AutomationPart {
    automations: Automations,
    handler_timeout: std::time::Duration,
    pressure: Arc<Pressure>,
}

impl AutomationPart {
    pub(crate) fn new(
        automations: Automations,
        handler_timeout: std::time::Duration,
        pressure: Arc<Pressure>,
    ) -> Self {
        Self { automations, handler_timeout, pressure }
    }

    /// Whether the process keeps its index of rules up to date.
    fn keeps_up(seat: &Seat<'_>) -> bool {
        seat.roles.work || seat.roles.ingest
    }
}

impl Part for AutomationPart {
    fn handler(&self, seat: &Seat<'_>) -> Arc<dyn AnyHandler> {
        let notes = Arc::new(RuleNotes::new(Arc::clone(seat.clock)));
        let (queue, shutdown) = (seat.pool.clone(), seat.shutdown);
        shutdown.spawn(stats::run(Arc::clone(&notes), queue.clone(), shutdown.clone()));
        let effects = Effects {
            bus: Arc::clone(queue.link()),
            stream: seat.config.bus.streams.first().cloned().unwrap_or_default(),
            queue,
            notifications: seat.fellows.notifications.clone(),
            counters: seat.fellows.counters.clone(),
            clock: Arc::clone(seat.clock),
            notes,
        };
        Arc::new(AutomationHandler::new(self.automations.clone(), effects, self.handler_timeout))
    }

    fn interest(&self) -> Option<Arc<dyn Interest>> {
        Some(Arc::clone(self.automations.subscriptions()) as Arc<dyn Interest>)
    }

    fn listener(&self, seat: &Seat<'_>) -> Option<Box<dyn Listener>> {
        Self::keeps_up(seat).then(|| Box::new(RulesEar(self.automations.clone())) as Box<_>)
    }

    fn start(&self, seat: &Seat<'_>) {
        if Self::keeps_up(seat) {
            let (automations, shutdown) = (self.automations.clone(), seat.shutdown.clone());
            seat.shutdown.spawn(watch::run(automations, shutdown));
        }
    }

    fn stores(&self) -> Vec<Arc<Pressure>> {
        vec![Arc::clone(&self.pressure)]
    }
}
