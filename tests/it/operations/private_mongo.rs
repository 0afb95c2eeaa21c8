//! The private MongoDB server: one per directory, shared, adopted, and stopped by its last user.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use fairlane::app::{App, AppError};
use fairlane::cli::{CliError, Exit};
use fairlane::config::Config;
use fairlane::mongo::MongoUrl;
use fairlane::mongo::client::{Acknowledged, Mongo};
use fairlane::mongo::private::{Options, PrivateMongo, PrivateMongoError};
use mongodb::Client;
use mongodb::bson::{Document, doc};
use tempfile::TempDir;

use crate::support::mongo::program;
use crate::support::process::signal;
use crate::support::served::{PROGRAM, Served};
use crate::support::wait::{eventually, holds_within};

const LONG: Duration = Duration::from_secs(20);

/// Kills a server that a failed test leaves running.
struct Guard(u32);

impl Drop for Guard {
    fn drop(&mut self) {
        if alive(self.0) {
            signal(self.0, "KILL");
        }
    }
}

/// Whether the process runs. A process that has ended and was not waited for does not count.
fn alive(pid: u32) -> bool {
    let stat = ["-o", "stat=", "-p", &pid.to_string()].map(str::to_owned);
    let output = std::process::Command::new("ps").args(stat).output().unwrap();
    let state = String::from_utf8(output.stdout).unwrap();
    !state.trim().is_empty() && !state.starts_with('Z')
}

/// A killed process shows no arguments at once, but the system takes a moment to end it.
fn ended(pid: u32) -> bool {
    holds_within(Duration::from_secs(5), || !alive(pid))
}

fn options() -> Options {
    let arguments = ["--cache-size", "64M"].map(Into::into).to_vec();
    Options { program: program(), arguments, ..Options::default() }
}

async fn start(dir: &TempDir) -> (PrivateMongo, Guard) {
    let mongo = PrivateMongo::start_with(dir.path(), options()).await.unwrap();
    let guard = Guard(mongo.pid());
    (mongo, guard)
}

/// Another user of the server. The test that started the server holds its guard.
async fn adopt(dir: &TempDir) -> PrivateMongo {
    PrivateMongo::start_with(dir.path(), options()).await.unwrap()
}

fn port(url: &MongoUrl) -> u16 {
    url.to_string().rsplit(':').next().unwrap().parse().unwrap()
}

async fn client(mongo: &PrivateMongo) -> Client {
    Client::with_uri_str(mongo.url().expose()).await.unwrap()
}

async fn refusal(dir: &Path, options: Options) -> PrivateMongoError {
    PrivateMongo::start_with(dir, options).await.unwrap_err()
}

/// The process id of the last started server.
fn recorded(data_dir: &Path) -> Option<u32> {
    let server = fs::read_to_string(data_dir.join("mongodb/server")).ok()?;
    server.split(' ').next()?.parse().ok()
}

/// Builds an instance that fails for another reason if it gets as far as its pipelines.
async fn build(dir: &TempDir, program: &Path) -> AppError {
    build_with("", dir, program).await
}

/// The same with these further settings.
async fn build_with(settings: &str, dir: &TempDir, program: &Path) -> AppError {
    let text = format!("[pipelines.one]\nhandler = \"nothing\"\nevents = [\"*\"]\n{settings}");
    let mut config = Config::from_toml(&text, "the test").unwrap();
    dir.path().clone_into(&mut config.data_dir);
    config.mongodb.program = Some(program.to_owned());
    Box::pin(App::builder(config).build()).await.unwrap_err()
}

fn script(dir: &TempDir, name: &str, text: &str) -> Options {
    let path = dir.path().join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    Options { program: path, ..Options::default() }
}

