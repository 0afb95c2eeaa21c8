//! The errors of a call to Redis, and their meaning for the caller.

use redis::Value;

use super::replicas::Unconfirmed;
use super::reply::ReplyError;
use crate::breaker::Away;
use crate::quotas::QuotaExceeded;

/// Why a call has no valid answer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RedisError {
    /// No connection; nothing was sent.
    #[error("cannot connect to Redis at {target}: {source}")]
    Connect {
        /// The address, without credentials.
        target: String,
        /// The error of the client.
        #[source]
        source: redis::RedisError,
    },
    /// The connection broke, or the answer did not come in time: the command may or may not have
    /// run.
    #[error("no answer from Redis at {target}, the outcome is unknown: {source}")]
    Unknown {
        /// The address, without credentials.
        target: String,
        /// The error of the client.
        #[source]
        source: redis::RedisError,
    },
    /// The write is done, but it is not known that enough replicas have it
    /// (`redis.wait_replicas`): a failover may lose it.
    #[error(
        "a write is in Redis at {target}, but fewer than {wanted} replicas confirmed it: {reason}"
    )]
    Unreplicated {
        /// The address, without credentials.
        target: String,
        /// The number of replicas.
        wanted: u8,
        /// Why it is not known.
        #[source]
        reason: Unconfirmed,
    },
    /// The server refused the command; nothing was changed.
    #[error("Redis at {target} refused `{command}`: {message}")]
    Refused {
        /// The address, without credentials.
        target: String,
        /// The name of the script or command.
        command: &'static str,
        /// The message of the server.
        message: String,
    },
    /// A call on every shard is done on some of them.
    #[error("it is done on some shards, and not on others: {0}")]
    Partly(#[source] Box<RedisError>),
    /// A script refused to add data, because the bot would exceed a quota; nothing was changed.
    #[error(transparent)]
    Quota(#[from] QuotaExceeded),
    /// The server is older than 7.0.
    #[error("Redis at {target} is version {version}; at least 7.0 is needed")]
    Version {
        /// The address, without credentials.
        target: String,
        /// The version of the server.
        version: String,
    },
    /// An answer with an unexpected structure.
    #[error("the answer to `{command}` is not understood: {source}")]
    Reply {
        /// The name of the script or command.
        command: &'static str,
        /// The expected structure.
        #[source]
        source: ReplyError,
    },
}

impl Away for RedisError {
    fn is_away(&self) -> bool {
        matches!(self, Self::Connect { .. })
    }

    fn has_answered(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Unknown { .. } => false,
            Self::Partly(source) => source.has_answered(),
            _ => true,
        }
    }
}

impl RedisError {
    /// Whether the server has no memory left (`maxmemory`).
    #[must_use]
    pub fn is_full(&self) -> bool {
        match self {
            Self::Refused { message, .. } => message.starts_with("OOM"),
            Self::Partly(source) => source.is_full(),
            _ => false,
        }
    }

    /// Whether the server refuses, because it cannot write to its disk.
    pub(crate) fn is_misconf(&self) -> bool {
        matches!(self, Self::Refused { message, .. } if message.starts_with("MISCONF"))
    }

    /// What became of a request that ended with a temporary error, for its answer.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => {
                "Redis did not answer in time, so it is unknown whether this was done; check the result, or retry"
            }
            Self::Unreplicated { .. } => {
                "this was done, but fewer replicas of Redis than redis.wait_replicas confirmed it, so a failover may lose it; retry with the same id or key"
            }
            _ => "nothing was done: Redis is unavailable; retry later",
        }
    }

    /// Whether the command may have run, so that it may be done although there is no result.
    #[must_use]
    pub fn may_have_run(&self) -> bool {
        matches!(self, Self::Unknown { .. } | Self::Unreplicated { .. } | Self::Partly(_))
    }

    /// Whether the error is temporary, so that a later retry can help.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Unknown { .. } | Self::Unreplicated { .. } => true,
            Self::Refused { message, .. } => {
                // NOREPLICAS: fewer replicas than min-replicas-to-write. The last four: a cluster
                // is migrating a slot or replacing a primary.
                const PASSING: [&str; 11] = [
                    "OOM",
                    "LOADING",
                    "BUSY",
                    "READONLY",
                    "MASTERDOWN",
                    "MISCONF",
                    "NOREPLICAS",
                    "MOVED",
                    "ASK ",
                    "TRYAGAIN",
                    "CLUSTERDOWN",
                ];
                PASSING.iter().any(|code| message.starts_with(code))
            }
            Self::Partly(source) => source.is_passing(),
            Self::Quota(_) | Self::Version { .. } | Self::Reply { .. } => false,
        }
    }
}

/// Whether the server did not know the script (`SCRIPT FLUSH`), so that it did not run.
pub(super) fn is_noscript(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.code() == "NOSCRIPT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_that_was_discarded_because_redis_is_full_is_a_full_redis() {
        let reply = b"-EXECABORT Transaction discarded because of: OOM command not allowed.\r\n";
        let value = redis::parse_redis_value(reply).unwrap();
        let Value::ServerError(error) = value else { panic!("{value:?}") };
        let refused = super::super::node::refused("here", "XADD", &error);
        assert!(refused.is_full() && refused.is_passing(), "{refused}");
        assert!(
            refused.to_string().ends_with("refused `XADD`: OOM command not allowed."),
            "{refused}"
        );
    }

    #[test]
    fn a_refusal_is_an_answer_and_a_broken_connection_is_none() {
        let target = || "here".to_owned();
        let source = || std::io::Error::from(std::io::ErrorKind::BrokenPipe).into();
        let message = "OOM".to_owned();
        let refused = RedisError::Refused { target: target(), command: "GET", message };
        let quota = QuotaExceeded { name: "queued_bytes", held: 2, limit: 1 };
        assert!(refused.has_answered() && RedisError::Quota(quota).has_answered());
        let unknown = RedisError::Unknown { target: target(), source: source() };
        assert!(!unknown.has_answered() && !unknown.is_away());
        let partly = RedisError::Partly(Box::new(unknown));
        assert!(!partly.has_answered());
        let away = RedisError::Connect { target: target(), source: source() };
        assert!(!away.has_answered() && away.is_away());
    }
}
