//! The `fairlane` command: parses the command line, sets up logging, runs the command, returns the
//! exit code.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use fairlane::cli::{Cli, CliError, Exit};
use fairlane::telemetry;

/// How long the threads that wait for the operating system may take to end.
const LAST_THREADS: Duration = Duration::from_secs(1);

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The kernel clears transparent huge pages 2 MiB at a time, which delays requests when a burst
    // of connections needs memory. A private Redis inherits the setting; Redis recommends it too.
    // If the kernel refuses, requests only take longer.
    #[cfg(target_os = "linux")]
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
            // If standard error is closed, the exit code still tells it: `eprintln!` would panic.
            let _ = writeln!(io::stderr(), "error: {error}");
            code(error.downcast_ref().map_or(Exit::Failed, CliError::exit))
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    telemetry::init(cli.log_format(), cli.log_level()).map_err(CliError::from)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(cli.run());
    // A lookup of a name in a resolver that hangs keeps its thread, and must not keep the process.
    runtime.shutdown_timeout(LAST_THREADS);
    Ok(ended?)
}

fn code(exit: Exit) -> ExitCode {
    ExitCode::from(exit as u8)
}
