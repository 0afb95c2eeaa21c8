//! Notes why a bot is retried: the last reason of its handler, and the start of its failures. The
//! notes inform operators, and no component depends on them. They are written separately from the
//! completion and expire later.
//!
//! A bot counts as failing while the event that was at the head of its queue after the last failure
//! is still at the head, or while a lane is set aside. After that, the note is outdated.

use std::collections::BTreeSet;
use std::time::Duration;

use redis::{Pipeline, Value};
use serde::Serialize;
use utoipa::ToSchema;

use super::{BotState, BotView, Queue};
use crate::clock::millis;
use crate::id::{BotId, Sequence};
use crate::redis::scripts::Attempts;
use crate::redis::{RedisError, Reply, ReplyError};

/// Time that a note is kept beyond the pause before the next attempt.
const KEPT: Duration = Duration::from_secs(3_600);
/// Number of bots per shard that are checked for failures: leased and parked ones with the earliest
/// deadlines.
const FIRST: i64 = 64;
/// The same for those with the latest deadlines, that is, in the longest backoff.
const LAST: i64 = 32;
/// The same for ready bots.
const READY: i64 = 32;

/// The last failure of a handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct LastFailure {
    /// The reason, up to 1,000 bytes.
    pub reason: String,
    /// The time, ms since 1970.
    pub time_ms: u64,
    /// The start of the uninterrupted failures of the bot, ms since 1970.
    pub since_ms: u64,
}

/// The failing bots of a pipeline, among those that were checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failing {
    /// The bots, those that have failed for longest first.
    pub bots: Vec<BotId>,
    /// The reason of the last failure.
    pub reason: String,
    /// The time of the last failure, ms since 1970.
    pub time_ms: u64,
    /// The start of the failures of the first bot, ms since 1970.
    pub since_ms: u64,
    /// The last failure of each bot, in the same order.
    #[serde(skip)]
    pub each: Vec<LastFailure>,
}

impl Failing {
    /// The part that concerns `wanted` bots; `None`: none of them fails.
    #[must_use]
    pub fn of(&self, wanted: &dyn Fn(&BotId) -> bool) -> Option<Self> {
        let each = self.bots.iter().cloned().zip(self.each.iter().cloned());
        Self::new(each.filter(|(bot, _)| wanted(bot)).collect())
    }

    /// The summary of bots and their last failures.
    pub(crate) fn new(mut found: Vec<(BotId, LastFailure)>) -> Option<Self> {
        found.sort_by(|a, b| (a.1.since_ms, &a.0).cmp(&(b.1.since_ms, &b.0)));
        let since_ms = found.first()?.1.since_ms;
        let last =
            found.iter().map(|(_, failure)| failure).max_by_key(|failure| failure.time_ms)?;
        let (reason, time_ms) = (last.reason.clone(), last.time_ms);
        let (bots, each) = found.into_iter().unzip();
        Some(Self { bots, reason, time_ms, since_ms, each })
    }
}

/// A failure to note.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noted<'a> {
    pub(crate) reason: &'a str,
    /// The first event of the slice, if known.
    pub(crate) first: Option<Sequence>,
    /// Whether a part of the slice was done. Then the series of failures is interrupted.
    pub(crate) progress: bool,
    /// Whether lanes of the bot were set aside before. Then the series goes on.
    pub(crate) had_lanes: bool,
    /// The pause before the next attempt; none after a dead letter.
    pub(crate) pause: Option<Duration>,
    /// The time since 1970.
    pub(crate) now: Duration,
}

/// The start of the failures of a bot, and the event that is retried next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Streak {
    since_ms: u64,
    head: u64,
}

impl Streak {
    pub(super) fn written(self) -> String {
        format!("{} {}", self.since_ms, self.head)
    }

    pub(super) fn read(text: &str) -> Option<Self> {
        let (since_ms, head) = text.split_once(' ')?;
        Some(Self { since_ms: since_ms.parse().ok()?, head: head.parse().ok()? })
    }
}

/// The time and the reason.
pub(super) fn written(time_ms: u64, reason: &str) -> String {
    format!("{time_ms} {reason}")
}

pub(super) fn read(text: &str) -> Option<(u64, &str)> {
    let (time_ms, reason) = text.split_once(' ')?;
    Some((time_ms.parse().ok()?, reason))
}

/// The stored note of one bot.
#[derive(Debug)]
struct Kept {
    failure: String,
    streak: Option<Streak>,
    head: Option<u64>,
    /// When the last one of the lanes is due that are set aside, ms since 1970; `None`: no lane is.
    lanes_until_ms: Option<u64>,
}

