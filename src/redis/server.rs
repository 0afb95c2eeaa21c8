//! Inspection of Redis as a whole, a server or a cluster, for operators: its state, its data, and
//! the rights of this user. Runs none of the queue's scripts, so it needs no `recover` and works on
//! servers that the queues could not use.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use futures_util::StreamExt as _;
use redis::{FromRedisValue, Pipeline, Value};
use serde::Serialize;

use super::error::RedisError;
use super::keys;
use super::link::Link;
use super::primary::{Primary, ServerInfo};
use super::reply::{Reply, ReplyError};
use super::slot::slot_of;
use super::target::Target;
use crate::clock::millis;
use crate::id::{Offset, PipelineName, Prefix, ShardCount};

/// Number of keys in one step of a deletion.
const SCAN_COUNT: usize = 1_000;
/// Number of keys in one step of a search, the maximum steps on one server, and the maximum keys
/// found.
const FIND_COUNT: usize = 10_000;
const FIND_STEPS: usize = 100;
const FIND_MAX: usize = 10_000;
/// Timeout for receiving a published message.
const HEARD_WITHIN: Duration = Duration::from_secs(3);

/// A reader records its position every second, and between two writes of a copy.
const UNDER_WAY: Duration = Duration::from_secs(3);

/// Plain pooled connections to a server or cluster, replaced when they break.
#[derive(Debug)]
pub struct Server {
    link: Link,
    response_timeout: Duration,
}

/// The type of the key with the name of a bus stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamKind {
    /// No key: the first event creates it.
    Absent,
    /// A stream.
    Stream,
    /// Another type, which cannot be read as a bus.
    Other,
}

/// A bus stream.
#[derive(Debug, Clone, Serialize)]
pub struct StreamView {
    /// Its name.
    pub stream: String,
    /// The type of the key.
    pub kind: StreamKind,
    /// Number of entries.
    pub length: u64,
    /// Number of entries not yet copied into the queues, from the last recorded position of the
    /// reader. The reader records it every second, so while a process reads, the entries of the
    /// last few seconds count as copied. `None` if nothing was ever copied.
    pub unread: Option<u64>,
    /// When the first of them was added, ms since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread_since_ms: Option<u64>,
    /// Whether a process reads it now.
    pub reader: bool,
    /// Consumer groups of other programs.
    pub groups: Vec<GroupView>,
}

impl StreamView {
    /// Reads the current state of a bus stream.
    ///
    /// # Errors
    /// If Redis does not answer or refuses.
    pub(crate) async fn read(link: &Link, stream: &str) -> Result<Self, RedisError> {
        type Noted = (Option<u64>, Option<String>);
        type Answers = (HashMap<String, Value>, Vec<HashMap<String, Value>>, Noted);
        let kind = link.command("TYPE", redis::Cmd::key_type(stream)).await?;
        let kind: String = link.read("TYPE", kind)?;
        let kind = match kind.as_str() {
            "none" => StreamKind::Absent,
            "stream" => StreamKind::Stream,
            _ => StreamKind::Other,
        };
        let readers = redis::Cmd::exists(keys::readers(link.prefix(), stream));
        let reader = link.read("EXISTS", link.command("EXISTS", readers).await?)?;
        let mut view = Self {
            stream: stream.to_owned(),
            kind,
            length: 0,
            unread: None,
            unread_since_ms: None,
            reader,
            groups: Vec::new(),
        };
        if kind != StreamKind::Stream {
            return Ok(view);
        }
        let mut pipe = Pipeline::with_capacity(3);
        pipe.cmd("XINFO").arg("STREAM").arg(stream);
        pipe.cmd("XINFO").arg("GROUPS").arg(stream);
        pipe.cmd("HMGET").arg(keys::read(link.prefix(), stream)).arg("entries").arg("offset");
        let values = Value::Array(link.run_checked("XINFO", &pipe).await?);
        let (facts, groups, (copied, offset)): Answers = link.read("XINFO", values)?;
        let number = |facts: &HashMap<String, Value>, name: &str| {
            facts.get(name).and_then(|value| redis::from_redis_value_ref::<u64>(value).ok())
        };
        view.length = number(&facts, "length").unwrap_or(0);
        if let Some((copied, offset)) = copied.zip(offset) {
            let added = number(&facts, "entries-added").unwrap_or(view.length);
            view.unread = Some(match first_after(link, stream, &offset).await? {
                // Also for entries that were deleted from the stream before they were read.
                None => 0,
                Some(first) if reader && is_under_way(link, first).await? => 0,
                Some(first) => {
                    view.unread_since_ms = Some(first.ms);
                    added.saturating_sub(copied).max(1)
                }
            });
        }
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
}

/// The first entry of a stream after `offset`.
async fn first_after(
    link: &Link,
    stream: &str,
    offset: &str,
) -> Result<Option<Offset>, RedisError> {
    let mut command = redis::cmd("XRANGE");
    command.arg(stream).arg(format!("({offset}")).arg("+").arg("COUNT").arg(1);
    let misread = |source| link.misread("XRANGE", source);
    let mut entries = Reply::new(link.command("XRANGE", command).await?).map_err(misread)?;
    let Some(entry) = entries.next() else { return Ok(None) };
    Reply::new(entry).and_then(|mut entry| entry.parsed()).map(Some).map_err(misread)
}

/// Whether an entry is so recent that a reader without lag has copied it, but not recorded it yet.
async fn is_under_way(link: &Link, entry: Offset) -> Result<bool, RedisError> {
    let time = link.command("TIME", redis::cmd("TIME")).await?;
    let (seconds, _): (u64, u64) = link.read("TIME", time)?;
    Ok(seconds.saturating_mul(1_000).abs_diff(entry.ms) < millis(UNDER_WAY))
}

/// A consumer group of a bus stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupView {
    /// Its name.
    pub name: String,
    /// Number of entries delivered but not acknowledged.
    pub pending: u64,
    /// Number of entries not yet delivered; `None` if the server cannot tell.
    pub lag: Option<u64>,
}

