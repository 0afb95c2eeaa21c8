//! The configuration of instances under test.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::redis::RedisBackend;

/// The bus stream, unless a test names another one.
pub(crate) const STREAM: &str = "fairlane:events";
/// The number of shards.
pub(crate) const SHARDS: u16 = 8;

const DEFAULTS: &[(&str, &str)] = &[
    ("shutdown_grace", "\"10s\""),
    ("redis.shards", "8"),
    ("http.listen", "\"127.0.0.1:0\""),
    ("metrics.listen", "\"127.0.0.1:0\""),
    // Readers still get an answer on a machine that is busy with other tests.
    ("counters.read_timeout", "\"5s\""),
    // Tests of notifications or rules enable these pipelines.
    ("pipelines.automations.enabled", "false"),
    ("pipelines.notifications.enabled", "false"),
];

const PIPELINE: &[(&str, &str)] = &[
    ("handler", "\"recorder\""),
    ("events", "[\"*\"]"),
    ("start", "\"earliest\""),
    ("lease_ttl", "\"3s\""),
    ("handler_timeout", "\"5s\""),
    ("workers.max", "16"),
    ("backoff", "{ initial = \"5ms\", max = \"50ms\", jitter = 0.2 }"),
];

/// A configuration in TOML: one pipeline for all events on the bus, changed by `settings`, whose
/// values are TOML too. All instances of a process share its metrics. A test that reads them needs
/// a pipeline name that no other test uses.
pub(crate) fn config(
    server: &impl RedisBackend,
    pipeline: &str,
    settings: &[(&str, &str)],
) -> String {
    configs(server, &[pipeline], settings)
}

/// The same with several pipelines.
pub(crate) fn configs(
    server: &impl RedisBackend,
    pipelines: &[&str],
    settings: &[(&str, &str)],
) -> String {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    all.insert("redis.url".to_owned(), format!("{:?}", server.url()));
    let mut put = |key: String, value: &str| drop(all.insert(key, value.to_owned()));
    for (key, value) in DEFAULTS {
        put((*key).to_owned(), value);
    }
    for pipeline in pipelines {
        for (key, value) in PIPELINE {
            put(format!("pipelines.{pipeline}.{key}"), value);
        }
    }
    for (key, value) in settings {
        put((*key).to_owned(), value);
    }
    all.iter().fold(String::new(), |mut text, (key, value)| {
        writeln!(text, "{key} = {value}").unwrap();
        text
    })
}