impl Kept {
    /// Whether the event that failed last is still queued; `None` for notes of earlier versions.
    fn still_fails(&self) -> Option<bool> {
        let has_lanes = self.lanes_until_ms.is_some();
        self.streak.map(|streak| has_lanes || self.head == Some(streak.head))
    }
}

impl Queue {
    /// Notes why the handler failed for a bot. To be called after the completion.
    pub(crate) async fn note_failure(
        &self,
        bot: &BotId,
        noted: Noted<'_>,
    ) -> Result<(), RedisError> {
        let kept = self.kept(std::slice::from_ref(bot)).await?.pop();
        let Some(Kept { streak, head, lanes_until_ms, .. }) = kept else { return Ok(()) };
        let Some(head) = head.or(lanes_until_ms.map(|_| 0)) else { return Ok(()) };
        let now_ms = millis(noted.now);
        // After a dead letter, the next event continues the series of failures. Progress of one lane does not
        // end the failures of another one.
        let tried = noted.first.map_or(head, Sequence::get);
        let before = streak.filter(|streak| {
            let is_same = !noted.progress && streak.head == tried;
            is_same || noted.had_lanes
        });
        let streak = Streak { since_ms: before.map_or(now_ms, |before| before.since_ms), head };
        let pause_ms = millis(noted.pause.unwrap_or_default());
        let lanes_ms = lanes_until_ms.unwrap_or_default().saturating_sub(now_ms);
        let ttl_ms = pause_ms.max(lanes_ms).saturating_add(millis(KEPT));
        let keys = self.keys_of(bot);
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("SET").arg(keys.failure(bot)).arg(written(now_ms, noted.reason));
        pipe.arg("PX").arg(ttl_ms);
        pipe.cmd("SET").arg(keys.failing(bot)).arg(streak.written()).arg("PX").arg(ttl_ms);
        self.link().run_checked("SET", &pipe).await.map(drop)
    }

