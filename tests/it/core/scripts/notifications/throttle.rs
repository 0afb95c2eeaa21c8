//! The thresholds and caps of users.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::notifications::record::{Begun, Cap, Caps, Ending, NewNotification};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use redis::Commands;

use super::super::bot;
use super::held::ENDED;
use super::{DAY, HALF_HOUR, Notes, SECOND, counted, new};

#[test]
fn a_user_gets_one_at_a_time_and_the_others_are_dropped_once_it_is_sent() {
    let mut notes = Notes::new();
    for _ in 0..50 {
        notes.schedule(&new("b", "u", 0));
    }
    // The threshold holds back neither another user nor notifications without a user.
    notes.schedule(&new("b", "v", 0));
    notes.schedule(&new("b", "", 0));
    notes.schedule(&new("b", "", 0));
    let begun = notes.step("b");
    assert_eq!(begun.len(), 4);
    assert_eq!(notes.step("b"), [], "the user is taken");
    notes.pass(1);
    assert_eq!(notes.step("b"), [], "and still is");
    for begun in &begun {
        assert_eq!(notes.finish(begun, Ending::Sent), Some("sent".into()));
    }
    notes.pass(1);
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.armed(), 0);
    let expected = counted(&[("received", 53), ("sent", 4), ("throttled", 49)]);
    assert_eq!(notes.stats(), expected);
    notes.schedule(&new("b", "u", 1_795_000));
    notes.pass(1_799);
    assert_eq!(notes.step("b").len(), 1, "half an hour later");
}

#[test]
fn what_is_known_of_a_user_stays_for_the_longest_window_and_of_no_user_nothing_does() {
    let mut notes = Notes::new();
    notes.throttle.caps.all = vec![Cap { n: 1, window: DAY }];
    for uid in ["u", ""] {
        notes.schedule(&new("b", uid, 0));
        let begun = notes.step("b").remove(0);
        notes.finish(&begun, Ending::Sent);
    }
    let lives = ["u", ""].map(|uid| {
        let user = notes.shard.keys.user(&bot("b"), uid);
        notes.shard.harness.plain().pttl::<_, i64>(user).unwrap()
    });
    assert!(lives[0] > 23 * 3_600_000 && lives[1] == -2, "{lives:?}");
}

#[test]
fn a_failed_send_frees_its_user_for_another_one() {
    let mut notes = Notes::new();
    let (first, second) = (notes.schedule(&new("b", "u", 0)), notes.schedule(&new("b", "u", 0)));
    let begun = notes.step("b");
    let (begun, other) = (&begun[0], if begun[0].id == first { second } else { first });
    let retry = Ending::Retry(Duration::from_secs(5), "500".into());
    assert_eq!(notes.finish(begun, retry), Some("retry".into()));
    notes.pass(1);
    let next = notes.step("b");
    assert_eq!(next.iter().map(|begun| begun.id).collect::<Vec<_>>(), [other]);
    assert_eq!(notes.finish(&next[0], Ending::Sent), Some("sent".into()));
    notes.pass(5);
    assert_eq!(notes.step("b"), [], "the first one comes too soon now");
    assert_eq!(notes.state(begun.id), "throttled");
}

