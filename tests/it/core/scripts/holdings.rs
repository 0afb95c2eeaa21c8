//! `audit` and `reconcile` correct what was lost, and the deletion of dead letters.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::id::{BotId, Offset};
use fairlane::redis::scripts::{
    Audit, Audited, DropLetters, Dropped, Dropping, Pause, Reconcile, Reconciled,
};
use redis::Commands;

use super::*;

/// Bytes of a record besides its event.
const HEAD: u64 = 11;
/// More bytes than the letters of any test have.
const MANY: usize = 1 << 20;
/// More than one command of a script reads.
const PAGES: usize = 1_001;

fn held(shard: &mut Shard) -> BTreeMap<String, u64> {
    let key = shard.keys.held().to_owned();
    shard.harness.plain().hgetall(key).unwrap()
}

fn set_held(shard: &mut Shard, fields: &[(&str, u64)]) {
    let key = shard.keys.held().to_owned();
    let () = shard.harness.plain().hset_multiple(key, fields).unwrap();
}

fn audit(shard: &mut Shard, bots: &[&str], entries_max: u64) -> Audited {
    audit_of(shard, bots, (entries_max, u64::MAX))
}

fn audit_of(shard: &mut Shard, bots: &[&str], (entries_max, bytes_max): (u64, u64)) -> Audited {
    let keys = &shard.keys.clone();
    let bots: Vec<BotId> = bots.iter().map(|name| bot(name)).collect();
    shard.call(NOW, &Audit { keys, bots: &bots, entries_max, bytes_max })
}

/// How often this command has run.
fn calls(shard: &mut Shard, command: &str) -> u64 {
    let mut info = redis::cmd("INFO");
    let text: String = info.arg("commandstats").query(shard.harness.plain()).unwrap();
    let start = format!("cmdstat_{command}:calls=");
    let calls = text.lines().find_map(|line| line.strip_prefix(&*start));
    calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
}

fn fields(expected: &[(&str, u64)]) -> BTreeMap<String, u64> {
    expected.iter().map(|(field, value)| ((*field).to_owned(), *value)).collect()
}

/// A dead letter as another version may have left it.
fn bury(shard: &mut Shard, id: u64, of: &str, more: Option<&str>) {
    let mut command = redis::cmd("XADD");
    command.arg(&shard.keys.dlq).arg(format!("{id}-0")).arg(&[("bot", of), ("record", "12345")]);
    if let Some(more) = more {
        command.arg("more").arg(more);
    }
    command.exec(shard.harness.plain()).unwrap();
}

#[test]
fn the_audit_counts_the_bytes_of_queues() {
    let mut shard = Shard::new();
    let many = vec!["12345"; PAGES];
    shard.push(NOW, "a", &many, LIMITS);
    shard.push(NOW, "b", &["1", "2"], LIMITS);
    shard.push(NOW, "c", &["1", "2", "3"], LIMITS);
    let large = "x".repeat(65_536 - 11);
    shard.push(NOW, "d", &[&large], LIMITS);
    shard.push(NOW, "e", &[&large[1..]], LIMITS);
    let right = fields(&[
        ("qa", PAGES as u64 * (HEAD + 5)),
        ("qc", 3 * (HEAD + 1)),
        ("qd", large.len() as u64 + HEAD),
    ]);
    assert_eq!(held(&mut shard), right, "short queues of small events are not counted");
    let all = ["a", "b", "c", "d", "e"];
    let entries = PAGES as u64 + 7;
    assert_eq!(audit(&mut shard, &all, entries), Audited::Set(0));
    set_held(&mut shard, &[("qa", 1)]);
    let key = shard.keys.held().to_owned();
    let () = shard.harness.plain().hdel(key, &["qc", "qd"]).unwrap();
    assert_eq!(audit(&mut shard, &all, entries - 1), Audited::Many);
    assert_eq!(audit(&mut shard, &[], entries), Audited::Set(0), "those of queues are left alone");
    assert_eq!(audit(&mut shard, &all, entries), Audited::Set(3));
    assert_eq!(held(&mut shard), right);
    // A short queue that is counted, because its quota is small, stays so.
    set_held(&mut shard, &[("qb", 7)]);
    assert_eq!(audit(&mut shard, &all, entries), Audited::Set(1));
    assert_eq!(held(&mut shard)["qb"], 2 * (HEAD + 1));
    set_held(&mut shard, &[("qz", 7), ("qy", 7), ("ay", 1)]);
    assert_eq!(audit(&mut shard, &["z", "y"], 0), Audited::Set(1));
    assert!(!held(&mut shard).contains_key("qz"));
    assert_eq!(held(&mut shard)["qy"], 7, "its events are in a lane");
}

