//! How many events of a queue arrived until some times: the search, and what it reads.

use super::Scripts;

/// More bytes than any queue here has.
const MANY: &str = "100000";

/// Replaces the queue `q` by records of these sequences, of 12 bytes each.
fn fill(scripts: &mut Scripts, sequences: &[u64]) {
    scripts.ask::<()>(&["DEL", "q"]);
    for sequence in sequences {
        let record = [&b"\x93\x01\xcf"[..], &sequence.to_be_bytes(), b"e"].concat();
        redis::cmd("RPUSH").arg("q").arg(record).exec(scripts.harness.plain()).unwrap();
    }
}

/// The numbers of events up to each of these sequences, and how many records were read for them.
fn arrived(scripts: &mut Scripts, bytes: &str, until: &[u64]) -> (Vec<u64>, u64) {
    let until: Vec<String> = until.iter().map(u64::to_string).collect();
    let count = until.len().to_string();
    let until = until.iter().map(String::as_str);
    let arguments: Vec<&str> = [count.as_str(), bytes].into_iter().chain(until).collect();
    let before = reads(scripts);
    let counts = scripts.run("arrived", &["q"], &arguments);
    (counts, reads(scripts) - before)
}

/// How often records of queues were read one by one so far.
fn reads(scripts: &mut Scripts) -> u64 {
    let text: String = scripts.ask(&["INFO", "commandstats"]);
    let calls = text.lines().find_map(|line| line.strip_prefix("cmdstat_lindex:calls="));
    calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
}

#[test]
fn events_are_counted_up_to_each_of_the_times() {
    let mut scripts = Scripts::new();
    for (sequences, until, expected) in [
        (&[][..], &[0, 9][..], &[0, 0][..]),
        (&[10], &[9, 10, 11], &[0, 1, 1]),
        (&[10, 20, 30], &[0, 9, 10, 15, 29, 30, 31], &[0, 0, 1, 1, 2, 3, 3]),
        (&[10, 20, 20, 30], &[19, 20, 21], &[1, 3, 3]),
        (&[10, 20, 30], &[31, 9, 20], &[3, 0, 2]),
    ] {
        fill(&mut scripts, sequences);
        assert_eq!(arrived(&mut scripts, MANY, until).0, expected, "{sequences:?} {until:?}");
    }
    // What is too short for a record counts as sequence 0, and one without an event is a record.
    scripts.ask::<()>(&["DEL", "q"]);
    let bare = [&b"\x93\x01\xcf"[..], &20_u64.to_be_bytes()].concat();
    for record in [&bare[..10], &bare] {
        redis::cmd("RPUSH").arg("q").arg(record).exec(scripts.harness.plain()).unwrap();
    }
    assert_eq!(arrived(&mut scripts, MANY, &[0, 19, 20]).0, [1, 1, 2]);
}

#[test]
fn no_record_is_read_twice_and_once_enough_bytes_were_read_the_numbers_are_near() {
    let mut scripts = Scripts::new();
    fill(&mut scripts, &[1, 2, 3, 4, 5, 6, 7]);
    let until = [0, 1, 2, 3, 4, 5, 6, 7];
    for (bytes, expected, read) in [
        ("1", [1, 1, 1, 1, 5, 5, 5, 5], 1),
        ("12", [1, 1, 1, 1, 5, 5, 5, 5], 1),
        ("13", [0, 0, 2, 2, 5, 5, 5, 5], 2),
        ("24", [0, 0, 2, 2, 5, 5, 5, 5], 2),
        ("25", [0, 0, 2, 2, 4, 4, 6, 6], 3),
        (MANY, [0, 1, 2, 3, 4, 5, 6, 7], 7),
    ] {
        assert_eq!(arrived(&mut scripts, bytes, &until), (expected.to_vec(), read), "{bytes}");
    }
    let times: Vec<u64> = (100..115).collect();
    assert_eq!(arrived(&mut scripts, MANY, &times), (vec![7; 15], 3), "all of them are as late");
}