#[test]
fn a_type_may_have_a_threshold_of_its_own_and_throttled_ones_may_be_deferred() {
    let mut notes = Notes::new();
    notes.throttle.by_kind = vec![("urgent".to_owned(), Duration::ZERO)];
    notes.throttle.defers = true;
    notes.schedule(&new("b", "u", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    let later = notes.schedule(&new("b", "u", 0));
    notes.schedule(&NewNotification { kind: "urgent".to_owned(), ..new("b", "u", 0) });
    let urgent = notes.step("b");
    assert_eq!(urgent.iter().map(|begun| &*begun.kind).collect::<Vec<_>>(), ["urgent"]);
    notes.finish(&urgent[0], Ending::Sent);
    assert_eq!(notes.state(later), "scheduled");
    notes.pass(1_799);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    assert_eq!(notes.step("b").remove(0).id, later);
}

fn cap(text: &str) -> Cap {
    text.parse().unwrap()
}

/// A shard where only caps hold a user back.
fn capped(all: &[&str], by_kind: &[(&str, &[&str])]) -> Notes {
    let mut notes = Notes::new();
    let caps = |texts: &[&str]| texts.iter().map(|text| cap(text)).collect();
    let by_kind = by_kind.iter().map(|(kind, texts)| ((*kind).to_owned(), caps(texts)));
    notes.throttle.threshold = Duration::ZERO;
    notes.throttle.caps = Caps { all: caps(all), by_bot: Vec::new(), by_kind: by_kind.collect() };
    notes
}

fn of_kind(kind: &str, uid: &str) -> NewNotification {
    NewNotification { kind: kind.to_owned(), ..new("b", uid, 0) }
}

#[test]
fn a_cap_drops_further_notifications_until_the_oldest_leaves_the_window() {
    let mut notes = capped(&["2/100s"], &[]);
    for _ in 0..2 {
        notes.schedule(&new("b", "u", 0));
        let begun = notes.step("b").remove(0);
        notes.finish(&begun, Ending::Sent);
        notes.pass(30);
    }
    let dropped = notes.schedule(&new("b", "u", 0));
    // The cap holds back neither another user nor notifications without a user.
    notes.schedule(&new("b", "v", 0));
    notes.schedule(&new("b", "", 0));
    assert_eq!(notes.step("b").len(), 2);
    let key = notes.shard.keys.notification(dropped);
    let reason: String = notes.shard.harness.plain().hget(key, "reason").unwrap();
    assert_eq!(
        (notes.state(dropped), &*reason),
        ("throttled".to_owned(), "the user got 2 within 100 s")
    );
    assert_eq!(notes.stats()["none|throttled"], 1);
    // 60 s have passed since the first send.
    notes.pass(39);
    let early = notes.schedule(&new("b", "u", 0));
    notes.step("b");
    assert_eq!(notes.state(early), "throttled");
    notes.pass(1);
    notes.schedule(&new("b", "u", 0));
    assert_eq!(notes.step("b").len(), 1, "a hundred seconds after it");
}

#[test]
fn a_cap_defers_to_when_there_is_room_and_counts_a_retried_one_once() {
    let mut notes = capped(&["2/100s"], &[]);
    notes.throttle.defers = true;
    let first = notes.schedule(&new("b", "u", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Retry(Duration::from_secs(5), "500".into()));
    notes.pass(6);
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.id, begun.attempts), (first, 2));
    notes.finish(&begun, Ending::Sent);
    notes.schedule(&new("b", "u", 0));
    let second = notes.step("b").remove(0);
    notes.pass(10);
    notes.finish(&second, Ending::Sent);
    let third = notes.schedule(&new("b", "u", 0));
    assert_eq!(notes.step("b"), [], "two were sent, one of them at the second attempt");
    assert_eq!(notes.state(third), "scheduled");
    notes.pass(89);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.id, third);
    assert!((100_000..101_000).contains(&(begun.ready_ms - begun.due_ms + 10_000)), "{begun:?}");
    // A notification that expires before it may be sent is throttled.
    notes.finish(&begun, Ending::Sent);
    let short = NewNotification { expires_in: Duration::from_secs(5), ..new("b", "u", 0) };
    let short = notes.schedule(&short);
    notes.step("b");
    assert_eq!(notes.state(short), "throttled");
}

#[test]
fn a_type_is_counted_by_itself_and_with_the_others_unless_it_has_no_caps() {
    let mut notes = capped(&["3/1h"], &[("promo", &["1/1h"]), ("receipt", &[])]);
    let send = |notes: &mut Notes, kind: &str| {
        let id = notes.schedule(&of_kind(kind, "u"));
        for begun in notes.step("b") {
            notes.finish(&begun, Ending::Sent);
        }
        notes.pass(1);
        notes.state(id)
    };
    let mut run =
        |kinds: &[&str]| kinds.iter().map(|kind| send(&mut notes, kind)).collect::<Vec<_>>();
    assert_eq!(run(&["receipt", "receipt", "receipt", "receipt"]), ["sent"; 4]);
    assert_eq!(run(&["promo", "promo", "none"]), ["sent", "throttled", "sent"]);
    assert_eq!(run(&["other", "none", "receipt"]), ["sent", "throttled", "sent"]);
    let user = notes.shard.keys.user(&bot("b"), "u");
    let fields: BTreeMap<String, Vec<u8>> = notes.shard.harness.plain().hgetall(&user).unwrap();
    let logs = fields.iter().filter(|(name, _)| name.starts_with("log"));
    let logs: Vec<(&str, usize)> = logs.map(|(name, log)| (&**name, log.len())).collect();
    assert_eq!(logs, [("log", 18), ("log|promo", 6)], "no more than the caps ask");
    let left: i64 = notes.shard.harness.plain().ttl(&user).unwrap();
    assert!((3_000..=3_600).contains(&left), "{left}");
}

