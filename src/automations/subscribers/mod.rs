//! The profiles of subscribers: one document each, built from the events of its bot.
//!
//! | field | content |
//! |---|---|
//! | `_id` | bot, U+001F, subscriber; without a subscriber: the decisions on events that name none |
//! | `bot`, `id` | the bot and the subscriber |
//! | `tags`, `fields` | the profile |
//! | `s` | the sequence of the last event that changed the document |
//! | `decided` | the decisions on the last events: `{s, d}`, the decision as JSON |
//!
//! A document is written only as the successor of the state that was read, so a late process writes
//! nothing. One write contains the change of the profile and the decision. A process that repeats
//! an event therefore finds the decision, and does not decide again with a changed profile or
//! changed rules.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use mongodb::bson::{
    Bson, Document, RawArrayBuf, RawDocumentBuf, deserialize_from_slice, doc, rawdoc,
};
use mongodb::options::{FindOptions, ReadPreference, SelectionCriteria};
use serde_json::Value as Json;

use crate::automations::profile::Profile;
use crate::id::{BotId, Sequence};
use crate::mongo::client::{ANSWER_TIMEOUT, Mongo, MongoError};
use crate::mongo::coalescer::{BatchLimits, Coalescer, Slot};
use crate::mongo::turns::{Turn, Turns};

/// The collection.
pub const SUBSCRIBERS: &str = "subscribers";
/// Separates the parts of a document's id. Ids of bots cannot contain it.
const SEPARATOR: char = '\u{1f}';
/// The character that follows.
const PAST_SEPARATOR: char = '\u{20}';
/// Maximum number of profiles per query.
const FIND_MAX: usize = 500;
/// Maximum number of profiles per command.
const UPDATE_MAX: usize = 500;
/// Maximum number of bytes of a command, unless one profile alone has more; the server accepts 48
/// MB.
const BYTES_MAX: usize = 8 << 20;
/// Time limit of reading profiles.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);
/// Only a slice waits for a write, so it may retry immediately after a failure.
const READS: BatchLimits = BatchLimits { items_max: FIND_MAX, in_flight: 2, pause: Duration::ZERO };
const WRITES: BatchLimits =
    BatchLimits { items_max: UPDATE_MAX, in_flight: 2, pause: Duration::ZERO };

/// The stored state of a subscriber.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Kept {
    /// The profile.
    pub profile: Profile,
    /// The last event that changed it; `None`: there is no document.
    pub sequence: Option<Sequence>,
    /// The decisions on the last events, newest last, as JSON.
    pub decided: Vec<(Sequence, String)>,
}

/// The next state of a document.
#[derive(Debug, Clone)]
pub struct Next {
    /// The subscriber.
    pub subscriber: String,
    /// The state that it replaces.
    pub after: Option<Sequence>,
    /// The new state.
    pub kept: Kept,
}

/// Documents by their ids; `None` for an unreadable one.
type Found = HashMap<String, Option<Kept>>;
/// Whether every statement was carried out, and the statements that were refused for good.
type Outcome = (bool, Vec<(usize, MongoError)>);

/// The profiles of every bot. Cheap to clone; clones share their queries and writes.
#[derive(Debug, Clone)]
pub struct SubscriberStore {
    mongo: Mongo,
    reads: Coalescer<Arc<str>, Found>,
    writes: Coalescer<Item, Outcome>,
    turns: Turns,
}

/// A statement, and the turn of its bot.
#[derive(Debug, Clone)]
struct Item {
    statement: RawDocumentBuf,
    turn: Turn,
}

/// Values that a command keeps until it has ended in the server.
struct Keep {
    _place: Slot,
    _turns: Vec<Turn>,
}

fn id_of(bot: &BotId, subscriber: &str) -> String {
    format!("{bot}{SEPARATOR}{subscriber}")
}

