//! The counters in one process.

use std::sync::Arc;

use super::gauges::CounterGauges;
use super::handler::{CounterHandler, MinAge};
use super::store::CounterStore;
use super::upkeep;
use crate::handler::AnyHandler;
use crate::pressure::Pressure;
use crate::product::{Part, Seat};
use crate::queue::sample::Gauges;

/// Writes the views to `store`.
pub(crate) struct CounterPart {
    store: CounterStore,
    min_age: MinAge,
    handler: Arc<CounterHandler>,
    pressure: Arc<Pressure>,
}

impl CounterPart {
    pub(crate) fn new(
        store: CounterStore,
        handler_timeout: std::time::Duration,
        pressure: Arc<Pressure>,
    ) -> Self {
        let min_age = MinAge::new();
        let handler = CounterHandler::new(store.clone(), min_age.clone(), handler_timeout);
        Self { store, min_age, handler: Arc::new(handler), pressure }
    }
}

impl Part for CounterPart {
    fn handler(&self, _: &Seat<'_>) -> Arc<dyn AnyHandler> {
        Arc::clone(&self.handler) as Arc<dyn AnyHandler>
    }

    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        Some(Box::new(CounterGauges::new()))
    }

    fn start(&self, seat: &Seat<'_>) {
        let shutdown = seat.shutdown;
        shutdown.spawn(upkeep::prepare(self.store.clone(), shutdown.clone()));
        let (link, min_age) = (Arc::clone(seat.queue.link()), self.min_age.clone());
        shutdown.spawn(upkeep::watch_persistence(link, min_age, shutdown.clone()));
    }

    fn stores(&self) -> Vec<Arc<Pressure>> {
        vec![Arc::clone(&self.pressure)]
    }
}
