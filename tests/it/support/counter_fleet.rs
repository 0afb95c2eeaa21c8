//! Processes that count views, each behind its own bad network, and the check of the resulting
//! sums.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::TryStreamExt as _;
use mongodb::bson::{Bson, Document, doc};
use mongodb::{Collection, Database};
use serde_json::json;
use tokio::sync::OnceCell;

use super::bus::add;
use super::config::{SHARDS, STREAM, configs};
use super::http::{Client, Response};
use super::mongo::{self, MongoServer};
use super::mongo_proxy::MongoProxy;
use super::proxy::Proxy;
use super::redis::{Options, Persistence, RedisServer};
use super::served::Served;
use super::wait::eventually;

/// Maximum number of ads in one request.
const IDS_MAX: usize = 1_000;

/// Settings of processes that soon take over from a killed process.
const SETTINGS: &[(&str, &str)] = &[
    ("pipelines.counters.start", "\"earliest\""),
    ("pipelines.counters.linger", "\"0s\""),
    ("pipelines.counters.lease_ttl", "\"1s\""),
    ("pipelines.counters.handler_timeout", "\"5s\""),
    ("pipelines.counters.workers.max", "4"),
    ("pipelines.counters.backoff", "{ initial = \"20ms\", max = \"200ms\", jitter = 0.2 }"),
];

/// The stores that all processes share.
pub(crate) struct Stores {
    pub(crate) redis: RedisServer,
    pub(crate) mongo: MongoServer,
    /// The test's own client, without a proxy.
    database: OnceCell<Database>,
}

impl Stores {
    /// With [`Persistence::Always`], views are written to MongoDB immediately. Otherwise they are
    /// written when they are 2 s old.
    pub(crate) fn start(persistence: Persistence) -> Self {
        let redis = RedisServer::start(Options { persistence, tcp: true, ..Options::default() });
        let mongo = MongoServer::start(mongo::Options::default());
        Self { redis, mongo, database: OnceCell::new() }
    }

    /// The configuration of a process that reaches the stores by these URLs.
    pub(crate) fn config(&self, redis: &str, mongo: &str, settings: &[(&str, &str)]) -> String {
        let (redis, mongo) = (format!("{redis:?}"), format!("{mongo:?}"));
        let mut all = vec![("redis.url", &*redis), ("mongodb.url", &*mongo)];
        all.extend(SETTINGS);
        all.extend(settings);
        configs(&self.redis, &[], &all)
    }

    /// The configuration without proxies.
    pub(crate) fn direct(&self, settings: &[(&str, &str)]) -> String {
        self.config(&self.redis.url(), &self.mongo.url(), settings)
    }

    /// The number of queued records.
    pub(crate) async fn depth(&self) -> u64 {
        let mut connection = self.redis.connection().await;
        let mut pipe = redis::pipe();
        for shard in 0..SHARDS {
            pipe.hget(format!("fl:{{counters:{shard}}}:meta"), "depth");
        }
        let depths: Vec<Option<u64>> = pipe.query_async(&mut connection).await.unwrap();
        depths.into_iter().flatten().sum()
    }

    /// Puts views on the bus, which acknowledges them.
    pub(crate) async fn publish(&self, views: &[View]) {
        let texts: Vec<String> = views.iter().map(View::event).collect();
        add(&self.redis, STREAM, &texts).await;
    }

    pub(crate) async fn collection(&self, name: &str) -> Collection<Document> {
        let open = async || {
            let client = mongodb::Client::with_uri_str(self.mongo.url()).await.unwrap();
            client.database("fairlane")
        };
        self.database.get_or_init(open).await.collection(name)
    }

    /// The indexes of a collection.
    pub(crate) async fn indexes(&self, collection: &str) -> Vec<String> {
        self.collection(collection).await.list_index_names().await.unwrap()
    }

    /// The number of documents that match.
    pub(crate) async fn count(&self, collection: &str, filter: Document) -> u64 {
        self.collection(collection).await.count_documents(filter).await.unwrap()
    }

    /// Makes MongoDB delete what has expired. By itself it does so once a minute.
    pub(crate) async fn expire(&self) {
        let database = self.collection("subscribers").await.client().database("admin");
        database.run_command(doc! { "secantusAdmin.pruneTtl": 1 }).await.unwrap();
    }

    /// Changes stored data without Fairlane.
    pub(crate) async fn tamper(&self, collection: &str, filter: Document, update: Document) {
        let tampered = self.collection(collection).await.update_one(filter, update).await.unwrap();
        assert_eq!(tampered.modified_count, 1);
    }

    /// The content of MongoDB: for each ad the total and the sum of its days.
    pub(crate) async fn stored(&self) -> (Sums, Sums) {
        let (mut totals, mut days) = (Sums::new(), Sums::new());
        let mut found = self.collection("counters_totals").await.find(doc! {}).await.unwrap();
        while let Some(document) = found.try_next().await.unwrap() {
            totals.insert(ad_of(&document), number(document.get("total").unwrap()));
        }
        let mut found = self.collection("counters_daily").await.find(doc! {}).await.unwrap();
        while let Some(document) = found.try_next().await.unwrap() {
            let month = document.get_array("days").unwrap();
            assert_eq!(month.len(), 31, "{document}");
            *days.entry(ad_of(&document)).or_default() += month.iter().map(number).sum::<u64>();
        }
        (totals, days)
    }

