//! MongoDB: one client per process, with a timeout for every wait, and the probes of `fairlane
//! check`.

mod driver;
mod error;
mod update;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use mongodb::bson::{DateTime, Document, RawDocumentBuf, doc};
use mongodb::options::{Acknowledgment, FindOptions, IndexOptions, WriteConcern};
use mongodb::{Collection, Database, IndexModel};
use tokio::time::Instant;

use self::driver::Driver;
pub use self::error::MongoError;
pub(crate) use self::update::Refused;
use super::MongoUrl;
use crate::pressure::Pressure;

/// The oldest server version with the features that Fairlane needs.
pub const OLDEST_VERSION: (u32, u32) = (6, 0);
/// Timeout of finding a usable server, and of connecting to one.
const SELECTION_TIMEOUT: Duration = Duration::from_secs(3);
/// A latency up to this never counts as slow, because a write waits for a majority.
const NEVER_SLOW: Duration = Duration::from_millis(100);
/// Timeout of a command, including finding a server.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The server ends a write at its deadline. This is the extra time for its answer to arrive.
const ANSWER_GRACE: Duration = Duration::from_millis(250);
/// Maximum wait for the answer of a write whose caller has given up. The write may still be in
/// transit.
const ABANDONED_MAX: Duration = Duration::from_secs(20);
/// Time limit for a write to reach a majority of the servers.
const MAJORITY_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of closing the connections.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A MongoDB deployment and one database of it.
#[derive(Clone)]
pub struct Mongo {
    driver: Arc<Driver>,
    database: String,
    pressure: Arc<Pressure>,
}

impl fmt::Debug for Mongo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mongo({self})")
    }
}

impl fmt::Display for Mongo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.driver.url)
    }
}

/// The topology of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Topology {
    /// A replica set.
    ReplicaSet {
        /// Its name.
        name: String,
        /// Members that hold data, without hidden ones.
        members: usize,
    },
    /// Behind `mongos`.
    Sharded,
    /// A single server without an operation log: it is its own majority.
    Standalone,
}

/// The properties of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MongoInfo {
    /// For example `8.0.4`.
    pub version: String,
    /// Its topology.
    pub topology: Topology,
    /// Its clock, since 1970, accurate to a millisecond and half a round trip.
    pub time: Option<Duration>,
}

impl MongoInfo {
    /// Major and minor version; zeros if unreadable.
    #[must_use]
    pub fn version_numbers(&self) -> (u32, u32) {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }
}

/// When a write counts as done, unless an operation overrides it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acknowledged {
    /// A majority of the servers has it: it survives a failover.
    ByMajority,
    /// Another setting of the URL, for example `w=1`.
    Otherwise(String),
}

