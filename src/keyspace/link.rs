//! A link: how one part of the program speaks to Redis, be it one server or a cluster.
//!
//! A link has one [`Node`] per server, and so one connection, and knows which slot is where. Commands
//! of one write are sent to their nodes at once and the answers put back in order; those of one
//! slot stay in their order. A server by itself is the topology with one node.
//!
//! What a cluster answers: `MOVED` did not run; the topology is asked for again and the command
//! sent once more. `ASK`, `TRYAGAIN` (the slot is under way) and `CLUSTERDOWN` did not run; they are
//! refusals that pass. A connection that breaks leaves open what ran. After each of them the
//! topology is asked for again, by one caller at a time and not more often than every 100 ms.
//!
//! The link routes by itself because no client that reconnects by itself may run scripts: see
//! [`super`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{AsyncConnectionConfig, Pipeline, Value};
use tokio::time::Instant;
use tracing::{info, warn};

use super::error::StoreError;
use super::keys::ShardKeys;
use super::node::{self, Node, Wiring, is_move, server_error};
use super::reply::ReplyError;
use super::route::{Place, Unit, place, units};
use super::scripts::Call;
use super::target::{CONNECT_TIMEOUT, Target, address, connect_error};
use super::topology::{self, SlotRange, Topology};
use crate::metrics;

/// The topology is asked for at most this often.
const LOOK: Duration = Duration::from_millis(100);

/// What came back for each command or call of a write.
type Answers<T> = Vec<Result<T, StoreError>>;

/// How one part of the program speaks to Redis. Calls from many tasks share its connections and
/// are pipelined by them.
#[derive(Debug)]
pub struct Link {
    target: Target,
    wiring: Wiring,
    /// `None` before a cluster was first asked.
    topology: RwLock<Option<Arc<Topology>>>,
    /// Something did not fit the topology.
    stale: AtomicBool,
    /// When the topology was last asked for.
    looking: tokio::sync::Mutex<Option<Instant>>,
    /// Commands sent, for the figures of `fairlane bench`.
    sent: AtomicU64,
}

