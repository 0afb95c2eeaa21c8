//! Quotas of a bot that counts views: refused calls change nothing.

use fairlane::quotas::{Quota, QuotaExceeded};
use fairlane::redis::scripts::{Call, Limits, exceeded};

use super::*;

/// What Redis needs for an idempotency key besides its name.
const KEY_BYTES: usize = 128;
/// After a pause of more than this, an import counts again.
const PAUSE_US: i64 = 3_600_000_000;
const WEEK_MS: u64 = 7 * 24 * HOUR_MS;

type Attempt<T> = Result<T, QuotaExceeded>;

impl Counters {
    fn attempt<C: Call>(&mut self, call: &C) -> Attempt<C::Reply> {
        self.now += 10;
        let command = self.shard.harness.command(call);
        let (reply, ..) = self.shard.harness.run(self.now, command, &redis::pipe()).unwrap();
        exceeded(&reply).map_or_else(|| Ok(C::reply(reply).unwrap()), Err)
    }

    /// A view of a cached ad, and one of an ad that is not cached.
    fn try_views(&mut self, quota: Quota, keys: Option<[&'static str; 2]>) -> [Attempt<Viewed>; 2] {
        let (shard, bot) = (&self.shard.keys.clone(), &self.bot.clone());
        let limits = Limits { quota, ..LIMITS };
        let views = |ad, key: Option<&'static str>| {
            let counting = Counting { keys: shard, limits, cached_ads: ADS, bot, ad };
            let idempotency = key.map(|key| (key, HOUR_MS));
            Views { counting, n: 1, event: b"view", idempotency }
        };
        let (cached, other) = (ad("x"), ad("y"));
        let [first, second] = keys.map_or([None; 2], |keys| keys.map(Some));
        let upsert = Upsert { views: views(&other, second), acked: "", stored: None };
        let cached = self.attempt(&IncrementIfExists(views(&cached, first)));
        [cached, self.attempt(&upsert)]
    }

    fn try_replace(&mut self, quota: Quota) -> Attempt<Sequence> {
        let (keys, bot, ad) = (&self.shard.keys.clone(), &self.bot.clone(), &ad("x"));
        let limits = Limits { quota, ..LIMITS };
        let counting = Counting { keys, limits, cached_ads: ADS, bot, ad };
        self.attempt(&Replace { counting, total: 1, event: b"next" })
    }

    fn try_import(&mut self, quota: Quota, key: &str, line: u64) -> Attempt<Taken> {
        let (keys, bot, ad) = (&self.shard.keys.clone(), &self.bot.clone(), &ad("x"));
        let limits = Limits { quota, ..LIMITS };
        let counting = Counting { keys, limits, cached_ads: ADS, bot, ad };
        let (event, before) = (b"next", line - 1);
        let line =
            Import { counting, total: 1, event, key, before, line, upto: line, keep_ms: WEEK_MS };
        self.attempt(&line)
    }

    /// A shard with the cached ad `x`.
    fn with_cached() -> Self {
        let mut counters = Self::new();
        assert_eq!(counters.upsert("x", 1, Some((10, 0))), total(11));
        counters
    }

    fn ttl_ms(&mut self, key: &str) -> i64 {
        self.shard.harness.plain().pttl(key).unwrap()
    }
}

#[test]
fn views_and_replacements_above_the_quota_of_queued_bytes_change_nothing() {
    let mut counters = Counters::with_cached();
    let one = 11 + 4;
    let quota = Quota { queued_bytes: one, ..Quota::NONE };
    let full = QuotaExceeded { name: "queued_bytes", held: one, limit: one };
    let keys = Some(["k1", "k2"]);
    assert_eq!(counters.try_views(quota, keys), [Err(full), Err(full)]);
    assert_eq!(counters.try_replace(quota), Err(full));
    assert_eq!(counters.try_import(quota, "i", 1), Err(full));
    assert_eq!(counters.unflushed(), [("vx".to_owned(), 1)].into());
    assert_eq!(counters.sequences().len(), 1);
    let quota = Quota { queued_bytes: 5 * one, ..Quota::NONE };
    // Nothing of the refused calls is known.
    assert_eq!(counters.try_views(quota, keys), [Ok(total(12)), Ok(Viewed::Counted(None))]);
    assert!(counters.try_replace(quota).is_ok());
    assert_eq!(counters.try_import(quota, "i", 1), Ok(Taken::Now));
    let full = QuotaExceeded { name: "queued_bytes", held: 5 * one, limit: 5 * one };
    assert_eq!(counters.try_views(quota, None), [Err(full), Err(full)]);
}

