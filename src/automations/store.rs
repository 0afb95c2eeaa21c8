//! The rules of every bot: one document per rule, and for a day what is left of one that was
//! deleted, so that every process hears of it.
//!
//! | field | holds |
//! |---|---|
//! | `_id` | bot, U+001F, rule |
//! | `bot`, `id` | whose, which |
//! | `name`, `on`, `filter`, `enabled` | what the rule says |
//! | `actions` | the rest of it, as JSON: data may have names that documents may not |
//! | `bytes` | its size |
//! | `v` | the version, another one with every write; gone with the rule |
//! | `changed` | when it was last written, by the server's clock |
//! | `gone` | when it was deleted |

use std::time::Duration;

use mongodb::bson::{
    DateTime, Document, RawArrayBuf, RawDocument, RawDocumentBuf, cstr, doc, rawdoc,
};
use mongodb::options::{FindOptions, IndexOptions, ReadPreference, SelectionCriteria};
use tracing::warn;

use crate::automations::rule::{RULES_MAX, RULES_MAX_BYTES, Rule};
use crate::deadline;
use crate::id::{BotId, RuleId};
use crate::store::mongo::{ANSWER_TIMEOUT, Mongo, MongoError};
use crate::telemetry::OncePerMinute;

/// The collection.
pub const AUTOMATIONS: &str = "automations";
/// Between the parts of a document's id. No id can hold it.
const SEPARATOR: char = '\u{1f}';
/// What is left of a deleted rule is kept so long. Who knows the rules from before it reads all.
pub(crate) const GONE_FOR: Duration = Duration::from_secs(24 * 3_600);
/// Rules read at once where all are.
const PAGE: usize = 10_000;
/// A write that meets another one is tried this often.
const TRIES: usize = 5;

/// A rule and its version.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// Which.
    pub id: RuleId,
    /// What it says.
    pub rule: Rule,
    /// Its version.
    pub version: String,
}

/// What a rule means for the fan-out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subscribing {
    pub(crate) bot: BotId,
    /// Types, if it is in force.
    pub(crate) on: Vec<String>,
    pub(crate) enabled: bool,
}

/// A change of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Changed {
    /// The document.
    pub(crate) id: String,
    pub(crate) bot: BotId,
    /// Tells it from other changes of this document.
    pub(crate) version: String,
    /// When, by the server's clock.
    pub(crate) at: DateTime,
}

/// What a writer knows of the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// Nothing: whatever is there.
    Anything,
    /// There is one.
    Something,
    /// There is none.
    Nothing,
    /// It has one of these versions.
    Versions(Vec<String>),
}

/// Why a rule is not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// MongoDB failed.
    #[error(transparent)]
    Mongo(#[from] MongoError),
    /// The rule is not as expected; its version, or none.
    #[error("the rule has another version")]
    Unexpected(Option<String>),
    /// The bot has [`RULES_MAX`] rules.
    #[error("the bot has {RULES_MAX} rules, which is the most")]
    TooMany,
    /// The bot's rules are too large together.
    #[error("the rules of the bot would have {0} bytes; at most {RULES_MAX_BYTES} are allowed")]
    TooLarge(usize),
    /// Others write the rule all the time.
    #[error("others change the rule at the same time")]
    Contended,
}

/// The document of a new rule.
pub(crate) fn document(bot: &BotId, id: &RuleId, rule: &Rule) -> Document {
    let mut document = doc! {
        "_id": id_of(bot, id), "bot": bot.as_str(), "id": id.as_str(), "name": &rule.name,
        "on": &rule.on, "enabled": rule.enabled, "v": new_version(), "changed": DateTime::now(),
        "bytes": i64::try_from(rule.bytes()).unwrap_or(i64::MAX),
        "actions": serde_json::to_string(&rule.actions).unwrap_or_default(),
    };
    if let Some(filter) = &rule.filter {
        document.insert("filter", filter);
    }
    document
}

/// The rules of every bot. Cheap to clone.
#[derive(Debug, Clone)]
pub struct RuleStore {
    mongo: Mongo,
}

fn id_of(bot: &BotId, rule: &RuleId) -> String {
    format!("{bot}{SEPARATOR}{rule}")
}

