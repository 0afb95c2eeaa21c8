//! Data beside the queues of the rules: statistics, and messages about changes.

use std::collections::{BTreeMap, BTreeSet};

use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};

use super::rule::RULES_MAX;
use super::store::Stored;
use crate::id::{BotId, RuleId};
use crate::queue::Queue;
use crate::redis::keys::ShardKeys;
use crate::redis::{RedisError, Reply};

/// The statistics of a rule since its creation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleStats {
    /// Number of matching events.
    pub matched: u64,
    /// Number of actions it caused.
    pub actions: u64,
    /// Number of filters that could not be evaluated and of actions that failed.
    pub errors: u64,
    /// The last failure.
    pub last: Option<LastError>,
}

/// The last failure of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastError {
    /// The time, ms since 1970.
    pub at_ms: u64,
    /// The event.
    pub event: String,
    /// The reason.
    pub why: String,
}

/// The word in a wake message for a bot whose rules are changing, or have changed.
pub(crate) const RULES: &str = "rules";

/// The prefixes of a rule's hash fields: matches, actions, errors, the last error.
const FIELDS: [char; 4] = ['m', 'a', 'e', 'l'];

/// In addition to the keys of the queues ([`crate::redis::keys`]):
///
/// | key | type | meaning |
/// |---|---|---|
/// | `fl:{p:s}:rules:<bot>` | hash | `m<rule>` the number of matches, `a<rule>` of actions, `e<rule>` of errors, and `l<rule>` the last error |
impl ShardKeys {
    /// The statistics of the rules of one bot.
    #[must_use]
    pub fn rules(&self, bot: &BotId) -> String {
        self.of_bot("rules:", bot)
    }
}

impl Queue {
    /// Publishes to every process that the rules of a bot are changing.
    pub(crate) async fn tell_rules(&self, bot: &BotId) -> Result<(), RedisError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.keys_of(bot).wake()).arg(format!("{RULES} {bot}"));
        self.link().command("PUBLISH", command).await.map(drop)
    }

    /// Adds to the statistics of the rules of several bots.
    pub(crate) async fn note_rules(
        &self,
        notes: &[(BotId, RuleId, RuleStats)],
    ) -> Result<(), RedisError> {
        let [matched, actions, errors, last] = FIELDS;
        let mut pipe = Pipeline::new();
        for (bot, rule, stats) in notes {
            let key = self.keys_of(bot).rules(bot);
            let counts =
                [(matched, stats.matched), (actions, stats.actions), (errors, stats.errors)];
            for (field, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
                pipe.cmd("HINCRBY").arg(&key).arg(format!("{field}{rule}")).arg(count);
            }
            if let Some(error) = &stats.last {
                let error = serde_json::to_string(error).unwrap_or_default();
                pipe.cmd("HSET").arg(&key).arg(format!("{last}{rule}")).arg(error);
            }
        }
        if pipe.is_empty() {
            return Ok(());
        }
        self.link().run_checked("HINCRBY", &pipe).await.map(drop)
    }

    /// The statistics of the rules of a bot.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn rule_stats(&self, bot: &BotId) -> Result<BTreeMap<String, RuleStats>, RedisError> {
        let misread = |source| self.link().misread("HGETALL", source);
        let mut command = redis::cmd("HGETALL");
        command.arg(self.keys_of(bot).rules(bot));
        let value = self.link().command("HGETALL", command).await?;
        let value = match value {
            Value::Map(pairs) => {
                Value::Array(pairs.into_iter().flat_map(|(key, value)| [key, value]).collect())
            }
            other => other,
        };
        let mut reply = Reply::new(value).map_err(misread)?;
        let mut all: BTreeMap<String, RuleStats> = BTreeMap::new();
        let [matched, actions, errors, last] = FIELDS;
        while reply.len() > 1 {
            let field = reply.text().map_err(misread)?;
            let value = reply.text().map_err(misread)?;
            let Some(kind) = field.chars().next() else { continue };
            let stats = all.entry(field[kind.len_utf8()..].to_owned()).or_default();
            let number = value.parse().unwrap_or(0);
            match kind {
                kind if kind == matched => stats.matched = number,
                kind if kind == actions => stats.actions = number,
                kind if kind == errors => stats.errors = number,
                kind if kind == last => stats.last = serde_json::from_str(&value).ok(),
                _ => {}
            }
        }
        Ok(all)
    }

    /// Deletes the statistics of a rule. Returns whether the bot has statistics of more rules than
    /// it may have: a process that evaluates a rule while it is deleted leaves some behind.
    pub(crate) async fn forget_rule(&self, bot: &BotId, rule: &RuleId) -> Result<bool, RedisError> {
        let key = self.keys_of(bot).rules(bot);
        let fields: Vec<String> = FIELDS.iter().map(|field| format!("{field}{rule}")).collect();
        let mut pipe = Pipeline::with_capacity(2);
        pipe.hdel(&key, fields).hlen(&key);
        let values = self.link().run_checked("HDEL", &pipe).await?;
        let misread = |source| self.link().misread("HLEN", source);
        let mut reply = Reply::new(Value::Array(values)).map_err(misread)?;
        let _deleted: u64 = reply.number().map_err(misread)?;
        let left: u64 = reply.number().map_err(misread)?;
        Ok(left > (FIELDS.len() * RULES_MAX) as u64)
    }

    /// Deletes the statistics of all rules of a bot except these.
    pub(crate) async fn forget_other_rules(
        &self,
        bot: &BotId,
        rules: &[Stored],
    ) -> Result<(), RedisError> {
        let key = self.keys_of(bot).rules(bot);
        let keep: BTreeSet<&str> = rules.iter().map(|stored| stored.id.as_str()).collect();
        let found = self.rule_stats(bot).await?;
        let gone: Vec<String> = found
            .into_keys()
            .filter(|rule| !keep.contains(rule.as_str()))
            .flat_map(|rule| FIELDS.map(|field| format!("{field}{rule}")))
            .collect();
        for fields in gone.chunks(1_000) {
            self.link().command("HDEL", redis::Cmd::hdel(&key, fields)).await?;
        }
        Ok(())
    }
}
