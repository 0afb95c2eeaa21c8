//! Automations: rules of bots for events, with filters on the event and the subscriber.
//!
//! # Guarantees
//!
//! 1. The events of a bot are decided in the order of its queue, each with the profile that the
//!    events before it left. Each event is decided once, by one state of the rules.
//! 2. The decision is stored with the profile, in one write. Then it is carried out, each action
//!    once. A repetition of the event finds the decision, regardless of later changes. The known
//!    limit: a finished action is remembered for an hour. If its slice cannot be completed for
//!    longer, because Redis is unavailable or all processes are stopped, the action may be
//!    repeated.
//! 3. A changed rule takes effect within a second, in every process.
//! 4. A filter that fails does not match. The failure is counted, and the bot continues.
//!
//! # The path of an event
//!
//! 1. The fan-out copies events that a bot has rules for, or that change a profile it keeps
//!    (`subscriptions`, kept up to date by `watch`).
//! 2. `handler` takes a slice: one query for the profiles that are not among the `recent` ones, the
//!    rules from the `cache`.
//! 3. [`decide`] changes the profile and decides, event by event.
//! 4. One write of profiles and decisions, each only as the successor of the state that was used: a
//!    late process, or one with an outdated profile, writes nothing, and reads the stored decision.
//! 5. `effects` carries out the decision, `stats` counts. Then the slice is completed.

mod cache;
mod count;
pub mod decide;
pub(crate) mod effects;
pub(crate) mod handler;
pub(crate) mod heavy;
mod memory;
pub(crate) mod metrics;
pub(crate) mod part;
pub mod profile;
pub mod queue;
mod recent;
mod room;
pub mod rule;
pub(crate) mod stats;
pub mod store;
pub mod subscribers;
mod subscriptions;
pub(crate) mod watch;

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use self::cache::RuleCache;
use self::decide::RuleSet;
use self::part::AutomationPart;
use self::store::{Expected, RuleStore, Stored, WriteError};
use self::subscribers::{Kept, SubscriberStore};
pub(crate) use self::subscriptions::{RulesEar, Subscriptions};
use crate::breaker::{Breaker, Unanswered};
use crate::clock::SharedClock;
use crate::config::{Config, OrderBy};
use crate::formats::Format;
use crate::id::{BotId, RuleId};
use crate::mongo::client::{Mongo, MongoError};
use crate::mongo::large::LargeReads;
use crate::pipeline::Kind;
use crate::product::{self, OpenError, Opening, Part};
use crate::queue::Queue;

/// Number of rules, and of their bytes of JSON, up to which a list is small. A networked disk needs some
/// milliseconds for each one that is not in the memory of MongoDB.
const FEW: (usize, usize) = (10, rule::RULE_MAX_BYTES);

/// The pipeline of the bots' rules.
pub const PIPELINE: &str = crate::config::AUTOMATIONS;

/// The product.
pub(crate) struct Product;

/// The formats of its data.
static FORMATS: [Format; 3] = [
    Format::first_documents("rules", "rules"),
    Format::first_documents("profiles", "profiles of subscribers"),
    Format::first("rule-statistics", "statistics of rules"),
];

impl product::Product for Product {
    fn pipeline(&self) -> &'static str {
        PIPELINE
    }

    fn kind(&self, _: &Config, _: &SharedClock) -> Kind {
        // Delayed events are in a queue. An event of the bus cannot claim to be one, because this
        // attribute is removed.
        Kind { selective: true, renews: true, reserved: &[decide::DUE], ..Kind::default() }
    }

    fn needs_mongo(&self) -> bool {
        true
    }

    fn formats(&self) -> &'static [Format] {
        &FORMATS
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        let by_subject = opening.pipeline.order_by == OrderBy::Subject;
        let timeout = opening.pipeline.handler_timeout;
        Ok(Arc::new(AutomationPart::new(&opening.mongo()?, timeout, by_subject)))
    }
}

/// The rules and profiles of every bot, as known in one process. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Automations(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: RuleStore,
    subscribers: SubscriberStore,
    cache: Arc<RuleCache>,
    subscriptions: Arc<Subscriptions>,
}

impl Automations {
    pub(crate) fn new(mongo: &Mongo) -> Self {
        let store = RuleStore::new(mongo.clone());
        Self(Arc::new(Inner {
            cache: Arc::new(RuleCache::new(store.clone())),
            store,
            subscribers: SubscriberStore::new(mongo.clone()),
            subscriptions: Arc::new(Subscriptions::new()),
        }))
    }

    pub(crate) fn store(&self) -> &RuleStore {
        &self.0.store
    }

    pub(crate) fn subscribers(&self) -> &SubscriberStore {
        &self.0.subscribers
    }

    pub(crate) fn subscriptions(&self) -> &Arc<Subscriptions> {
        &self.0.subscriptions
    }

    /// The rules of a bot, for decisions.
    ///
    /// # Errors
    /// If they are not cached and MongoDB is unavailable.
    pub(crate) async fn rules(&self, bot: &BotId) -> Result<Arc<RuleSet>, MongoError> {
        self.0.cache.of(bot).await
    }

    /// Notes that the rules of a bot are changing, or have changed.
    fn changes(&self, bot: &BotId) {
        self.0.subscriptions.changes(bot);
        self.0.cache.forget(bot);
    }

    fn forget(&self, bot: &BotId) {
        self.0.cache.forget(bot);
    }

    fn forget_all(&self) {
        self.0.cache.forget_all();
    }
}

