//! No kind of stored data lacks a sample, and the page on upgrades lists every kind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use fairlane::expression::Glob;

use super::{present, text};

/// The tables of keys.
const TABLES: [&str; 3] =
    ["src/redis/keys.rs", "src/notifications/keys.rs", "src/automations/queue.rs"];
const PAGE: &str = "docs/upgrading.md";
/// Keys that no sample has, and why.
const WITHOUT: [(&str, &str); 12] = [
    ("fl:auditor", "a lock that lasts for seconds"),
    ("fl:replay:<id>", "only while a replay runs: an operator repeats it"),
    ("fl:{p:s}:replay:<id>", "as above"),
    ("fl:{<bus>}:logs", "only for buses that get new logs, such as partitions of Kafka"),
    ("fl:{check-<number>}:<id>", "only while a check runs"),
    ("fl:{replicas-<number>}", "only with redis.wait_replicas: its value says nothing"),
    ("fl:{p:0}:tokens", "lasts until the tokens are back: some milliseconds"),
    ("fl:{p:s}:slow", "as above"),
    ("fl:{p:s}:keys:<bot>", "lasts until the quota is free again: some milliseconds"),
    ("fl:{p:s}:imports:<bot>", "as above"),
    ("fl:{p:s}:names-before", "as names-now, which becomes it after the time of `bus.dedup`"),
    ("fl:{p:s}:wake", "a channel: it stores nothing"),
];

fn source(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The names of the keys in the tables, such as `fl:{p:s}:q:<bot>`.
fn listed() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for table in TABLES {
        let source = source(table);
        let rows = source
            .lines()
            .filter_map(|line| line.trim_start_matches(['/', '!', ' ']).strip_prefix("| `"));
        for row in rows {
            let cell = row.split(" | ").next().unwrap();
            names.extend(cell.split("`, `").map(|name| name.trim_end_matches('`').to_owned()));
        }
    }
    assert!(names.len() > 50, "{names:?}");
    names
}

/// The pattern of the keys with a name.
fn pattern(name: &str) -> Glob {
    let mut pattern = name.replace("{p:s}", "{*:*}").replace("{p:0}", "{*:0}");
    while let Some((before, (_, after))) =
        pattern.split_once('<').and_then(|(before, rest)| Some((before, rest.split_once('>')?)))
    {
        pattern = format!("{before}*{after}");
    }
    Glob::new(&pattern.replace("\\n", "\n"))
}

fn keys() -> BTreeSet<String> {
    let sample = fs::read_to_string(present().join("redis.txt")).expect("make samples");
    let lines = sample.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| String::from_utf8(text::words(line)[1].clone()).unwrap()).collect()
}

#[test]
fn every_kind_of_key_has_a_sample() {
    let keys = keys();
    let missing: Vec<String> = listed()
        .into_iter()
        .filter(|name| !WITHOUT.iter().any(|(known, _)| known == name))
        .filter(|name| {
            let pattern = pattern(name);
            !keys.iter().any(|key| pattern.matches(key))
        })
        .collect();
    assert!(missing.is_empty(), "no sample has these; lengthen the story: {missing:#?}");
}

#[test]
fn every_key_of_the_sample_is_in_the_table_of_keys() {
    let patterns: Vec<Glob> = listed().iter().map(|name| pattern(name)).collect();
    let of_bus = ["fairlane:events"];
    let unknown: Vec<String> = keys()
        .into_iter()
        .filter(|key| !of_bus.contains(&key.as_str()))
        .filter(|key| !patterns.iter().any(|pattern| pattern.matches(key)))
        .collect();
    assert!(unknown.is_empty(), "no table lists these: {unknown:#?}");
}

#[test]
fn each_key_without_a_sample_is_in_a_table_and_has_a_reason() {
    let listed = listed();
    for (name, why) in WITHOUT {
        assert!(listed.contains(name), "{name} is no key");
        assert!(!why.is_empty(), "{name}");
    }
}

#[test]
fn every_collection_has_a_sample() {
    let sample = fs::read_to_string(present().join("mongodb.txt")).expect("make samples");
    let lines = sample.lines().filter(|line| !line.starts_with('#'));
    let found: BTreeSet<&str> = lines.map(|line| line.split(' ').next().unwrap()).collect();
    let mut known = BTreeSet::from([fairlane::formats::FORMATS]);
    known.extend([
        fairlane::automations::store::AUTOMATIONS,
        fairlane::automations::subscribers::SUBSCRIBERS,
    ]);
    known.extend([fairlane::counters::store::DAILY, fairlane::counters::store::TOTALS]);
    assert_eq!(found, known);
}

#[test]
fn the_page_on_upgrades_lists_every_key_and_collection() {
    let page = source(PAGE);
    let missing: Vec<String> =
        listed().into_iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "{PAGE} lacks {missing:#?}");
}
