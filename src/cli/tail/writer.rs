//! Writes lines to standard output in a thread of its own, so that a reader that takes nothing (a
//! pager) does not keep the command from ending.

use std::io::{self, IsTerminal as _, Write as _};

use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::cli::error::CliError;
use crate::cli::output::{LOOK, has_no_reader};

/// Number of lines that wait to be written.
const LINES: usize = 256;

/// Takes lines.
#[derive(Debug)]
pub(super) struct Writer {
    lines: mpsc::Sender<String>,
    /// Why writing ended.
    ended: watch::Receiver<Option<io::ErrorKind>>,
}

impl Writer {
    pub(super) fn start() -> Result<Self, CliError> {
        let (lines, mut waiting) = mpsc::channel::<String>(LINES);
        let (end, ended) = watch::channel(None);
        let write = move || {
            while let Some(line) = waiting.blocking_recv() {
                // Standard output is written at each line break.
                if let Err(error) = writeln!(io::stdout(), "{line}") {
                    end.send_replace(Some(error.kind()));
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("output".to_owned());
        thread.spawn(write).map_err(CliError::Output)?;
        Ok(Self { lines, ended })
    }

    /// Passes a line on. Waits while many lines wait to be written. A line is lost if nothing reads
    /// them any more.
    pub(super) async fn write(&self, line: String) {
        let _ = self.lines.send(line).await;
    }

    /// Waits until nothing reads standard output. That is no error; another failure to write is one.
    pub(super) async fn closed(&self) -> Result<(), CliError> {
        let mut ended = self.ended.clone();
        loop {
            match timeout(LOOK, ended.wait_for(Option::is_some)).await {
                Err(_) if has_no_reader() => return Ok(()),
                Err(_) => {}
                Ok(ended) => {
                    let kind = ended.ok().and_then(|kind| *kind);
                    let kind = kind.unwrap_or(io::ErrorKind::BrokenPipe);
                    return if kind == io::ErrorKind::BrokenPipe {
                        Ok(())
                    } else {
                        Err(CliError::Output(kind.into()))
                    };
                }
            }
        }
    }
}

/// The width of the terminal that standard output is.
pub(super) fn columns() -> Option<usize> {
    let size = io::stdout().is_terminal().then(crossterm::terminal::size)?;
    size.ok().map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}
