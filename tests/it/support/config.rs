//! The configuration of instances under test.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::redis::RedisBackend;

/// The bus stream, unless a test says otherwise.
pub(crate) const STREAM: &str = "fairlane:events";
/// How many shards the data has.
pub(crate) const SHARDS: u16 = 8;

const DEFAULTS: &[(&str, &str)] = &[
    ("shutdown_grace", "\"10s\""),
    ("redis.shards", "8"),
    ("http.listen", "\"127.0.0.1:0\""),
    ("metrics.listen", "\"127.0.0.1:0\""),
    // A machine that is busy with other tests answers readers all the same.
    ("counters.read_timeout", "\"5s\""),
    // Those that are about notifications or rules switch them on.
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

/// TOML: one pipeline for everything on the bus, changed by `settings`, whose values are TOML too.
/// Metrics are shared by all instances of a process: a test that looks at them from within needs
/// a pipeline name of its own.
pub(crate) fn config(
    server: &impl RedisBackend,
    pipeline: &str,
    settings: &[(&str, &str)],
) -> String {
    configs(server, &[pipeline], settings)
}

/// The same for several pipelines.
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
