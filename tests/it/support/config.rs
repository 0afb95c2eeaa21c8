//! The configuration of instances under test.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::redis::RedisServer;

/// The bus stream, unless a test says otherwise.
pub(crate) const STREAM: &str = "fairlane:events";
/// How many shards the data has.
pub(crate) const SHARDS: u16 = 8;

const DEFAULTS: &[(&str, &str)] = &[
    ("shutdown_grace", "\"10s\""),
    ("redis.shards", "8"),
    ("http.listen", "\"127.0.0.1:0\""),
    ("metrics.listen", "\"127.0.0.1:0\""),
    ("pipelines.test.handler", "\"recorder\""),
    ("pipelines.test.events", "[\"*\"]"),
    ("pipelines.test.start", "\"earliest\""),
    ("pipelines.test.lease_ttl", "\"3s\""),
    ("pipelines.test.handler_timeout", "\"5s\""),
    ("pipelines.test.workers.max", "16"),
    ("pipelines.test.backoff", "{ initial = \"5ms\", max = \"50ms\", jitter = 0.2 }"),
];

/// TOML: one pipeline `test` for everything on the bus, changed by `settings`, whose values are
/// TOML too.
pub(crate) fn config(server: &RedisServer, settings: &[(&str, &str)]) -> String {
    let url = format!("{:?}", server.url());
    let mut all: BTreeMap<&str, &str> = DEFAULTS.iter().copied().collect();
    all.insert("redis.url", &url);
    all.extend(settings.iter().copied());
    all.iter().fold(String::new(), |mut text, (key, value)| {
        writeln!(text, "{key} = {value}").unwrap();
        text
    })
}
