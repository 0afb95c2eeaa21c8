//! How long the records of ended notifications stay, and the callers' keys.

use std::time::Duration;

use fairlane::notifications::record::Duplicates::{Ignore, Once, Replace};
use fairlane::notifications::record::{Duplicates, Ending, NewNotification, NotificationId};
use fairlane::notifications::scripts::{Amendment, Forget};
use fairlane::quotas::{Quota, QuotaExceeded};
use fairlane::redis::scripts::{DropLetters, Dropping, Redrive};
use redis::Commands;

use super::{Notes, SECOND, SLICE_US, bot, new};

const WEEK: Duration = Duration::from_secs(7 * 86_400);
const TEN_MINUTES: Duration = Duration::from_secs(600);
const HOUR: Duration = Duration::from_secs(3_600);
/// What one record takes of the quota: 1,024 bytes, and the URL.
const RECORD: u64 = 1_024 + 21;

impl Notes {
    /// Ends a notification; returns how long its record stays.
    fn ends(&mut self, new: &NewNotification, ending: Ending) -> Duration {
        self.schedule(new);
        self.pass(1);
        let begun = self.step(new.bot.as_str()).remove(0);
        self.finish(&begun, ending).unwrap();
        self.stays(begun.id)
    }

    fn stays(&mut self, id: NotificationId) -> Duration {
        let key = self.shard.keys.notification(id);
        let ms: i64 = self.shard.harness.plain().pttl(key).unwrap();
        Duration::from_millis(u64::try_from(ms).unwrap_or(0))
    }

    fn try_keyed(
        &mut self,
        key: &str,
        duplicates: Duplicates,
        known: Option<NotificationId>,
    ) -> Result<NotificationId, QuotaExceeded> {
        self.try_schedule(&keyed(key, duplicates), self.quota, known)
    }
}

fn keyed(key: &str, duplicates: Duplicates) -> NewNotification {
    NewNotification { key: Some((key.to_owned(), duplicates)), ..new("b", "", 0) }
}

/// Whether a time is `expected`, apart from the duration of a test.
fn is_near(time: Duration, expected: Duration) -> bool {
    time <= expected && time + Duration::from_secs(60) > expected
}

#[test]
fn results_within_the_quota_stay_for_a_week_further_ones_for_ten_minutes_and_then_a_second() {
    let mut notes = Notes::new();
    notes.quota.ended_bytes = 3 * RECORD;
    for expected in [WEEK, WEEK, WEEK, TEN_MINUTES, TEN_MINUTES, TEN_MINUTES] {
        let stays = notes.ends(&new("b", "", 0), Ending::Sent);
        assert!(is_near(stays, expected), "{stays:?}, not {expected:?}");
    }
    let stays = notes.ends(&new("b", "", 0), Ending::Refused("no".into()));
    assert!(stays <= Duration::from_secs(1), "{stays:?}");
    let other = notes.ends(&new("c", "", 0), Ending::Sent);
    assert!(is_near(other, WEEK), "each bot has its own: {other:?}");
    // A third of the week later there is room for one.
    notes.pass(7 * 86_400 / 3 + 1_200);
    let stays = notes.ends(&new("b", "", 0), Ending::Sent);
    assert!(is_near(stays, WEEK), "{stays:?}");
    let stays = notes.ends(&new("b", "", 0), Ending::Sent);
    assert!(is_near(stays, TEN_MINUTES), "{stays:?}");
}

#[test]
fn each_way_to_end_counts_and_a_dead_one_may_be_redriven_beyond_the_quota() {
    let mut notes = Notes::new();
    notes.quota.ended_bytes = RECORD;
    let cancelled = notes.schedule(&new("b", "u", 0));
    notes.amend(cancelled, "u", Amendment::Cancel);
    assert!(is_near(notes.stays(cancelled), WEEK));
    let expired = NewNotification { expires_in: Duration::from_millis(1), ..new("b", "", 0) };
    let expired = notes.schedule(&expired);
    notes.pass(1);
    assert!(notes.step("b").is_empty());
    assert!(is_near(notes.stays(expired), TEN_MINUTES));
    let dead = || Ending::Dead("410".into());
    notes.quota.ended_bytes = 2 * RECORD;
    let stays = notes.ends(&new("c", "", 0), dead());
    assert!(is_near(stays, WEEK + HOUR), "{stays:?}");
    for _ in 0..4 {
        notes.ends(&new("c", "", 0), Ending::Sent);
    }
    let stays = notes.ends(&new("c", "", 0), dead());
    assert!(is_near(stays, WEEK + HOUR), "{stays:?}");
    for _ in 0..3 {
        notes.ends(&new("c", "", 0), dead());
    }
    let stays = notes.ends(&new("c", "", 0), dead());
    assert!(stays <= Duration::from_secs(1), "twice the quota: {stays:?}");
}

