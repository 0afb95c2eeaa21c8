//! The notifications in one process.

use std::sync::Arc;

use tracing::info;

use super::gauges::DueGauges;
use super::handler::NotifyHandler;
use super::record::Caps;
use super::scripts::Throttle;
use super::{Notifications, PER_HOST, Sender, Sending, audit};
use crate::config::{NotificationsConfig, OnThrottle};
use crate::expression::Glob;
use crate::outbound::Outbound;
use crate::outbound::breakers::{Breakers, Limits};
use crate::outbound::headers::{HeaderSets, HeadersError};
use crate::product::{Gauges, Offering, Opening, Part, Seat, Services, SharedHandler};

/// Sends the notifications.
pub(crate) struct NotificationPart(pub(crate) Sending);

impl NotificationPart {
    pub(crate) fn open(opening: &Opening<'_>, outbound: &Outbound) -> Result<Self, HeadersError> {
        let callbacks = &opening.config.callbacks;
        if callbacks.secrets.is_empty() {
            // Not a warning, because many deployments send no notifications. `fairlane check`
            // reports missing secrets.
            info!(
                "notifications are not signed, so receivers cannot verify that Fairlane sends them; set callbacks.secrets"
            );
        }
        let config = &opening.config.notifications;
        let throttle = Throttle {
            threshold: config.user_poll_threshold,
            by_kind: config.type_thresholds.clone(),
            caps: caps(config),
            defers: config.on_throttle == OnThrottle::Defer,
        };
        let gates = Breakers::new(Limits {
            per_bot: PER_HOST,
            per_host: callbacks.max_per_host.get(),
            rate: config.host_rate,
        });
        let sets = HeaderSets::open(&callbacks.headers)?;
        let (outbound, secrets) = (outbound.clone(), callbacks.secrets.clone());
        Ok(Self(Sending { outbound, secrets, sets, throttle, gates }))
    }
}

/// The caps of the configuration.
fn caps(config: &NotificationsConfig) -> Caps {
    let by_bot = config.bot_caps.iter().map(|(glob, caps)| (Glob::new(glob), caps.clone()));
    Caps { all: config.caps.clone(), by_bot: by_bot.collect(), by_kind: config.type_caps.clone() }
}

impl Part for NotificationPart {
    fn offer(&self, offering: &Offering<'_>, services: &mut Services) {
        let threshold = offering.config.notifications.online_threshold;
        let (queue, clock) = (offering.requests.clone(), Arc::clone(offering.clock));
        services.offer(Notifications::new(queue, clock, threshold, self.0.sets.clone()));
        services.offer(Arc::clone(&self.0.gates));
    }

    fn handler(&self, seat: &Seat<'_>) -> SharedHandler {
        let (queue, clock) = (seat.pool.clone(), Arc::clone(seat.clock));
        let (shutdown, tracer) = (seat.shutdown.clone(), seat.tracer.clone());
        let sender = Sender::new(queue, self.0.clone(), clock, shutdown, tracer);
        NotifyHandler(sender).into()
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
