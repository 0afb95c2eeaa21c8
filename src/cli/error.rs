//! The errors of a command.

use std::io;
use std::path::PathBuf;

use super::exit::Exit;
use super::remedy::{explain, of_start};
use crate::app::AppError;
use crate::config::ConfigError;
use crate::formats::TooNew;
use crate::id::{LetterId, Offset, PipelineName};
use crate::pipeline::Protected;
use crate::queue::SET_MAX;
use crate::redis::RedisError;
use crate::redis::private::{PrivateRedisError, log_of};
use crate::replay::ReplayRefused;
use crate::sandbox::SandboxError;
use crate::telemetry::TelemetryError;

/// Why a command failed. Each text is complete: it names the problem and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The configuration cannot be loaded.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Logging cannot be set up.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The private Redis cannot be started or stopped.
    #[error(transparent)]
    Private(#[from] PrivateRedisError),
    /// Redis is unavailable, or refuses the command for a while.
    #[error("{}; {}", .0, explain(.0).1)]
    Away(#[source] RedisError),
    /// The private Redis does not answer.
    #[error("the private Redis under {} does not answer within {seconds} s: it hangs, loads its data, or starts; its log is {}", dir.display(), log_of(dir).display())]
    PrivateSilent {
        /// `data_dir`.
        dir: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// Redis does not answer.
    #[error("{0}; to see why: fairlane check")]
    NoAnswer(String),
    /// Redis refused or failed a command.
    #[error(transparent)]
    Store(RedisError),
    /// A bus that is not in Redis failed.
    #[error("{0}; correct bus.sources, or start that server")]
    Bus(String),
    /// Positions moved while they were changed.
    #[error("the positions of pipeline {pipeline} moved meanwhile; retry")]
    Moving {
        /// The pipeline.
        pipeline: PipelineName,
    },
    /// No bus has this stream or partition.
    #[error("no bus of the configuration has {log}; fairlane bus list shows what they have")]
    UnknownLog {
        /// Its name.
        log: String,
    },
    /// An offset beyond the last entry.
    #[error("{log} ends at {last}: entries up to {to} do not exist yet, and would be lost")]
    BeyondEnd {
        /// The stream or partition.
        log: String,
        /// Its last entry.
        last: Offset,
        /// The offset.
        to: Offset,
    },
    /// An event was not found.
    #[error(
        "Fairlane knows nothing of this event; check its id, or add --bot BOT to search the queues of that bot"
    )]
    NoEvent,
    /// The notification does not exist.
    #[error("there is no such notification; it is kept for up to 7 days after its end")]
    NoNotification,
    /// The notification cannot be changed any more.
    #[error("the notification is {0}; only a scheduled or waiting one can be changed")]
    NotificationOver(crate::notifications::record::State),
    /// The settings of single bots are bounded.
    #[error(
        "the shard of this bot has settings for {SET_MAX} bots, the maximum; set those of another bot back first: fairlane bots set BOT --weight 1 --rate default --burst default"
    )]
    TooManySet,
    /// The Redis client cannot use the address.
    #[error("redis.url is not usable; write redis://[USER:PASSWORD@]HOST[:PORT][/DB]")]
    Address,
    /// The data in Redis was created with another number of shards.
    #[error(
        "redis.shards is {configured}, but the data in this Redis was created with {stored} shards, which cannot be changed; set redis.shards = {stored}"
    )]
    Shards {
        /// The number in the configuration.
        configured: u16,
        /// The number in Redis.
        stored: u16,
    },
    /// The data has a later format.
    #[error(transparent)]
    TooNew(#[from] TooNew),
    /// The pipeline is neither in the configuration nor in Redis.
    #[error(
        "there is no pipeline {name:?}, neither in the configuration nor in Redis; {}",
        known_text(known)
    )]
    UnknownPipeline {
        /// The requested name.
        name: PipelineName,
        /// The known pipelines.
        known: Vec<PipelineName>,
    },
    /// `--pipeline` is missing, and there are several pipelines.
    #[error("there are several pipelines; say which with --pipeline: {}", list(known))]
    WhichPipeline {
        /// The known pipelines.
        known: Vec<PipelineName>,
    },
    /// No pipeline exists.
    #[error(
        "there is no pipeline yet; add a section [pipelines.NAME] to the configuration (`fairlane config` prints one)"
    )]
    NoPipeline,
    /// Of no chosen pipeline are attempts kept.
    #[error(
        "nothing can be shown: {} keep no attempts; set history.slices above 0 there and reload every process",
        list(.0)
    )]
    NoHistory(Vec<PipelineName>),
    /// Standard output is no terminal.
    #[error(
        "`fairlane top` needs a terminal; `fairlane status` prints the same once, and `fairlane status --json` prints it for scripts"
    )]
    NoTerminal,
    /// The terminal cannot be used.
    #[error("the terminal cannot be used: {0}")]
    Terminal(#[source] io::Error),
    /// A page or a script cannot be written.
    #[error("{name}: cannot be written: {source}")]
    NotWritten {
        /// The file or directory.
        name: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// An enabled pipeline cannot be dropped.
    #[error(
        "pipeline {0} is enabled: set `enabled = false` in [pipelines.{0}] and reload every process, then drop it"
    )]
    StillEnabled(PipelineName),
    /// A pipeline that a process runs cannot be dropped.
    #[error(
        "process {process} runs pipeline {pipeline}: remove [pipelines.{pipeline}] from the configuration of that process and reload the process, then drop the pipeline; a process that was killed counts as running for 16 s"
    )]
    StillRuns {
        /// The name of the pipeline.
        pipeline: PipelineName,
        /// The machine and process id.
        process: String,
    },
    /// The receiver cannot accept connections.
    #[error("the receiver cannot accept any more: {0}")]
    Receiver(#[source] io::Error),
    /// `callbacks.secrets` is empty.
    #[error(
        "callbacks.secrets is empty, so calls are not signed; add one: `echo whsec_$(openssl rand -base64 32)`"
    )]
    NoSecret,
    /// These events are protected and were not deleted.
    #[error(transparent)]
    Purge(#[from] Protected),
    /// The replay is refused.
    #[error("{0}")]
    Replay(#[from] ReplayRefused),
    /// A replay stopped early.
    #[error(
        "{source}; {put} events were put before that; to go on: fairlane replay --continue {id}"
    )]
    ReplayStopped {
        /// The cause.
        #[source]
        source: Box<CliError>,
        /// The id of the replay.
        id: String,
        /// The number of events that were put.
        put: u64,
    },
    /// The queues of some bots are full.
    #[error(
        "the queues of some bots are full; when they have room: fairlane replay --continue {0}"
    )]
    ReplayHeld(String),
    /// The command needs a confirmation and got none.
    #[error("nothing was done: {0} needs a confirmation; answer y on a terminal, or add --yes")]
    NotConfirmed(&'static str),
    /// The dead letter does not exist.
    #[error(
        "there is no dead letter {id} in pipeline {pipeline}; `fairlane dead list --pipeline {pipeline}` lists the existing ones"
    )]
    NoDeadLetter {
        /// The name of the pipeline.
        pipeline: PipelineName,
        /// The id of the dead letter.
        id: LetterId,
    },
    /// The dead letter names a notification without a record: nothing would be sent.
    #[error(
        "dead letter {1} cannot be redriven, because its notification is gone; `fairlane dead drop --pipeline {0} {1}` deletes the letter"
    )]
    NotificationGone(PipelineName, LetterId),
    /// An action on many dead letters stopped early.
    #[error("{done}, then stopped: {source}; repeating the command is safe")]
    LettersStopped {
        /// The cause.
        #[source]
        source: Box<CliError>,
        /// What was done before that, such as "deleted at least 3 dead letters".
        done: String,
    },
    /// The input cannot be opened.
    #[error("{name}: cannot be opened: {source}")]
    InputMissing {
        /// The file.
        name: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// No Redis stream is configured to publish to.
    #[error(
        "`fairlane {command}` publishes to Redis streams, and bus.publish names none; name one with --stream"
    )]
    NoStream {
        /// The command.
        command: &'static str,
    },
    /// The input failed while it was read.
    #[error("{name}: cannot be read: {source}; {published} events were published before that")]
    Input {
        /// The file.
        name: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
        /// The number of events published before the failure.
        published: u64,
    },
    /// Some lines are not valid events.
    #[error(
        "{} not published; correct those lines and publish only them",
        refused_text(*.0)
    )]
    LinesRefused(u64),
    /// Some lines are not valid counters.
    #[error("{} cannot be used, and nothing was imported; correct the file", lines_text(*.0))]
    ImportRefused(u64),
    /// A file changed or failed while it was imported.
    #[error("{name}: cannot be read: {source}; call it again, and it goes on where it ended")]
    ImportInput {
        /// The file.
        name: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// An import stopped early.
    #[error("{source}; {} imported, call it again to go on", lines_text(*imported))]
    ImportStopped {
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
        /// Whether the cause is temporary.
        passing: bool,
        /// The number of imported lines.
        imported: u64,
    },
    /// Publishing stopped early.
    #[error("{source}; {}{}{}", accepted_text(*published), up_to_text(*line), unknown_text(*unknown))]
    PublishStopped {
        /// The cause.
        #[source]
        source: Box<CliError>,
        /// The number of events that Redis confirmed.
        published: u64,
        /// The number of events without a confirmation: Redis may or may not have them.
        unknown: u64,
        /// Redis accepted every valid line up to this one; `None`: the events are of no file.
        line: Option<u64>,
    },
    /// `check` found a failure.
    #[error("{failed} of the checks failed")]
    Findings {
        /// The number of failed checks.
        failed: usize,
        /// The exit code.
        exit: Exit,
    },
    /// Standard output cannot be written.
    #[error("standard output cannot be written: {0}")]
    Output(#[source] io::Error),
    /// The answer cannot be serialised as JSON.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// The operating system refuses signal handlers.
    #[error("signals cannot be listened for: {0}")]
    Signals(#[source] io::Error),
    /// The service failed to start or to stop.
    #[error("{}", of_start(.0))]
    App(#[from] AppError),
    /// A bench, the demo or the generator stopped early.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A bench or the demo found a lost or reordered event.
    #[error("{lost} events were lost and {reordered} handled out of order; please report this")]
    Faults {
        /// Events that were never handled.
        lost: u64,
        /// Events that were first handled before an earlier one.
        reordered: u64,
    },
}

impl CliError {
    /// Publishing stopped behind `published` events, at a batch of `batch` further ones.
    pub(super) fn publish_stopped(
        error: RedisError,
        published: u64,
        batch: u64,
        line: Option<u64>,
    ) -> Self {
        let unknown = if error.may_have_run() { batch } else { 0 };
        Self::PublishStopped { source: Box::new(error.into()), published, unknown, line }
    }
}

impl From<RedisError> for CliError {
    fn from(error: RedisError) -> Self {
        if error.is_passing() { Self::Away(error) } else { Self::Store(error) }
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

fn up_to_text(line: Option<u64>) -> String {
    line.map_or_else(String::new, |line| format!(" (up to line {line})"))
}

fn unknown_text(unknown: u64) -> String {
    match unknown {
        0 => String::new(),
        n => format!("; whether the next {n} were is unknown"),
    }
}
