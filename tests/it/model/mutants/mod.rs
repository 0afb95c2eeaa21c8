//! Does a test notice when a script is wrong? Each mutant is one small change of a script: a comparison, a
//! sign, a number, a condition, a call that is left out. The random operations of [`super::protocol`] run
//! on it, and then the tests in `core/scripts`. A mutant that no test finds survives.
//!
//! Some survivors do the same as the script, or nothing that a promise is about: `accepted.txt` lists them
//! with the reason. Any other survivor is a missing test, or code that is not needed.
//!
//! `make mutants` runs it. The seed decides everything that is drawn.

mod accepted;
mod changes;
mod lua;
mod run;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::Instant;

use self::accepted::Accepted;
use self::changes::{Change, changes};
use self::run::{Run, Verdict};
use crate::support::process::variable;
use crate::support::redis::{Options, RedisServer};

/// Number of mutants that run at the same time.
const WORKERS: usize = 2;

macro_rules! scripts {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../lua/", $name, ".lua")))),+]
    };
}

/// What the random operations run: every script that moves an event of a queue, and the shared code.
const MODELLED: &[(&str, &str)] = scripts![
    "shared", "offsets", "repeats", "enqueue", "push", "claim", "complete", "promote", "pause",
    "resume", "purge", "redrive", "revoke", "recover",
];

/// What only the tests in `core/scripts` run.
const OTHERS: &[(&str, &str)] = scripts![
    "ledger",
    "notifications",
    "drop_letters",
    "audit",
    "reconcile",
    "increment_if_exists",
    "upsert",
    "replace",
    "import",
    "recount",
    "schedule",
    "begin",
    "finish",
    "amend",
    "release",
    "restore",
    "forget",
    "replay",
    "permit",
    "set",
    "budget",
    "act",
    "advance",
    "arrived",
    "beat",
    "check",
    "due",
    "emit",
    "heads",
    "hold",
    "letters",
    "note",
    "peek",
    "present",
    "readers",
    "record",
    "slice",
    "trim",
];

#[test]
fn every_script_has_mutants() {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/lua")).unwrap();
    let mut files: Vec<String> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    let listed = MODELLED.iter().chain(OTHERS);
    let mut listed: Vec<String> = listed.map(|(name, _)| format!("{name}.lua")).collect();
    files.sort();
    listed.sort();
    assert_eq!(files, listed, "the files (left) and the lists (right) differ");
}

#[test]
#[ignore = "takes hours: make mutants"]
fn tests_find_every_change_of_a_script() {
    let seed = number("FAIRLANE_MUTANTS_SEED").unwrap_or(1);
    let chosen = variable("FAIRLANE_MUTANTS_SCRIPT").filter(|name| !name.is_empty());
    let known = MODELLED.iter().chain(OTHERS);
    let scripts: Vec<(&str, &str)> = match chosen.as_deref() {
        None => MODELLED.to_vec(),
        Some("all") => known.copied().collect(),
        Some(name) => known.filter(|(other, _)| *other == name).copied().collect(),
    };
    assert!(!scripts.is_empty(), "there is no script {chosen:?}");
    let mut all: Vec<Change> = Vec::new();
    for (name, code) in scripts {
        all.extend(changes(name, code));
    }
    leave_out_errors(&mut all);
    let made = all.len();
    let number = number("FAIRLANE_MUTANTS").filter(|number| *number > 0);
    if let Some(number) = number {
        sample(&mut all, seed, usize::try_from(number).unwrap());
    }
    let run = Run::new(seed);
    let (found, seconds) = run.unchanged();
    assert_eq!(found, None, "the unchanged scripts pass");
    println!("{} of {made} mutants, seed {seed}; survivors take {seconds} s each", all.len());
    let begin = Instant::now();
    let verdicts = judge(&run, all);
    println!("{} s", begin.elapsed().as_secs());
    let missing = report(&verdicts, number.is_none());
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

fn number(name: &str) -> Option<u64> {
    let text = variable(name).filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text}")))
}

/// A change that does not compile is no mutant.
fn leave_out_errors(all: &mut Vec<Change>) {
    let server = RedisServer::start(Options::default());
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let mut compiles = |code: &str| {
        let body = code.split_once('\n').map_or("", |(_, body)| body);
        redis::cmd("SCRIPT").arg("LOAD").arg(body).exec(&mut connection).is_ok()
    };
    all.retain(|change| compiles(&change.code));
}

/// Keeps `number` changes, drawn by the seed, in their order.
fn sample(all: &mut Vec<Change>, seed: u64, number: usize) {
    let draw = |place: usize| {
        // SplitMix64.
        let mut z = seed.wrapping_add((place as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let mut drawn: Vec<(u64, usize)> = (0..all.len()).map(|place| (draw(place), place)).collect();
    drawn.sort_unstable();
    drawn.truncate(number);
    let kept: Vec<usize> = drawn.into_iter().map(|(_, place)| place).collect();
    let mut places = 0..;
    all.retain(|_| kept.contains(&places.next().unwrap()));
}

/// The verdicts, in the order of the mutants.
fn judge(run: &Run, all: Vec<Change>) -> Vec<(Change, Verdict)> {
    let total = all.len();
    let waiting: Mutex<VecDeque<(usize, Change)>> = Mutex::new((0..).zip(all).collect());
    let judged = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().unwrap().pop_front();
                    let Some((place, change)) = next else { break };
                    let verdict = run.judge(&change, is_modelled(change.script));
                    let mut judged = judged.lock().unwrap();
                    println!("{:>4}/{total} {change}: {verdict}", judged.len() + 1);
                    judged.insert(place, (change, verdict));
                }
            });
        }
    });
    judged.into_inner().unwrap().into_values().collect()
}

fn is_modelled(script: &str) -> bool {
    MODELLED.iter().any(|(name, _)| *name == script)
}

/// Prints the result of each script and the survivors. Returns what must be changed: survivors that are
/// not listed, and, if all mutants ran, entries of the list that are no survivors.
fn report(verdicts: &[(Change, Verdict)], all: bool) -> Vec<String> {
    let mut accepted = Accepted::load();
    let mut missing = Vec::new();
    let mut scripts: Vec<&str> = verdicts.iter().map(|(change, _)| change.script).collect();
    scripts.dedup();
    println!(
        "\n{:<24}{:>8}{:>8}{:>8}{:>10}{:>10}",
        "script", "mutants", "model", "tables", "accepted", "survived"
    );
    for script in scripts {
        let of_script = || verdicts.iter().filter(|(change, _)| change.script == script);
        let by = |wanted: fn(&Verdict) -> bool| of_script().filter(|(_, v)| wanted(v)).count();
        let (model, tables) = (by(Verdict::is_by_model), by(Verdict::is_by_table));
        let (mut known, mut survived) = (0, 0);
        for (change, verdict) in of_script() {
            if *verdict != Verdict::Survived {
                continue;
            }
            if accepted.take(change) {
                known += 1;
            } else {
                survived += 1;
                let (before, after) = (&change.before, &change.after);
                missing.push(format!("survived: {change}\n  - {before}\n  + {after}"));
            }
        }
        let total = of_script().count();
        println!("{script:<24}{total:>8}{model:>8}{tables:>8}{known:>10}{survived:>10}");
        if all {
            missing.extend(accepted.rest(script));
        }
    }
    missing
}
