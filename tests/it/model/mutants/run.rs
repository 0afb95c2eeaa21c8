//! Runs tests on a mutant, in a process of their own: this test binary with other scripts.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::changes::Change;
use crate::support::script_harness::CHANGED;
use crate::support::wait::holds_within;

/// A quarter of the cases of the model. The unchanged scripts meet all situations that it requires.
const CASES: u32 = 128;
/// A test that does not end in this time has found the mutant. A quiet machine needs half
/// a minute.
const TIMEOUT: Duration = Duration::from_secs(600);

const MODEL: &[&str] = &["--exact", "model::protocol::the_scripts_behave_like_the_model"];
/// The others run scripts as the product loads them.
const TABLES: &[&str] = &["core::scripts::", "--skip", "::costs::", "--skip", "::servers::"];
/// Most of the time goes to the caps of notifications, which only these scripts know of.
const CAPPED: &[&str] =
    &["notifications", "schedule", "begin", "finish", "amend", "release", "restore", "forget"];
const WITHOUT_CAPS: &[&str] = &["--skip", "::throttle::"];
/// Scripts with tests of their own, which find most mutants in a moment.
const SMALL: &[&str] = &[
    "act", "advance", "arrived", "beat", "check", "due", "emit", "heads", "hold", "letters",
    "note", "peek", "present", "readers", "slice", "trim",
];
const SMALL_TABLES: &[&str] = &["core::scripts::small::"];

/// Who found a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Model,
    /// The first of the tests.
    Table(String),
    Survived,
}

impl Verdict {
    pub(super) fn is_by_model(&self) -> bool {
        *self == Self::Model
    }

    pub(super) fn is_by_table(&self) -> bool {
        matches!(self, Self::Table(_))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model => f.write_str("found"),
            Self::Table(test) => write!(f, "found by {test}"),
            Self::Survived => f.write_str("SURVIVED"),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lua/{}.lua:{} {}", self.script, self.line, self.what)
    }
}

pub(super) struct Run {
    seed: u64,
}

impl Run {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// What fails without a change, and how many seconds the tests take.
    pub(super) fn unchanged(&self) -> (Option<String>, u64) {
        let begin = Instant::now();
        let directory = tempfile::tempdir().unwrap();
        let failed = self.finds(MODEL, &directory).or_else(|| self.finds(TABLES, &directory));
        (failed, begin.elapsed().as_secs())
    }

    pub(super) fn judge(&self, change: &Change, modelled: bool) -> Verdict {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(format!("{}.lua", change.script)), &change.code).unwrap();
        if modelled && self.finds(MODEL, &directory).is_some() {
            return Verdict::Model;
        }
        if SMALL.contains(&change.script)
            && let Some(test) = self.finds(SMALL_TABLES, &directory)
        {
            return Verdict::Table(test);
        }
        let is_capped = CAPPED.contains(&change.script);
        let tables = [TABLES, if is_capped { &[] } else { WITHOUT_CAPS }].concat();
        self.finds(&tables, &directory).map_or(Verdict::Survived, Verdict::Table)
    }

    /// Which of these tests fails, and again alone: on a busy machine, a server may not start in time.
    fn finds(&self, tests: &[&str], scripts: &TempDir) -> Option<String> {
        loop {
            let failed = match self.failed(tests, scripts)? {
                Failed::Test(name) => name,
                Failed::Otherwise(what) => return Some(what),
            };
            if self.failed(&["--exact", &failed], scripts).is_some() {
                return Some(failed);
            }
        }
    }

    /// What fails, if something does.
    fn failed(&self, tests: &[&str], scripts: &TempDir) -> Option<Failed> {
        let output = scripts.path().join("output");
        let file = File::create(&output).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(tests)
            .env(CHANGED, scripts.path())
            .env("PROPTEST_RNG_SEED", self.seed.to_string())
            .env("PROPTEST_CASES", CASES.to_string())
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            // Tests that are killed do not remove their files.
            .env("TMPDIR", scripts.path())
            .stdin(Stdio::null())
            .stderr(file.try_clone().unwrap())
            .stdout(file)
            // With its servers.
            .process_group(0)
            .spawn()
            .unwrap();
        let (mut status, mut failed) = (None, None);
        holds_within(TIMEOUT, || {
            status = child.try_wait().unwrap();
            failed = first_failed(&output);
            status.is_some() || failed.is_some()
        });
        let Some(status) = status else {
            // The tests that still run would not change the verdict.
            let group = format!("-{}", child.id());
            let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
            child.wait().unwrap();
            let no_end = || Failed::Otherwise("no end".to_owned());
            return Some(failed.map_or_else(no_end, Failed::Test));
        };
        if status.success() {
            return None;
        }
        let said = || Failed::Otherwise(fs::read_to_string(&output).unwrap_or_default());
        Some(first_failed(&output).map_or_else(said, Failed::Test))
    }
}

enum Failed {
    /// The first test that failed.
    Test(String),
    /// The tests did not end, or without a result.
    Otherwise(String),
}

/// The first test that failed, by the output until now.
fn first_failed(output: &Path) -> Option<String> {
    let text = fs::read_to_string(output).ok()?;
    let line = text.lines().find_map(|line| line.strip_suffix(" ... FAILED"))?;
    Some(line.trim_start_matches("test ").to_owned())
}