#[test]
fn the_record_of_a_dead_letter_outlives_it_and_a_redriven_one_stays_until_it_is_handled() {
    let mut notes = Notes::new();
    notes.quota.ended_bytes = 2 * RECORD;
    let dead = || Ending::Dead("410".into());
    let stays: Vec<Duration> = (0..9).map(|_| notes.ends(&new("b", "", 0), dead())).collect();
    let kept = stays.iter().filter(|stays| **stays > WEEK).count();
    assert_eq!(kept, 3, "each takes more than a record: {stays:?}");
    assert_eq!(notes.shard.letters().len(), kept, "there is no letter without its notification");
    let (keys, bot) = (&notes.shard.keys.clone(), &bot("b"));
    for id in notes.shard.letters() {
        assert!(notes.call(&Redrive { keys, id, bot, slice_us: SLICE_US, renews: false }));
    }
    let redis = notes.shard.harness.plain();
    let records: Vec<String> = redis.keys(format!("{}n:*", keys.prefix())).unwrap();
    let ttls = records.iter().map(|record| redis.pttl::<_, i64>(record.as_str()).unwrap());
    assert_eq!(ttls.filter(|ttl| *ttl == -1).count(), kept, "the pipeline may be paused");
    notes.pass(30 * 86_400);
    assert_eq!(notes.handle("b").len(), kept);
}

#[test]
fn failures_whose_letters_are_refused_leave_the_room_of_later_letters() {
    let dead = || Ending::Dead("410".into());
    let mut notes = Notes::new();
    notes.ends(&new("b", "", 0), dead());
    let of_one = notes.held()["Db"];
    for quota in
        [Quota { dead_letters: 1, ..Quota::NONE }, Quota { dead_bytes: of_one, ..Quota::NONE }]
    {
        let mut notes = Notes::new();
        notes.quota = Quota { ended_bytes: 8 * RECORD, ..quota };
        let stays: Vec<Duration> = (0..30).map(|_| notes.ends(&new("b", "", 0), dead())).collect();
        assert!(is_near(stays[0], WEEK + HOUR) && is_near(stays[1], WEEK), "{stays:?}");
        assert!(stays[29] <= Duration::from_secs(1), "as other results: {stays:?}");
        let (keys, letters) = (&notes.shard.keys.clone(), notes.shard.letters());
        let redis = notes.shard.harness.plain();
        let records: Vec<String> = redis.keys(format!("{}n:*", keys.prefix())).unwrap();
        let has_body =
            |record: &&String| -> bool { redis.hexists(record.as_str(), "body").unwrap() };
        assert_eq!(records.iter().filter(has_body).count(), 1, "what cannot be redriven has none");
        let letters = Dropping::Ids(&letters);
        assert_eq!(notes.call(&DropLetters { keys, letters, bytes: 1 }).count, 1);
        let stays = notes.ends(&new("b", "", 0), dead());
        assert!(is_near(stays, WEEK + HOUR), "{stays:?}");
        assert_eq!(notes.shard.letters().len(), 1);
    }
}

#[test]
fn a_notification_with_a_key_stays_known_for_an_hour_whatever_its_bot_did_before() {
    let mut notes = Notes::new();
    notes.quota.ended_bytes = RECORD / 2;
    let stays = notes.ends(&keyed("k", Ignore), Ending::Sent);
    assert!(is_near(stays, HOUR), "{stays:?}");
    let stays = notes.ends(&new("b", "", 0), Ending::Sent);
    assert!(stays <= Duration::from_secs(1), "{stays:?}");
}

