//! Counting views.

mod quotas;
mod redriven;

use std::collections::BTreeMap;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::counters::scripts::{
    Counting, Import, IncrementIfExists, Replace, Taken, Upsert, Viewed, Views,
};
use fairlane::counters::view::AdId;
use fairlane::id::{BotId, Sequence};
use fairlane::ledger::{Leaving, Posting};
use fairlane::quotas::Quota;
use fairlane::redis::scripts::{
    Claimed, Enqueue, Enqueued, Limits, Mode, Postings, Recover, Span, Take, Verdict,
};
use redis::Commands;

use super::{LIMITS, SLICE_US, Shard, bot, completion};

const DAY_US: i64 = 86_400_000_000;
const ADS: u64 = 1_000;
const HOUR_MS: u64 = 3_600_000;

fn ad(id: &str) -> AdId {
    AdId::parse(id).unwrap()
}

/// The real time, because keys of the cache expire by it.
fn now() -> i64 {
    i64::try_from(SystemClock.now().as_micros()).unwrap()
}

/// A shard of the counters, and the settings of a bot's calls.
struct Counters {
    shard: Shard,
    now: i64,
    bot: BotId,
    key: Option<&'static str>,
    cached_ads: u64,
}

impl Counters {
    fn new() -> Self {
        let shard = Shard::of("counters");
        let mut counters = Self { shard, now: now(), bot: bot("b"), key: None, cached_ads: ADS };
        counters.run("run-1");
        counters
    }

    /// Gives the server this run id.
    fn run(&mut self, run: &str) {
        let keys = &self.shard.keys.clone();
        self.shard.call(self.now, &Recover { keys, run, slice_us: SLICE_US });
    }

    fn call(&mut self, id: &str, n: u64, stored: Option<(&str, Option<(u64, u64)>)>) -> Viewed {
        self.now += 10;
        let (keys, bot, ad) = (&self.shard.keys.clone(), &self.bot.clone(), &ad(id));
        let counting = Counting { keys, limits: LIMITS, cached_ads: self.cached_ads, bot, ad };
        let idempotency = self.key.map(|key| (key, HOUR_MS));
        let views = Views { counting, n, event: b"view", idempotency };
        match stored {
            None => self.shard.call(self.now, &IncrementIfExists(views)),
            Some((acked, stored)) => {
                let stored = stored.map(|(total, s)| (total, Sequence::new(s)));
                self.shard.call(self.now, &Upsert { views, acked, stored })
            }
        }
    }

    fn view(&mut self, id: &str, n: u64) -> Viewed {
        self.call(id, n, None)
    }

    /// Counts with the total and the sequence of the document, before any completion.
    fn upsert(&mut self, id: &str, n: u64, stored: Option<(u64, u64)>) -> Viewed {
        self.call(id, n, Some(("", stored)))
    }

    fn replace(&mut self, id: &str, total: u64) {
        self.now += 10;
        let (keys, bot, ad) = (&self.shard.keys.clone(), &self.bot.clone(), &ad(id));
        let cached_ads = self.cached_ads;
        let counting = Counting { keys, limits: LIMITS, cached_ads, bot, ad };
        self.shard.call(self.now, &Replace { counting, total, event: b"replace" });
    }

    /// A line of an import, with the line before it and the last empty line after it.
    fn import(&mut self, [before, line, upto]: [u64; 3], id: &str, total: u64) -> Taken {
        self.now += 10;
        let (keys, bot, ad) = (&self.shard.keys.clone(), &self.bot.clone(), &ad(id));
        let cached_ads = self.cached_ads;
        let counting = Counting { keys, limits: LIMITS, cached_ads, bot, ad };
        let (event, key, keep_ms) = (b"line", "key", 1_000);
        let import = Import { counting, total, event, key, before, line, upto, keep_ms };
        self.shard.call(self.now, &import)
    }

    /// Copies two events from the bus, with these views or without, after one of another bot.
    fn copy(&mut self, views: [Option<(&str, u64)>; 2]) -> Enqueued {
        self.copy_with(views, Quota::NONE)
    }

    fn copy_with(&mut self, views: [Option<(&str, u64)>; 2], quota: Quota) -> Enqueued {
        self.now += 10;
        let bots = vec![(bot("c"), vec![&b"one"[..]]), (self.bot.clone(), vec![b"two", b"three"])];
        let posting = |(ad, amount): (&str, u64)| Posting { account: ad.into(), amount };
        let (other, views) = (posting(("z", 2)), views.map(|view| view.map(posting)));
        let posted = vec![vec![Some(&other)], views.iter().map(Option::as_ref).collect()];
        let keys = &self.shard.keys.clone();
        let call = Enqueue {
            keys,
            spans: vec![Span {
                log: "s",
                prev: "0-0".parse().unwrap(),
                last: "5-0".parse().unwrap(),
            }],
            repeats: None,
            limits: Limits { quota, ..LIMITS },
            quotas: &fairlane::quotas::NO_QUOTAS,
            bots,
            postings: Some(Postings { cached_accounts: self.cached_ads, bots: posted }),
            take: Take::default(),
        };
        self.shard.call(self.now, &call)
    }

