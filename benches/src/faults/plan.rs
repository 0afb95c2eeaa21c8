//! The faults of a campaign, drawn from a seed.

use std::time::Duration;

use clap::ValueEnum;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;

/// Bounds of the time between the starts of two faults.
const EVERY: std::ops::RangeInclusive<u64> = 500..=3_000;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// SIGKILL for a process, which starts again.
    ProcessKilled,
    /// SIGSTOP for a process, often beyond the time of its leases.
    ProcessFrozen,
    /// SIGTERM for a process, which starts again.
    ProcessStopped,
    /// SIGHUP for a process with a changed configuration.
    ProcessReloaded,
    /// The clock of a process is set forward or back. Needs libfaketime.
    ClockStepped,
    /// SIGKILL for Redis, which starts again from its append-only file.
    RedisKilled,
    /// SIGSTOP for Redis.
    RedisFrozen,
    /// `DEBUG SLEEP`: Redis accepts connections and answers nothing.
    RedisSleeps,
    /// `maxmemory` is lowered below what is used, and raised again.
    RedisFull,
    /// The disk of Redis is full: its append-only file cannot grow.
    DiskFull,
    /// `SCRIPT FLUSH`.
    ScriptsFlushed,
    /// `CLIENT KILL` for all connections.
    ClientsKilled,
    /// The replica takes over, and the primary is killed.
    Failover,
    /// A replica in a cluster takes over, on demand or because its primary was killed.
    ClusterFailover,
    /// The slot of a shard moves to another primary of a cluster.
    SlotsMoved,
    /// All connections of a process to Redis are cut.
    NetworkCut,
    /// Each command and each reply between a process and Redis waits.
    NetworkSlow,
    /// No byte moves between a process and Redis, and no connection ends.
    NetworkHeld,
    /// A process has little bandwidth to Redis.
    NetworkThrottled,
    /// Redis refuses new connections of a process, and the others end.
    NetworkRefused,
    /// Redis executes the commands of a process, and no reply arrives on its connections.
    RepliesLost,
    /// Redis executes a script, and its reply is lost.
    ReplySwallowed,
    /// SIGKILL for MongoDB, which starts again.
    MongoKilled,
    /// SIGSTOP for MongoDB.
    MongoFrozen,
    /// A process has little bandwidth to MongoDB.
    MongoThrottled,
    /// MongoDB executes the commands of a process, and no reply arrives on its connections.
    MongoRepliesLost,
}

impl Fault {
    /// The name, as in `--only`.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether it concerns what a process and Redis send to each other. In a cluster, it concerns what
    /// all processes and one primary send to each other.
    pub(crate) fn is_between_process_and_redis(self) -> bool {
        matches!(
            self,
            Self::NetworkCut
                | Self::NetworkSlow
                | Self::NetworkHeld
                | Self::NetworkThrottled
                | Self::NetworkRefused
                | Self::RepliesLost
                | Self::ReplySwallowed
        )
    }

    /// Whether it can happen with a cluster, or with one server and its replica.
    pub(crate) fn happens_with(self, cluster: bool) -> bool {
        match self {
            Self::ClusterFailover | Self::SlotsMoved => cluster,
            Self::Failover => !cluster,
            _ => true,
        }
    }

    /// How long it lasts, ms.
    fn lasts(self) -> std::ops::RangeInclusive<u64> {
        match self {
            Self::ProcessKilled | Self::ProcessStopped | Self::RedisKilled => 0..=1_500,
            Self::ProcessFrozen => 100..=6_000,
            Self::ClockStepped | Self::NetworkSlow | Self::NetworkThrottled => 500..=4_000,
            Self::RedisFrozen
            | Self::RedisSleeps
            | Self::RedisFull
            | Self::DiskFull
            | Self::MongoKilled
            | Self::MongoFrozen
            | Self::MongoThrottled => 100..=3_000,
            Self::NetworkHeld | Self::NetworkRefused | Self::RepliesLost => 100..=4_000,
            Self::MongoRepliesLost => 100..=2_000,
            Self::ProcessReloaded
            | Self::ScriptsFlushed
            | Self::ClientsKilled
            | Self::Failover
            | Self::ClusterFailover
            | Self::SlotsMoved
            | Self::NetworkCut
            | Self::ReplySwallowed => 0..=0,
        }
    }

    /// How often it is drawn, compared with others.
    fn weight(self) -> u32 {
        match self {
            Self::ProcessKilled | Self::ProcessFrozen | Self::ReplySwallowed => 3,
            Self::RedisKilled
            | Self::RedisFrozen
            | Self::ClusterFailover
            | Self::SlotsMoved
            | Self::RepliesLost
            | Self::NetworkCut => 2,
            _ => 1,
        }
    }
}