#[tokio::test]
async fn a_private_server_acknowledges_by_majority_and_keeps_its_files_to_itself() {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("a b%20ä");
    let mongo = PrivateMongo::start_with(&data_dir, options()).await.unwrap();
    let _guard = Guard(mongo.pid());
    assert!(mongo.was_started());
    assert_eq!(data_dir.join("mongodb").metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let asked = Mongo::open(mongo.url(), "check").await.unwrap();
    assert_eq!(asked.acknowledged(), Acknowledged::ByMajority);
    asked.try_write().await.unwrap();
    asked.close().await;
    assert!(mongo.stop().await.unwrap());
}

#[tokio::test]
async fn the_last_one_out_stops_the_server_and_its_data_and_port_are_still_there() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let second = adopt(&dir).await;
    let (pid, url) = (first.pid(), first.url().clone());
    assert_eq!((second.pid(), second.url()), (pid, &url));
    assert!(!second.was_started());
    let notes = client(&second).await.database("d").collection::<Document>("c");
    notes.insert_one(doc! { "_id": 1 }).await.unwrap();

    assert!(!first.stop().await.unwrap());
    assert_eq!(notes.count_documents(doc! {}).await.unwrap(), 1);
    assert!(second.stop().await.unwrap());
    assert!(ended(pid));

    let (third, _guard) = start(&dir).await;
    assert_ne!(third.pid(), pid);
    assert_eq!(third.url(), &url);
    let notes = client(&third).await.database("d").collection::<Document>("c");
    assert_eq!(notes.count_documents(doc! {}).await.unwrap(), 1);
    assert!(third.stop().await.unwrap());
}

#[tokio::test]
async fn a_server_survives_its_starter_and_is_stopped_by_its_adopter() {
    let dir = tempfile::tempdir().unwrap();
    let (starter, _guard) = start(&dir).await;
    let pid = starter.pid();
    drop(starter);
    let adopter = adopt(&dir).await;
    assert_eq!(adopter.pid(), pid);
    assert!(adopter.stop().await.unwrap());
    assert!(ended(pid));
}

#[tokio::test]
async fn processes_that_start_concurrently_share_one_server() {
    let dir = tempfile::tempdir().unwrap();
    let start = || PrivateMongo::start_with(dir.path(), options());
    let (a, b, c) = tokio::join!(start(), start(), start());
    let all = [a.unwrap(), b.unwrap(), c.unwrap()];
    let _guard = Guard(all[0].pid());
    assert!(all.iter().all(|one| one.url() == all[0].url()));
    assert_eq!(all.iter().filter(|one| one.was_started()).count(), 1);
}

#[tokio::test]
async fn a_killed_server_is_replaced_on_its_port_with_all_it_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let notes = client(&first).await.database("d").collection::<Document>("c");
    notes.insert_one(doc! { "_id": 1 }).await.unwrap();
    signal(first.pid(), "KILL");
    assert!(ended(first.pid()));

    let (second, _guard) = start(&dir).await;
    assert_ne!(second.pid(), first.pid());
    assert_eq!(second.url(), first.url());
    assert_eq!(notes.count_documents(doc! {}).await.unwrap(), 1);
    assert!(!first.stop().await.unwrap(), "the other still uses it");
    assert!(second.stop().await.unwrap());
}

#[tokio::test]
async fn a_port_that_somebody_took_meanwhile_is_left_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let url = first.url().clone();
    assert!(first.stop().await.unwrap());
    let _taken = TcpListener::bind(("127.0.0.1", port(&url))).unwrap();
    let (second, _guard) = start(&dir).await;
    assert_ne!(second.url(), &url);
    assert!(second.stop().await.unwrap());
}

#[tokio::test]
async fn a_port_that_is_still_held_for_a_moment_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _guard) = start(&dir).await;
    let url = first.url().clone();
    assert!(first.stop().await.unwrap());
    let held = TcpListener::bind(("127.0.0.1", port(&url))).unwrap();
    let closing = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(held);
    };
    let ((second, _guard), ()) = tokio::join!(start(&dir), closing);
    assert_eq!(second.url(), &url);
    assert!(second.stop().await.unwrap());
}

#[tokio::test]
async fn a_process_that_only_has_the_number_of_a_server_is_neither_adopted_nor_ended() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("mongodb")).unwrap();
    let own = std::process::id();
    fs::write(dir.path().join("mongodb/server"), format!("{own} 1\n")).unwrap();
    let (mongo, _guard) = start(&dir).await;
    assert_ne!(mongo.pid(), own);
    let pid = mongo.pid();
    fs::write(dir.path().join("mongodb/server"), format!("{own} 1\n")).unwrap();
    assert!(mongo.stop().await.unwrap());
    assert!(ended(pid));
}

