//! The rules of every bot. There is one document per rule. The rest of a deleted rule stays for a
//! day, so that every process learns of the deletion.
//!
//! | field | content |
//! |---|---|
//! | `_id` | bot, U+001F, rule |
//! | `bot`, `id` | the bot and the rule |
//! | `name`, `on`, `filter`, `enabled` | fields of the rule |
//! | `actions` | the other fields, as JSON: data may contain names that documents must not |
//! | `bytes` | its size |
//! | `memory` | [`Rule::memory`]; absent in rules of earlier versions |
//! | `place` | bot, U+001F, a number that no other rule of the bot has |
//! | `v` | the version, changed by every write; absent after the deletion |
//! | `changed` | the time of the last write, by the server's clock |
//! | `gone` | the time of the deletion |

mod documents;

use std::time::Duration;

use mongodb::bson::{DateTime, Document, RawArrayBuf, RawDocumentBuf, cstr, doc, rawdoc};
use mongodb::options::{FindOptions, IndexOptions, ReadPreference, SelectionCriteria};
use tracing::warn;

use self::documents::{stored, subscribing};
use crate::automations::room::{check_memory, free_place, number_in};
use crate::automations::rule::{RULES_MAX, RULES_MAX_BYTES, RULES_MAX_MEMORY, Rule};
use crate::id::{BotId, RuleId};
use crate::mongo::client::{ANSWER_TIMEOUT, Mongo, MongoError};
use crate::mongo::turns::{Turn, Turns};
use crate::request_deadline;

/// The collection.
pub const AUTOMATIONS: &str = "automations";
/// Separates the parts of a document's id. Ids cannot contain it.
pub(super) const SEPARATOR: char = '\u{1f}';
/// How long the rest of a deleted rule is kept. A process whose knowledge is older reads all rules.
pub(crate) const GONE_FOR: Duration = Duration::from_secs(24 * 3_600);
/// Number of rules per page when all rules are read.
const PAGE: usize = 10_000;
/// Maximum number of rules that are listed. Processes of earlier versions that wrote together could exceed
/// [`RULES_MAX`] by a few.
const LIST_MAX: usize = 2 * RULES_MAX;
/// Number of attempts after write conflicts.
const TRIES: usize = 5;

/// A rule and its version.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// The id of the rule.
    pub id: RuleId,
    /// The rule itself.
    pub rule: Rule,
    /// Its version.
    pub version: String,
}

/// The part of a rule that the fan-out needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Subscribing {
    pub(crate) bot: BotId,
    /// The types, if the rule is enabled.
    pub(crate) on: Vec<String>,
    pub(crate) enabled: bool,
}

/// A change of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Changed {
    /// The id of the document.
    pub(crate) id: String,
    pub(crate) bot: BotId,
    /// Identifies this change among the changes of the document.
    pub(crate) version: String,
    /// The time, by the server's clock.
    pub(crate) at: DateTime,
}

/// The condition of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// None: overwrite any rule.
    Anything,
    /// The rule must exist.
    Something,
    /// The rule must not exist.
    Nothing,
    /// The rule must have one of these versions.
    Versions(Vec<String>),
}

/// Why a rule was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// MongoDB failed.
    #[error(transparent)]
    Mongo(#[from] MongoError),
    /// The condition is not met; contains the rule's version, if it exists.
    #[error("the rule has another version")]
    Unexpected(Option<String>),
    /// The bot has [`RULES_MAX`] rules.
    #[error("the bot has {RULES_MAX} rules, the maximum")]
    TooMany,
    /// The bot's rules together are too large.
    #[error("the rules of the bot would have {0} bytes; at most {RULES_MAX_BYTES} are allowed")]
    TooLarge(usize),
    /// The bot's rules together would take too much memory.
    #[error(
        "the rules of the bot would take about {0} bytes of memory; at most {RULES_MAX_MEMORY} are allowed"
    )]
    TooMuchMemory(usize),
    /// Write conflicts with other clients do not end, or their writes take too long.
    #[error("other clients change rules of the bot at the same time")]
    Contended,
}

