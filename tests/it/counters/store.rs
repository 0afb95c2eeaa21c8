//! The counters in MongoDB. A record counts once, even if it is applied twice, late, in parts or by
//! two processes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use fairlane::config::MongoUrl;
use fairlane::counters::store::{Added, Change, CounterStore, DAILY, Effect, Stored, TOTALS};
use fairlane::counters::view::{AdId, Deed, Record, Replacement};
use fairlane::id::{BotId, Sequence};
use fairlane::mongo::client::{Mongo, MongoError};
use futures_util::TryStreamExt as _;
use futures_util::future::join_all;
use jiff::civil::{Date, date};
use mongodb::bson::{Document, doc};
use mongodb::{Collection, Database};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

use crate::support::mongo::{MongoServer, Options};
use crate::support::wait::{Stopwatch, eventually};

struct Rig {
    server: MongoServer,
    mongo: Mongo,
    store: CounterStore,
    /// A separate client.
    database: Database,
}

impl Rig {
    async fn start() -> Self {
        let server = MongoServer::start(Options::default());
        let url = MongoUrl::parse(&server.url()).unwrap();
        let mongo = Mongo::open(&url, "fairlane").await.unwrap();
        let store = CounterStore::new(mongo.clone());
        store.prepare().await.unwrap();
        let client = mongodb::Client::with_uri_str(server.url()).await.unwrap();
        Self { server, mongo, store, database: client.database("fairlane") }
    }

    fn documents(&self, collection: &str) -> Collection<Document> {
        self.database.collection(collection)
    }

    /// The number of commands that the server received, including heartbeats.
    async fn commands(&self) -> i64 {
        let status = self.database.run_command(doc! { "serverStatus": 1 }).await.unwrap();
        let network = status.get_document("network").unwrap();
        let requests = network.get("numRequests").unwrap();
        requests.as_i64().or_else(|| requests.as_i32().map(i64::from)).unwrap()
    }

    async fn total(&self, bot: &BotId, of: &AdId) -> Option<Stored> {
        let ads = std::slice::from_ref(of);
        self.store.totals(bot, ads).await.unwrap().get(of).copied()
    }

    /// The days with views in the months that the tests use.
    async fn days(&self, bot: &BotId, of: &AdId) -> BTreeMap<Date, u64> {
        let (from, to) = (date(2026, 10, 1), date(2026, 12, 31));
        let ads = std::slice::from_ref(of);
        let days = self.store.daily(bot, ads, from, to).await.unwrap().remove(0);
        assert_eq!(days.len(), 31 + 30 + 31);
        days.into_iter().filter(|(_, n)| *n > 0).collect()
    }

    async fn stop(self) {
        self.mongo.close().await;
        self.database.client().clone().shutdown().await;
        drop(self.server);
    }
}

fn bot(text: &str) -> BotId {
    BotId::parse(text).unwrap()
}

fn ad(text: &str) -> AdId {
    AdId::parse(text).unwrap()
}

fn add(to: &str, records: &[(u64, Date, u64)]) -> Change {
    let added = |&(sequence, day, n)| Added { sequence: Sequence::new(sequence), day, n };
    Change { ad: ad(to), effect: Effect::Add(records.iter().map(added).collect()) }
}

fn replace(what: &str, sequence: u64, with: Replacement) -> Change {
    Change { ad: ad(what), effect: Effect::Replace(Sequence::new(sequence), with) }
}

fn forget() -> Replacement {
    Replacement { forget: true, ..Replacement::default() }
}

fn stored(total: u64, sequence: u64) -> Stored {
    Stored { total, sequence: Sequence::new(sequence) }
}

