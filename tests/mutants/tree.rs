//! The copy of the project in which all mutants are compiled, and its programs of tests.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::mutate::{Mutant, mutate};
use crate::{Failure, variable};

/// The files that are changed.
const CHANGED: &[&str] = &["src/admission/", "src/fanout/", "src/pool/", "src/queue/"];
/// Tests, figures, and what only fuzzing runs.
const LEFT_OUT: &[&str] =
    &["/tests.rs", "/tests/", "src/admission/metrics.rs", "src/queue/fuzzing.rs"];

/// Where the changes that do not compile are kept.
const DROPPED: &str = "no-rust.txt";

/// What the copy has beside the project: which mutant is chosen, and a note of those that were reached.
const CHOICE: &str = r#"
#[doc(hidden)]
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod mutant {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicBool, Ordering};

    static CHOSEN: LazyLock<u32> = LazyLock::new(|| {
        std::env::var("FAIRLANE_MUTANT").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    });
    static NOTES: LazyLock<Option<std::fs::File>> = LazyLock::new(|| {
        let path = std::env::var_os("FAIRLANE_MUTANTS_REACHED")?;
        std::fs::File::options().create(true).append(true).open(path).ok()
    });
    static REACHED: [AtomicBool; 16_384] = [const { AtomicBool::new(false) }; 16_384];

    #[must_use]
    pub fn is(number: u32) -> bool {
        if let Some(mut notes) = NOTES.as_ref()
            && !REACHED[number as usize].swap(true, Ordering::Relaxed)
        {
            let _ = std::io::Write::write_all(&mut notes, &number.to_le_bytes());
        }
        *CHOSEN == number
    }
}
"#;

/// The programs of tests.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) units: PathBuf,
    pub(crate) it: PathBuf,
}

pub(crate) struct Tree {
    project: PathBuf,
    /// Has the copy, its builds, and the changes that do not compile.
    place: PathBuf,
    /// The changes that do not compile.
    dropped: HashSet<String>,
    pub(crate) mutants: Vec<Mutant>,
    /// By file, where the text of each mutant is.
    places: BTreeMap<String, Vec<(Range<usize>, u32)>>,
}

impl Tree {
    /// A copy of the project in `place`. A later run goes on there.
    pub(crate) fn new(project: PathBuf, place: PathBuf) -> Self {
        let dropped = fs::read_to_string(place.join(DROPPED)).unwrap_or_default();
        Self {
            project,
            place,
            dropped: dropped.lines().map(str::to_owned).collect(),
            mutants: Vec::new(),
            places: BTreeMap::new(),
        }
    }

    /// The copy.
    pub(crate) fn copy(&self) -> PathBuf {
        self.place.join("tree")
    }

    /// Where it is kept what tests reach.
    pub(crate) fn learned(&self) -> PathBuf {
        self.place.join("learned.tsv")
    }

    /// Where the mutants are kept that were found.
    pub(crate) fn found(&self) -> PathBuf {
        self.place.join("found.tsv")
    }

