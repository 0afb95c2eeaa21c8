//! `[quotas]`.

use super::reader::Reader;
use crate::config::check::limits;
use crate::config::{BotQuotaConfig, ConfigError, QuotasConfig};
use crate::id::BotId;
use crate::quotas::Quota;

pub(super) fn quotas(top: &Reader<'_>) -> Result<QuotasConfig, ConfigError> {
    let read = |key: &str| top.number(&format!("quotas.{key}"), limits::HELD);
    let mut quotas = QuotasConfig {
        queued_bytes: read("queued_bytes")?,
        delayed_events: read("delayed_events")?,
        delayed_bytes: read("delayed_bytes")?,
        notifications: read("notifications")?,
        notification_bytes: read("notification_bytes")?,
        dead_letters: read("dead_letters")?,
        dead_bytes: read("dead_bytes")?,
        key_bytes: read("key_bytes")?,
        result_bytes: read("result_bytes")?,
        profiles: read("profiles")?,
        memory_guard: top.fraction("quotas.memory_guard"),
        bots: Vec::new(),
    };
    let general = quotas.general();
    for place in 0..top.tables("quotas.bots") {
        let prefix = format!("quotas.bots[{place}].");
        quotas.bots.push(of_bot(&Reader { layers: top.layers, prefix: &prefix }, general)?);
    }
    Ok(quotas)
}

fn of_bot(read: &Reader<'_>, general: Quota) -> Result<BotQuotaConfig, ConfigError> {
    let bot = BotId::parse(read.text("bot")).map_err(|error| read.invalid("bot", error))?;
    let or = |key: &str, general| read.number_or(key, limits::HELD, general);
    let quota = Quota {
        queued_bytes: or("queued_bytes", general.queued_bytes)?,
        delayed_events: or("delayed_events", general.delayed_events)?,
        delayed_bytes: or("delayed_bytes", general.delayed_bytes)?,
        pending: or("notifications", general.pending)?,
        pending_bytes: or("notification_bytes", general.pending_bytes)?,
        dead_letters: or("dead_letters", general.dead_letters)?,
        dead_bytes: or("dead_bytes", general.dead_bytes)?,
        key_bytes: or("key_bytes", general.key_bytes)?,
        ended_bytes: or("result_bytes", general.ended_bytes)?,
        profiles: or("profiles", general.profiles)?,
    };
    Ok(BotQuotaConfig { bot, quota })
}