    /// The failure because of which a bot is retried. `None` if the bot is not retried, if a lease
    /// was lost without a reason, or if the note has expired.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn last_failure(&self, view: &BotView) -> Result<Option<LastFailure>, RedisError> {
        let kept = self.kept(std::slice::from_ref(&view.bot)).await?.pop();
        kept.map_or(Ok(None), |kept| self.failure_of(&kept, view))
    }

    fn failure_of(&self, kept: &Kept, view: &BotView) -> Result<Option<LastFailure>, RedisError> {
        if kept.failure.is_empty() {
            return Ok(None);
        }
        let rests = view.attempts > 0 || view.state == BotState::Parked;
        if !kept.still_fails().unwrap_or(rests) {
            return Ok(None);
        }
        let failure = &kept.failure;
        let misread = || self.link().misread("GET", ReplyError::unexpected("a failure", failure));
        let (time_ms, reason) = read(failure).ok_or_else(misread)?;
        let since_ms = kept.streak.map_or(time_ms, |streak| streak.since_ms);
        Ok(Some(LastFailure { reason: reason.to_owned(), time_ms, since_ms }))
    }

    /// The failing bots, among up to 128 per shard: those with the shortest and the longest pauses,
    /// and the first ready ones. `None` if none of them fails.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn failing(&self) -> Result<Option<Failing>, RedisError> {
        let mut pipe = Pipeline::new();
        for keys in self.shards().iter() {
            pipe.cmd("ZRANGE").arg(keys.busy()).arg(0).arg(FIRST - 1);
            pipe.cmd("ZRANGE").arg(keys.busy()).arg(-LAST).arg(-1);
            pipe.cmd("ZRANGE").arg(keys.ready()).arg(0).arg(READY - 1);
        }
        let mut bots = BTreeSet::new();
        for names in self.link().run_checked("ZRANGE", &pipe).await? {
            let mut names = self.read("ZRANGE", Reply::new(names))?;
            while names.len() > 0 {
                bots.extend(BotId::parse(&self.read("ZRANGE", names.text())?).ok());
            }
        }
        let bots = self.noted(bots).await?;
        let mut found = Vec::new();
        for (bot, kept) in bots.iter().zip(self.kept(&bots).await?) {
            let (Some(streak), Some(true)) = (kept.streak, kept.still_fails()) else { continue };
            let (time_ms, reason) = read(&kept.failure).unwrap_or_default();
            let reason = reason.to_owned();
            let failure = LastFailure { reason, time_ms, since_ms: streak.since_ms };
            found.push((bot.clone(), failure));
        }
        Ok(Failing::new(found))
    }

    /// Those of these bots whose event that failed last is still the first one.
    pub(super) async fn still_failing(&self, bots: &[BotId]) -> Result<Vec<BotId>, RedisError> {
        let noted = self.noted(bots.iter().cloned().collect()).await?;
        let kept = self.kept(&noted).await?;
        let failing =
            noted.into_iter().zip(kept).filter(|(_, kept)| kept.still_fails() == Some(true));
        Ok(failing.map(|(bot, _)| bot).collect())
    }

    /// The last failures of these bots, as [`Self::last_failure`] has them.
    pub(super) async fn last_failures(
        &self,
        views: &[BotView],
    ) -> Result<Vec<Option<LastFailure>>, RedisError> {
        let bots: Vec<BotId> = views.iter().map(|view| view.bot.clone()).collect();
        let kept = self.kept(&bots).await?;
        kept.iter().zip(views).map(|(kept, view)| self.failure_of(kept, view)).collect()
    }

    /// The bots with a note. Usually there are few, so the other bots cost only this command.
    async fn noted(&self, bots: BTreeSet<BotId>) -> Result<Vec<BotId>, RedisError> {
        let mut pipe = Pipeline::with_capacity(bots.len());
        for bot in &bots {
            pipe.cmd("GET").arg(self.keys_of(bot).failing(bot));
        }
        if bots.is_empty() {
            return Ok(Vec::new());
        }
        let noted = self.link().run_checked("GET", &pipe).await?;
        let noted = bots.into_iter().zip(noted).filter(|(_, value)| *value != Value::Nil);
        Ok(noted.map(|(bot, _)| bot).collect())
    }

    /// The stored notes of these bots.
    async fn kept(&self, bots: &[BotId]) -> Result<Vec<Kept>, RedisError> {
        if bots.is_empty() {
            return Ok(Vec::new());
        }
        // Before the lanes: events move from the queue to them, and so are missed in neither.
        let heads = self.heads(bots).await?;
        let mut pipe = Pipeline::with_capacity(3 * bots.len());
        for bot in bots {
            let keys = self.keys_of(bot);
            pipe.cmd("GET").arg(keys.failure(bot));
            pipe.cmd("GET").arg(keys.failing(bot));
            pipe.cmd("HGET").arg(keys.attempts()).arg(bot.as_str());
        }
        let values = Value::Array(self.link().run_checked("GET", &pipe).await?);
        let mut reply = self.read("GET", Reply::new(values))?;
        let mut all = Vec::with_capacity(bots.len());
        for bot in bots {
            let mut next = || self.read("GET", reply.bytes()).map(Option::unwrap_or_default);
            let failure = String::from_utf8_lossy(&next()?).into_owned();
            let streak = Streak::read(&String::from_utf8_lossy(&next()?));
            // What another version wrote hides only the lanes.
            let (_, aside) = Attempts::read(&mut reply).unwrap_or_default();
            let lanes_until_ms = aside.lanes().iter().map(|lane| lane.due_ms).max();
            let head = heads.get(bot).map(|head| head.sequence).filter(|first| *first > 0);
            all.push(Kept { failure, streak, head, lanes_until_ms });
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_read_as_it_was_written() {
        for reason in ["", "no answer within 5s", " 12 a|b\n"] {
            let text = written(1_760_000_000_000, reason);
            assert_eq!(read(&text), Some((1_760_000_000_000, reason)));
        }
        assert_eq!((read("now why"), read("1")), (None, None));
        let streak = Streak { since_ms: 1, head: u64::MAX };
        assert_eq!(Streak::read(&streak.written()), Some(streak));
        assert_eq!((Streak::read("1"), Streak::read("1 x")), (None, None));
    }

    #[test]
    fn the_bots_that_fail_for_longest_come_first_and_the_reason_is_the_last_one() {
        let failure = |name: &str, since_ms, time_ms| {
            let reason = format!("why {name}");
            (BotId::parse(name).unwrap(), LastFailure { reason, time_ms, since_ms })
        };
        let found = [failure("a", 30, 40), failure("c", 10, 90), failure("b", 10, 20)];
        let failing = Failing::new(found.to_vec()).unwrap();
        let names: Vec<&str> = failing.bots.iter().map(BotId::as_str).collect();
        assert_eq!(names, ["b", "c", "a"]);
        let of_each: Vec<u64> = failing.each.iter().map(|failure| failure.time_ms).collect();
        assert_eq!(of_each, [20, 90, 40]);
        assert_eq!((failing.since_ms, failing.time_ms, &*failing.reason), (10, 90, "why c"));
        let of_a = failing.of(&|bot| bot.as_str() == "a").unwrap();
        assert_eq!((of_a.since_ms, &*of_a.reason), (30, "why a"));
        assert_eq!(failing.of(&|_| false), None);
    }
}
