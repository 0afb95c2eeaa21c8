//! The cluster part of a [`Link`]: it sends the commands of one write to several nodes, and keeps
//! the distribution of slots up to date.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::{join_all, select_ok};
use redis::{Pipeline, Value};
use tokio::time::Instant;
use tracing::info;

use super::error::RedisError;
use super::link::{Answers, Link};
use super::node::{Node, is_move, server_error};
use super::route::{Destination, Unit, units};
use super::target::{address, connect_error};
use super::topology::{self, SlotRange, Topology};

/// Minimum time between two queries for the topology.
const LOOK: Duration = Duration::from_millis(100);
/// Number of nodes asked concurrently, because one may be frozen.
const LOOK_AT: usize = 3;

impl Link {
    /// Sends the commands to their nodes; commands that a node redirects are sent once more.
    pub(super) async fn run_cluster(
        &self,
        topology: Arc<Topology>,
        pipe: &Pipeline,
        lasting: bool,
    ) -> Result<Answers<Value>, RedisError> {
        let units = units(pipe);
        let all: Vec<&Unit> = units.iter().collect();
        let mut answers: Vec<Option<Result<Value, RedisError>>> = vec![None; pipe.len()];
        self.round(&topology, (pipe, lasting), &all, &mut answers).await;
        let moved: Vec<&Unit> = moved(&units, &answers);
        if !moved.is_empty() {
            let hint = answers.iter().flatten().flatten().find_map(destination);
            let topology = self.look_again(&topology, hint).await;
            for unit in &moved {
                answers[unit.commands.clone()].fill(None);
            }
            self.round(&topology, (pipe, lasting), &moved, &mut answers).await;
        }
        let answers: Answers<Value> =
            answers.into_iter().map(|answer| answer.unwrap_or_else(|| Ok(not_served()))).collect();
        let doubt = |answer: &Result<Value, RedisError>| match answer {
            Ok(Value::ServerError(error)) => is_move(error) || error.code() == "READONLY",
            Ok(_) => false,
            Err(_) => true,
        };
        if answers.iter().any(doubt) {
            self.mark_stale();
        }
        match answers.iter().find_map(|answer| answer.as_ref().err()) {
            Some(error) if answers.iter().all(Result::is_err) => Err(error.clone()),
            _ => Ok(answers),
        }
    }

    /// Sends the units to their nodes concurrently, and puts the answers in the order of the
    /// commands.
    async fn round(
        &self,
        topology: &Topology,
        (pipe, lasting): (&Pipeline, bool),
        units: &[&Unit],
        answers: &mut [Option<Result<Value, RedisError>>],
    ) {
        let commands: Vec<&redis::Cmd> = pipe.cmd_iter().collect();
        let mut shares: Vec<(Pipeline, Vec<&Unit>)> = Vec::new();
        shares.resize_with(topology.nodes().len(), Default::default);
        for &unit in units {
            let places = match unit.place {
                Destination::Everywhere => 0..shares.len(),
                Destination::Slot(slot) => topology.holder(slot).map_or(0..0, |at| at..at + 1),
            };
            for (pipe, sent) in &mut shares[places] {
                for &command in &commands[unit.commands.clone()] {
                    pipe.add_command(command.clone());
                }
                sent.push(unit);
            }
        }
        let sending = topology.nodes().iter().zip(&shares).map(async |(node, (pipe, units))| {
            if units.is_empty() {
                return Ok(Vec::new());
            }
            let begun = Instant::now();
            let sent = self.send(node, (pipe, lasting), units).await;
            node.latency().observe_wait(begun.elapsed());
            sent
        });
        for (answer, (_, sent)) in join_all(sending).await.into_iter().zip(&shares) {
            let mut values = answer.map(Vec::into_iter);
            for at in sent.iter().flat_map(|unit| unit.commands.clone()) {
                let value = match &mut values {
                    Ok(values) => values.next().map(Ok),
                    Err(error) => Some(Err(error.clone())),
                };
                // Several primaries answer: the first refusal or error counts, else the first
                // answer.
                let better = value.as_ref().is_none_or(is_good);
                if answers[at].as_ref().is_none_or(|first| is_good(first) && !better) {
                    answers[at] = value;
                }
            }
        }
    }