    /// Writes the copy. Files that are the same keep their time, so that they are not compiled again.
    pub(crate) fn write(&mut self) -> Result<(), Failure> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&self.project)
            .output()
            .map_err(|error| Failure::of("git cannot be started", error))?;
        if !listed.status.success() {
            let said = String::from_utf8_lossy(&listed.stderr);
            return Err(Failure::of("git cannot list the files", said.trim()));
        }
        self.mutants.clear();
        self.places.clear();
        let copy = self.copy();
        let mut next = 1;
        for name in String::from_utf8_lossy(&listed.stdout).split('\0') {
            let from = self.project.join(name);
            // Removed, but not yet in a commit.
            if name.is_empty() || !from.is_file() {
                continue;
            }
            let mut bytes = fs::read(&from).map_err(|error| Failure::at(&from, error))?;
            if name == "src/lib.rs" {
                bytes.extend_from_slice(CHOICE.as_bytes());
            } else if is_changed(name) {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let mutated = mutate(name, &text, next, &self.dropped)
                    .map_err(|error| Failure::at(&from, error))?;
                next = mutated.next;
                self.mutants.extend(mutated.mutants);
                self.places.insert(name.to_owned(), mutated.places);
                bytes = mutated.text.into_bytes();
            }
            let to = copy.join(name);
            if fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            let parent = to.parent().unwrap_or(&copy);
            fs::create_dir_all(parent).map_err(|error| Failure::at(parent, error))?;
            fs::write(&to, bytes).map_err(|error| Failure::at(&to, error))?;
            if let Ok(meta) = fs::metadata(&from) {
                fs::set_permissions(&to, meta.permissions())
                    .map_err(|error| Failure::at(&to, error))?;
            }
        }
        Ok(())
    }

    /// Compiles the copy. Leaves out the mutants that are no valid Rust, until the others compile.
    pub(crate) fn build(&mut self) -> Result<Programs, Failure> {
        loop {
            match self.compile()? {
                Ok(programs) => return Ok(programs),
                Err(wrong) => {
                    println!("{} mutants are no valid Rust, and are left out", wrong.len());
                    let wrong = self.mutants.iter().filter(|it| wrong.contains(&it.number));
                    self.dropped.extend(wrong.map(Mutant::change));
                    let list: Vec<&str> = self.dropped.iter().map(String::as_str).collect();
                    let file = self.place.join(DROPPED);
                    fs::write(&file, list.join("\n")).map_err(|error| Failure::at(&file, error))?;
                    self.write()?;
                }
            }
        }
    }

    /// The programs, or the mutants that do not compile.
    fn compile(&self) -> Result<Result<Programs, HashSet<u32>>, Failure> {
        let mut cargo = Command::new(variable("CARGO").unwrap_or("cargo".into()))
            .args(["test", "--locked", "--workspace", "--lib", "--test", "it", "--no-run"])
            .args(["--message-format", "json"])
            .current_dir(self.copy())
            // Not that of the project: cargo does not tell the two trees apart.
            .env("CARGO_TARGET_DIR", self.place.join("build"))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::of("cargo cannot be started", error))?;
        let (mut units, mut it) = (None, None);
        let (mut wrong, mut others) = (HashSet::new(), Vec::new());
        let out = cargo.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines());
        for line in out {
            let line = line.map_err(|error| Failure::of("cargo cannot be read", error))?;
            let Ok(message) = serde_json::from_str::<Value>(&line) else { continue };
            if message["reason"] == "compiler-artifact" {
                let program = message["executable"].as_str().map(PathBuf::from);
                let kind = &message["target"]["kind"][0];
                if message["target"]["name"] == "fairlane" && kind == "lib" {
                    units = program.or(units);
                } else if message["target"]["src_path"].as_str().is_some_and(is_it) {
                    it = program.or(it);
                }
            } else if message["message"]["level"] == "error" {
                match self.guilty(&message["message"]) {
                    guilty if guilty.is_empty() => others.push(
                        message["message"]["rendered"].as_str().unwrap_or_default().to_owned(),
                    ),
                    guilty => wrong.extend(guilty),
                }
            }
        }
        let ended =
            cargo.wait().map_err(|error| Failure::of("cargo cannot be waited for", error))?;
        match (ended.success(), units, it) {
            (true, Some(units), Some(it)) => Ok(Ok(Programs { units, it })),
            _ if !wrong.is_empty() => Ok(Err(wrong)),
            _ => Err(Failure(format!("the copy does not compile:\n{}", others.join("\n")))),
        }
    }

    /// The mutants that an error of the compiler is about.
    fn guilty(&self, message: &Value) -> HashSet<u32> {
        let mut guilty = HashSet::new();
        let spans = message["spans"].as_array().into_iter().flatten();
        for span in spans.filter(|span| span["is_primary"] == true) {
            let file = span["file_name"].as_str().unwrap_or_default();
            let Some(places) = self.places.get(file) else { continue };
            let byte = |name: &str| {
                span[name].as_u64().and_then(|at| usize::try_from(at).ok()).unwrap_or_default()
            };
            let (start, end) = (byte("byte_start"), byte("byte_end"));
            let hit = places.iter().filter(|(place, _)| place.start < end && start < place.end);
            guilty.extend(hit.map(|(_, number)| *number));
        }
        guilty
    }
}

/// Another package has tests of this name too.
fn is_it(source: &str) -> bool {
    source.ends_with("tests/it/main.rs")
}

fn is_changed(name: &str) -> bool {
    CHANGED.iter().any(|start| name.starts_with(start))
        && !LEFT_OUT.iter().any(|part| name.contains(part))
        && Path::new(name).extension() == Some(OsStr::new("rs"))
}
