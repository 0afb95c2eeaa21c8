//! The audit finds lost notifications and reschedules them. A lost notification has a record, but
//! neither a due time nor a queued event.
//!
//! Every change of a notification is one script. So no notification should be lost, even after a
//! crash, or after Redis lost its last writes. The audit is a safety net against unforeseen defects
//! and manual changes in Redis.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::keys;
use super::queue::Suspect;
use super::record::NotificationId;
use crate::clock::{SharedClock, millis};
use crate::id::BotId;
use crate::lifecycle::Shutdown;
use crate::queue::Queue;
use crate::redis::scripts::Hold;
use crate::redis::{Link, Primary, RedisError, Server};

/// Pause between two steps of the background audit. A million notifications take minutes, without a
/// noticeable load.
const PACE: Duration = Duration::from_millis(50);
/// Approximate number of records per step.
const RECORDS: usize = 500;
/// Number of notifications that one pass through the queues searches for. It is large, so that long
/// queues are read rarely.
const SUSPECTS_MAX: usize = 50_000;
/// Time to live of the lock of the process that audits. Every step renews it.
const LOCK: Duration = Duration::from_secs(30);
/// Timeout of releasing the lock at the end.
const GOODBYE: Duration = Duration::from_millis(500);
/// Timeout of one call to a primary.
const ANSWER: Duration = Duration::from_secs(5);

/// The result of an audit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Audit {
    /// Number of checked records, including those of ended notifications.
    pub records: u64,
    /// Number of lost notifications that are scheduled again.
    pub restored: u64,
}

/// An audit in progress.
struct Walk<'a> {
    queue: &'a Queue,
    clock: &'a SharedClock,
    /// The remaining primaries. `cursor` is the progress in the last of them.
    primaries: Vec<Primary>,
    cursor: u64,
    /// Notifications without a due time. The queues were not searched for them yet.
    suspects: Vec<Suspect>,
    found: Audit,
}

impl<'a> Walk<'a> {
    async fn begin(queue: &'a Queue, clock: &'a SharedClock) -> Result<Self, RedisError> {
        let server = Server::new(queue.link().target().clone(), ANSWER);
        let primaries = server.primaries().await?;
        let (suspects, found) = (Vec::new(), Audit::default());
        Ok(Self { queue, clock, primaries, cursor: 0, suspects, found })
    }

    /// Checks some hundred records; returns whether there are more.
    async fn step(&mut self) -> Result<bool, RedisError> {
        let Some(primary) = self.primaries.last() else { return Ok(false) };
        let pattern = keys::records(self.queue.link().prefix(), self.queue.name());
        let (next, names) = primary.scan(self.cursor, &pattern, RECORDS).await?;
        let ids: Vec<NotificationId> =
            names.iter().filter_map(|name| keys::notification_of(name)).collect();
        self.found.records += ids.len() as u64;
        if !ids.is_empty() {
            self.suspects.extend(self.queue.without_due_time(&ids).await?);
        }
        self.cursor = next;
        if next == 0 {
            self.primaries.pop();
        }
        let at_the_end = self.primaries.is_empty();
        if at_the_end || self.suspects.len() >= SUSPECTS_MAX {
            self.judge().await?;
        }
        Ok(!at_the_end)
    }

    /// Restores the notifications whose events are in no queue. Reads the queue of each bot once
    /// for all its notifications.
    async fn judge(&mut self) -> Result<(), RedisError> {
        let mut of_bots: HashMap<BotId, Vec<Suspect>> = HashMap::new();
        for suspect in std::mem::take(&mut self.suspects) {
            of_bots.entry(suspect.bot.clone()).or_default().push(suspect);
        }
        for (bot, suspects) in of_bots {
            let queued = self.queue.queued_ids(&bot).await?;
            for lost in suspects.iter().filter(|one| !queued.contains(&one.id.to_string())) {
                if self.queue.restore(lost, self.clock.now()).await? {
                    warn!(notification = %lost.id, bot = bot.as_str(),
                        "restored a lost notification; it is scheduled again");
                    self.found.restored += 1;
                }
            }
        }
        Ok(())
    }
}

/// Audits all notifications of the pipeline of `queue`.
///
/// # Errors
/// If Redis is unavailable or refuses. Restored notifications stay restored; the audit can be
/// repeated.
pub(crate) async fn audit(queue: &Queue, clock: &SharedClock) -> Result<Audit, RedisError> {
    let mut walk = Walk::begin(queue, clock).await?;
    while walk.step().await? {}
    Ok(walk.found)
}

/// One audit, in the background, by one process at a time.
pub(crate) async fn at_start(
    queue: Queue,
    link: Arc<Link>,
    clock: SharedClock,
    shutdown: Shutdown,
) {
    let token = uuid::Uuid::now_v7().to_string();
    tokio::select! {
        biased;
        () = shutdown.soft.cancelled() => {}
        audited = unhurried(&queue, &link, &clock, &token) => match audited {
            Ok(Some(Audit { records, restored })) if records > 0 => {
                info!(records, restored, "audited the notifications");
            }
            Ok(_) => {}
            Err(error) => {
                warn!(%error, "the audit of the notifications failed; run `fairlane check --audit` to repeat it");
            }
        },
    }
    // If this fails, the lock expires by itself.
    let _ = tokio::time::timeout(GOODBYE, hold(&link, &token, Duration::ZERO)).await;
}

/// `None`: another process audits.
async fn unhurried(
    queue: &Queue,
    link: &Link,
    clock: &SharedClock,
    token: &str,
) -> Result<Option<Audit>, RedisError> {
    let mut walk = Walk::begin(queue, clock).await?;
    while hold(link, token, LOCK).await? {
        if !walk.step().await? {
            return Ok(Some(walk.found));
        }
        tokio::time::sleep(PACE).await;
    }
    Ok(None)
}

async fn hold(link: &Link, token: &str, ttl: Duration) -> Result<bool, RedisError> {
    let lock = keys::auditor(link.prefix());
    link.call(&Hold { key: &lock, token, ttl_ms: millis(ttl) }).await
}
