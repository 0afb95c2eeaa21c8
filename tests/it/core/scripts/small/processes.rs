//! States of processes, locks, the audit trail and the check of scripts.

use std::collections::BTreeMap;

use super::{NOW, NOW_MS, Scripts, fields};

/// How long a process may be silent.
const TTL_MS: u64 = 1_000;

/// The states of processes: one that was silent for as long as it may, and one for 1 ms longer.
fn silent() -> [(&'static str, String); 2] {
    [
        ("edge", format!("{} edge  state", NOW_MS - TTL_MS)),
        ("late", format!("{} late", NOW_MS - TTL_MS - 1)),
    ]
}

/// Lets a process say something. Returns all states afterwards.
fn beat(scripts: &mut Scripts, now_us: i64, says: &str) -> BTreeMap<String, String> {
    let reply: i64 = scripts.run_at(now_us, "beat", &["processes"], &["own", says, "1000"]);
    assert_eq!(reply, 1);
    scripts.fields("processes")
}

#[test]
fn a_process_is_kept_until_it_was_silent_for_longer_than_the_ttl() {
    let mut scripts = Scripts::new();
    for (id, state) in silent() {
        scripts.ask::<()>(&["HSET", "processes", id, &state]);
    }
    let [(_, edge), _] = silent();
    let both = |says: &str| fields(&[("edge", &edge), ("own", &format!("{NOW_MS} {says}"))]);
    assert_eq!(beat(&mut scripts, NOW, "it  runs"), both("it  runs"), "one is removed");
    assert_eq!(beat(&mut scripts, NOW, "still"), both("still"), "none is removed");
    scripts.ask::<()>(&["HSET", "processes", "a", "up", "b", "12up", "c", ""]);
    assert_eq!(beat(&mut scripts, NOW, "still"), both("still"), "what is no state is removed");
    assert_eq!(beat(&mut scripts, NOW, ""), fields(&[("edge", &edge)]), "it says goodbye");
    assert_eq!(beat(&mut scripts, NOW + 1_000, ""), fields(&[]), "1 ms later");
}

#[test]
fn only_processes_that_were_heard_of_within_the_ttl_are_present() {
    let mut scripts = Scripts::new();
    let present = |scripts: &mut Scripts, now_us: i64, ttl_ms: &str| {
        let mut states: Vec<String> = scripts.run_at(now_us, "present", &["processes"], &[ttl_ms]);
        states.sort();
        states
    };
    assert_eq!(present(&mut scripts, NOW, "1000"), [""; 0], "there is none");
    let own = ("own", format!("{NOW_MS} its state"));
    let odd = [("odd", "up".to_owned()), ("none", "12up".to_owned())];
    for (id, state) in silent().into_iter().chain([own]).chain(odd) {
        scripts.ask::<()>(&["HSET", "processes", id, &state]);
    }
    assert_eq!(present(&mut scripts, NOW, "1000"), ["edge  state", "its state"]);
    assert_eq!(present(&mut scripts, NOW, "1001"), ["edge  state", "its state", "late"]);
    assert_eq!(present(&mut scripts, NOW, "999"), ["its state"]);
    assert_eq!(present(&mut scripts, NOW + 1_000, "1000"), ["its state"], "1 ms later");
}

#[test]
fn a_lock_has_one_holder_who_renews_and_releases_it() {
    let mut scripts = Scripts::new();
    // Token, ttl, the reply, and who holds the lock then.
    let calls = [
        ("a", 60_000_i64, 1, Some("a")),
        ("a", 50_000, 1, Some("a")),
        ("b", 60_000, 0, Some("a")),
        ("b", 0, 0, Some("a")),
        ("a", 0, 1, None),
        ("a", 0, 1, None),
        ("b", 60_000, 1, Some("b")),
    ];
    for (token, ttl_ms, expected, holder) in calls {
        let ttl = ttl_ms.to_string();
        let reply: i64 = scripts.run("hold", &["lock"], &[token, &ttl]);
        let held: Option<String> = scripts.ask(&["GET", "lock"]);
        assert_eq!((reply, held.as_deref()), (expected, holder), "{token} {ttl_ms}");
        if holder == Some(token) {
            scripts.check_lifetime("lock", ttl_ms);
        }
    }
    // Time stands still in a transaction.
    let mut shortest = redis::pipe();
    shortest.atomic().add_command(scripts.harness.raw("hold", &["short"], &["a", "1"]));
    shortest.cmd("EXISTS").arg("short");
    let replies: (i64, i64) = shortest.query(scripts.harness.plain()).unwrap();
    assert_eq!(replies, (1, 1), "a lock of 1 ms");
}

#[test]
fn the_audit_trail_keeps_the_last_actions() {
    let mut scripts = Scripts::new();
    for (action, kept) in [("1", &["1"][..]), ("2", &["1", "2"]), ("3", &["2", "3"])] {
        let reply: i64 = scripts.run("act", &["audit"], &[action, "2"]);
        assert_eq!(reply, 1);
        let entries = scripts.entries("audit");
        let actions: Vec<&[String]> = entries.iter().map(|(_, values)| values.as_slice()).collect();
        let expected: Vec<[&str; 2]> = kept.iter().map(|action| ["e", *action]).collect();
        assert_eq!(actions, expected);
    }
}

#[test]
fn a_check_returns_what_it_wrote_for_a_short_time() {
    let mut scripts = Scripts::new();
    let reply: Option<String> = scripts.run("check", &["key"], &["some text"]);
    let stored: Option<String> = scripts.ask(&["GET", "key"]);
    assert_eq!([reply.as_deref(), stored.as_deref()], [Some("some text"); 2]);
    scripts.check_lifetime("key", 10_000);
}
