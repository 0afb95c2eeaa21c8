//! Reads the records of notifications.

use redis::{Pipeline, Value};

use crate::id::Shard;
use crate::notifications::record::{Kept, NotificationId};
use crate::queue::Queue;
use crate::redis::{RedisError, Reply, ReplyError};

const FIELDS: &[&str] = &[
    "state", "bot", "uid", "type", "due", "expires", "created", "ended", "online", "attempts",
    "reason", "url", "label", "key",
];

impl Queue {
    /// The notification with this id, if it exists.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn notification(&self, id: NotificationId) -> Result<Option<Kept>, RedisError> {
        Ok(self.notifications(&[id]).await?.pop())
    }

    /// Those of these notifications that exist, in their order. Reads all of them together.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn notifications(
        &self,
        ids: &[NotificationId],
    ) -> Result<Vec<Kept>, RedisError> {
        let shards = |id: &NotificationId| Some((*id, id.shard(self.shard_count())?));
        let ids: Vec<(NotificationId, Shard)> = ids.iter().filter_map(shards).collect();
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = Pipeline::with_capacity(2 * ids.len());
        for (id, shard) in &ids {
            let keys = self.keys(*shard);
            pipe.cmd("HMGET").arg(keys.notification(*id)).arg(FIELDS);
            pipe.cmd("ZSCORE").arg(&keys.due).arg(id.to_string());
        }
        let mut values = self.link().run_checked("HMGET", &pipe).await?.into_iter();
        let mut next = || values.next().unwrap_or(Value::Nil);
        let read = ids.iter().filter_map(|(id, _)| kept(*id, (next(), next())).transpose());
        read.collect::<Result<_, _>>().map_err(|source| self.link().misread("HMGET", source))
    }
}

/// `None`: it does not exist.
fn kept(
    id: NotificationId,
    (record, next_due): (Value, Value),
) -> Result<Option<Kept>, ReplyError> {
    let (mut fields, mut next_due) = (Reply::new(record)?, Reply::single(next_due)?);
    let text = fields.text()?;
    if text.is_empty() {
        return Ok(None);
    }
    Ok(Some(Kept {
        id,
        state: text.parse().map_err(|_| ReplyError::unexpected("a state", &text))?,
        bot: fields.parsed()?,
        uid: fields.text()?,
        kind: fields.text()?,
        due_ms: fields.number()?,
        expires_ms: fields.number()?,
        created_ms: fields.number()?,
        ended_ms: fields.optional()?,
        waits: fields.text()? == "1",
        attempts: fields.number()?,
        reason: fields.text()?,
        url: fields.text()?,
        label: fields.text()?,
        key: fields.text()?,
        next_ms: next_due.score()?.and_then(|score| u64::try_from(score).ok()),
    }))
}