#[test]
fn the_key_of_an_ended_notification_ends_with_its_record() {
    let mut notes = Notes::new();
    notes.quota.ended_bytes = RECORD / 2;
    let pending = keyed("k", Once);
    let (keys, bot) = (notes.shard.keys.clone(), bot("b"));
    let name = keys.notification_key(&bot, "k");
    let id = notes.schedule(&pending);
    let forget = Forget { keys: &keys, bot: &bot, id, key: "k" };
    assert!(!notes.call(&forget), "it is pending");
    let ttl: i64 = notes.shard.harness.plain().pttl(&name).unwrap();
    assert!(ttl > 86_400_000, "{ttl}");
    notes.pass(1);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.key, "k");
    notes.finish(&begun, Ending::Sent);
    assert!(notes.call(&forget));
    let ttl: u64 = notes.shard.harness.plain().pttl(&name).unwrap();
    assert!(is_near(Duration::from_millis(ttl), HOUR), "{ttl}");
    let () = notes.shard.harness.plain().del(keys.notification(id)).unwrap();
    assert!(notes.call(&forget));
    assert!(!notes.call(&forget), "it is free");
}

#[test]
fn keys_of_notifications_are_bounded_per_hour_and_a_known_key_takes_nothing() {
    let mut notes = Notes::new();
    notes.quota.key_bytes = 4_000;
    let mut accepted = Vec::new();
    let refused = loop {
        match notes.try_keyed(&format!("k{}", accepted.len()), Ignore, None) {
            Ok(id) => accepted.push(id),
            Err(refused) => break refused,
        }
    };
    assert_eq!((accepted.len(), refused.name, refused.limit), (3, "key_bytes", 4_000));
    assert!((3_500..=4_000).contains(&refused.held), "{refused:?}");
    notes.try_keyed("k0", Ignore, Some(accepted[0])).expect("it is answered as before");
    assert_eq!(notes.state(accepted[0]), "scheduled");
    let replacing = notes.try_keyed("k0", Replace, Some(accepted[0])).unwrap();
    assert_eq!(notes.state(accepted[0]), "cancelled");
    notes.schedule(&new("b", "u", 0));
    notes.pass(3_600 / 3);
    notes.try_keyed("k3", Ignore, None).expect("a third of the hour later one fits");
    notes.try_keyed("k4", Ignore, None).unwrap_err();
    notes.try_keyed("k0", Replace, Some(replacing)).expect("a pending one is replaced");
}

#[test]
fn after_the_clock_was_set_back_a_bot_gets_no_quota_again_and_its_records_end_as_usual() {
    let mut notes = Notes::new();
    notes.quota.key_bytes = 4_000;
    let fill = |notes: &mut Notes, name: &str| {
        (0..9).filter(|n| notes.try_keyed(&format!("{name}{n}"), Ignore, None).is_ok()).count()
    };
    assert_eq!(fill(&mut notes, "a"), 3);
    for (seconds, name) in [(1, "b"), (3_600, "c")] {
        notes.now -= seconds * SECOND;
        assert_eq!(fill(&mut notes, name), 0, "{seconds} s back");
    }
    notes.pass(3_600 / 3);
    assert_eq!(fill(&mut notes, "d"), 1, "as many as usual in this time");

    notes.quota.ended_bytes = 2 * RECORD;
    for _ in 0..4 {
        notes.ends(&new("c", "", 0), Ending::Dead("410".into()));
    }
    notes.now -= 15 * 86_400 * SECOND;
    let stays = notes.ends(&new("c", "", 0), Ending::Sent);
    assert!(stays <= Duration::from_secs(1), "{stays:?}");
    notes.pass(11 * 86_400);
    let stays = notes.ends(&new("c", "", 0), Ending::Sent);
    assert!(is_near(stays, WEEK), "{stays:?}");

    notes.quota = Quota { ended_bytes: RECORD / 2, ..Quota::NONE };
    notes.schedule(&NewNotification { bot: bot("d"), ..keyed("k", Ignore) });
    let begun = notes.step("d").remove(0);
    notes.now -= 3_600 * SECOND;
    notes.finish(&begun, Ending::Sent);
    assert!(is_near(notes.stays(begun.id), HOUR), "{:?}", notes.stays(begun.id));
}
