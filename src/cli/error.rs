//! What a command can fail with, and the exit code that says so to scripts.

use std::io;
use std::path::PathBuf;

use crate::app::AppError;
use crate::bench::BenchError;
use crate::config::{ConfigError, MongoUrlError};
use crate::id::{LetterId, PipelineName};
use crate::keyspace::StoreError;
use crate::keyspace::private::PrivateRedisError;
use crate::pipeline::Protected;
use crate::store::mongo::MongoError;
use crate::telemetry::TelemetryError;

/// The exit codes, after `sysexits.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// All is good.
    Good = 0,
    /// The command failed.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 64,
    /// A service that is needed does not answer.
    Unavailable = 69,
}

/// Why a command failed. The text is complete: what is wrong and what helps.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Logging.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The chart of a bench.
    #[error("cannot write the chart to {}: {source}", path.display())]
    WriteChart {
        /// Where to.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The server of a bench.
    #[error("the server of the bench ended with a panic, see above")]
    BenchServer,
    /// The private Redis.
    #[error(transparent)]
    Private(#[from] PrivateRedisError),
    /// Redis cannot be reached.
    #[error("{0}; start that Redis, or correct redis.url (FAIRLANE__REDIS__URL)")]
    Away(#[source] StoreError),
    /// Redis has no memory left.
    #[error("{0}; raise its maxmemory, or let `fairlane serve` drain the queues")]
    Full(#[source] StoreError),
    /// Redis did not do what it was asked.
    #[error(transparent)]
    Store(StoreError),
    /// The client cannot use the address.
    #[error("redis.url is not usable; write redis://[USER:PASSWORD@]HOST[:PORT][/DB]")]
    Address,
    /// The data has another number of shards.
    #[error(
        "redis.shards is {configured}, but the data in this Redis was created with {stored} shards, which cannot be changed; set redis.shards = {stored}"
    )]
    Shards {
        /// What the configuration says.
        configured: u16,
        /// What the data was created with.
        stored: u16,
    },
    /// Nobody has heard of that pipeline.
    #[error(
        "there is no pipeline {name:?}, neither in the configuration nor in Redis; {}",
        known_text(known)
    )]
    UnknownPipeline {
        /// What was asked for.
        name: PipelineName,
        /// What there is.
        known: Vec<PipelineName>,
    },
    /// More than one pipeline could be meant.
    #[error("there are several pipelines; say which with --pipeline: {}", list(known))]
    WhichPipeline {
        /// What there is.
        known: Vec<PipelineName>,
    },
    /// There is no pipeline at all.
    #[error(
        "there is no pipeline yet; add a section [pipelines.NAME] to the configuration (`fairlane config` prints one)"
    )]
    NoPipeline,
    /// A pipeline that runs is not dropped.
    #[error(
        "pipeline {0} is enabled: set `enabled = false` in [pipelines.{0}] and restart every `fairlane serve`, then drop it"
    )]
    StillEnabled(PipelineName),
    /// The receiver cannot go on.
    #[error("the receiver cannot accept any more: {0}")]
    Receiver(#[source] io::Error),
    /// There is no secret.
    #[error(
        "callbacks.secrets is empty, so calls are not signed; add one: `echo whsec_$(openssl rand -base64 32)`"
    )]
    NoSecret,
    /// These events are not deleted.
    #[error(transparent)]
    Purge(#[from] Protected),
    /// Nobody said yes.
    #[error("nothing was done: {0} needs a confirmation; answer y on a terminal, or add --yes")]
    NotConfirmed(&'static str),
    /// No such dead letter.
    #[error(
        "there is no dead letter {id} in pipeline {pipeline}; `fairlane dead list --pipeline {pipeline}` shows those there are"
    )]
    NoDeadLetter {
        /// The pipeline.
        pipeline: PipelineName,
        /// The letter.
        id: LetterId,
    },
    /// There is no input.
    #[error("{name}: cannot be opened: {source}")]
    InputMissing {
        /// The file.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is no stream to publish to.
    #[error("the stream has no name; name one with --stream or in bus.streams")]
    NoStream,
    /// The input ended badly.
    #[error("{name}: cannot be read: {source}; {published} events were published before that")]
    Input {
        /// The file.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
        /// How far it went.
        published: u64,
    },
    /// Some lines are no events.
    #[error(
        "{} not published; correct what is wrong there and publish that alone",
        refused_text(*.0)
    )]
    LinesRefused(u64),
    /// Some lines are no counters.
    #[error("{} cannot be used, and nothing was imported; correct the file", lines_text(*.0))]
    ImportRefused(u64),
    /// A file changed or broke off while it was imported.
    #[error("{name}: cannot be read: {source}; call it again, and it goes on where it ended")]
    ImportInput {
        /// The file.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An import ended early.
    #[error("{source}; {} imported, call it again to go on", lines_text(*imported))]
    ImportStopped {
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
        /// Whether it passes by itself.
        passing: bool,
        /// Lines.
        imported: u64,
    },
    /// Publishing ended early.
    #[error("{source}; {} (up to line {line}){}", accepted_text(*published), unknown_text(*unknown))]
    PublishStopped {
        /// Why.
        #[source]
        source: Box<CliError>,
        /// Events that Redis certainly has.
        published: u64,
        /// Events of which that is unknown.
        unknown: u64,
        /// Every good line up to this one was accepted.
        line: u64,
    },
    /// `check` found something.
    #[error("{failed} of the checks failed")]
    Findings {
        /// How many.
        failed: usize,
        /// What scripts are told.
        exit: Exit,
    },
    /// Standard output cannot be written.
    #[error("standard output cannot be written: {0}")]
    Output(#[source] io::Error),
    /// A value cannot be shown as JSON.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// The operating system.
    #[error("signals cannot be listened for: {0}")]
    Signals(#[source] io::Error),
    /// The service cannot start or stop.
    #[error(transparent)]
    App(#[from] AppError),
    /// A bench or the demo broke off.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// An address of MongoDB on the command line.
    #[error("--mongodb {0}")]
    MongoUrl(#[from] MongoUrlError),
    /// A bench is to ask another machine.
    #[error(
        "{0} is not this machine, and whoever asks it meanwhile may be refused; if nobody needs it, add --remote"
    )]
    Remote(String),
    /// A bench is to last too long.
    #[error("--rates and --seconds make {seconds} s; ask for at most {most} s at once")]
    BenchTooLong {
        /// How long it would last.
        seconds: u64,
        /// The most.
        most: u64,
    },
    /// The token of a bench.
    #[error("--token-file {}: {problem}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A bench found a wrong count.
    #[error("{ads} ads do not have exactly the views that were acknowledged; please report this")]
    Inexact {
        /// How many.
        ads: u64,
    },
    /// A bench or the demo found a fault.
    #[error("{lost} events were lost and {reordered} handled out of order; please report this")]
    Faults {
        /// Never handled.
        lost: u64,
        /// First handled too early.
        reordered: u64,
    },
}

impl CliError {
    /// What scripts are told.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Config(_)
            | Self::Telemetry(_)
            | Self::Address
            | Self::MongoUrl(_)
            | Self::Shards { .. }
            | Self::UnknownPipeline { .. }
            | Self::WhichPipeline { .. }
            | Self::NoPipeline
            | Self::NotConfirmed(_)
            | Self::Purge(_)
            | Self::InputMissing { .. }
            | Self::NoStream
            | Self::NoSecret
            | Self::Remote(_)
            | Self::BenchTooLong { .. }
            | Self::TokenFile { .. }
            | Self::Private(
                PrivateRedisError::PathTooLong { .. } | PrivateRedisError::Directory { .. },
            ) => Exit::Usage,
            Self::Private(_)
            | Self::Away(_)
            | Self::Full(_)
            | Self::Store(StoreError::Version { .. })
            | Self::ImportStopped { passing: true, .. }
            | Self::Bench(
                BenchError::PrivateRedis(_)
                | BenchError::Store(_)
                | BenchError::PrivateMongo(_)
                | BenchError::Unreachable { .. }
                | BenchError::Mongo(_),
            ) => Exit::Unavailable,
            Self::App(error) | Self::Bench(BenchError::App(error)) => of_app(error),
            Self::PublishStopped { source, .. } => source.exit(),
            Self::Findings { exit, .. } => *exit,
            Self::Store(_)
            | Self::StillEnabled(_)
            | Self::NoDeadLetter { .. }
            | Self::Input { .. }
            | Self::LinesRefused(_)
            | Self::ImportRefused(_)
            | Self::ImportInput { .. }
            | Self::ImportStopped { .. }
            | Self::Output(_)
            | Self::WriteChart { .. }
            | Self::BenchServer
            | Self::Receiver(_)
            | Self::Json(_)
            | Self::Signals(_)
            | Self::Faults { .. }
            | Self::Inexact { .. }
            | Self::Bench(_) => Exit::Failed,
        }
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        if error.is_full() {
            Self::Full(error)
        } else if error.is_passing() {
            Self::Away(error)
        } else {
            Self::Store(error)
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
        | AppError::Route { .. }
        | AppError::Outbound(_)
        | AppError::SigningKey { .. } => Exit::Failed,
        AppError::Config(_)
        | AppError::Files { .. }
        | AppError::Handler { .. }
        | AppError::PushUrl { .. }
        | AppError::Filter { .. }
        | AppError::Shards { .. }
        | AppError::StreamShared { .. }
        | AppError::Auth(_)
        | AppError::Headers(_)
        | AppError::Mongo(_)
        | AppError::RedisUrl(_) => Exit::Usage,
    }
}

fn list(names: &[PipelineName]) -> String {
    names.iter().map(PipelineName::as_str).collect::<Vec<_>>().join(", ")
}

fn known_text(known: &[PipelineName]) -> String {
    if known.is_empty() {
        "there is none yet".to_owned()
    } else {
        format!("there is: {}", list(known))
    }
}

fn lines_text(lines: u64) -> String {
    super::output::count(lines, "line")
}

fn refused_text(lines: u64) -> String {
    match lines {
        1 => "1 line is no event and was".to_owned(),
        n => format!("{n} lines are no events and were"),
    }
}

fn accepted_text(published: u64) -> String {
    match published {
        0 => "no event was accepted".to_owned(),
        1 => "1 event was accepted".to_owned(),
        n => format!("{n} events were accepted"),
    }
}

fn unknown_text(unknown: u64) -> String {
    match unknown {
        0 => String::new(),
        n => format!("; whether the next {n} were is unknown"),
    }
}