#[tokio::test]
async fn a_server_that_hangs_is_waited_for_then_reported_and_killed_by_the_last_one_out() {
    let dir = tempfile::tempdir().unwrap();
    let (mongo, _guard) = start(&dir).await;
    signal(mongo.pid(), "STOP");
    let short = Options { start_within: Duration::from_millis(100), ..options() };
    let error = refusal(dir.path(), short).await;
    assert!(matches!(error, PrivateMongoError::Silent { .. }), "{error}");
    assert!(error.to_string().ends_with("/mongodb/mongodb.log"), "{error}");

    let impatient = Options { stop_within: Duration::from_millis(100), ..options() };
    signal(mongo.pid(), "CONT");
    let adopter = PrivateMongo::start_with(dir.path(), impatient).await.unwrap();
    assert_eq!(adopter.pid(), mongo.pid());
    signal(adopter.pid(), "STOP");
    drop(mongo);
    let pid = adopter.pid();
    assert!(adopter.stop().await.unwrap());
    assert!(ended(pid));
}

/// The other process stops it later, as its last user.
#[tokio::test]
async fn a_server_that_another_process_starts_is_left_to_it_after_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let (mongo, _guard) = start(&dir).await;
    let lock = fs::File::open(dir.path().join("mongodb/lock")).unwrap();
    lock.lock().unwrap();
    tokio::time::pause();
    let stopping = tokio::time::timeout(Duration::from_secs(10), mongo.stop());
    assert!(!stopping.await.expect("it does not wait for the start").unwrap());
}

/// What a pipeline lacks is found after the server has started, because products need it.
#[tokio::test]
async fn a_process_that_cannot_start_leaves_no_server_running() {
    let dir = tempfile::tempdir().unwrap();
    let error = build(&dir, &program()).await;
    assert!(error.to_string().starts_with("pipelines.one.handler"), "{error}");
    let pid = recorded(dir.path()).unwrap();
    let _guard = Guard(pid);
    assert!(ended(pid));
}

#[tokio::test]
async fn a_missing_program_is_named_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let started = PrivateMongo::start(dir.path(), Some(Path::new("no-such-mongod"))).await;
    assert_eq!(
        started.unwrap_err().to_string(),
        "\"no-such-mongod\" cannot be run: No such file or directory (os error 2); install MongoDB (6.0 or newer), name its program in FAIRLANE_MONGOD, or set mongodb.url to a running one"
    );
}

#[tokio::test]
async fn a_server_that_ends_while_starting_is_reported_with_its_last_words() {
    let dir = tempfile::tempdir().unwrap();
    let failing = script(&dir, "mongod", "echo \"$@\"; echo the disk is full >&2; exit 3");
    let error = refusal(dir.path(), failing).await.to_string();
    assert!(error.contains("mongod ended while starting (exit status: 3)"), "{error}");
    assert!(error.contains("--bind_ip 127.0.0.1 --port "), "{error}");
    assert!(error.contains("/mongodb/data\nthe disk is full"), "{error}");
}

/// Otherwise the events of its pipelines leave the bus, and no process handles them.
#[tokio::test(start_paused = true)]
async fn a_process_whose_server_is_slow_does_not_run_without_it() {
    let dir = tempfile::tempdir().unwrap();
    let hanging = script(&dir, "mongod", "exec sleep 600").program;
    let error = build(&dir, &hanging).await;
    let _guard = Guard(recorded(dir.path()).unwrap());
    assert!(matches!(error, AppError::PrivateMongo(PrivateMongoError::Silent { .. })), "{error}");
    assert_eq!(CliError::from(error).exit(), Exit::Unavailable);
}

