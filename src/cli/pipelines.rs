//! `fairlane pipelines`.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::error::CliError;
use super::operator;
use super::output::{Output, count, duration, plain};
use super::session::Session;
use super::status::{pipeline_table, read_pipelines};
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::id::PipelineName;
use crate::presence;
use crate::problems::PipelineFacts;
use crate::queue::PauseNote;
use crate::trail::{Action as Act, Reason};

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
  fairlane pipelines pause billing     running slices end normally; new events are still queued
  fairlane pipelines pause billing --reason 'the mail server moves'";
const RESUME_EXAMPLES: &str = "\
Examples:
  fairlane pipelines resume billing";
const DROP_EXAMPLES: &str = "\
Examples:
  fairlane pipelines drop old-billing          asks first
  fairlane pipelines drop old-billing --yes

Deletes its queued and delayed events, dead letters and settings of bots. Refused while the
pipeline is enabled in the configuration, or a process runs it.";

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
        /// Why: up to 200 characters, for other operators.
        #[arg(long, value_name = "TEXT")]
        reason: Option<Reason>,
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
        Action::Pause { name, reason } => {
            session.pipelines_or(Some(name)).await?;
            let note = PauseNote::new(&operator::name(), reason.as_ref());
            let work = async { Ok(session.queue(name).pause_noting(None, &note).await?) };
            let action = Act::new("pause").in_pipeline(name).reason(reason.as_ref());
            let changed = session.act(action, work, operator::changed).await?;
            output.show(&Changed { pipeline: name.clone(), changed }, |_| {
                format!(
                    "pipeline {name} {}",
                    if changed { "is paused" } else { "was paused already" }
                )
            })
        }
        Action::Resume { name } => {
            session.pipelines_or(Some(name)).await?;
            let work = async { Ok(session.queue(name).resume(None).await?) };
            let action = Act::new("resume").in_pipeline(name);
            let changed = session.act(action, work, operator::changed).await?;
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
        let mut text = output.table(&pipeline_table(pipelines));
        let now_ms = millis(SystemClock.now());
        for PipelineFacts { name, view, .. } in pipelines {
            if let Some(note) = &view.pause {
                text.extend(["\npipeline ", name.as_str(), " is "]);
                text.push_str(&plain(&note.words(now_ms, duration)));
            }
        }
        text
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
    // The servers may have another configuration than this command.
    let processes = session.processes().await?;
    if let Some(process) = presence::running(&processes, name).next() {
        let (pipeline, process) = (name.clone(), process.at());
        return Err(CliError::StillRuns { pipeline, process });
    }
    let view = session.view(name).view(SystemClock.now()).await?;
    let (events, dead_letters) = (view.depth + view.delayed, view.dead);
    let what = format!("{} and {}", count(events, "event"), count(dead_letters, "dead letter"));
    let question = format!("Delete pipeline {name} with {what}?");
    confirm(&question, yes, "dropping a pipeline")?;
    let work = async { Ok(session.server.erase(name).await?) };
    let action = Act::new("drop pipeline").in_pipeline(name).details(&what);
    let keys = session.act(action, work, |_| "done".to_owned()).await?;
    let dropped = Dropped { pipeline: name.clone(), events, dead_letters, keys };
    output.show(&dropped, |_| format!("dropped pipeline {name}: deleted {what}"))
}

/// Asks on the terminal, unless `yes` is set.
pub(super) fn confirm(question: &str, yes: bool, what: &'static str) -> Result<(), CliError> {
    if yes {
        return Ok(());
    }
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        // A terminal that is closed meanwhile gives no answer either.
        let _ = write!(io::stderr(), "{question} [y/N] ");
        let mut answer = String::new();
        let read = io::stdin().lock().read_line(&mut answer);
        if read.is_ok() && matches!(answer.trim().to_lowercase().as_str(), "y" | "yes") {
            return Ok(());
        }
    }
    Err(CliError::NotConfirmed(what))
}
