//! Inspection of one server, for operators: its properties, and the rights of this user.

use std::collections::HashMap;
use std::time::Duration;

use redis::{FromRedisValue, Value};
use serde::Serialize;

use super::error::RedisError;
use super::keys;
use super::link::Link;
use super::reply::ReplyError;
use super::slot::slot_of;
use super::target::Target;

const CHECK_SCRIPT: &str = include_str!("../../lua/check.lua");
/// Time to live of test keys, in case their deletion fails.
const CHECK_TTL_SECONDS: u32 = 10;

/// The properties of a server.
#[derive(Debug, Clone, Serialize, Default)]
pub struct ServerInfo {
    /// For example `7.0.15`.
    pub version: String,
    /// `master` or `slave`.
    pub role: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Memory in use, in bytes.
    pub memory_used: u64,
    /// `maxmemory` in bytes; 0: no bound.
    pub memory_max: u64,
    /// `maxmemory-policy`.
    pub eviction: String,
    /// Number of connected clients.
    pub clients: u64,
    /// `maxclients`; 0: unknown.
    pub clients_max: u64,
    /// Whether the append-only file is on (`appendonly`).
    pub append_only: bool,
    /// Whether the last write to that file succeeded.
    pub append_ok: bool,
    /// Whether the last snapshot (`BGSAVE`) succeeded.
    pub snapshot_ok: bool,
    /// Its replicas.
    pub replication: Replication,
}

/// The replicas of a server, as it sees them.
#[derive(Debug, Clone, Copy, Serialize, Default, PartialEq, Eq)]
pub struct Replication {
    /// Number of replicas that are connected and have its data; without those that still load it.
    pub replicas: u64,
    /// Seconds since the one that is silent longest was heard. Usually 0 or 1.
    pub lag_seconds: u64,
    /// Bytes of the replication stream that the last one has not confirmed. They confirm once a
    /// second, so some bytes are usual.
    pub lag_bytes: u64,
}

impl Replication {
    fn parse(text: &str) -> Self {
        let offset = field(text, "master_repl_offset").parse().unwrap_or(0_u64);
        let mut found = Self::default();
        // slave0:ip=10.0.0.2,port=6379,state=online,offset=1234,lag=0
        let lines = text.lines().filter_map(|line| line.strip_prefix("slave")?.split_once(':'));
        for (_, properties) in lines.filter(|(number, _)| number.parse::<u32>().is_ok()) {
            let property = |name: &str| {
                let mut pairs =
                    properties.trim().split(',').filter_map(|pair| pair.split_once('='));
                pairs.find(|(key, _)| *key == name).map_or("", |(_, value)| value)
            };
            if property("state") != "online" {
                continue;
            }
            found.replicas += 1;
            found.lag_seconds = found.lag_seconds.max(property("lag").parse().unwrap_or(0));
            let behind = offset.saturating_sub(property("offset").parse().unwrap_or(0));
            found.lag_bytes = found.lag_bytes.max(behind);
        }
        found
    }

    /// The one of two servers with fewer replicas, or else with a longer lag.
    #[must_use]
    pub(crate) fn worse(self, other: Self) -> Self {
        let rank = |of: Self| (of.replicas, u64::MAX - of.lag_seconds, u64::MAX - of.lag_bytes);
        if rank(other) < rank(self) { other } else { self }
    }
}

/// A field in the reply to `INFO`; empty if it is missing.
fn field<'a>(text: &'a str, name: &str) -> &'a str {
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    found.unwrap_or_default().trim()
}

impl ServerInfo {
    /// Major and minor version; zeros if unreadable.
    #[must_use]
    pub fn version_numbers(&self) -> (u32, u32) {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }

    /// The fill level for comparing servers: without a maximum, the memory in use.
    #[must_use]
    pub fn fullness(&self) -> impl Ord + use<> {
        let share = u128::from(self.memory_used) * 10_000;
        (share.checked_div(u128::from(self.memory_max)), self.memory_used)
    }

    /// Parses the reply to `INFO`.
    pub(crate) fn parse(text: &str) -> Self {
        let field = |name: &str| field(text, name);
        let number = |name: &str| field(name).parse().unwrap_or(0);
        Self {
            version: field("redis_version").to_owned(),
            role: field("role").to_owned(),
            uptime_seconds: number("uptime_in_seconds"),
            memory_used: number("used_memory"),
            memory_max: number("maxmemory"),
            eviction: field("maxmemory_policy").to_owned(),
            clients: number("connected_clients"),
            clients_max: number("maxclients"),
            append_only: field("aof_enabled") == "1",
            append_ok: field("aof_last_write_status") != "err",
            snapshot_ok: field("rdb_last_bgsave_status") != "err",
            replication: Replication::parse(text),
        }
    }

