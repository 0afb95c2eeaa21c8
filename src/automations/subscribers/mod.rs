//! The profiles of subscribers: one document each, built from the events of its bot.
//!
//! | field | content |
//! |---|---|
//! | `_id` | bot, U+001F, subscriber; without a subscriber: the decisions on events that name none |
//! | `bot`, `id` | the bot and the subscriber |
//! | `tags`, `fields` | the profile |
//! | `s` | the sequence of the last event that changed the document |
//! | `decided` | the decisions on the last events: `{s, d}`, the decision as JSON |
//! | `gone` | the time of the last write since the profile was deleted |
//!
//! A document is written only as the successor of the state that was read, so a late process writes
//! nothing. One write contains the change of the profile and the decision. A process that repeats
//! an event therefore finds the decision, and does not decide again with a changed profile or
//! changed rules.

mod deleted;
mod document;
mod large;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use mongodb::bson::{RawArrayBuf, RawDocumentBuf, doc};
use mongodb::options::{FindOptions, ReadPreference, SelectionCriteria};

pub(crate) use self::document::as_stored;
#[cfg(any(test, fuzzing))]
pub(crate) use self::document::written;
use self::document::{Write, id_of, ids_of, kept, sequence, without_decisions};
use self::large::LargeBots;
use crate::automations::profile::Profile;
use crate::id::{BotId, Lane, Sequence};
use crate::mongo::client::{ANSWER_TIMEOUT, Mongo, MongoError, Refused};
use crate::mongo::coalescer::{BatchLimits, Coalescer, Slot};
use crate::mongo::large::LargeReads;
use crate::mongo::turns::{Turn, Turns};

/// The collection.
pub const SUBSCRIBERS: &str = "subscribers";
/// Maximum number of profiles per query.
const FIND_MAX: usize = 500;
/// Maximum number of profiles per command.
const UPDATE_MAX: usize = 500;
/// Maximum number of bytes of a command, unless one profile alone has more; the server accepts 48
/// MB.
const BYTES_MAX: usize = 8 << 20;
/// At about so many bytes of profiles, a query ends, and a slice reads no further ones.
const FIND_MAX_BYTES: usize = 8 << 20;
/// A bot with more bytes of profiles has large ones.
const LARGE_BYTES: usize = 1 << 20;
/// A bot with more bytes in one profile, without decisions, has large ones to show.
const SHOWN_BYTES: usize = 64 << 10;
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
    /// Whether the profile was deleted, and no event has changed it since.
    pub gone: bool,
}

/// For [`crate::fuzzing`]: reads a document.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(document: &mongodb::bson::RawDocument) -> Option<Kept> {
    let _ = sequence(document);
    kept(document)
}

/// The next state of a document.
#[derive(Debug, Clone)]
pub struct Next {
    /// The subscriber.
    pub subscriber: String,
    /// The state that it replaces; `None`: there is no document.
    pub after: Option<Sequence>,
    /// Whether the profile differs from that state; otherwise only the decisions do.
    pub changed: bool,
    /// The new state.
    pub kept: Kept,
}

/// The documents of a query.
struct Found {
    /// By their ids. Each member of the group reads its own.
    documents: HashMap<String, RawDocumentBuf>,
    /// Whether these are all. Otherwise they are too many bytes together.
    all: bool,
}

/// The sequences of documents by their ids; `None` for an unreadable one.
type States = HashMap<String, Option<Sequence>>;
/// The result of a group of writes. Writes are named by their places in the group.
#[derive(Debug, Default)]
struct Outcome {
    /// Whether every update was carried out. The server does not say which were not.
    updated: bool,
    /// The documents that existed already.
    existed: Vec<usize>,
    /// The writes that were refused for good.
    refused: Vec<(usize, MongoError)>,
}

