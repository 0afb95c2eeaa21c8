//! How much of Redis a bot may hold: queued, delayed and pending events, dead letters, idempotency
//! keys, and ended records.
//!
//! The scripts count what each bot holds, and compare it with its [`Quota`] before they add. So no
//! bot can fill Redis. Rates of requests have other bounds: `admission`.
//!
//! The quotas adapt to the memory of Redis: no quota of bytes is above 1/16 of `maxmemory`, and
//! above a fill level all of them shrink. So the bots that hold most are refused first, and the
//! others continue. Profiles are in MongoDB, which counts them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::id::BotId;

/// No quota of bytes is above this part of `maxmemory`.
const PART_OF_MEMORY: u64 = 16;
/// No quota of bytes shrinks below this.
const LEAST_BYTES: u64 = 64 << 10;
/// The smallest part of a quota that a nearly full Redis leaves, in ten thousandths.
const LEAST_SHARE: u64 = 200;
/// All, in ten thousandths.
const WHOLE: u64 = 10_000;

/// The maximum that a bot may hold, per pipeline. 0: no quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quota {
    /// Bytes of queued events.
    pub queued_bytes: u64,
    /// Number of delayed events.
    pub delayed_events: u64,
    /// Bytes of delayed events.
    pub delayed_bytes: u64,
    /// Number of the pending records of a product.
    pub pending: u64,
    /// Bytes of the pending records of a product.
    pub pending_bytes: u64,
    /// Number of dead letters.
    pub dead_letters: u64,
    /// Bytes of dead letters.
    pub dead_bytes: u64,
    /// Bytes of idempotency keys of each kind.
    pub key_bytes: u64,
    /// Bytes of the ended records of a product.
    pub ended_bytes: u64,
    /// Number of profiles in MongoDB, of all pipelines.
    pub profiles: u64,
}

impl Quota {
    /// No quota at all.
    pub const NONE: Self = Self {
        queued_bytes: 0,
        delayed_events: 0,
        delayed_bytes: 0,
        pending: 0,
        pending_bytes: 0,
        dead_letters: 0,
        dead_bytes: 0,
        key_bytes: 0,
        ended_bytes: 0,
        profiles: 0,
    };

    /// The quotas that scripts get which queue events or make them dead letters.
    pub(crate) fn of_queue(&self) -> String {
        format!("{}|{}|{}", self.queued_bytes, self.dead_letters, self.dead_bytes)
    }

    /// The quotas that scripts get which end the records of a product.
    pub(crate) fn of_records(&self) -> String {
        format!("{}|{}", self.of_queue(), self.ended_bytes)
    }
}

/// The quotas of all bots. Clones share what they know of the memory of Redis.
#[derive(Debug, Clone)]
pub struct Quotas {
    general: Quota,
    shared: Option<Arc<Shared>>,
}

/// No quotas.
pub static NO_QUOTAS: Quotas = Quotas { general: Quota::NONE, shared: None };

#[derive(Debug)]
struct Shared {
    bots: BTreeMap<BotId, Quota>,
    /// Fill level above which quotas of bytes shrink, in ten thousandths.
    guard: u64,
    /// Memory of Redis in use, bytes.
    used: AtomicU64,
    /// `maxmemory`; 0: no bound, or not known yet.
    max: AtomicU64,
}

impl Default for Quotas {
    fn default() -> Self {
        NO_QUOTAS.clone()
    }
}

impl Quotas {
    /// The quotas `general`, except for some `bots`. Quotas of bytes shrink while Redis uses more
    /// than `guard` percent of its memory.
    #[must_use]
    pub fn new(general: Quota, bots: BTreeMap<BotId, Quota>, guard: u8) -> Self {
        let (used, max) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared = Shared { bots, guard: u64::from(guard) * 100, used, max };
        Self { general, shared: Some(Arc::new(shared)) }
    }

