//! The notifications in one process.

use std::sync::Arc;

use super::gauges::DueGauges;
use super::handler::NotifyHandler;
use super::{Sender, Sending, audit};
use crate::handler::AnyHandler;
use crate::product::{Part, Seat};
use crate::queue::sample::Gauges;

/// Sends the notifications.
pub(crate) struct NotificationPart(pub(crate) Sending);

impl Part for NotificationPart {
    fn handler(&self, seat: &Seat<'_>) -> Arc<dyn AnyHandler> {
        let (queue, clock) = (seat.pool.clone(), Arc::clone(seat.clock));
        let sender = Sender::new(queue, self.0.clone(), clock, seat.shutdown.clone());
        Arc::new(NotifyHandler(sender))
    }

    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        Some(Box::new(DueGauges::new()))
    }

    fn start(&self, seat: &Seat<'_>) {
        if seat.roles.schedule {
            let (queue, link) = (seat.queue.clone(), Arc::clone(seat.queue.link()));
            let (clock, shutdown) = (Arc::clone(seat.clock), seat.shutdown.clone());
            seat.shutdown.spawn(audit::at_start(queue, link, clock, shutdown));
        }
    }
}
