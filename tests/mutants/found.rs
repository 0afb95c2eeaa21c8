//! The mutants that earlier runs have found, so that a further run can leave them out.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::Failure;
use crate::mutate::Mutant;

/// A line per mutant: its change, and its place among equal changes of the file, from 0.
#[derive(Debug)]
pub(crate) struct Found {
    earlier: HashSet<String>,
    /// By number.
    lines: HashMap<u32, String>,
    file: Mutex<File>,
}

impl Found {
    /// What `path` says about these mutants. They must be all of the tree, in its order.
    pub(crate) fn load(path: &Path, mutants: &[Mutant]) -> Result<Self, Failure> {
        let earlier = fs::read_to_string(path).unwrap_or_default();
        let file = File::options().create(true).append(true).open(path);
        let mut equal: HashMap<String, usize> = HashMap::new();
        let mut line = |mutant: &Mutant| {
            let change = mutant.change();
            let places = equal.entry(change.clone()).or_default();
            *places += 1;
            format!("{change}\t{}", *places - 1)
        };
        Ok(Self {
            earlier: earlier.lines().map(str::to_owned).collect(),
            lines: mutants.iter().map(|mutant| (mutant.number, line(mutant))).collect(),
            file: Mutex::new(file.map_err(|error| Failure::at(path, error))?),
        })
    }

    /// Whether an earlier run has found it.
    pub(crate) fn has(&self, mutant: &Mutant) -> bool {
        self.lines.get(&mutant.number).is_some_and(|line| self.earlier.contains(line))
    }

    pub(crate) fn add(&self, mutant: &Mutant) -> Result<(), Failure> {
        let Some(line) = self.lines.get(&mutant.number) else { return Ok(()) };
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(file, "{line}").map_err(|error| Failure::of("what is found cannot be kept", error))
    }
}

#[test]
fn a_later_run_knows_which_of_equal_changes_were_found() {
    let mutant = |number: u32, after: &str| Mutant {
        number,
        file: "src/a.rs".to_owned(),
        line: 1,
        before: "a < b".to_owned(),
        after: after.to_owned(),
    };
    let mutants = [mutant(1, "(a) <= (b)"), mutant(2, "(a) <= (b)"), mutant(3, "(a) >= (b)")];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("found.tsv");
    let first = Found::load(&path, &mutants).unwrap();
    first.add(&mutants[1]).unwrap();
    assert!(!first.has(&mutants[1]), "it was found by this run, not by an earlier one");
    // A file before it has one mutant more now.
    let later = mutants.map(|it| Mutant { number: it.number + 1, ..it });
    let second = Found::load(&path, &later).unwrap();
    assert_eq!(later.each_ref().map(|it| second.has(it)), [false, true, false]);
}
