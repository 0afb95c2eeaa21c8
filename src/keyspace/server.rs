//! Questions about the server as a whole, for operators: what it is, what it holds, what this user
//! may do there. Runs none of the queue's scripts, so it needs no `recover` and works on servers
//! that the queues could not use.

use std::collections::HashMap;
use std::time::Duration;

use redis::{FromRedisValue, Pipeline, Value};
use serde::Serialize;

use super::keys;
use super::link::{Link, StoreError, Target};
use super::reply::ReplyError;
use crate::id::{PipelineName, ShardCount};

const CHECK_SCRIPT: &str = include_str!("../../lua/check.lua");
/// Keys looked at by one step of a deletion.
const SCAN_COUNT: usize = 1_000;
/// How long a key that rights are tried on may stay, should its deletion fail.
const CHECK_TTL_SECONDS: u32 = 10;

/// A plain connection to a server, made anew when it breaks.
#[derive(Debug)]
pub struct Server {
    link: Link,
}

/// What a server says of itself.
#[derive(Debug, Clone, Serialize)]
pub struct ServerInfo {
    /// For example `7.0.15`.
    pub version: String,
    /// `master` or `slave`.
    pub role: String,
    /// Since it started, in seconds.
    pub uptime_seconds: u64,
    /// Memory in use, in bytes.
    pub memory_used: u64,
    /// `maxmemory` in bytes; 0: no bound.
    pub memory_max: u64,
    /// `maxmemory-policy`.
    pub eviction: String,
    /// Whether writes are logged (`appendonly`).
    pub append_only: bool,
    /// Whether the last write of that log went well.
    pub append_ok: bool,
}

impl ServerInfo {
    /// Major and minor version; zeros where it cannot be read.
    #[must_use]
    pub fn version_numbers(&self) -> (u32, u32) {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }

    fn parse(text: &str) -> Self {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .unwrap_or_default()
                .trim()
        };
        let number = |name: &str| field(name).parse().unwrap_or(0);
        Self {
            version: field("redis_version").to_owned(),
            role: field("role").to_owned(),
            uptime_seconds: number("uptime_in_seconds"),
            memory_used: number("used_memory"),
            memory_max: number("maxmemory"),
            eviction: field("maxmemory_policy").to_owned(),
            append_only: field("aof_enabled") == "1",
            append_ok: field("aof_last_write_status") != "err",
        }
    }
}

/// What is kept under the name of a bus stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamKind {
    /// Nothing yet: the first event creates it.
    Absent,
    /// A stream.
    Stream,
    /// Something else, which cannot be read as a bus.
    Other,
}

/// A bus stream.
#[derive(Debug, Clone, Serialize)]
pub struct StreamView {
    /// Its name.
    pub stream: String,
    /// What is kept there.
    pub kind: StreamKind,
    /// Entries it holds.
    pub length: u64,
    /// Entries not yet copied into the queues; `None` when nothing was ever copied.
    pub unread: Option<u64>,
    /// Whether a process reads it now.
    pub reader: bool,
    /// Consumer groups of others.
    pub groups: Vec<GroupView>,
}

/// A consumer group of a bus stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupView {
    /// Its name.
    pub name: String,
    /// Entries taken and not acknowledged.
    pub pending: u64,
    /// Entries not yet taken; `None` where the server cannot tell.
    pub lag: Option<u64>,
}

impl Server {
    /// The server at `target`. Connects at the first question.
    #[must_use]
    pub fn new(target: Target, response_timeout: Duration) -> Self {
        Self { link: Link::plain(target, response_timeout) }
    }

    /// Where it is.
    #[must_use]
    pub fn target(&self) -> &Target {
        self.link.target()
    }

