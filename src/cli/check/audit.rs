//! The audits: is each notification either scheduled or queued, does the depth of each shard equal
//! the length of its queues, and is what bots hold counted correctly?

use std::sync::Arc;

use super::Finding;
use crate::cli::output::{count, number, plain};
use crate::cli::session::Session;
use crate::clock::{SharedClock, SystemClock};
use crate::config::Config;
use crate::id::PipelineName;
use crate::notifications::{Audit, audit};
use crate::queue::Depth;

const CHECK: &str = "audit";
/// Maximum number of shards named in a finding.
const SHOWN: usize = 8;

pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let mut findings = notifications(config).await;
    findings.push(depths(config).await);
    findings
}

/// The result of comparing the depths of all shards.
#[derive(Debug, Default)]
struct Depths {
    compared: u64,
    /// Corrected shards, such as `orders:3 was -1, is 0`.
    set_right: Vec<String>,
    /// Shards that were not compared, or not completely, such as `orders:3`.
    left_out: Vec<String>,
}

async fn depths(config: &Config) -> Finding {
    let compared = Session::with(config.clone(), async |session| {
        let mut found = Depths::default();
        for name in session.pipelines().await? {
            let queue = session.queue(&name);
            for shard in queue.shard_count().shards() {
                match queue.reconcile_depth(shard).await? {
                    Depth::Right => {}
                    Depth::SetRight { before, depth } => {
                        let set = format!("{name}:{shard} was {}, is {depth}", plain(&before));
                        found.set_right.push(set);
                    }
                    Depth::NotCompared => {
                        found.left_out.push(format!("{name}:{shard}"));
                        continue;
                    }
                }
                let (wrong, all) = queue.reconcile_holdings(shard).await?;
                if wrong > 0 {
                    let set = format!("{name}:{shard} had {}", count(wrong, "wrong sum"));
                    found.set_right.push(format!("{set} of what bots hold"));
                }
                if !all {
                    found.left_out.push(format!("{name}:{shard}"));
                }
                found.compared += 1;
            }
        }
        Ok(found)
    });
    match compared.await {
        Ok(found) => judge_depths(&found),
        Err(error) => {
            let why = "the depths of shards are unverified";
            let remedy =
                "follow the error text, then repeat the audit; corrections already made are kept";
            Finding::fail(CHECK, error.to_string(), why, remedy).exits(error.exit())
        }
    }
}

fn judge_depths(Depths { compared, set_right, left_out }: &Depths) -> Finding {
    let found = format!("compared the depth of {} with the queues", count(*compared, "shard"));
    let left = match left_out.as_slice() {
        [] => String::new(),
        left_out => format!("; left out {}", some_of(left_out)),
    };
    if !set_right.is_empty() {
        let found = format!("{found}; set right: {}{left}", some_of(set_right));
        let why = "Redis lost a part of its last writes, someone changed keys of Fairlane, or an older version wrote the data";
        let remedy =
            "run BGREWRITEAOF before Redis is restarted (docs/runbook.md, Redis lost its tail)";
        return Finding::warn(CHECK, found, why, remedy);
    }
    if !left.is_empty() {
        let found = format!("{found}{left}");
        let why =
            "they have too many bots or entries, or too large ones, to compare them during traffic";
        let remedy = "repeat the audit when fewer events are queued, delayed or dead";
        return Finding::warn(CHECK, found, why, remedy);
    }
    Finding::ok(CHECK, format!("{found}; all are right"))
}

/// The first few shards.
fn some_of(all: &[String]) -> String {
    let shown = all.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

async fn notifications(config: &Config) -> Vec<Finding> {
    let Ok(name) = PipelineName::parse(crate::notifications::PIPELINE) else { return Vec::new() };
    let audited = Session::with(config.clone(), async |session| {
        let clock: SharedClock = Arc::new(SystemClock);
        let queue = session.queue(&name);
        Ok(audit::audit(&queue, &clock).await?)
    });
    vec![match audited.await {
        Ok(found) => judge(found),
        Err(error) => {
            let why = "notifications may be missing from the schedule";
            let remedy =
                "follow the error text, then repeat the audit; restored notifications are kept";
            Finding::fail(CHECK, error.to_string(), why, remedy).exits(error.exit())
        }
    }]
}

fn judge(Audit { records, restored }: Audit) -> Finding {
    let found = format!("looked at {}", count(records, "notification"));
    if restored == 0 {
        return Finding::ok(CHECK, format!("{found}; none was lost"));
    }
    let found = format!("{found}; {} in no structure", number(restored));
    let why = "they would never have been sent; they are scheduled again, and overdue ones are sent immediately";
    Finding::warn(
        CHECK,
        found,
        why,
        "find out which program or person changes keys of Fairlane in Redis",
    )
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn wrong_depths_are_told_with_their_former_values() {
        let good = judge_depths(&Depths { compared: 16, ..Depths::default() });
        let text = "compared the depth of 16 shards with the queues; all are right";
        assert_eq!((good.state, &*good.found), (State::Ok, text));
        let set_right = (0..9).map(|shard| format!("p:{shard} was -1, is 0")).collect();
        let bad = judge_depths(&Depths { compared: 16, set_right, ..Depths::default() });
        assert_eq!(bad.state, State::Warn);
        assert!(bad.found.contains("set right: p:0 was -1, is 0, p:1"), "{}", bad.found);
        assert!(bad.found.ends_with("p:7 was -1, is 0 and 1 more"), "{}", bad.found);
        let left = Depths { left_out: vec!["p:3".to_owned()], ..Depths::default() };
        assert!(judge_depths(&left).found.ends_with("left out p:3"));
        let both = Depths { set_right: vec!["p:2 was -1, is 0".to_owned()], ..left };
        let text = "; set right: p:2 was -1, is 0; left out p:3";
        assert!(judge_depths(&both).found.ends_with(text));
    }

    #[test]
    fn losses_are_told_and_their_absence_too() {
        let good = judge(Audit { records: 1, restored: 0 });
        assert_eq!(
            (good.state, &*good.found),
            (State::Ok, "looked at 1 notification; none was lost")
        );
        let bad = judge(Audit { records: 1_000, restored: 2 });
        assert_eq!(bad.state, State::Warn);
        assert!(bad.found.ends_with("; 2 in no structure"), "{}", bad.found);
    }
}
