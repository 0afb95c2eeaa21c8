//! `fairlane demo`.

use std::num::NonZeroU32;

use clap::Args;

use super::error::CliError;
use crate::config::Config;

const EXAMPLES: &str = "\
Examples:
  fairlane demo
  fairlane demo --bots 1000 --rate 20000 --seconds 60";

/// Arguments of `fairlane demo`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DemoArgs {
    /// How many bots have traffic.
    #[arg(long, value_name = "N", default_value = "5000")]
    pub bots: NonZeroU32,
    /// Events published per second.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "5000")]
    pub rate: NonZeroU32,
    /// How long.
    #[arg(long, value_name = "S", default_value = "20")]
    pub seconds: NonZeroU32,
}

/// Runs the demo.
#[expect(clippy::unused_async, reason = "as it is called")]
pub(super) async fn demo(_config: Config, _args: DemoArgs) -> Result<(), CliError> {
    Err(CliError::Absent("demo"))
}
