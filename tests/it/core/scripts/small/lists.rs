//! What is read of queues, of delayed events and of dead letters: a portion of a number and of bytes.

use redis::Value;

use super::{NOW, NOW_MS, Scripts};

/// More bytes than any portion here has.
const MANY: &str = "100000";
/// A bound of events above all queues here.
const ALL: &str = "100";

/// A record as a queue has it. It has 11 bytes besides its event.
fn record(sequence: u64, event: &str) -> Vec<u8> {
    [&b"\x93\x01\xcf"[..], &sequence.to_be_bytes(), event.as_bytes()].concat()
}

fn sequence_of(record: &[u8]) -> u64 {
    u64::from_be_bytes(record[3..11].try_into().unwrap())
}

/// Records of the sequences with an event of that many bytes.
fn records(sequences: &[u64], bytes: usize) -> Vec<Vec<u8>> {
    sequences.iter().map(|sequence| record(*sequence, &"e".repeat(bytes))).collect()
}

/// Replaces a list.
fn fill(scripts: &mut Scripts, list: &str, entries: &[Vec<u8>]) {
    scripts.ask::<()>(&["DEL", list]);
    if !entries.is_empty() {
        redis::cmd("RPUSH").arg(list).arg(entries).exec(scripts.harness.plain()).unwrap();
    }
}

#[test]
fn the_head_of_a_queue_is_its_length_and_its_first_sequence() {
    let mut scripts = Scripts::new();
    let late = NOW.unsigned_abs();
    fill(&mut scripts, "one", &records(&[late], 0));
    fill(&mut scripts, "three", &records(&[5, 6, 7], 1));
    fill(&mut scripts, "short", &[record(8, "")[..10].to_vec()]);
    scripts.ask::<()>(&["SET", "text", "no list"]);
    let queues = ["none", "one", "text", "three", "short", "none"];
    let all = [0, 0, 1, late, 0, 0, 3, 5, 1, 0, 0, 0];
    // The queues after the one whose first event exceeds the bytes are left out.
    for (bytes, queues_read) in
        [(MANY, 6), ("33", 6), ("32", 5), ("23", 5), ("22", 4), ("11", 4), ("10", 2), ("1", 2)]
    {
        let heads: Vec<u64> = scripts.run("heads", &queues, &["6", bytes]);
        assert_eq!(heads, all[..2 * queues_read], "{bytes} bytes");
    }
    let lengths: Vec<u64> = scripts.run("heads", &queues, &["6", "0"]);
    assert_eq!(lengths, [0, 0, 1, 0, 0, 0, 3, 0, 1, 0, 0, 0], "no event is read");
}

#[test]
fn a_slice_is_bounded_in_events_and_in_bytes() {
    let mut scripts = Scripts::new();
    let mut slice = |length: u64, most: usize, bytes: usize| -> usize {
        let all = records(&(1..=length).collect::<Vec<_>>(), 1);
        fill(&mut scripts, "q", &all);
        let bounds = [most.to_string(), bytes.to_string()];
        let slice: Vec<Vec<u8>> = scripts.run("slice", &["q"], &[&bounds[0], &bounds[1]]);
        assert_eq!(slice, all[..slice.len()], "{most} of {length}, {bytes} bytes");
        slice.len()
    };
    // It reads 16 at a time.
    for length in [0_u64, 1, 15, 16, 17, 31, 32, 33, 40] {
        for most in [0_usize, 1, 15, 16, 17, 31, 32, 33] {
            let expected = most.min(usize::try_from(length).unwrap());
            assert_eq!(slice(length, most, 1_000), expected, "{most} of {length}");
        }
    }
    for (bytes, expected) in [(1, 1), (12, 1), (23, 1), (24, 2), (25, 2), (35, 2), (36, 3)] {
        assert_eq!(slice(3, 9, bytes), expected, "{bytes} bytes");
    }
    for (bytes, expected) in [(191, 15), (192, 16), (203, 16), (204, 17), (205, 17)] {
        assert_eq!(slice(20, 19, bytes), expected, "{bytes} bytes");
    }
}

