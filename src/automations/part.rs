//! The automations in one process.

use std::sync::Arc;

use super::count::ProfileCounts;
use super::effects::Effects;
use super::handler::AutomationHandler;
use super::stats::{self, RuleNotes};
use super::{Automations, Editor, RulesEar, watch};
use crate::bus::Published;
use crate::bus::backlog::Backlog;
use crate::counters::{self, Counters};
use crate::fanout::Interest;
use crate::mongo::client::Mongo;
use crate::mongo::indexes;
use crate::notifications::Notifications;
use crate::pressure::Pressure;
use crate::product::{Listener, Offering, Part, Seat, Services, SharedHandler};

/// Runs the automations.
pub(crate) struct AutomationPart {
    automations: Automations,
    handler_timeout: std::time::Duration,
    /// Whether subscribers have an order each.
    by_subject: bool,
    pressure: Arc<Pressure>,
}

impl AutomationPart {
    pub(crate) fn new(
        mongo: &Mongo,
        handler_timeout: std::time::Duration,
        by_subject: bool,
    ) -> Self {
        let (automations, pressure) = (Automations::new(mongo), Arc::clone(mongo.pressure()));
        Self { automations, handler_timeout, by_subject, pressure }
    }

    /// Whether the process keeps its index of rules up to date.
    fn keeps_up(seat: &Seat<'_>) -> bool {
        seat.roles.work || seat.roles.ingest
    }
}

impl Part for AutomationPart {
    fn offer(&self, offering: &Offering<'_>, services: &mut Services) {
        let (automations, queue) = (self.automations.clone(), offering.queue.clone());
        services.offer(Editor::new(automations, queue, offering.config.counters.read_timeout));
    }

    fn handler(&self, seat: &Seat<'_>) -> SharedHandler {
        let notes = Arc::new(RuleNotes::new(Arc::clone(seat.clock)));
        let (queue, shutdown) = (seat.pool.clone(), seat.shutdown);
        shutdown.spawn(stats::run(Arc::clone(&notes), queue.clone(), shutdown.clone()));
        let effects = Effects {
            bus: Arc::clone(queue.link()),
            stream: seat.config.bus.published().to_owned(),
            published: seat.services.get::<Published>().map(|Published(bus)| Arc::clone(bus)),
            backlog: seat.services.get::<Arc<Backlog>>().cloned(),
            queue,
            notifications: seat.services.get::<Notifications>().cloned(),
            counters: seat.services.of::<Counters>(counters::PIPELINE).cloned(),
            clock: Arc::clone(seat.clock),
            notes,
        };
        let counts = ProfileCounts::new(seat.config.quotas.quotas());
        let automations = self.automations.clone();
        let (timeout, by_subject) = (self.handler_timeout, self.by_subject);
        AutomationHandler::new(automations, counts, effects, timeout, by_subject).into()
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
            let (store, subscribers) =
                (automations.store().clone(), automations.subscribers().clone());
            // The rules are read meanwhile: it hangs while a voting member of the replica set is down.
            seat.shutdown.spawn(indexes::prepare("the rules", shutdown.clone(), move || {
                let store = store.clone();
                async move { store.prepare().await }
            }));
            seat.shutdown.spawn(indexes::prepare(
                "deleted profiles",
                shutdown.clone(),
                move || {
                    let subscribers = subscribers.clone();
                    async move { subscribers.prepare().await }
                },
            ));
            seat.shutdown.spawn(watch::run(automations, shutdown));
        }
    }

    fn stores(&self) -> Vec<Arc<Pressure>> {
        vec![Arc::clone(&self.pressure)]
    }
}
