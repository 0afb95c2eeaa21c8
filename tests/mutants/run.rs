//! Runs tests, with a mutant or without.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read as _, Seek as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::Failure;

/// Maximum address space of the tests, kB.
const MEMORY_KB: u32 = 8 << 20;

/// A test of a program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Test {
    pub(crate) program: PathBuf,
    pub(crate) name: String,
}

/// What a run of tests says.
#[derive(Debug, PartialEq)]
pub(crate) enum Ran {
    Passed,
    /// The tests that failed. None: the program ended before it could say so.
    Failed(Vec<String>),
    /// It did not end in time.
    Hung,
}

/// How a test runs without a mutant.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) test: Test,
    pub(crate) takes: Duration,
    /// The mutants whose place it reaches.
    pub(crate) reaches: BTreeSet<u32>,
}

/// The tests of a program whose names begin like one of these.
pub(crate) fn list(program: &Path, names: &[String]) -> Result<Vec<Test>, Failure> {
    let output = Command::new(program)
        .args(["--list", "--format", "terse"])
        .output()
        .map_err(|error| Failure::at(program, error))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let of = |line: &str| line.strip_suffix(": test").map(str::to_owned);
    let is_chosen =
        |name: &String| names.is_empty() || names.iter().any(|start| name.starts_with(start));
    let names = text.lines().filter_map(of).filter(is_chosen);
    Ok(names.map(|name| Test { program: program.to_owned(), name }).collect())
}

/// Runs tests of one program at a time. They may take so long together.
pub(crate) fn run(
    program: &Path,
    names: &[&str],
    mutant: Option<u32>,
    reached: Option<&Path>,
    within: Duration,
    copy: &Path,
) -> Result<Ran, Failure> {
    let mut out = tempfile::tempfile().map_err(|error| Failure::of("no temporary file", error))?;
    let directory =
        tempfile::tempdir().map_err(|error| Failure::of("no temporary directory", error))?;
    let piped = |file: &File| {
        file.try_clone().map(Stdio::from).map_err(|error| Failure::of("no temporary file", error))
    };
    // Wrong code may allocate without end, or never end. `timeout` ends the tests also after this program
    // was killed.
    let limited = format!("ulimit -v {MEMORY_KB}; exec timeout -s KILL \"$@\"");
    let mut command = Command::new("sh");
    command
        .args(["-c", &limited, "sh", &within.as_secs_f64().to_string()])
        .arg(program)
        .arg("--exact")
        .args(["--test-threads", "2"])
        .args(names)
        .current_dir(copy)
        .env("RUST_BACKTRACE", "0")
        .env_remove("FAIRLANE_MUTANT")
        // Tests that are killed do not remove their files.
        .env("TMPDIR", directory.path())
        .stdin(Stdio::null())
        .stdout(piped(&out)?)
        .stderr(Stdio::null())
        // What it has started ends with it.
        .process_group(0);
    command.envs(mutant.map(|number| ("FAIRLANE_MUTANT", number.to_string())));
    command.envs(reached.map(|path| ("FAIRLANE_MUTANTS_REACHED", path)));
    let mut child = command.spawn().map_err(|error| Failure::at(program, error))?;
    let group = format!("-{}", child.id());
    let ended = child.wait().map_err(|error| Failure::at(program, error))?;
    // Also what a test that failed has left running.
    let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
    if ended.success() {
        return Ok(Ran::Passed);
    }
    if ended.signal() == Some(9) || ended.code() == Some(128 + 9) {
        return Ok(Ran::Hung);
    }
    let mut text = Vec::new();
    let read = out.rewind().and_then(|()| out.read_to_end(&mut text));
    read.map_err(|error| Failure::of("the output of the tests cannot be read", error))?;
    let text = String::from_utf8_lossy(&text);
    let failed = text.lines().filter_map(|line| {
        let name = line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?;
        Some(name.trim_end_matches(" - should panic").to_owned())
    });
    Ok(Ran::Failed(failed.collect()))
}

