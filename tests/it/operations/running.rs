//! `fairlane serve` and `fairlane demo`, started as a user starts them.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::support::process::signal;
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

#[test]
fn a_command_whose_messages_are_not_read_ends_with_its_own_exit_code() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("bad.ndjson"), "no counter\n").expect("a file");
    let cases: [(&[&str], i32); 2] = [
        (&["status", "--config", "missing.toml"], 64),
        (&["counters", "import", "bad.ndjson", "--bot", "b"], 1),
    ];
    for (arguments, code) in cases {
        let (reader, messages) = std::io::pipe().expect("a pipe");
        drop(reader);
        let ended = Command::new(PROGRAM)
            .args(arguments)
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .stderr(messages)
            .status()
            .expect("fairlane starts");
        assert_eq!(ended.code(), Some(code), "{arguments:?}");
    }
}

/// A directory whose path is short enough for the socket of a private Redis.
fn short_directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/tmp").expect("a directory")
}

/// Starts a demo that would run for a minute, with its files under `temporary`.
fn demo(temporary: &Path) -> Command {
    // Tests under nohup would pass their ignored SIGHUP on. Its whole path, because a test sets PATH.
    let mut demo = Command::new("/usr/bin/env");
    if cfg!(target_os = "linux") {
        demo.arg("--default-signal=HUP");
    }
    demo.arg(PROGRAM)
        .args(["demo", "--seconds", "60", "--bots", "100", "--rate", "500"])
        .env("TMPDIR", temporary)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    demo
}

/// Waits for the end of a demo, which must leave neither files nor processes.
fn ended(demo: Child, temporary: &Path) -> (Output, String) {
    let ended = demo.wait_with_output().expect("it ends");
    let said = [&ended.stdout[..], &ended.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let left = std::fs::read_dir(temporary).expect("the directory").count();
    assert_eq!(left, 0, "{said}");
    let name = temporary.file_name().expect("a name").to_string_lossy();
    let running = || {
        let all = Command::new("ps").args(["-A", "-ww", "-o", "args="]).output().expect("ps runs");
        String::from_utf8_lossy(&all.stdout).contains(&*name)
    };
    assert!(holds_within(Duration::from_secs(30), || !running()), "a process runs on: {said}");
    (ended, said)
}

/// What a demo says whose terminal is closed while it runs.
fn hung_up(child: &mut Child) -> String {
    let mut output = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut said = String::new();
    while !said.contains("Stop early") {
        assert!(output.read_line(&mut said).expect("a line") > 0, "it ended: {said}");
    }
    signal(child.id(), "HUP");
    output.read_to_string(&mut said).expect("the rest of its output");
    said
}

#[test]
fn a_demo_whose_terminal_is_closed_tells_its_results_and_leaves_nothing() {
    let temporary = short_directory();
    let mut child = demo(temporary.path()).spawn().expect("fairlane starts");
    let said = hung_up(&mut child);
    let (ended, errors) = ended(child, temporary.path());
    assert!(ended.status.success(), "{said}{errors}");
    assert!(said.contains("\nStopped early: the other events were not handled."), "{said}");
}

#[test]
fn a_demo_that_is_interrupted_while_it_starts_leaves_nothing() {
    let temporary = short_directory();
    let child = demo(temporary.path()).spawn().expect("fairlane starts");
    let started = || std::fs::read_dir(temporary.path()).expect("the directory").count() > 0;
    assert!(holds_within(Duration::from_secs(30), started), "it does not start");
    signal(child.id(), "INT");
    let (ended, said) = ended(child, temporary.path());
    assert!(ended.status.success(), "{said}");
    assert!(said.contains("Stopped early"), "{said}");
}

#[test]
fn a_demo_without_redis_server_names_the_package_and_leaves_nothing() {
    let (temporary, programs) = (short_directory(), short_directory());
    let child = demo(temporary.path()).env("PATH", programs.path()).spawn();
    let (ended, said) = ended(child.expect("fairlane starts"), temporary.path());
    assert_eq!(ended.status.code(), Some(69), "{said}");
    assert!(said.ends_with("; install the package redis-server (7.0 or newer)\n"), "{said}");
}

#[test]
fn a_demo_under_nohup_outlives_its_terminal() {
    let temporary = short_directory();
    let demo = ["demo", "--seconds", "3", "--bots", "100", "--rate", "500"];
    let mut child = Command::new("nohup")
        .arg(PROGRAM)
        .args(demo)
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fairlane starts");
    let said = hung_up(&mut child);
    let (ended, errors) = ended(child, temporary.path());
    assert!(ended.status.success(), "{said}{errors}");
    assert!(said.contains("\nLost: 0. "), "{said}");
}

#[test]
fn a_demo_without_a_directory_for_its_files_ends_as_with_a_wrong_setting() {
    let temporary = short_directory();
    let missing = temporary.path().join("no-directory");
    std::fs::write(&missing, "").expect("a file");
    let ended = demo(&missing).output().expect("fairlane starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(64), "{said}");
    assert!(said.ends_with("; set TMPDIR to another directory\n"), "{said}");
}
