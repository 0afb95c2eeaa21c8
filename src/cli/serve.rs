//! `fairlane serve`.

use clap::{Args, ValueEnum};

use super::error::CliError;
use crate::app::{self, App, Roles};
use crate::config::Config;

const EXAMPLES: &str = "\
Examples:
  fairlane serve                                  all roles in one process
  fairlane serve --config /etc/fairlane/eu.toml
  fairlane serve --roles work                     add a process with workers only";

/// Arguments of `fairlane serve`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// The roles of this process. Default: all.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_values_t = [Role::Ingest, Role::Work, Role::Http, Role::Schedule]
    )]
    pub roles: Vec<Role>,
}

/// A role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Reads the bus and copies events into the queues.
    Ingest,
    /// Handles events.
    Work,
    /// Answers HTTP on http.listen.
    Http,
    /// Moves delayed events into the queues when they are due.
    Schedule,
}

/// Runs until SIGTERM or SIGINT.
pub(super) async fn serve(config: Config, args: ServeArgs) -> Result<(), CliError> {
    let plays = |role| args.roles.contains(&role);
    let roles = Roles {
        ingest: plays(Role::Ingest),
        work: plays(Role::Work),
        http: plays(Role::Http),
        schedule: plays(Role::Schedule),
    };
    Ok(Box::pin(app::serve(config, move |config| App::builder(config).roles(roles))).await?)
}
