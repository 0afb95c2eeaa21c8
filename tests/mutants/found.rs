//! The mutants that were found, so that a further run can leave them out, and the tests that found them:
//! these are likely to find others of the same file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::Failure;
use crate::mutate::Mutant;

/// How many mutants of a file each test has found.
type Finders = BTreeMap<String, BTreeMap<String, usize>>;

/// A line per mutant: its change, its place among equal changes of the file, from 0, and the test that found
/// it.
#[derive(Debug)]
pub(crate) struct Found {
    earlier: HashSet<String>,
    /// By number.
    lines: HashMap<u32, String>,
    finders: Mutex<Finders>,
    file: Mutex<File>,
}

impl Found {
    /// What `path` says about these mutants. They must be all of the tree, in its order.
    pub(crate) fn load(path: &Path, mutants: &[Mutant]) -> Result<Self, Failure> {
        let text = fs::read_to_string(path).unwrap_or_default();
        let file = File::options().create(true).append(true).open(path);
        let (mut earlier, mut finders) = (HashSet::new(), Finders::new());
        for (line, test) in text.lines().filter_map(|line| line.rsplit_once('\t')) {
            earlier.insert(line.to_owned());
            note(&mut finders, line.split('\t').next().unwrap_or_default(), test);
        }
        let mut equal: HashMap<String, usize> = HashMap::new();
        let mut line = |mutant: &Mutant| {
            let change = mutant.change();
            let places = equal.entry(change.clone()).or_default();
            *places += 1;
            format!("{change}\t{}", *places - 1)
        };
        Ok(Self {
            earlier,
            lines: mutants.iter().map(|mutant| (mutant.number, line(mutant))).collect(),
            finders: Mutex::new(finders),
            file: Mutex::new(file.map_err(|error| Failure::at(path, error))?),
        })
    }

    /// Whether an earlier run has found it.
    pub(crate) fn has(&self, mutant: &Mutant) -> bool {
        self.lines.get(&mutant.number).is_some_and(|line| self.earlier.contains(line))
    }

    /// Notes that `test` has found it. The test has no name if it ended otherwise than by failing.
    pub(crate) fn add(&self, mutant: &Mutant, test: &str) -> Result<(), Failure> {
        note(&mut self.finders.lock().unwrap_or_else(PoisonError::into_inner), &mutant.file, test);
        let Some(line) = self.lines.get(&mutant.number) else { return Ok(()) };
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(file, "{line}\t{test}")
            .map_err(|error| Failure::of("what is found cannot be kept", error))
    }

    /// The number of mutants of this file that each test has found.
    pub(crate) fn finders(&self, file: &str) -> BTreeMap<String, usize> {
        let finders = self.finders.lock().unwrap_or_else(PoisonError::into_inner);
        finders.get(file).cloned().unwrap_or_default()
    }
}

fn note(finders: &mut Finders, file: &str, test: &str) {
    if !test.is_empty() {
        *finders.entry(file.to_owned()).or_default().entry(test.to_owned()).or_default() += 1;
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
    first.add(&mutants[1], "core::order::x").unwrap();
    assert!(!first.has(&mutants[1]), "it was found by this run, not by an earlier one");
    first.add(&mutants[2], "").unwrap();
    // A file before it has one mutant more now.
    let later = mutants.map(|it| Mutant { number: it.number + 1, ..it });
    let second = Found::load(&path, &later).unwrap();
    assert_eq!(later.each_ref().map(|it| second.has(it)), [false, true, true]);
    let finders = BTreeMap::from([("core::order::x".to_owned(), 1)]);
    assert_eq!((first.finders("src/a.rs"), second.finders("src/a.rs")), (finders.clone(), finders));
    assert_eq!(second.finders("src/b.rs"), BTreeMap::new());
}