#[tokio::test]
async fn a_process_runs_without_a_server_only_if_no_program_works() {
    let dir = tempfile::tempdir().unwrap();
    let foreign = dir.path().join("foreign");
    fs::write(&foreign, [0xfe; 64]).unwrap();
    fs::set_permissions(&foreign, fs::Permissions::from_mode(0o755)).unwrap();
    let broken = script(&dir, "broken", "exit 3").program;
    let below = broken.join("mongod");
    for program in [Path::new("no-such-mongod"), &*below, &*foreign, &*broken] {
        let error = build(&dir, program).await;
        assert!(matches!(error, AppError::Handler { .. }), "{}: {error}", program.display());
    }
    let failing = script(&dir, "failing", "echo x > data/journal; exit 3").program;
    for program in [&failing, &broken] {
        let error = build(&dir, program).await;
        let ended = matches!(error, AppError::PrivateMongo(PrivateMongoError::Ended { .. }));
        assert!(ended, "{}: {error}", program.display());
        assert!(error.to_string().contains("disable the pipelines that need MongoDB"), "{error}");
    }
}

/// Otherwise it would run without counters and rules, and lose their events.
#[tokio::test]
async fn a_process_does_not_start_if_the_program_for_the_data_of_an_earlier_start_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let (mongo, _guard) = start(&dir).await;
    assert!(mongo.stop().await.unwrap());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for program in [Path::new("no-such-mongod"), &*file.join("mongod"), &*file] {
        let error = build(&dir, program).await;
        let gone = matches!(error, AppError::PrivateMongo(PrivateMongoError::ProgramGone { .. }));
        assert!(gone, "{}: {error}", program.display());
        let (text, name) = (error.to_string(), program.to_str().unwrap());
        for word in ["/mongodb/data ", name, "FAIRLANE_MONGOD", "mongodb.url", "enabled = false"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert_eq!(CliError::from(error).exit(), Exit::Unavailable);
    }
    let off = "[pipelines.counters]\nenabled = false\n[pipelines.automations]\nenabled = false\n";
    let error = build_with(off, &dir, Path::new("no-such-mongod")).await;
    assert!(matches!(error, AppError::Handler { .. }), "{error}");
}

/// The remedy is not to install the program.
#[tokio::test]
async fn an_error_that_may_pass_does_not_say_that_the_program_for_the_data_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("mongodb/data");
    fs::create_dir_all(&data).unwrap();
    fs::write(data.join("journal"), "x").unwrap();
    // Longer than any argument may be.
    let arguments = vec!["x".repeat(4 << 20).into()];
    let options = Options { arguments, ..script(&dir, "mongod", "exit 3") };
    let error = refusal(dir.path(), options).await;
    assert!(matches!(error, PrivateMongoError::Program { .. }), "{error}");
}

/// It recovers its data before it listens.
#[tokio::test]
async fn a_server_that_writes_to_its_log_is_waited_for_longer() {
    let dir = tempfile::tempdir().unwrap();
    let text = "for n in $(seq 20); do echo $n; sleep 0.2; done; exec sleep 600";
    let start_within = Duration::from_secs(3);
    let recovering = Options { start_within, ..script(&dir, "mongod", text) };
    let started = Instant::now();
    let error = refusal(dir.path(), recovering).await;
    let _guard = Guard(recorded(dir.path()).unwrap());
    assert!(matches!(error, PrivateMongoError::Silent { .. }), "{error}");
    assert!(started.elapsed() > Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_second_signal_ends_a_start_that_waits_for_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let hanging = script(&dir, "mongod", "exec sleep 600").program;
    let environment = [("FAIRLANE_MONGOD", hanging.to_str().unwrap())];
    let mut process = Served::spawn_in(PROGRAM, "data_dir = \"data\"", "work", &environment);
    let data_dir = process.directory().join("data");
    eventually(LONG, "it starts the server", async || recorded(&data_dir).is_some()).await;
    let _guard = Guard(recorded(&data_dir).unwrap());
    process.sigterm();
    let stops = "not ready any more";
    eventually(LONG, "it knows", async || process.log().contains(stops)).await;
    process.sigterm();
    // Without the signal it waits for a minute.
    let status = process.wait_exit(Duration::from_secs(10)).expect("it ends");
    assert_eq!(status.code(), Some(0), "{}", process.log());
}