    /// The fullest of several servers, with the replicas of the one that has the fewest, and the failed
    /// writes of any to its disk; `None` without a server.
    pub(crate) fn worst(infos: impl IntoIterator<Item = Self>) -> Option<Self> {
        let infos: Vec<Self> = infos.into_iter().collect();
        let replication = infos.iter().map(|info| info.replication).reduce(Replication::worse)?;
        let append_ok = infos.iter().all(|info| info.append_ok);
        let snapshot_ok = infos.iter().all(|info| info.snapshot_ok);
        let fullest = infos.into_iter().max_by_key(Self::fullness)?;
        Some(Self { append_ok, snapshot_ok, replication, ..fullest })
    }
}

/// One primary: of a cluster, or the single server. Connects on first use.
#[derive(Debug)]
pub struct Primary {
    link: Link,
    /// A number whose [`keys::check`] keys are on this server.
    number: u32,
}

impl Primary {
    /// The primary at `target`, which holds `slot`.
    pub(super) fn new(target: Target, slot: Option<u16>, response_timeout: Duration) -> Self {
        let prefix = target.prefix().clone();
        let lives_here = |number: &u32| slot_of(keys::check(&prefix, *number, "").as_bytes());
        let number = slot.and_then(|slot| (0..=u32::MAX).find(|number| lives_here(number) == slot));
        Self { link: Link::plain(target, response_timeout), number: number.unwrap_or(0) }
    }

    /// Its address: host and port, or the path of its socket.
    #[must_use]
    pub fn target(&self) -> &Target {
        self.link.target()
    }

    /// Its properties.
    ///
    /// # Errors
    /// If it is unavailable or refuses.
    pub async fn info(&self) -> Result<ServerInfo, RedisError> {
        let text: String = self.ask("INFO", redis::cmd("INFO")).await?;
        Ok(ServerInfo::parse(&text))
    }

    /// One of its settings; `None` for an unknown setting.
    ///
    /// # Errors
    /// If it is unavailable or refuses, as hosted servers often do.
    pub async fn setting(&self, name: &str) -> Result<Option<String>, RedisError> {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg(name);
        let mut found: HashMap<String, String> = self.ask("CONFIG GET", command).await?;
        Ok(found.remove(name))
    }

    /// Its clock, since 1970.
    ///
    /// # Errors
    /// If it is unavailable or refuses.
    pub async fn time(&self) -> Result<Duration, RedisError> {
        let (seconds, micros): (u64, u64) = self.ask("TIME", redis::cmd("TIME")).await?;
        Ok(Duration::from_secs(seconds) + Duration::from_micros(micros))
    }

    /// Checks that scripts may be loaded and run. Leaves nothing behind.
    ///
    /// # Errors
    /// If it is unavailable, refuses, or returns an unexpected answer.
    pub async fn try_scripts(&self) -> Result<(), RedisError> {
        let key = self.key();
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg(CHECK_SCRIPT);
        let sha: String = self.ask("SCRIPT LOAD", load).await?;
        let mut run = redis::cmd("EVALSHA");
        run.arg(sha).arg(1).arg(&key).arg("ok");
        let answer: String = self.ask("EVALSHA", run).await?;
        self.ask::<u64>("UNLINK", redis::Cmd::unlink(&key)).await?;
        if answer != "ok" {
            return Err(self.link.misread("EVALSHA", ReplyError::unexpected("ok", &answer)));
        }
        Ok(())
    }

    /// Checks that all types of keys that queues use may be written under `fl:`, and that channels
    /// may be used. Leaves nothing behind.
    ///
    /// # Errors
    /// If it is unavailable, or refuses one of them.
    pub async fn try_keys(&self) -> Result<(), RedisError> {
        let key = self.key();
        let writes: [(&'static str, &[&str]); 6] = [
            ("SET", &["1"]),
            ("HSET", &["field", "1"]),
            ("ZADD", &["1", "member"]),
            ("RPUSH", &["item"]),
            ("SADD", &["member"]),
            ("XADD", &["*", "field", "1"]),
        ];
        for (name, arguments) in writes {
            let mut command = redis::cmd(name);
            command.arg(&key).arg(arguments);
            self.ask::<Value>(name, command).await?;
            let expire = redis::Cmd::expire(&key, CHECK_TTL_SECONDS.into());
            self.ask::<Value>("EXPIRE", expire).await?;
            self.ask::<Value>("UNLINK", redis::Cmd::unlink(&key)).await?;
        }
        self.ask::<Value>("PUBLISH", redis::Cmd::publish(&key, "check")).await.map(drop)
    }

    /// One step of a scan of its keys: the next cursor (0: the end), and some matching keys.
    pub(crate) async fn scan(
        &self,
        cursor: u64,
        pattern: &str,
        count: usize,
    ) -> Result<(u64, Vec<Vec<u8>>), RedisError> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(count);
        self.ask("SCAN", scan).await
    }

