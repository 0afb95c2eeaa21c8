//! The notifications of one bot that have not ended, in the order in which Fairlane looks at them next.

use redis::Pipeline;

use crate::id::BotId;
use crate::notifications::record::{Kept, NotificationId};
use crate::queue::Queue;
use crate::redis::{RedisError, Reply};

/// Number of due times of a shard per read, and maximum number of reads: all bots of a shard share the
/// list.
const PAGE: usize = 500;
const PAGES: usize = 20;

/// The place behind a notification: its next time, ms since 1970, and its id.
pub(crate) type Place = (u64, NotificationId);

/// A part of the list.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    pub(crate) found: Vec<Kept>,
    /// Where the next part starts; `None`: there are no more.
    pub(crate) next: Option<Place>,
}

impl Queue {
    /// The next notifications of a bot, at most `limit`, behind `after`. Those that are due and queued
    /// already are not among them. It reads up to 10,000 due times of the shard, so that a part may be
    /// empty although there are more.
    pub(crate) async fn pending_of(
        &self,
        bot: &BotId,
        after: Option<Place>,
        limit: usize,
    ) -> Result<Pending, RedisError> {
        let (mut place, mut pending) = (after, Pending::default());
        for _ in 0..PAGES {
            let (page, mut is_last) = self.due_behind(bot, place).await?;
            if page.is_empty() {
                return Ok(pending);
            }
            let mut of_bot = self.only_of(bot, &page).await?;
            place = page.last().copied();
            let wanted = limit.saturating_sub(pending.found.len());
            if of_bot.len() > wanted {
                of_bot.truncate(wanted);
                (place, is_last) = (of_bot.last().copied(), false);
            }
            let ids: Vec<NotificationId> = of_bot.into_iter().map(|(_, id)| id).collect();
            pending.found.extend(self.notifications(&ids).await?);
            if is_last {
                return Ok(pending);
            }
            if pending.found.len() >= limit {
                break;
            }
        }
        pending.next = place;
        Ok(pending)
    }

    /// Those of these places that are of the bot. Each event that is due later begins with the length of
    /// the id of its bot, and the id: see `promote`.
    async fn only_of(&self, bot: &BotId, page: &[Place]) -> Result<Vec<Place>, RedisError> {
        let mut events = redis::cmd("HMGET");
        events.arg(&self.keys_of(bot).later);
        for (_, id) in page {
            events.arg(id.to_string());
        }
        let misread = |error| self.link().misread("HMGET", error);
        let events = self.link().command("HMGET", events).await?;
        let mut events = Reply::new(events).map_err(misread)?;
        let head = format!("{}:{bot}", bot.as_str().len());
        let mut of_bot = Vec::new();
        for place in page {
            let event = events.bytes().map_err(misread)?.unwrap_or_default();
            if event.starts_with(head.as_bytes()) {
                of_bot.push(*place);
            }
        }
        Ok(of_bot)
    }

    /// The next due times of a shard behind a place, and whether they are the last ones.
    async fn due_behind(
        &self,
        bot: &BotId,
        place: Option<Place>,
    ) -> Result<(Vec<Place>, bool), RedisError> {
        let misread = |error| self.link().misread("ZRANGE", error);
        let mut rank = match place {
            // Some before it may become due meanwhile, which lowers the ranks.
            Some(place) => self.rank_behind(bot, place).await?.saturating_sub(PAGE / 2),
            None => 0,
        };
        loop {
            let mut range = redis::cmd("ZRANGE");
            range.arg(&self.keys_of(bot).due).arg(rank).arg(rank + PAGE - 1).arg("WITHSCORES");
            let reply = self.link().command("ZRANGE", range).await?;
            let mut reply = Reply::new(reply).map_err(misread)?;
            let (mut found, mut read) = (Vec::with_capacity(PAGE), 0);
            while reply.len() > 0 {
                let id = reply.text().map_err(misread)?;
                let ms = reply.score().map_err(misread)?.and_then(|ms| u64::try_from(ms).ok());
                read += 1;
                let Ok(id) = id.parse::<NotificationId>() else { continue };
                let at = (ms.unwrap_or_default(), id);
                if place.is_none_or(|place| is_behind(at, place)) {
                    found.push(at);
                }
            }
            if !found.is_empty() || read < PAGE {
                return Ok((found, read < PAGE));
            }
            rank += PAGE;
        }
    }

    /// The rank of the first due time behind a place. Any number may be due in one millisecond, in the order
    /// of their ids, so it halves the range instead of reading it.
    async fn rank_behind(&self, bot: &BotId, (ms, id): Place) -> Result<usize, RedisError> {
        let (link, due, id) = (self.link(), &self.keys_of(bot).due, id.to_string());
        let mut counts = Pipeline::with_capacity(2);
        counts.cmd("ZCOUNT").arg(due).arg("-inf").arg(format!("({ms}"));
        counts.cmd("ZCOUNT").arg(due).arg("-inf").arg(ms);
        let mut bounds = [0_usize; 2];
        for (bound, count) in bounds.iter_mut().zip(link.run_checked("ZCOUNT", &counts).await?) {
            *bound = link.read("ZCOUNT", count)?;
        }
        let [mut low, mut high] = bounds;
        while low < high {
            let middle = low.midpoint(high);
            let one = redis::Cmd::zrange(due, middle.cast_signed(), middle.cast_signed());
            let found: Vec<String> = link.read("ZRANGE", link.command("ZRANGE", one).await?)?;
            if found.first().is_some_and(|found| *found <= id) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }
}

/// Whether a notification comes behind a place. Several are due in one millisecond, in the order of their ids.
fn is_behind((ms, id): Place, (before_ms, before): Place) -> bool {
    ms > before_ms || ms == before_ms && id.to_string() > before.to_string()
}
