//! The number of profiles of each bot, for `quotas.profiles`.
//!
//! MongoDB counts the profiles of a bot, and this process adds the profiles that it creates. Other
//! processes create profiles too, so the count is repeated from time to time.

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
}

impl ProfileCounts {
    pub(crate) fn new(quotas: Quotas) -> Self {
        Self { quotas, counted: Mutex::default() }
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
        let fresh = known.filter(|known| {
            let soon = known.guessed || known.profiles >= limit / 10 * 9;
            known.at.elapsed() < if soon { SOON } else { AGAIN }
        });
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

    /// Adds profiles that were created.
    pub(crate) fn created(&self, bot: &BotId, new: u64) {
        if let Some(counted) = self.counted().get_mut(bot) {
            counted.profiles += new;
        }
    }

    fn counted(&self) -> MutexGuard<'_, FxHashMap<BotId, Counted>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
