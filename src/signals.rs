//! The signals that end a command or a run instead of its process.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal is gone) no longer kill this process. A SIGHUP
/// that is ignored stays so: `nohup` started this process to outlive its terminal.
#[derive(Debug)]
pub(crate) struct Signals(Vec<Signal>);

impl Signals {
    /// From now on, these signals do not end the process.
    ///
    /// # Errors
    /// If the operating system refuses a signal handler.
    pub(crate) fn listen() -> io::Result<Self> {
        // Without the file, as on macOS, it is not known.
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let hang_up = (!ignores_hang_up(&status)).then(SignalKind::hangup);
        let kinds = [SignalKind::interrupt(), SignalKind::terminate()].into_iter().chain(hang_up);
        kinds.map(signal).collect::<io::Result<_>>().map(Self)
    }

    /// Waits for the next of them.
    ///
    /// # Cancel safety
    /// No signal is lost.
    pub(crate) async fn next(&mut self) {
        poll_fn(|context| {
            let came = self.0.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if came { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// Whether a process with this `/proc/PID/status` ignores SIGHUP. It is the first signal.
fn ignores_hang_up(status: &str) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bit_of_the_ignored_signals_is_the_hang_up() {
        let status = |mask| format!("SigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t1\n");
        assert!(ignores_hang_up(&status("0000000000001001")));
        assert!(!ignores_hang_up(&status("0000000000001002")));
        assert!(!ignores_hang_up(""));
    }
}