#[tokio::test]
async fn records_applied_twice_or_in_other_portions_count_once() {
    let rig = Rig::start().await;
    let (bot, a) = (bot("$shop \"1\""), ad("$a.b/ü"));
    let (october, november) = (date(2026, 10, 31), date(2026, 11, 1));
    let records = [(1, october, 1), (2, october, 10), (3, november, 100), (4, november, 1_000)];
    let slice = |range: Range<usize>| vec![add(a.as_str(), &records[range])];

    // Each row has a slice, and the stored total and sequence after it.
    for (range, total, last) in [
        (0..2, 11, 2),
        (0..2, 11, 2),
        (0..1, 11, 2),
        (0..3, 111, 3),
        (1..3, 111, 3),
        (2..4, 1_111, 4),
        (0..4, 1_111, 4),
    ] {
        rig.store.apply(&bot, slice(range.clone())).await.unwrap();
        assert_eq!(rig.total(&bot, &a).await, Some(stored(total, last)), "{range:?}");
        let days = rig.days(&bot, &a).await;
        assert_eq!(days.values().sum::<u64>(), total, "{range:?}");
    }
    let days = BTreeMap::from([(october, 11), (november, 1_100)]);
    assert_eq!(rig.days(&bot, &a).await, days);
    let unknown = ad("never seen");
    assert_eq!(rig.total(&bot, &unknown).await, None);
    assert_eq!(rig.days(&bot, &unknown).await, BTreeMap::new());
    rig.store.apply(&bot, Vec::new()).await.unwrap();

    // Other clients read these documents, so their format is fixed.
    let total = rig.documents(TOTALS).find_one(doc! {}).await.unwrap().unwrap();
    let id = format!("{bot}\u{1f}{a}");
    let (bot_text, ad_text) = (bot.as_str(), a.as_str());
    let expected =
        doc! { "_id": &id, "bot": bot_text, "ad": ad_text, "s": 4_i64, "total": 1_111_i64 };
    let sorted = |document: Document| document.into_iter().collect::<BTreeMap<_, _>>();
    assert_eq!(sorted(total), sorted(expected));
    let filter = doc! { "_id": format!("{id}\u{1f}2026-11") };
    let month = rig.documents(DAILY).find_one(filter).await.unwrap().unwrap();
    assert_eq!(month.get_str("month").unwrap(), "2026-11");
    let days = month.get_array("days").unwrap();
    assert_eq!((days.len(), days[0].as_i64()), (31, Some(1_100)));
    rig.stop().await;
}

#[tokio::test]
async fn a_replacement_wipes_all_months_and_no_late_write_restores_them() {
    let rig = Rig::start().await;
    let (bot, a, days) = (bot("b"), ad("a"), [date(2026, 10, 5), date(2026, 11, 6)]);
    let first = add("a", &[(1, days[0], 1), (2, days[1], 2)]);
    rig.store.apply(&bot, vec![first.clone(), add("a b", &[(3, days[0], 7)])]).await.unwrap();
    let with = Replacement {
        total: 50,
        days: BTreeMap::from([(days[0], 20), (days[1], 30)]),
        forget: false,
    };
    // The first views of December are replaced in the slice that contains them.
    let december = add("a", &[(4, date(2026, 12, 1), 4)]);
    let slice = vec![december.clone(), replace("a", 5, with.clone()), add("a", &[(6, days[1], 6)])];
    rig.store.apply(&bot, slice.clone()).await.unwrap();
    let expected = BTreeMap::from([(days[0], 20), (days[1], 36)]);
    for late in [slice, vec![first.clone(), december], vec![replace("a", 5, with)]] {
        assert_eq!(rig.total(&bot, &a).await, Some(stored(56, 6)));
        assert_eq!(rig.days(&bot, &a).await, expected);
        rig.store.apply(&bot, late).await.unwrap();
    }
    assert_eq!(rig.days(&bot, &a).await, expected);
    assert_eq!(rig.days(&bot, &ad("a b")).await, BTreeMap::from([(days[0], 7)]));

    // A forgotten ad leaves a dated sequence behind until it is seen again.
    rig.store.apply(&bot, vec![replace("a", 7, forget())]).await.unwrap();
    rig.store.apply(&bot, vec![first, add("a", &[(6, days[1], 6)])]).await.unwrap();
    assert_eq!(rig.total(&bot, &a).await, Some(stored(0, 7)));
    assert_eq!(rig.days(&bot, &a).await, BTreeMap::new());
    let gone = async |collection| {
        rig.documents(collection)
            .count_documents(doc! { "gone": { "$type": "date" } })
            .await
            .unwrap()
    };
    assert_eq!((gone(TOTALS).await, gone(DAILY).await), (1, 3));
    rig.store.apply(&bot, vec![add("a", &[(8, days[0], 8)])]).await.unwrap();
    assert_eq!((gone(TOTALS).await, gone(DAILY).await), (0, 2));
    rig.store.apply(&bot, vec![replace("a", 9, Replacement::default())]).await.unwrap();
    assert_eq!((gone(TOTALS).await, gone(DAILY).await), (0, 0));
    assert_eq!(rig.total(&bot, &a).await, Some(stored(0, 9)));
    rig.stop().await;
}

