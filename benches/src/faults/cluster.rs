//! A cluster of a campaign: three primaries with a replica each.
//!
//! With `redis.wait_replicas = 1`, what a client was told is on the replica too. So no failover may lose
//! it, not even one after a kill.

use std::collections::BTreeSet;

use fairlane_testkit::cluster::Cluster;
use tokio::time::{Instant, sleep};

use super::servers::{FOLLOWS, OPTIONS, arguments, follows, is_durable, late, reaches};
use super::worker::now_us;
use super::world::SHARDS;
use crate::error::BenchError;

const PRIMARIES: usize = 3;
const POLL: std::time::Duration = std::time::Duration::from_millis(50);
/// Longer than the longest freeze of a server, 3 s: a replica that has just begun a full
/// synchronisation must not take over.
const NODE_TIMEOUT_MS: &str = "4000";
/// Pipelines whose shards move.
const MOVED: [&str; 5] = ["plain", "keyed", "leased", "automations", "counters"];

/// The servers. Those at `n` and `n + 3` are the primary and the replica of the same slots, in the order
/// that the last failover left.
pub(crate) struct RedisCluster {
    pub(super) servers: Cluster,
}

impl RedisCluster {
    pub(super) async fn start() -> Self {
        let mut arguments = arguments(None);
        arguments.extend(["--cluster-node-timeout", NODE_TIMEOUT_MS].map(str::to_owned));
        let servers = Cluster::behind_proxies(OPTIONS, PRIMARIES, &arguments).await;
        Self { servers }
    }

    /// The places of the primaries.
    pub(super) async fn primaries(&self) -> Vec<usize> {
        let mut primaries = Vec::with_capacity(PRIMARIES);
        for place in 0..2 * PRIMARIES {
            if self.is_primary(place).await {
                primaries.push(place);
            }
        }
        primaries
    }

    async fn is_primary(&self, place: usize) -> bool {
        self.servers.ask(place, &["ROLE"]).await == "master"
    }

    /// The place of a primary. Waits until each one has a replica in step, all of them would survive a
    /// kill, and all agree on the slots.
    pub(super) async fn primary(&self, dice: u64) -> Result<usize, BenchError> {
        let until = Instant::now() + FOLLOWS;
        loop {
            let (is_settled, primaries) = (self.is_settled().await?, self.primaries().await);
            if is_settled && primaries.len() == PRIMARIES {
                let one = usize::try_from(dice % 3).unwrap_or_default();
                return Ok(primaries[one]);
            }
            late(until, "the cluster does not recover from the previous fault")?;
            sleep(POLL).await;
        }
    }

    async fn is_settled(&self) -> Result<bool, BenchError> {
        for one in 0..PRIMARIES {
            let pair = [one, one + PRIMARIES];
            let replica = match [self.is_primary(pair[0]).await, self.is_primary(pair[1]).await] {
                [true, false] => pair[1],
                [false, true] => pair[0],
                _ => return Ok(false),
            };
            for place in pair {
                let mut connection = self.servers.nodes[place].connection().await;
                if !is_durable(&mut connection).await? {
                    return Ok(false);
                }
                if place == replica && !follows(&mut connection).await? {
                    return Ok(false);
                }
            }
        }
        let mut views = BTreeSet::new();
        for place in 0..2 * PRIMARIES {
            let info = self.servers.ask(place, &["CLUSTER", "INFO"]).await;
            let healthy = ["cluster_state:ok\r", "cluster_slots_ok:16384\r"];
            if !healthy.iter().all(|state| info.contains(state)) {
                return Ok(false);
            }
            views.insert(owners(&self.servers.ask(place, &["CLUSTER", "NODES"]).await));
        }
        Ok(views.len() == 1)
    }

    /// A replica takes the place of its primary: on demand, or because the primary was killed.
    /// Returns when it began.
    pub(super) async fn fail_over(&mut self, dice: u64) -> Result<u64, BenchError> {
        let old = self.primary(dice).await?;
        let started = now_us();
        let new = (old + PRIMARIES) % (2 * PRIMARIES);
        let is_planned = dice & 1024 == 0;
        if is_planned {
            self.servers.tell(new, &["CLUSTER", "FAILOVER"]).await;
        } else {
            self.servers.nodes[old].kill9();
        }
        let until = Instant::now() + FOLLOWS;
        while !self.is_primary(new).await {
            late(until, "no replica takes the place of its primary")?;
            sleep(POLL).await;
        }
        if !is_planned {
            tokio::task::block_in_place(|| self.servers.nodes[old].restart());
        }
        Ok(started)
    }

    /// Moves the slot of a shard to another primary, with all its keys, and waits until the replica of
    /// that primary has them. Returns when it began.
    pub(super) async fn move_shard(&mut self, dice: u64) -> Result<u64, BenchError> {
        self.primary(dice).await?;
        let started = now_us();
        let pick = |count: usize, shift: u32| {
            usize::try_from((dice >> shift) % count as u64).unwrap_or_default()
        };
        let (pipeline, shard) = (MOVED[pick(MOVED.len(), 8)], pick(SHARDS.into(), 16));
        let slot = self.servers.slot_of(&format!("{{{pipeline}:{shard}}}")).await;
        let primaries = self.primaries().await;
        let mut from = primaries[0];
        for &primary in &primaries {
            if self.holds(primary, slot).await {
                from = primary;
            }
        }
        let others: Vec<_> = primaries.into_iter().filter(|&primary| primary != from).collect();
        let to = others[pick(others.len(), 24)];
        self.servers.move_slot(slot, from, to).await;
        let replica = (to + PRIMARIES) % (2 * PRIMARIES);
        let mut primary = self.servers.nodes[to].connection().await;
        let mut replica = self.servers.nodes[replica].connection().await;
        reaches(&mut replica, &mut primary, Instant::now() + FOLLOWS).await?;
        Ok(started)
    }

    /// Whether a primary has this slot.
    async fn holds(&self, primary: usize, slot: u16) -> bool {
        let nodes = self.servers.ask(primary, &["CLUSTER", "NODES"]).await;
        let own = nodes.lines().find(|line| line.contains("myself"));
        own.is_some_and(|line| {
            line.split(' ').skip(8).filter(|range| !range.starts_with('[')).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let number = |text: &str| text.parse::<u16>().unwrap_or(u16::MAX);
                (number(first)..=number(last)).contains(&slot)
            })
        })
    }
}

/// The slots of each primary, as a node names them in `CLUSTER NODES`.
fn owners(nodes: &str) -> BTreeSet<String> {
    let primaries = nodes.lines().filter(|line| line.contains("master") && !line.contains("fail"));
    primaries
        .map(|line| {
            let words: Vec<_> = line.split(' ').collect();
            let slots = words.iter().skip(8).filter(|range| !range.starts_with('['));
            [words.first().copied().unwrap_or_default()]
                .into_iter()
                .chain(slots.copied())
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_name_the_same_slots_agree() {
        let line = |flags: &str, end: &str| {
            format!("e1 127.0.0.1:1@2 {flags} - 0 1 2 connected 0-99 101{end}\n")
        };
        let replica = "e2 127.0.0.1:3@4 slave e1 0 1 2 connected\n";
        let one = owners(&(line("myself,master", " [7->-e3]") + replica));
        assert_eq!(one, BTreeSet::from(["e1 0-99 101".to_owned()]));
        assert_eq!(one, owners(&line("master", "")));
        assert_ne!(one, owners(&line("master", " 103")));
        assert!(owners(&line("master,fail", "")).is_empty());
    }
}