#[test]
fn the_audit_lowers_the_number_of_notifications_to_the_entries_there_are() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1"], LIMITS);
    // Of `b`, one entry is delayed and one in a lane.
    let right = [("na", 1), ("Na", 5), ("nb", 2), ("Nb", 9), ("lb", 1), ("ab", 1)];
    set_held(&mut shard, &right);
    assert_eq!(audit(&mut shard, &["a", "b"], 9), Audited::Set(0));
    assert_eq!(held(&mut shard), fields(&right));
    set_held(&mut shard, &[("na", 2), ("nb", 4), ("nc", 1), ("Nc", 9)]);
    assert_eq!(audit(&mut shard, &["a", "b", "c"], 9), Audited::Set(4));
    assert_eq!(held(&mut shard), fields(&right));
}

#[test]
fn the_audit_counts_delayed_events_and_dead_letters() {
    let mut shard = Shard::new();
    let due_ms = NOW / 1_000 + 1_000;
    let mut right = BTreeMap::new();
    for number in 0..PAGES {
        let name = format!("bot{number}");
        let (keys, bot) = (&shard.keys.clone(), &bot(&name));
        let events = &[b"12345".to_vec()];
        shard.call(NOW, &Push { keys, limits: LIMITS, bot, events, due_ms, idempotency: None });
        bury(&mut shard, number as u64 + 1, &name, None);
        right.extend(
            [("l", 1), ("L", 5), ("d", 1), ("D", 5)]
                .map(|(letter, value)| (format!("{letter}{name}"), value)),
        );
    }
    bury(&mut shard, 9_999, "bot0", Some("20"));
    right.extend([("dbot0".to_owned(), 2), ("Dbot0".to_owned(), 30)]);
    // What an event in `later` takes is counted as when it was pushed.
    let pushed = held(&mut shard);
    let of_pushes = |(field, _): &(&String, &u64)| field.starts_with(['l', 'L']);
    assert!(pushed.iter().all(|(field, value)| right[field] == *value), "{pushed:?}");
    assert_eq!(pushed.len(), right.iter().filter(of_pushes).count());
    let entries = 2 * PAGES as u64 + 1;
    // The entries of `held` are read too.
    let read = entries + pushed.len() as u64;
    assert_eq!(audit(&mut shard, &[], read - 1), Audited::Many);
    assert_eq!(audit(&mut shard, &[], read), Audited::Set(2 * PAGES as u64));
    assert_eq!(held(&mut shard), right);
    assert_eq!(audit(&mut shard, &[], entries + right.len() as u64), Audited::Set(0));
    let mut wrong = vec![("qz", 7), ("nz", 7), ("az", 7)];
    wrong.extend([("lz", 7), ("Lz", 7), ("dz", 7), ("Dz", 7), ("lbot7", 2), ("Dbot8", 1)]);
    set_held(&mut shard, &wrong);
    assert_eq!(audit(&mut shard, &[], 9_999), Audited::Set(6));
    right.extend(fields(&wrong[..3]));
    assert_eq!(held(&mut shard), right);
}

