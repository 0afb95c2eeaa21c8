//! Refuses data of a later version before anything reads it, and marks the data with the formats of
//! this one.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing::{debug, error, warn};

use super::AppError;
use super::builder::Plan;
use crate::clock::SharedClock;
use crate::formats::{self, CORE, FORMATS, Format, Marks, TooNew};
use crate::lifecycle::Shutdown;
use crate::mongo::client::{ANSWER_TIMEOUT, Mongo};
use crate::product::Product;
use crate::products::Products;
use crate::redis::Link;

/// Interval of looking at the marks.
const LOOK: Duration = Duration::from_secs(5);
/// How long a start waits for MongoDB. If it does not answer, the marks are read when it does.
const MONGO: Duration = Duration::from_secs(1);
/// How long the primaries of a cluster are asked which of them do not serve.
const MISSING: Duration = Duration::from_secs(2);

/// The formats that an instance reads and writes.
pub(super) struct Formats {
    all: Vec<&'static Format>,
    clock: SharedClock,
    /// Whether the marks in Redis were read and accepted.
    redis_is_accepted: bool,
    /// Whether MongoDB has the marks of this version.
    mongo_is_marked: bool,
    /// Why the instance ends.
    refused: Arc<OnceLock<TooNew>>,
}

/// The marks of data that this version reads.
pub(super) struct Accepted {
    /// Those in Redis; `None`: their primary did not answer, and others of its cluster serve.
    redis: Option<Marks>,
    /// Those in MongoDB; `None`: there are no documents, or it did not answer.
    documents: Option<Marks>,
}

impl Formats {
    /// The formats of the core and of the products that run.
    pub(super) fn new(products: &Products, plans: &[Plan], clock: &SharedClock) -> Self {
        let running = plans.iter().filter_map(|plan| products.of(&plan.name));
        let all = CORE.iter().chain(running.flat_map(Product::formats)).collect();
        Self {
            all,
            clock: Arc::clone(clock),
            redis_is_accepted: false,
            mongo_is_marked: false,
            refused: Arc::default(),
        }
    }

