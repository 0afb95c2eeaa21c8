//! The exit codes that scripts read.

use super::error::CliError;
use crate::app::AppError;
use crate::mongo::client::MongoError;
use crate::redis::RedisError;
use crate::redis::private::PrivateRedisError;
use crate::sandbox::SandboxError;

/// The exit codes, after `sysexits.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// Success.
    Good = 0,
    /// The command failed.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 64,
    /// A service that Fairlane needs is unavailable.
    Unavailable = 69,
}

impl CliError {
    /// The exit code for scripts.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Config(_)
            | Self::Telemetry(_)
            | Self::Address
            | Self::Shards { .. }
            | Self::TooNew(_)
            | Self::UnknownPipeline { .. }
            | Self::UnknownLog { .. }
            | Self::BeyondEnd { .. }
            | Self::WhichPipeline { .. }
            | Self::NoPipeline
            | Self::NoHistory(_)
            | Self::NoTerminal
            | Self::NotWritten { .. }
            | Self::NotConfirmed(_)
            | Self::Purge(_)
            | Self::Replay(_)
            | Self::InputMissing { .. }
            | Self::NoStream { .. }
            | Self::NoSecret
            | Self::Private(
                PrivateRedisError::PathTooLong { .. } | PrivateRedisError::Directory { .. },
            ) => Exit::Usage,
            Self::Private(_)
            | Self::PrivateSilent { .. }
            | Self::Away(_)
            | Self::NoAnswer(_)
            | Self::Bus(_)
            | Self::Store(RedisError::Version { .. })
            | Self::ImportStopped { passing: true, .. } => Exit::Unavailable,
            Self::App(error) => of_app(error),
            Self::Sandbox(error) => error.into(),
            Self::PublishStopped { source, .. }
            | Self::ReplayStopped { source, .. }
            | Self::LettersStopped { source, .. } => source.exit(),
            Self::Findings { exit, .. } => *exit,
            Self::Store(_)
            | Self::StillEnabled(_)
            | Self::StillRuns { .. }
            | Self::NoDeadLetter { .. }
            | Self::NotificationGone(..)
            | Self::Input { .. }
            | Self::LinesRefused(_)
            | Self::ImportRefused(_)
            | Self::ImportInput { .. }
            | Self::ImportStopped { .. }
            | Self::Output(_)
            | Self::Terminal(_)
            | Self::Receiver(_)
            | Self::Json(_)
            | Self::Signals(_)
            | Self::TooManySet
            | Self::NoEvent
            | Self::Moving { .. }
            | Self::NoNotification
            | Self::NotificationOver(_)
            | Self::ReplayHeld(_)
            | Self::Faults { .. } => Exit::Failed,
        }
    }
}

impl From<&SandboxError> for Exit {
    fn from(error: &SandboxError) -> Self {
        match error {
            SandboxError::PrivateRedis(
                PrivateRedisError::PathTooLong { .. } | PrivateRedisError::Directory { .. },
            ) => Self::Usage,
            SandboxError::PrivateRedis(_) | SandboxError::Store(_) => Self::Unavailable,
            SandboxError::App(error) => of_app(error),
            _ => Self::Failed,
        }
    }
}

fn of_app(error: &AppError) -> Exit {
    match error {
        AppError::PrivateRedis(_)
        | AppError::PrivateMongo(_)
        | AppError::Full { .. }
        | AppError::Store(_)
        | AppError::Mongo(
            MongoError::Away { .. } | MongoError::Lookup { .. } | MongoError::Silent { .. },
        ) => Exit::Unavailable,
        AppError::Bind(_)
        | AppError::Observe(_)
        | AppError::Signals(_)
        | AppError::Route { .. }
        | AppError::Outbound(_)
        | AppError::SigningKey { .. }
        | AppError::Recorder(_)
        | AppError::Panicked => Exit::Failed,
        AppError::Config(_)
        | AppError::Bus { .. }
        | AppError::NoBus { .. }
        | AppError::Files { .. }
        | AppError::Handler { .. }
        | AppError::PushUrl { .. }
        | AppError::Filter { .. }
        | AppError::OrderBy { .. }
        | AppError::Shards { .. }
        | AppError::TooNew(_)
        | AppError::StreamShared { .. }
        | AppError::Auth(_)
        | AppError::Headers(_)
        | AppError::Tracing { .. }
        | AppError::Mongo(_)
        | AppError::RedisUrl(_) => Exit::Usage,
    }
}