#[test]
fn keys_of_views_are_kept_for_their_time_and_count_towards_a_quota() {
    let mut counters = Counters::with_cached();
    let name = counters.shard.keys.idempotency("k1");
    let one = (KEY_BYTES + name.len()) as u64;
    let quota = Quota { key_bytes: 2 * one, ..Quota::NONE };
    let counted = [Ok(total(12)), Ok(Viewed::Counted(None))];
    assert_eq!(counters.try_views(quota, Some(["k1", "k2"])), counted);
    for key in ["k1", "k2"] {
        let ttl = counters.ttl_ms(&counters.shard.keys.idempotency(key));
        assert!((1..=HOUR_MS.cast_signed()).contains(&ttl), "{key}: {ttl}");
    }
    let before = (counters.unflushed(), counters.sequences());
    let full = QuotaExceeded { name: "key_bytes", held: 2 * one - 1, limit: 2 * one };
    let refused = counters.try_views(quota, Some(["k3", "k4"]));
    assert_eq!(refused, [Err(full), Err(full)], "the meter has run for 20 µs");
    assert_eq!(counters.try_views(quota, Some(["k1", "k2"])), counted, "known keys are free");
    assert_eq!((counters.unflushed(), counters.sequences()), before);
    assert!(counters.try_views(quota, None).iter().all(Result::is_ok));
    // After half of the hour, half of the quota is free again.
    counters.now += HOUR_MS.cast_signed() * 500;
    let [cached, other] = counters.try_views(quota, Some(["k3", "k4"]));
    assert!(cached.is_ok());
    assert_eq!(other.unwrap_err().name, "key_bytes");
    // Without a quota, no meter is needed.
    let meter = counters.shard.keys.keys_meter(&counters.bot);
    let () = counters.shard.harness.plain().del(&meter).unwrap();
    assert!(counters.try_views(Quota::NONE, Some(["k5", "k6"])).iter().all(Result::is_ok));
    assert_eq!(counters.ttl_ms(&meter), -2);
}

#[test]
fn an_import_counts_when_it_begins_and_after_a_pause() {
    let mut counters = Counters::with_cached();
    let name = counters.shard.keys.idempotency("i");
    let one = (KEY_BYTES + name.len()) as u64;
    let quota = Quota { key_bytes: 2 * one, ..Quota::NONE };
    let is_kept = |counters: &mut Counters| {
        let ttl = counters.ttl_ms(&name);
        (WEEK_MS.cast_signed() - 60_000..=WEEK_MS.cast_signed()).contains(&ttl)
    };
    for line in 1..=4 {
        assert_eq!(counters.try_import(quota, "i", line), Ok(Taken::Now), "{line}");
        assert!(is_kept(&mut counters));
        let short = WEEK_MS.cast_signed() - PAUSE_US / 1_000 + 60_000;
        let () = counters.shard.harness.plain().pexpire(&name, short).unwrap();
    }
    let paused = WEEK_MS.cast_signed() - PAUSE_US / 1_000 - 60_000;
    let () = counters.shard.harness.plain().pexpire(&name, paused).unwrap();
    assert_eq!(counters.try_import(quota, "i", 5), Ok(Taken::Now), "a pause is counted");
    let sequences = counters.sequences();
    let () = counters.shard.harness.plain().pexpire(&name, paused).unwrap();
    let refused = counters.try_import(quota, "i", 6).unwrap_err();
    assert_eq!((refused.name, refused.limit), ("key_bytes", 2 * one));
    assert_eq!(counters.try_import(quota, "j", 1).unwrap_err().name, "key_bytes");
    assert_eq!(counters.try_import(quota, "i", 5), Ok(Taken::Before), "a known line is free");
    assert_eq!(counters.sequences(), sequences);
    assert_eq!(counters.ttl_ms(&counters.shard.keys.idempotency("j")), -2);
    assert!(!is_kept(&mut counters), "nothing was prolonged");
    assert_eq!(counters.try_import(Quota::NONE, "i", 6), Ok(Taken::Now));
    let meter = counters.shard.keys.imports_meter(&counters.bot);
    let ttl = counters.ttl_ms(&meter);
    assert!((1..=WEEK_MS.cast_signed()).contains(&ttl), "{ttl}");
}
