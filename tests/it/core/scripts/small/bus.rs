//! What is published to a log of the bus, noted about it, trimmed from it, and passed over.

use super::{NOW, Scripts, fields};

#[test]
fn an_event_is_published_once_while_its_id_is_remembered() {
    let mut scripts = Scripts::new();
    let mut emit = |seen: [&str; 2], events: [&str; 2]| -> (u64, String) {
        let keys = ["events", seen[0], seen[1]];
        scripts.run("emit", &keys, &["60000", events[0], events[1]])
    };
    let (added, second) = emit(["seen:a", "seen:b"], ["A", "B"]);
    assert_eq!(added, 2);
    let (added, third) = emit(["seen:c", "seen:a"], ["C", "A again"]);
    assert_eq!(added, 1, "one is known");
    assert_eq!(emit(["seen:b", "seen:c"], ["B again", "C again"]), (0, String::new()));
    let entries = scripts.entries("events");
    let values: Vec<&[String]> = entries.iter().map(|(_, values)| values.as_slice()).collect();
    assert_eq!(values, [["event", "A"], ["event", "B"], ["event", "C"]]);
    assert_eq!([&entries[1].0, &entries[2].0], [&second, &third], "the offset of the last one");
    for id in ["seen:a", "seen:b", "seen:c"] {
        scripts.check_lifetime(id, 60_000);
    }
}