/// Reads rules and profiles, and changes rules so that every process learns of it.
///
/// A reader waits `read_timeout` for MongoDB, and does not wait for a MongoDB that is known to hang
/// ([`Breaker`]). The breaker belongs to these readers alone: slow queries of the counters do not
/// open it. A writer waits as long as a command may take.
#[derive(Debug, Clone)]
pub(crate) struct Editor {
    automations: Automations,
    queue: Queue,
    read_timeout: Duration,
    mongo: Arc<Breaker>,
    lists: LargeReads,
}

/// Why a rule was not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EditError {
    /// Redis failed: nothing was changed.
    #[error(transparent)]
    Redis(#[from] crate::redis::RedisError),
    /// The rule was not written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl Editor {
    pub(crate) fn new(automations: Automations, queue: Queue, read_timeout: Duration) -> Self {
        Self {
            automations,
            queue,
            read_timeout,
            mongo: Arc::new(Breaker::new("mongodb")),
            lists: LargeReads::default(),
        }
    }

    /// The rules of a bot, in the order of their ids. They may be megabytes, so a list that is late
    /// opens no breaker, and one of many or large rules waits for its turn.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses, or too many requests of the caller wait for it.
    ///
    /// # Cancel safety
    /// The place in the line of large reads is lost.
    pub(crate) async fn rules(&self, bot: &BotId) -> Result<Vec<Stored>, Unanswered<MongoError>> {
        let list = async {
            let store = self.automations.store();
            if let Some(few) = store.few(bot, FEW).await? {
                return Ok(few);
            }
            let _place = self.lists.take(bot).await?;
            store.list(bot).await
        };
        self.mongo.read_much(self.read_timeout, list).await
    }

    /// Compiles stored rules of a bot for a dry run, while `goes_on`. `None`: it was stopped. The next
    /// call continues. An unchanged filter is not compiled again.
    pub(crate) fn compile(
        &self,
        bot: &BotId,
        stored: Vec<Stored>,
        goes_on: impl Fn() -> bool,
    ) -> Option<Arc<RuleSet>> {
        self.automations.0.cache.compile(bot, stored, goes_on)
    }

    /// A rule; `None` if it does not exist.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    pub(crate) async fn rule(
        &self,
        bot: &BotId,
        id: &RuleId,
    ) -> Result<Option<Stored>, Unanswered<MongoError>> {
        self.mongo.read(self.read_timeout, self.automations.store().get(bot, id)).await
    }

    /// The profile of a subscriber; without a sequence if there is none, or if it was deleted. It has no
    /// decisions. It may be large, or wait for large ones, so a profile that is late opens no breaker.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses, or too many requests of the caller wait for it.
    ///
    /// # Cancel safety
    /// The place in the line of large reads is lost.
    pub(crate) async fn subscriber(
        &self,
        bot: &BotId,
        subscriber: &str,
    ) -> Result<Kept, Unanswered<MongoError>> {
        let kept = self.automations.subscribers().shown(bot, subscriber);
        let kept = self.mongo.read_much(self.read_timeout, kept).await?;
        Ok(if kept.gone { Kept::default() } else { kept })
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Writes a rule. Returns its version, and whether it is new.
    ///
    /// # Errors
    /// If it is not as expected, or if Redis or MongoDB fails; then it may be written.
    pub(crate) async fn put(
        &self,
        bot: &BotId,
        id: &RuleId,
        rule: &rule::Rule,
        expected: &Expected,
    ) -> Result<(String, bool), EditError> {
        let store = self.automations.store();
        let turn = store.turn(bot).await?;
        self.edit(bot, Box::pin(store.put_in_turn(turn, bot, id, rule, expected))).await
    }

    /// Deletes a rule. Returns whether it existed.
    ///
    /// # Errors
    /// If it is not as expected, or if Redis or MongoDB fails; then it may be deleted.
    pub(crate) async fn delete(
        &self,
        bot: &BotId,
        id: &RuleId,
        expected: &Expected,
    ) -> Result<bool, EditError> {
        let store = self.automations.store();
        let turn = store.turn(bot).await?;
        let deleted =
            self.edit(bot, Box::pin(store.delete_in_turn(turn, bot, id, expected))).await?;
        match self.queue.forget_rule(bot, id).await {
            Ok(false) => {}
            Ok(true) => self.forget_statistics(bot).await,
            Err(error) => {
                warn!(%bot, rule = %id, %error, "cannot delete the statistics of a deleted rule");
            }
        }
        Ok(deleted)
    }

    /// Deletes what rules that were deleted left behind.
    async fn forget_statistics(&self, bot: &BotId) {
        let Ok(rules) = self.rules(bot).await else { return };
        if let Err(error) = self.queue.forget_other_rules(bot, &rules).await {
            warn!(%bot, %error, "cannot delete the statistics of deleted rules");
        }
    }

    /// Publishes a message before the change, so that a process that cannot read the change knows
    /// that its rules may be outdated; and one after it, when the change can be read. The caller has the
    /// turn to write. While a request waits for it, or if it may not wait, no process hears of it.
    async fn edit<T>(
        &self,
        bot: &BotId,
        write: impl Future<Output = Result<T, WriteError>>,
    ) -> Result<T, EditError> {
        self.queue.tell_rules(bot).await?;
        let written = write.await;
        self.automations.changes(bot);
        if let Err(error) = self.queue.tell_rules(bot).await {
            warn!(%bot, %error, "cannot publish a change of rules; other processes find it within a second");
        }
        Ok(written?)
    }
}
