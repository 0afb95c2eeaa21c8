//! Findings about the whole installation: Redis, the processes, MongoDB, other servers, the bus.

use std::collections::{BTreeMap, BTreeSet};

use super::facts::RedisFacts;
use super::find::NAMED;
use super::text::{count, duration};
use super::{Code, Facts, Finding, PipelineState};
use crate::id::PipelineName;
use crate::presence::{BusState, BusView, Process};
use crate::redis::{ServerInfo, StreamKind, StreamView};

/// Percent of the maximum memory from which memory in use is a finding.
pub(crate) const MEMORY_PERCENT: u64 = 80;
/// The same from which Redis counts as full.
const FULL_PERCENT: u64 = 99;
/// A replica confirms every second. One that was not heard for this long is a finding.
const REPLICA_SILENT_SECONDS: u64 = 10;
/// Milliseconds. Redis is slow if the best of a few round trips takes longer.
const SLOW_MS: u64 = 250;
/// Milliseconds. Entries that have waited on the bus for longer are a finding.
const LAG_MS: u64 = 10_000;
/// Milliseconds. A process that has just started does not read the bus yet.
const STARTING_MS: u64 = 5_000;
/// A bus that cannot be read for this long is a finding. A shorter break is usual when its leader
/// changes.
const BUS_AWAY_MS: u64 = 2_000;

/// `others_answer`: the error concerns only some primaries of a cluster.
pub(super) fn unavailable(error: &str, others_answer: bool) -> Finding {
    let (what, whose) = if others_answer {
        ("Primaries of Redis do not answer", " for their bots")
    } else {
        ("Redis does not answer", "")
    };
    Finding::new(
        Code::RedisUnavailable,
        format!("{what}, so nothing is accepted or handled{whose}; nothing is lost: {error}"),
        "bring Redis back; the processes need no restart: fairlane check".to_owned(),
    )
}

pub(super) fn of_redis(facts: &Facts, found: &mut Vec<Finding>) {
    let client = redis_cli(&facts.redis);
    let mut add = |code, problem: String, remedy: String| {
        found.push(Finding::new(code, problem, remedy));
    };
    if let Some(ms) = facts.redis.ping_ms
        && ms >= SLOW_MS
    {
        add(
            Code::RedisSlow,
            format!("Redis is slow: a round trip takes {}", duration(ms)),
            format!("look for slow commands and a slow network: {client} SLOWLOG GET 10"),
        );
    }
    if let Some(what) = unwritable(facts) {
        add(
            Code::RedisDiskFull,
            format!("Redis cannot write {what}, and refuses events"),
            "free space on its disk, and check its log".to_owned(),
        );
    }
    let Some(info) = &facts.redis.info else { return };
    if info.eviction != "noeviction" {
        add(
            Code::RedisEvicts,
            format!("Redis may evict events: maxmemory-policy is {}", info.eviction),
            format!("{client} CONFIG SET maxmemory-policy noeviction"),
        );
    }
    if !info.append_only {
        add(
            Code::RedisForgets,
            "Redis loses events when it restarts: appendonly is off".to_owned(),
            format!("{client} CONFIG SET appendonly yes"),
        );
    }
    if info.role != "master" {
        add(
            Code::RedisReadOnly,
            format!("this Redis is a {}: nothing can be written", info.role),
            "set redis.url to the primary".to_owned(),
        );
    }
    let (have, wanted) = (info.replication, u64::from(facts.redis.wait_replicas));
    if info.role == "master" && have.replicas < wanted {
        add(
            Code::ReplicasMissing,
            format!(
                "Redis has {}, and redis.wait_replicas is {wanted}: nothing is accepted, copied or completed",
                count(have.replicas, "replica")
            ),
            format!(
                "connect its replicas, or lower redis.wait_replicas: {client} INFO replication"
            ),
        );
    }
    if have.lag_seconds >= REPLICA_SILENT_SECONDS {
        add(
            Code::ReplicaLags,
            format!(
                "a replica of Redis was not heard for {}: a failover to it loses what it lacks",
                duration(have.lag_seconds * 1_000)
            ),
            format!("see whether it runs, and its network: {client} INFO replication"),
        );
    }
    let remedy = "raise maxmemory, or find the longest queues: fairlane bots list --sort depth";
    match percent_used(info) {
        FULL_PERCENT.. => add(
            Code::RedisFull,
            "Redis is full: it refuses new events, and the queues still drain".to_owned(),
            remedy.to_owned(),
        ),
        percent @ MEMORY_PERCENT.. => add(
            Code::RedisMemory,
            format!("Redis uses {percent} % of its maxmemory"),
            remedy.to_owned(),
        ),
        _ => {}
    }
}

