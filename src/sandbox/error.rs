//! The errors of a run on private servers. Such a run has no settings, so the remedies name none.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::app::AppError;
use crate::event::EventError;
use crate::id::IdError;
use crate::private::Unusable;
use crate::redis::RedisError;
use crate::redis::private::PrivateRedisError;

/// Why a run on private servers failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each is the error of the stage of that name")]
pub enum SandboxError {
    #[error(transparent)]
    App(#[from] AppError),
    #[error("{}", without_settings(.0))]
    PrivateRedis(#[from] PrivateRedisError),
    #[error(transparent)]
    Store(#[from] RedisError),
    #[error(transparent)]
    Event(#[from] EventError),
    #[error(transparent)]
    Id(#[from] IdError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{}: cannot be removed: {source}; remove this directory", path.display())]
    NotRemoved { path: PathBuf, source: io::Error },
    #[error("signals cannot be listened for: {0}")]
    Signals(#[source] io::Error),
    #[error("the private Redis has an unusable address: {0}")]
    Address(#[from] redis::RedisError),
    #[error("nothing moved for {0:?}: {1}")]
    Stuck(Duration, String),
    #[error("interrupted")]
    Interrupted,
}

impl From<Unusable> for SandboxError {
    fn from(directory: Unusable) -> Self {
        Self::PrivateRedis(directory.into())
    }
}

/// The text of the error with a remedy that helps here: `TMPDIR` decides where the files are, and no
/// other Redis can be used.
fn without_settings(error: &PrivateRedisError) -> String {
    match error {
        PrivateRedisError::Directory { path, source } => format!(
            "{}: not usable for a private Redis: {source}; set TMPDIR to another directory",
            path.display()
        ),
        PrivateRedisError::PathTooLong { path, bytes } => format!(
            "{}: this path of {bytes} bytes is too long for a unix socket; set TMPDIR to a shorter one",
            path.display()
        ),
        PrivateRedisError::Program { program, source } => format!(
            "{} cannot be run: {source}; install the package redis-server (7.0 or newer)",
            program.display()
        ),
        PrivateRedisError::Version { program, found } => format!(
            "{} is {found}; install the package redis-server in version 7.0 or newer",
            program.display()
        ),
        // Its log is removed.
        PrivateRedisError::Silent { within, .. } => format!(
            "the private Redis did not answer within {within:?}; try again when this machine is less busy"
        ),
        PrivateRedisError::Ended { .. } | PrivateRedisError::Command { .. } => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_remedy_names_a_setting_or_a_file_that_is_removed() {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let program = || "redis-server".into();
        let errors = [
            PrivateRedisError::Directory { path: "/full/fl-1".into(), source: missing() },
            PrivateRedisError::PathTooLong { path: "/long".into(), bytes: 120 },
            PrivateRedisError::Program { program: program(), source: missing() },
            PrivateRedisError::Version { program: program(), found: "version 6.2.14".to_owned() },
            PrivateRedisError::Silent {
                socket: "/tmp/fl-1/redis/redis.sock".into(),
                within: Duration::from_secs(60),
                source: None,
            },
        ];
        let told = errors.map(|error| SandboxError::from(error).to_string());
        for text in &told {
            let misleads =
                ["redis.url", "data_dir", "redis.log"].iter().any(|word| text.contains(word));
            assert!(!misleads, "{text}");
        }
        assert!(told[0].ends_with("; set TMPDIR to another directory"), "{}", told[0]);
        assert!(
            told[2].ends_with("; install the package redis-server (7.0 or newer)"),
            "{}",
            told[2]
        );
    }

    #[test]
    fn a_directory_that_stays_is_no_reason_to_choose_another() {
        let source = io::Error::from(io::ErrorKind::PermissionDenied);
        let told = SandboxError::NotRemoved { path: "/tmp/fl-1".into(), source }.to_string();
        assert_eq!(told, "/tmp/fl-1: cannot be removed: permission denied; remove this directory");
    }
}