impl Mongo {
    /// Parses the URL, with a DNS lookup of at most 5 s for `mongodb+srv`, and creates a client that
    /// connects on first use. Writes are acknowledged by a majority unless the URL sets another
    /// concern. If the lookup fails, every command has its error until a [`Self::ping`] has repeated
    /// it with success.
    ///
    /// # Errors
    /// [`MongoError::Options`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn open(url: &MongoUrl, database: &str) -> Result<Self, MongoError> {
        let driver = Arc::new(Driver::open(url).await?);
        let pressure = Arc::new(Pressure::new(NEVER_SLOW));
        Ok(Self { driver, database: database.to_owned(), pressure })
    }

    /// The error of the lookup of a `mongodb+srv` name, until it succeeds.
    pub(crate) fn lookup_error(&self) -> Option<MongoError> {
        self.driver.client().err()
    }

    /// Checks that a server answers and accepts the user of the URL. Takes at most 5 s, and 5 s more
    /// while the servers behind `mongodb+srv` are not known.
    ///
    /// # Errors
    /// If no server is usable, or the user is refused.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn ping(&self) -> Result<(), MongoError> {
        self.driver.look_up().await?;
        self.command("ping", doc! { "ping": 1 }).await.map(drop)
    }

    /// Reads the properties of the deployment. Takes at most 10 s.
    ///
    /// # Errors
    /// If no server is usable, or the answer is invalid.
    pub async fn info(&self) -> Result<MongoInfo, MongoError> {
        let build = self.command("buildInfo", doc! { "buildInfo": 1 }).await?;
        let hello = self.command("hello", doc! { "hello": 1 }).await?;
        let version =
            build.get_str("version").map_err(|_| self.not_understood("buildInfo", "a version"))?;
        Ok(MongoInfo {
            version: version.to_owned(),
            topology: topology(&hello),
            time: hello.get_datetime("localTime").ok().copied().and_then(since_1970),
        })
    }

    /// Refuses a server that is too old.
    ///
    /// # Errors
    /// [`MongoError::Version`].
    pub fn accept(&self, info: &MongoInfo) -> Result<(), MongoError> {
        if info.version_numbers() >= OLDEST_VERSION {
            return Ok(());
        }
        Err(MongoError::Version { url: self.driver.url.clone(), version: info.version.clone() })
    }

    /// When a write counts as done.
    #[must_use]
    pub fn acknowledged(&self) -> Acknowledged {
        acknowledged(&self.driver.concern)
    }

    /// Checks that this user may write, read and delete in the database, and that a write reaches a
    /// majority of the servers within 3 s. Removes its test data. Takes at most 25 s.
    ///
    /// # Errors
    /// The first operation that fails.
    ///
    /// # Cancel safety
    /// A collection `check-…` with one small document may remain.
    pub async fn try_write(&self) -> Result<(), MongoError> {
        let name = format!("check-{}", uuid::Uuid::now_v7().simple());
        let collection = self.database()?.collection::<Document>(&name);
        let tried = self.try_in(&collection).await;
        // Drop it also after a failure, because the first step may have succeeded.
        let dropped = self.answer("drop", async { collection.drop().await }).await;
        tried.and(dropped)
    }

    async fn try_in(&self, collection: &Collection<Document>) -> Result<(), MongoError> {
        let majority =
            WriteConcern::builder().w(Acknowledgment::Majority).w_timeout(MAJORITY_TIMEOUT).build();
        let insert = collection.insert_one(doc! { "_id": 1 }).write_concern(majority);
        self.answer("insert", async { insert.await }).await?;
        let find = collection.find_one(doc! { "_id": 1 });
        let found = self.answer("find", async { find.await }).await?;
        let delete = collection.delete_one(doc! { "_id": 1 });
        let deleted = self.answer("delete", async { delete.await }).await?;
        if found.is_none() || deleted.deleted_count != 1 {
            return Err(self.not_understood("find", "the document that was just written"));
        }
        Ok(())
    }

    /// Reads all matching documents into memory. Takes at most `within`, also on the server.
    pub(crate) async fn find(
        &self,
        collection: &str,
        filter: Document,
        options: FindOptions,
        within: Duration,
    ) -> Result<Vec<RawDocumentBuf>, MongoError> {
        let (found, _) = self.find_up_to(collection, filter, options, within, usize::MAX).await?;
        Ok(found)
    }

    /// The same, but stops after the document with which they have more than `bytes`. Returns also
    /// how many bytes they have.
    pub(crate) async fn find_up_to(
        &self,
        collection: &str,
        filter: Document,
        mut options: FindOptions,
        within: Duration,
        bytes: usize,
    ) -> Result<(Vec<RawDocumentBuf>, usize), MongoError> {
        options.max_time = Some(within);
        let collection = self.database()?.collection::<RawDocumentBuf>(collection);
        let find = collection.find(filter).with_options(options);
        self.answer_within("find", within, async {
            let (mut cursor, mut found, mut sum) = (find.await?, Vec::new(), 0);
            while sum <= bytes
                && let Some(document) = cursor.try_next().await?
            {
                sum += document.as_bytes().len();
                found.push(document);
            }
            Ok((found, sum))
        })
        .await
    }

    /// The number of matching documents; at most `limit` are counted.
    pub(crate) async fn count(
        &self,
        collection: &str,
        filter: Document,
        limit: u64,
        within: Duration,
    ) -> Result<u64, MongoError> {
        let collection = self.database()?.collection::<Document>(collection);
        let count = collection.count_documents(filter).limit(limit).max_time(within);
        self.answer_within("aggregate", within, async { count.await }).await
    }

    /// The number of documents of a collection, from its metadata.
    pub(crate) async fn size(&self, collection: &str, within: Duration) -> Result<u64, MongoError> {
        let collection = self.database()?.collection::<Document>(collection);
        let size = collection.estimated_document_count().max_time(within);
        self.answer_within("count", within, async { size.await }).await
    }

    /// Creates an index unless it exists.
    pub(crate) async fn index(
        &self,
        collection: &str,
        keys: Document,
        options: IndexOptions,
    ) -> Result<(), MongoError> {
        let collection = self.database()?.collection::<Document>(collection);
        let index = IndexModel::builder().keys(keys).options(options).build();
        let create = collection.create_index(index);
        self.answer("createIndexes", async { create.await }).await.map(drop)
    }

    /// The error for an answer without the `expected` content.
    pub(crate) fn not_understood(
        &self,
        command: &'static str,
        expected: &'static str,
    ) -> MongoError {
        MongoError::Reply { url: self.driver.url.clone(), command, expected }
    }

    /// Closes the connections. No other clone may be used any more.
    pub async fn close(self) {
        let Ok(client) = self.driver.client() else { return };
        let leaving = client.shutdown().immediate(true);
        // Servers that do not answer in time are not notified.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, async { leaving.await }).await;
    }

    /// The database.
    ///
    /// # Errors
    /// If its servers are not known. Nothing was sent.
    fn database(&self) -> Result<Database, MongoError> {
        Ok(self.driver.client()?.database(&self.database))
    }

    async fn command(&self, name: &'static str, command: Document) -> Result<Document, MongoError> {
        let database = self.database()?;
        self.answer(name, async { database.run_command(command).await }).await
    }

    async fn answer<T>(
        &self,
        command: &'static str,
        answer: impl Future<Output = mongodb::error::Result<T>>,
    ) -> Result<T, MongoError> {
        self.answer_within(command, ANSWER_TIMEOUT, answer).await
    }

    fn answer_within<T>(
        &self,
        command: &'static str,
        within: Duration,
        answer: impl Future<Output = mongodb::error::Result<T>>,
    ) -> impl Future<Output = Result<T, MongoError>> {
        self.answer_after(command, within, Duration::ZERO, answer)
    }

    /// [`Self::answer_within`] for a command with a time limit in the server: its answer gets extra
    /// time to arrive.
    async fn answer_after<T>(
        &self,
        command: &'static str,
        within: Duration,
        grace: Duration,
        answer: impl Future<Output = mongodb::error::Result<T>>,
    ) -> Result<T, MongoError> {
        let sent = Instant::now();
        let answered = tokio::time::timeout(within + grace, answer).await;
        self.pressure.observe(sent.elapsed());
        let Ok(answer) = answered else {
            let (url, met) = (self.driver.url.clone(), self.driver.met());
            return Err(MongoError::Silent { url, command, within, met });
        };
        answer.map_err(|source| self.failed(command, source))
    }

    /// The latency statistics of the answers.
    pub(crate) fn pressure(&self) -> &Arc<Pressure> {
        &self.pressure
    }

    fn failed(&self, command: &'static str, source: mongodb::error::Error) -> MongoError {
        MongoError::new(&self.driver.url, command, source, || self.driver.met())
    }
}