#[test]
fn a_user_is_not_free_before_it_can_be_told_how_the_last_one_ended() {
    let mut notes = Notes::new();
    notes.schedule(&new("b", "u", 0));
    let sent = notes.step("b").remove(0);
    let second = notes.schedule(&new("b", "u", 1_000));
    // Redis is unavailable for ten minutes.
    notes.pass(600);
    for _ in 0..3 {
        assert_eq!(notes.step("b"), [], "the first may have been sent");
        notes.pass(1);
    }
    assert_eq!(notes.finish(&sent, Ending::Sent), Some("sent".into()));
    notes.pass(30);
    notes.step("b");
    assert_eq!(notes.state(second), "throttled");

    // The process of this send was killed.
    let lost = notes.schedule(&new("b", "v", 0));
    assert_eq!(notes.step("b").remove(0).id, lost);
    notes.schedule(&new("b", "v", 0));
    notes.pass(40);
    let mut begun = Vec::new();
    for _ in 0..8 {
        begun.extend(notes.step("b"));
        notes.pass(1);
    }
    assert_eq!(begun.len(), 1, "one of the two, and not for ever none: {begun:?}");
}

#[test]
fn after_the_clock_was_set_back_the_limits_of_a_user_hold_no_longer_than_usual() {
    let mut notes = capped(&["1/100s"], &[("promo", &["1/100s"])]);
    notes.throttle.threshold = HALF_HOUR;
    let promo = of_kind("promo", "u");
    notes.schedule(&promo);
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    notes.now -= 3_600 * SECOND;
    let second = notes.schedule(&promo);
    let begun = notes.step("b");
    assert_eq!(begun.iter().map(|begun| begun.id).collect::<Vec<_>>(), [second]);
    notes.finish(&begun[0], Ending::Sent);
    let third = notes.schedule(&promo);
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.state(third), "throttled", "they hold again");

    // The process of this send was killed.
    notes.schedule(&new("b", "v", 0));
    assert_eq!(notes.step("b").len(), 1);
    notes.now -= 3_600 * SECOND;
    let next = notes.schedule(&new("b", "v", 0));
    let mut begun = Vec::new();
    for _ in 0..60 {
        begun.extend(notes.step("b").iter().map(|begun| begun.id));
        notes.pass(1);
    }
    assert_eq!(begun, [next]);
}

#[test]
fn a_cap_applies_to_online_users_and_a_killed_process_does_not_count() {
    let mut notes = capped(&["1/1h"], &[]);
    let waits = || NewNotification { waits: true, ..new("b", "u", 0) };
    let (first, second) = (notes.schedule(&waits()), notes.schedule(&waits()));
    assert!(notes.online("u"));
    let lost = notes.step("b").remove(0);
    assert_eq!(lost.id, first);
    notes.pass(21);
    assert_eq!(notes.step("b"), []);
    notes.pass(6);
    let again = notes.step("b").remove(0);
    assert_eq!(again.id, first, "what was lost did not count");
    notes.finish(&again, Ending::Sent);
    assert!(notes.online("u"));
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.state(second), "throttled");
}

/// The model of the caps: when each user got which type.
#[derive(Default)]
struct Got(Vec<(i64, String, String)>);

impl Got {
    /// Whether the caps allow another send.
    fn has_room(&self, caps: &Caps, now: i64, uid: &str, kind: &str) -> bool {
        let within = |window: Duration, of: Option<&str>| {
            let after = now - i64::try_from(window.as_micros()).unwrap();
            let counted = |(at, user, sent): &&(i64, String, String)| {
                let exempt = caps.of_kind(sent) == Some(&[]);
                *at > after && user == uid && !exempt && of.is_none_or(|of| of == sent)
            };
            self.0.iter().filter(counted).count()
        };
        let room = |cap: &Cap, of| within(cap.window, of) < cap.n as usize;
        match caps.of_kind(kind) {
            Some([]) => true,
            own => {
                caps.all.iter().all(|cap| room(cap, None))
                    && own.unwrap_or_default().iter().all(|cap| room(cap, Some(kind)))
            }
        }
    }
}

