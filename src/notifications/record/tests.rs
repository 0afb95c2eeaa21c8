//! Tests of ids, caps, bounds and times.

use super::*;
use crate::expression::Glob;
use crate::id::ShardCount;
use uuid::Uuid;

#[test]
fn an_id_reads_back_and_has_one_name_only() {
    let shards = ShardCount::new(16).unwrap();
    for shard in shards.shards() {
        let id = NotificationId::new(shard);
        let text = id.to_string();
        assert_eq!(text.parse(), Ok(id));
        assert_eq!(id.shard(shards), Some(shard));
        for other in [text.to_uppercase(), format!("0{text}"), format!("+{text}")] {
            assert!(other == text || other.parse::<NotificationId>().is_err(), "{other}");
        }
    }
    let beyond = format!("16.{}", Uuid::now_v7().simple()).parse::<NotificationId>().unwrap();
    assert_eq!(beyond.shard(shards), None);
    for text in ["", "3", "3.", ".x", "3.x", "-1.0192f1b0c1d27c3e8f00112233445566"] {
        assert!(text.parse::<NotificationId>().is_err(), "{text}");
    }
}

#[test]
fn a_value_beyond_a_bound_is_refused_by_the_name_callers_know() {
    let new = NewNotification {
        bot: BotId::parse("b").unwrap(),
        uid: "u".repeat(UID_MAX_BYTES),
        kind: "k".repeat(KIND_MAX_BYTES),
        when: When::After(DELAY_MAX),
        expires_in: DELAY_MAX,
        waits: true,
        url: "u".repeat(URL_MAX_BYTES),
        method: "GET".to_owned(),
        body: "\n".repeat(BODY_MAX_BYTES),
        recheck: String::new(),
        headers: "h".repeat(KIND_MAX_BYTES),
        trace: None,
        key: Some(("k".repeat(KEY_MAX_BYTES), Duplicates::Ignore)),
    };
    let now = Duration::from_secs(1_800_000_000);
    assert_eq!(new.check(now), Ok(()));
    let key = |text: String| Some((text, Duplicates::Ignore));
    let more = |text: &str| format!("{text}x");
    let late = DELAY_MAX + Duration::from_millis(1);
    for (parameter, wrong) in [
        ("uid", NewNotification { uid: more(&new.uid), ..new.clone() }),
        ("uid", NewNotification { uid: String::new(), ..new.clone() }),
        ("uid", NewNotification { uid: "a\nb".to_owned(), ..new.clone() }),
        ("type", NewNotification { kind: more(&new.kind), ..new.clone() }),
        ("type", NewNotification { kind: String::new(), ..new.clone() }),
        ("delay", NewNotification { when: When::After(late), ..new.clone() }),
        ("at", NewNotification { when: When::At(now + late), ..new.clone() }),
        ("expires_in", NewNotification { expires_in: late, ..new.clone() }),
        ("expires_in", NewNotification { expires_in: Duration::ZERO, ..new.clone() }),
        ("url", NewNotification { url: more(&new.url), ..new.clone() }),
        ("url", NewNotification { url: String::new(), ..new.clone() }),
        ("recheck_url", NewNotification { recheck: more(&new.url), ..new.clone() }),
        ("method", NewNotification { method: String::new(), ..new.clone() }),
        ("headers_from", NewNotification { headers: more(&new.headers), ..new.clone() }),
        ("body", NewNotification { body: more(&new.body), ..new.clone() }),
        ("key", NewNotification { key: key("k".repeat(KEY_MAX_BYTES + 1)), ..new.clone() }),
        ("key", NewNotification { key: key(String::new()), ..new.clone() }),
    ] {
        let error = wrong.check(now).unwrap_err();
        assert_eq!(error.parameter, parameter, "{error}");
    }
}

#[test]
fn a_cap_is_a_number_in_a_time() {
    let cap = |n, seconds| Ok(Cap { n, window: Duration::from_secs(seconds) });
    for (text, expected) in [
        ("10/day", cap(10, 86_400)),
        ("3/1h", cap(3, 3_600)),
        (" 100 / 7d ", cap(100, 604_800)),
        ("1/minute", cap(1, 60)),
        ("5/week", cap(5, 604_800)),
        ("2/1h 30m", cap(2, 5_400)),
        ("1000/366d", cap(1_000, 31_622_400)),
        ("0/day", Err(CapError::Number)),
        ("1001/day", Err(CapError::Number)),
        ("99999999999/day", Err(CapError::Number)),
        ("1/999ms", Err(CapError::Window)),
        ("1/367d", Err(CapError::Window)),
        ("10", Err(CapError::Form)),
        ("/day", Err(CapError::Form)),
        ("+1/day", Err(CapError::Form)),
        ("10/", Err(CapError::Form)),
        ("10/fortnight", Err(CapError::Form)),
        ("ten/day", Err(CapError::Form)),
    ] {
        assert_eq!(text.parse(), expected, "{text}");
    }
}

#[test]
fn the_first_pattern_that_matches_a_bot_decides_its_caps() {
    let cap = |text: &str| text.parse::<Cap>().unwrap();
    let glob = |text: &str| Glob::new(text);
    let caps = Caps {
        all: vec![cap("1/day")],
        by_bot: vec![(glob("shop-7"), vec![cap("2/day")]), (glob("shop-*"), Vec::new())],
        by_kind: vec![("promo".to_owned(), vec![cap("3/day")])],
    };
    let of = |bot: &str| caps.of_bot(&BotId::parse(bot).unwrap()).to_vec();
    assert_eq!(of("other"), [cap("1/day")]);
    assert_eq!(of("shop-7"), [cap("2/day")]);
    assert_eq!(of("shop-8"), []);
    assert_eq!(caps.of_kind("promo"), Some(&[cap("3/day")][..]));
    assert_eq!(caps.of_kind("other"), None);
}

#[test]
fn lateness_counts_in_the_step_that_is_not_below_it() {
    for (late_us, step) in [
        (0, 1),
        (1_000, 1),
        (1_001, 2),
        (20_000, 20),
        (20_001, 30),
        (86_400_000_000, 86_400_000),
        (u64::MAX, 86_400_000),
    ] {
        assert_eq!(late_step(Duration::from_micros(late_us)), step, "{late_us} us");
    }
    assert!(LATE_STEPS.is_sorted());
}

#[test]
fn times_are_rounded_up() {
    let parts = |nanos| When::After(Duration::from_nanos(nanos)).parts();
    assert_eq!((parts(0), parts(1), parts(1_000_000)), ((0, 0), (0, 1), (0, 1)));
    assert_eq!(parts(1_000_001), (0, 2));
    assert_eq!(When::At(Duration::ZERO).parts(), (1, 0));
    assert_eq!(When::At(Duration::from_micros(1_500)).parts(), (2, 0));
}