/// The document of a new rule.
#[doc(hidden)]
#[must_use]
pub fn document(bot: &BotId, id: &RuleId, rule: &Rule) -> Document {
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

/// The rules of every bot. Cheap to clone; clones share the turns to write.
#[derive(Debug, Clone)]
pub struct RuleStore {
    mongo: Mongo,
    turns: Turns,
}

fn id_of(bot: &BotId, rule: &RuleId) -> String {
    format!("{bot}{SEPARATOR}{rule}")
}

impl RuleStore {
    /// The rules in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        Self { mongo, turns: Turns::default() }
    }

    /// Creates the indexes. May be repeated.
    ///
    /// # Errors
    /// If MongoDB is unavailable or refuses.
    pub async fn prepare(&self) -> Result<(), MongoError> {
        let named = |name: &str| IndexOptions::builder().name(name.to_owned());
        let gone = named("gone").expire_after(GONE_FOR).sparse(true).build();
        self.mongo.index(AUTOMATIONS, doc! { "gone": 1 }, gone).await?;
        let of_bot = named("bot").build();
        self.mongo.index(AUTOMATIONS, doc! { "bot": 1, "_id": 1 }, of_bot).await?;
        let changed = named("changed").build();
        self.mongo.index(AUTOMATIONS, doc! { "changed": 1 }, changed).await?;
        let place = named("place").unique(true).sparse(true).build();
        match self.mongo.index(AUTOMATIONS, doc! { "place": 1 }, place).await {
            // A sharded collection always refuses it.
            Err(error) if !error.is_passing() => {
                warn!(%error, "without this index, processes that write rules of a bot together can exceed its maximum by a few");
                Ok(())
            }
            created => created,
        }
    }

    /// The rules of a bot, in the order of their ids.
    ///
    /// # Errors
    /// If MongoDB is unavailable or refuses.
    pub async fn list(&self, bot: &BotId) -> Result<Vec<Stored>, MongoError> {
        let found = self.find(of_bot(bot), None, doc! { "_id": 1 }, LIST_MAX).await?;
        Ok(found.iter().filter_map(stored).collect())
    }

    /// The same if the bot has at most `most` rules, of at most `bytes` together.
    ///
    /// # Errors
    /// If MongoDB is unavailable or refuses.
    pub(crate) async fn few(
        &self,
        bot: &BotId,
        (most, bytes): (usize, usize),
    ) -> Result<Option<Vec<Stored>>, MongoError> {
        let wanted = Some(doc! { "_id": 1, "bytes": 1 });
        let sizes = self.find(of_bot(bot), wanted, doc! { "_id": 1 }, most + 1).await?;
        let sum: usize = sizes.iter().map(|document| number_in(document, "bytes")).sum();
        if sizes.len() > most || sum > bytes {
            return Ok(None);
        }
        let found = self.find(of_bot(bot), None, doc! { "_id": 1 }, most + 1).await?;
        Ok((found.len() <= most).then(|| found.iter().filter_map(stored).collect()))
    }

    /// A rule; `None` if it does not exist.
    ///
    /// # Errors
    /// If MongoDB is unavailable or refuses.
    pub async fn get(&self, bot: &BotId, rule: &RuleId) -> Result<Option<Stored>, MongoError> {
        let filter = doc! { "_id": id_of(bot, rule), "v": { "$exists": true } };
        let found = self.find(filter, None, doc! {}, 1).await?;
        Ok(found.first().and_then(stored))
    }

    /// Writes a rule. Returns its version, and whether it is new.
    ///
    /// # Errors
    /// If the condition is not met or MongoDB fails; then it may be written.
    pub async fn put(
        &self,
        bot: &BotId,
        id: &RuleId,
        rule: &Rule,
        expected: &Expected,
    ) -> Result<(String, bool), WriteError> {
        let turn = self.turn(bot).await?;
        Box::pin(self.put_in_turn(turn, bot, id, rule, expected)).await
    }

    /// [`Self::put`] with a turn that the caller waited for.
    ///
    /// # Errors
    /// As those of [`Self::put`].
    pub(crate) async fn put_in_turn(
        &self,
        turn: Turn,
        bot: &BotId,
        id: &RuleId,
        rule: &Rule,
        expected: &Expected,
    ) -> Result<(String, bool), WriteError> {
        let actions = serde_json::to_string(&rule.actions).unwrap_or_default();
        let size = (rule.bytes(), rule.memory());
        let number = |size| i64::try_from(size).unwrap_or(i64::MAX);
        let (bytes, memory) = (number(size.0), number(size.1));
        for _ in 0..TRIES {
            let before = self.expect(bot, id, expected).await?;
            let place = self.place(bot, id, size).await?;
            let version = new_version();
            let mut set = rawdoc! {
                "bot": bot.as_str(), "id": id.as_str(), "name": &*rule.name,
                "enabled": rule.enabled, "actions": &*actions, "v": &*version,
                "bytes": bytes, "memory": memory,
            };
            let on: RawArrayBuf = rule.on.iter().map(String::as_str).collect();
            set.append(cstr!("on"), on);
            if before.is_none() {
                set.append(cstr!("place"), place.as_str());
            }
            let mut unset = rawdoc! { "gone": "" };
            match &rule.filter {
                Some(filter) => set.append(cstr!("filter"), filter.as_str()),
                None => unset.append(cstr!("filter"), ""),
            }
            let change =
                rawdoc! { "$set": set, "$unset": unset, "$currentDate": { "changed": true } };
            if self.write(&turn, (bot, id), before.as_deref(), change, before.is_none()).await? {
                return Ok((version, before.is_none()));
            }
        }
        Err(WriteError::Contended)
    }

    /// Deletes a rule. Returns whether it existed.
    ///
    /// # Errors
    /// If the condition is not met or MongoDB fails; then it may be deleted.
    pub async fn delete(
        &self,
        bot: &BotId,
        id: &RuleId,
        expected: &Expected,
    ) -> Result<bool, WriteError> {
        let turn = self.turn(bot).await?;
        Box::pin(self.delete_in_turn(turn, bot, id, expected)).await
    }

    /// [`Self::delete`] with a turn that the caller waited for.
    ///
    /// # Errors
    /// As those of [`Self::delete`].
    pub(crate) async fn delete_in_turn(
        &self,
        turn: Turn,
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
                "$unset": { "v": "", "name": "", "on": "", "filter": "", "actions": "", "enabled": "", "bytes": "", "memory": "", "place": "" },
                "$currentDate": { "changed": true, "gone": true },
            };
            if self.write(&turn, (bot, id), before.as_deref(), change, false).await? {
                return Ok(true);
            }
        }
        Err(WriteError::Contended)
    }

    /// Waits until no other rule of the bot is checked and written here. Otherwise concurrent writes
    /// would exceed the bot's maximum of bytes, and choose the same places.
    ///
    /// # Errors
    /// If other writes take too long, or too many requests of the caller wait.
    pub(crate) async fn turn(&self, bot: &BotId) -> Result<Turn, WriteError> {
        let patience = request_deadline::at_most(ANSWER_TIMEOUT);
        let turn = tokio::time::timeout(patience, self.turns.of_request(bot)).await;
        Ok(turn.map_err(|_| WriteError::Contended)??)
    }

    /// The version of a rule that meets the condition.
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

    /// Writes a document that has this version; returns whether it still had it.
    async fn write(
        &self,
        turn: &Turn,
        (bot, id): (&BotId, &RuleId),
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
        let keep = turn.clone();
        let done = self.mongo.update(AUTOMATIONS, statements, true, ANSWER_TIMEOUT, keep);
        let mut done = done.await?;
        match done.refused.pop() {
            Some(refused) if !refused.met_another => Err(refused.error),
            Some(_) => Ok(false),
            None => Ok(done.modified + done.upserted.len() == 1),
        }
    }

    /// A free place for a rule of this size, unless it exceeds the bot's maximum. See [`free_place`] and
    /// [`check_memory`].
    async fn place(
        &self,
        bot: &BotId,
        id: &RuleId,
        (bytes, memory): (usize, usize),
    ) -> Result<String, WriteError> {
        let wanted = Some(doc! { "_id": 1, "bytes": 1, "memory": 1, "place": 1 });
        let found = self.find(of_bot(bot), wanted, doc! {}, RULES_MAX + 1).await?;
        let own = id_of(bot, id);
        let is_own = |document: &RawDocumentBuf| document.get_str("_id").ok() == Some(&*own);
        let place = free_place(bot, bytes, found.iter().filter(|other| !is_own(other)))?;
        let earlier = if found.iter().all(|document| document.get_i64("memory").is_ok()) {
            Vec::new()
        } else {
            // What they take is known only from the whole rules.
            let mut filter = of_bot(bot);
            filter.insert("memory", doc! { "$exists": false });
            self.find(filter, None, doc! {}, RULES_MAX + 1).await?
        };
        let known = found.iter().map(|document| (document, number_in(document, "memory")));
        let earlier = earlier
            .iter()
            .map(|document| (document, stored(document).map_or(0, |stored| stored.rule.memory())));
        let (mut before, mut others) = (0, 0);
        for (document, memory) in known.chain(earlier) {
            let sum = if is_own(document) { &mut before } else { &mut others };
            *sum += memory;
        }
        check_memory(memory, before, others)?;
        Ok(place)
    }

    /// A page of the fan-out's part of all rules, in the order of their document ids, after `last`.
    /// Also returns the last id, if there may be more.
    pub(crate) async fn page(
        &self,
        last: Option<&str>,
    ) -> Result<(Vec<Subscribing>, Option<String>), MongoError> {
        let mut filter = doc! { "v": { "$exists": true } };
        if let Some(last) = last {
            filter.insert("_id", doc! { "$gt": last });
        }
        let found = self.find(filter, Some(meaning()), doc! { "_id": 1 }, PAGE).await?;
        let last = found.last().filter(|_| found.len() == PAGE);
        let last = last.and_then(|document| document.get_str("_id").ok()).map(str::to_owned);
        Ok((found.iter().filter_map(subscribing).collect(), last))
    }

    /// The fan-out's part of the rules of these bots.
    pub(crate) async fn of_bots(&self, bots: &[BotId]) -> Result<Vec<Subscribing>, MongoError> {
        let bots: Vec<&str> = bots.iter().map(BotId::as_str).collect();
        let filter = doc! { "bot": { "$in": bots }, "v": { "$exists": true } };
        let found = self.find(filter, Some(meaning()), doc! {}, 0).await?;
        Ok(found.iter().filter_map(subscribing).collect())
    }

    /// The changes from `since` on, newest last.
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

    /// The time of the newest change; `None` without any rule.
    pub(crate) async fn newest_change(&self) -> Result<Option<DateTime>, MongoError> {
        let found =
            self.find(doc! {}, Some(doc! { "changed": 1 }), doc! { "changed": -1 }, 1).await?;
        Ok(found.first().and_then(|document| document.get_datetime("changed").ok()))
    }

    /// The server's clock, since 1970, if the server reports it.
    pub(crate) async fn time(&self) -> Result<Option<Duration>, MongoError> {
        Ok(self.mongo.info().await?.time)
    }

    async fn find(
        &self,
        filter: Document,
        projection: Option<Document>,
        sort: Document,
        limit: usize,
    ) -> Result<Vec<RawDocumentBuf>, MongoError> {
        let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
        let mut options = FindOptions::builder().sort(sort).selection_criteria(primary).build();
        options.projection = projection;
        options.limit = i64::try_from(limit).ok().filter(|limit| *limit > 0);
        self.mongo
            .find(AUTOMATIONS, filter, options, request_deadline::at_most(ANSWER_TIMEOUT))
            .await
    }
}

/// For [`crate::fuzzing`]: reads a document as a rule.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(document: &RawDocumentBuf) {
    let _ = (stored(document), subscribing(document));
}

fn meaning() -> Document {
    doc! { "bot": 1, "on": 1, "enabled": 1 }
}

fn of_bot(bot: &BotId) -> Document {
    doc! { "bot": bot.as_str(), "v": { "$exists": true } }
}

fn new_version() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}
