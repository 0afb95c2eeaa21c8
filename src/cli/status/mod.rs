//! `fairlane status`.

mod read;
mod screen;

use clap::Args;
use serde::Serialize;

pub(super) use self::read::{CliSite, read_pipelines};
pub(super) use self::screen::pipeline_table;
use self::screen::screen;
use super::error::CliError;
use super::output::Output;
use super::session::Session;
use crate::clock::{Clock as _, SystemClock};
use crate::config::Config;
use crate::problems::{Facts, Finding, Viewer, find};

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
    #[serde(flatten)]
    facts: Facts,
    problems: Vec<Finding>,
}

impl From<Facts> for Status {
    fn from(facts: Facts) -> Self {
        let problems = find(&facts, Viewer::All);
        Self { facts, problems }
    }
}

/// Shows the complete status on one screen. Without Redis, the report says so, and the command
/// fails.
pub(super) async fn status(config: Config, args: &StatusArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    let show = |facts: Facts| output.show(&Status::from(facts), |status| screen(output, status));
    let result = Session::only_looking(config, async |session| {
        let facts = Box::pin(Facts::read(&CliSite(session))).await;
        let error = facts.redis.error.clone().map(|error| {
            if facts.redis.others_answer {
                format!("primaries of Redis do not answer: {error}")
            } else {
                error
            }
        });
        show(facts)?;
        error.map_or(Ok(()), |error| Err(CliError::NoAnswer(error)))
    })
    .await;
    let away = match &result {
        Err(CliError::Away(error)) => Some(error.to_string()),
        Err(error @ CliError::PrivateSilent { .. }) => Some(error.to_string()),
        _ => None,
    };
    if let Some(error) = away {
        show(Facts::unavailable(String::new(), error, SystemClock.now()))?;
    }
    result
}