#[test]
fn the_audit_changes_nothing_of_what_has_too_many_bytes_and_reads_few_of_them() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["12345"; 100], LIMITS);
    shard.push(NOW, "b", &["1"; 5], LIMITS);
    let (keys, events, due_ms) = (&shard.keys.clone(), &[b"12345".to_vec()], NOW / 1_000 + 1_000);
    let a = &bot("a");
    shard.call(NOW, &Push { keys, limits: LIMITS, bot: a, events, due_ms, idempotency: None });
    for id in 1..=40 {
        bury(&mut shard, id, "a", None);
    }
    let queues = 100 * (HEAD + 5) + 5 * (HEAD + 1);
    // An event that is due later has its bot before it.
    let others = 40 * 5 + 3 + 5;
    let wrong = [("qa", 1), ("qb", 1), ("la", 7), ("La", 7), ("da", 7), ("Da", 7)];
    set_held(&mut shard, &wrong);
    let parts: [(&[&str], u64, &str); 2] =
        [(&["a", "b"], queues, "lrange"), (&[], others, "xrange")];
    for (bots, bytes, command) in parts {
        let mut reads = |bounds, expected| {
            let before = calls(&mut shard, command);
            assert_eq!(audit_of(&mut shard, bots, bounds), Audited::Many);
            assert_eq!(held(&mut shard), fields(&wrong), "{expected}");
            calls(&mut shard, command) - before
        };
        let none = reads((1, bytes), "too many entries");
        assert_eq!(reads((999, 1), "too many bytes"), none + 1, "16 entries are read");
        assert!(reads((999, bytes - 1), "one byte too many") > none + 2);
    }
    assert_eq!(audit_of(&mut shard, &["a", "b"], (999, queues)), Audited::Set(2));
    assert_eq!(audit_of(&mut shard, &[], (999, others)), Audited::Set(4));
    let right = [("qa", 1_600), ("qb", 60), ("la", 1), ("La", 5), ("da", 40), ("Da", 200)];
    assert_eq!(held(&mut shard), fields(&right));
    let () = shard.harness.plain().del(&keys.later).unwrap();
    assert_eq!(audit_of(&mut shard, &[], (999, 40 * 5)), Audited::Set(2));
}

fn reconcile(shard: &mut Shard, bots: &[&str], bots_max: usize) -> Reconciled {
    let keys = &shard.keys.clone();
    let bots: Vec<BotId> = bots.iter().map(|name| bot(name)).collect();
    shard.call(NOW, &Reconcile { keys, bots: &bots, bots_max })
}

