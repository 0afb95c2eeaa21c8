//! Servers in their own processes, and the processors on which they run.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{Protection, Workload};
use crate::error::BenchError;

/// A server in its own process.
pub(super) struct Served {
    pub(super) child: Child,
    pub(super) address: SocketAddr,
}

impl Served {
    /// Starts the server of a workload.
    pub(super) fn start(
        workload: Workload,
        protection: Protection,
        rounds: u64,
    ) -> Result<Self, BenchError> {
        let rounds = rounds.to_string();
        let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let arguments = [
            "overload-server",
            "--workload",
            &name(&workload),
            "--protection",
            &name(&protection),
            "--rounds",
            &rounds,
        ];
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let address = line.trim().parse().map_err(|_| {
            BenchError::stuck(
                Duration::ZERO,
                format!("the server printed {line:?} instead of its address"),
            )
        });
        // If this fails, the server is dropped, which ends it.
        let mut served = Self { child, address: SocketAddr::from(([127, 0, 0, 1], 0)) };
        served.address = address?;
        Ok(served)
    }

    /// Sets the duration of a call to the dependency.
    pub(super) fn slow(&mut self, ms: u64) -> Result<(), BenchError> {
        match &mut self.child.stdin {
            Some(stdin) => Ok(writeln!(stdin, "slow {ms}")?),
            None => Ok(()),
        }
    }

    /// Its memory in use, bytes.
    pub(super) fn memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1_024)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The server stops when its input ends.
        drop(self.child.stdin.take());
        std::thread::sleep(Duration::from_millis(50));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pins the calling thread and its child processes to a processor, if there are at least two.
pub(super) fn pin(core: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return;
    }
    let mut set = CpuSet::new();
    set.set(core);
    // If it is not permitted, measure without it.
    let _ = sched_setaffinity(None, &set);
}

/// Pins all threads of a process to a processor.
pub(super) fn pin_process(pid: u32, core: usize) {
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    set.set(core);
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for thread in threads {
        let id = thread.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        // If it is not permitted, measure without it.
        let _ = sched_setaffinity(id, &set);
    }
}