impl SubscriberStore {
    /// The profiles in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        let asked = mongo.clone();
        let reads = Coalescer::new(READS, move |ids, _| find(asked.clone(), ids).boxed());
        let written = mongo.clone();
        let writes = Coalescer::new(WRITES, move |items, place| {
            update(written.clone(), items, place).boxed()
        });
        Self { mongo, reads, writes, turns: Turns::default() }
    }

    /// The stored states of these subscribers, in their order. Concurrent calls share a query.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn read(&self, bot: &BotId, subscribers: &[&str]) -> Result<Vec<Kept>, MongoError> {
        let ids: Vec<Arc<str>> =
            subscribers.iter().map(|subscriber| id_of(bot, subscriber).into()).collect();
        let mut kept = Vec::with_capacity(ids.len());
        for ids in ids.chunks(FIND_MAX) {
            let (found, _) = self.reads.join(ids.to_vec()).await?;
            for id in ids {
                kept.push(match found.get(&**id) {
                    Some(Some(found)) => found.clone(),
                    Some(None) => return Err(self.misread()),
                    None => Kept::default(),
                });
            }
        }
        Ok(kept)
    }

    /// The number of profiles of a bot; at most `limit` are counted.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    pub(crate) async fn count(&self, bot: &BotId, limit: u64) -> Result<u64, MongoError> {
        // The ids of a bot are a range of the index that every collection has.
        let after = |end: char| format!("{bot}{end}");
        let ids = doc! { "$gte": after(SEPARATOR), "$lt": after(PAST_SEPARATOR) };
        self.mongo.count(SUBSCRIBERS, doc! { "_id": ids }, limit, FIND_TIMEOUT).await
    }

    /// The error for a document that was changed by other programs.
    fn misread(&self) -> MongoError {
        self.mongo.not_understood("find", "tags, fields, s and decided in subscribers")
    }

    /// Waits until the server has finished all writes of this bot that this process sent, including
    /// those that timed out.
    pub(crate) async fn turn(&self, bot: &BotId) -> Turn {
        self.turns.of(bot).await
    }

    /// Writes the next states, each only if it still follows the stored one. Returns whether all
    /// are certainly written; otherwise some or all may be, and a read shows which. Returns once a
    /// majority has them. Concurrent calls share their writes.
    ///
    /// # Errors
    /// If MongoDB does not answer in time, refuses, or has no majority: some may be written.
    ///
    /// # Cancel safety
    /// As after an error.
    pub(crate) async fn write(
        &self,
        turn: &Turn,
        bot: &BotId,
        next: &[Next],
    ) -> Result<bool, MongoError> {
        let mut all = true;
        let item = |next| Item { statement: statement(bot, next), turn: turn.clone() };
        let items: Vec<Item> = next.iter().map(item).collect();
        for items in items.chunks(UPDATE_MAX) {
            let (outcome, own) = self.writes.join(items.to_vec()).await?;
            let (applied, refused) = &*outcome;
            if let Some((_, error)) = refused.iter().find(|(place, _)| own.contains(place)) {
                return Err(error.clone());
            }
            all &= applied;
        }
        Ok(all)
    }
}

async fn find(mongo: Mongo, ids: Vec<Arc<str>>) -> Result<Found, MongoError> {
    let options = FindOptions::builder()
        .batch_size(u32::try_from(ids.len() + 1).unwrap_or(u32::MAX))
        .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
        .build();
    let ids: Vec<&str> = ids.iter().map(AsRef::as_ref).collect();
    let found = mongo.find(SUBSCRIBERS, doc! { "_id": { "$in": ids } }, options, FIND_TIMEOUT);
    let read = |document: RawDocumentBuf| {
        let id = document.get_str("_id").ok()?.to_owned();
        let document = deserialize_from_slice::<Document>(document.as_bytes()).ok();
        Some((id, document.as_ref().and_then(kept)))
    };
    Ok(found.await?.into_iter().filter_map(read).collect())
}

fn kept(document: &Document) -> Option<Kept> {
    let mut kept = Kept::default();
    for tag in document.get_array("tags").ok()? {
        kept.profile.tags.insert(tag.as_str()?.to_owned());
    }
    for (field, value) in document.get_document("fields").ok()? {
        kept.profile.fields.insert(field.clone(), json(value)?);
    }
    for decided in document.get_array("decided").ok()? {
        let decided = decided.as_document()?;
        let text = decided.get_str("d").ok()?.to_owned();
        kept.decided.push((sequence(decided)?, text));
    }
    kept.sequence = Some(sequence(document)?);
    Some(kept)
}

fn sequence(document: &Document) -> Option<Sequence> {
    u64::try_from(document.get_i64("s").ok()?).ok().map(Sequence::new)
}

async fn update(mongo: Mongo, items: Vec<Item>, place: Slot) -> Result<Outcome, MongoError> {
    let (statements, turns): (Vec<_>, Vec<_>) =
        items.into_iter().map(|Item { statement, turn }| (statement, turn)).unzip();
    let keep = Arc::new(Keep { _place: place, _turns: turns });
    let (mut applied, mut refused) = (0, Vec::new());
    let (mut begin, count) = (0, statements.len());
    let mut rest = statements.into_iter().peekable();
    while rest.peek().is_some() {
        let (mut command, mut bytes) = (RawArrayBuf::new(), 0);
        let mut end = begin;
        while let Some(statement) =
            rest.next_if(|next| end == begin || bytes + next.as_bytes().len() <= BYTES_MAX)
        {
            bytes += statement.as_bytes().len();
            command.push(statement);
            end += 1;
        }
        let keep = Arc::clone(&keep);
        let done = mongo.update(SUBSCRIBERS, command, false, ANSWER_TIMEOUT, keep).await?;
        applied += done.modified + done.upserted.len();
        // A statement with a write conflict does not follow any more, or can be retried.
        let for_good = done.refused.into_iter().filter(|refused| !refused.met_another);
        refused.extend(for_good.map(|refused| (begin + refused.index, refused.error)));
        begin = end;
    }
    Ok((applied == count, refused))
}