    fn unflushed(&mut self) -> BTreeMap<String, u64> {
        let [unflushed, ..] = self.shard.keys.ledger(&self.bot);
        self.shard.harness.plain().hgetall(unflushed).unwrap()
    }

    /// The number of totals that each generation caches.
    fn generations(&mut self) -> [u64; 2] {
        let [_, first, second, _] = self.shard.keys.ledger(&self.bot);
        [first, second].map(|key| self.shard.harness.plain().hlen(key).unwrap())
    }

    fn sequences(&mut self) -> Vec<u64> {
        self.shard.queue("b").into_iter().map(|(sequence, _)| sequence).collect()
    }

    fn claim(&mut self) -> Claimed {
        self.shard.claim(self.now)
    }

    /// Completes the first `n` events, which hold these counts.
    fn complete(&mut self, claimed: &Claimed, n: usize, mode: Mode, ads: &[(&str, u64, u64)]) {
        let last = Sequence::new(self.sequences()[n.max(1) - 1]);
        let accounts = ads.iter().map(|(id, views, replaced)| ((*id).into(), (*views, *replaced)));
        let mut item = completion(claimed, 0, n, mode);
        item.leaving = (n > 0).then(|| Leaving { last, accounts: accounts.collect() });
        let completed = self.shard.complete(self.now, 100, &[item]);
        assert_eq!(completed.verdicts, [Verdict::Ok]);
    }
}

fn total(total: u64) -> Viewed {
    Viewed::Counted(Some(total))
}

#[test]
fn a_view_of_an_ad_that_is_not_cached_changes_nothing_until_its_total_was_read() {
    let mut counters = Counters::new();
    assert_eq!(counters.view("x", 1), Viewed::Ask(String::new()));
    assert!(counters.unflushed().is_empty() && counters.sequences().is_empty());
    assert_eq!(counters.upsert("x", 2, Some((40, 7))), total(42));
    assert_eq!(counters.view("x", 3), total(45));
    assert_eq!(counters.unflushed(), BTreeMap::from([("vx".to_owned(), 5)]));
    assert_eq!(counters.sequences().len(), 2);
}

#[test]
fn a_total_that_somebody_cached_meanwhile_is_raised() {
    let mut counters = Counters::new();
    counters.view("x", 1);
    assert_eq!(counters.upsert("x", 1, Some((10, 0))), total(11));
    assert_eq!(counters.upsert("x", 1, Some((10, 0))), total(12), "the other's document is old");
}

#[test]
fn lines_of_an_import_are_taken_once_each_in_their_order() {
    let mut counters = Counters::new();
    assert_eq!(counters.import([1, 2, 2], "x", 9), Taken::Gap(0), "the first line is missing");
    assert_eq!(counters.import([0, 1, 3], "x", 30), Taken::Now);
    assert_eq!(counters.view("x", 1), total(31), "the total is told at once");
    assert_eq!(counters.import([0, 1, 1], "x", 30), Taken::Before);
    assert_eq!(counters.import([1, 2, 2], "y", 1), Taken::Before, "an empty line that follows it");
    assert_eq!(counters.view("x", 1), total(32));
    assert_eq!(counters.import([4, 5, 5], "y", 1), Taken::Gap(3));
    assert_eq!(counters.import([3, 4, 4], "y", 7), Taken::Now);
    assert_eq!(counters.view("y", 1), total(8));
    assert_eq!(counters.sequences().len(), 5);
    let expected = [("r", 2), ("rx", 1), ("ry", 1), ("vx", 2), ("vy", 1)];
    assert_eq!(counters.unflushed(), expected.map(|(key, n)| (key.to_owned(), n)).into());
}

#[test]
fn a_document_that_a_flush_may_have_changed_is_refused() {
    let mut counters = Counters::new();
    assert_eq!(counters.upsert("x", 3, None), Viewed::Counted(None), "MongoDB is unavailable");
    let head = counters.sequences()[0];
    // The flush has written the queued view to MongoDB but not completed it.
    assert_eq!(counters.upsert("x", 1, Some((3, head))), Viewed::Ask(String::new()));
    assert_eq!(counters.sequences().len(), 1, "nothing was counted");
    assert_eq!(counters.upsert("x", 1, Some((0, head - 1))), total(4));

    let claimed = counters.claim();
    counters.complete(&claimed, 1, Mode::Release, &[("x", 3, 0)]);
    counters.upsert("y", 1, None);
    let stale = counters.call("y", 1, Some(("", Some((0, 0)))));
    assert_eq!(stale, Viewed::Ask(head.to_string()), "something was completed since");
    assert_eq!(counters.call("y", 1, Some((&head.to_string(), Some((0, 0))))), total(2));
}

