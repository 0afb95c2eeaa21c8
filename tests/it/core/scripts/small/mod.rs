//! The small scripts: their replies, and all that they store, at both sides of each bound.

mod arrived;
mod bus;
mod lists;
mod processes;
mod readers;

use std::collections::BTreeMap;

use redis::FromRedisValue;

use crate::support::redis::{Options, RedisServer};
use crate::support::script_harness::ScriptHarness;

/// A time with a part of a millisecond, which scripts leave out.
const NOW: i64 = 1_760_000_000_123_999;
const NOW_MS: u64 = 1_760_000_000_123;

/// A private server with all scripts.
struct Scripts {
    harness: ScriptHarness,
    _server: RedisServer,
}

impl Scripts {
    fn new() -> Self {
        let server = RedisServer::start(Options::default());
        Self { harness: ScriptHarness::new(&server), _server: server }
    }

    /// The reply of a script at a time.
    fn run_at<T: FromRedisValue>(
        &mut self,
        now_us: i64,
        name: &str,
        keys: &[&str],
        arguments: &[&str],
    ) -> T {
        let command = self.harness.raw(name, keys, arguments);
        let (reply, ..) = self.harness.run(now_us, command, &redis::pipe()).unwrap();
        T::from_redis_value(reply).unwrap()
    }

    fn run<T: FromRedisValue>(&mut self, name: &str, keys: &[&str], arguments: &[&str]) -> T {
        self.run_at(NOW, name, keys, arguments)
    }

    /// The reply to a command.
    fn ask<T: FromRedisValue>(&mut self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(self.harness.plain()).unwrap()
    }

    /// Stores nothing but these fields in a hash.
    fn store(&mut self, hash: &str, fields: &BTreeMap<String, String>) {
        self.ask::<()>(&["DEL", hash]);
        for (field, value) in fields {
            self.ask::<()>(&["HSET", hash, field, value]);
        }
    }

    fn fields(&mut self, hash: &str) -> BTreeMap<String, String> {
        self.ask(&["HGETALL", hash])
    }

    /// The ids of a stream, and the fields and values of each entry.
    fn entries(&mut self, stream: &str) -> Vec<(String, Vec<String>)> {
        self.ask(&["XRANGE", stream, "-", "+"])
    }

    /// Checks that a key lives for at most this time, and not for ever.
    fn check_lifetime(&mut self, key: &str, most_ms: i64) {
        let left: i64 = self.ask(&["PTTL", key]);
        assert!((1..=most_ms).contains(&left), "{key}: {left} ms");
    }
}

fn fields(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(field, value)| ((*field).to_owned(), (*value).to_owned())).collect()
}
