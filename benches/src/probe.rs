//! Queries to the private Redis of a bench, and the removal of parts of its data.

use std::collections::BTreeMap;

use fairlane::sandbox::{Rig, STREAM};
use redis::{Cmd, Value, cmd};

use crate::error::BenchError;

/// Number of calls so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Commands {
    /// Sent to Redis.
    pub(crate) wire: u64,
    /// Inside Redis, including those of scripts.
    pub(crate) inner: u64,
}

/// Number of entries of the stream.
pub(crate) async fn stored(rig: &Rig) -> Result<u64, BenchError> {
    match rig.command("XLEN", Cmd::xlen(STREAM)).await? {
        Value::Int(length) => Ok(length.unsigned_abs()),
        _ => Ok(0),
    }
}

/// Empties the stream.
pub(crate) async fn forget(rig: &Rig) -> Result<(), BenchError> {
    Ok(rig.command("UNLINK", Cmd::unlink(STREAM)).await.map(drop)?)
}

/// Removes all keys of the instances, so that the next one reads the bus from its start, with empty
/// queues. No instance may run.
pub(crate) async fn forget_positions(rig: &Rig) -> Result<(), BenchError> {
    for keys in keys(rig, &format!("{}:*", rig.key_prefix())).await?.chunks(10_000) {
        rig.command("UNLINK", Cmd::unlink(keys)).await?;
    }
    Ok(())
}

/// Memory of the attempts that are kept.
pub(crate) async fn history_bytes(rig: &Rig) -> Result<u64, BenchError> {
    let mut bytes = 0;
    for key in keys(rig, &format!("{}:*:history*", rig.key_prefix())).await? {
        let mut usage = cmd("MEMORY");
        usage.arg("USAGE").arg(key).arg("SAMPLES").arg(0);
        if let Value::Int(of_key) = rig.command("MEMORY", usage).await? {
            bytes += of_key.unsigned_abs();
        }
    }
    Ok(bytes)
}

/// The keys that match a pattern.
async fn keys(rig: &Rig, pattern: &str) -> Result<Vec<String>, BenchError> {
    let (mut cursor, mut all) = (0_u64, Vec::new());
    loop {
        let mut scan = cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(10_000);
        let found = rig.command("SCAN", scan).await?;
        let (next, keys): (u64, Vec<String>) =
            redis::from_redis_value(found).map_err(redis::RedisError::from)?;
        all.extend(keys);
        cursor = next;
        if cursor == 0 {
            return Ok(all);
        }
    }
}

/// A section of `INFO`.
pub(crate) async fn info(rig: &Rig, section: &str) -> Result<String, BenchError> {
    let mut command = cmd("INFO");
    command.arg(section);
    Ok(match rig.command("INFO", command).await? {
        Value::BulkString(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        _ => String::new(),
    })
}

/// CPU time of the server's main thread so far, seconds.
pub(crate) async fn cpu(rig: &Rig) -> Result<f64, BenchError> {
    Ok(cpu_of(&info(rig, "cpu").await?))
}

/// The same in the text of `INFO`.
pub(crate) fn cpu_of(info: &str) -> f64 {
    field_of(info, "used_cpu_user_main_thread") + field_of(info, "used_cpu_sys_main_thread")
}

/// Memory of the data, without buffers of connections and of the append-only file, bytes.
pub(crate) async fn memory(rig: &Rig) -> Result<f64, BenchError> {
    Ok(memory_of(&info(rig, "memory").await?))
}

/// The same in the text of `INFO`.
pub(crate) fn memory_of(info: &str) -> f64 {
    let field = |name| field_of(info, name);
    field("used_memory") - field("mem_clients_normal") - field("mem_aof_buffer")
}

/// A number in the text of `INFO`; 0 if it is not there.
pub(crate) fn field_of(info: &str, name: &str) -> f64 {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0.0)
}

/// Number of commands so far, including those of scripts.
pub(crate) async fn all_commands(rig: &Rig) -> Result<u64, BenchError> {
    let info = info(rig, "stats").await?;
    let count = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    Ok(count.and_then(|count| count.trim().parse().ok()).unwrap_or(0))
}

/// Number of calls per command so far.
pub(crate) async fn commands(rig: &Rig) -> Result<Commands, BenchError> {
    Ok(commands_of(&info(rig, "commandstats").await?))
}

/// The calls of each command in the text of `INFO commandstats`.
pub(crate) fn calls_of(info: &str) -> BTreeMap<String, u64> {
    let lines = info.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(':'));
    let calls = |rest: &str| {
        let calls = rest.split(',').find_map(|field| field.strip_prefix("calls="));
        calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
    };
    lines.map(|(name, rest)| (name.to_owned(), calls(rest))).collect()
}

/// The same in the text of `INFO`.
pub(crate) fn commands_of(info: &str) -> Commands {
    let mut commands = Commands::default();
    for (name, calls) in calls_of(info) {
        match name.as_str() {
            "evalsha" => commands.wire += calls,
            // The pool and the reader send these. No script on the hot path does.
            "lrange" | "xread" | "xinfo|stream" => {
                commands.wire += calls;
                commands.inner += calls;
            }
            _ => commands.inner += calls,
        }
    }
    commands
}

/// The script of the yardstick, and its number of steps, in calls of this many, on this many lists.
const YARDSTICK: &str = include_str!("yardstick.lua");
const YARDSTICK_STEPS: u32 = 50_000;
const YARDSTICK_CALL: u32 = 50;
const YARDSTICK_LISTS: u32 = 10_000;
const YARDSTICK_PREFIX: &str = "yardstick:";

/// The yardstick: CPU time of the server's main thread for one step of a script, an `RPUSH` of 200
/// bytes and an `HINCRBY`, µs. It tells how fast the server is on this machine at this moment. It is
/// a script, because other work on the machine slows scripts down more than single commands.
pub(crate) async fn yardstick(rig: &Rig) -> Result<f64, BenchError> {
    let (producer, value) = (rig.producer(), [b'x'; 200]);
    let before = cpu(rig).await?;
    let mut pipe = redis::Pipeline::new();
    for first in (0..YARDSTICK_STEPS).step_by(YARDSTICK_CALL as usize) {
        let call = pipe.cmd("EVAL").arg(YARDSTICK).arg(1).arg(YARDSTICK_PREFIX);
        call.arg(first).arg(YARDSTICK_CALL).arg(YARDSTICK_LISTS).arg(&value[..]);
        if pipe.len() == 10 {
            producer.send(&pipe).await?;
            pipe.clear();
        }
    }
    let after = cpu(rig).await?;
    for keys in keys(rig, &format!("{YARDSTICK_PREFIX}*")).await?.chunks(1_000) {
        // The memory of the keys must be free again before the next measurement of memory.
        rig.command("DEL", Cmd::del(keys)).await?;
    }
    Ok((after - before) * 1e6 / f64::from(YARDSTICK_STEPS))
}

/// The rate of a pipelined `redis-benchmark` on this server: RPUSH of 200 bytes, 16 at a time.
/// `None` if it is not installed.
pub(crate) async fn benchmark(rig: &Rig) -> Option<f64> {
    let socket = rig.target().to_string();
    let output = tokio::process::Command::new("redis-benchmark")
        .args(["-s", &socket, "-t", "rpush", "-P", "16", "-c", "8", "-d", "200"])
        .args(["-n", "400000", "--csv"])
        .output()
        .await
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.starts_with("\"RPUSH\""))?;
    line.split(',').nth(1)?.trim_matches('"').parse().ok()
}
