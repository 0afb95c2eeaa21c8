//! Why a bench failed, and why its command failed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fairlane::app::AppError;
use fairlane::bus::BusError;
use fairlane::cli::{CliError, Exit};
use fairlane::config::MongoUrlError;
use fairlane::event::EventError;
use fairlane::id::IdError;
use fairlane::mongo::client::MongoError;
use fairlane::mongo::private::PrivateMongoError;
use fairlane::notifications::AcceptError;
use fairlane::outbound::UrlError;
use fairlane::redis::RedisError;
use fairlane::sandbox::SandboxError;

/// Why a bench failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("a request of the bench failed: {0}")]
    Http(#[source] io::Error),
    #[error(transparent)]
    Notification(#[from] AcceptError),
    #[error(transparent)]
    PrivateMongo(#[from] PrivateMongoError),
    #[error(transparent)]
    Mongo(#[from] MongoError),
    #[error("MongoDB refuses the documents of the bench: {0}")]
    Documents(#[source] mongodb::error::Error),
    #[error("{url} cannot be reached: {why}; correct --url")]
    Unreachable { url: String, why: String },
    #[error("the route {route:?} {why}")]
    Route { route: String, why: String },
    #[error(
        "node cannot be run: {0}; run `make peers`, which installs it, or install Node.js 20 or later"
    )]
    NoNode(#[source] io::Error),
    #[error(
        "{}: {problem}; in a clone of the repository run `make peers`, or `npm ci` in benches/peers, and name that directory with --programs",
        directory.display()
    )]
    NoPackages { directory: PathBuf, problem: &'static str },
    #[error(
        "{} cannot be used: {problem}; install it and name it with {variable}, or name a server with --server; in a clone of the repository `make bench` does both",
        program.display()
    )]
    NoBusServer { program: PathBuf, variable: &'static str, problem: String },
    #[error(transparent)]
    Bus(#[from] BusError),
    #[error("the receiver of the bench has an unusable address: {0}")]
    Receiver(#[from] UrlError),
    #[error("the Redis cluster of the bench cannot be used: {0}")]
    Cluster(String),
    #[error("--state {}: {problem}", directory.display())]
    State { directory: PathBuf, problem: String },
    #[error("the campaign cannot go on: {0}")]
    Campaign(String),
    #[error(
        "--only {kind} is impossible {}",
        if *cluster { "with --cluster: it needs one Redis behind a proxy" } else { "without --cluster" }
    )]
    Fault { kind: String, cluster: bool },
    #[error(
        "the events of the measurement are faulty: {lost} lost, {reordered} out of order; please report this"
    )]
    Faulty { lost: u64, reordered: u64 },
    #[error("the bench of {system} failed: {problem}")]
    Peer { system: &'static str, problem: String },
}

impl BenchError {
    /// Nothing moved for some time.
    pub(crate) fn stuck(patience: Duration, what: String) -> Self {
        SandboxError::Stuck(patience, what).into()
    }
}

/// Errors with the same meaning inside and outside the sandbox.
macro_rules! of_sandbox {
    ($($error:ty),+) => {
        $(impl From<$error> for BenchError {
            fn from(error: $error) -> Self {
                Self::Sandbox(error.into())
            }
        })+
    };
}

of_sandbox!(AppError, RedisError, EventError, IdError, io::Error, redis::RedisError);

/// Why a command failed. Each text is complete: it names the problem and the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// As in the commands of `fairlane`.
    #[error(transparent)]
    Cli(#[from] CliError),
    /// The bench stopped early.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The arguments of the service that `overload` starts.
    #[error(transparent)]
    Arguments(#[from] clap::Error),
    #[error("the runtime cannot be started: {0}")]
    Runtime(#[source] io::Error),
    #[error("cannot write the chart to {}: {source}", path.display())]
    WriteChart {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the server of the bench ended with a panic, see above")]
    Server,
    #[error("--mongodb {0}")]
    MongoUrl(#[from] MongoUrlError),
    #[error(
        "{0} is not this machine, and its other clients may be refused during the bench; if no client needs it now, add --remote"
    )]
    Remote(String),
    #[error("--rates and --seconds make {seconds} s; the maximum is {most} s per run")]
    TooLong { seconds: u64, most: u64 },
    #[error("--busy {busy} leaves no quiet tenant of --tenants {tenants}; write a smaller --busy")]
    NoQuietTenants { tenants: u32, busy: u32 },
    #[error(
        "--bus nats and --bus kafka are measured with --handler check only; leave one of the two out"
    )]
    BusNeedsCheck,
    #[error("the load is not complete: write both --events-per-second and --bots, or --check")]
    NoLoad,
    #[error(
        "--primaries {primaries} is more than --shards {shards}: a shard is on one primary; write a larger --shards, as in redis.shards"
    )]
    FewShards { primaries: u32, shards: u32 },
    #[error(
        "--rule-events-per-second {rules} is more than --events-per-second {all}: the former is a part of the latter; correct one of them"
    )]
    ManyRuleEvents { rules: f64, all: f64 },
    #[error(
        "--primaries {primaries} with --shards {shards} does not suffice for this load; the last line above says what does"
    )]
    FewPrimaries { primaries: u32, shards: u32 },
    #[error(
        "the model deviates from {0} measured figures by more than 20 %; run it again on a machine with less to do, and if it still does, plan with the measured figures"
    )]
    ModelDeviates(usize),
    #[error("--token-file {}: {problem}", path.display())]
    TokenFile { path: PathBuf, problem: String },
    #[error("a hostile bot reaches the quiet ones through {0}; the table above has the figures")]
    NotIsolated(String),
    #[error("{0}; the table above has the bounds")]
    LimitsMissed(String),
    #[error("{0} promises did not hold under the faults of seed {1}; please report this")]
    PromisesBroken(usize, u64),
    #[error("the soak found {0} faults; please report this")]
    SoakFailed(usize),
    #[error("{ads} ads do not have exactly the views that were acknowledged; please report this")]
    Inexact { ads: u64 },
}

impl CommandError {
    /// The exit code for scripts.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Cli(error) => error.exit(),
            Self::Bench(BenchError::Sandbox(error)) => error.into(),
            Self::Arguments(_)
            | Self::MongoUrl(_)
            | Self::Remote(_)
            | Self::TooLong { .. }
            | Self::NoQuietTenants { .. }
            | Self::BusNeedsCheck
            | Self::NoLoad
            | Self::FewShards { .. }
            | Self::ManyRuleEvents { .. }
            | Self::TokenFile { .. }
            | Self::Bench(BenchError::Fault { .. } | BenchError::State { .. }) => Exit::Usage,
            Self::Bench(
                BenchError::PrivateMongo(_)
                | BenchError::Mongo(_)
                | BenchError::Unreachable { .. }
                | BenchError::NoNode(_)
                | BenchError::NoBusServer { .. }
                | BenchError::Bus(_)
                | BenchError::NoPackages { .. },
            ) => Exit::Unavailable,
            Self::Bench(_)
            | Self::Runtime(_)
            | Self::WriteChart { .. }
            | Self::Server
            | Self::NotIsolated(_)
            | Self::LimitsMissed(_)
            | Self::PromisesBroken(..)
            | Self::SoakFailed(_)
            | Self::FewPrimaries { .. }
            | Self::ModelDeviates(_)
            | Self::Inexact { .. } => Exit::Failed,
        }
    }
}
