//! `fairlane config`.

use std::path::Path;

use clap::Args;

use super::error::CliError;
use super::output::{self, Output, Table};
use crate::config::{Config, Effective, default_text};

const EXAMPLES: &str = "\
Examples:
  fairlane config > fairlane.toml      start a configuration file
  fairlane config | grep -B5 '^shards'  look up a setting
  fairlane config --effective          what is set, and where
  fairlane config --effective --all --json | jq '.[] | select(.key == \"bus.retention\")'";

/// Arguments of `fairlane config`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ConfigArgs {
    /// Print the settings in force instead: those that the file or the environment sets, with their
    /// values and where they come from. Secrets and the queries of URLs are hidden.
    #[arg(long)]
    effective: bool,
    /// With --effective: also those that are the default.
    #[arg(long, requires = "effective")]
    all: bool,
    /// With --effective: print JSON instead of a table.
    #[arg(long, requires = "effective")]
    json: bool,
}

/// Prints the default configuration, or the settings in force.
pub(super) fn config(file: Option<&Path>, args: &ConfigArgs) -> Result<(), CliError> {
    if !args.effective {
        return output::print(&default_text());
    }
    let mut settings = Config::effective(file)?;
    settings.retain(|setting| args.all || !setting.is_default);
    let output = Output::new(args.json);
    output.show(&settings, |settings| shown(output, settings))
}

fn shown(output: Output, settings: &[Effective]) -> String {
    if settings.is_empty() {
        return "every setting is the default: no file and no variable sets one".to_owned();
    }
    let mut table = Table::new(&["KEY", "VALUE", "FROM"]);
    for Effective { key, value, from, .. } in settings {
        table.row(&[key.clone(), value.clone(), from.clone()]);
    }
    output.table(&table)
}