/// What Redis cannot write to its disk, so that it refuses events.
fn unwritable(facts: &Facts) -> Option<&'static str> {
    let info = facts.redis.info.as_ref();
    if info.is_some_and(|info| !info.append_ok) {
        return Some("its append-only file");
    }
    // Without a `save` setting, Redis goes on after a failed snapshot.
    let snapshot = info.is_some_and(|info| !info.snapshot_ok);
    facts.redis.refuses_writes.then_some(if snapshot { "its snapshot" } else { "to its disk" })
}

/// Memory in use, in percent of the maximum; 0 without a maximum.
fn percent_used(info: &ServerInfo) -> u64 {
    let used = u128::from(info.memory_used) * 100;
    let percent = used.checked_div(u128::from(info.memory_max)).unwrap_or(0);
    u64::try_from(percent).unwrap_or(u64::MAX)
}

/// The `redis-cli` command for this Redis.
fn redis_cli(redis: &RedisFacts) -> String {
    let tls = if redis.tls { " --tls" } else { "" };
    // Behind sentinels, the service follows.
    let target = redis.target.split(" (").next().unwrap_or_default();
    // For a cluster: its first node.
    let (first, cluster) = target.split_once(',').map_or((target, ""), |(first, _)| (first, " -c"));
    match first.rsplit_once(':') {
        _ if target.starts_with('/') => format!("redis-cli -s {target}"),
        Some((host, port)) => format!("redis-cli{cluster}{tls} -h {host} -p {port}"),
        None => "redis-cli".to_owned(),
    }
}

/// A few names, and the number of the others.
fn some_of(names: &[String], thing: &str) -> String {
    let mut some: Vec<String> = names.iter().take(NAMED).cloned().collect();
    let more = names.len().saturating_sub(NAMED) as u64;
    if more > 0 {
        some.push(count(more, &format!("more {thing}")));
    }
    some.join(", ")
}

pub(super) fn of_processes(facts: &Facts, found: &mut Vec<Finding>) {
    if facts.processes.is_empty() {
        found.push(Finding::new(
            Code::NoProcess,
            "no `fairlane serve` runs, so nothing is read, handled or sent".to_owned(),
            "fairlane serve".to_owned(),
        ));
        return;
    }
    let without: Vec<String> = facts
        .processes
        .iter()
        .filter(|process| process.mongodb == Some(false))
        .map(Process::at)
        .collect();
    if !without.is_empty() || facts.mongodb == Some(false) {
        let who = if without.is_empty() {
            "this process".to_owned()
        } else {
            some_of(&without, "machine")
        };
        found.push(
            Finding::new(
                Code::MongodbUnavailable,
                format!("MongoDB does not answer {who}: views and events for rules wait in Redis, and nothing is lost"),
                "bring MongoDB back; the processes need no restart: fairlane check".to_owned(),
            )
            .of_processes(without),
        );
    }
    let mut hosts: BTreeMap<&str, (u32, u64, Vec<String>)> = BTreeMap::new();
    for process in &facts.processes {
        for open in &process.breakers {
            let (failures, seconds, processes) =
                hosts.entry(&open.host).or_insert((0, u64::MAX, Vec::new()));
            *failures = open.failures.max(*failures);
            *seconds = open.seconds.min(*seconds);
            processes.push(process.at());
        }
    }
    for (host, (failures, seconds, processes)) in hosts {
        let failures = count(failures.into(), "consecutive failure");
        found.push(
            Finding::new(
                Code::HostUnavailable,
                format!(
                    "{host} fails: its circuit breaker is open after {failures}, and the next probe is in {}",
                    duration(seconds * 1_000)
                ),
                "repair that server; Fairlane sends again by itself, and drops nothing: fairlane dead list --pipeline notifications shows what expired".to_owned(),
            )
            .of_processes(processes),
        );
    }
    differing(facts, found);
}

/// Processes that copy one bus stream for different pipelines.
fn differing(facts: &Facts, found: &mut Vec<Finding>) {
    // Of one that could not be looked at, this is not known.
    let on_bus: BTreeSet<&PipelineName> =
        facts.pipelines.iter().filter(|of| of.takes_of_bus).map(|of| &of.name).collect();
    let streams = facts.streams.iter().map(|view| &view.stream);
    for stream in streams.chain(facts.buses.iter().map(|view| &view.bus)) {
        let readers = facts.processes.iter().filter(|process| {
            let is_source = process.streams.contains(stream)
                || process.buses.iter().any(|state| state.bus == *stream);
            is_source && process.roles.iter().any(|role| role == "ingest")
        });
        let mut sets: BTreeMap<BTreeSet<&PipelineName>, Vec<&Process>> = BTreeMap::new();
        for process in readers {
            let names = process.pipelines.keys().filter(|name| on_bus.contains(name)).collect();
            sets.entry(names).or_default().push(process);
        }
        if sets.len() < 2 {
            continue;
        }
        let mut shown: Vec<String> = Vec::new();
        for (names, processes) in sets.iter().take(NAMED) {
            let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            shown.push(format!("{} has {names}", processes[0].at()));
        }
        let since = sets.values().flatten().map(|process| process.started_ms).max();
        let processes = sets.values().map(|processes| processes[0].at()).collect();
        found.push(
            Finding::new(
                Code::PipelinesDiffer,
                format!("processes that read {stream} have different pipelines, so some get no events: {}", shown.join("; ")),
                "give all processes that read one bus the same pipelines, and restart them: fairlane check".to_owned(),
            )
            .since(since)
            .of_processes(processes),
        );
    }
}

