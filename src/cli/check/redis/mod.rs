//! Redis: is it suitable, does it keep its data, and has Fairlane the necessary rights?

mod replicas;

use std::collections::BTreeSet;

use futures_util::{StreamExt as _, stream};

use super::{ANSWER, Exit, Finding, bus, clock, formats};
use crate::cli::error::CliError;
use crate::cli::output::{bytes, duration, number};
use crate::cli::remedy::explain;
use crate::cli::session::Redis;
use crate::clock::{Clock as _, SystemClock};
use crate::config::Config;
use crate::id::{PipelineName, Prefix, ShardCount};
use crate::presence::{self, Process};
use crate::problems::MEMORY_PERCENT;
use crate::redis::{POOLED_MAX, Primary, RedisError, Server, ServerInfo};

/// The oldest Redis that has the commands of the scripts.
const OLDEST_VERSION: (u32, u32) = (7, 0);
/// Connections that one process keeps to a server, in addition to those to its bus streams: pool,
/// fan-out, views, small calls, wake-ups, published events with the health of HTTP, and the health
/// of `metrics.listen`. Two pools add their own: that of operators' calls, and that of due events.
const CONNECTIONS: u64 = 7;
/// Number of cluster nodes that are probed concurrently.
const NODES_AT_ONCE: usize = 8;
/// Percent of the maximum from which the number of clients is a warning.
const CLIENTS_PERCENT: u64 = 90;

pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let redis = match Redis::open(ANSWER, config).await {
        Ok(redis) => redis,
        Err(error) => {
            let exit = error.exit();
            let why = "everything is kept in Redis: nothing starts without it";
            let remedy = "follow the error text, or set redis.url to a running Redis";
            return vec![Finding::fail("redis", error.to_string(), why, remedy).exits(exit)];
        }
    };
    let findings = match redis.target() {
        Ok(target) => {
            let target = target.with_prefix(config.redis.prefix.clone());
            let target = target.with_wait(config.redis.wait());
            check_server(config, &Server::new(target, ANSWER)).await
        }
        Err(error) => {
            let why = "nothing starts without Redis";
            let finding = Finding::fail("redis", error.to_string(), why, "correct redis.url");
            vec![finding.exits(Exit::Usage)]
        }
    };
    redis.close().await;
    findings
}

async fn check_server(config: &Config, server: &Server) -> Vec<Finding> {
    let primaries = match server.primaries().await {
        Ok(primaries) => primaries,
        Err(error) => return vec![refused("redis", &error)],
    };
    let cluster = server.target().is_cluster();
    let nodes = primaries.iter().map(|primary| async move {
        let at = if cluster { format!(" {}", primary.target()) } else { String::new() };
        check_node(config, primary, &at).await
    });
    let nodes: Vec<_> = stream::iter(nodes).buffered(NODES_AT_ONCE).collect().await;
    let answers = nodes.iter().any(|findings| findings.len() > 1);
    let mut findings: Vec<_> = nodes.into_iter().flatten().collect();
    if let Some((agree, all)) = server.target().agreeing_sentinels().await {
        findings.push(replicas::check_sentinels(agree, all));
    }
    if cluster {
        findings.push(match server.slots_missing().await {
            Ok(missing) => check_slots(primaries.len(), missing),
            Err(error) => refused("cluster", &error),
        });
    }
    if answers {
        findings.extend(check_data(config, server).await);
    }
    findings
}

/// Checks that concern the whole deployment, not one node.
async fn check_data(config: &Config, server: &Server) -> Vec<Finding> {
    let mut findings = vec![
        match server.try_channel().await {
            Ok(()) => {
                let found =
                    format!("messages published under {}: are received", config.redis.prefix);
                Finding::ok("channels", found)
            }
            Err(error) => refused("channels", &error),
        },
        match server.shards().await {
            Ok(stored) => check_shards(config.redis.shards, stored),
            Err(error) => refused("shards", &error),
        },
        check_pipelines(config, server).await,
        formats::check(server).await,
        match server.environments().await {
            Ok(others) => check_environments(config, server, &others).await,
            Err(error) => refused("prefix", &error),
        },
    ];
    for stream in &config.bus.streams {
        findings.push(bus::check(server, stream, config.bus.trim).await);
    }
    findings
}

async fn check_pipelines(config: &Config, server: &Server) -> Finding {
    let processes = async { presence::look(server.link(), server.time().await?).await };
    match tokio::try_join!(server.pipelines(), processes) {
        Ok((known, processes)) => check_known(config, &known, &processes),
        Err(error) => refused("data", &error),
    }
}

