//! The counters in one process.

use std::sync::Arc;

use super::gauges::CounterGauges;
use super::handler::{CounterHandler, MinAge};
use super::store::CounterStore;
use super::view::Calendar;
use super::{Counters, upkeep};
use crate::handler::{AnyHandler, store_patience};
use crate::mongo::client::Mongo;
use crate::mongo::indexes;
use crate::pressure::Pressure;
use crate::product::{Gauges, Offering, Part, Seat, Services, SharedHandler};

/// Writes the views to `store`.
pub(crate) struct CounterPart {
    store: CounterStore,
    min_age: MinAge,
    handler: Arc<CounterHandler>,
    pressure: Arc<Pressure>,
}

impl CounterPart {
    pub(crate) fn new(mongo: Mongo, handler_timeout: std::time::Duration) -> Self {
        let pressure = Arc::clone(mongo.pressure());
        let store = CounterStore::writing_within(mongo, store_patience(handler_timeout));
        let min_age = MinAge::new();
        let handler = CounterHandler::new(store.clone(), min_age.clone(), handler_timeout);
        Self { store, min_age, handler: Arc::new(handler), pressure }
    }
}

impl Part for CounterPart {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        SharedHandler(Arc::clone(&self.handler) as Arc<dyn AnyHandler>)
    }

    fn offer(&self, offering: &Offering<'_>, services: &mut Services) {
        let config = &offering.config.counters;
        let calendar = Calendar::new(Arc::clone(offering.clock), config.time_zone.clone());
        let (queue, store) = (offering.requests.clone(), self.store.clone());
        services.offer(Counters::new(queue, store, calendar, config.read_timeout));
    }

    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        Some(Box::new(CounterGauges::new()))
    }

    fn start(&self, seat: &Seat<'_>) {
        let shutdown = seat.shutdown;
        let store = self.store.clone();
        shutdown.spawn(indexes::prepare("the counters", shutdown.clone(), move || {
            let store = store.clone();
            async move { store.prepare().await }
        }));
        let (link, min_age) = (Arc::clone(seat.queue.link()), self.min_age.clone());
        shutdown.spawn(upkeep::watch_persistence(link, min_age, shutdown.clone()));
    }

    fn stores(&self) -> Vec<Arc<Pressure>> {
        vec![Arc::clone(&self.pressure)]
    }
}
