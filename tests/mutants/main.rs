//! Does a test notice when the code is wrong? Each mutant is one small change of admission, the copy, the
//! pool or the queues: another sign or value, a call or an arm that is left out. A mutant that no test
//! finds survives: a test is missing, or code is not needed. `make mutants-rust` runs it.
//!
//! All mutants are compiled at once, in a copy of the project in `target/mutants`. The variable
//! `FAIRLANE_MUTANT` chooses one of them. First each test runs alone, without a mutant, and notes which
//! mutants it reaches. Then each mutant runs the tests that reach it: first those that have found mutants of
//! the same file, then the quick ones. It is found when a test fails twice, or twice does not end.

mod accepted;
mod found;
mod mutate;
mod run;
mod tree;
mod values;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;

use accepted::Accepted;
use found::Found;
use mutate::Mutant;
use run::{Known, Learned, Ran, Test};
use tree::{Programs, Tree};

/// Number of tests, and of mutants, that run at the same time.
const WORKERS: usize = 2;

/// Change the code in one place after the other, and see whether tests notice.
#[derive(Debug, Parser)]
struct Args {
    /// Only mutants of files with this in their path. Can be repeated. Default: all.
    #[arg(long, value_name = "PART")]
    file: Vec<String>,
    /// Only each Nth mutant of these, from the Kth on.
    #[arg(long, value_name = "K/N", default_value = "1/1", value_parser = shard)]
    shard: (usize, usize),
    /// Tests against servers whose names begin so. Can be repeated.
    #[arg(long, value_name = "NAME", default_values_t = ["core::".to_owned(), "isolation::".to_owned()])]
    tests: Vec<String>,
    /// A mutant is given up when its tests against servers have taken so long. These are the ones that have
    /// found mutants of its file, and the quickest others that reach it.
    #[arg(long, value_name = "S", default_value = "60", value_parser = clap::value_parser!(u32).range(1..=3_600))]
    seconds: u32,
    /// Leave out the mutants that an earlier run has found, also if it was with other tests.
    #[arg(long)]
    left: bool,
    /// Only compile the mutants, and list them.
    #[arg(long)]
    list: bool,
}

fn shard(text: &str) -> Result<(usize, usize), String> {
    let parsed = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    parsed
        .filter(|(k, n)| (1..=*n).contains(k))
        .ok_or_else(|| format!("{text} is not K/N, such as 3/10, with K from 1 to N"))
}

/// Why nothing could be judged.
#[derive(Debug)]
struct Failure(String);

impl Failure {
    fn of(what: &str, error: impl fmt::Display) -> Self {
        Self(format!("{what}: {error}"))
    }

    fn at(path: &Path, error: impl fmt::Display) -> Self {
        Self(format!("{}: {error}", path.display()))
    }
}

/// A setting of cargo.
#[expect(clippy::disallowed_methods, reason = "cargo has its own settings")]
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    /// By a test of this name.
    Found(String),
    /// It runs tests that do not end.
    Hung,
    Survived,
    /// No test reaches it.
    Unreached,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Found(name) => write!(f, "found by {name}"),
            Self::Hung => f.write_str("found: tests do not end"),
            Self::Survived => f.write_str("SURVIVED"),
            Self::Unreached => f.write_str("NOT REACHED"),
        }
    }
}

fn main() -> ExitCode {
    match judge_all(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(Failure(problem)) => {
            eprintln!("mutants: {problem}");
            ExitCode::from(2)
        }
    }
}

/// Returns the number of survivors that are not accepted.
fn judge_all(args: &Args) -> Result<usize, Failure> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let project = project.unwrap_or(Path::new(".")).to_owned();
    let target = variable("CARGO_TARGET_DIR").map_or(project.join("target"), PathBuf::from);
    let mut tree = Tree::new(project, target.join("mutants"));
    tree.write()?;
    println!("compiling {} mutants", tree.mutants.len());
    let programs = tree.build()?;
    let chosen = |mutant: &&Mutant| {
        args.file.is_empty() || args.file.iter().any(|part| mutant.file.contains(part))
    };
    let (first, step) = args.shard;
    let found = Found::load(&tree.found(), &tree.mutants)?;
    let mutants: Vec<&Mutant> = tree
        .mutants
        .iter()
        .filter(chosen)
        .skip(first - 1)
        .step_by(step)
        .filter(|mutant| !args.left || !found.has(mutant))
        .collect();
    if args.list {
        for Mutant { number, file, line, before, after } in &mutants {
            println!("{number:>5} {file}:{line}\n      - {before}\n      + {after}");
        }
        return Ok(0);
    }
    let units = run::list(&programs.units, &[])?;
    let it = run::list(&programs.it, &args.tests)?;
    let tests: Vec<Test> = units.into_iter().chain(it).collect();
    let known = learn(&tests, &tree, &programs)?;
    let by_mutant = run::by_mutant(&known);
    println!("running {} mutants of {}", mutants.len(), tree.mutants.len());
    let copy = tree.copy();
    let (begin, done) = (Instant::now(), AtomicUsize::new(0));
    let verdicts = in_parallel(&mutants, |mutant| {
        let tests = by_mutant.get(&mutant.number).map_or(&[][..], Vec::as_slice);
        let mut tests = tests.to_vec();
        let finders = found.finders(&mutant.file);
        // The sort is stable: among equal ones, the quick ones stay first.
        tests.sort_by_key(|known| Reverse(finders.get(&known.test.name)));
        let verdict = judge(mutant.number, &tests, &programs.units, args.seconds, &copy)?;
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        let Mutant { file, line, before, after, .. } = mutant;
        println!("{done:>5}/{} {file}:{line} {verdict}", mutants.len());
        match &verdict {
            Verdict::Found(test) => found.add(mutant, test)?,
            Verdict::Hung => found.add(mutant, "")?,
            Verdict::Survived | Verdict::Unreached => println!("      - {before}\n      + {after}"),
        }
        Ok(verdict)
    })?;
    println!("{} s", begin.elapsed().as_secs());
    Ok(report(&mutants, &verdicts))
}