    fn key(&self) -> String {
        keys::check(self.link.prefix(), self.number, &uuid::Uuid::now_v7().to_string())
    }

    async fn ask<T: FromRedisValue>(
        &self,
        name: &'static str,
        command: redis::Cmd,
    ) -> Result<T, RedisError> {
        let value = self.link.command(name, command).await?;
        self.link.read(name, value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_info_is_read_by_whole_names() {
        let info = ServerInfo::parse(
            "# Server\r\nredis_version:7.2.4\r\nuptime_in_seconds:60\r\n# Memory\r\n\
             used_memory:1000\r\nused_memory_human:1K\r\nmaxmemory:2000\r\nmaxmemory_human:2K\r\n\
             maxmemory_policy:allkeys-lru\r\naof_enabled:1\r\nrole:master\r\n\
             # Clients\r\nconnected_clients:3\r\nmaxclients:10000\r\n",
        );
        assert_eq!(info.version_numbers(), (7, 2));
        assert_eq!((info.memory_used, info.memory_max, info.uptime_seconds), (1_000, 2_000, 60));
        assert_eq!((info.eviction.as_str(), info.role.as_str()), ("allkeys-lru", "master"));
        assert_eq!((info.clients, info.clients_max), (3, 10_000));
        assert!(info.append_only && info.append_ok && info.snapshot_ok);
    }

    #[test]
    fn one_server_of_a_cluster_that_cannot_write_to_its_disk_is_found() {
        let of = |text: &str| ServerInfo::parse(text);
        let fullest = || of("used_memory:9\r\n");
        let append = of("used_memory:1\r\naof_last_write_status:err\r\n");
        let snapshot = of("used_memory:1\r\nrdb_last_bgsave_status:err\r\n");
        for (failed, wanted) in [(append, (9, false, true)), (snapshot, (9, true, false))] {
            let worst = ServerInfo::worst([failed, fullest()]).unwrap();
            assert_eq!((worst.memory_used, worst.append_ok, worst.snapshot_ok), wanted);
        }
    }

    #[test]
    fn only_replicas_that_have_the_data_count() {
        let info = ServerInfo::parse(
            "role:master\r\nconnected_slaves:3\r\n\
             slave0:ip=10.0.0.2,port=6379,state=online,offset=900,lag=1\r\n\
             slave1:ip=10.0.0.3,port=6379,state=wait_bgsave,offset=0,lag=0\r\n\
             slave2:ip=10.0.0.4,port=6379,state=online,offset=990,lag=0\r\n\
             slaves_waiting_psync:0\r\nmaster_repl_offset:1000\r\n",
        );
        let two = Replication { replicas: 2, lag_seconds: 1, lag_bytes: 100 };
        assert_eq!(info.replication, two);
        let one = Replication { replicas: 1, lag_seconds: 0, lag_bytes: 0 };
        let fullest = ServerInfo { memory_used: 9, replication: two, ..ServerInfo::default() };
        let other = ServerInfo { memory_used: 1, replication: one, ..ServerInfo::default() };
        let worst = ServerInfo::worst([other, fullest]).unwrap();
        assert_eq!((worst.memory_used, worst.replication), (9, one));
        assert_eq!(two.worse(Replication { lag_bytes: 101, ..two }).lag_bytes, 101);
    }

    #[test]
    fn the_fullest_server_is_the_one_that_is_nearest_to_its_bound() {
        let server = |used: u64, max: u64| {
            ServerInfo::parse(&format!("used_memory:{used}\r\nmaxmemory:{max}\r\n")).fullness()
        };
        assert!(server(90, 100) > server(500, 1_000));
        assert!(server(1, 100) > server(500, 0), "one without a bound is never full");
        assert!(server(2, 0) > server(1, 0));
    }
}