/// Schedules random notifications of three users and four types, whose sends end in every way or
/// never. A model counts the sends: each one that starts has room under its caps, and each
/// throttled one has none.
#[test]
fn caps_agree_with_a_model_that_counts_every_window() {
    let mut all = (0, 0);
    for seed in 0..6 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut notes = capped(
            &["4/60s", "9/300s"],
            &[("promo", &["2/90s"]), ("receipt", &[]), ("digest", &["1/40s", "3/200s"])],
        );
        notes.throttle.defers = seed % 2 == 1;
        let caps = notes.throttle.caps.clone();
        let (mut got, mut open, mut known) = (Got::default(), Vec::new(), Vec::new());
        let (mut sent, mut throttled) = (0, 0);
        // Ends a send and tells the model.
        let mut end = |notes: &mut Notes, got: &mut Got, begun: &Begun, ending| {
            if notes.finish(begun, ending) == Some("sent".into()) {
                let room = got.has_room(&caps, notes.now, &begun.uid, &begun.kind);
                assert!(room, "seed {seed}: one too many: {begun:?}");
                got.0.push((notes.now, begun.uid.clone(), begun.kind.clone()));
                sent += 1;
            }
        };
        for _ in 0..700 {
            let mut looks = 0;
            match random.random_range(0..20) {
                0..8 => {
                    let uid = ["u", "v", "w"][random.random_range(0..3)];
                    let kind = ["none", "promo", "receipt", "digest"][random.random_range(0..4)];
                    known.push((notes.schedule(&of_kind(kind, uid)), uid, kind));
                }
                8..11 => {
                    let until = notes.now + random.random_range(1..9_000_000);
                    // A send ends within 20 s.
                    open.retain(|(at, begun): &(i64, Begun)| {
                        let goes_on = at + 20 * SECOND > until;
                        if !goes_on {
                            end(&mut notes, &mut got, begun, Ending::Sent);
                        }
                        goes_on
                    });
                    notes.now = until;
                }
                11..16 => looks = 1,
                16..18 if !open.is_empty() => {
                    let (_, begun) = open.swap_remove(random.random_range(0..open.len()));
                    let ending = match random.random_range(0..6) {
                        0..4 => Ending::Sent,
                        4 => Ending::Retry(Duration::from_secs(2), "500".into()),
                        _ => Ending::Dead("410".into()),
                    };
                    end(&mut notes, &mut got, &begun, ending);
                }
                // The process of one send is killed.
                18 => drop(open.pop()),
                // Redis is unavailable. When it is back, schedulers come before the senders.
                19 if random.random_bool(0.3) => {
                    notes.now += random.random_range(1..120_000_000);
                    looks = 2;
                }
                _ => {}
            }
            for look in 0..looks {
                for begun in notes.step("b") {
                    let room = got.has_room(&caps, notes.now, &begun.uid, &begun.kind);
                    assert!(room, "seed {seed}: one too many begins: {begun:?}");
                    open.push((notes.now, begun));
                }
                if look == 1 {
                    for (_, begun) in open.drain(..) {
                        end(&mut notes, &mut got, &begun, Ending::Sent);
                    }
                }
                let now = notes.now;
                known.retain(|(id, uid, kind)| {
                    let state = notes.state(*id);
                    let is_throttled = state == "throttled";
                    let room = is_throttled && look == 0 && got.has_room(&caps, now, uid, kind);
                    assert!(!room, "seed {seed}: held back for nothing: {uid} {kind}");
                    throttled += usize::from(is_throttled);
                    // The others have not ended, and may be throttled later.
                    !ENDED.contains(&&*state)
                });
            }
        }
        all = (all.0 + sent, all.1 + throttled);
    }
    // Otherwise the test looked almost only at users below their caps.
    assert!(all.0 > 200 && all.1 > 20, "{} sent, {} throttled", all.0, all.1);
}
