//! `fairlane config`.

use clap::Args;

use super::error::CliError;
use super::output;
use crate::config::default_text;

const EXAMPLES: &str = "\
Examples:
  fairlane config > fairlane.toml      start a configuration file
  fairlane config | grep -B5 '^shards'  look up a setting";

/// Arguments of `fairlane config`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ConfigArgs {}

/// Prints the default configuration.
pub(super) fn config(_args: &ConfigArgs) -> Result<(), CliError> {
    output::print(&default_text())
}
