//! What is kept beside the queues of the rules: their statistics, and the news that they change.

use std::collections::BTreeMap;

use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};

use crate::id::{BotId, RuleId};
use crate::keyspace::keys::ShardKeys;
use crate::keyspace::{Reply, StoreError};
use crate::queue::Queue;

/// What happened to a rule since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleStats {
    /// How often it matched.
    pub matched: u64,
    /// Actions that were decided.
    pub actions: u64,
    /// Filters that could not be evaluated and actions that could not be done.
    pub errors: u64,
    /// The last of them.
    pub last: Option<LastError>,
}

/// The last error of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastError {
    /// When, ms since 1970.
    pub at_ms: u64,
    /// The event.
    pub event: String,
    /// What went wrong.
    pub why: String,
}

/// The word on the wake channel for rules of a bot that change, or have changed.
pub(crate) const RULES: &str = "rules";

/// The fields of a rule: how often it matched, its actions, its errors, the last of them.
const FIELDS: [char; 4] = ['m', 'a', 'e', 'l'];

/// Beside the keys of the queues ([`crate::keyspace::keys`]):
/// `fl:{p:s}:rules:<bot>`, a hash: `m<rule>` how often it matched, `a<rule>` its actions, `e<rule>`
/// its errors, `l<rule>` the last one.
impl ShardKeys {
    /// What happened to the rules of one bot.
    #[must_use]
    pub fn rules(&self, bot: &BotId) -> String {
        self.of_bot("rules:", bot)
    }
}

impl Queue {
    /// Tells every process that the rules of a bot change.
    pub(crate) async fn tell_rules(&self, bot: &BotId) -> Result<(), StoreError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.keys_of(bot).wake()).arg(format!("{RULES} {bot}"));
        self.link().command("PUBLISH", command).await.map(drop)
    }

    /// Adds to what happened to the rules of several bots.
    pub(crate) async fn note_rules(
        &self,
        notes: &[(BotId, RuleId, RuleStats)],
    ) -> Result<(), StoreError> {
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

    /// What happened to the rules of a bot.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn rule_stats(&self, bot: &BotId) -> Result<BTreeMap<String, RuleStats>, StoreError> {
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

    /// Forgets what happened to a rule.
    pub(crate) async fn forget_rule(&self, bot: &BotId, rule: &RuleId) -> Result<(), StoreError> {
        let fields: Vec<String> = FIELDS.iter().map(|field| format!("{field}{rule}")).collect();
        let command = redis::Cmd::hdel(self.keys_of(bot).rules(bot), fields);
        self.link().command("HDEL", command).await.map(drop)
    }
}
