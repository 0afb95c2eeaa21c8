//! The command line: one file per command. Operator commands speak to Redis directly and need no
//! running server.

mod bench;
mod bots;
mod check;
mod config;
mod counters;
mod dead;
mod demo;
mod error;
mod generate;
mod output;
mod pipelines;
mod publish;
mod receiver;
mod secret;
mod serve;
mod session;
mod status;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tracing::level_filters::LevelFilter;

pub use self::bench::{BenchArgs, Scenario};
pub use self::demo::DemoArgs;
pub use self::error::{CliError, Exit};
pub use self::serve::{Role, ServeArgs};
use crate::config::Config;
use crate::telemetry::LogFormat;

const EXAMPLES: &str = "\
Examples:
  fairlane demo                        see it work, with everything private and local
  fairlane config > fairlane.toml      begin a configuration
  fairlane check                       is everything ready?
  fairlane serve                       run
  fairlane status                      what is going on, and what helps

Exit codes: 0 good, 1 failed, 64 bad usage or configuration, 69 a needed service is unavailable.";

/// Per-tenant event fan-out worker pool on Redis: ordered per tenant, fair across tenants, safe
/// under crashes.
#[derive(Debug, Parser)]
#[command(name = "fairlane", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// The configuration; else ./fairlane.toml or /etc/fairlane/fairlane.toml, if present.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How log lines look. Their level is set by RUST_LOG.
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run until SIGTERM: read the bus, fan out, handle.
    Serve(ServeArgs),
    /// See it work: everything private and local, with generated traffic and live figures.
    Demo(DemoArgs),
    /// Put events on the bus, one CloudEvent in JSON per line.
    Publish(publish::PublishArgs),
    /// Put generated events on the bus, to see something or to try a handler.
    Generate(generate::GenerateArgs),
    /// One screen: Redis, the bus, the pipelines, what is wrong and which command helps.
    Status(status::StatusArgs),
    /// List, pause, resume and drop pipelines.
    Pipelines(pipelines::PipelinesArgs),
    /// Look at bots, weigh, pause, resume, release and purge them.
    Bots(bots::BotsArgs),
    /// Look at dead letters, put them back or drop them.
    Dead(dead::DeadArgs),
    /// Import counters that were kept elsewhere.
    Counters(counters::CountersArgs),
    /// Measure this machine.
    Bench(BenchArgs),
    /// Is everything ready? Checks the configuration, Redis, MongoDB, the bus and push targets.
    Check(check::CheckArgs),
    /// Print the complete default configuration, commented.
    Config(config::ConfigArgs),
    /// Print the signing secret of a bot's callbacks.
    Secret(secret::SecretArgs),
    /// Take notifications and pushes, for tests: prints each, checks its signature, fails on purpose.
    Receiver(receiver::ReceiverArgs),
}

impl Cli {
    /// How log lines look.
    #[must_use]
    pub fn log_format(&self) -> LogFormat {
        self.global.log_format
    }

    /// What is logged unless `RUST_LOG` says otherwise: a server tells what it does, a command
    /// answers and logs only what is odd.
    #[must_use]
    pub fn log_level(&self) -> LevelFilter {
        match self.command {
            Command::Serve(_) => LevelFilter::INFO,
            // Its handler fails on purpose, and it tells of that in its own words.
            Command::Demo(_) => LevelFilter::ERROR,
            _ => LevelFilter::WARN,
        }
    }

    /// Runs the command.
    ///
    /// # Errors
    /// With a text for the user; [`CliError::exit`] tells the exit code.
    pub async fn run(self) -> Result<(), CliError> {
        let load = || Config::load(self.global.config.as_deref());
        match self.command {
            Command::Serve(args) => Box::pin(serve::serve(load()?, args)).await,
            Command::Demo(args) => demo::demo(args).await,
            // The largest by far, and the others need not be.
            Command::Bench(args) => Box::pin(bench::bench(args)).await,
            Command::Publish(args) => publish::publish(load()?, args).await,
            Command::Generate(args) => generate::generate(load()?, args).await,
            Command::Status(args) => status::status(load()?, &args).await,
            Command::Pipelines(args) => pipelines::pipelines(load()?, args).await,
            Command::Bots(args) => bots::bots(load()?, args).await,
            Command::Dead(args) => dead::dead(load()?, args).await,
            Command::Counters(args) => counters::counters(load()?, args).await,
            Command::Check(args) => Box::pin(check::check(load(), &args)).await,
            Command::Config(args) => config::config(&args),
            Command::Secret(args) => secret::secret(&load()?, &args),
            Command::Receiver(args) => receiver::receiver(&load()?, args).await,
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
