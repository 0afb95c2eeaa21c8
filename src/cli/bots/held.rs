//! What a bot holds, as lines of text.

use super::super::output::{argument, bytes, count, duration, number, plain};
use crate::id::{BotId, PipelineName};
use crate::queue::{DeadOfBot, Holdings};

/// What a bot holds, as lines, and its quotas.
pub(super) fn quotas(holds: &Holdings, quotas: &Holdings) -> String {
    let of = |held: String, quota: u64, shown: fn(u64) -> String| match quota {
        0 => held,
        quota => format!("{held} of {}", shown(quota)),
    };
    let in_bytes = |held, quota| of(bytes(held), quota, bytes);
    let mut text =
        format!("\nholds     {} queued", in_bytes(holds.queued_bytes, quotas.queued_bytes));
    for (what, (n, n_max), (size, size_max)) in [
        (
            "delayed",
            (holds.delayed_events, quotas.delayed_events),
            (holds.delayed_bytes, quotas.delayed_bytes),
        ),
        ("pending", (holds.pending, quotas.pending), (holds.pending_bytes, quotas.pending_bytes)),
        ("dead", (holds.dead_letters, quotas.dead_letters), (holds.dead_bytes, quotas.dead_bytes)),
    ] {
        if n > 0 {
            let (n, size) = (of(number(n), n_max, number), in_bytes(size, size_max));
            text.extend(["\n          ", &n, " ", what, ", ", &size]);
        }
    }
    text
}

/// The dead letters of a bot, as lines.
pub(super) fn dead(
    dead: &DeadOfBot,
    holds: &Holdings,
    (pipeline, bot): (&PipelineName, &BotId),
    now_ms: u64,
) -> String {
    let DeadOfBot { count: found, newest, .. } = dead;
    // The search finds only those among the newest letters of its shard.
    let found = holds.dead_letters.max(*found);
    let mut text = match found {
        0 => return "\ndead      -".to_owned(),
        found => format!("\ndead      {}", count(found, "dead letter")),
    };
    for letter in newest {
        let old = duration(now_ms.saturating_sub(letter.time_ms));
        let event = letter.event.as_deref().map_or("(not readable)".to_owned(), plain);
        let reason = plain(&letter.reason);
        text.extend(["\n          ", &letter.id.to_string(), " ", &event, ", ", &old, " ago: "]);
        text.push_str(&reason);
    }
    if found > 0 {
        let bot = argument(bot.as_str());
        text.extend(["\n          fairlane dead list --pipeline ", pipeline.as_str()]);
        text.extend([" --bot=", &bot]);
    }
    text
}
