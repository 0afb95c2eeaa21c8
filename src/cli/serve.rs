//! `fairlane serve`.

use clap::{Args, ValueEnum};

use super::error::CliError;
use crate::config::Config;

const EXAMPLES: &str = "\
Examples:
  fairlane serve                                  all roles in one process
  fairlane serve --config /etc/fairlane/eu.toml
  fairlane serve --roles work                     more workers beside the others";

/// Arguments of `fairlane serve`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// What this process does; all by default.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values_t = [Role::Ingest, Role::Work, Role::Http, Role::Schedule]
    )]
    pub roles: Vec<Role>,
}

/// One part of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Reads the bus and copies events into the queues.
    Ingest,
    /// Handles events.
    Work,
    /// Answers HTTP requests.
    Http,
    /// Moves delayed events when they are due, and expires dead letters.
    Schedule,
}

/// Runs until a signal.
#[expect(clippy::unused_async, reason = "as it is called")]
pub(super) async fn serve(_config: Config, _args: ServeArgs) -> Result<(), CliError> {
    Err(CliError::Absent("serve"))
}
