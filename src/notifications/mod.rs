//! Delayed notifications: scheduled, looked up, rescheduled, cancelled, released, and sent when
//! due.
//!
//! | file | content |
//! |---|---|
//! | `send.rs` | one send: the recheck, the call, its result, the retry |
//! | `sender.rs` | all sends of a process: outside the leases, so that no target blocks a bot |
//! | `audit.rs` | finds lost notifications |
//! | `outbound::breakers` | rate, concurrency and circuit breakers per host and bot |

pub(crate) mod audit;
pub(crate) mod gauges;
pub(crate) mod handler;
pub mod keys;
pub mod kinds;
pub(crate) mod metrics;
pub(crate) mod part;
mod pending;
pub mod queue;
pub mod record;
mod records;
pub mod scripts;
mod send;
mod sender;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use self::audit::Audit;
use self::kinds::KIND_NOTED;
use self::part::NotificationPart;
use self::queue::{Accepted, Span, Stats};
use self::record::{Kept, NewNotification, NotificationId, OTHER_KINDS, Unusable};
use self::scripts::{Amended, Amendment};
pub(crate) use self::sender::{PER_HOST, Sender, Sending};
use crate::clock::{SharedClock, millis};
use crate::config::Config;
use crate::formats::Format;
use crate::id::BotId;
use crate::notifications::metrics::NotificationMetrics;
use crate::outbound::headers::HeaderSets;
use crate::outbound::sign::Purpose;
use crate::outbound::{CheckedUrl, Policy};
use crate::pipeline::{Kind, Protected};
use crate::product::{self, OpenError, Opening, Part};
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::redis::scripts::Table;

/// The pipeline of delayed notifications.
pub const PIPELINE: &str = crate::config::NOTIFICATIONS;

/// Why its records are not purged.
const PROTECTED: Protected = Protected {
    code: "keeps-notifications",
    title: "Notifications are not purged",
    reason: "notifications are not purged: queued ones are sent immediately or end regularly; cancel single ones before they are due",
};

/// The product.
pub(crate) struct Product;

/// The formats of its data.
static FORMATS: [Format; 1] = [Format::first("notifications", "notifications and their users")];

impl product::Product for Product {
    fn pipeline(&self) -> &'static str {
        PIPELINE
    }

    fn kind(&self, _: &Config, _: &SharedClock) -> Kind {
        Kind { off_bus: true, protected: Some(PROTECTED), ..Kind::default() }
    }

    fn calls_out(&self) -> bool {
        true
    }

    fn formats(&self) -> &'static [Format] {
        &FORMATS
    }

    fn scripts(&self) -> Option<&'static Table> {
        Some(&scripts::SCRIPTS)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        let Some(outbound) = opening.outbound else {
            return Err(OpenError::Unavailable("nothing can be called".to_owned()));
        };
        Ok(Arc::new(NotificationPart::open(opening, outbound)?))
    }
}

/// The purpose of the signatures of notifications and their rechecks. Tenants choose the bodies of
/// notifications, so their key signs nothing else.
pub const SIGNED: Purpose = Purpose::named("notification");

/// The notifications of every bot. Cheap to clone.
#[derive(Clone)]
pub struct Notifications {
    queue: Queue,
    clock: SharedClock,
    online_threshold: Duration,
    sets: HeaderSets,
    /// Types that have their own entry in the statistics, and when that was found, ms since 1970.
    labels: Arc<Mutex<HashMap<String, u64>>>,
}

impl std::fmt::Debug for Notifications {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notifications").field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// Why a notification is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// It violates a bound.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// Redis is unavailable or refuses.
    #[error(transparent)]
    Store(#[from] RedisError),
}

impl Notifications {
    /// The notifications of the pipeline of `queue`. `online_threshold`: minimum time between two
    /// notifications to an online user.
    #[must_use]
    pub(crate) fn new(
        queue: Queue,
        clock: SharedClock,
        online_threshold: Duration,
        sets: HeaderSets,
    ) -> Self {
        Self { queue, clock, online_threshold, sets, labels: Arc::default() }
    }