/// Whether this Redis holds other environments, and whether they read the same streams.
async fn check_environments(
    config: &Config,
    server: &Server,
    others: &BTreeSet<Prefix>,
) -> Finding {
    let prefix = &config.redis.prefix;
    if others.is_empty() {
        return Finding::ok("prefix", format!("{prefix}, the only one in this Redis"));
    }
    let shared = match server.read_elsewhere(&config.bus.streams).await {
        Ok(shared) => shared,
        Err(error) => return refused("prefix", &error),
    };
    let names: Vec<_> = others.iter().map(Prefix::as_str).collect();
    let found = format!("{prefix}; also in this Redis: {}", names.join(", "));
    match shared.first() {
        None => Finding::ok("prefix", found),
        Some((stream, other)) if !config.bus.trim => {
            let found = format!("{found}; {other} reads {stream} too, as bus.trim = false allows");
            Finding::ok("prefix", found)
        }
        Some((stream, other)) => {
            let why = format!("{other} reads {stream} too: both handle its events and trim it");
            let remedy = "name other streams in bus.streams, or set bus.trim = false to only read";
            Finding::warn("prefix", found, why, remedy)
        }
    }
}

/// Checks one server. `at` names it among the nodes of a cluster. Returns a single finding if it
/// does not answer.
async fn check_node(config: &Config, node: &Primary, at: &str) -> Vec<Finding> {
    let name = |check: &str| format!("{check}{at}");
    let info = match node.info().await {
        Ok(info) => info,
        Err(error) => return vec![refused(&name("redis"), &error)],
    };
    let uptime = duration(info.uptime_seconds * 1_000);
    let needed = CONNECTIONS + 2 * u64::from(POOLED_MAX) + config.bus.streams.len() as u64;
    vec![
        Finding::ok(name("redis"), format!("answers at {}, up {uptime}", node.target())),
        check_version(name("version"), &info),
        check_role(name("role"), &info),
        check_eviction(name("eviction"), &info),
        check_durability(name("durability"), &info, node.setting("appendfsync").await),
        replicas::check(
            name("replicas"),
            &info.replication,
            config.redis.wait_replicas.into(),
            node.setting("min-replicas-to-write").await,
        ),
        check_memory(name("memory"), &info),
        check_clients(name("clients"), &info, needed),
        match node.time().await {
            Ok(time) => clock(name("clock"), SystemClock.now().abs_diff(time), "Redis"),
            Err(error) => refused(&name("clock"), &error),
        },
        match node.try_scripts().await {
            Ok(()) => Finding::ok(name("scripts"), "may be loaded and run"),
            Err(error) => refused(&name("scripts"), &error),
        },
        match node.try_keys().await {
            Ok(()) => {
                Finding::ok(name("keys"), format!("may be written under {}:", config.redis.prefix))
            }
            Err(error) => refused(&name("keys"), &error),
        },
    ]
}

/// Explains an error that Redis returned to a check.
pub(super) fn refused(check: &str, error: &RedisError) -> Finding {
    let (why, remedy) = explain(error);
    let away = matches!(error, RedisError::Connect { .. } | RedisError::Unknown { .. });
    let exit = if away { Exit::Unavailable } else { Exit::Failed };
    Finding::fail(check, error.to_string(), why, remedy).exits(exit)
}

fn check_version(check: String, info: &ServerInfo) -> Finding {
    let found = info.version.clone();
    if info.version_numbers() >= OLDEST_VERSION {
        return Finding::ok(check, found);
    }
    let why = "the scripts need commands that it does not have";
    Finding::fail(check, found, why, "install Redis 7.0 or newer, or Valkey")
}

fn check_role(check: String, info: &ServerInfo) -> Finding {
    if info.role == "master" {
        return Finding::ok(check, "master");
    }
    let why = "a replica cannot be written to";
    Finding::fail(check, info.role.clone(), why, "set redis.url to the primary")
}

fn check_eviction(check: String, info: &ServerInfo) -> Finding {
    let remedy = "CONFIG SET maxmemory-policy noeviction, and in redis.conf";
    match (info.eviction.as_str(), info.memory_max) {
        ("noeviction", _) => Finding::ok(check, "noeviction"),
        (policy, 0) => {
            let why = "once maxmemory is set, events would be evicted";
            Finding::warn(check, policy, why, remedy)
        }
        (policy, _) => {
            let why = "queued events are evicted when memory is full";
            Finding::fail(check, policy, why, remedy)
        }
    }
}

