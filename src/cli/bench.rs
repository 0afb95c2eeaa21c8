//! `fairlane bench`.

use std::num::NonZeroU32;

use clap::{Args, Subcommand};

use super::error::CliError;
use crate::config::Config;

const EXAMPLES: &str = "\
Examples:
  fairlane bench pipeline
  fairlane bench latency --rate 5000 --seconds 10
  fairlane bench fairness --json";
const PIPELINE_EXAMPLES: &str = "\
Examples:
  fairlane bench pipeline
  fairlane bench pipeline --bots 500000 --events 500000 --json
  fairlane bench pipeline --verify";
const LATENCY_EXAMPLES: &str = "\
Examples:
  fairlane bench latency
  fairlane bench latency --rate 10000 --seconds 30 --json";
const FAIRNESS_EXAMPLES: &str = "\
Examples:
  fairlane bench fairness
  fairlane bench fairness --seconds 30 --json";

/// Arguments of `fairlane bench`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// Print one JSON object instead of a table.
    #[arg(long, global = true)]
    pub json: bool,
    /// What is measured.
    #[command(subcommand)]
    pub scenario: Scenario,
}

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum Scenario {
    /// Throughput: from the bus through the queues to a handler that does nothing.
    #[command(after_help = PIPELINE_EXAMPLES)]
    Pipeline {
        /// How many bots the events are spread over.
        #[arg(long, value_name = "N", default_value = "50000")]
        bots: NonZeroU32,
        /// How many events.
        #[arg(long, value_name = "N", default_value = "500000")]
        events: NonZeroU32,
        /// Also check that no event is lost and none handled out of order.
        #[arg(long)]
        verify: bool,
    },
    /// From publishing to handling, at a steady rate.
    #[command(after_help = LATENCY_EXAMPLES)]
    Latency {
        /// How many bots the events are spread over.
        #[arg(long, value_name = "N", default_value = "5000")]
        bots: NonZeroU32,
        /// Events per second.
        #[arg(long, value_name = "EVENTS_PER_S", default_value = "5000")]
        rate: NonZeroU32,
        /// How long.
        #[arg(long, value_name = "S", default_value = "10")]
        seconds: NonZeroU32,
    },
    /// What quiet bots notice of busy ones.
    #[command(after_help = FAIRNESS_EXAMPLES)]
    Fairness {
        /// How long.
        #[arg(long, value_name = "S", default_value = "10")]
        seconds: NonZeroU32,
    },
}

/// Measures.
#[expect(clippy::unused_async, reason = "as it is called")]
pub(super) async fn bench(_config: Config, _args: BenchArgs) -> Result<(), CliError> {
    Err(CliError::Absent("bench"))
}
