//! The number of profiles of each bot, for `quotas.profiles`.
//!
//! MongoDB knows the number of all profiles without counting. While this is below the quota of a bot,
//! the bot cannot exceed it. Otherwise MongoDB counts the profiles of the bot. This process adds the
//! profiles that it creates. Other processes create profiles too, so both are repeated from time to
//! time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;
use tracing::warn;

use super::subscribers::SubscriberStore;
use crate::id::BotId;
use crate::mongo::client::MongoError;
use crate::quotas::{PROFILES, QuotaExceeded, Quotas};
use crate::telemetry::OncePerMinute;

/// When a count is repeated; and when, if 90 % of the quota are used.
const AGAIN: Duration = Duration::from_secs(600);
const SOON: Duration = Duration::from_secs(30);
/// Number of bots whose count is kept.
const BOTS: usize = 20_000;

static LATE: OncePerMinute = OncePerMinute::new();

#[derive(Debug, Clone, Copy)]
struct Counted {
    profiles: u64,
    at: Instant,
    /// MongoDB did not count in time.
    guessed: bool,
}

/// The counts of all bots of a process.
#[derive(Debug)]
pub(crate) struct ProfileCounts {
    quotas: Quotas,
    counted: Mutex<FxHashMap<BotId, Counted>>,
    /// The profiles of all bots. Locked while MongoDB is asked, so that one call answers all bots.
    all: tokio::sync::Mutex<Option<Counted>>,
    /// The profiles that this process created since.
    created: AtomicU64,
}

impl Counted {
    /// Whether the count need not be repeated yet.
    fn is_fresh(&self, profiles: u64, limit: u64) -> bool {
        let soon = self.guessed || profiles >= limit / 10 * 9;
        self.at.elapsed() < if soon { SOON } else { AGAIN }
    }
}

impl ProfileCounts {
    pub(crate) fn new(quotas: Quotas) -> Self {
        Self {
            quotas,
            counted: Mutex::default(),
            all: tokio::sync::Mutex::default(),
            created: AtomicU64::new(0),
        }
    }

    /// What a bot exceeds if it creates one more profile after `new` new ones; `None` if it has room.
    ///
    /// # Errors
    /// If MongoDB is unavailable or refuses.
    pub(crate) async fn exceeded(
        &self,
        store: &SubscriberStore,
        bot: &BotId,
        new: u64,
    ) -> Result<Option<QuotaExceeded>, MongoError> {
        let limit = self.quotas.of(bot).profiles;
        if limit == 0 {
            return Ok(None);
        }
        let known = self.counted().get(bot).copied();
        let fresh = known.filter(|known| known.is_fresh(known.profiles, limit));
        if fresh.is_none() && self.all(store, limit).await? + new < limit {
            return Ok(None);
        }
        let profiles = if let Some(known) = fresh {
            known.profiles
        } else {
            let (profiles, guessed) = match store.count(bot, limit).await {
                Ok(profiles) => (profiles, false),
                // A count that takes long must not stop the bot.
                Err(error) if error.is_timeout() => {
                    if let Some(suppressed) = LATE.take() {
                        warn!(%bot, %error, suppressed, "cannot count profiles; the quota is checked later");
                    }
                    (known.map_or(0, |known| known.profiles), true)
                }
                Err(error) => return Err(error),
            };
            let mut counted = self.counted();
            if counted.len() >= BOTS {
                counted.clear();
            }
            counted.insert(bot.clone(), Counted { profiles, at: Instant::now(), guessed });
            profiles
        };
        let held = profiles + new;
        Ok((held >= limit).then_some(QuotaExceeded { name: PROFILES, held, limit }))
    }

    /// The number of profiles of all bots; the maximum if MongoDB does not answer in time.
    async fn all(&self, store: &SubscriberStore, limit: u64) -> Result<u64, MongoError> {
        let mut all = self.all.lock().await;
        // Relaxed: a bound that lags behind by a few profiles is fine.
        let profiles = |all: &Counted| all.profiles + self.created.load(Ordering::Relaxed);
        if let Some(known) = all.as_ref()
            && known.is_fresh(profiles(known), limit)
        {
            return Ok(profiles(known));
        }
        match store.all().await {
            Ok(profiles) => {
                self.created.store(0, Ordering::Relaxed);
                *all = Some(Counted { profiles, at: Instant::now(), guessed: false });
                Ok(profiles)
            }
            Err(error) if error.is_timeout() => Ok(u64::MAX / 2),
            Err(error) => Err(error),
        }
    }

    /// Adds profiles that were created.
    pub(crate) fn created(&self, bot: &BotId, new: u64) {
        self.created.fetch_add(new, Ordering::Relaxed);
        if let Some(counted) = self.counted().get_mut(bot) {
            counted.profiles += new;
        }
    }

    fn counted(&self) -> MutexGuard<'_, FxHashMap<BotId, Counted>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