/// How the tests run without a mutant, except for those that fail.
fn learn(tests: &[Test], tree: &Tree, programs: &Programs) -> Result<Vec<Known>, Failure> {
    let mut learned = Learned::load(tree.learned(), &[&programs.units, &programs.it]);
    let (mut known, mut new) = (Vec::new(), Vec::new());
    for test in tests {
        match learned.take(test) {
            Some(test) => known.push(test),
            None => new.push(test),
        }
    }
    println!("learning what {} of {} tests reach", new.len(), tests.len());
    let (copy, done) = (tree.copy(), AtomicUsize::new(0));
    let found = in_parallel(&new, |test| {
        let known = run::learn(test, &copy)?;
        if known.is_none() {
            println!("fails without a mutant, and is left out: {}", test.name);
        }
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if done % 50 == 0 {
            println!("{done:>5}/{} tests", new.len());
        }
        Ok(known)
    })?;
    known.extend(found.into_iter().flatten());
    learned.keep(&known)?;
    Ok(known)
}

/// Runs the tests of a mutant.
fn judge(
    number: u32,
    tests: &[&Known],
    units: &Path,
    seconds: u32,
    copy: &Path,
) -> Result<Verdict, Failure> {
    if tests.is_empty() {
        return Ok(Verdict::Unreached);
    }
    let (unit, it): (Vec<&Known>, Vec<&Known>) =
        tests.iter().partition(|known| known.test.program == units);
    let mut left = Duration::from_secs(seconds.into());
    let mut rounds: Vec<Vec<&Known>> = Vec::new();
    if !unit.is_empty() {
        rounds.push(unit);
    }
    // In rounds: the quickest ones find most mutants.
    let mut round: Vec<&Known> = Vec::new();
    for test in it {
        let Some(rest) = left.checked_sub(test.takes) else { continue };
        left = rest;
        round.push(test);
        if round.len() == 8 {
            rounds.push(std::mem::take(&mut round));
        }
    }
    rounds.extend(Some(round).filter(|round| !round.is_empty()));
    for round in rounds {
        let verdict = try_round(number, &round, copy)?;
        if verdict != Verdict::Survived {
            return Ok(verdict);
        }
    }
    Ok(Verdict::Survived)
}

fn try_round(number: u32, round: &[&Known], copy: &Path) -> Result<Verdict, Failure> {
    let program = &round[0].test.program;
    let names: Vec<&str> = round.iter().map(|known| known.test.name.as_str()).collect();
    let takes: Duration = round.iter().map(|known| known.takes).sum();
    let within = Duration::from_secs(10) + takes * 3;
    let mut ran = run::run(program, &names, Some(number), None, within, copy)?;
    if ran == Ran::Hung {
        // The machine may have been busy.
        ran = run::run(program, &names, Some(number), None, within, copy)?;
    }
    match ran {
        Ran::Passed => Ok(Verdict::Survived),
        Ran::Hung => Ok(Verdict::Hung),
        Ran::Failed(failed) if failed.is_empty() => Ok(Verdict::Found("an abort".to_owned())),
        Ran::Failed(failed) => {
            // Other tests ran beside it: it must fail once more.
            for name in failed {
                let again = run::run(program, &[&name], Some(number), None, within, copy)?;
                if again != Ran::Passed {
                    return Ok(Verdict::Found(name));
                }
            }
            Ok(Verdict::Survived)
        }
    }
}

/// Works on all of them, and returns the results in their order.
fn in_parallel<T: Sync, R: Send>(
    all: &[T],
    work: impl Fn(&T) -> Result<R, Failure> + Sync,
) -> Result<Vec<R>, Failure> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = all.get(place) else { break };
                    let result = work(one);
                    results.lock().unwrap_or_else(PoisonError::into_inner).insert(place, result);
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// Prints the survivors and a table. Returns the number of survivors that are not accepted.
fn report(mutants: &[&Mutant], verdicts: &[Verdict]) -> usize {
    let mut accepted = Accepted::load();
    let mut rows: BTreeMap<&str, [usize; 6]> = BTreeMap::new();
    for (mutant, verdict) in mutants.iter().zip(verdicts) {
        let row = rows.entry(&mutant.file).or_default();
        row[0] += 1;
        let column = match verdict {
            Verdict::Found(_) => 1,
            Verdict::Hung => 2,
            _ if accepted.take(mutant) => 3,
            Verdict::Survived => 4,
            Verdict::Unreached => 5,
        };
        row[column] += 1;
        if column > 3 {
            let Mutant { file, line, before, after, .. } = mutant;
            let what = if column == 4 { "survived" } else { "not reached" };
            println!("{what}: {file}:{line}\n  - {before}\n  + {after}");
        }
    }
    println!(
        "\n{:<36}{:>8}{:>8}{:>8}{:>10}{:>10}{:>13}",
        "file", "mutants", "found", "no end", "accepted", "survived", "not reached"
    );
    let mut total = [0; 6];
    for (file, row) in &rows {
        print_row(file, *row);
        total.iter_mut().zip(row).for_each(|(sum, n)| *sum += n);
    }
    print_row("total", total);
    total[4] + total[5]
}

fn print_row(name: &str, [mutants, found, hung, accepted, survived, unreached]: [usize; 6]) {
    println!(
        "{name:<36}{mutants:>8}{found:>8}{hung:>8}{accepted:>10}{survived:>10}{unreached:>13}"
    );
}