#[test]
fn due_events_are_told_with_their_bots_up_to_the_next_that_is_not_due() {
    let mut scripts = Scripts::new();
    let [long_ago, now, next] = [NOW_MS - 2, NOW_MS, NOW_MS + 1].map(|ms| ms.to_string());
    // The length of the id of a bot, the id, and the event.
    for (id, due_ms, stored) in
        [("x", &long_ago, "3:bot12345"), ("y", &now, "5:a:b:cE"), ("z", &next, "1:dE")]
    {
        scripts.ask::<()>(&["ZADD", "due", due_ms, id]);
        scripts.ask::<()>(&["HSET", "later", id, stored]);
    }
    let due = |scripts: &mut Scripts, now_us: i64, most: &str, bytes: &str| -> String {
        let reply: Vec<String> = scripts.run_at(now_us, "due", &["due", "later"], &[most, bytes]);
        reply.join(" ")
    };
    let both = format!("{now} {next} x bot y a:b:c");
    for (most, bytes, expected) in [
        (ALL, MANY, both.clone()),
        ("3", MANY, both.clone()),
        ("2", MANY, format!("{now}  x bot y a:b:c")),
        ("1", MANY, format!("{now}  x bot")),
        (ALL, "19", both.clone()),
        (ALL, "18", both),
        (ALL, "17", format!("{now}  x bot")),
        (ALL, "1", format!("{now}  x bot")),
    ] {
        assert_eq!(due(&mut scripts, NOW, most, bytes), expected, "{most}, {bytes} bytes");
    }
    let before = format!("{} {now} x bot", NOW_MS - 1);
    assert_eq!(due(&mut scripts, NOW - 1_000, ALL, MANY), before, "1 ms earlier");
    let only_y = format!("{now} {next} y a:b:c");
    for unreadable in ["", "bot", ":bot", "x:bot"] {
        scripts.ask::<()>(&["HSET", "later", "x", unreadable]);
        assert_eq!(due(&mut scripts, NOW, ALL, MANY), only_y, "{unreadable:?}");
    }
    scripts.ask::<()>(&["HDEL", "later", "x"]);
    assert_eq!(due(&mut scripts, NOW, ALL, MANY), only_y, "the event is gone");
    scripts.ask::<()>(&["DEL", "due"]);
    assert_eq!(due(&mut scripts, NOW, ALL, MANY), format!("{now} "), "none is delayed");
}

/// The place behind a portion of the queue `q`, and its records.
fn peek(scripts: &mut Scripts, arguments: [&str; 5]) -> (i64, Vec<Vec<u8>>) {
    let reply: Vec<Value> = scripts.run("peek", &["q"], &arguments);
    let Some((Value::Int(next), records)) = reply.split_first() else { panic!("{reply:?}") };
    let bytes = |record: &Value| match record {
        Value::BulkString(bytes) => bytes.clone(),
        other => panic!("{other:?}"),
    };
    (*next, records.iter().map(bytes).collect())
}