/// All records that were ever queued for one bot, and the progress of the queue.
struct History {
    bot: BotId,
    records: Vec<(u64, Record)>,
    done: usize,
    /// Slices that were handed out. Each starts at the head that the queue had then.
    held: Vec<Range<usize>>,
    random: SmallRng,
}

impl History {
    fn new(name: usize, seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed.wrapping_add(name as u64));
        let mut sequence = 1_000;
        let records = (0..40).map(|_| {
            sequence += random.random_range(1..3);
            (sequence, record(&mut random))
        });
        let records = records.collect();
        Self { bot: bot(&format!("bot {name}")), records, done: 0, held: Vec::new(), random }
    }

    fn changes(&self, slice: Range<usize>) -> Vec<Change> {
        let change = |(sequence, record): &(u64, Record)| {
            let sequence = Sequence::new(*sequence);
            let effect = match record.deed.clone() {
                Deed::Add { n, day } => Effect::Add(vec![Added { sequence, day, n }]),
                Deed::Replace(with) => Effect::Replace(sequence, with),
            };
            Change { ad: record.ad.clone(), effect }
        };
        self.records[slice].iter().map(change).collect()
    }

    async fn apply(&self, store: &CounterStore, slice: Range<usize>) {
        store.apply(&self.bot, self.changes(slice)).await.unwrap();
    }

    /// Plays the current holder and late holders of slices, in random order.
    async fn play(mut self, store: &CounterStore) -> Self {
        while self.done < self.records.len() {
            let end = self.done + self.random.random_range(1..=10);
            let own = self.done..end.min(self.records.len());
            self.held.push(own.clone());
            let late = self.held.choose(&mut self.random).cloned().unwrap();
            match self.random.random_range(0..10) {
                // The call is aborted at a random point, and the server does not learn of it.
                0..3 => {
                    let within = Duration::from_millis(self.random.random_range(0..10));
                    let _ = tokio::time::timeout(within, self.apply(store, own)).await;
                    continue;
                }
                3 => {
                    self.apply(store, own).await;
                    continue;
                }
                4..6 => {
                    tokio::join!(self.apply(store, own.clone()), self.apply(store, late));
                }
                6 => {
                    self.apply(store, own.clone()).await;
                    self.apply(store, late).await;
                }
                _ => self.apply(store, own.clone()).await,
            }
            self.done = own.end;
        }
        for late in [self.held.first().cloned(), self.held.last().cloned()] {
            self.apply(store, late.unwrap()).await;
        }
        self
    }

    /// The totals and days that follow from the list of all records.
    fn expected(&self) -> BTreeMap<AdId, (Stored, BTreeMap<Date, u64>)> {
        let mut ads: BTreeMap<AdId, (Stored, BTreeMap<Date, u64>)> = BTreeMap::new();
        for (sequence, record) in &self.records {
            let (stored, days) = ads.entry(record.ad.clone()).or_default();
            stored.sequence = Sequence::new(*sequence);
            match record.deed.clone() {
                Deed::Add { n, day } => {
                    stored.total += n;
                    *days.entry(day).or_default() += n;
                }
                Deed::Replace(with) => (stored.total, *days) = (with.total, with.days),
            }
        }
        ads
    }
}

fn record(random: &mut SmallRng) -> Record {
    fn any_day(random: &mut SmallRng) -> Date {
        let first = date(2026, random.random_range(10..=12), 1);
        let day = *[1, 2, 30, 31].choose(random).unwrap();
        first.with().day(day.min(first.days_in_month())).build().unwrap()
    }
    let deed = match random.random_range(0..30) {
        0 => Deed::Replace(forget()),
        1 => Deed::Replace(Replacement::default()),
        2..4 => {
            let days: BTreeMap<_, _> =
                (0..3).map(|_| (any_day(random), random.random_range(1..100_000))).collect();
            Deed::Replace(Replacement { total: days.values().sum(), days, forget: false })
        }
        _ => Deed::Add { n: random.random_range(1..=1_000), day: any_day(random) },
    };
    Record { ad: ad(["x", "y", "x y"].choose(random).unwrap()), deed }
}