impl RuleStore {
    /// The rules in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        Self { mongo }
    }

    /// Creates the indexes. May be repeated.
    ///
    /// # Errors
    /// When MongoDB does not answer or refuses.
    pub async fn prepare(&self) -> Result<(), MongoError> {
        let named = |name: &str| IndexOptions::builder().name(name.to_owned());
        let gone = named("gone").expire_after(GONE_FOR).sparse(true).build();
        self.mongo.index(AUTOMATIONS, doc! { "gone": 1 }, gone).await?;
        let of_bot = named("bot").build();
        self.mongo.index(AUTOMATIONS, doc! { "bot": 1, "_id": 1 }, of_bot).await?;
        let changed = named("changed").build();
        self.mongo.index(AUTOMATIONS, doc! { "changed": 1 }, changed).await
    }

    /// The rules of a bot, in the order of their ids.
    ///
    /// # Errors
    /// When MongoDB does not answer or refuses.
    pub async fn list(&self, bot: &BotId) -> Result<Vec<Stored>, MongoError> {
        let found = self.find(of_bot(bot), None, doc! { "_id": 1 }, 0).await?;
        Ok(found.iter().filter_map(stored).collect())
    }

    /// A rule; `None` if there is no such one.
    ///
    /// # Errors
    /// When MongoDB does not answer or refuses.
    pub async fn get(&self, bot: &BotId, rule: &RuleId) -> Result<Option<Stored>, MongoError> {
        let filter = doc! { "_id": id_of(bot, rule), "v": { "$exists": true } };
        let found = self.find(filter, None, doc! {}, 1).await?;
        Ok(found.first().and_then(stored))
    }

    /// Writes a rule. Answers its version, and whether it is new.
    ///
    /// # Errors
    /// When it is not as expected or MongoDB fails; then it may be written.
    pub async fn put(
        &self,
        bot: &BotId,
        id: &RuleId,
        rule: &Rule,
        expected: &Expected,
    ) -> Result<(String, bool), WriteError> {
        let actions = serde_json::to_string(&rule.actions).unwrap_or_default();
        let bytes = rule.bytes();
        let size = i64::try_from(bytes).unwrap_or(i64::MAX);
        for _ in 0..TRIES {
            let before = self.expect(bot, id, expected).await?;
            self.check_room(bot, id, bytes).await?;
            let version = new_version();
            let mut set = rawdoc! {
                "bot": bot.as_str(), "id": id.as_str(), "name": &*rule.name,
                "enabled": rule.enabled, "actions": &*actions, "v": &*version,
                "bytes": size,
            };
            let on: RawArrayBuf = rule.on.iter().map(String::as_str).collect();
            set.append(cstr!("on"), on);
            let mut unset = rawdoc! { "gone": "" };
            match &rule.filter {
                Some(filter) => set.append(cstr!("filter"), filter.as_str()),
                None => unset.append(cstr!("filter"), ""),
            }
            let change =
                rawdoc! { "$set": set, "$unset": unset, "$currentDate": { "changed": true } };
            if self.write(bot, id, before.as_deref(), change, before.is_none()).await? {
                return Ok((version, before.is_none()));
            }
        }
        Err(WriteError::Contended)
    }

    /// Deletes a rule. Answers whether there was one.
    ///
    /// # Errors
    /// When it is not as expected or MongoDB fails; then it may be deleted.
    pub async fn delete(
        &self,
        bot: &BotId,
        id: &RuleId,
        expected: &Expected,
    ) -> Result<bool, WriteError> {
        for _ in 0..TRIES {
            let before = self.expect(bot, id, expected).await?;
            if before.is_none() {
                return Ok(false);
            }
            let change = rawdoc! {
                "$unset": { "v": "", "name": "", "on": "", "filter": "", "actions": "", "enabled": "", "bytes": "" },
                "$currentDate": { "changed": true, "gone": true },
            };
            if self.write(bot, id, before.as_deref(), change, false).await? {
                return Ok(true);
            }
        }
        Err(WriteError::Contended)
    }

    /// The version of a rule that is as expected.
    async fn expect(
        &self,
        bot: &BotId,
        id: &RuleId,
        expected: &Expected,
    ) -> Result<Option<String>, WriteError> {
        let before = self.get(bot, id).await?.map(|stored| stored.version);
        let is_expected = match (expected, &before) {
            (Expected::Anything, _)
            | (Expected::Something, Some(_))
            | (Expected::Nothing, None) => true,
            (Expected::Versions(versions), Some(before)) => versions.contains(before),
            _ => false,
        };
        if is_expected { Ok(before) } else { Err(WriteError::Unexpected(before)) }
    }

    /// Writes what has this version; whether it still had it.
    async fn write(
        &self,
        bot: &BotId,
        id: &RuleId,
        before: Option<&str>,
        change: RawDocumentBuf,
        upsert: bool,
    ) -> Result<bool, MongoError> {
        let id = id_of(bot, id);
        let filter = if let Some(version) = before {
            rawdoc! { "_id": id, "v": version }
        } else {
            rawdoc! { "_id": id, "v": { "$exists": false } }
        };
        let statement = rawdoc! { "q": filter, "u": change, "upsert": upsert };
        let statements = [statement].into_iter().collect();
        let mut done = self.mongo.update(AUTOMATIONS, statements, true, ANSWER_TIMEOUT, ()).await?;
        match done.refused.pop() {
            Some(refused) if !refused.met_another => Err(refused.error),
            Some(_) => Ok(false),
            None => Ok(done.modified + done.upserted.len() == 1),
        }
    }

    /// Refuses a rule that the bot has no room for.
    async fn check_room(&self, bot: &BotId, id: &RuleId, bytes: usize) -> Result<(), WriteError> {
        let wanted = Some(doc! { "_id": 1, "bytes": 1 });
        let found = self.find(of_bot(bot), wanted, doc! {}, 0).await?;
        let own = id_of(bot, id);
        let others = found.iter().filter(|document| document.get_str("_id").ok() != Some(&*own));
        let (mut count, mut sum) = (1, bytes);
        for other in others {
            count += 1;
            sum += usize::try_from(other.get_i64("bytes").unwrap_or(0)).unwrap_or(0);
        }
        if count > RULES_MAX {
            return Err(WriteError::TooMany);
        }
        if sum > RULES_MAX_BYTES {
            return Err(WriteError::TooLarge(sum));
        }
        Ok(())
    }

    /// A page of what all rules mean for the fan-out, in the order of their documents' ids, after
    /// `last`. Answers with it the last id, if there may be more.
    pub(crate) async fn page(
        &self,
        last: Option<&str>,
    ) -> Result<(Vec<Subscribing>, Option<String>), MongoError> {
        let mut filter = doc! { "v": { "$exists": true } };
        if let Some(last) = last {
            filter.insert("_id", doc! { "$gt": last });
        }
        let most = i64::try_from(PAGE).unwrap_or(i64::MAX);
        let found = self.find(filter, Some(meaning()), doc! { "_id": 1 }, most).await?;
        let last = found.last().filter(|_| found.len() == PAGE);
        let last = last.and_then(|document| document.get_str("_id").ok()).map(str::to_owned);
        Ok((found.iter().filter_map(subscribing).collect(), last))
    }

    /// What the rules of these bots mean for the fan-out.
    pub(crate) async fn of_bots(&self, bots: &[BotId]) -> Result<Vec<Subscribing>, MongoError> {
        let bots: Vec<&str> = bots.iter().map(BotId::as_str).collect();
        let filter = doc! { "bot": { "$in": bots }, "v": { "$exists": true } };
        let found = self.find(filter, Some(meaning()), doc! {}, 0).await?;
        Ok(found.iter().filter_map(subscribing).collect())
    }

    /// The changes from `since` on, the newest last.
    pub(crate) async fn changes(&self, since: DateTime) -> Result<Vec<Changed>, MongoError> {
        let wanted = doc! { "bot": 1, "v": 1, "changed": 1 };
        let filter = doc! { "changed": { "$gte": since } };
        let found = self.find(filter, Some(wanted), doc! { "changed": 1 }, 0).await?;
        let changed = |document: &RawDocumentBuf| {
            let bot = BotId::parse(document.get_str("bot").ok()?).ok()?;
            Some(Changed {
                id: document.get_str("_id").ok()?.to_owned(),
                bot,
                version: document.get_str("v").unwrap_or_default().to_owned(),
                at: document.get_datetime("changed").ok()?,
            })
        };
        Ok(found.iter().filter_map(changed).collect())
    }

    /// The newest change; `None` without any rule.
    pub(crate) async fn newest_change(&self) -> Result<Option<DateTime>, MongoError> {
        let found =
            self.find(doc! {}, Some(doc! { "changed": 1 }), doc! { "changed": -1 }, 1).await?;
        Ok(found.first().and_then(|document| document.get_datetime("changed").ok()))
    }

    /// The server's clock, since 1970, where it tells it.
    pub(crate) async fn time(&self) -> Result<Option<Duration>, MongoError> {
        Ok(self.mongo.info().await?.time)
    }

    async fn find(
        &self,
        filter: Document,
        projection: Option<Document>,
        sort: Document,
        limit: i64,
    ) -> Result<Vec<RawDocumentBuf>, MongoError> {
        let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
        let mut options = FindOptions::builder().sort(sort).selection_criteria(primary).build();
        options.projection = projection;
        options.limit = (limit > 0).then_some(limit);
        self.mongo.find(AUTOMATIONS, filter, options, deadline::at_most(ANSWER_TIMEOUT)).await
    }
}