    /// All reported sums of the ads. `client` asks the process that reports them over HTTP.
    pub(crate) async fn said(&self, client: &Client, expected: &Sums) -> Said {
        let (totals, days) = self.stored().await;
        let ads: BTreeSet<Ad> = expected.keys().chain(totals.keys()).cloned().collect();
        Said { http: told(client, &ads).await, totals, days }
    }

    /// The number of views that MongoDB has stored.
    pub(crate) async fn stored_views(&self) -> u64 {
        let totals = self.collection("counters_totals").await;
        let mut found = totals.find(doc! {}).projection(doc! { "total": 1 }).await.unwrap();
        let mut views = 0;
        while let Some(document) = found.try_next().await.unwrap() {
            views += number(document.get("total").unwrap());
        }
        views
    }

    /// Waits until no record is queued and all sums are as expected. It fails only if nothing
    /// changes within the timeout: the queues do not shrink, and MongoDB does not store more. The
    /// total time depends on the machine.
    pub(crate) async fn settles(&self, client: &Client, expected: &Sums, timeout: Duration) {
        let (mut moved, mut least) = (Instant::now(), u64::MAX);
        let (mut looked, mut most) = (Instant::now(), 0);
        eventually(timeout * 10, "the sums are right", async || {
            let depth = self.depth().await;
            if depth < least {
                (moved, least) = (Instant::now(), depth);
            }
            if looked.elapsed() > Duration::from_secs(1) {
                let stored = self.stored_views().await;
                if stored > most {
                    (moved, most) = (Instant::now(), stored);
                }
                looked = Instant::now();
            }
            let wrong = match depth {
                0 => judge(expected, &self.said(client, expected).await),
                _ => vec![format!("{depth} records are queued")],
            };
            let shown = wrong.iter().take(20).map(String::as_str).collect::<Vec<_>>().join("\n");
            let late = moved.elapsed() > timeout;
            assert!(!late, "{} faults, no progress for {timeout:?}:\n{shown}", wrong.len());
            wrong.is_empty()
        })
        .await;
    }
}

/// The dead letters of the counters, the newest first.
pub(crate) async fn letters(client: &Client) -> Vec<serde_json::Value> {
    let answer = client.get("/v1/pipelines/counters/dead").await.json();
    answer["dead_letters"].as_array().unwrap().clone()
}

/// A process behind its own proxies.
pub(crate) struct Node {
    pub(crate) redis: Proxy,
    pub(crate) mongo: MongoProxy,
    pub(crate) served: Served,
    config: String,
}

impl Node {
    pub(crate) async fn start(stores: &Stores, settings: &[(&str, &str)]) -> Self {
        let redis = Proxy::start(stores.redis.tcp_addr()).await;
        let mongo = MongoProxy::start_before(stores.mongo.address()).await;
        let config = stores.config(&redis.url(), &mongo.mongo_url(), settings);
        let served = Served::start(&config).await;
        Self { redis, mongo, served, config }
    }

    /// Restarts the process, and kills it first if it still runs.
    pub(crate) async fn restart(&mut self) {
        self.served.kill9();
        self.served = Served::start_managed(&self.config).await;
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(&self.served.http())
    }
}

/// A bot and its ad.
pub(crate) type Ad = (String, String);
/// Views per ad.
pub(crate) type Sums = BTreeMap<Ad, u64>;

/// Several views of an ad in one call.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) ad: Ad,
    pub(crate) n: u64,
    /// Every view has a different key.
    pub(crate) key: String,
}

impl View {
    pub(crate) fn new(bot: &str, ad: &str, n: u64) -> Self {
        let key = format!("{:032x}", rand::random::<u128>());
        Self { ad: (bot.to_owned(), ad.to_owned()), n, key }
    }

    /// Counts the views over HTTP, in one call. A second call with the same view counts nothing.
    pub(crate) async fn post(&self, client: &Client) -> Response {
        let body = json!({ "n": self.n }).to_string();
        let headers = [("content-type", "application/json"), ("idempotency-key", &*self.key)];
        client.send("POST", &path(&self.ad, "/views"), &headers, body.as_bytes()).await
    }

    /// Counts over HTTP until one of the clients, which may change, gets an acknowledgement.
    /// Returns the total.
    pub(crate) async fn count(&self, mut pick: impl FnMut() -> Client) -> Option<u64> {
        let answer = acknowledged(async || self.post(&pick()).await).await;
        answer.json()["total"].as_u64()
    }

    fn event(&self) -> String {
        let (bot, ad) = &self.ad;
        json!({
            "specversion": "1.0", "id": self.key, "source": "test", "type": "ad.viewed",
            "botid": bot, "data": { "ad": ad, "n": self.n },
        })
        .to_string()
    }
}

/// The path of an ad's counter, followed by `behind`.
pub(crate) fn path((bot, ad): &Ad, behind: &str) -> String {
    format!("/v1/bots/{bot}/counters/{ad}{behind}")
}