    /// The quotas of bots without their own, at present.
    #[must_use]
    pub fn general(&self) -> Quota {
        self.at_present(self.general)
    }

    /// The quotas of a bot that has its own, at present.
    #[must_use]
    pub fn own(&self, bot: &BotId) -> Option<Quota> {
        let own = self.shared.as_ref()?.bots.get(bot)?;
        Some(self.at_present(*own))
    }

    /// The quotas of a bot, at present.
    #[must_use]
    pub fn of(&self, bot: &BotId) -> Quota {
        self.own(bot).unwrap_or_else(|| self.general())
    }

    /// The quotas of a bot, however full Redis is: for a change that only moves what the bot holds already.
    #[must_use]
    pub(crate) fn for_a_move(&self, bot: &BotId) -> Quota {
        let own = self.shared.as_ref().and_then(|shared| shared.bots.get(bot));
        self.while_used(own.copied().unwrap_or(self.general), 0)
    }

    /// Notes how much memory Redis uses, and its maximum (0: none).
    pub fn observe_memory(&self, used: u64, max: u64) {
        if let Some(shared) = &self.shared {
            shared.used.store(used, Ordering::Relaxed);
            shared.max.store(max, Ordering::Relaxed);
        }
    }

    fn at_present(&self, quota: Quota) -> Quota {
        let used = self.shared.as_ref().map_or(0, |shared| shared.used.load(Ordering::Relaxed));
        self.while_used(quota, used)
    }

    fn while_used(&self, quota: Quota, used: u64) -> Quota {
        let Some(shared) = &self.shared else { return quota };
        let max = shared.max.load(Ordering::Relaxed);
        let bytes = |limit| bytes_at(limit, used, max, shared.guard);
        Quota {
            queued_bytes: bytes(quota.queued_bytes),
            delayed_bytes: bytes(quota.delayed_bytes),
            pending_bytes: bytes(quota.pending_bytes),
            dead_bytes: bytes(quota.dead_bytes),
            key_bytes: bytes(quota.key_bytes),
            ended_bytes: bytes(quota.ended_bytes),
            ..quota
        }
    }

    /// The quotas of `bot` as an argument of a script: empty for those of all bots.
    pub(crate) fn argument(&self, bot: &BotId) -> String {
        self.own(bot).map_or_else(String::new, |own| own.of_queue())
    }
}

/// A quota of bytes while Redis uses `used` of `max` bytes. From the fill level `guard` on it
/// shrinks linearly, and reaches its minimum after three quarters of the rest.
fn bytes_at(limit: u64, used: u64, max: u64, guard: u64) -> u64 {
    if limit == 0 || max == 0 {
        return limit;
    }
    let limit = limit.min((max / PART_OF_MEMORY).max(LEAST_BYTES));
    if guard >= WHOLE {
        return limit;
    }
    let fill = u64::try_from(u128::from(used) * u128::from(WHOLE) / u128::from(max));
    let above = fill.unwrap_or(WHOLE).saturating_sub(guard);
    let range = (WHOLE.saturating_sub(guard) * 3 / 4).max(1);
    let share = WHOLE - (WHOLE - LEAST_SHARE) * above.min(range) / range;
    let shrunk = u128::from(limit) * u128::from(share) / u128::from(WHOLE);
    u64::try_from(shrunk).unwrap_or(limit).max(LEAST_BYTES.min(limit))
}

/// The settings of quotas that refuse something, for messages and metrics.
pub const NAMES: [&str; 9] = [
    "queued_bytes",
    "delayed_events",
    "delayed_bytes",
    "notifications",
    "notification_bytes",
    DEAD_LETTERS,
    "dead_bytes",
    KEY_BYTES,
    PROFILES,
];
/// The setting that bounds queued events.
pub(crate) const QUEUED_BYTES: &str = NAMES[0];
/// The setting that bounds idempotency keys.
pub(crate) const KEY_BYTES: &str = "key_bytes";
/// The setting that bounds profiles.
pub(crate) const PROFILES: &str = "profiles";
/// The setting that counts for all refused dead letters.
pub(crate) const DEAD_LETTERS: &str = "dead_letters";