/// A rule; `None` for what others wrote, and wrong.
fn stored(document: &RawDocumentBuf) -> Option<Stored> {
    let read = || {
        let rule = Rule {
            name: document.get_str("name").ok()?.to_owned(),
            on: texts(document)?,
            filter: document.get_str("filter").ok().map(str::to_owned),
            actions: serde_json::from_str(document.get_str("actions").ok()?).ok()?,
            enabled: document.get_bool("enabled").ok()?,
        };
        let id = RuleId::parse(document.get_str("id").ok()?).ok()?;
        Some(Stored { id, rule, version: document.get_str("v").ok()?.to_owned() })
    };
    read().or_else(|| misread(document))
}

/// Passes over a document that is no rule: nobody else has to suffer from it.
fn misread<T>(document: &RawDocumentBuf) -> Option<T> {
    static MISREAD: OncePerMinute = OncePerMinute::new();
    if let Some(suppressed) = MISREAD.take() {
        let id = document.get_str("_id").unwrap_or("?");
        warn!(
            id,
            suppressed, "a document of the collection {AUTOMATIONS} is no rule, and is passed over"
        );
    }
    None
}

/// What a rule means; one that cannot be read may concern every event of its bot.
fn subscribing(document: &RawDocumentBuf) -> Option<Subscribing> {
    let bot = document.get_str("bot").ok().and_then(|bot| BotId::parse(bot).ok());
    let Some(bot) = bot else { return misread(document) };
    let read = texts(document).zip(document.get_bool("enabled").ok());
    let (on, enabled) = read.unwrap_or_else(|| (vec!["*".to_owned()], true));
    Some(Subscribing { bot, on, enabled })
}