impl Link {
    /// A link that serves the scripts of `shards`. Connects at the first call.
    ///
    /// `response_timeout` bounds every call; it must be longer than a blocking command blocks.
    #[must_use]
    pub fn new(
        target: Target,
        shards: Vec<ShardKeys>,
        slice_us: u64,
        response_timeout: Duration,
    ) -> Self {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(response_timeout))
            .set_pipeline_buffer_size(1_024);
        let cluster = target.is_cluster();
        let with_slot = |keys: ShardKeys| (keys.slot(), keys);
        let shards = shards.into_iter().map(with_slot).collect();
        let alone = || Arc::new(Topology::single(Node::new(target.client().clone(), Vec::new())));
        Self {
            topology: RwLock::new((!cluster).then(alone)),
            target,
            wiring: Wiring { config, shards, slice_us, scripts: true, cluster },
            stale: AtomicBool::new(false),
            looking: tokio::sync::Mutex::new(None),
            sent: AtomicU64::new(0),
        }
    }

    /// A link that never runs a script, and takes servers of any version.
    pub(super) fn plain(target: Target, response_timeout: Duration) -> Self {
        let mut link = Self::new(target, Vec::new(), 0, response_timeout);
        link.wiring.scripts = false;
        link
    }

    /// Where it leads.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Commands sent so far.
    #[must_use]
    pub fn commands_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Calls one script.
    ///
    /// # Errors
    /// [`StoreError::Unknown`] leaves open whether it ran.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether the script ran.
    pub async fn call<C: Call>(&self, call: &C) -> Result<C::Reply, StoreError> {
        let mut replies = self.call_all(std::slice::from_ref(call)).await?;
        replies.pop().unwrap_or_else(|| {
            Err(self.misread(C::NAME, ReplyError::unexpected("one reply", "none")))
        })
    }

    /// Calls one script several times in one write; of the calls in one slot, a server runs them in
    /// order.
    ///
    /// # Errors
    /// The outer error means that no answer came for any. An inner one concerns its call alone; of
    /// those to a node that gave no answer, each has it, and is [`StoreError::Unknown`] in its own
    /// right.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open which calls ran.
    pub async fn call_all<C: Call>(&self, calls: &[C]) -> Result<Answers<C::Reply>, StoreError> {
        let mut pipe = Pipeline::with_capacity(calls.len());
        for call in calls {
            pipe.add_command(call.command());
        }
        let sent = Instant::now();
        let mut values = self.run_each(&pipe).await?;
        let missing: Vec<usize> =
            (0..values.len()).filter(|&at| is_noscript(&values[at])).collect();
        if !missing.is_empty() {
            // The server forgot its scripts (SCRIPT FLUSH) or is another one: recover, load, resend
            // what did not run.
            warn!(script = C::NAME, "the server does not know the script; loading all again");
            let mut again = Pipeline::with_capacity(missing.len());
            for &at in &missing {
                let command = calls[at].command();
                self.close_holder(place(&command));
                again.add_command(command);
            }
            for (&at, value) in missing.iter().zip(self.run_each(&again).await?) {
                values[at] = value;
            }
        }
        metrics::script_seconds(C::NAME, sent.elapsed());
        let read = |value| match value {
            Value::ServerError(error) => Err(self.refused(C::NAME, &error)),
            value => C::reply(value).map_err(|source| self.misread(C::NAME, source)),
        };
        Ok(values.into_iter().map(|value| value.and_then(read)).collect())
    }

    /// Sends plain commands in one write. A command without a key is asked of every primary; the
    /// answer is the first refusal among theirs, or that of the first. An element of the answer may
    /// be [`Value::ServerError`].
    ///
    /// # Errors
    /// When no answer came for one of them.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open which commands ran.
    pub async fn run(&self, pipe: &Pipeline) -> Result<Vec<Value>, StoreError> {
        self.run_each(pipe).await?.into_iter().collect()
    }

    /// Sends plain commands in one write, see [`Self::run`]; each has an answer or an error of its
    /// own, so that a node that is away concerns nobody else's.
    ///
    /// # Errors
    /// When no answer came for any.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open which commands ran.
    pub async fn run_each(&self, pipe: &Pipeline) -> Result<Answers<Value>, StoreError> {
        let topology = self.topology().await?;
        if self.wiring.cluster {
            return self.run_cluster(topology, pipe).await;
        }
        let node = &topology.nodes()[0];
        self.sent.fetch_add(pipe.len() as u64, Ordering::Relaxed);
        let values = node.send(&node.connected(&self.wiring).await?, pipe).await?;
        if values.iter().filter_map(server_error).any(|error| error.code() == "READONLY") {
            // A replica now; its name may lead to the new primary.
            node.close();
        }
        Ok(values.into_iter().map(Ok).collect())
    }

    /// Sends plain commands in one write; the first that is refused makes the whole an error.
    ///
    /// # Errors
    /// When no answer came or the server refused one.
    pub(crate) async fn run_checked(
        &self,
        name: &'static str,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        let values = self.run(pipe).await?;
        match values.iter().find_map(server_error) {
            Some(error) => Err(self.refused(name, error)),
            None => Ok(values),
        }
    }

    /// Sends one plain command.
    ///
    /// # Errors
    /// When no answer came or the server refused.
    pub(crate) async fn command(
        &self,
        name: &'static str,
        command: redis::Cmd,
    ) -> Result<Value, StoreError> {
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command);
        match self.run(&pipe).await?.pop() {
            Some(Value::ServerError(error)) => Err(self.refused(name, &error)),
            value => Ok(value.unwrap_or(Value::Nil)),
        }
    }

    /// Asks every primary the same; one answer each.
    ///
    /// # Errors
    /// When one does not answer or refuses.
    pub(crate) async fn ask_every(
        &self,
        name: &'static str,
        command: &redis::Cmd,
    ) -> Result<Vec<Value>, StoreError> {
        let topology = self.topology().await?;
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command.clone());
        let asked = topology.nodes().iter().map(|node| self.send(node, &pipe, &[]));
        let mut answers = Vec::with_capacity(topology.nodes().len());
        for answer in join_all(asked).await {
            let answer = answer.inspect_err(|_| self.mark_stale())?.pop();
            match answer.unwrap_or(Value::Nil) {
                Value::ServerError(error) => return Err(self.refused(name, &error)),
                value => answers.push(value),
            }
        }
        Ok(answers)
    }

    /// Every primary as a target of its own, with its name and one of the slots it holds.
    pub(super) async fn primaries(&self) -> Result<Vec<(Target, Option<u16>)>, StoreError> {
        let topology = self.topology().await?;
        let held = |place| (0..=u16::MAX >> 2).find(|&slot| topology.holder(slot) == Some(place));
        let nodes = topology.nodes().iter().enumerate();
        Ok(nodes.map(|(at, node)| (Target::alone(node.client().clone()), held(at))).collect())
    }

    /// A number for the server that holds a shard, as far as known: calls for shards of one number
    /// share the fate of one server.
    pub(crate) fn holder(&self, keys: &ShardKeys) -> usize {
        if !self.wiring.cluster {
            return 0;
        }
        self.current().and_then(|now| now.holder(keys.slot())).unwrap_or(0)
    }

    pub(crate) fn refused(&self, command: &'static str, error: &redis::ServerError) -> StoreError {
        match node::refused(&self.target.to_string(), command, error) {
            StoreError::Refused { target, message, .. }
                if is_move(error) && !self.wiring.cluster =>
            {
                let remedy = "this is a node of a cluster, write redis+cluster:// in redis.url";
                StoreError::Refused { target, command, message: format!("{message} ({remedy})") }
            }
            refused => refused,
        }
    }

    #[expect(clippy::unused_self, reason = "reads like its siblings")]
    pub(crate) fn misread(&self, command: &'static str, source: ReplyError) -> StoreError {
        node::misread(command, source)
    }

    /// An answer as what it should be.
    pub(super) fn read<T: redis::FromRedisValue>(
        &self,
        name: &'static str,
        value: Value,
    ) -> Result<T, StoreError> {
        redis::from_redis_value(value).map_err(|error| {
            self.misread(name, ReplyError::unexpected("another shape", &error.to_string()))
        })
    }

    /// Gives the connections up; the next call makes new ones.
    pub(crate) fn close(&self) {
        self.current().iter().flat_map(|now| now.nodes()).for_each(|node| node.close());
    }

    fn close_holder(&self, place: Place) {
        let Some(topology) = self.current() else { return };
        match place {
            Place::Slot(slot) => {
                if let Some(at) = topology.holder(slot) {
                    topology.nodes()[at].close();
                }
            }
            Place::Everywhere => self.close(),
        }
    }
}