fn statement(bot: &BotId, next: &Next) -> RawDocumentBuf {
    let number = |sequence: Sequence| i64::try_from(sequence.get()).unwrap_or(i64::MAX);
    let id = id_of(bot, &next.subscriber);
    let filter = if let Some(after) = next.after {
        rawdoc! { "_id": id, "s": number(after) }
    } else {
        rawdoc! { "_id": id, "s": { "$exists": false } }
    };
    let tags: RawArrayBuf = next.kept.profile.tags.iter().map(String::as_str).collect();
    let fields: Document = next
        .kept
        .profile
        .fields
        .iter()
        .map(|(field, value)| (field.clone(), bson(value)))
        .collect();
    let decided: RawArrayBuf = next
        .kept
        .decided
        .iter()
        .map(|(sequence, text)| rawdoc! { "s": number(*sequence), "d": text.as_str() })
        .collect();
    let sequence = next.kept.sequence.map_or(0, number);
    // Profiles contain no names that documents must not.
    let fields = RawDocumentBuf::try_from(&fields).expect("names without NUL always encode");
    // In a pipeline with `$literal`, so that values are not read as operators, or names as paths.
    let stage = rawdoc! { "$set": {
        "bot": { "$literal": bot.as_str() }, "id": { "$literal": next.subscriber.as_str() },
        "tags": { "$literal": tags }, "fields": { "$literal": fields },
        "s": sequence, "decided": { "$literal": decided },
    } };
    rawdoc! { "q": filter, "u": [stage], "upsert": next.after.is_none() }
}

/// JSON in the form of MongoDB. Whole numbers beyond 64 bits become fractions.
fn bson(value: &Json) -> Bson {
    match value {
        Json::Null => Bson::Null,
        Json::Bool(value) => Bson::Boolean(*value),
        Json::Number(number) => number
            .as_i64()
            .map_or_else(|| Bson::Double(number.as_f64().unwrap_or_default()), Bson::Int64),
        Json::String(text) => Bson::String(text.clone()),
        Json::Array(list) => Bson::Array(list.iter().map(bson).collect()),
        Json::Object(map) => {
            Bson::Document(map.iter().map(|(key, value)| (key.clone(), bson(value))).collect())
        }
    }
}

/// The stored value as JSON; also accepts values edited by hand.
fn json(value: &Bson) -> Option<Json> {
    Some(match value {
        Bson::Null => Json::Null,
        Bson::Boolean(value) => Json::Bool(*value),
        Bson::Int32(number) => Json::from(*number),
        Bson::Int64(number) => Json::from(*number),
        Bson::Double(number) => Json::from(*number),
        Bson::String(text) => Json::String(text.clone()),
        Bson::DateTime(time) => Json::String(time.try_to_rfc3339_string().ok()?),
        Bson::ObjectId(id) => Json::String(id.to_hex()),
        Bson::Array(list) => Json::Array(list.iter().map(json).collect::<Option<_>>()?),
        Bson::Document(map) => {
            let map: Option<BTreeMap<_, _>> =
                map.iter().map(|(key, value)| Some((key.clone(), json(value)?))).collect();
            Json::Object(map?.into_iter().collect())
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_profile_is_read_back_as_it_was_written() {
        let fields = json!({
            "a.b": 1, "big": i64::MAX, "half": 0.5, "no": null, "yes": true,
            "$list": [1, "x", { "$set": { "a": 1 } }],
        });
        let mut next = Kept { sequence: Some(Sequence::new(7)), ..Kept::default() };
        next.profile.tags.extend(["x".to_owned(), "y".to_owned()]);
        next.profile.fields = serde_json::from_value(fields).unwrap();
        next.decided.push((Sequence::new(6), "{}".to_owned()));
        let bot = BotId::parse("b").unwrap();
        let write = Next { subscriber: "u".to_owned(), after: None, kept: next.clone() };
        let statement = statement(&bot, &write);
        let statement: Document = deserialize_from_slice(statement.as_bytes()).unwrap();
        assert!(statement.get_bool("upsert").unwrap());
        let stage = statement.get_array("u").unwrap()[0].as_document().unwrap();
        let stage = stage.get_document("$set").unwrap().iter();
        let set: Document = stage
            .map(|(key, value)| {
                let literal = value.as_document().and_then(|value| value.get("$literal"));
                (key.clone(), literal.unwrap_or(value).clone())
            })
            .collect();
        assert_eq!(kept(&set).unwrap(), next);
    }

    /// A document as the first version wrote it. Every later version must read it.
    #[test]
    fn a_stored_profile_is_still_read() {
        let sample = doc! {
            "_id": "b\u{1f}u", "bot": "b", "id": "u", "tags": ["x"],
            "fields": { "age": 31_i64, "gender": "f" }, "s": 7_i64,
            "decided": [{ "s": 6_i64, "d": "{}" }],
        };
        let found = kept(&sample).unwrap();
        assert_eq!(found.sequence, Some(Sequence::new(7)));
        assert_eq!(found.profile.tags.into_iter().collect::<Vec<_>>(), ["x"]);
        assert_eq!(json!(found.profile.fields), json!({ "age": 31, "gender": "f" }));
        assert_eq!(found.decided, [(Sequence::new(6), "{}".to_owned())]);
    }
}
