//! `fairlane serve`.

use clap::{Args, ValueEnum};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use super::error::CliError;
use super::service_manager;
use crate::app::relay::Relay;
use crate::app::{App, Roles};
use crate::config::Config;
use crate::lifecycle::{Shutdown, Times};
use crate::reload::{self, Reloads};

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
    let times = Times::new((config.shutdown_delay, config.shutdown_grace));
    let process = Shutdown::new();
    process.listen_with(&times).map_err(CliError::Signals)?;
    // Registered before anything is started, so that an early signal does not end the process.
    let hangups = signal(SignalKind::hangup()).map_err(CliError::Signals)?;
    let file = config.file.clone();
    let load = move || Ok((Config::load(file.as_deref())?, Config::effective(file.as_deref())?));
    let builder = move |config| App::builder(config).roles(roles);
    let (reloads, requests) = reload::channel();
    process.spawn(hang_ups(hangups, reloads.clone(), process.clone()));
    let relay = Relay::start(config, (load, builder), process.clone(), times, reloads);
    let relay = Box::pin(relay).await?;
    service_manager::report(&process);
    Ok(Box::pin(relay.serve(requests)).await?)
}

/// Reloads at every SIGHUP. The outcome is logged.
async fn hang_ups(mut hangups: Signal, reloads: Reloads, process: Shutdown) {
    loop {
        tokio::select! {
            biased;
            () = process.soft.cancelled() => return,
            heard = hangups.recv() => if heard.is_none() { return },
        }
        info!("SIGHUP: reloading the configuration");
        let _ = reloads.ask().await;
    }
}
