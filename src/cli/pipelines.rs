//! `fairlane pipelines`.

use std::io::{self, BufRead as _, IsTerminal as _};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::error::CliError;
use super::output::{Output, count};
use super::session::Session;
use super::status::{pipeline_table, read_pipelines};
use crate::clock::{Clock as _, SystemClock};
use crate::config::Config;
use crate::id::PipelineName;

const EXAMPLES: &str = "\
Examples:
  fairlane pipelines list
  fairlane pipelines pause billing
  fairlane pipelines resume billing
  fairlane pipelines drop old-billing --yes";
const LIST_EXAMPLES: &str = "\
Examples:
  fairlane pipelines list
  fairlane pipelines list --json | jq '.[] | select(.depth > 0) | .name'";
const PAUSE_EXAMPLES: &str = "\
Examples:
  fairlane pipelines pause billing     running slices end normally; new events are still queued";
const RESUME_EXAMPLES: &str = "\
Examples:
  fairlane pipelines resume billing";
const DROP_EXAMPLES: &str = "\
Examples:
  fairlane pipelines drop old-billing          asks first
  fairlane pipelines drop old-billing --yes

Deletes its queued and delayed events, dead letters and settings of bots. Refused while the
pipeline is enabled in the configuration.";

/// Arguments of `fairlane pipelines`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PipelinesArgs {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List every pipeline of the configuration and of Redis.
    #[command(after_help = LIST_EXAMPLES)]
    List,
    /// Pause a pipeline: stop handing out its events.
    #[command(after_help = PAUSE_EXAMPLES)]
    Pause {
        /// The pipeline.
        name: PipelineName,
    },
    /// Resume a paused pipeline.
    #[command(after_help = RESUME_EXAMPLES)]
    Resume {
        /// The pipeline.
        name: PipelineName,
    },
    /// Delete all data of a pipeline in Redis.
    #[command(after_help = DROP_EXAMPLES)]
    Drop {
        /// The pipeline.
        name: PipelineName,
        /// Do not ask for a confirmation.
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Serialize)]
struct Changed {
    pipeline: PipelineName,
    changed: bool,
}

#[derive(Debug, Serialize)]
struct Dropped {
    pipeline: PipelineName,
    events: u64,
    dead_letters: u64,
    keys: u64,
}

/// Inspects and changes pipelines.
pub(super) async fn pipelines(config: Config, args: PipelinesArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    Session::with(config, async |session| match &args.action {
        Action::List => list(session, output).await,
        Action::Pause { name } => {
            session.pipelines_or(Some(name)).await?;
            let changed = session.queue(name).pause(None).await?;
            output.show(&Changed { pipeline: name.clone(), changed }, |_| {
                format!(
                    "pipeline {name} {}",
                    if changed { "is paused" } else { "was paused already" }
                )
            })
        }
        Action::Resume { name } => {
            session.pipelines_or(Some(name)).await?;
            let changed = session.queue(name).resume(None).await?;
            output.show(&Changed { pipeline: name.clone(), changed }, |_| {
                format!("pipeline {name} {}", if changed { "goes on" } else { "was not paused" })
            })
        }
        Action::Drop { name, yes } => drop_pipeline(session, output, name, *yes).await,
    })
    .await
}

async fn list(session: &Session, output: Output) -> Result<(), CliError> {
    let pipelines = read_pipelines(session, &session.processes().await?).await?;
    output.show(&pipelines, |pipelines| {
        if pipelines.is_empty() {
            return CliError::NoPipeline.to_string();
        }
        output.table(&pipeline_table(pipelines))
    })
}

async fn drop_pipeline(
    session: &Session,
    output: Output,
    name: &PipelineName,
    yes: bool,
) -> Result<(), CliError> {
    session.pipelines_or(Some(name)).await?;
    if session.config.pipelines.get(name).is_some_and(|config| config.enabled) {
        return Err(CliError::StillEnabled(name.clone()));
    }
    let view = session.view(name).view(SystemClock.now()).await?;
    let (events, dead_letters) = (view.depth + view.delayed, view.dead);
    let what = format!("{} and {}", count(events, "event"), count(dead_letters, "dead letter"));
    let question = format!("Delete pipeline {name} with {what}?");
    confirm(&question, yes, "dropping a pipeline")?;
    let keys = session.server.erase(name).await?;
    let dropped = Dropped { pipeline: name.clone(), events, dead_letters, keys };
    output.show(&dropped, |_| format!("dropped pipeline {name}: deleted {what}"))
}

/// Asks on the terminal, unless `yes` is set.
pub(super) fn confirm(question: &str, yes: bool, what: &'static str) -> Result<(), CliError> {
    if yes {
        return Ok(());
    }
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        eprint!("{question} [y/N] ");
        let mut answer = String::new();
        let read = io::stdin().lock().read_line(&mut answer);
        if read.is_ok() && matches!(answer.trim().to_lowercase().as_str(), "y" | "yes") {
            return Ok(());
        }
    }
    Err(CliError::NotConfirmed(what))
}
