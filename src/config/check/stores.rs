//! `[redis]` and `[mongodb]`.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::Fault;
use crate::config::certificates::{self, Unusable};
use crate::config::{Config, RedisUrl};

/// The bounds of `redis.wait_timeout`.
const WAIT_TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(10);
const DATABASE_MAX_BYTES: usize = 63;
/// Characters that MongoDB forbids in a database name, on any of its platforms.
const DATABASE_FORBIDDEN: &[char] = &['/', '\\', '.', ' ', '"', '$', '*', '<', '>', ':', '|', '?'];
/// MongoDB's own databases.
const DATABASE_TAKEN: [&str; 3] = ["admin", "config", "local"];

impl Config {
    pub(super) fn check_stores(&self) -> Result<(), Fault> {
        self.check_certificates()?;
        self.check_replicas()?;
        database("mongodb.database", &self.mongodb.database)
    }

    fn check_replicas(&self) -> Result<(), Fault> {
        let redis = &self.redis;
        if redis.wait_replicas > 0 && redis.url.is_none() {
            let problem = "is set, but redis.url is empty, and a private Redis has no replicas; \
                           set redis.url, or leave it out";
            return Err(Fault::new("redis.wait_replicas", problem).or("redis.url"));
        }
        if !WAIT_TIMEOUT.contains(&redis.wait_timeout) {
            let problem = format!("is {:?}; write 10ms to 10s", redis.wait_timeout);
            return Err(Fault::new("redis.wait_timeout", problem));
        }
        Ok(())
    }

    /// Checks that the certificate files can be read, and that TLS is in use.
    fn check_certificates(&self) -> Result<(), Fault> {
        let redis = &self.redis;
        let named = [
            ("redis.ca_file", &redis.ca_file),
            ("redis.cert_file", &redis.cert_file),
            ("redis.key_file", &redis.key_file),
        ];
        let named = named.into_iter().find(|(_, path)| path.is_some());
        if let Some((key, _)) = named
            && !redis.url.as_ref().is_some_and(RedisUrl::is_tls)
        {
            let problem = "is set, but redis.url does not ask for TLS; write rediss://…, rediss+cluster://… \
                           or rediss+sentinel://… there, or leave it out";
            return Err(Fault::new(key, problem).or("redis.url"));
        }
        match certificates::read(redis) {
            Ok(_) => Ok(()),
            // The unset key of the pair has no location.
            Err(Unusable { key, problem }) => {
                Err(Fault::new(key, problem).or("redis.cert_file").or("redis.key_file"))
            }
        }
    }
}

fn database(key: &str, name: &str) -> Result<(), Fault> {
    let forbidden = |c: char| c.is_control() || DATABASE_FORBIDDEN.contains(&c);
    if name.is_empty() || name.len() > DATABASE_MAX_BYTES || name.contains(forbidden) {
        let problem = format!(
            "is {name:?}; write 1 to {DATABASE_MAX_BYTES} bytes without spaces and without {}",
            DATABASE_FORBIDDEN.iter().filter(|c| **c != ' ').collect::<String>(),
        );
        return Err(Fault::new(key, problem));
    }
    if DATABASE_TAKEN.iter().any(|taken| name.eq_ignore_ascii_case(taken)) {
        let problem = format!("is {name:?}, which belongs to MongoDB itself; choose another name");
        return Err(Fault::new(key, problem));
    }
    Ok(())
}
