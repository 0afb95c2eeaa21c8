//! `fairlane serve`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use super::error::CliError;
use super::service_manager;
use crate::app::{App, Control, Roles};
use crate::config::Config;
use crate::lifecycle::Shutdown;

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
    let shutdown = Shutdown::new();
    shutdown
        .listen_for_signals(config.shutdown_delay, config.shutdown_grace)
        .map_err(CliError::Signals)?;
    let file = config.file.clone();
    let app = App::builder(config).roles(roles).build().await?;
    shutdown.spawn(reload(file, app.control(), shutdown.clone()));
    service_manager::report(&shutdown);
    Ok(app.run(shutdown).await?)
}

/// Reloads the section `[admission]` at every SIGHUP. All other settings take effect at the next
/// start.
async fn reload(file: Option<PathBuf>, control: Control, shutdown: Shutdown) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else {
        warn!("cannot listen for SIGHUP; [admission] is read at start only");
        return;
    };
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            heard = hangup.recv() => if heard.is_none() { return },
        }
        match Config::load(file.as_deref()) {
            Ok(config) => {
                control.set_admission(config.admission);
                info!(admission = ?config.admission, "SIGHUP: reloaded [admission]; other settings take effect at the next start");
            }
            Err(error) => error!(%error, "SIGHUP: cannot load the configuration; nothing changed"),
        }
    }
}