fn topology(hello: &Document) -> Topology {
    if let Ok(name) = hello.get_str("setName") {
        let count = |key| hello.get_array(key).map_or(0, Vec::len);
        let members = count("hosts") + count("passives");
        return Topology::ReplicaSet { name: name.to_owned(), members };
    }
    if matches!(hello.get_str("msg"), Ok("isdbgrid")) {
        Topology::Sharded
    } else {
        Topology::Standalone
    }
}

fn since_1970(time: DateTime) -> Option<Duration> {
    u64::try_from(time.timestamp_millis()).ok().map(Duration::from_millis)
}

fn acknowledged(concern: &WriteConcern) -> Acknowledged {
    let journal = if concern.journal == Some(false) { " without the journal" } else { "" };
    match &concern.w {
        None | Some(Acknowledgment::Majority) if journal.is_empty() => Acknowledged::ByMajority,
        None | Some(Acknowledgment::Majority) => {
            Acknowledged::Otherwise(format!("w=majority{journal}"))
        }
        Some(Acknowledgment::Nodes(nodes)) => {
            Acknowledged::Otherwise(format!("w={nodes}{journal}"))
        }
        Some(Acknowledgment::Custom(name)) => Acknowledged::Otherwise(format!("w={name}{journal}")),
        Some(other) => Acknowledged::Otherwise(format!("{other:?}{journal}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topology_is_read_from_the_greeting() {
        let set = doc! { "setName": "rs0", "hosts": ["a:1", "b:1"], "passives": ["c:1"] };
        let name = "rs0".to_owned();
        assert_eq!(topology(&set), Topology::ReplicaSet { name, members: 3 });
        assert_eq!(topology(&doc! { "msg": "isdbgrid" }), Topology::Sharded);
        assert_eq!(topology(&doc! { "ok": 1 }), Topology::Standalone);
    }

    #[test]
    fn only_a_majority_survives_a_failover() {
        let concern = |w, journal| {
            let mut concern = WriteConcern::majority();
            (concern.w, concern.journal) = (w, journal);
            acknowledged(&concern)
        };
        assert_eq!(concern(None, None), Acknowledged::ByMajority);
        assert_eq!(concern(Some(Acknowledgment::Majority), Some(true)), Acknowledged::ByMajority);
        for (w, journal, shown) in [
            (Some(Acknowledgment::Nodes(1)), None, "w=1"),
            (Some(Acknowledgment::Custom("dc".to_owned())), None, "w=dc"),
            (Some(Acknowledgment::Majority), Some(false), "w=majority without the journal"),
        ] {
            assert_eq!(concern(w, journal), Acknowledged::Otherwise(shown.to_owned()));
        }
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let info = |version: &str| MongoInfo {
            version: version.to_owned(),
            topology: Topology::Standalone,
            time: None,
        };
        for (version, enough) in
            [("5.0.31", false), ("6.0.0", true), ("10.1.2-rc0", true), ("?", false)]
        {
            assert_eq!(info(version).version_numbers() >= OLDEST_VERSION, enough, "{version}");
        }
    }
}