fn check_durability(
    check: String,
    info: &ServerInfo,
    fsync: Result<Option<String>, RedisError>,
) -> Finding {
    if !info.append_ok {
        return Finding::fail(
            check,
            "the append-only file cannot be written",
            "Redis refuses new events",
            "free space on its disk, and check its log",
        );
    }
    if !info.snapshot_ok {
        return Finding::warn(
            check,
            "the last snapshot (BGSAVE) failed",
            "with a `save` setting, Redis refuses events until one succeeds",
            "free space on its disk, and check its log; then: redis-cli BGSAVE",
        );
    }
    if !info.append_only {
        return Finding::warn(
            check,
            "appendonly is off",
            "a restart of Redis loses what is queued",
            "CONFIG SET appendonly yes, and in redis.conf",
        );
    }
    match fsync.ok().flatten().as_deref() {
        Some("always") => Finding::ok(check, "appendfsync always: a power cut loses nothing"),
        Some("no") => Finding::warn(
            check,
            "appendfsync no",
            "a power cut may lose half a minute of events",
            "CONFIG SET appendfsync everysec, and in redis.conf",
        ),
        Some(fsync) => {
            Finding::ok(check, format!("appendfsync {fsync}: a power cut loses up to 2 s"))
        }
        None => Finding::ok(check, "appendonly is on; appendfsync may not be read"),
    }
}

fn check_memory(check: String, info: &ServerInfo) -> Finding {
    let used = bytes(info.memory_used);
    if info.memory_max == 0 {
        return Finding::ok(check, format!("{used} used, no maxmemory"));
    }
    let found = format!("{used} used of {}", bytes(info.memory_max));
    if !reaches(info.memory_used, MEMORY_PERCENT, info.memory_max) {
        return Finding::ok(check, found);
    }
    Finding::warn(
        check,
        found,
        "a full Redis refuses new events",
        "raise maxmemory, or find the longest queues: fairlane bots list --sort depth",
    )
}

/// `needed`: the maximum number of connections that one more process opens.
fn check_clients(check: String, info: &ServerInfo, needed: u64) -> Finding {
    let (now, most) = (info.clients, info.clients_max);
    if most == 0 {
        return Finding::ok(check, format!("{} now, their maximum may not be read", number(now)));
    }
    let (now_shown, most_shown) = (number(now), number(most));
    let found = format!("{now_shown} of {most_shown}; each process takes up to {needed} more");
    let remedy = "CONFIG SET maxclients with a higher number, and in redis.conf";
    if now + needed > most {
        let why = "one more process could not connect";
        return Finding::fail(check, found, why, remedy);
    }
    if reaches(now + needed, CLIENTS_PERCENT, most) {
        return Finding::warn(check, found, "few more processes can connect", remedy);
    }
    Finding::ok(check, found)
}

fn reaches(used: u64, percent: u64, max: u64) -> bool {
    used.saturating_mul(100) >= max.saturating_mul(percent)
}

fn check_slots(primaries: usize, missing: usize) -> Finding {
    let nodes = if primaries == 1 { "primary holds" } else { "primaries hold" };
    let found = format!("{primaries} {nodes}");
    if missing == 0 {
        return Finding::ok("cluster", format!("{found} all slots"));
    }
    Finding::fail(
        "cluster",
        format!("{found} all slots but {missing}"),
        "the bots whose shard lives there wait",
        "bring back the node that held them, or: redis-cli --cluster fix HOST:PORT",
    )
    .exits(Exit::Unavailable)
}

fn check_shards(configured: ShardCount, stored: Option<ShardCount>) -> Finding {
    let configured = configured.get();
    match stored.map(ShardCount::get) {
        None => Finding::ok("shards", format!("{configured}; no data yet")),
        Some(stored) if stored == configured => Finding::ok("shards", stored.to_string()),
        Some(stored) => {
            let error = CliError::Shards { configured, stored };
            let why = "with another number, events of a bot would be searched in the wrong shard";
            let remedy = format!("set redis.shards = {stored}");
            Finding::fail("shards", error.to_string(), why, remedy).exits(Exit::Usage)
        }
    }
}

/// The pipelines that have run here, those of the configuration, and those of the running processes.
fn check_known(config: &Config, known: &[PipelineName], processes: &[Process]) -> Finding {
    let list = |names: &[&PipelineName]| {
        names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let foreign = known.iter().filter(|name| !config.pipelines.contains_key(*name));
    let runner = |name: &PipelineName| presence::running(processes, name).next();
    let (elsewhere, left): (Vec<_>, Vec<_>) = foreign.partition(|name| runner(name).is_some());
    if let Some(first) = left.first() {
        return Finding::warn(
            "data",
            format!("not in the configuration: {}", list(&left)),
            "its queued events are never handled",
            format!("configure [pipelines.{first}], or delete it: fairlane pipelines drop {first}"),
        );
    }
    let each = elsewhere.iter().filter_map(|name| Some(format!("{name} ({})", runner(name)?.at())));
    let each: Vec<String> = each.collect();
    if !each.is_empty() {
        let found = format!(
            "not in this configuration: {}; use the configuration of the process that runs it",
            each.join(", ")
        );
        return Finding::ok("data", found);
    }
    let found = match known.len() {
        0 => "no pipeline ever ran here".to_owned(),
        _ => format!("of {}", list(&known.iter().collect::<Vec<_>>())),
    };
    Finding::ok("data", found)
}

#[cfg(test)]
mod tests;
