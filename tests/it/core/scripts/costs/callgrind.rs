//! A `redis-server` under callgrind, which counts the instructions of single calls.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use redis::Connection;
use tempfile::TempDir;

use super::stage::{Cost, Meter, connection};
use super::table::Tolerance;
use crate::support::wait::holds_within;

/// Number of measured calls in each situation. The count is their median.
pub(super) const ROUNDS: usize = 5;
/// Maximum number of servers on which counts outside the tolerance are measured.
pub(super) const SERVERS: usize = 3;
/// Between servers, half of the counts vary by less than 0.3 %, and nine in ten by less than 1.1 %.
/// The smallest, of 25,000 instructions, vary by 5 %.
pub(super) const TOLERANCE: Tolerance = Tolerance { percent: 3, count: 2_000 };

/// The function of Redis that runs a script: from its first instruction to the reply in the buffer
/// of the client. Redis exports it for its modules, so a stripped program names it too.
const COUNTED: &str = "evalShaCommand";

/// Counts only inside [`COUNTED`], and writes the count of each call into a file of its own:
/// `out.1`, `out.2`, … before Redis sends the reply.
pub(super) struct Callgrind {
    directory: TempDir,
    child: Child,
    /// Number of files at the start of the call.
    before: usize,
    conditions: String,
    plain: Connection,
}

impl Callgrind {
    /// Starts a server and returns once it answers.
    pub(super) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        let child = Command::new("valgrind")
            .current_dir(directory.path())
            .args(["--quiet", "--tool=callgrind", "--collect-atstart=no"])
            .args([format!("--toggle-collect={COUNTED}"), format!("--dump-after={COUNTED}")])
            .arg(format!("--callgrind-out-file={}", out.display()))
            .args(["redis-server", "--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--unixsocket", &directory.path().join("redis.sock").to_string_lossy()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("valgrind is installed (make setup)");
        let url = format!("redis+unix://{}", directory.path().join("redis.sock").display());
        let answers = || {
            let client = redis::Client::open(&*url).unwrap();
            client.get_connection().is_ok_and(|mut to| redis::cmd("PING").exec(&mut to).is_ok())
        };
        assert!(holds_within(Duration::from_secs(60), answers), "redis-server did not start");
        let mut plain = connection(&url);
        let info: String = redis::cmd("INFO").arg("server").query(&mut plain).unwrap();
        let of = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let conditions = format!(
            "Redis {} (build {}) on {}",
            of("redis_version:"),
            of("redis_build_id:"),
            std::env::consts::ARCH
        );
        Self { directory, child, before: 0, conditions, plain }
    }

    pub(super) fn url(&self) -> String {
        format!("redis+unix://{}", self.directory.path().join("redis.sock").display())
    }

    fn file(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("out.{number}"))
    }

    /// Number of the last file.
    fn last(&self) -> usize {
        let mut last = self.before;
        while self.file(last + 1).exists() {
            last += 1;
        }
        last
    }
}

impl Meter for Callgrind {
    fn start(&mut self) {
        // Otherwise the collector of Lua runs during some of the calls, which is most of the noise.
        redis::cmd("EVAL").arg("collectgarbage()").arg(0).exec(&mut self.plain).unwrap();
        self.before = self.last();
    }

    fn stop(&mut self) -> Cost {
        let number = self.last();
        assert_eq!(number, self.before + 1, "callgrind saw no call of {COUNTED}, or several");
        let text = std::fs::read_to_string(self.file(number)).unwrap();
        let count = text.lines().find_map(|line| line.strip_prefix("totals: ")).unwrap();
        Cost { count: count.parse().unwrap(), detail: String::new() }
    }

    fn conditions(&self) -> String {
        self.conditions.clone()
    }
}

impl Drop for Callgrind {
    fn drop(&mut self) {
        // The counts are written already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
