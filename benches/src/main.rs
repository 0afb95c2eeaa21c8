//! The `fairlane-bench` command: measures Fairlane on this machine, on private servers that it starts
//! and removes, or measures a deployment of the user.
//!
//! Machines are shared and noisy: compare every figure with the pipelined `redis-benchmark` of the
//! same run, and use the median of several runs.

mod automations;
mod axis;
mod buses;
mod capacity;
mod cli;
mod counters;
mod cpu;
mod error;
mod fairness;
mod faults;
mod growth;
mod http;
mod isolation;
mod latency;
mod limits;
mod mongo;
mod notifications;
mod overload;
mod peers;
mod pipeline;
mod probe;
mod push;

use std::process::ExitCode;

use clap::Parser as _;
use fairlane::cli::{CliError, Exit};
use fairlane::telemetry;
use tracing::level_filters::LevelFilter;

use self::cli::Cli;
use self::error::CommandError;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // As in `fairlane`, because this process runs instances of it.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let exit = if error.use_stderr() { Exit::Usage } else { Exit::Good };
            // If the message cannot be printed, there is no way to report that.
            drop(error.print());
            return code(exit);
        }
    };
    match run(cli) {
        Ok(()) => code(Exit::Good),
        Err(error) => {
            eprintln!("error: {error}");
            code(error.exit())
        }
    }
}

fn run(cli: Cli) -> Result<(), CommandError> {
    telemetry::init(cli.log_format(), LevelFilter::WARN).map_err(CliError::from)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(CommandError::Runtime)?.block_on(cli.run())
}

fn code(exit: Exit) -> ExitCode {
    ExitCode::from(exit as u8)
}