/// One fault of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Planned {
    /// Its number in the plan, from 0.
    pub(crate) number: usize,
    /// Its start, ms after the start of the campaign.
    pub(crate) at_ms: u64,
    pub(crate) fault: Fault,
    /// The process that it concerns, from 0.
    pub(crate) process: usize,
    /// How long it lasts.
    pub(crate) lasts_ms: u64,
    /// A further random number, for its size.
    pub(crate) dice: u64,
}

impl Planned {
    pub(crate) fn lasts(&self) -> Duration {
        Duration::from_millis(self.lasts_ms)
    }
}

/// The faults of a campaign of this length, among `kinds`. Equal arguments give equal faults.
///
/// The first `spared` processes are never killed, frozen or stopped.
pub(crate) fn plan(
    seed: u64,
    length: Duration,
    processes: usize,
    spared: usize,
    kinds: &[Fault],
) -> Vec<Planned> {
    let mut random = SmallRng::seed_from_u64(seed);
    let weights: u32 = kinds.iter().map(|kind| kind.weight()).sum();
    let mut planned = Vec::new();
    let mut at_ms = 1_000;
    let length = u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
    while at_ms < length && weights > 0 {
        let mut drawn = random.random_range(0..weights);
        let fault = kinds.iter().find(|kind| {
            let hit = drawn < kind.weight();
            drawn = drawn.saturating_sub(kind.weight());
            hit
        });
        let Some(&fault) = fault else { break };
        let first = match fault {
            Fault::ProcessKilled
            | Fault::ProcessFrozen
            | Fault::ProcessStopped
            | Fault::ClockStepped => spared,
            _ => 0,
        };
        planned.push(Planned {
            number: planned.len(),
            at_ms,
            fault,
            process: random.random_range(first.min(processes - 1)..processes),
            lasts_ms: random.random_range(fault.lasts()),
            dice: random.random(),
        });
        at_ms += random.random_range(EVERY);
    }
    planned
}

/// The subsets that a search for the smallest failing plan tries next: without each of `parts` equal
/// parts.
pub(crate) fn without_parts(plan: &[Planned], parts: usize) -> Vec<Vec<Planned>> {
    let size = plan.len().div_ceil(parts.max(1)).max(1);
    (0..plan.len())
        .step_by(size)
        .map(|start| {
            let end = (start + size).min(plan.len());
            [&plan[..start], &plan[end..]].concat()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_seed_gives_the_same_faults_again_and_another_seed_gives_others() {
        let kinds = Fault::value_variants();
        let first = plan(7, MINUTE, 3, 1, kinds);
        assert_eq!(first, plan(7, MINUTE, 3, 1, kinds));
        assert_ne!(first, plan(8, MINUTE, 3, 1, kinds));
        assert!((20..=120).contains(&first.len()), "{}", first.len());
    }

    #[test]
    fn a_longer_campaign_starts_with_the_same_faults() {
        let kinds = Fault::value_variants();
        let (short, long) = (plan(7, MINUTE, 3, 1, kinds), plan(7, MINUTE * 2, 3, 1, kinds));
        assert_eq!(short[..], long[..short.len()]);
    }

    #[test]
    fn each_kind_happens_with_one_server_or_with_a_cluster() {
        for &fault in Fault::value_variants() {
            assert!(fault.happens_with(false) || fault.happens_with(true), "{fault:?}");
        }
        assert!(!Fault::Failover.happens_with(true) && !Fault::SlotsMoved.happens_with(false));
    }

    #[test]
    fn an_hour_has_every_kind_and_spares_the_first_process() {
        let planned = plan(1, MINUTE * 60, 3, 1, Fault::value_variants());
        for kind in Fault::value_variants() {
            assert!(planned.iter().any(|planned| planned.fault == *kind), "{kind:?}");
        }
        let spared = planned.iter().filter(|planned| planned.process == 0);
        assert!(spared.clone().all(|planned| planned.fault != Fault::ProcessKilled));
        assert!(spared.count() > 0);
    }

    #[test]
    fn without_a_spared_process_every_one_is_killed() {
        let planned = plan(1, MINUTE * 10, 3, 0, &[Fault::ProcessKilled]);
        for process in 0..3 {
            assert!(planned.iter().any(|planned| planned.process == process), "{process}");
        }
    }

    #[test]
    fn a_search_drops_each_part_once() {
        let planned = plan(1, MINUTE, 3, 1, Fault::value_variants());
        let smaller = without_parts(&planned, 4);
        assert_eq!(smaller.len(), 4);
        for fault in &planned {
            let kept = smaller.iter().filter(|part| part.contains(fault)).count();
            assert_eq!(kept, 3, "{fault:?}");
        }
        assert_eq!(without_parts(&planned[..1], 2), [Vec::new()]);
    }
}