/// Repeats a request until it succeeds.
///
/// # Panics
/// If it is refused for a permanent reason.
pub(crate) async fn acknowledged(mut request: impl AsyncFnMut() -> Response) -> Response {
    let mut last = Response::default();
    eventually(Duration::from_secs(60), "a request is acknowledged", async || {
        last = request().await;
        assert!(matches!(last.code, 0 | 200 | 204 | 503), "{last:?}");
        matches!(last.code, 200 | 204)
    })
    .await;
    last
}

/// The totals that a process reports.
pub(crate) async fn told(client: &Client, ads: &BTreeSet<Ad>) -> BTreeMap<Ad, Option<u64>> {
    let mut bots: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (bot, ad) in ads {
        bots.entry(bot).or_default().push(ad);
    }
    let mut told = BTreeMap::new();
    for (bot, ads) in bots {
        for ids in ads.chunks(IDS_MAX) {
            let totals = query(client, bot, ids).await;
            let totals = ids.iter().map(|id| (((*bot).to_owned(), (*id).to_owned()), &totals[*id]));
            told.extend(totals.map(|(ad, total)| (ad, total.as_u64())));
        }
    }
    told
}

async fn query(client: &Client, bot: &str, ids: &[&str]) -> serde_json::Value {
    let path = format!("/v1/bots/{bot}/counters/query");
    let body = json!({ "ids": ids }).to_string();
    let headers = [("content-type", "application/json")];
    let answer = client.send("POST", &path, &headers, body.as_bytes()).await;
    assert!(matches!(answer.code, 0 | 200 | 503), "{answer:?}");
    if answer.code == 200 { answer.json()["totals"].clone() } else { json!({}) }
}

/// The total of one ad, or `None` if it is unknown now.
pub(crate) async fn total(client: &Client, ad: &Ad) -> Option<u64> {
    query(client, &ad.0, &[&*ad.1]).await[&*ad.1].as_u64()
}

/// The sums as the process and both collections report them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Said {
    pub(crate) http: BTreeMap<Ad, Option<u64>>,
    pub(crate) totals: Sums,
    pub(crate) days: Sums,
}

/// The differences between the reported and the expected sums, and between the stores.
pub(crate) fn judge(expected: &Sums, said: &Said) -> Vec<String> {
    let ads = expected.keys().chain(said.totals.keys()).chain(said.days.keys());
    let ads: BTreeSet<&Ad> = ads.collect();
    let of = |sums: &Sums, ad| sums.get(ad).copied().unwrap_or(0);
    let mut wrong = Vec::new();
    for ad in ads {
        let views = of(expected, ad);
        let (total, days) = (of(&said.totals, ad), of(&said.days, ad));
        let http = said.http.get(ad).copied().flatten();
        if (http, total, days) != (Some(views), views, views) {
            let (bot, ad) = ad;
            wrong.push(format!(
                "{ad} of {bot}: {views} expected, told {http:?}, stored {total}, days {days}"
            ));
        }
    }
    wrong
}

fn ad_of(document: &Document) -> Ad {
    let text = |key| document.get_str(key).unwrap().to_owned();
    (text("bot"), text("ad"))
}

fn number(value: &Bson) -> u64 {
    let number = match *value {
        Bson::Int32(number) => number.into(),
        Bson::Int64(number) => number,
        ref other => panic!("{other:?} is no whole number"),
    };
    number.try_into().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ad() -> Ad {
        ("b".to_owned(), "x".to_owned())
    }

    fn all(views: u64) -> (Sums, Said) {
        let sums = Sums::from([(ad(), views)]);
        let http = BTreeMap::from([(ad(), Some(views))]);
        (sums.clone(), Said { http, totals: sums.clone(), days: sums })
    }

    #[test]
    fn the_judge_finds_every_kind_of_fault() {
        let (expected, right) = all(3);
        assert_eq!(judge(&expected, &right), [""; 0]);
        assert_eq!(judge(&Sums::new(), &Said::default()), [""; 0]);
        let faults: [fn(&mut Said); 9] = [
            |said| *said.totals.get_mut(&ad()).unwrap() += 1,
            |said| *said.totals.get_mut(&ad()).unwrap() -= 1,
            |said| *said.days.get_mut(&ad()).unwrap() += 1,
            |said| *said.days.get_mut(&ad()).unwrap() -= 1,
            |said| {
                said.totals.clear();
            },
            |said| {
                said.days.clear();
            },
            |said| {
                said.http.insert(ad(), Some(4));
            },
            |said| {
                said.http.insert(ad(), None);
            },
            |said| {
                said.days.insert(("b".to_owned(), "y".to_owned()), 1);
            },
        ];
        for (at, fault) in faults.into_iter().enumerate() {
            let mut said = right.clone();
            fault(&mut said);
            assert_eq!(judge(&expected, &said).len(), 1, "fault {at}: {said:?}");
        }
        assert_eq!(judge(&all(2).0, &right).len(), 1, "all agree on a view too many");
        assert_eq!(judge(&all(4).0, &right).len(), 1, "all agree on a view too few");
    }
}
