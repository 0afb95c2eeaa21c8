//! Campaigns of faults. They are a program of their own, so that they do not disturb tests that measure.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlane_testkit::process::signal;
use fairlane_testkit::wait::holds_within;
use serde_json::{Value, json};

/// One at a time: a campaign uses the whole machine.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn command(directory: &Path, scenario: &str) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_fairlane-bench")));
    command.arg(scenario).current_dir(directory).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs `fairlane-bench` in a directory of its own.
fn bench(scenario: &str, arguments: &[&str]) -> Output {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    command(directory.path(), scenario).args(arguments).output().unwrap()
}

/// A campaign that broke no promise.
fn campaign(arguments: &[&str]) -> Value {
    let ran = bench("faults", &[arguments, &["--json"]].concat());
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    assert_eq!((&report["violations"], ran.status.code()), (&json!([]), Some(0)), "{report:#}");
    report
}

fn number_of_faults(report: &Value) -> u64 {
    report["faults"].as_object().unwrap().values().filter_map(Value::as_u64).sum()
}

/// A minute of random faults. `make faults` runs longer ones.
#[test]
fn no_promise_breaks_in_a_campaign_of_faults() {
    let report = campaign(&["--seed", "1", "--seconds", "60", "--rate", "200"]);
    assert!(number_of_faults(&report) >= 20, "{report:#}");
    for pipeline in report["pipelines"].as_array().unwrap() {
        assert!(pipeline["sent"].as_u64() > Some(50), "{pipeline}");
        assert!(pipeline["handled"].as_u64() >= pipeline["sent"].as_u64(), "{pipeline}");
    }
    for what in ["views", "sales", "notifications", "leases_completed", "operations"] {
        assert!(report[what].as_u64() > Some(10), "{what}: {report:#}");
    }
    assert!(report["replays"]["acknowledged"].as_u64() > Some(0), "{report:#}");
}

#[test]
fn no_promise_breaks_while_replicas_of_a_cluster_take_over_and_slots_move() {
    let short = ["--cluster", "--seed", "2", "--seconds", "25", "--rate", "100"];
    let kinds =
        ["cluster-failover", "slots-moved", "process-killed", "replies-lost", "mongo-killed"];
    let only: Vec<_> = kinds.iter().flat_map(|kind| ["--only", kind]).collect();
    let report = campaign(&[&short[..], &only].concat());
    assert!(number_of_faults(&report) >= 8, "{report:#}");
    for kind in &kinds[..4] {
        assert!(report["faults"][kind].as_u64() > Some(0), "{kind}: {report:#}");
    }
}

#[test]
fn a_campaign_refuses_unknown_faults_and_names_the_known_ones() {
    let ran = bench("faults", &["--only", "meteor"]);
    let told = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(64), "{told}");
    assert!(told.contains("process-killed") && told.contains("failover"), "{told}");
    for (arguments, why) in [
        (&["--only", "slots-moved"][..], "--only slots-moved is impossible without --cluster"),
        (&["--cluster", "--only", "failover"], "--only failover is impossible with --cluster"),
    ] {
        let ran = bench("faults", arguments);
        let told = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.code() == Some(64) && told.contains(why), "{told}");
    }
}

/// The other systems need packages of Node.js. `make peers` runs them all.
#[test]
fn the_campaign_of_peers_judges_fairlane_and_a_plain_worker_without_node() {
    let systems = ["--measures", "faults", "--systems", "fairlane,xreadgroup"];
    let short = ["--rounds", "1", "--seed", "1", "--seconds", "15", "--json"];
    let ran = bench("peers", &[&systems[..], &short].concat());
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    let lines = report["systems"].as_array().unwrap();
    assert_eq!(lines.len(), 2, "{report:#}");
    for line in lines {
        let count = |name: &str| line["faults"][name]["median"].as_f64();
        assert!(count("faults") >= Some(5.0) && count("acknowledged") >= Some(500.0), "{line:#}");
        for never in ["lost", "stranded_tenants", "waiting"] {
            assert_eq!(count(never), Some(0.0), "{never}: {line:#}");
        }
        assert!(count("quiet_p50_ms") > Some(0.0), "{line:#}");
        if line["system"] == "fairlane" {
            assert_eq!(
                (count("reordered"), count("stale_commits")),
                (Some(0.0), Some(0.0)),
                "{line:#}"
            );
        }
    }
}

#[test]
fn a_soak_ends_early_at_sigterm_judges_its_day_draws_what_it_measured_and_goes_on_later() {
    let directory = tempfile::tempdir().unwrap();
    let chart = directory.path().join("soak.svg");
    let short = ["--rate", "100", "--json", "--chart"];
    let start = |more: &[&str]| {
        let mut soak = command(directory.path(), "soak");
        soak.args(short).arg(&chart).arg("--state").arg(directory.path().join("state")).args(more);
        soak.stdout(Stdio::piped()).spawn().unwrap()
    };
    let _alone = alone();
    let soak = start(&["--seconds", "3600", "--days", "180"]);
    // The second day has begun when the first one is in the chart.
    let is_drawn = || !fs::read(&chart).unwrap_or_default().is_empty();
    assert!(holds_within(Duration::from_secs(180), is_drawn), "no chart after the first day");
    signal(soak.id(), "TERM");
    let ran = soak.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    assert_eq!((&report["violations"], ran.status.code()), (&json!([]), Some(0)), "{report:#}");
    assert_eq!(report["days"], 2, "{report:#}");
    assert!((20..3_600).contains(&report["seconds"].as_u64().unwrap()), "{report:#}");
    assert!(
        report["restarts"].as_u64() >= Some(2) && report["reloads"].as_u64() >= Some(1),
        "{report:#}"
    );
    for what in ["views", "sales", "notifications"] {
        assert!(report[what].as_u64() > Some(10), "{what}: {report:#}");
    }
    assert!(fs::read_to_string(&chart).unwrap().contains("descriptors and threads"));

    let until = (report["seconds"].as_u64().unwrap() + 10).to_string();
    let ran = start(&["--seconds", &until, "--days", "1"]).wait_with_output().unwrap();
    let both: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    assert_eq!((&both["violations"], ran.status.code()), (&json!([]), Some(0)), "{both:#}");
    assert_eq!((&both["days"], &both["runs"]), (&json!(3), &json!(2)), "{both:#}");
    for what in ["seconds", "views", "sales", "notifications"] {
        assert!(both[what].as_u64() > report[what].as_u64(), "{what}: {both:#}");
    }
}