#[tokio::test]
async fn any_cut_any_repetition_and_anybody_late_end_the_same() {
    let rig = Rig::start().await;
    let seed = rand::random();
    let histories = join_all((0..6).map(|bot| History::new(bot, seed).play(&rig.store))).await;
    for history in histories {
        for (ad, (stored, days)) in history.expected() {
            let found = rig.total(&history.bot, &ad).await;
            assert_eq!(found, Some(stored), "seed {seed}, {}, ad {ad}", history.bot);
            let found = rig.days(&history.bot, &ad).await;
            assert_eq!(found, days, "seed {seed}, {}, ad {ad}", history.bot);
            assert_eq!(found.values().sum::<u64>(), stored.total);
        }
    }
    rig.stop().await;
}

#[tokio::test]
async fn calls_made_at_the_same_time_share_commands_and_only_the_guilty_one_fails() {
    let rig = Rig::start().await;
    let (a, day) = (ad("a"), date(2026, 11, 30));
    let validator = doc! { "collMod": TOTALS, "validator": { "total": { "$ne": 7 } } };
    rig.database.run_command(validator).await.unwrap();

    let before = rig.commands().await;
    let bots: Vec<_> = (0..200).map(|n| (n, bot(&format!("bot {n}")))).collect();
    let views = |n| if n == 7 { 7 } else { 3 };
    let apply = |n, bot| rig.store.apply(bot, vec![add("a", &[(1, day, views(n))])]);
    let applied = join_all(bots.iter().map(|(n, bot)| apply(*n, bot))).await;
    let written = rig.commands().await;
    for ((n, bot), applied) in bots.iter().zip(applied) {
        match applied {
            Ok(()) => assert_ne!(*n, 7),
            Err(error) => {
                assert_eq!(*n, 7, "{bot}: {error}");
                assert!(matches!(error, MongoError::Refused { .. }), "{error:?}");
            }
        }
    }
    assert!(written - before < 40, "{} commands for 200 slices", written - before);

    let text = doc! { "$set": { "total": "many" } };
    rig.documents(TOTALS).update_one(doc! { "bot": "bot 8" }, text).await.unwrap();
    let ads = std::slice::from_ref(&a);
    let before = rig.commands().await;
    let read = join_all(bots.iter().map(|(_, bot)| rig.store.totals(bot, ads))).await;
    let asked = rig.commands().await - before;
    assert!(asked < 40, "{asked} commands for 200 questions");
    for ((n, bot), totals) in bots.iter().zip(read) {
        match totals {
            Ok(totals) => {
                let expected = if *n == 7 { None } else { Some(stored(3, 1)) };
                assert_eq!(totals.get(&a).copied(), expected, "{bot}");
            }
            Err(error) => {
                assert_eq!(*n, 8, "{bot}: {error}");
                assert!(matches!(error, MongoError::Reply { .. }), "{error:?}");
            }
        }
    }
    rig.stop().await;
}

#[tokio::test]
async fn a_slice_of_more_ads_than_a_command_holds_is_applied_once_too() {
    let rig = Rig::start().await;
    let (bot, day) = (bot("b"), date(2026, 11, 30));
    let name = |n: u64| format!("ad {n}");
    let slice = |ads: Range<u64>| ads.map(|n| add(&name(n), &[(n + 1, day, 1)])).collect();
    let apply = async |changes: Vec<Change>| {
        // On a busy machine the server may abort a command that takes too long.
        eventually(Duration::from_secs(60), "the slice is applied", async || {
            match rig.store.apply(&bot, changes.clone()).await {
                Ok(()) => true,
                Err(error) if error.is_passing() => false,
                Err(error) => panic!("{error}"),
            }
        })
        .await;
    };
    apply(slice(0..510)).await;
    // The same slice again, with one more record for the ads of the last command.
    let more: Vec<_> = (505..510).map(|n| add(&name(n), &[(n + 1_000, day, 10)])).collect();
    let again: Vec<Change> = slice(0..510);
    apply(again.into_iter().chain(more).collect()).await;
    for collection in [TOTALS, DAILY] {
        let count = rig.documents(collection).count_documents(doc! {}).await.unwrap();
        assert_eq!(count, 510, "{collection}");
    }
    for (n, total) in [(0, 1), (499, 1), (504, 1), (505, 11), (509, 11)] {
        let ad = ad(&name(n));
        assert_eq!(rig.total(&bot, &ad).await.map(|stored| stored.total), Some(total), "{ad}");
        assert_eq!(rig.days(&bot, &ad).await, BTreeMap::from([(day, total)]), "{ad}");
    }
    rig.stop().await;
}