/// A bot would hold more than its quota. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the bot would hold more than its quota: it holds {held}, and quotas.{name} is now {limit}"
)]
pub struct QuotaExceeded {
    /// The setting.
    pub name: &'static str,
    /// What the bot holds.
    pub held: u64,
    /// The quota at present.
    pub limit: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_quota_is_at_most_a_sixteenth_of_the_memory_and_shrinks_while_it_is_nearly_full() {
        let gib = 1_024 * MIB;
        for (limit, used, max, expected) in [
            (64 * MIB, gib, 0, 64 * MIB),
            (0, gib, gib, 0),
            (64 * MIB, 0, gib, 64 * MIB),
            (64 * MIB, 0, 64 * MIB, 4 * MIB),
            (64 * MIB, gib / 10 * 8, gib, 64 * MIB),
            // Half of the way from 80 % to 95 %.
            (64 * MIB, gib / 1_000 * 875, gib, 64 * MIB * 51 / 100),
            (64 * MIB, gib / 100 * 96, gib, 64 * MIB * 2 / 100),
            (64 * MIB, 2 * gib, gib, 64 * MIB * 2 / 100),
            // Not below 64 KiB, except for quotas that are smaller anyway.
            (64 * MIB, 2 * gib, 16 * MIB, LEAST_BYTES),
            (1_000, 2 * gib, gib, 1_000),
        ] {
            let found = bytes_at(limit, used, max, 8_000);
            let near = expected.abs_diff(found) <= expected / 100;
            assert!(near, "{limit} at {used} of {max}: {found}, not {expected}");
        }
        assert_eq!(bytes_at(64 * MIB, 2 * gib, gib, WHOLE), 64 * MIB, "the guard is off");
    }

    #[test]
    fn bots_have_the_general_quotas_or_their_own() {
        let general = Quota { delayed_events: 5, dead_bytes: MIB, ..Quota::NONE };
        let own = Quota { delayed_events: 9, ..Quota::NONE };
        let [a, b] = ["a", "b"].map(|bot| BotId::parse(bot).unwrap());
        let quotas = Quotas::new(general, [(b.clone(), own)].into(), 80);
        assert_eq!((quotas.of(&a), quotas.of(&b)), (general, own));
        assert_eq!((quotas.argument(&a), quotas.argument(&b)), (String::new(), "0|0|0".into()));
        quotas.clone().observe_memory(0, MIB);
        assert_eq!(quotas.of(&a), Quota { dead_bytes: LEAST_BYTES, ..general });
        assert_eq!(NO_QUOTAS.of(&a), Quota::NONE);
    }

    #[test]
    fn a_nearly_full_redis_does_not_shrink_the_quotas_for_a_move() {
        let general = Quota { delayed_bytes: 64 * MIB, ..Quota::NONE };
        let own = Quota { delayed_bytes: 32 * MIB, ..Quota::NONE };
        let [a, b] = ["a", "b"].map(|bot| BotId::parse(bot).unwrap());
        let quotas = Quotas::new(general, [(b.clone(), own)].into(), 80);
        quotas.observe_memory(1_000 * MIB, 1_024 * MIB);
        assert!(quotas.of(&a).delayed_bytes < 2 * MIB);
        assert_eq!((quotas.for_a_move(&a), quotas.for_a_move(&b)), (general, own));
        // A sixteenth of the memory stays the limit.
        quotas.observe_memory(250 * MIB, 256 * MIB);
        assert_eq!(quotas.for_a_move(&a).delayed_bytes, 16 * MIB);
        assert_eq!(NO_QUOTAS.for_a_move(&a), Quota::NONE);
    }
}
