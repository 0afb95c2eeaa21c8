//! The stores: `[redis]` and `[mongodb]`.

use std::num::NonZeroU8;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::certificates;
use crate::config::{ConfigError, MongoUrl, Origin, RedisUrl};
use crate::id::{Prefix, ShardCount};
use crate::redis::ReplicaWait;

/// The Redis to use, and how its data is divided.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// `None`: a private server under [`Config::data_dir`](crate::config::Config::data_dir).
    pub url: Option<RedisUrl>,
    /// Certificates in PEM that TLS trusts in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// The client certificate in PEM, for a Redis that asks for one. Used with [`Self::key_file`].
    pub cert_file: Option<PathBuf>,
    /// The private key of that certificate, in PEM.
    pub key_file: Option<PathBuf>,
    /// The prefix of every key and channel.
    pub prefix: Prefix,
    /// The number of shards of each pipeline. Fixed when the data is created.
    pub shards: ShardCount,
    /// Number of replicas that must confirm a write before its result is used. 0 to 10; 0: none.
    pub wait_replicas: u8,
    /// Maximum wait for them. 10 ms to 10 s.
    pub wait_timeout: Duration,
}

impl RedisConfig {
    /// How to wait for replicas, if at all.
    #[must_use]
    pub fn wait(&self) -> Option<ReplicaWait> {
        let replicas = NonZeroU8::new(self.wait_replicas)?;
        Some(ReplicaWait { replicas, timeout: self.wait_timeout })
    }

    /// Reads the certificates that the settings name; `None` if they name none.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the setting whose file cannot be used.
    pub fn certificates(&self) -> Result<Option<redis::TlsCertificates>, ConfigError> {
        certificates::read(self).map_err(|unusable| ConfigError::Invalid {
            at: Origin::Code,
            key: unusable.key,
            problem: unusable.problem,
        })
    }
}

/// The MongoDB and the database to use.
#[derive(Debug, Clone)]
pub struct MongoConfig {
    /// `None`: a private server under [`Config::data_dir`](crate::config::Config::data_dir) beside
    /// a private Redis. Without its program, components that need MongoDB do not run; with data of an
    /// earlier start, the process does not start.
    pub url: Option<MongoUrl>,
    /// The database for all data: 1 to 63 bytes that MongoDB allows in a name, and none of its own
    /// databases.
    pub database: String,
    /// The program of a private server, from the environment variable `FAIRLANE_MONGOD`. `None`:
    /// the `mongod` in `PATH`.
    pub program: Option<PathBuf>,
}
