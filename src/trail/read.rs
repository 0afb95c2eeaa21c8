//! Reads the audit trail, the newest action first.

use redis::Value;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Action, KEPT, Ring};
use crate::id::{BotId, Offset, PipelineName};
use crate::redis::{Link, RedisError, Reply, ReplyError};

/// Number of entries of a ring per read: an answer of Redis stays small.
const PORTION: usize = 250;

/// An action in the trail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = AuditEntry)]
pub(crate) struct Noted {
    /// When it was done, ms since 1970, by the clock of Redis.
    pub(crate) time_ms: u64,
    #[serde(flatten)]
    pub(crate) action: Action,
}

/// The actions to read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    /// Only on this bot.
    pub(crate) bot: Option<BotId>,
    /// Only on this pipeline, or its bots.
    pub(crate) pipeline: Option<PipelineName>,
    /// Only since this time, ms since 1970.
    pub(crate) since_ms: u64,
}

impl Filter {
    fn takes(&self, action: &Action) -> bool {
        (self.bot.is_none() || self.bot == action.bot)
            && (self.pipeline.is_none() || self.pipeline == action.pipeline)
    }
}

/// The place of an action in the trail. The next page starts before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Position {
    ms: u64,
    seq: u64,
    ring: u8,
}

/// A page of the trail.
#[derive(Debug)]
pub(crate) struct Page {
    /// The actions, the newest first.
    pub(crate) actions: Vec<Noted>,
    /// The end of the page; `None`: this is the last one.
    pub(crate) next: Option<Position>,
}

/// Reads up to `limit` actions before a place, the newest first.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn read(
    link: &Link,
    filter: &Filter,
    before: Option<Position>,
    limit: usize,
) -> Result<Page, RedisError> {
    let mut found = Vec::new();
    for (ring, number) in Ring::ALL.into_iter().zip(0..) {
        found.extend(read_ring(link, ring, number, filter, before, limit).await?);
    }
    found.sort_by_key(|(place, _)| std::cmp::Reverse(*place));
    let more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|(place, _)| *place);
    let actions = found.into_iter().map(|(_, noted)| noted).collect();
    Ok(Page { actions, next })
}

/// The newest actions of one ring, one more than `limit`.
async fn read_ring(
    link: &Link,
    ring: Ring,
    number: u8,
    filter: &Filter,
    before: Option<Position>,
    limit: usize,
) -> Result<Vec<(Position, Noted)>, RedisError> {
    let key = ring.key(link.prefix());
    let misread = |source| link.misread("XREVRANGE", source);
    // Of two actions at the same place, that of the first ring is older.
    let mut end = match before {
        None => "+".to_owned(),
        Some(Position { ms, seq, ring }) if number < ring => format!("{ms}-{seq}"),
        Some(Position { ms, seq, .. }) => format!("({ms}-{seq}"),
    };
    let mut found = Vec::new();
    // Others may add actions meanwhile, so the number of reads is bounded.
    for _ in 0..=KEPT / PORTION {
        let mut range = redis::cmd("XREVRANGE");
        range.arg(&key).arg(&end).arg(filter.since_ms).arg("COUNT").arg(PORTION);
        let mut page = Reply::new(link.command("XREVRANGE", range).await?).map_err(misread)?;
        let entries = page.len();
        for _ in 0..entries {
            let entry = page.next().unwrap_or(Value::Nil);
            let (id, action) = entry_of(entry).map_err(misread)?;
            end = format!("({id}");
            // Another version may write actions that this one cannot read.
            let Some(action) = action.filter(|action| filter.takes(action)) else { continue };
            let place = Position { ms: id.ms, seq: id.seq, ring: number };
            found.push((place, Noted { time_ms: id.ms, action }));
            if found.len() > limit {
                return Ok(found);
            }
        }
        if entries < PORTION {
            break;
        }
    }
    Ok(found)
}

fn entry_of(entry: Value) -> Result<(Offset, Option<Action>), ReplyError> {
    let mut entry = Reply::new(entry)?;
    let id = entry.parsed()?;
    let mut fields = Reply::new(entry.next().unwrap_or(Value::Nil))?;
    fields.next();
    let text = fields.bytes()?.unwrap_or_default();
    Ok((id, serde_json::from_slice(&text).ok()))
}