#[test]
fn a_second_view_with_the_same_key_counts_nothing_and_answers_the_same() {
    let mut counters = Counters::new();
    counters.key = Some("once");
    assert_eq!(counters.upsert("x", 1, Some((7, 0))), total(8));
    counters.key = Some("twice");
    assert_eq!(counters.view("x", 1), total(9));
    counters.key = Some("once");
    assert_eq!(
        [counters.view("x", 1), counters.upsert("x", 1, Some((9, 9)))],
        [total(8), total(8)]
    );
    counters.key = Some("unknown total");
    assert_eq!(counters.upsert("z", 1, None), Viewed::Counted(None));
    assert_eq!(counters.view("z", 1), Viewed::Counted(None));
    assert_eq!(counters.sequences().len(), 3);
}

#[test]
fn a_replacement_sets_the_total_immediately_and_no_total_is_told_without_it() {
    let mut counters = Counters::new();
    counters.upsert("x", 5, Some((100, 0)));
    counters.replace("x", 30);
    assert_eq!(counters.view("x", 1), total(31));
    let queued = [("r", 1), ("rx", 1), ("vx", 6)].map(|(key, n)| (key.to_owned(), n));
    assert_eq!(counters.unflushed(), queued.into());
    // In another run of the server the cache is void, and the document is the old one.
    counters.run("run-2");
    assert_eq!(counters.view("x", 1), Viewed::Ask(String::new()));
    assert_eq!(counters.upsert("x", 1, Some((100, 0))), Viewed::Counted(None));
    let claimed = counters.claim();
    counters.complete(&claimed, 2, Mode::Release, &[("x", 5, 1)]);
    let acked = match counters.view("x", 1) {
        Viewed::Ask(acked) => acked,
        counted @ Viewed::Counted(_) => panic!("{counted:?}"),
    };
    let s: u64 = acked.parse().unwrap();
    assert_eq!(counters.call("x", 1, Some((&acked, Some((30, s))))), total(33));
}

#[test]
fn a_completion_lowers_the_number_of_queued_replacements() {
    let mut counters = Counters::new();
    counters.replace("x", 1);
    counters.replace("y", 2);
    let claimed = counters.claim();
    counters.complete(&claimed, 1, Mode::Keep { ttl_ms: 30_000 }, &[("x", 0, 1)]);
    assert_eq!(counters.unflushed(), [("r".to_owned(), 1), ("ry".to_owned(), 1)].into());
}

#[test]
fn a_completion_lowers_the_unflushed_views_and_a_repeated_one_changes_nothing() {
    let mut counters = Counters::new();
    counters.upsert("x", 2, Some((0, 0)));
    counters.upsert("y", 1, Some((0, 0)));
    counters.view("x", 3);
    let claimed = counters.claim();
    let keep = Mode::Keep { ttl_ms: 30_000 };
    counters.complete(&claimed, 2, keep, &[("x", 2, 0), ("y", 1, 0)]);
    assert_eq!(counters.unflushed(), BTreeMap::from([("vx".to_owned(), 3)]));
    let mut again = completion(&claimed, 0, 2, keep);
    again.leaving =
        Some(Leaving { last: Sequence::new(1), accounts: [("x".into(), (2, 0))].into() });
    assert_eq!(counters.shard.complete(counters.now, 100, &[again]).verdicts, [Verdict::Ok]);
    assert_eq!(counters.unflushed(), BTreeMap::from([("vx".to_owned(), 3)]));
    assert_eq!(counters.view("x", 0), total(5), "the cached total stays");
}

#[test]
fn a_completion_of_one_event_lowers_the_unflushed_views_too() {
    let mut counters = Counters::new();
    counters.upsert("x", 2, Some((0, 0)));
    counters.view("x", 1);
    let claimed = counters.claim();
    counters.complete(&claimed, 1, Mode::Release, &[("x", 2, 0)]);
    assert_eq!(counters.unflushed(), BTreeMap::from([("vx".to_owned(), 1)]));
}

#[test]
fn an_emptied_queue_leaves_no_book_but_the_cache() {
    let mut counters = Counters::new();
    counters.upsert("x", 2, Some((0, 0)));
    let claimed = counters.claim();
    counters.complete(&claimed, 1, Mode::Release, &[("x", 2, 0)]);
    assert!(counters.unflushed().is_empty());
    assert_eq!(counters.generations().iter().sum::<u64>(), 1);
}