/// The profiles of every bot. Cheap to clone; clones share their queries and writes.
#[derive(Debug, Clone)]
pub struct SubscriberStore {
    mongo: Mongo,
    reads: Coalescer<Arc<str>, Found>,
    shown: Coalescer<Arc<str>, Found>,
    checks: Coalescer<Arc<str>, States>,
    writes: Coalescer<Item, Outcome>,
    turns: Turns,
    large: LargeBots,
    /// The bots with large profiles to show.
    large_shown: LargeBots,
    /// The turns of reading these.
    alone: LargeReads,
}

/// A write, and the turn of its bot.
#[derive(Debug, Clone)]
struct Item {
    write: Write,
    turn: Turn,
}

/// Values that a command keeps until it has ended in the server.
struct Keep {
    _place: Slot,
    _turns: Vec<Turn>,
}

impl SubscriberStore {
    /// The profiles in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        let asked = mongo.clone();
        let reads = Coalescer::new(READS, move |ids, _| {
            find(asked.clone(), ids, FindOptions::default()).boxed()
        });
        let asked = mongo.clone();
        let shown =
            Coalescer::new(READS, move |ids, _| find(asked.clone(), ids, undecided()).boxed());
        let asked = mongo.clone();
        let checks = Coalescer::new(READS, move |ids, _| states(asked.clone(), ids).boxed());
        let written = mongo.clone();
        let writes = Coalescer::new(WRITES, move |items, place| {
            write(written.clone(), items, place).boxed()
        });
        let (turns, alone) = (Turns::default(), LargeReads::default());
        let (large, large_shown) = (LargeBots::default(), LargeBots::default());
        Self { mongo, reads, shown, checks, writes, turns, large, large_shown, alone }
    }

    /// The stored states of the first of these subscribers, in their order: of all, unless their
    /// profiles are large, and of at least one. Concurrent calls share a query.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn read(&self, bot: &BotId, subscribers: &[&str]) -> Result<Vec<Kept>, MongoError> {
        let ids: Vec<Arc<str>> =
            subscribers.iter().map(|subscriber| id_of(bot, subscriber).into()).collect();
        let (mut states, mut bytes) = (Vec::with_capacity(ids.len()), 0);
        let (mut alone, mut count) = (self.large.contains(bot), FIND_MAX);
        while states.len() < ids.len() && bytes <= FIND_MAX_BYTES {
            let next: Vec<_> = ids.iter().skip(states.len()).take(count).cloned().collect();
            let (found, _) = if alone {
                self.reads.alone(next.clone()).await?
            } else {
                self.reads.join(next.clone()).await?
            };
            if !found.all {
                // In a group, the large profiles may be those of another bot.
                if alone {
                    count = (found.documents.len() / 2).max(1);
                }
                alone = true;
                continue;
            }
            for id in &next {
                let Some(document) = found.documents.get(&**id) else {
                    states.push(Kept::default());
                    continue;
                };
                bytes += document.as_bytes().len();
                states.push(kept(document).ok_or_else(|| self.misread())?);
            }
        }
        if alone && bytes > LARGE_BYTES {
            self.large.insert(bot);
        }
        Ok(states)
    }

    /// The stored state of a subscriber without its decisions, for a reader that decides nothing.
    /// Concurrent calls share a query, but not those of slices. A large profile is read in a query of its
    /// own, in turns, which may take longer than MongoDB usually does.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses, or too many requests of the caller wait for it.
    ///
    /// # Cancel safety
    /// The place in the line of large reads is lost.
    pub(crate) async fn shown(&self, bot: &BotId, subscriber: &str) -> Result<Kept, MongoError> {
        let id: Arc<str> = id_of(bot, subscriber).into();
        if !self.large_shown.contains(bot) {
            let (found, _) = self.shown.join(vec![Arc::clone(&id)]).await?;
            if found.all {
                return self.read_shown(bot, found.documents.get(&*id));
            }
            // The large profiles may be those of another bot.
        }
        let _place = self.alone.take(bot).await?;
        let found = find(self.mongo.clone(), vec![Arc::clone(&id)], undecided()).await?;
        self.read_shown(bot, found.documents.get(&*id))
    }

    /// Reads a document without decisions, and notes if it is large.
    fn read_shown(
        &self,
        bot: &BotId,
        document: Option<&RawDocumentBuf>,
    ) -> Result<Kept, MongoError> {
        let Some(document) = document else { return Ok(Kept::default()) };
        if document.as_bytes().len() > SHOWN_BYTES {
            self.large_shown.insert(bot);
        }
        without_decisions(document).ok_or_else(|| self.misread())
    }

    /// Whether each of these subscribers still has this stored state. Reads no profiles. Concurrent
    /// calls share a query.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn still(
        &self,
        bot: &BotId,
        states: &[(&str, Option<Sequence>)],
    ) -> Result<bool, MongoError> {
        for states in states.chunks(FIND_MAX) {
            let ids: Vec<Arc<str>> =
                states.iter().map(|(subscriber, _)| id_of(bot, subscriber).into()).collect();
            let (found, _) = self.checks.join(ids.clone()).await?;
            for (id, (_, state)) in ids.iter().zip(states) {
                if found.get(&**id).copied().flatten() != *state {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The number of profiles of a bot; at most `limit` are counted.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    pub(crate) async fn count(&self, bot: &BotId, limit: u64) -> Result<u64, MongoError> {
        // The ids of a bot are a range of the index that every collection has.
        let (first, end) = ids_of(bot);
        let ids = doc! { "$gte": first, "$lt": end };
        self.mongo.count(SUBSCRIBERS, doc! { "_id": ids }, limit, FIND_TIMEOUT).await
    }

    /// The number of profiles of all bots, as MongoDB knows it without counting. It may be wrong
    /// after a crash of MongoDB.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    pub(crate) async fn all(&self) -> Result<u64, MongoError> {
        self.mongo.size(SUBSCRIBERS, FIND_TIMEOUT).await
    }

    /// The error for a document that was changed by other programs.
    fn misread(&self) -> MongoError {
        self.mongo.not_understood("find", "tags, fields, s and decided in subscribers")
    }

    /// Waits until the server has finished all writes of this bot that this process sent, including
    /// those that timed out.
    /// With a lane, those of events of this lane.
    pub(crate) async fn turn(&self, bot: &BotId, lane: Option<Lane>) -> Turn {
        self.turns.of_lane(bot, lane).await
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
        let item = |next| Item { write: Write::new(bot, next), turn: turn.clone() };
        let items: Vec<Item> = next.iter().map(item).collect();
        for items in items.chunks(UPDATE_MAX) {
            let updates = items.iter().any(|item| matches!(item.write, Write::Update(_)));
            let (outcome, own) = self.writes.join(items.to_vec()).await?;
            let Outcome { updated, existed, refused } = &*outcome;
            if let Some((_, error)) = refused.iter().find(|(place, _)| own.contains(place)) {
                return Err(error.clone());
            }
            all &= (*updated || !updates) && !existed.iter().any(|place| own.contains(place));
        }
        Ok(all)
    }
}

/// A query that leaves out the decisions.
fn undecided() -> FindOptions {
    FindOptions::builder().projection(doc! { "decided": 0 }).build()
}

async fn find(mongo: Mongo, ids: Vec<Arc<str>>, options: FindOptions) -> Result<Found, MongoError> {
    let (found, bytes) = documents(&mongo, &ids, options, FIND_MAX_BYTES).await?;
    let all = bytes <= FIND_MAX_BYTES || found.len() == ids.len();
    let named =
        |document: RawDocumentBuf| Some((document.get_str("_id").ok()?.to_owned(), document));
    Ok(Found { documents: found.into_iter().filter_map(named).collect(), all })
}

async fn states(mongo: Mongo, ids: Vec<Arc<str>>) -> Result<States, MongoError> {
    let options = FindOptions::builder().projection(doc! { "s": 1 }).build();
    let (found, _) = documents(&mongo, &ids, options, usize::MAX).await?;
    let read = |document: RawDocumentBuf| {
        Some((document.get_str("_id").ok()?.to_owned(), sequence(&document)))
    };
    Ok(found.into_iter().filter_map(read).collect())
}

async fn documents(
    mongo: &Mongo,
    ids: &[Arc<str>],
    mut options: FindOptions,
    bytes: usize,
) -> Result<(Vec<RawDocumentBuf>, usize), MongoError> {
    options.batch_size = Some(u32::try_from(ids.len() + 1).unwrap_or(u32::MAX));
    options.selection_criteria = Some(SelectionCriteria::ReadPreference(ReadPreference::Primary));
    let ids: Vec<&str> = ids.iter().map(AsRef::as_ref).collect();
    let filter = doc! { "_id": { "$in": ids } };
    mongo.find_up_to(SUBSCRIBERS, filter, options, FIND_TIMEOUT, bytes).await
}

/// Writes a group: new documents by one command, and concurrently the others by another.
async fn write(mongo: Mongo, items: Vec<Item>, place: Slot) -> Result<Outcome, MongoError> {
    let (mut new, mut next, mut turns) = (Vec::new(), Vec::new(), Vec::new());
    for (place, Item { write, turn }) in items.into_iter().enumerate() {
        turns.push(turn);
        let bytes = write.bytes();
        match write {
            Write::Insert(document) => new.push((place, bytes, document)),
            Write::Update(statement) => next.push((place, bytes, statement)),
        }
    }
    let keep = Arc::new(Keep { _place: place, _turns: turns });
    let inserting = async {
        let mut outcome = Outcome::default();
        for (places, documents) in commands(new) {
            let keep = Arc::clone(&keep);
            let done = mongo.insert(SUBSCRIBERS, documents, ANSWER_TIMEOUT, keep).await?;
            if done.created + done.refused.len() != places.len() {
                return Err(mongo.not_understood("insert", "as many results as documents"));
            }
            outcome.add(done.refused, &places);
        }
        Ok(outcome)
    };
    let updating = async {
        let (mut outcome, count, mut matched) = (Outcome::default(), next.len(), 0);
        for (places, statements) in commands(next) {
            let keep = Arc::clone(&keep);
            let done = mongo.update(SUBSCRIBERS, statements, false, ANSWER_TIMEOUT, keep).await?;
            matched += done.matched;
            outcome.add(done.refused, &places);
        }
        outcome.updated = matched == count;
        Ok::<_, MongoError>(outcome)
    };
    // Waits for both, so that a failed command does not end the wait for the other.
    let (inserted, updated) = tokio::join!(inserting, updating);
    let (Outcome { existed, mut refused, .. }, updated): (Outcome, Outcome) = (inserted?, updated?);
    refused.extend(updated.refused);
    Ok(Outcome { updated: updated.updated, existed, refused })
}

impl Outcome {
    /// Adds the refused writes of a command. A write that met another one does not follow any more,
    /// or can be retried.
    fn add(&mut self, refused: Vec<Refused>, places: &[usize]) {
        for Refused { index, met_another, error } in refused {
            let Some(place) = places.get(index).copied() else { continue };
            if met_another {
                self.existed.push(place);
            } else {
                self.refused.push((place, error));
            }
        }
    }
}

/// Divides documents or statements into commands, with their places in the group.
fn commands(items: Vec<(usize, usize, RawDocumentBuf)>) -> Vec<(Vec<usize>, RawArrayBuf)> {
    let mut commands: Vec<(Vec<usize>, RawArrayBuf)> = Vec::new();
    let mut sum = 0;
    for (place, bytes, item) in items {
        if commands.is_empty() || sum + bytes > BYTES_MAX {
            commands.push((Vec::new(), RawArrayBuf::new()));
            sum = 0;
        }
        sum += bytes;
        if let Some((places, command)) = commands.last_mut() {
            places.push(place);
            command.push(item);
        }
    }
    commands
}