#[test]
fn a_reader_goes_on_behind_the_last_event_that_it_has_read() {
    /// The sequences of the queue, the place, the sequence of the event before it, and where the
    /// portion begins.
    type Case = (&'static [u64], u64, u64, usize);
    let cases: [Case; 19] = [
        (&[10, 20, 30], 0, 0, 0),
        (&[10, 20, 30], 0, 20, 0),
        (&[10, 20, 30], 1, 10, 1),
        (&[10, 20, 30], 2, 20, 2),
        (&[10, 20, 30], 3, 30, 3),
        // The queue has not moved: the order of the sequences does not matter.
        (&[10, 20, 15, 30], 2, 20, 2),
        (&[10, 20, 20, 30], 2, 20, 2),
        (&[10, 30, 20], 3, 20, 3),
        // Events before the place are gone.
        (&[20, 30], 1, 10, 0),
        (&[20, 30, 40], 2, 20, 1),
        (&[20, 30, 40], 2, 25, 1),
        (&[30, 40], 2, 20, 0),
        (&[30, 40], 3, 30, 1),
        (&[30, 40], 3, 40, 2),
        (&[30, 40], 9, 50, 2),
        (&[], 1, 10, 0),
        // Events were put before the place.
        (&[5, 10, 20, 30], 1, 10, 2),
        (&[5, 6, 7, 10, 20, 30], 2, 20, 5),
        (&[10, 20, 20, 30], 1, 20, 3),
    ];
    let mut scripts = Scripts::new();
    for (sequences, place, before, begin) in cases {
        fill(&mut scripts, "q", &records(sequences, 0));
        let (place, before) = (place.to_string(), before.to_string());
        let (next, found) = peek(&mut scripts, [&place, &before, ALL, MANY, "-1"]);
        let found: Vec<u64> = found.iter().map(|record| sequence_of(record)).collect();
        assert_eq!((next, &found[..]), (0, &sequences[begin..]), "{sequences:?} {place} {before}");
    }
    // What is too short for a record counts as sequence 0.
    let odd = record(20, "")[..10].to_vec();
    fill(&mut scripts, "q", &[odd, record(20, "")]);
    assert_eq!(peek(&mut scripts, ["1", "0", ALL, MANY, "-1"]), (0, vec![record(20, "")]));
}

#[test]
fn a_portion_of_a_queue_is_bounded_in_events_and_in_bytes() {
    let sequences = [10, 20, 30, 40, 50];
    let mut scripts = Scripts::new();
    fill(&mut scripts, "q", &records(&sequences, 4));
    for (place, before, most, bytes, expected) in [
        ("0", "0", "2", MANY, (2, 0..2)),
        ("2", "20", "2", MANY, (4, 2..4)),
        ("4", "40", "2", MANY, (0, 4..5)),
        ("0", "0", "4", MANY, (4, 0..4)),
        ("0", "0", "5", MANY, (0, 0..5)),
        ("0", "0", "6", MANY, (0, 0..5)),
        ("2", "20", "0", MANY, (2, 2..2)),
        ("5", "50", "1", MANY, (0, 5..5)),
        ("0", "0", "9", "1", (1, 0..1)),
        ("0", "0", "9", "29", (1, 0..1)),
        ("0", "0", "9", "30", (2, 0..2)),
        ("0", "0", "9", "31", (2, 0..2)),
        ("0", "0", "9", "74", (4, 0..4)),
        ("0", "0", "9", "75", (0, 0..5)),
    ] {
        let (next, found) = peek(&mut scripts, [place, before, most, bytes, "-1"]);
        let found: Vec<u64> = found.iter().map(|record| sequence_of(record)).collect();
        assert_eq!(
            (next, &found[..]),
            (expected.0, &sequences[expected.1]),
            "{place} {most} {bytes}"
        );
    }
    let whole = record(10, "abc");
    fill(&mut scripts, "q", std::slice::from_ref(&whole));
    for (cut, length) in
        [("-1", 14), ("0", 0), ("1", 1), ("11", 11), ("13", 13), ("14", 14), ("15", 14)]
    {
        let expected = (0, vec![whole[..length].to_vec()]);
        assert_eq!(peek(&mut scripts, ["0", "0", ALL, MANY, cut]), expected, "{cut}");
    }
}

#[test]
fn a_portion_of_dead_letters_is_bounded_and_goes_in_either_order() {
    let mut scripts = Scripts::new();
    for letter in [
        "1-0 bot a reason why attempts 2 time 77 record 0123456789",
        "2-0 bot b record abcde",
        "3-0 more 1",
    ] {
        let words: Vec<&str> = ["XADD", "dlq"].into_iter().chain(letter.split(' ')).collect();
        scripts.ask::<()>(&words);
    }
    let mut letters = |arguments: &str| -> String {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let reply: Vec<String> = scripts.run("letters", &["dlq"], &arguments);
        reply.join("|")
    };
    // Whether there may be more, and of each letter its id, the bytes of its record, its bot, its
    // reason, its attempts, its time and the start of its record.
    let (a, b, c) = ("1-0|10|a|why|2|77|0123456789", "2-0|5|b||0|0|abcde", "3-0|0|||0|0|");
    for (arguments, expected) in [
        ("oldest - + 9 999 -1", format!("0|{a}|{b}|{c}")),
        ("newest + - 9 999 -1", format!("0|{c}|{b}|{a}")),
        ("oldest (1-0 + 9 999 -1", format!("0|{b}|{c}")),
        ("oldest - 2-0 9 999 -1", format!("0|{a}|{b}")),
        ("newest 2-0 - 9 999 -1", format!("0|{b}|{a}")),
        ("newest + (1-0 9 999 -1", format!("0|{c}|{b}")),
        ("oldest (3-0 + 9 999 -1", "0".to_owned()),
        // Most letters.
        ("oldest - + 4 999 -1", format!("0|{a}|{b}|{c}")),
        ("oldest - + 3 999 -1", format!("1|{a}|{b}|{c}")),
        ("oldest - + 2 999 -1", format!("1|{a}|{b}")),
        ("newest + - 1 999 -1", format!("1|{c}")),
        ("oldest - + 0 999 -1", "1".to_owned()),
        // Most bytes that are read.
        ("oldest - + 9 1 -1", format!("1|{a}")),
        ("oldest - + 9 10 -1", format!("1|{a}")),
        ("oldest - + 9 11 -1", format!("1|{a}|{b}")),
        ("oldest - + 9 15 -1", format!("1|{a}|{b}")),
        ("oldest - + 9 16 -1", format!("0|{a}|{b}|{c}")),
        // Bytes of each record.
        ("oldest - + 2 999 0", "1|1-0|10|a|why|2|77||2-0|5|b||0|0|".to_owned()),
        ("oldest - + 2 999 1", "1|1-0|10|a|why|2|77|0|2-0|5|b||0|0|a".to_owned()),
        ("oldest - + 2 999 5", format!("1|1-0|10|a|why|2|77|01234|{b}")),
        ("oldest - + 2 999 10", format!("1|{a}|{b}")),
    ] {
        assert_eq!(letters(arguments), expected, "{arguments}");
    }
    assert_eq!(
        scripts.run::<Vec<u64>>("letters", &["none"], &["oldest", "-", "+", "9", "9", "0"]),
        [0]
    );
}
