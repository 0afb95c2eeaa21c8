//! `deploy/systemd/fairlane.service`, and what `fairlane serve` reports to systemd.

use std::fs;
use std::process::Command;
use std::time::Duration;

use clap::Parser as _;
use fairlane::cli::Cli;
use fairlane::config::Config;
use tokio::net::UnixDatagram;

use super::{text, time_to_stop};
use crate::support::config::config;
use crate::support::receivers::is_there;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::{PROGRAM, Served};

const UNIT: &str = "deploy/systemd/fairlane.service";
/// The first version of systemd that judges a unit which is not installed.
const OFFLINE: u32 = 250;
const LONG: Duration = Duration::from_secs(60);

/// The settings of the unit, in order: name and value.
fn settings() -> Vec<(String, String)> {
    let text = text(UNIT);
    let lines = text.lines().filter(|line| !line.starts_with(['#', '[']) && !line.is_empty());
    let split = lines.map(|line| line.split_once('=').unwrap_or_else(|| panic!("{line}")));
    split.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The value of a setting that the unit has once.
pub(super) fn setting(name: &str) -> String {
    let mut values = settings().into_iter().filter(|(known, _)| known == name);
    let (_, value) = values.next().unwrap_or_else(|| panic!("no {name}"));
    assert!(values.next().is_none(), "{name} is there twice");
    value
}

fn duration(name: &str) -> Duration {
    humantime::parse_duration(&setting(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The version of systemd on this machine.
fn version() -> Option<u32> {
    let output = Command::new("systemd-analyze").arg("--version").output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout);
    said.split_whitespace().nth(1)?.parse().ok()
}

/// What `systemd-analyze` says about the unit, with the program of this build. `None` without it.
fn analyze(arguments: &[&str]) -> Option<String> {
    if version().is_none_or(|version| version < OFFLINE) {
        println!("not shown: there is no systemd {OFFLINE}");
        return None;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("fairlane.service");
    fs::write(&file, text(UNIT).replace("/usr/bin/fairlane", PROGRAM)).expect("a unit");
    let output = Command::new("systemd-analyze").args(arguments).arg(&file).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{arguments:?}: {said}");
    Some(said)
}

#[test]
fn systemd_accepts_the_unit_without_a_warning() {
    if let Some(said) = analyze(&["verify", "--man=no"]) {
        assert_eq!(said, "");
    }
}

#[test]
fn systemd_judges_the_exposure_of_the_service_as_low() {
    // The threshold is ten times the level.
    if let Some(said) = analyze(&["security", "--offline=true", "--no-pager", "--threshold=20"]) {
        assert!(said.contains("Overall exposure level"), "{said}");
    }
}

#[test]
fn the_service_runs_a_command_of_fairlane_and_reloads_with_the_signal_that_fairlane_takes() {
    let command = setting("ExecStart");
    Cli::try_parse_from(command.split(' ')).unwrap_or_else(|error| panic!("{command}: {error}"));
    assert!(command.starts_with("/usr/bin/fairlane serve "), "{command}");
    assert_eq!(setting("ExecReload"), "/bin/kill -HUP $MAINPID");
}

#[test]
fn systemd_waits_for_a_clean_stop_and_signals_only_fairlane() {
    for config in ["", &text("deploy/debian/fairlane.toml")] {
        let config = Config::from_toml(config, "a configuration").expect("it is accepted");
        let (given, needed) = (duration("TimeoutStopSec"), time_to_stop(&config));
        assert!(given >= needed, "{given:?} is less than {needed:?}");
    }
    // A private Redis must outlive the last slices.
    assert_eq!(setting("KillMode"), "mixed");
}

/// A private Redis may load its data for long, and systemd would end it with the start.
#[test]
fn systemd_sets_no_limit_to_a_start() {
    assert_eq!(setting("TimeoutStartSec"), "infinity");
}

#[test]
fn the_service_has_the_rights_of_its_user_alone() {
    for (name, value) in [
        ("User", "fairlane"),
        ("NoNewPrivileges", "true"),
        ("CapabilityBoundingSet", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "true"),
        ("PrivateDevices", "true"),
        ("RestrictNamespaces", "true"),
        ("MemoryDenyWriteExecute", "true"),
        ("SystemCallArchitectures", "native"),
        ("StateDirectory", "fairlane"),
        ("UMask", "0077"),
    ] {
        assert_eq!(setting(name), value, "{name}");
    }
    let settings = settings();
    let has = |name: &str, value: &str| settings.iter().any(|(n, v)| n == name && v == value);
    assert!(has("SystemCallFilter", "@system-service"));
    assert!(has("SystemCallFilter", "~@privileged @resources"));
    assert!(has("LoadCredential", "token:/etc/fairlane/tokens"));
    assert!(has("LoadCredential", "secret:/etc/fairlane/secrets"));
}

#[test]
fn a_wrong_configuration_is_not_tried_again() {
    assert_eq!(setting("Restart"), "on-failure");
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("fairlane.toml");
    fs::write(&file, "wrong = 1").expect("a file");
    let output = Command::new(PROGRAM).args(["serve", "--config"]).arg(&file).output().unwrap();
    let code = output.status.code().expect("a code").to_string();
    assert_eq!(setting("RestartPreventExitStatus"), code);
}

/// The next report. The process sends each in a message of its own.
async fn report(socket: &UnixDatagram) -> String {
    let mut message = [0; 256];
    let received = tokio::time::timeout(LONG, socket.recv(&mut message)).await;
    let length = received.expect("a report").expect("a message");
    String::from_utf8_lossy(&message[..length]).trim_end().to_owned()
}

#[tokio::test]
async fn fairlane_reports_its_start_its_progress_and_its_stop_to_systemd() {
    assert_eq!(setting("Type"), "notify");
    assert!(duration("WatchdogSec") >= Duration::from_secs(10), "a busy machine is slow");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("pipelines.test.handler", "\"log\"")]);
    let environment = [("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "300000")];
    let mut process = Served::start_in(&config, &environment).await;
    assert_eq!(report(&socket).await, "READY=1");
    for _ in 0..3 {
        assert_eq!(report(&socket).await, "WATCHDOG=1");
    }
    process.sigterm();
    loop {
        match report(&socket).await.as_str() {
            "STOPPING=1" => break,
            other => assert_eq!(other, "WATCHDOG=1"),
        }
    }
    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0));
    assert!(!process.log().contains("cannot report to systemd"), "{}", process.log());
}

#[tokio::test]
async fn a_socket_of_systemd_that_is_gone_does_not_keep_fairlane_from_running() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("pipelines.test.handler", "\"log\"")]);
    let mut process = Served::start_in(&config, &[("NOTIFY_SOCKET", "/nowhere/notify")]).await;
    process.sigterm();
    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0));
    assert!(process.log().contains("cannot report to systemd"), "{}", process.log());
}

#[test]
fn the_tools_of_systemd_are_looked_for() {
    // A control: if the first line of its version changes its form, the tests above must not pass
    // without a look at the unit.
    assert_eq!(is_there("systemd-analyze"), version().is_some());
}
