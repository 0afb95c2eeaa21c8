//! View counters as clients see them: counted in Redis at once, kept in MongoDB within seconds.

use futures_util::Stream;
use jiff::civil::Date;

use crate::id::BotId;
use crate::keyspace::StoreError;
use crate::store::mongo::MongoError;
use crate::view::{AdId, Replacement};

/// Why the counters cannot be told or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CountersError {
    /// Redis failed.
    #[error(transparent)]
    Redis(#[from] StoreError),
    /// MongoDB failed.
    #[error(transparent)]
    Mongo(#[from] MongoError),
}

/// Totals of several ads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Totals {
    /// In the order that was asked; `None` where no store can tell it now.
    pub(crate) totals: Vec<Option<u64>>,
    /// Redis is away: what was viewed in the last seconds is missing.
    pub(crate) stale: bool,
}

/// The counters. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Counters;

impl Counters {
    /// Counts `n` views (1 to [`crate::view::VIEWS_MAX`]) and answers the new total; `None` where no store can tell it, the
    /// views still counted. A second call with the same `key` within an hour counts nothing and
    /// answers what the first did.
    pub(crate) async fn view(
        &self,
        bot: &BotId,
        ad: &AdId,
        n: u64,
        key: Option<&str>,
    ) -> Result<Option<u64>, CountersError> {
        unimplemented!("{bot} {ad} {n} {key:?}")
    }

    /// The totals of up to 1,000 ads; 0 for one that was never counted.
    pub(crate) async fn totals(
        &self,
        bot: &BotId,
        ads: &[AdId],
    ) -> Result<Totals, CountersError> {
        unimplemented!("{bot} {ads:?}")
    }

    /// Replaces all that was counted of an ad so far. Totals show it at once, days within seconds.
    pub(crate) async fn replace(
        &self,
        bot: &BotId,
        ad: &AdId,
        with: &Replacement,
    ) -> Result<(), CountersError> {
        unimplemented!("{bot} {ad} {with:?}")
    }

    /// Today in the configured time zone.
    pub(crate) fn today(&self) -> Date {
        unimplemented!()
    }

    /// Views per day, from `from` to `to`, days without any among them.
    pub(crate) async fn daily(
        &self,
        bot: &BotId,
        ad: &AdId,
        from: Date,
        to: Date,
    ) -> Result<Vec<(Date, u64)>, CountersError> {
        unimplemented!("{bot} {ad} {from} {to}")
    }

    /// The views of one day, ads without any left out.
    pub(crate) async fn export(
        &self,
        bot: &BotId,
        day: Date,
    ) -> Result<
        impl Stream<Item = Result<(AdId, u64), CountersError>> + Send + Unpin + 'static,
        CountersError,
    > {
        if day.year() == 0 {
            return Ok(futures_util::stream::empty());
        }
        unimplemented!("{bot}")
    }
}