/// Runs a test alone, without a mutant. `None` if it does not pass.
pub(crate) fn learn(test: &Test, copy: &Path) -> Result<Option<Known>, Failure> {
    let directory =
        tempfile::tempdir().map_err(|error| Failure::of("no temporary directory", error))?;
    let notes = directory.path().join("reached");
    let started = Instant::now();
    let within = Duration::from_secs(90);
    let ran = run(&test.program, &[&test.name], None, Some(&notes), within, copy)?;
    let takes = started.elapsed();
    if ran != Ran::Passed {
        return Ok(None);
    }
    let bytes = fs::read(&notes).unwrap_or_default();
    let reaches = bytes.as_chunks::<4>().0.iter().map(|four| u32::from_le_bytes(*four)).collect();
    Ok(Some(Known { test: test.clone(), takes, reaches }))
}

/// What a former run learnt with the same programs.
pub(crate) struct Learned {
    path: PathBuf,
    /// The programs and their times.
    programs: String,
    tests: BTreeMap<String, Known>,
}

impl Learned {
    /// Reads the file, if it is about these programs.
    pub(crate) fn load(path: PathBuf, programs: &[&Path]) -> Self {
        let built = |program: &Path| fs::metadata(program).and_then(|meta| meta.modified()).ok();
        let programs =
            format!("{:?}", programs.iter().map(|it| (it, built(it))).collect::<Vec<_>>());
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.lines();
        let tests = if lines.next() == Some(&programs) {
            lines.filter_map(Known::parse).map(|known| (known.test.name.clone(), known)).collect()
        } else {
            BTreeMap::new()
        };
        Self { path, programs, tests }
    }

    pub(crate) fn take(&mut self, test: &Test) -> Option<Known> {
        self.tests.remove(&test.name).filter(|known| known.test == *test)
    }

    /// Keeps what is known now, and what it had and was not asked for.
    pub(crate) fn keep(&self, known: &[Known]) -> Result<(), Failure> {
        let all = known.iter().chain(self.tests.values()).map(Known::line);
        let lines: Vec<String> = [self.programs.clone()].into_iter().chain(all).collect();
        fs::write(&self.path, lines.join("\n")).map_err(|error| Failure::at(&self.path, error))
    }
}

impl Known {
    fn line(&self) -> String {
        let Self { test: Test { program, name }, takes, reaches } = self;
        let reaches: Vec<String> = reaches.iter().map(u32::to_string).collect();
        format!("{}\t{name}\t{}\t{}", program.display(), takes.as_micros(), reaches.join(" "))
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split('\t');
        let program = fields.next()?.into();
        let test = Test { program, name: fields.next()?.to_owned() };
        let takes = Duration::from_micros(fields.next()?.parse().ok()?);
        let reaches = fields.next()?.split_whitespace().filter_map(|it| it.parse().ok()).collect();
        Some(Self { test, takes, reaches })
    }
}

/// The tests of a mutant, quick ones first.
pub(crate) fn by_mutant(known: &[Known]) -> BTreeMap<u32, Vec<&Known>> {
    let mut tests: BTreeMap<u32, Vec<&Known>> = BTreeMap::new();
    for test in known {
        for number in &test.reaches {
            tests.entry(*number).or_default().push(test);
        }
    }
    for list in tests.values_mut() {
        list.sort_by_key(|known| known.takes);
    }
    tests
}

#[test]
fn facts_about_tests_are_read_as_they_were_written() {
    let test = Test { program: "/a/it-1".into(), name: "core::order::x".to_owned() };
    let takes = Duration::from_micros(1_250);
    let known = Known { test, takes, reaches: BTreeSet::from([3, 700]) };
    let read = Known::parse(&known.line()).unwrap();
    assert_eq!((read.test, read.takes, read.reaches), (known.test, known.takes, known.reaches));
}