#[test]
fn a_note_replaces_all_but_a_lag_that_it_does_not_know() {
    /// The arguments, and the fields afterwards.
    type Case = ([&'static str; 3], &'static [(&'static str, &'static str)]);
    let cases: [Case; 4] = [
        (["1-1", "1", ""], &[("offset", "1-1"), ("entries", "1")]),
        (["1-2", "2", "7"], &[("offset", "1-2"), ("entries", "2"), ("lag", "7")]),
        (["1-3", "3", ""], &[("offset", "1-3"), ("entries", "3"), ("lag", "7")]),
        (["1-4", "4", "0"], &[("offset", "1-4"), ("entries", "4"), ("lag", "0")]),
    ];
    let mut scripts = Scripts::new();
    for (arguments, expected) in cases {
        let reply: i64 = scripts.run("note", &["read"], &arguments);
        assert_eq!((reply, scripts.fields("read")), (1, fields(expected)));
    }
}

#[test]
fn entries_before_the_offset_are_deleted_unless_a_group_needs_them() {
    /// The name, the commands before, the offset, and the first of five entries that stays.
    type Case = (&'static str, &'static [&'static str], &'static str, u64);
    let cases: [Case; 12] = [
        ("the first", &[], "1-0", 1),
        ("some", &[], "3-0", 3),
        ("all", &[], "9-0", 6),
        ("a group that is further", &["XGROUP CREATE s g 4-0"], "3-0", 3),
        ("a group that is there", &["XGROUP CREATE s g 3-0"], "3-0", 3),
        ("a group that is not there", &["XGROUP CREATE s g 2-0"], "4-0", 2),
        (
            "one entry that is not acknowledged",
            &[
                "XGROUP CREATE s g 0",
                "XREADGROUP GROUP g c COUNT 3 STREAMS s >",
                "XACK s g 1-0 3-0",
            ],
            "5-0",
            2,
        ),
        (
            "several entries that are not acknowledged",
            &["XGROUP CREATE s g 0", "XREADGROUP GROUP g c COUNT 4 STREAMS s >", "XACK s g 1-0"],
            "5-0",
            2,
        ),
        (
            "the offset is that of an entry that is not acknowledged",
            &["XGROUP CREATE s g 0", "XREADGROUP GROUP g c COUNT 3 STREAMS s >", "XACK s g 1-0"],
            "2-0",
            2,
        ),
        (
            "all that were read are acknowledged",
            &[
                "XGROUP CREATE s g 0",
                "XREADGROUP GROUP g c COUNT 3 STREAMS s >",
                "XACK s g 1-0 2-0 3-0",
            ],
            "5-0",
            3,
        ),
        (
            "the second group needs more",
            &["XGROUP CREATE s g 4-0", "XGROUP CREATE s h 2-0"],
            "5-0",
            2,
        ),
        (
            "the first group needs more",
            &["XGROUP CREATE s g 2-0", "XGROUP CREATE s h 4-0"],
            "5-0",
            2,
        ),
    ];
    let mut scripts = Scripts::new();
    for (name, commands, keep, first) in cases {
        scripts.ask::<()>(&["DEL", "s"]);
        for id in 1..=5 {
            scripts.ask::<()>(&["XADD", "s", &format!("{id}-0"), "event", "e"]);
        }
        for command in commands {
            let words: Vec<&str> = command.split(' ').collect();
            scripts.ask::<()>(&words);
        }
        let deleted: u64 = scripts.run("trim", &["s"], &[keep]);
        let left: Vec<String> = scripts.entries("s").into_iter().map(|(id, _)| id).collect();
        let expected: Vec<String> = (first..=5).map(|id| format!("{id}-0")).collect();
        assert_eq!((deleted, left), (first - 1, expected), "{name}");
    }
    let deleted: u64 = scripts.run("trim", &["other"], &["5-0"]);
    assert_eq!(deleted, 0, "there is no stream");
}

#[test]
fn a_shard_passes_over_a_batch_only_if_it_has_all_before_it() {
    /// The offsets that are stored of the logs a and b ('': none), the arguments, the reply, and the
    /// offsets afterwards.
    type Case = ([&'static str; 2], &'static str, &'static str, [&'static str; 2]);
    let cases: [Case; 9] = [
        (["", ""], "1 a 0-0 1-5", "OK 1-5", ["1-5", ""]),
        (["1-5", "7-0"], "1 a 1-5 2-0", "OK 2-0", ["2-0", "7-0"]),
        (["1-0", "2-0"], "2 a 1-0 3-0 b 2-0 4-0", "OK 3-0 4-0", ["3-0", "4-0"]),
        // It is behind the batch of one log, or of both.
        (["1-0", "9-0"], "2 a 1-0 2-0 b 3-0 4-0", "OK 2-0 9-0", ["2-0", "9-0"]),
        (["9-0", "4-0"], "2 a 1-0 2-0 b 3-0 4-0", "OK 9-0 4-0", ["9-0", "4-0"]),
        // It has not all before the batch of one log, or has nothing.
        (["1-0", "2-0"], "2 a 1-0 2-0 b 3-0 4-0", "GAP 1-0 2-0", ["1-0", "2-0"]),
        (["2-0", "1-0"], "2 a 3-0 4-0 b 1-0 2-0", "GAP 2-0 1-0", ["2-0", "1-0"]),
        (["", ""], "1 a 1-0 2-0", "GAP 0-0", ["", ""]),
        // It never goes back.
        (["5-0", ""], "1 a 5-0 4-0", "OK 5-0", ["5-0", ""]),
    ];
    let hash = |offsets: [&str; 2]| {
        let mut all = fields(&[("a", offsets[0]), ("b", offsets[1])]);
        all.retain(|_, offset| !offset.is_empty());
        all
    };
    let mut scripts = Scripts::new();
    for (before, arguments, expected, after) in cases {
        scripts.store("hwm", &hash(before));
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let reply: Vec<String> = scripts.run("advance", &["hwm"], &arguments);
        assert_eq!(reply.join(" "), expected, "{before:?} {arguments:?}");
        assert_eq!(scripts.fields("hwm"), hash(after), "{before:?} {arguments:?}");
    }
    let unnumbered = scripts.harness.raw("advance", &["hwm"], &["x", "a", "5-0", "6-0"]);
    let refused = scripts.harness.run(NOW, unnumbered, &redis::pipe()).unwrap_err().to_string();
    assert!(refused.contains("advance: wrong number of arguments"), "{refused}");
}
