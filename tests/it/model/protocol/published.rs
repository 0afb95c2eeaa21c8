//! What the scripts publish.

use super::reference::Action;
use crate::model::state_machine::{Bot, Server};

/// The publications: each value that fell below the last one that claimers and schedulers know.
pub(super) fn published(
    before: &Server,
    after: &Server,
    now_us: i64,
    action: &Action,
) -> Vec<String> {
    let fell = |what: &str, before: Option<i64>, after: Option<i64>| {
        let after = after.filter(|&after| before.is_none_or(|before| after < before));
        after.map(|score| format!("{what} {score}"))
    };
    let ready = |server: &Server| server.ctl.values().copied().min();
    let deadline = |server: &Server| server.busy.values().copied().min();
    let due = |server: &Server| server.later.values().map(|&(due_ms, ..)| due_ms).min();
    let said = match action {
        // The reaped bots are announced before the claim takes any.
        Action::Claim(claim) => {
            let mut reaped = before.clone();
            reaped.v = reaped.v.max(claim.seen);
            reaped.reap(now_us, claim.isolate);
            [fell("ready", ready(before), ready(&reaped)), None]
        }
        // A copier that takes leases publishes a deadline only if no published one is ahead.
        Action::Enqueue(_) if after.own.len() > before.own.len() => {
            let told = (after.told != before.told).then(|| format!("deadline {}", after.told));
            [told, fell("ready", ready(before), ready(after))]
        }
        Action::Enqueue(_) | Action::Push { due_ms: None, .. } => {
            // The parks of bots that wait for lanes alone end first.
            let mut unparked = before.clone();
            let is_fresh = |bot: &&Bot| !before.queues.contains_key(bot);
            let fresh: Vec<Bot> = after.queues.keys().filter(is_fresh).copied().collect();
            unparked.unpark(&fresh);
            [
                fell("ready", ready(before), ready(after)),
                fell("deadline", deadline(&unparked), deadline(after)),
            ]
        }
        // While the shard was paused, no claimer looked at it.
        Action::Resume(None) => [fell("ready", None, ready(after)), None],
        _ => [fell("ready", ready(before), ready(after)), fell("due", due(before), due(after))],
    };
    said.into_iter().flatten().collect()
}