    /// Sends commands to one node. Commands for a slot that is being migrated there are not sent.
    pub(super) async fn send(
        &self,
        node: &Node,
        (pipe, lasting): (&Pipeline, bool),
        units: &[&Unit],
    ) -> Result<Vec<Value>, RedisError> {
        let connected = node.connected().await?;
        self.sent.fetch_add(pipe.len() as u64, Ordering::Relaxed);
        let barred =
            |unit: &Unit| matches!(unit.place, Destination::Slot(slot) if connected.bars(slot));
        let barred: Vec<bool> = units.iter().map(|unit| barred(unit)).collect();
        if !barred.contains(&true) {
            return node.send(connected, pipe, lasting).await;
        }
        let mut commands = pipe.cmd_iter();
        let (mut allowed, mut kept) = (Pipeline::new(), Vec::with_capacity(pipe.len()));
        for (unit, barred) in units.iter().zip(barred) {
            for command in commands.by_ref().take(unit.commands.len()) {
                kept.push(!barred);
                if !barred {
                    allowed.add_command(command.clone());
                }
            }
        }
        let mut values = if allowed.is_empty() {
            Vec::new().into_iter()
        } else {
            node.send(connected, &allowed, lasting).await?.into_iter()
        };
        let answer = |sent| if sent { values.next().unwrap_or(Value::Nil) } else { on_the_move() };
        Ok(kept.into_iter().map(answer).collect())
    }
}

/// Queries for the topology.
impl Link {
    pub(super) fn current(&self) -> Option<Arc<Topology>> {
        self.topology.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn mark_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    /// The known topology. If it is stale, the first caller asks for it again, and the others use
    /// the stale one meanwhile.
    pub(super) async fn topology(&self) -> Result<Arc<Topology>, RedisError> {
        match self.current() {
            Some(current) if !self.wiring.cluster || !self.stale.load(Ordering::Relaxed) => {
                Ok(current)
            }
            Some(current) => {
                if let Ok(mut looked) = self.looking.try_lock()
                    && looked.is_none_or(|at| at.elapsed() >= LOOK)
                    && let Ok(found) = self.look(&mut looked, None).await
                {
                    return Ok(found);
                }
                Ok(current)
            }
            None => {
                let mut looked = self.looking.lock().await;
                match self.current() {
                    Some(current) => Ok(current),
                    None => self.look(&mut looked, None).await,
                }
            }
        }
    }

    /// The topology after `known` turned out to be wrong; `known` again if no node answers.
    async fn look_again(
        &self,
        known: &Arc<Topology>,
        hint: Option<(String, u16)>,
    ) -> Arc<Topology> {
        let mut looked = self.looking.lock().await;
        match self.current() {
            // Another caller has asked since.
            Some(current) if !Arc::ptr_eq(&current, known) => return current,
            _ => {}
        }
        if let Some(at) = *looked {
            tokio::time::sleep_until(at + LOOK).await;
        }
        self.look(&mut looked, hint).await.unwrap_or_else(|_| Arc::clone(known))
    }

    /// Asks the hinted node, then the others, a few concurrently.
    async fn look(
        &self,
        looked: &mut Option<Instant>,
        hint: Option<(String, u16)>,
    ) -> Result<Arc<Topology>, RedisError> {
        // Reset first: a problem found from now on marks the topology as stale again.
        self.stale.store(false, Ordering::Relaxed);
        let hinted = hint.map(|(host, port)| vec![self.target.node(&host, port)]);
        let others = self.target.candidates();
        let mut failure = None;
        for clients in hinted.iter().map(Vec::as_slice).chain(others.chunks(LOOK_AT)) {
            match select_ok(clients.iter().map(|client| Box::pin(ask(client)))).await {
                Ok((ranges, _)) => {
                    *looked = Some(Instant::now());
                    return Ok(self.adopt(&ranges));
                }
                Err(error) => failure = Some(error),
            }
        }
        *looked = Some(Instant::now());
        self.mark_stale();
        Err(failure.unwrap_or_else(|| no_slots(self.target.client())))
    }

    /// Makes these ranges the topology. Keeps connections to nodes that still serve the same
    /// shards.
    fn adopt(&self, ranges: &[SlotRange]) -> Arc<Topology> {
        let old = self.current();
        let topology = Topology::cluster(ranges, |host, port, holds| {
            let slots = self.wiring.shards.iter().map(|(slot, _)| *slot);
            let slots: Vec<u16> = slots.filter(|&slot| holds(slot)).collect();
            let client = self.target.node(host, port);
            let name = address(&client);
            let known = old.iter().flat_map(|old| old.nodes()).find(|node| node.name() == name);
            known.map_or_else(
                || Arc::new(Node::new(client, slots.clone(), Arc::clone(&self.wiring))),
                |n| n.holding(slots.clone()),
            )
        });
        let names = |topology: &Topology| -> Vec<String> {
            topology.nodes().iter().map(|node| node.name().to_owned()).collect()
        };
        let primaries = names(&topology);
        if old.is_some_and(|old| names(&old) != primaries) {
            info!(?primaries, "the cluster has changed");
        }
        self.target.learn(topology.nodes().iter().map(|node| node.client().clone()).collect());
        let topology = Arc::new(topology);
        *self.topology.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::clone(&topology));
        topology
    }
}

