//! The audit: finds notifications that are in no structure, and has them fall due again.
//!
//! Every change of a notification is one script, so there should be none: not after a crash, nor
//! after Redis lost its tail. It is for what nobody thought of, and for who edits Redis by hand.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::keys;
use super::queue::Suspect;
use super::record::NotificationId;
use crate::clock::{SharedClock, millis};
use crate::id::BotId;
use crate::keyspace::scripts::Hold;
use crate::keyspace::{Link, Primary, Server, StoreError};
use crate::lifecycle::Shutdown;
use crate::queue::Queue;

/// Between two steps of the one that runs beside the work of a process: a million takes minutes,
/// and nobody notices.
const PACE: Duration = Duration::from_millis(50);
/// Records that one step of a walk looks at, about.
const RECORDS: usize = 500;
/// Notifications that are looked for in the queues together: a queue that is long is read seldom.
const SUSPECTS_MAX: usize = 50_000;
/// Who audits says so this often at least.
const LOCK: Duration = Duration::from_secs(30);
/// At the end, to give the lock back.
const GOODBYE: Duration = Duration::from_millis(500);
/// A primary answers within this.
const ANSWER: Duration = Duration::from_secs(5);

/// What an audit found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Audit {
    /// Records that were looked at, of those that have ended too.
    pub records: u64,
    /// That were in no structure, and are again.
    pub restored: u64,
}

/// An audit under way.
struct Walk<'a> {
    queue: &'a Queue,
    clock: &'a SharedClock,
    /// Those that are not done, and how far the last of them is.
    primaries: Vec<Primary>,
    cursor: u64,
    /// Those without a due time that were not looked for in the queues yet.
    suspects: Vec<Suspect>,
    found: Audit,
}

impl<'a> Walk<'a> {
    async fn begin(queue: &'a Queue, clock: &'a SharedClock) -> Result<Self, StoreError> {
        let server = Server::new(queue.link().target().clone(), ANSWER);
        let primaries = server.primaries().await?;
        let (suspects, found) = (Vec::new(), Audit::default());
        Ok(Self { queue, clock, primaries, cursor: 0, suspects, found })
    }

    /// Looks at some hundred; answers whether there are more.
    async fn step(&mut self) -> Result<bool, StoreError> {
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

    /// Restores those whose events are in no queue. Each queue is read once for many of them.
    async fn judge(&mut self) -> Result<(), StoreError> {
        let mut of_bots: HashMap<BotId, Vec<Suspect>> = HashMap::new();
        for suspect in std::mem::take(&mut self.suspects) {
            of_bots.entry(suspect.bot.clone()).or_default().push(suspect);
        }
        for (bot, suspects) in of_bots {
            let queued = self.queue.queued_ids(&bot).await?;
            for lost in suspects.iter().filter(|one| !queued.contains(&one.id.to_string())) {
                if self.queue.restore(lost, self.clock.now()).await? {
                    warn!(notification = %lost.id, bot = bot.as_str(),
                        "a notification was in no structure; it is scheduled again");
                    self.found.restored += 1;
                }
            }
        }
        Ok(())
    }
}

/// Looks at every notification of the pipeline of `queue`.
///
/// # Errors
/// When Redis does not answer or refuses. What was restored stays so; it can be repeated.
pub(crate) async fn audit(queue: &Queue, clock: &SharedClock) -> Result<Audit, StoreError> {
    let mut walk = Walk::begin(queue, clock).await?;
    while walk.step().await? {}
    Ok(walk.found)
}

/// One audit, beside other work, by one process at a time.
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
                info!(records, restored, "notifications are audited");
            }
            Ok(_) => {}
            Err(error) => {
                warn!(%error, "the audit of the notifications broke off; `fairlane check --audit` repeats it");
            }
        },
    }
    // Else it runs out by itself.
    let _ = tokio::time::timeout(GOODBYE, hold(&link, &token, Duration::ZERO)).await;
}

/// `None`: another process does it.
async fn unhurried(
    queue: &Queue,
    link: &Link,
    clock: &SharedClock,
    token: &str,
) -> Result<Option<Audit>, StoreError> {
    let mut walk = Walk::begin(queue, clock).await?;
    while hold(link, token, LOCK).await? {
        if !walk.step().await? {
            return Ok(Some(walk.found));
        }
        tokio::time::sleep(PACE).await;
    }
    Ok(None)
}

async fn hold(link: &Link, token: &str, ttl: Duration) -> Result<bool, StoreError> {
    let lock = keys::auditor(link.prefix());
    link.call(&Hold { key: &lock, token, ttl_ms: millis(ttl) }).await
}
