//! Views per day: from MongoDB, and whether it is behind.

use std::time::Duration;

use futures_util::Stream;
use jiff::civil::Date;

use super::exports::{self, Broken, Turn};
use super::large::Size;
use super::view::AdId;
use super::{Counters, CountersError, store};
use crate::id::BotId;

/// MongoDB is behind if a view waits for longer than `linger` and this. In normal operation, views wait
/// for up to a second longer than `linger`.
const BEHIND: Duration = Duration::from_secs(10);

/// Views of several ads per day.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Days {
    /// In the requested order: every day, including days without views.
    pub(crate) of_ads: Vec<Vec<(Date, u64)>>,
    /// Whether older views than those of the last seconds may be missing: [`Counters::is_behind`].
    pub(crate) stale: bool,
}

impl Counters {
    /// Views of ads per day, from `from` to `to`, including days without views. The views of the
    /// last seconds are missing.
    ///
    /// # Errors
    /// If MongoDB does not answer in time, or too many requests of the caller wait for it.
    pub(crate) async fn daily(
        &self,
        bot: &BotId,
        ads: &[AdId],
        from: Date,
        to: Date,
    ) -> Result<Days, CountersError> {
        // Asked first: MongoDB then has what does not wait any more.
        let stale = self.is_behind(bot).await;
        let size = Size::of(store::months(from, to) * ads.len());
        let daily = async {
            let _turn = self.large.days.take(bot, size).await?;
            self.store.daily(bot, ads, from, to).await
        };
        let asked = if size == Size::Small {
            self.mongo.read(self.read_timeout, daily).await
        } else {
            self.mongo.read_much(self.read_timeout, daily).await
        };
        Ok(Days { of_ads: asked?, stale })
    }

    /// The views of one day, without ads that have none. Waits for the first ones for `within`. The
    /// turn ends with the stream.
    ///
    /// # Errors
    /// If MongoDB is unavailable. If it becomes unavailable later, or another export takes the turn
    /// over, an item of the stream is the error.
    pub(crate) async fn export(
        &self,
        bot: &BotId,
        day: Date,
        turn: Turn,
        within: Duration,
    ) -> Result<
        impl Stream<Item = Result<(AdId, u64), Broken>> + Send + Unpin + 'static,
        CountersError,
    > {
        let pages = self.mongo.read_much(within, self.store.export(bot, day)).await?;
        Ok(exports::views(pages, turn))
    }

    /// Whether days and exports that are read from now on may lack older views than those of the last
    /// seconds: a view of the bot has waited for MongoDB for longer than [`BEHIND`] and `linger`, or
    /// Redis does not tell. While the clock of Redis is set back, no view seems to wait.
    pub(crate) async fn is_behind(&self, bot: &BotId) -> bool {
        let waited = self.redis(bot).read(self.read_timeout / 2, self.queue.waited(bot)).await;
        let linger = Duration::from_millis(self.queue.limits().linger_ms);
        waited.ok().is_none_or(|waited| waited > BEHIND + linger)
    }
}