    /// The queues of the notifications.
    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Schedules a notification. After success it will be sent, unless an existing one with its key
    /// is kept.
    ///
    /// The URLs are checked when they are called. Callers that get URLs from tenants should check
    /// them before.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] it may or may not be scheduled: only a call with the same key
    /// is safe. A notification that violates a bound is refused.
    pub async fn accept(&self, new: &NewNotification) -> Result<Accepted, AcceptError> {
        let now = self.clock.now();
        new.check(now)?;
        self.check_headers(new)?;
        let label = self.label(&new.bot, &new.kind, now).await?;
        let accepted = self.queue.schedule(new, &label, now).await?;
        if let Some(label) = &accepted.cancelled {
            NotificationMetrics::count(label, "cancelled");
        }
        if accepted.is_new {
            NotificationMetrics::count(&label, "received");
        }
        Ok(accepted)
    }

    /// Checks the set of headers of a notification. Each send checks it again.
    fn check_headers(&self, new: &NewNotification) -> Result<(), Unusable> {
        if new.headers.is_empty() {
            return Ok(());
        }
        // Another check reports an invalid URL.
        let Ok(url) = CheckedUrl::parse(&new.url, &Policy::Operator) else { return Ok(()) };
        let allowed = self.sets.of(&new.headers, &new.bot, &url);
        allowed.map(drop).map_err(|problem| Unusable { parameter: "headers_from", problem })
    }

    async fn label(&self, bot: &BotId, kind: &str, now: Duration) -> Result<String, RedisError> {
        let labels = || self.labels.lock().unwrap_or_else(PoisonError::into_inner);
        let is_fresh = |found: u64| millis(now).saturating_sub(found) < millis(KIND_NOTED);
        if labels().get(kind).is_some_and(|found| is_fresh(*found)) {
            return Ok(kind.to_owned());
        }
        let label = self.queue.label(bot, kind, now).await?;
        // Types that count as `other` are not cached: their number is unbounded.
        if label != OTHER_KINDS {
            let mut labels = labels();
            labels.retain(|_, found| is_fresh(*found));
            labels.insert(label.clone(), millis(now));
        }
        Ok(label)
    }

    /// The notification with this id. It can be found until a week after its end, or a shorter time if
    /// the results of its bot exceed their quota.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn find(&self, id: NotificationId) -> Result<Option<Kept>, RedisError> {
        self.queue.notification(id).await
    }

    /// Cancels or reschedules a notification that was looked up.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] the change may or may not be made; the call can be repeated.
    pub async fn amend(&self, kept: &Kept, amendment: Amendment) -> Result<Amended, RedisError> {
        let amended = self.queue.amend(kept, amendment, self.clock.now()).await?;
        if (amendment, amended) == (Amendment::Cancel, Amended::Done) {
            NotificationMetrics::count(&kept.label, "cancelled");
        }
        Ok(amended)
    }

    /// Reports a user as online: the notification that has waited longest for the user is sent, if
    /// it is due. Returns the number of queued notifications: 0 or 1.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] a notification may or may not be released.
    pub async fn online(&self, bot: &BotId, uid: &str) -> Result<u64, RedisError> {
        let now = self.clock.now();
        self.queue.release_online(bot, uid, self.online_threshold, now).await.map(u64::from)
    }

    /// Finds lost notifications and reschedules them.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. Restored notifications stay restored; the call can be
    /// repeated.
    pub async fn audit(&self) -> Result<Audit, RedisError> {
        audit::audit(&self.queue, &self.clock).await
    }

    /// The statistics of days or hours, in their order.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn stats(&self, spans: &[Span]) -> Result<Vec<Stats>, RedisError> {
        self.queue.notification_stats(spans).await
    }
}