fn meaning() -> Document {
    doc! { "bot": 1, "on": 1, "enabled": 1 }
}

fn of_bot(bot: &BotId) -> Document {
    doc! { "bot": bot.as_str(), "v": { "$exists": true } }
}

fn texts(document: &RawDocument) -> Option<Vec<String>> {
    let list = document.get_array("on").ok()?;
    list.into_iter().map(|text| Some(text.ok()?.as_str()?.to_owned())).collect()
}

fn new_version() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A document as the first version wrote it. Every later version must read it.
    #[test]
    fn a_stored_rule_is_still_read_and_one_that_cannot_be_read_concerns_everything() {
        let actions = r#"[{"set_tag":{"tag":"vip"}},{"emit":{"type":"vip.made","delay":"10m"}}]"#;
        let sample = doc! {
            "_id": "b\u{1f}welcome", "bot": "b", "id": "welcome", "name": "Welcome",
            "on": ["tag.applied", "order.*"], "enabled": true,
            "filter": "subscriber.age > 30", "v": "0198c0de", "actions": actions,
            "bytes": 180_i64, "changed": DateTime::from_millis(1_760_000_000_000),
        };
        let found = stored(&RawDocumentBuf::try_from(&sample).unwrap()).unwrap();
        assert_eq!((found.id.as_str(), &*found.version), ("welcome", "0198c0de"));
        let rule = json!({
            "name": "Welcome", "on": ["tag.applied", "order.*"], "enabled": true,
            "filter": "subscriber.age > 30",
            "actions": serde_json::from_str::<serde_json::Value>(actions).unwrap(),
        });
        assert_eq!(found.rule, serde_json::from_value(rule).unwrap());

        let mut spoilt = sample;
        spoilt.remove("on");
        let spoilt = RawDocumentBuf::try_from(&spoilt).unwrap();
        assert_eq!(stored(&spoilt), None);
        let everything = Subscribing {
            bot: BotId::parse("b").unwrap(),
            on: vec!["*".to_owned()],
            enabled: true,
        };
        assert_eq!(subscribing(&spoilt), Some(everything));
    }
}
