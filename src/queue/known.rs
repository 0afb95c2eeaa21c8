//! The bots that a pipeline knows, for hints: whether one was ever seen, and names like that of one.

use std::collections::BTreeSet;

use redis::{Pipeline, Value};

use super::{BotState, BotView, DeadOfBot, Holdings, Queue};
use crate::history::bots_of_portion;
use crate::id::BotId;
use crate::rate::Weight;
use crate::redis::{RedisError, Reply};
use crate::spelling;

/// Number of names of a set of a shard that are looked at.
const NAMES: usize = 200;
/// Number of portions of completed slices of a shard that are looked at.
const PORTIONS: usize = 4;
/// Paused bots of a shard are looked at up to this number.
const PAUSED_MAX: i64 = 200;
/// Maximum number of names in a hint.
const NEAR: usize = 3;

impl BotView {
    /// Whether a bot that holds this has nothing besides attempts: nothing is queued, delayed, pending,
    /// dead or set.
    pub(crate) fn has_nothing(&self, dead: &DeadOfBot, holds: &Holdings) -> bool {
        let is_set = self.weight != Weight::ONE || self.rate.is_some() || self.burst.is_some();
        let has_any = self.state != BotState::Idle
            || self.depth > 0
            || self.attempts > 0
            || is_set
            || dead.count > 0
            || dead.at_least
            || *holds != Holdings::default();
        !has_any
    }
}

impl Queue {
    /// Whether nothing is known of a bot: nothing is queued, delayed, pending, dead or set, and no
    /// attempt is kept.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn is_unknown(
        &self,
        view: &BotView,
        dead: &DeadOfBot,
        holds: &Holdings,
    ) -> Result<bool, RedisError> {
        Ok(view.has_nothing(dead, holds) && self.attempts(&view.bot, 1).await?.is_empty())
    }

    /// Bots of the pipeline with names like this one, among those that are `wanted`, the nearest first.
    /// Looks at some hundred names of each shard only.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn bots_like(
        &self,
        bot: &BotId,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
    ) -> Result<Vec<BotId>, RedisError> {
        let mut pipe = Pipeline::new();
        for keys in self.shards().iter() {
            pipe.cmd("ZRANGE").arg(keys.ready()).arg(0).arg(NAMES - 1);
            pipe.cmd("ZRANGE").arg(keys.busy()).arg(0).arg(NAMES - 1);
            pipe.cmd("ZRANGE").arg(&keys.history[2]).arg(0).arg(NAMES - 1).arg("REV");
            pipe.cmd("SCARD").arg(keys.paused());
            pipe.cmd("XREVRANGE")
                .arg(&keys.history[0])
                .arg("+")
                .arg("-")
                .arg("COUNT")
                .arg(PORTIONS);
        }
        let mut names = BTreeSet::new();
        let answers = self.link().run_checked("names", &pipe).await?;
        let mut pauses = Pipeline::new();
        for (keys, answers) in self.shards().iter().zip(answers.chunks(5)) {
            let [ready, busy, failed, stopped, history] = answers else { continue };
            // A set cannot be read in part by its order.
            if matches!(stopped, Value::Int(count) if (1..=PAUSED_MAX).contains(count)) {
                pauses.cmd("SMEMBERS").arg(keys.paused());
            }
            for list in [ready, busy, failed] {
                self.add_names(list, &mut names)?;
            }
            let mut entries = self.read("names", Reply::new(history.clone()))?;
            while let Some(entry) = entries.next() {
                let mut entry = self.read("names", Reply::new(entry))?;
                entry.next();
                let fields = entry.next().unwrap_or(Value::Nil);
                let mut fields = self.read("names", Reply::new(fields))?;
                fields.next();
                let portion = self.read("names", fields.bytes())?.unwrap_or_default();
                names.extend(bots_of_portion(&portion));
            }
        }
        if !pauses.is_empty() {
            for list in self.link().run_checked("names", &pauses).await? {
                match list {
                    Value::Set(list) => self.add_names(&Value::Array(list), &mut names)?,
                    list => self.add_names(&list, &mut names)?,
                }
            }
        }
        let mut known: Vec<BotId> =
            names.iter().filter_map(|name| BotId::parse(name).ok()).collect();
        known.retain(|known| wanted(known));
        let near = spelling::near(bot.as_str(), known.iter().map(BotId::as_str), NEAR);
        Ok(near.into_iter().filter_map(|name| BotId::parse(name).ok()).collect())
    }

    fn add_names(&self, list: &Value, names: &mut BTreeSet<String>) -> Result<(), RedisError> {
        let mut list = self.read("names", Reply::new(list.clone()))?;
        while list.len() > 0 {
            names.insert(self.read("names", list.text())?);
        }
        Ok(())
    }
}