    fn all(&self) -> impl Iterator<Item = &'static Format> {
        self.all.iter().copied()
    }

    /// Whether the data includes documents in MongoDB.
    fn has_documents(&self) -> bool {
        self.all().any(|format| format.documents)
    }

    /// Refuses data of a later version. Changes nothing.
    pub(super) async fn accept(
        &self,
        link: &Link,
        mongo: Option<&Mongo>,
    ) -> Result<Accepted, AppError> {
        let redis = formats::look(link).await?;
        redis.accept(self.all(), &formats::place(link.prefix()))?;
        Ok(Accepted { redis: Some(redis), documents: self.accept_documents(mongo).await? })
    }

    /// Refuses documents of a later version. `None`: there are none, or MongoDB does not answer.
    async fn accept_documents(&self, mongo: Option<&Mongo>) -> Result<Option<Marks>, TooNew> {
        let Some(mongo) = mongo.filter(|_| self.has_documents()) else { return Ok(None) };
        let asked = tokio::time::timeout(MONGO, self.accept_mongo(mongo)).await;
        asked.unwrap_or(Ok(None))
    }

    /// Goes on without the marks if their primary does not answer while others of its cluster serve.
    /// [`Self::kept`] reads them when it does.
    pub(super) async fn or_later(
        &self,
        accepted: Result<Accepted, AppError>,
        link: &Link,
        mongo: Option<&Mongo>,
    ) -> Result<Accepted, AppError> {
        let error = match accepted {
            Err(AppError::Store(error)) => error,
            accepted => return accepted,
        };
        let primaries = link.missing_behind(&error, MISSING).await;
        if primaries.is_empty() {
            return Err(error.into());
        }
        warn!(%error, ?primaries, "the formats of the data in Redis are not known yet; reading them when their primary answers");
        Ok(Accepted { redis: None, documents: self.accept_documents(mongo).await? })
    }

    /// Marks the data. A full Redis, and a MongoDB that does not answer, are marked later.
    pub(super) async fn mark(&mut self, link: &Link, mongo: Option<&Mongo>, found: &Accepted) {
        self.redis_is_accepted = found.redis.is_some();
        if let Some(marks) = &found.redis
            && let Err(error) = formats::mark(link, marks, &self.all, &self.clock).await
        {
            warn!(%error, "cannot mark the data in Redis with its formats; retrying");
        }
        if let (Some(mongo), Some(marks)) = (mongo, &found.documents) {
            let marked = tokio::time::timeout(MONGO, self.mark_mongo(mongo, marks)).await;
            self.mongo_is_marked = marked.unwrap_or(false);
        }
    }

    /// Refuses documents of a later version. Returns their marks; `None`: MongoDB does not answer.
    async fn accept_mongo(&self, mongo: &Mongo) -> Result<Option<Marks>, TooNew> {
        match formats::look_mongo(mongo, ANSWER_TIMEOUT).await {
            Ok(marks) => marks.accept(self.all(), &place(mongo)).map(|()| Some(marks)),
            Err(error) => {
                debug!(%error, "cannot read the formats of the documents in MongoDB; retrying");
                Ok(None)
            }
        }
    }

    /// Adds the missing marks of the documents. Returns whether they are marked.
    async fn mark_mongo(&self, mongo: &Mongo, marks: &Marks) -> bool {
        let (all, clock) = (&self.all, &self.clock);
        let marked = formats::mark_mongo(mongo, marks, all, clock, ANSWER_TIMEOUT).await;
        if let Err(error) = &marked {
            debug!(%error, "cannot mark the documents in MongoDB with their formats; retrying");
        }
        marked.is_ok()
    }

    /// Keeps the marks of this version in the data, until the soft stop. Stops the instance if a store
    /// that did not answer at the start has data of a later version.
    pub(super) fn kept(
        &self,
        link: Arc<Link>,
        mongo: Option<Mongo>,
        shutdown: &Shutdown,
    ) -> impl Future<Output = ()> + Send + 'static + use<> {
        let mongo = mongo.filter(|_| self.has_documents());
        let mut known = Self {
            all: self.all.clone(),
            clock: Arc::clone(&self.clock),
            redis_is_accepted: self.redis_is_accepted,
            mongo_is_marked: self.mongo_is_marked,
            refused: Arc::clone(&self.refused),
        };
        let shutdown = shutdown.clone();
        async move {
            let mut told = false;
            loop {
                tokio::select! {
                    biased;
                    () = shutdown.soft.cancelled() => return,
                    () = tokio::time::sleep(LOOK) => {}
                }
                // Data that was not accepted yet is not marked.
                let marks = if known.redis_is_accepted {
                    formats::keep(&link, &known.all, &known.clock).await
                } else {
                    formats::look(&link).await
                };
                match marks {
                    Ok(marks) => match marks.accept(known.all(), &formats::place(link.prefix())) {
                        Ok(()) if known.redis_is_accepted => {}
                        Ok(()) => {
                            known.redis_is_accepted = true;
                            let (all, clock) = (&known.all, &known.clock);
                            if let Err(error) = formats::mark(&link, &marks, all, clock).await {
                                debug!(%error, "cannot mark the data in Redis with its formats; retrying");
                            }
                        }
                        Err(error) if !known.redis_is_accepted => known.refuse(error, &shutdown),
                        Err(error) if !told => {
                            warn!(%error, "a later version writes this data too; replace this process");
                            told = true;
                        }
                        Err(_) => {}
                    },
                    Err(error) => debug!(%error, "cannot keep the formats of the data in Redis"),
                }
                if let (false, Some(mongo)) = (known.mongo_is_marked, &mongo) {
                    match known.accept_mongo(mongo).await {
                        Ok(None) => {}
                        Ok(Some(marks)) => {
                            known.mongo_is_marked = known.mark_mongo(mongo, &marks).await;
                        }
                        Err(error) => known.refuse(error, &shutdown),
                    }
                }
            }
        }
    }

    /// Ends the instance: a later version wrote its data.
    fn refuse(&self, error: TooNew, shutdown: &Shutdown) {
        error!(%error, "stopping");
        let _ = self.refused.set(error);
        shutdown.soft.cancel();
    }

    /// Why the instance ended, if a later version wrote its data.
    pub(super) fn refused(&self) -> Option<AppError> {
        self.refused.get().cloned().map(AppError::from)
    }
}

/// The place of the marks in MongoDB, for people.
fn place(mongo: &Mongo) -> String {
    format!("the collection {FORMATS} at {mongo}")
}
