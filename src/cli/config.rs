//! `fairlane config`.

use clap::Args;

use super::error::CliError;
use super::output;
use crate::config::default_text;

const EXAMPLES: &str = "\
Examples:
  fairlane config > fairlane.toml      begin a configuration
  fairlane config | grep -A3 '^# How'  look something up";

/// Arguments of `fairlane config`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ConfigArgs {}

/// Prints the defaults.
pub(super) fn config(_args: &ConfigArgs) -> Result<(), CliError> {
    output::print(&default_text())
}