/// The redirected units that may be sent again. A unit is left out if another one of its slot was
/// refused for a different reason: it must not overtake that one.
fn moved<'a>(units: &'a [Unit], answers: &[Option<Result<Value, RedisError>>]) -> Vec<&'a Unit> {
    let refused = |unit: &Unit, wanted: fn(&str) -> bool| {
        let mut errors = answers[unit.commands.clone()].iter().flatten().flatten();
        errors.any(|value| server_error(value).is_some_and(|error| wanted(error.code())))
    };
    let held: Vec<Destination> = units
        .iter()
        .filter(|unit| refused(unit, |code| matches!(code, "ASK" | "TRYAGAIN" | "CLUSTERDOWN")))
        .map(|unit| unit.place)
        .collect();
    let moved = |unit: &&Unit| refused(unit, |code| code == "MOVED") && !held.contains(&unit.place);
    units.iter().filter(moved).collect()
}

/// The destination in `MOVED 1234 host:port`, if it has one.
fn destination(value: &Value) -> Option<(String, u16)> {
    let error = server_error(value).filter(|error| error.code() == "MOVED")?;
    let (host, port) = error.details()?.split_once(' ')?.1.trim().rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?)).filter(|(host, _)| !matches!(&**host, "" | "?"))
}

fn is_good(answer: &Result<Value, RedisError>) -> bool {
    matches!(answer, Ok(value) if server_error(value).is_none())
}

/// The answer of a server for a slot without a primary.
fn not_served() -> Value {
    refusal("-CLUSTERDOWN Hash slot not served\r\n")
}

/// The answer of a server for a slot that is being migrated.
fn on_the_move() -> Value {
    refusal("-TRYAGAIN The slot is on the move\r\n")
}

fn refusal(line: &str) -> Value {
    redis::parse_redis_value(line.as_bytes()).unwrap_or(Value::Nil)
}

async fn ask(client: &redis::Client) -> Result<Vec<SlotRange>, RedisError> {
    match topology::ask(client).await {
        Ok(ranges) if ranges.is_empty() => Err(no_slots(client)),
        asked => asked.map_err(|source| ask_error(client, source)),
    }
}

fn no_slots(client: &redis::Client) -> RedisError {
    let message = "CLUSTERDOWN it knows of no node that holds a slot".to_owned();
    RedisError::Refused { target: address(client), command: "CLUSTER SLOTS", message }
}

fn ask_error(client: &redis::Client, source: redis::RedisError) -> RedisError {
    let target = address(client);
    match source.code() {
        Some(code) => {
            let remedy = "for a server by itself write redis:// in redis.url";
            let message = format!("{code} {} ({remedy})", source.detail().unwrap_or_default());
            RedisError::Refused { target, command: "CLUSTER SLOTS", message }
        }
        None => connect_error(target, client, source),
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::ShardKeys;
    use super::super::target::Target;
    use super::*;
    use crate::id::{PipelineName, ShardCount};

    /// Its calls are quick, and then one ends with a timeout.
    fn time_out(node: &Node) {
        for _ in 0..100 {
            node.latency().observe_wait(Duration::from_millis(1));
        }
        node.latency().observe_wait(Duration::from_secs(3));
    }

    #[test]
    fn a_slow_primary_does_not_lower_the_share_of_the_work_for_the_others() {
        let target = Target::new("redis+cluster://127.0.0.1:1,127.0.0.1:2").unwrap();
        let (name, count) = (PipelineName::parse("test").unwrap(), ShardCount::new(8).unwrap());
        let keys = |shard| ShardKeys::new(target.prefix(), &name, shard);
        let shards: Vec<ShardKeys> = count.shards().map(keys).collect();
        let link = Link::new(target.clone(), shards.clone(), 1_000, Duration::from_secs(1));
        assert!(link.share(&shards) > 0.99, "no primary is known yet");

        let range = |from, to, port| SlotRange { from, to, host: "127.0.0.1".to_owned(), port };
        let topology = link.adopt(&[range(0, 8_191, 1), range(8_192, 16_383, 2)]);
        let (first, second): (Vec<_>, Vec<_>) =
            shards.iter().cloned().partition(|keys| keys.slot() < 8_192);
        time_out(&topology.nodes()[0]);
        let [all, slow, other] = [&shards, &first, &second].map(|shards| link.share(shards));
        assert!(all > 0.99 && slow < 0.5 && other > 0.99, "{all}, {slow}, {other}");
        time_out(&topology.nodes()[1]);
        assert!(link.share(&shards) < 0.5, "all are slow");
    }
}
