//! `fairlane serve` and `fairlane demo`, started as a user starts them.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::wait::holds_within;

const PROGRAM: &str = env!("CARGO_BIN_EXE_fairlane");

/// Starts a server in a fresh directory, asks it to stop once it runs, and returns its log.
fn serve_and_stop(arguments: &[&str]) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    let mut server = Command::new(PROGRAM)
        .arg("serve")
        .args(arguments)
        .current_dir(directory.path())
        .env("FAIRLANE__METRICS__LISTEN", "127.0.0.1:0")
        .env("FAIRLANE__HTTP__LISTEN", "127.0.0.1:0")
        .stderr(Stdio::piped())
        .spawn()
        .expect("fairlane starts");
    let mut log = BufReader::new(server.stderr.take().expect("it is piped"));
    let mut said = String::new();
    while !said.contains("fairlane is running") {
        assert!(log.read_line(&mut said).expect("a line") > 0, "it ended: {said}");
    }
    let stopped = Command::new("kill").arg(server.id().to_string()).status().expect("kill runs");
    assert!(stopped.success());
    log.read_to_string(&mut said).expect("the rest of the log");
    let status = server.wait().expect("it ends");
    assert!(status.success(), "{status}: {said}");
    said
}

#[test]
fn the_last_one_out_stops_the_private_redis_whatever_roles_it_played() {
    for roles in ["ingest,work,http,schedule", "work", "ingest", "schedule", "http"] {
        let said = serve_and_stop(&["--roles", roles]);
        assert!(said.contains("stopped the private Redis"), "{roles}: {said}");
    }
}

#[test]
fn a_server_stops_although_its_log_is_no_longer_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut server = Command::new(PROGRAM)
        .arg("serve")
        .current_dir(directory.path())
        .env("FAIRLANE__METRICS__LISTEN", "127.0.0.1:0")
        .env("FAIRLANE__HTTP__LISTEN", "127.0.0.1:0")
        .stderr(Stdio::piped())
        .spawn()
        .expect("fairlane starts");
    let mut log = BufReader::new(server.stderr.take().expect("it is piped"));
    let mut said = String::new();
    while !said.contains("fairlane is running") {
        assert!(log.read_line(&mut said).expect("a line") > 0, "it ended: {said}");
    }
    drop(log);
    let stopped = Command::new("kill").arg(server.id().to_string()).status().expect("kill runs");
    assert!(stopped.success());
    let mut status = None;
    let ended = holds_within(Duration::from_secs(30), || {
        status = server.try_wait().expect("its status");
        status.is_some()
    });
    if !ended {
        server.kill().expect("it is killed");
        server.wait().expect("it ends");
    }
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}

#[test]
fn a_demo_whose_output_is_not_read_ends_well_and_leaves_nothing() {
    let temporary = tempfile::tempdir().expect("a directory");
    let mut demo = Command::new(PROGRAM)
        .args(["demo", "--seconds", "1", "--bots", "100", "--rate", "500"])
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fairlane starts");
    drop(demo.stdout.take());
    let ended = demo.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{said}");
    let left = std::fs::read_dir(temporary.path()).expect("the directory").count();
    assert_eq!(left, 0, "{said}");
}