pub(super) fn of_bus(facts: &Facts, found: &mut Vec<Finding>) {
    let is_taken =
        facts.pipelines.iter().any(|of| of.takes_of_bus && of.state != PipelineState::Disabled);
    for view in &facts.streams {
        if view.kind == StreamKind::Other {
            found.push(Finding::new(
                Code::NotAStream,
                format!("{} is no stream, so it cannot be the bus", view.stream),
                "rename that key, or set bus.streams".to_owned(),
            ));
        } else if is_taken && is_unread(facts, view) {
            let behind = view.unread.map_or_else(String::new, |unread| {
                format!(", and {} behind", is_are(unread, "entry", "entries"))
            });
            found.push(
                Finding::new(
                    Code::NoReader,
                    format!("no process reads {}{behind}", view.stream),
                    "start `fairlane serve` with the role ingest".to_owned(),
                )
                .since(view.unread_since_ms),
            );
        } else if let Some(since) = view.unread_since_ms
            && view.reader
            && facts.now_ms.saturating_sub(since) > LAG_MS
        {
            let unread = is_are(view.unread.unwrap_or(1), "entry", "entries");
            found.push(
                Finding::new(
                    Code::BusLag,
                    format!(
                        "{unread} of {} not copied yet, the first for {}",
                        view.stream,
                        duration(facts.now_ms.saturating_sub(since))
                    ),
                    "wait until they are copied; if the number grows, start more processes: fairlane serve".to_owned(),
                )
                .since(since),
            );
        }
    }
    for view in &facts.buses {
        found.extend(of_other_bus(facts, view, is_taken));
    }
    if facts.invalid > 0 {
        let client = redis_cli(&facts.redis);
        found.push(Finding::new(
            Code::InvalidEntries,
            format!("put aside because it could not be read: {}", count(facts.invalid, "event")),
            format!("{client} XREVRANGE {} + - COUNT 10", facts.invalid_stream),
        ));
    }
}

/// A bus beside Redis: what its readers say of it.
fn of_other_bus(facts: &Facts, view: &BusView, is_taken: bool) -> Option<Finding> {
    let BusView { bus, unread, .. } = view;
    let age = |since: u64| facts.now_ms.saturating_sub(since);
    if let Some(failing) = view.failing.as_ref().filter(|of| age(of.since_ms) >= BUS_AWAY_MS) {
        let fails = |state: &BusState| state.bus == *bus && state.failing.is_some();
        let processes = facts.processes.iter().filter(|process| process.buses.iter().any(fails));
        return Some(
            Finding::new(
                Code::BusUnavailable,
                format!("{bus} cannot be read: {}", failing.reason),
                "correct that; to see what else is wrong: fairlane check".to_owned(),
            )
            .since(failing.since_ms)
            .of_processes(processes.map(Process::at).collect()),
        );
    }
    let is_started = !facts.processes.iter().any(|process| age(process.started_ms) < STARTING_MS);
    if view.processes == 0 && is_taken && is_started {
        return Some(Finding::new(
            Code::NoReader,
            format!("no process reads {bus}"),
            "start `fairlane serve` with the role ingest and this source in bus.sources".to_owned(),
        ));
    }
    let since = view.unread_since_ms.filter(|since| age(*since) > LAG_MS)?;
    let unread = is_are(*unread, "entry", "entries");
    Some(
        Finding::new(
            Code::BusLag,
            format!(
                "{unread} of {bus} not copied yet; there were some all the time for {}",
                duration(age(since))
            ),
            "wait until they are copied; if the number grows, start more processes: fairlane serve"
                .to_owned(),
        )
        .since(since),
    )
}

fn is_are(number: u64, one: &str, many: &str) -> String {
    match number {
        1 => format!("1 {one} is"),
        number => format!("{} {many} are", super::text::number(number)),
    }
}

/// Whether entries of a stream wait and no process reads it.
fn is_unread(facts: &Facts, view: &StreamView) -> bool {
    if view.reader || view.unread.unwrap_or(view.length) == 0 {
        return false;
    }
    let mut readers = facts.processes.iter().filter(|process| {
        // A process of an earlier version does not tell its streams.
        let reads = process.streams.is_empty() || process.streams.contains(&view.stream);
        reads && process.roles.iter().any(|role| role == "ingest")
    });
    let starts = |process: &Process| facts.now_ms.saturating_sub(process.started_ms) < STARTING_MS;
    !readers.any(starts)
}
