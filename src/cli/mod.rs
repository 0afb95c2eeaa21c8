//! The command line: one file per command. Operator commands connect to Redis directly and need no
//! running server.

mod attempts;
mod audit;
mod bots;
mod bus;
mod check;
mod completions;
mod config;
mod counters;
mod dead;
mod demo;
mod error;
mod events;
mod exit;
mod generate;
mod man;
mod notifications;
mod operator;
mod output;
mod pipelines;
mod publish;
mod receiver;
mod remedy;
mod replay;
mod secret;
mod serve;
mod session;
mod status;
mod tail;
mod top;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tracing::level_filters::LevelFilter;

pub use self::demo::DemoArgs;
pub use self::error::CliError;
pub use self::exit::Exit;
pub use self::output::{Output, Table};
pub use self::serve::{Role, ServeArgs};
use crate::config::Config;
use crate::telemetry::LogFormat;

const EXAMPLES: &str = "\
Examples:
  fairlane demo                        try Fairlane on a private Redis with generated events
  fairlane config > fairlane.toml      start a configuration file
  fairlane check                       check the configuration and every service it needs
  fairlane serve                       run the server
  fairlane status                      show the current state, problems and remedies

Exit codes: 0 success, 1 failure, 64 bad usage or configuration, 69 a needed service is unavailable.";

/// The name of the command.
const NAME: &str = "fairlane";

/// Passes each tenant's events to your handler: in order per tenant, fair across tenants, safe under
/// crashes.
#[derive(Debug, Parser)]
#[command(name = NAME, version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// The configuration file. Default: ./fairlane.toml, then /etc/fairlane/fairlane.toml, if one
    /// exists.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The format of log lines. RUST_LOG sets the level.
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server until SIGTERM: read the bus, copy events into the queues, handle them.
    Serve(ServeArgs),
    /// Try Fairlane: a private Redis, generated events, a web page and live figures.
    Demo(DemoArgs),
    /// Publish events to the bus: one CloudEvent per line, in JSON.
    Publish(publish::PublishArgs),
    /// Publish generated events to the bus, for example to try a handler.
    Generate(generate::GenerateArgs),
    /// Show Redis, the bus and the pipelines on one screen, with problems and remedies.
    Status(status::StatusArgs),
    /// Show pipelines, bots and problems live in the terminal; pause and resume them by key.
    Top(top::TopArgs),
    /// Show how attempts end, as they happen.
    Tail(tail::TailArgs),
    /// List, pause, resume and drop pipelines.
    Pipelines(pipelines::PipelinesArgs),
    /// Inspect bots; set weights; pause, resume, release and purge.
    Bots(bots::BotsArgs),
    /// List the logs of the buses; pass over entries that cannot be read.
    Bus(bus::BusArgs),
    /// Find an event and the attempts at it.
    Events(events::EventsArgs),
    /// Replay events of the bus into one pipeline: append them to its queues again.
    Replay(replay::ReplayArgs),
    /// Inspect, redrive and drop dead letters.
    Dead(dead::DeadArgs),
    /// Show what operators did, when, and why.
    Audit(audit::AuditArgs),
    /// List, cancel and send notifications of a bot.
    Notifications(notifications::NotificationsArgs),
    /// Import counters from another system.
    Counters(counters::CountersArgs),
    /// Check the configuration, Redis, MongoDB, the bus, push targets and this machine.
    Check(check::CheckArgs),
    /// Print the complete default configuration with comments, or the settings in force.
    Config(config::ConfigArgs),
    /// Print the signing keys of a bot's callbacks.
    Secret(secret::SecretArgs),
    /// Receive notifications and pushes, for tests: print each one, check its signature, and fail a
    /// share of them on request.
    Receiver(receiver::ReceiverArgs),
    /// Print the completions of a shell.
    Completions(completions::CompletionsArgs),
    /// Print or install the manual pages.
    Man(man::ManArgs),
}

/// The whole command line, for completions and manual pages.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

impl Cli {
    /// The format of log lines, from `--log-format`.
    #[must_use]
    pub fn log_format(&self) -> LogFormat {
        self.global.log_format
    }

    /// The log level unless `RUST_LOG` sets one: `serve` logs its normal events, other commands
    /// only warnings and errors.
    #[must_use]
    pub fn log_level(&self) -> LevelFilter {
        match self.command {
            Command::Serve(_) => LevelFilter::INFO,
            // The demo's handler fails on purpose. The demo itself reports those failures.
            Command::Demo(_) => LevelFilter::ERROR,
            // A line would go across its screen.
            Command::Top(_) => LevelFilter::OFF,
            _ => LevelFilter::WARN,
        }
    }

    /// Runs the command.
    ///
    /// # Errors
    /// The text of the error is meant for the user. [`CliError::exit`] returns its exit code.
    pub async fn run(self) -> Result<(), CliError> {
        let load = || Config::load(self.global.config.as_deref());
        match self.command {
            Command::Serve(args) => Box::pin(serve::serve(load()?, args)).await,
            Command::Demo(args) => demo::demo(args).await,
            Command::Publish(args) => Box::pin(publish::publish(load()?, args)).await,
            Command::Generate(args) => Box::pin(generate::generate(load()?, args)).await,
            Command::Status(args) => status::status(load()?, &args).await,
            Command::Top(args) => Box::pin(top::top(load()?, args)).await,
            Command::Tail(args) => Box::pin(tail::tail(load()?, args)).await,
            Command::Pipelines(args) => pipelines::pipelines(load()?, args).await,
            Command::Bots(args) => bots::bots(load()?, args).await,
            Command::Bus(args) => Box::pin(bus::bus(load()?, args)).await,
            Command::Events(args) => Box::pin(events::events(load()?, args)).await,
            Command::Replay(args) => Box::pin(replay::replay(load()?, args)).await,
            Command::Dead(args) => dead::dead(load()?, args).await,
            Command::Audit(args) => audit::audit(load()?, args).await,
            Command::Notifications(args) => notifications::notifications(load()?, args).await,
            Command::Counters(args) => Box::pin(counters::counters(load()?, args)).await,
            Command::Check(args) => Box::pin(check::check(load(), &args)).await,
            Command::Config(args) => config::config(self.global.config.as_deref(), &args),
            Command::Secret(args) => secret::secret(&load()?, &args),
            Command::Receiver(args) => receiver::receiver(&load()?, args).await,
            Command::Completions(args) => completions::completions(&args),
            Command::Man(args) => man::man(&args),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_free_of_contradictions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_of_every_command_has_examples() {
        fn visit(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Examples:"), "{path} has no examples");
            let example = help.split("Examples:").nth(1).unwrap_or_default();
            assert!(example.contains(path.trim()), "the examples of {path} show something else");
            for command in command.get_subcommands() {
                if command.get_name() != "help" && !command.is_hide_set() {
                    visit(command, &path);
                }
            }
        }
        visit(&Cli::command(), "");
    }
}
