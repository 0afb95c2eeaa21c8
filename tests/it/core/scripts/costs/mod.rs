//! What one call of each script costs Redis, in fixed situations: the commands that it runs, and
//! the instructions of the processor. Neither depends on the load of the machine, unlike a time, so
//! a regression shows on a noisy one.
//!
//! The references are in `commands.txt` and `instructions.txt`. `make instructions ARGS=--renew`
//! writes both.

mod callgrind;
mod situations;
mod stage;
pub(super) mod table;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::callgrind::{Callgrind, ROUNDS, SERVERS, TOLERANCE};
use self::stage::{Commands, Stage};
use self::table::{Row, Table, Tolerance};
use crate::support::process::variable;
use crate::support::redis::{Options, RedisServer};

/// The variable that makes the tests of this module write the references.
const RENEW: &str = "FAIRLANE_RENEW_REFERENCES";
const REMEDY: &str = "If the change is intended, write the new references with `make instructions ARGS=--renew` \
                      and adapt the comment `-- Cost` of the script. Otherwise undo what added to it.";

/// The reference file of this name.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/core/scripts/costs").join(name)
}

#[tokio::test]
async fn each_script_runs_the_commands_of_its_reference() {
    let server = RedisServer::start(Options::default());
    let mut stage = Stage::new(&server.url(), Commands::new(&server.url())).await;
    situations::all(&mut stage).await;
    let found = stage.found();
    let rows = found.iter().map(|(name, cost)| Row::new(name, cost.count)).collect();
    let measured = Table { conditions: String::new(), rows };
    let path = file("commands.txt");
    if variable(RENEW).is_some() {
        measured.save(&path);
        return;
    }
    let differences = measured.differences(&Table::load(&path), Tolerance::NONE);
    let inside: BTreeMap<&str, &str> =
        found.iter().map(|(name, cost)| (name.as_str(), cost.detail.as_str())).collect();
    let differences: Vec<String> = differences
        .iter()
        .map(|(name, text)| match inside.get(name.as_str()) {
            Some(inside) => format!("{text} commands: {inside}"),
            None => text.clone(),
        })
        .collect();
    assert!(
        differences.is_empty(),
        "the commands of {} situations differ from {}:\n{}\n{REMEDY}",
        differences.len(),
        path.display(),
        differences.join("\n")
    );
}

/// Where counts are outside the tolerance, they are measured again on other servers: their memory is
/// laid out differently, and one in a hundred counts depends on that. A change of a script shows on
/// every server.
#[tokio::test]
#[ignore = "needs valgrind: make instructions"]
async fn each_script_takes_the_instructions_of_its_reference() {
    let (path, renew) = (file("instructions.txt"), variable(RENEW).is_some());
    let reference = Table::load(&path);
    let mut measured = instructions().await;
    for _ in 1..SERVERS {
        let judged = measured.conditions == reference.conditions && !renew;
        if !judged || measured.differences(&reference, TOLERANCE).is_empty() {
            break;
        }
        measured = measured.nearest(instructions().await, &reference);
    }
    let judged = measured.judge(&path, TOLERANCE, renew);
    judged.unwrap_or_else(|error| panic!("{error}\n{REMEDY}"));
}

/// The counts on a new server: the median of some rounds, because tables of Redis grow in some of
/// them.
async fn instructions() -> Table {
    let redis = Callgrind::start();
    let mut stage = Stage::new(&redis.url(), redis).await;
    let mut counts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut names = Vec::new();
    // In the first round Redis grows its buffers and tables.
    situations::all(&mut stage).await;
    stage.found();
    for round in 0..ROUNDS {
        situations::all(&mut stage).await;
        for (name, cost) in stage.found() {
            if round == 0 {
                names.push(name.clone());
            }
            counts.entry(name).or_default().push(cost.count);
        }
    }
    let median = |name: &String| {
        let mut counts = counts[name].clone();
        counts.sort_unstable();
        Row::new(name, counts[counts.len() / 2])
    };
    Table { conditions: stage.conditions(), rows: names.iter().map(median).collect() }
}