    /// The connection, for what others ask over it.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn info(&self) -> Result<ServerInfo, StoreError> {
        let text: String = self.ask("INFO", redis::cmd("INFO")).await?;
        Ok(ServerInfo::parse(&text))
    }

    /// One of its settings; `None` for one it does not know.
    ///
    /// # Errors
    /// When Redis does not answer or refuses, as hosted ones often do.
    pub async fn setting(&self, name: &str) -> Result<Option<String>, StoreError> {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg(name);
        let mut found: HashMap<String, String> = self.ask("CONFIG GET", command).await?;
        Ok(found.remove(name))
    }

    /// Its clock, since 1970.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn time(&self) -> Result<Duration, StoreError> {
        let (seconds, micros): (u64, u64) = self.ask("TIME", redis::cmd("TIME")).await?;
        Ok(Duration::from_secs(seconds) + Duration::from_micros(micros))
    }

    /// The number of shards the data was created with; `None` before that.
    ///
    /// # Errors
    /// When Redis does not answer or refuses, or the number is none.
    pub async fn shards(&self) -> Result<Option<ShardCount>, StoreError> {
        let number: Option<u16> = self.ask("GET", redis::Cmd::get(keys::SHARDS)).await?;
        let Some(number) = number else { return Ok(None) };
        ShardCount::new(number).map(Some).ok_or_else(|| {
            let source = ReplyError::unexpected("a number of shards", &number.to_string());
            self.link.misread("GET", source)
        })
    }

    /// The pipelines that ever ran, by name.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn pipelines(&self) -> Result<Vec<PipelineName>, StoreError> {
        let names: Vec<String> = self.ask("HKEYS", redis::Cmd::hkeys(keys::PIPELINES)).await?;
        let mut names: Vec<_> =
            names.iter().filter_map(|name| PipelineName::parse(name).ok()).collect();
        names.sort();
        Ok(names)
    }

    /// How many bus entries were put aside because they could not be read.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn invalid_entries(&self) -> Result<u64, StoreError> {
        self.ask("XLEN", redis::Cmd::xlen(keys::INVALID)).await
    }

    /// A bus stream.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn stream(&self, stream: &str) -> Result<StreamView, StoreError> {
        type Answers = (HashMap<String, Value>, Vec<HashMap<String, Value>>, Option<u64>);
        let kind: String = self.ask("TYPE", redis::Cmd::key_type(stream)).await?;
        let kind = match kind.as_str() {
            "none" => StreamKind::Absent,
            "stream" => StreamKind::Stream,
            _ => StreamKind::Other,
        };
        let reader = self.ask("EXISTS", redis::Cmd::exists(keys::reader(stream))).await?;
        let mut view = StreamView {
            stream: stream.to_owned(),
            kind,
            length: 0,
            unread: None,
            reader,
            groups: Vec::new(),
        };
        if kind != StreamKind::Stream {
            return Ok(view);
        }
        let mut pipe = Pipeline::with_capacity(3);
        pipe.cmd("XINFO").arg("STREAM").arg(stream);
        pipe.cmd("XINFO").arg("GROUPS").arg(stream);
        pipe.hget(keys::read(stream), "entries");
        let values = Value::Array(self.link.run_checked("XINFO", &pipe).await?);
        let (facts, groups, copied): Answers = self.read("XINFO", values)?;
        let number = |facts: &HashMap<String, Value>, name: &str| {
            facts.get(name).and_then(|value| redis::from_redis_value_ref::<u64>(value).ok())
        };
        view.length = number(&facts, "length").unwrap_or(0);
        view.unread = copied.map(|copied| {
            number(&facts, "entries-added").unwrap_or(view.length).saturating_sub(copied)
        });
        for group in groups {
            let name = group.get("name").map(redis::from_redis_value_ref::<Vec<u8>>);
            view.groups.push(GroupView {
                name: String::from_utf8_lossy(&name.and_then(Result::ok).unwrap_or_default())
                    .into_owned(),
                pending: number(&group, "pending").unwrap_or(0),
                lag: number(&group, "lag"),
            });
        }
        Ok(view)
    }

    /// Deletes every key of a pipeline and forgets its name. Answers how many keys those were.
    ///
    /// Events that are queued meanwhile may survive: no process may run the pipeline.
    ///
    /// # Errors
    /// When Redis does not answer or refuses. What was deleted stays deleted; it can be repeated.
    pub async fn erase(&self, pipeline: &PipelineName) -> Result<u64, StoreError> {
        let (mut cursor, mut erased) = (0_u64, 0);
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(keys::pattern(pipeline));
            scan.arg("COUNT").arg(SCAN_COUNT);
            let (next, mut found): (u64, Vec<Vec<u8>>) = self.ask("SCAN", scan).await?;
            found.retain(|key| keys::belongs_to(pipeline, key));
            if !found.is_empty() {
                erased += self.ask::<u64>("UNLINK", redis::Cmd::unlink(&found)).await?;
            }
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        let forget = redis::Cmd::hdel(keys::PIPELINES, pipeline.as_str());
        self.ask::<u64>("HDEL", forget).await?;
        Ok(erased)
    }

    /// Whether scripts may be loaded and run. Leaves nothing behind.
    ///
    /// # Errors
    /// When Redis does not answer, refuses, or answers nonsense.
    pub async fn try_scripts(&self) -> Result<(), StoreError> {
        let key = keys::check(&uuid::Uuid::now_v7().to_string());
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

    /// Whether the kinds of keys that queues consist of may be written under `fl:`, and channels
    /// used. Leaves nothing behind.
    ///
    /// # Errors
    /// When Redis does not answer or refuses one of them.
    pub async fn try_keys(&self) -> Result<(), StoreError> {
        let key = keys::check(&uuid::Uuid::now_v7().to_string());
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

    async fn ask<T: FromRedisValue>(
        &self,
        name: &'static str,
        command: redis::Cmd,
    ) -> Result<T, StoreError> {
        let value = self.link.command(name, command).await?;
        self.read(name, value)
    }

    fn read<T: FromRedisValue>(&self, name: &'static str, value: Value) -> Result<T, StoreError> {
        redis::from_redis_value(value).map_err(|error| {
            let source = ReplyError::unexpected("another shape", &error.to_string());
            self.link.misread(name, source)
        })
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
             maxmemory_policy:allkeys-lru\r\naof_enabled:1\r\nrole:master\r\n",
        );
        assert_eq!(info.version_numbers(), (7, 2));
        assert_eq!((info.memory_used, info.memory_max, info.uptime_seconds), (1_000, 2_000, 60));
        assert_eq!((info.eviction.as_str(), info.role.as_str()), ("allkeys-lru", "master"));
        assert!(info.append_only && info.append_ok);
    }
}