#[tokio::test]
async fn an_export_has_every_ad_of_one_bot_that_had_views_on_that_day() {
    let rig = Rig::start().await;
    let day = date(2026, 10, 31);
    let document = |bot: &str, ad: &str, month: &str, n: i64| {
        let mut days = vec![0_i64; 31];
        (days[30], days[0]) = (n, 99);
        let id = format!("{bot}\u{1f}{ad}\u{1f}{month}");
        doc! { "_id": id, "bot": bot, "ad": ad, "month": month, "days": days, "s": 1_i64 }
    };
    let others = [("b!", "2026-10"), ("b", "2026-11"), ("a", "2026-10"), ("b\u{20}", "2026-10")];
    let mut documents: Vec<_> =
        others.into_iter().map(|(bot, month)| document(bot, "other", month, 5)).collect();
    let name = |n: i64| format!("ad {n:04}");
    documents.extend((0..2_100).map(|n| document("b", &name(n), "2026-10", n % 3)));
    rig.documents(DAILY).insert_many(documents).await.unwrap();

    let export = rig.store.export(&bot("b"), day).await.unwrap();
    let found: Vec<(AdId, u64)> = export.try_concat().await.unwrap();
    let expected: Vec<_> =
        (0..2_100).filter(|n| n % 3 > 0).map(|n| (ad(&name(n)), (n % 3).cast_unsigned())).collect();
    assert!(found == expected, "{} of {} lines", found.len(), expected.len());
    for none in [date(2026, 10, 30), date(2025, 10, 31)] {
        let export = rig.store.export(&bot("b"), none).await.unwrap();
        assert_eq!(export.try_concat().await.unwrap(), []);
    }
    rig.stop().await;
}

#[tokio::test]
async fn the_indexes_are_made_once_and_forgotten_documents_expire() {
    let rig = Rig::start().await;
    rig.store.prepare().await.unwrap();
    for (collection, count) in [(TOTALS, 2), (DAILY, 3)] {
        let indexes = rig.documents(collection).list_indexes().await.unwrap();
        let indexes: Vec<_> = indexes.try_collect().await.unwrap();
        assert_eq!(indexes.len(), count, "{collection}: {indexes:?}");
        let gone = indexes.iter().find(|index| index.keys == doc! { "gone": 1 }).unwrap();
        let options = gone.options.as_ref().unwrap();
        assert_eq!(options.expire_after, Some(Duration::from_secs(7 * 24 * 3_600)));
        assert_eq!(options.sparse, Some(true), "most documents have no such field");
    }
    rig.stop().await;
}

#[tokio::test]
async fn while_mongodb_hangs_only_the_first_reader_waits_for_totals() {
    let rig = Rig::start().await;
    let (bot, a) = (bot("b"), [ad("a")]);
    rig.store.apply(&bot, vec![add("a", &[(1, date(2026, 11, 1), 1)])]).await.unwrap();
    rig.server.sigstop();
    let watch = Stopwatch::start();
    let error = rig.store.totals(&bot, &a).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    watch.within(Duration::from_secs(3), "the first reader");
    let watch = Stopwatch::start();
    let error = rig.store.totals(&bot, &a).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    watch.within(Duration::from_millis(500), "the next reader");
    // A write waits for an answer, but not forever.
    let watch = Stopwatch::start();
    let slice = vec![add("a", &[(2, date(2026, 11, 1), 1)])];
    let error = rig.store.apply(&bot, slice.clone()).await.unwrap_err();
    assert!(error.is_passing(), "{error:?}");
    watch.within(Duration::from_secs(7), "a write");
    rig.server.sigcont();
    eventually(Duration::from_secs(15), "MongoDB answers again", async || {
        rig.store.apply(&bot, slice.clone()).await.is_ok()
    })
    .await;
    eventually(Duration::from_secs(15), "totals are told again", async || {
        rig.store.totals(&bot, &a).await.is_ok()
    })
    .await;
    assert_eq!(rig.total(&bot, &a[0]).await, Some(stored(2, 2)));
    rig.stop().await;
}