impl Server {
    /// The server at `target`. Connects at the first call.
    #[must_use]
    pub fn new(target: Target, response_timeout: Duration) -> Self {
        Self { link: Link::plain(target, response_timeout), response_timeout }
    }

    /// The Redis deployment.
    #[must_use]
    pub fn target(&self) -> &Target {
        self.link.target()
    }

    /// The connections, for other inspections.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Every primary of the cluster, for separate inspection; for a single server, that server.
    ///
    /// # Errors
    /// If no node of the cluster answers.
    pub async fn primaries(&self) -> Result<Vec<Primary>, RedisError> {
        let found = self.link.primaries().await?.into_iter();
        Ok(found.map(|(at, slot)| Primary::new(at, slot, self.response_timeout)).collect())
    }

    /// Number of slots of the cluster without a primary; 0 for a single server.
    ///
    /// # Errors
    /// If no node of the cluster answers.
    pub async fn slots_missing(&self) -> Result<usize, RedisError> {
        self.link.slots_missing().await
    }

    /// The properties of the server; in a cluster, of the fullest primary.
    ///
    /// # Errors
    /// If a primary does not answer or refuses.
    pub async fn info(&self) -> Result<ServerInfo, RedisError> {
        let mut infos = Vec::new();
        for answer in self.link.ask_every("INFO", &redis::cmd("INFO")).await? {
            infos.push(ServerInfo::parse(&self.link.read::<String>("INFO", answer)?));
        }
        ServerInfo::worst(infos)
            .ok_or_else(|| self.link.misread("INFO", ReplyError::unexpected("one", "none")))
    }

    /// Its clock, since 1970; in a cluster, that of the first primary.
    ///
    /// # Errors
    /// If a primary does not answer or refuses.
    pub async fn time(&self) -> Result<Duration, RedisError> {
        let (seconds, micros): (u64, u64) = self.ask("TIME", redis::cmd("TIME")).await?;
        Ok(Duration::from_secs(seconds) + Duration::from_micros(micros))
    }

    /// The number of shards that the data was created with; `None` before that.
    ///
    /// # Errors
    /// If Redis does not answer or refuses, or the value is not a valid number of shards.
    pub async fn shards(&self) -> Result<Option<ShardCount>, RedisError> {
        let number: Option<u16> =
            self.ask("GET", redis::Cmd::get(keys::shards(self.link.prefix()))).await?;
        let Some(number) = number else { return Ok(None) };
        ShardCount::new(number).map(Some).ok_or_else(|| {
            let source = ReplyError::unexpected("a number of shards", &number.to_string());
            self.link.misread("GET", source)
        })
    }

    /// The names of all pipelines that have run.
    ///
    /// # Errors
    /// If Redis does not answer or refuses.
    pub async fn pipelines(&self) -> Result<Vec<PipelineName>, RedisError> {
        let names: Vec<String> =
            self.ask("HKEYS", redis::Cmd::hkeys(keys::pipelines(self.link.prefix()))).await?;
        let mut names: Vec<_> =
            names.iter().filter_map(|name| PipelineName::parse(name).ok()).collect();
        names.sort();
        Ok(names)
    }

    /// The prefixes of the other environments in this Redis. Scans only a part of a very large
    /// Redis.
    ///
    /// # Errors
    /// If Redis does not answer or refuses.
    pub async fn environments(&self) -> Result<BTreeSet<Prefix>, RedisError> {
        let keys = self.find(keys::ALL_SHARDS).await?;
        let mut found: BTreeSet<_> = keys.iter().filter_map(|key| keys::environment(key)).collect();
        found.remove(self.link.prefix());
        Ok(found)
    }

    /// Which of these bus streams other environments read, and their prefixes. Scans only a part of
    /// a very large Redis.
    ///
    /// # Errors
    /// If Redis does not answer or refuses.
    pub async fn read_elsewhere(
        &self,
        streams: &[String],
    ) -> Result<BTreeSet<(String, Prefix)>, RedisError> {
        let keys = self.find(keys::ALL_READ).await?;
        let found = keys.iter().filter_map(|key| keys::reading(key));
        let found = found.filter(|(prefix, stream)| {
            prefix != self.link.prefix() && streams.iter().any(|ours| ours == stream)
        });
        Ok(found.map(|(prefix, stream)| (stream.to_owned(), prefix)).collect())
    }