#[test]
fn a_cached_total_is_forgotten_after_two_days_unless_it_is_viewed() {
    let mut counters = Counters::new();
    for id in ["hot", "cold"] {
        counters.upsert(id, 1, Some((10, 0)));
    }
    let [_, first, second, _] = counters.shard.keys.ledger(&counters.bot);
    let ttl = |counters: &mut Counters, key: &str| -> i64 {
        counters.shard.harness.plain().pttl(key).unwrap()
    };
    let young = if counters.generations()[0] == 2 { first } else { second };
    let two_days = DAY_US / 1_000 * 2;
    assert!((two_days / 2..=two_days).contains(&ttl(&mut counters, &young)));

    counters.now += DAY_US;
    assert_eq!(counters.view("hot", 1), total(12));
    assert_eq!(counters.generations(), [1, 1], "the hit moved forward, alone");
    // Views that are completed part by part prolong nothing.
    let claimed = counters.claim();
    counters.complete(&claimed, 1, Mode::Park { ms: 10 }, &[("hot", 1, 0)]);
    assert!(ttl(&mut counters, &young) <= two_days);
}

#[test]
fn a_full_generation_takes_no_new_ad_and_still_counts_its_own() {
    let mut counters = Counters::new();
    counters.cached_ads = 1;
    assert_eq!(counters.upsert("x", 1, Some((10, 0))), total(11));
    assert_eq!(counters.upsert("y", 1, Some((20, 0))), total(21), "told, but not cached");
    assert_eq!(counters.generations().iter().sum::<u64>(), 1);
    assert_eq!(counters.view("x", 1), total(12));
    assert_eq!(counters.view("x", 1), total(13));
    assert!(matches!(counters.view("y", 1), Viewed::Ask(_)));
    // The total of a replaced one is told after the replacement was applied, unless there is room.
    counters.replace("y", 5);
    assert_eq!(counters.import([0, 1, 1], "z", 7), Taken::Now);
    assert!(matches!(counters.view("y", 1), Viewed::Ask(_)));
    assert_eq!(counters.upsert("y", 1, Some((20, 0))), Viewed::Counted(None));
    counters.replace("x", 3);
    assert_eq!(counters.view("x", 1), total(4), "it is in the full generation");
    counters.now += DAY_US;
    counters.replace("y", 6);
    assert_eq!(counters.import([1, 2, 2], "x", 8), Taken::Now);
    assert_eq!((counters.view("x", 1), counters.view("y", 1)), (total(9), total(7)));
    assert_eq!(counters.generations(), [1, 1]);
}

#[test]
fn views_that_the_quota_of_queued_bytes_refuses_count_nothing() {
    let mut counters = Counters::new();
    counters.upsert("x", 1, Some((10, 0)));
    // The queue holds the view above, and one of the two events.
    let quota = Quota { queued_bytes: 2 * (11 + 4), ..Quota::NONE };
    let copied = counters.copy_with([Some(("x", 3)), Some(("x", 5))], quota);
    assert!(
        matches!(copied, Enqueued::Ok(queued, _) if (queued.dead, queued.posted) == (1, 3 + 2)),
        "{copied:?}"
    );
    assert_eq!(counters.unflushed(), [("vx".to_owned(), 4)].into());
    assert_eq!(counters.view("x", 0), total(14));
}

#[test]
fn views_from_the_bus_raise_the_cached_total_and_count_once() {
    let mut counters = Counters::new();
    let views = [Some(("x", 4)), Some(("y", 1))];
    counters.upsert("x", 1, Some((10, 0)));
    let copied = counters.copy(views);
    assert!(
        matches!(copied, Enqueued::Ok(queued, _) if (queued.appended, queued.posted) == (3, 4 + 1 + 2)),
        "{copied:?}"
    );
    assert!(matches!(counters.copy(views), Enqueued::Duplicate(_)));
    assert_eq!(counters.unflushed(), [("vx".to_owned(), 5), ("vy".to_owned(), 1)].into());
    assert_eq!(counters.view("x", 1), total(16));
    assert!(matches!(counters.view("y", 1), Viewed::Ask(_)), "it is counted, not cached");
    assert_eq!(counters.upsert("y", 1, Some((6, 1))), total(8));
    assert_eq!(counters.shard.events("c"), ["one"]);
    counters.bot = bot("c");
    assert_eq!(counters.unflushed(), [("vz".to_owned(), 2)].into());
}

#[test]
fn views_from_the_bus_move_no_total_to_a_full_generation() {
    let mut counters = Counters::new();
    counters.cached_ads = 1;
    counters.upsert("x", 1, Some((10, 0)));
    counters.now += DAY_US;
    counters.upsert("y", 1, Some((20, 0)));
    assert_eq!(counters.generations(), [1, 1]);
    counters.copy([None, Some(("x", 4))]);
    assert_eq!(counters.generations(), [1, 1]);
    assert_eq!(counters.view("x", 1), total(16));
}
