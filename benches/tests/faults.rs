//! Campaigns of faults. They are a program of their own, so that they do not disturb tests that measure.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// Runs `fairlane-bench faults` in a directory of its own.
fn faults(arguments: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_fairlane-bench")));
    command.arg("faults").args(arguments).current_dir(directory.path());
    command.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap()
}

/// A minute of random faults. `make faults` runs longer ones.
#[test]
fn no_promise_breaks_in_a_campaign_of_faults() {
    let ran = faults(&["--seed", "1", "--seconds", "60", "--rate", "200", "--json"]);
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    assert_eq!((&report["violations"], ran.status.code()), (&json!([]), Some(0)), "{report:#}");
    let faults: u64 =
        report["faults"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
    assert!(faults >= 20, "{report:#}");
    for pipeline in report["pipelines"].as_array().unwrap() {
        assert!(pipeline["sent"].as_u64() > Some(50), "{pipeline}");
        assert!(pipeline["handled"].as_u64() >= pipeline["sent"].as_u64(), "{pipeline}");
    }
    for what in ["views", "sales", "notifications", "leases_completed", "operations"] {
        assert!(report[what].as_u64() > Some(10), "{what}: {report:#}");
    }
}

#[test]
fn a_campaign_refuses_unknown_faults_and_names_the_known_ones() {
    let ran = faults(&["--only", "meteor"]);
    let told = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(64), "{told}");
    assert!(told.contains("process-killed") && told.contains("failover"), "{told}");
}
