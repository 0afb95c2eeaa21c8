//! How the logs of a bus are divided among the processes that read it.

use std::collections::BTreeMap;

use super::{NOW_MS, Scripts};

const READERS: &str = "readers";
const TTL_MS: u64 = 30_000;

/// The fields of the hash in a short form, for example `rb=alive lx=b`.
fn hash(text: &str) -> BTreeMap<String, String> {
    let field = |word: &str| {
        let (field, value) = word.split_once('=').unwrap();
        let value = match value {
            "expired" => NOW_MS.to_string(),
            "alive" => (NOW_MS + 1).to_string(),
            "renewed" => (NOW_MS + TTL_MS).to_string(),
            reader => reader.to_owned(),
        };
        (field.to_owned(), value)
    };
    text.split_whitespace().map(field).collect()
}

/// The places of the logs that reader `a` gets.
fn read(scripts: &mut Scripts, ttl_ms: u64, logs: &[&str]) -> Vec<usize> {
    let ttl = ttl_ms.to_string();
    scripts.run("readers", &[READERS], &[&["a", ttl.as_str()][..], logs].concat())
}

#[test]
fn each_reader_has_an_equal_share_of_the_logs() {
    /// What it shows, the hash before, the logs, the places that reader `a` gets, and the hash then.
    type Case = (&'static str, &'static str, &'static str, &'static [usize], &'static str);
    let cases: [Case; 9] = [
        ("alone", "", "x y z", &[0, 1, 2], "ra=renewed lx=a ly=a lz=a"),
        ("a new one", "rb=alive", "w x y z", &[0, 1], "ra=renewed rb=alive lw=a lx=a"),
        // It would have expired now. One of its logs does not exist any more.
        ("instead of one", "rb=expired lx=b lold=b", "x y", &[0, 1], "ra=renewed lx=a ly=a"),
        (
            "it keeps its own, and those of others",
            "ra=alive rb=alive lu=a lv=b",
            "u v w x y z",
            &[0, 2, 3],
            "ra=renewed rb=alive lu=a lv=b lw=a lx=a",
        ),
        // Of three logs, one of two readers gets two.
        ("the larger", "rb=alive lx=b", "x y z", &[1, 2], "ra=renewed rb=alive lx=b ly=a lz=a"),
        (
            "not a second one",
            "ra=alive rb=alive rc=alive l1=b l2=a l3=b l4=a l5=b",
            "1 2 3 4 5 6 7",
            &[1, 3],
            "ra=renewed rb=alive rc=alive l1=b l2=a l3=b l4=a l5=b",
        ),
        (
            "what is beyond it",
            "ra=alive rb=alive lw=a lx=a ly=a lz=a",
            "w x y z",
            &[0, 1],
            "ra=renewed rb=alive lw=a lx=a",
        ),
        (
            "less than its share is free",
            "ra=alive rb=alive lw=b lx=b ly=b",
            "w x y z",
            &[3],
            "ra=renewed rb=alive lw=b lx=b ly=b lz=a",
        ),
        // It had expired itself, and comes again before anyone noticed.
        ("late", "ra=expired rb=alive lx=a ly=b", "x y", &[0], "ra=renewed rb=alive lx=a ly=b"),
    ];
    let mut scripts = Scripts::new();
    for (name, before, logs, places, after) in cases {
        scripts.store(READERS, &hash(before));
        let logs: Vec<&str> = logs.split(' ').collect();
        assert_eq!(read(&mut scripts, TTL_MS, &logs), places, "{name}");
        assert_eq!(scripts.fields(READERS), hash(after), "{name}");
        scripts.check_lifetime(READERS, TTL_MS.cast_signed());
    }
    // The shortest time.
    scripts.store(READERS, &hash("rb=alive"));
    assert_eq!(read(&mut scripts, 1, &["w", "x", "y", "z"]), [0, 1]);
}

#[test]
fn a_reader_that_leaves_takes_its_logs_and_those_of_expired_readers_with_it() {
    let mut scripts = Scripts::new();
    for (before, after) in [
        ("ra=alive rb=alive rc=expired lw=a lx=b ly=c lz=a", "rb=alive lx=b"),
        ("rb=alive lx=b", "rb=alive lx=b"),
        ("ra=alive rb=alive", "rb=alive"),
        ("ra=alive lw=a", ""),
        ("", ""),
    ] {
        scripts.store(READERS, &hash(before));
        assert_eq!(read(&mut scripts, 0, &["w", "x", "y", "z"]), [0; 0], "{before}");
        assert_eq!(scripts.fields(READERS), hash(after), "{before}");
    }
    // More fields than one command gets.
    let logs: Vec<String> = (0..1_001).map(|log| log.to_string()).collect();
    let of = |reader: &str, until: &str| -> BTreeMap<String, String> {
        let fields = logs.iter().map(|log| (format!("l{log}"), reader.to_owned()));
        fields.chain(hash(&format!("r{reader}={until}"))).collect()
    };
    let names: Vec<&str> = logs.iter().map(String::as_str).collect();
    scripts.store(READERS, &of("b", "expired"));
    assert_eq!(read(&mut scripts, TTL_MS, &names), (0..1_001).collect::<Vec<_>>());
    assert_eq!(scripts.fields(READERS), of("a", "renewed"));
    assert_eq!(read(&mut scripts, 0, &names), [0; 0]);
    assert_eq!(scripts.fields(READERS), hash(""));
}