    /// Keys that match a pattern.
    async fn find(&self, pattern: &str) -> Result<Vec<Vec<u8>>, RedisError> {
        let mut found = Vec::new();
        for primary in self.primaries().await? {
            let mut cursor = 0;
            for _ in 0..FIND_STEPS {
                let (next, mut some) = primary.scan(cursor, pattern, FIND_COUNT).await?;
                found.append(&mut some);
                cursor = next;
                if cursor == 0 || found.len() >= FIND_MAX {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Number of unreadable bus entries in the stream for them.
    ///
    /// # Errors
    /// If Redis does not answer or refuses.
    pub async fn invalid_entries(&self) -> Result<u64, RedisError> {
        self.ask("XLEN", redis::Cmd::xlen(self.link.prefix().invalid_stream())).await
    }

    /// A bus stream.
    ///
    /// # Errors
    /// If Redis does not answer or refuses.
    pub async fn stream(&self, stream: &str) -> Result<StreamView, RedisError> {
        StreamView::read(&self.link, stream).await
    }

    /// Deletes every key of a pipeline and forgets its name. Returns the number of deleted keys.
    ///
    /// Events that are queued meanwhile may survive: no process may run the pipeline.
    ///
    /// # Errors
    /// If Redis does not answer or refuses. Deleted keys stay deleted; the call can be repeated.
    pub async fn erase(&self, pipeline: &PipelineName) -> Result<u64, RedisError> {
        let (mut erased, prefix) = (0, self.link.prefix());
        for primary in self.primaries().await? {
            let (mut cursor, pattern) = (0, keys::pattern(prefix, pipeline));
            loop {
                let (next, mut found) = primary.scan(cursor, &pattern, SCAN_COUNT).await?;
                found.retain(|key| keys::belongs_to(prefix, pipeline, key));
                erased += self.unlink(&found).await?;
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
            loop {
                let all = keys::all_starts(prefix);
                let (next, mut found) = primary.scan(cursor, &all, SCAN_COUNT).await?;
                found.retain(|key| keys::is_starts(prefix, key));
                for key in found {
                    self.ask::<u64>("HDEL", redis::Cmd::hdel(key, pipeline.as_str())).await?;
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        let forget = redis::Cmd::hdel(keys::pipelines(self.link.prefix()), pipeline.as_str());
        self.ask::<u64>("HDEL", forget).await?;
        Ok(erased)
    }

    /// Deletes keys; returns how many existed.
    async fn unlink(&self, found: &[Vec<u8>]) -> Result<u64, RedisError> {
        // One command takes keys of one slot only.
        let mut slots: BTreeMap<u16, Vec<&Vec<u8>>> = BTreeMap::new();
        for key in found {
            slots.entry(slot_of(key)).or_default().push(key);
        }
        if slots.is_empty() {
            return Ok(0);
        }
        let mut pipe = Pipeline::with_capacity(slots.len());
        for keys in slots.values() {
            pipe.add_command(redis::Cmd::unlink(keys));
        }
        let counts = self.link.run_checked("UNLINK", &pipe).await?;
        let counts: Vec<u64> = self.link.read("UNLINK", Value::Array(counts))?;
        Ok(counts.into_iter().sum())
    }

    /// Checks that this user may subscribe to a channel under the prefix, and that a published
    /// message arrives.
    ///
    /// # Errors
    /// If Redis does not answer or refuses, or no message arrives within 3 s.
    pub async fn try_channel(&self) -> Result<(), RedisError> {
        let channel = keys::check(self.link.prefix(), 0, &uuid::Uuid::now_v7().to_string());
        let (mut subscriber, _) = self.link.subscriber().await?;
        subscriber.subscribe(&channel).await.map_err(|source| match source.code() {
            Some(code) => RedisError::Refused {
                target: self.target().to_string(),
                command: "SUBSCRIBE",
                message: format!("{code} {}", source.detail().unwrap_or_default()),
            },
            None => self.target().unknown(source),
        })?;
        self.ask::<Value>("PUBLISH", redis::Cmd::publish(&channel, "check")).await?;
        let mut messages = subscriber.into_on_message();
        match tokio::time::timeout(HEARD_WITHIN, messages.next()).await {
            Ok(Some(_)) => Ok(()),
            _ => Err(self.link.misread("SUBSCRIBE", ReplyError::unexpected("a message", "none"))),
        }
    }

    /// Checks that this user may trim a bus stream. Removes and creates nothing.
    ///
    /// # Errors
    /// If Redis does not answer or refuses, or the key is not a stream.
    pub async fn try_trim(&self, stream: &str) -> Result<(), RedisError> {
        let mut trim = redis::cmd("XTRIM");
        trim.arg(stream).arg("MINID").arg("0-0");
        self.ask::<Value>("XTRIM", trim).await.map(drop)
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
