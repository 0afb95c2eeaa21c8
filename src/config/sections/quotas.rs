//! `[quotas]`.

use crate::id::BotId;
use crate::quotas::{Quota, Quotas};

/// The section `[quotas]`: how much a bot may hold.
#[derive(Debug, Clone)]
pub struct QuotasConfig {
    /// Queued events: maximum bytes per bot and pipeline; 0: no quota, as in the others.
    pub queued_bytes: u64,
    /// Delayed events: maximum number per bot.
    pub delayed_events: u64,
    /// Delayed events: maximum bytes per bot.
    pub delayed_bytes: u64,
    /// Notifications that have not ended: maximum number per bot.
    pub notifications: u64,
    /// Notifications that have not ended: maximum bytes per bot.
    pub notification_bytes: u64,
    /// Dead letters: maximum number per bot and pipeline.
    pub dead_letters: u64,
    /// Dead letters: maximum bytes per bot and pipeline.
    pub dead_bytes: u64,
    /// Idempotency keys: maximum bytes per bot and kind of key.
    pub key_bytes: u64,
    /// Results of ended notifications: maximum bytes per bot.
    pub result_bytes: u64,
    /// Profiles of subscribers in MongoDB: maximum number per bot.
    pub profiles: u64,
    /// The part of `maxmemory` above which quotas of bytes shrink: 0.1 to 1.0.
    pub memory_guard: f64,
    /// Bots with their own quotas: at most 1,000, each once.
    pub bots: Vec<BotQuotaConfig>,
}

/// The quotas of one bot.
#[derive(Debug, Clone)]
pub struct BotQuotaConfig {
    /// The bot.
    pub bot: BotId,
    /// Its quotas.
    pub quota: Quota,
}

impl QuotasConfig {
    pub(crate) fn general(&self) -> Quota {
        Quota {
            queued_bytes: self.queued_bytes,
            delayed_events: self.delayed_events,
            delayed_bytes: self.delayed_bytes,
            pending: self.notifications,
            pending_bytes: self.notification_bytes,
            dead_letters: self.dead_letters,
            dead_bytes: self.dead_bytes,
            key_bytes: self.key_bytes,
            ended_bytes: self.result_bytes,
            profiles: self.profiles,
        }
    }

    /// The quotas, without knowledge of the memory of Redis yet.
    pub(crate) fn quotas(&self) -> Quotas {
        let bots = self.bots.iter().map(|own| (own.bot.clone(), own.quota)).collect();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0.1 to 1.0")]
        let guard = (self.memory_guard * 100.0).round() as u8;
        Quotas::new(self.general(), bots, guard)
    }
}