impl Link {
    /// Sends the commands to where they belong, those that were moved once more.
    async fn run_cluster(
        &self,
        topology: Arc<Topology>,
        pipe: &Pipeline,
    ) -> Result<Answers<Value>, StoreError> {
        let units = units(pipe);
        let all: Vec<&Unit> = units.iter().collect();
        let mut answers: Vec<Option<Result<Value, StoreError>>> = vec![None; pipe.len()];
        self.round(&topology, pipe, &all, &mut answers).await;
        let moved: Vec<&Unit> = moved(&units, &answers);
        if !moved.is_empty() {
            let hint = answers.iter().flatten().flatten().find_map(destination);
            let topology = self.look_again(&topology, hint).await;
            for unit in &moved {
                answers[unit.commands.clone()].fill(None);
            }
            self.round(&topology, pipe, &moved, &mut answers).await;
        }
        let answers: Answers<Value> =
            answers.into_iter().map(|answer| answer.unwrap_or_else(|| Ok(not_served()))).collect();
        let doubt = |answer: &Result<Value, StoreError>| match answer {
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

    /// Sends the units to their nodes, all at once, and puts the answers in their places.
    async fn round(
        &self,
        topology: &Topology,
        pipe: &Pipeline,
        units: &[&Unit],
        answers: &mut [Option<Result<Value, StoreError>>],
    ) {
        let commands: Vec<&redis::Cmd> = pipe.cmd_iter().collect();
        let mut shares: Vec<(Pipeline, Vec<&Unit>)> = Vec::new();
        shares.resize_with(topology.nodes().len(), Default::default);
        for &unit in units {
            let places = match unit.place {
                Place::Everywhere => 0..shares.len(),
                Place::Slot(slot) => topology.holder(slot).map_or(0..0, |at| at..at + 1),
            };
            for (pipe, sent) in &mut shares[places] {
                for &command in &commands[unit.commands.clone()] {
                    pipe.add_command(command.clone());
                }
                sent.push(unit);
            }
        }
        let sending = topology.nodes().iter().zip(&shares).map(async |(node, (pipe, units))| {
            if units.is_empty() { Ok(Vec::new()) } else { self.send(node, pipe, units).await }
        });
        for (answer, (_, sent)) in join_all(sending).await.into_iter().zip(&shares) {
            let mut values = answer.map(Vec::into_iter);
            for at in sent.iter().flat_map(|unit| unit.commands.clone()) {
                let value = match &mut values {
                    Ok(values) => values.next().map(Ok),
                    Err(error) => Some(Err(error.clone())),
                };
                // Of several, the first refusal or error counts, else the first.
                let better = value.as_ref().is_none_or(is_good);
                if answers[at].as_ref().is_none_or(|first| is_good(first) && !better) {
                    answers[at] = value;
                }
            }
        }
    }

    /// Sends commands to one node. Those of a slot that is on the move there are not sent.
    async fn send(
        &self,
        node: &Node,
        pipe: &Pipeline,
        units: &[&Unit],
    ) -> Result<Vec<Value>, StoreError> {
        let connected = node.connected(&self.wiring).await?;
        self.sent.fetch_add(pipe.len() as u64, Ordering::Relaxed);
        let barred = |unit: &&Unit| matches!(unit.place, Place::Slot(slot) if connected.bars(slot));
        if !units.iter().any(barred) {
            return node.send(&connected, pipe).await;
        }
        let mut commands = pipe.cmd_iter();
        let (mut allowed, mut kept) = (Pipeline::new(), Vec::with_capacity(pipe.len()));
        for unit in units {
            for command in commands.by_ref().take(unit.commands.len()) {
                kept.push(!barred(unit));
                if !barred(unit) {
                    allowed.add_command(command.clone());
                }
            }
        }
        let mut values = if allowed.is_empty() {
            Vec::new().into_iter()
        } else {
            node.send(&connected, &allowed).await?.into_iter()
        };
        let answer = |sent| if sent { values.next().unwrap_or(Value::Nil) } else { on_the_move() };
        Ok(kept.into_iter().map(answer).collect())
    }
}

/// The topology.
impl Link {
    fn current(&self) -> Option<Arc<Topology>> {
        self.topology.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn mark_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    /// The topology as known. One that is in doubt is asked for again by whoever comes first; the
    /// others go on with it meanwhile.
    async fn topology(&self) -> Result<Arc<Topology>, StoreError> {
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

    /// The topology after `known` has turned out to be wrong; `known` again if nobody tells.
    async fn look_again(
        &self,
        known: &Arc<Topology>,
        hint: Option<(String, u16)>,
    ) -> Arc<Topology> {
        let mut looked = self.looking.lock().await;
        match self.current() {
            // Somebody else has looked since.
            Some(current) if !Arc::ptr_eq(&current, known) => return current,
            _ => {}
        }
        if let Some(at) = *looked {
            tokio::time::sleep_until(at + LOOK).await;
        }
        self.look(&mut looked, hint).await.unwrap_or_else(|_| Arc::clone(known))
    }

    /// Asks the nodes one after the other, the hinted one first.
    async fn look(
        &self,
        looked: &mut Option<Instant>,
        hint: Option<(String, u16)>,
    ) -> Result<Arc<Topology>, StoreError> {
        // First: trouble met from now on is news.
        self.stale.store(false, Ordering::Relaxed);
        let hinted = hint.map(|(host, port)| self.target.node(&host, port));
        let mut failure = None;
        for client in hinted.into_iter().chain(self.target.candidates()) {
            match topology::ask(&client).await {
                Ok(ranges) if !ranges.is_empty() => {
                    *looked = Some(Instant::now());
                    return Ok(self.adopt(&ranges));
                }
                Ok(_) => failure = failure.or_else(|| Some(no_slots(&client))),
                Err(source) => failure = Some(ask_error(&client, source)),
            }
        }
        *looked = Some(Instant::now());
        self.mark_stale();
        Err(failure.unwrap_or_else(|| no_slots(self.target.client())))
    }

    /// Makes what was found the topology. Connections stay where the shards behind them do.
    fn adopt(&self, ranges: &[SlotRange]) -> Arc<Topology> {
        let old = self.current();
        let topology = Topology::cluster(ranges, |host, port, holds| {
            let slots = self.wiring.shards.iter().map(|(slot, _)| *slot);
            let slots: Vec<u16> = slots.filter(|&slot| holds(slot)).collect();
            let client = self.target.node(host, port);
            let name = address(&client);
            let known = old.iter().flat_map(|old| old.nodes()).find(|node| node.name() == name);
            known.map_or_else(
                || Arc::new(Node::new(client, slots.clone())),
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

/// The units that were moved and may be sent again: unless another of the slot was held back for
/// another reason, which must not be overtaken.
fn moved<'a>(units: &'a [Unit], answers: &[Option<Result<Value, StoreError>>]) -> Vec<&'a Unit> {
    let refused = |unit: &Unit, wanted: fn(&str) -> bool| {
        let mut errors = answers[unit.commands.clone()].iter().flatten().flatten();
        errors.any(|value| server_error(value).is_some_and(|error| wanted(error.code())))
    };
    let held: Vec<Place> = units
        .iter()
        .filter(|unit| refused(unit, |code| matches!(code, "ASK" | "TRYAGAIN" | "CLUSTERDOWN")))
        .map(|unit| unit.place)
        .collect();
    let moved = |unit: &&Unit| refused(unit, |code| code == "MOVED") && !held.contains(&unit.place);
    units.iter().filter(moved).collect()
}

/// Where `MOVED 1234 host:port` points to, if it is said.
fn destination(value: &Value) -> Option<(String, u16)> {
    let error = server_error(value).filter(|error| error.code() == "MOVED")?;
    let (host, port) = error.details()?.split_once(' ')?.1.trim().rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?)).filter(|(host, _)| !matches!(&**host, "" | "?"))
}

fn is_good(answer: &Result<Value, StoreError>) -> bool {
    matches!(answer, Ok(value) if server_error(value).is_none())
}

fn is_noscript(answer: &Result<Value, StoreError>) -> bool {
    let error = answer.as_ref().ok().and_then(server_error);
    error.is_some_and(|error| error.code() == "NOSCRIPT")
}

/// As a server answers for a slot that nobody holds.
fn not_served() -> Value {
    refusal("-CLUSTERDOWN Hash slot not served\r\n")
}

/// As a server answers for a slot of which it has a part.
fn on_the_move() -> Value {
    refusal("-TRYAGAIN The slot is on the move\r\n")
}

fn refusal(line: &str) -> Value {
    redis::parse_redis_value(line.as_bytes()).unwrap_or(Value::Nil)
}

fn no_slots(client: &redis::Client) -> StoreError {
    let message = "CLUSTERDOWN it knows of no node that holds a slot".to_owned();
    StoreError::Refused { target: address(client), command: "CLUSTER SLOTS", message }
}

fn ask_error(client: &redis::Client, source: redis::RedisError) -> StoreError {
    let target = address(client);
    match source.code() {
        Some(code) => {
            let remedy = "for a server by itself write redis:// in redis.url";
            let message = format!("{code} {} ({remedy})", source.detail().unwrap_or_default());
            StoreError::Refused { target, command: "CLUSTER SLOTS", message }
        }
        None => connect_error(target, client, source),
    }
}