#[test]
fn a_shard_is_reconciled_once_all_bots_with_events_are_named() {
    let mut shard = Shard::new();
    let empty = Reconciled::Set { before: "0".into(), depth: 0 };
    assert_eq!(reconcile(&mut shard, &[], 0), empty);
    shard.push(NOW, "busy", &["1"], LIMITS);
    shard.push(NOW, "busy2", &["1"], LIMITS);
    assert_eq!(shard.claim(NOW).leases.len(), 2);
    shard.push(NOW, "ready", &["1", "2"], LIMITS);
    shard.push(NOW, "ready2", &["1", "2"], LIMITS);
    shard.push(NOW, "paused", &["1", "2", "3"], LIMITS);
    let (keys, paused) = (&shard.keys.clone(), &bot("paused"));
    assert!(shard.call(NOW, &Pause { keys, bot: Some(paused), note: "", replaces: false }));
    assert_eq!(reconcile(&mut shard, &[], 4), Reconciled::Many(5));
    let more = |shard: &mut Shard, bots: &[&str]| match reconcile(shard, bots, 5) {
        Reconciled::More(bots) => bots.iter().map(ToString::to_string).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(more(&mut shard, &[]), ["ready", "ready2", "busy", "busy2", "paused"]);
    assert_eq!(more(&mut shard, &["busy", "gone", "ready", "ready2"]), ["busy2", "paused"]);
    let all = ["ready", "ready2", "busy", "busy2", "paused", "gone"];
    let set = |before: &str| Reconciled::Set { before: before.into(), depth: 9 };
    assert_eq!(reconcile(&mut shard, &all, 5), set("9"));
    let meta = shard.keys.meta().to_owned();
    let () = shard.harness.plain().hset(&meta, "depth", 7).unwrap();
    assert_eq!(reconcile(&mut shard, &all, 5), set("7"));
    assert_eq!(reconcile(&mut shard, &all, 5), set("9"));
    // What is counted of lanes counts only if the shard has some.
    set_held(&mut shard, &[("aready", 5)]);
    assert_eq!(reconcile(&mut shard, &all, 5), set("9"));
    let () = shard.harness.plain().hset(&meta, "lanes", 1).unwrap();
    let set = Reconciled::Set { before: "9".into(), depth: 14 };
    assert_eq!(reconcile(&mut shard, &all, 5), set);
}

/// The number of deleted letters, and whether there may be more.
fn drop_letters(shard: &mut Shard, letters: Dropping<'_>, bytes: usize) -> (u64, bool) {
    let keys = &shard.keys.clone();
    let Dropped { count, more } = shard.call(NOW, &DropLetters { keys, letters, bytes });
    (count, more)
}

#[test]
fn deleted_letters_are_held_no_longer() {
    let mut shard = Shard::new();
    for id in 1..=250 {
        bury(&mut shard, id, if id % 2 == 0 { "a" } else { "b" }, (id == 3).then_some("20"));
    }
    assert_eq!(audit(&mut shard, &[], 999), Audited::Set(4));
    let at = |ms| Offset { ms, seq: 0 };
    let now_ms = NOW.unsigned_abs() / 1_000;
    // Those older than a letter of this time.
    let older_than = |ms: u64| Dropping::Older(Duration::from_millis(now_ms - ms));
    let ids = [at(3), at(9_999), at(250)];
    assert_eq!(drop_letters(&mut shard, Dropping::Ids(&ids), MANY), (2, false));
    let left = fields(&[("da", 124), ("Da", 620), ("db", 124), ("Db", 620)]);
    assert_eq!(held(&mut shard), left);
    assert_eq!(drop_letters(&mut shard, Dropping::Ids(&[at(3)]), MANY), (0, false));
    assert_eq!(drop_letters(&mut shard, older_than(1), MANY), (0, false));
    assert_eq!(drop_letters(&mut shard, Dropping::Older(Duration::MAX), MANY), (0, false));
    // A hundred in one call, and the named one stays.
    assert_eq!(drop_letters(&mut shard, older_than(201), MANY), (100, true));
    assert_eq!(drop_letters(&mut shard, older_than(201), MANY), (99, false));
    assert_eq!(shard.letters(), (201..250).map(at).collect::<Vec<_>>());
    let left = fields(&[("da", 24), ("Da", 120), ("db", 25), ("Db", 125)]);
    assert_eq!(held(&mut shard), left);
    assert_eq!(audit(&mut shard, &[], 999), Audited::Set(0));
}

#[test]
fn letters_are_deleted_until_so_many_bytes_were_read_and_the_next_call_goes_on() {
    let mut shard = Shard::new();
    for id in 1..=9 {
        // Each has a record of five bytes, and more that is kept elsewhere.
        bury(&mut shard, id, "a", Some("999"));
    }
    assert_eq!(audit(&mut shard, &[], 99), Audited::Set(2));
    let at = |ms| Offset { ms, seq: 0 };
    let ids = [at(1), at(99), at(2), at(3)];
    assert_eq!(drop_letters(&mut shard, Dropping::Ids(&ids), 6), (2, true));
    assert_eq!(shard.letters(), (3..=9).map(at).collect::<Vec<_>>());
    assert_eq!(drop_letters(&mut shard, Dropping::Ids(&ids), 6), (1, false));
    let older = Dropping::Older(Duration::from_millis(NOW.unsigned_abs() / 1_000 - 99));
    for (bytes, expected, left) in
        [(1, (1, true), 5), (5, (1, true), 4), (6, (2, true), 2), (11, (2, false), 0)]
    {
        assert_eq!(drop_letters(&mut shard, older, bytes), expected, "{bytes} bytes");
        let (letters, held) = (shard.letters(), held(&mut shard));
        assert_eq!(letters, (10 - left..=9).map(at).collect::<Vec<_>>());
        assert_eq!(held.get("Da").copied().unwrap_or_default(), left * (5 + 999));
    }
}
