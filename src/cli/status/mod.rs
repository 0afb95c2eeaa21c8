//! `fairlane status`.

mod problems;
mod read;
mod screen;
#[cfg(test)]
mod tests;

use clap::Args;
use serde::Serialize;

use self::problems::Problem;
use self::read::read;
pub(super) use self::read::read_pipelines;
pub(super) use self::screen::pipeline_table;
use self::screen::screen;
use super::error::CliError;
use super::output::Output;
use super::session::Session;
use crate::config::Config;
use crate::id::PipelineName;
use crate::presence::{Pace, Process};
use crate::queue::{Failing, PipelineView, Throttled};
use crate::redis::{ServerInfo, StreamView};

const EXAMPLES: &str = "\
Examples:
  fairlane status
  fairlane status --json | jq '.problems[].remedy'
  watch -n 2 fairlane status";

/// Arguments of `fairlane status`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct StatusArgs {
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

/// The complete report.
#[derive(Debug, Serialize)]
struct Status {
    redis: RedisStatus,
    streams: Vec<StreamView>,
    /// Bus entries that could not be read.
    invalid: u64,
    #[serde(skip)]
    invalid_stream: String,
    processes: Vec<Process>,
    pipelines: Vec<PipelineStatus>,
    problems: Vec<Problem>,
}

#[derive(Debug, Serialize)]
struct RedisStatus {
    target: String,
    #[serde(flatten)]
    info: ServerInfo,
}

/// A pipeline with its name.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PipelineStatus {
    pub(super) name: PipelineName,
    pub(super) state: PipelineState,
    #[serde(flatten)]
    pub(super) view: PipelineView,
    /// Bots whose calls all fail, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failing: Option<Failing>,
    /// The bots that their rate holds back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) throttled: Option<Throttled>,
    /// Workers of all processes.
    #[serde(flatten)]
    pub(super) pace: Pace,
}

/// The state of a pipeline by configuration and operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PipelineState {
    Enabled,
    /// Paused by an operator.
    Paused,
    /// `enabled = false`.
    Disabled,
    /// Present in Redis, absent from the configuration.
    Unconfigured,
}

impl PipelineState {
    fn text(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Paused => "paused",
            Self::Disabled => "disabled",
            Self::Unconfigured => "unconfigured",
        }
    }
}

/// Shows the complete status on one screen.
pub(super) async fn status(config: Config, args: &StatusArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    Session::with(config, async |session| {
        let status = read(session).await?;
        output.show(&status, |status| screen(output, status))
    })
    .await
}
