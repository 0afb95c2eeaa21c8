//! Data of a later version: no process of this version reads it, and every command says why.

use std::fs;
use std::path::Path;
use std::time::Duration;

use fairlane::formats::FORMATS;
use mongodb::bson::{Document, doc};
use serde_json::Value;

use super::handled::load;
use super::present;
use super::story::config;
use crate::support::cli::run_in;
use crate::support::counter_fleet::Stores;
use crate::support::mongo;
use crate::support::receiver::Receiver;
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Writes a mark, as another version would.
async fn mark(stores: &Stores, name: &str, value: &str) {
    let mut redis = stores.redis.connection().await;
    let () = redis::cmd("HSET")
        .arg("fl:formats")
        .arg(name)
        .arg(value)
        .query_async(&mut redis)
        .await
        .unwrap();
}

async fn marks(stores: &Stores) -> Vec<(String, String)> {
    let mut redis = stores.redis.connection().await;
    redis::cmd("HGETALL").arg("fl:formats").query_async(&mut redis).await.unwrap()
}

async fn mark_document(stores: &Stores, name: &str, value: &str) {
    let client = mongodb::Client::with_uri_str(stores.mongo.url()).await.unwrap();
    let formats = client.database("fairlane").collection::<Document>(FORMATS);
    formats.insert_one(doc! { "_id": name, "mark": value }).await.unwrap();
    client.shutdown().await;
}

fn ended(served: &mut Served) -> String {
    let code = served.wait_exit(LONG).map(|status| status.code());
    assert_eq!(code, Some(Some(64)), "{}", served.log());
    served.log()
}

fn written(config: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("fairlane.toml"), config).unwrap();
    directory
}

/// What `fairlane check` says about one subject: the state, what it found, and why it matters.
fn checked(directory: &Path, check: &str) -> (String, String, String) {
    let ran = run_in(directory, &["check", "--json"], "");
    let all: Value = serde_json::from_str(&ran.out).unwrap_or_else(|_| panic!("{ran:?}"));
    let found = all.as_array().unwrap().iter().find(|finding| finding["check"] == check);
    let found = found.unwrap_or_else(|| panic!("{ran:?}"));
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    (text("state"), text("found"), text("why"))
}

#[tokio::test]
async fn data_of_a_later_format_is_refused_before_anything_is_handled() {
    let receiver = Receiver::content().await;
    let stores = load(&present(), &receiver).await;
    mark(&stores, "queues:2", "2 9.9.0 1700000000000").await;
    let config = config(&stores, &receiver, "20ms");
    let expected = format!(
        "the key fl:formats in Redis has the mark queues:2: Fairlane 9.9.0 writes format 2 of queues, \
         leases, delayed events and dead letters, and this Fairlane {VERSION} reads formats up to 1; \
         start Fairlane 9.9.0 or later, or restore a backup from before its first start"
    );
    let log = ended(&mut Served::spawn(&config, "ingest,work,http,schedule"));
    assert!(log.contains(&expected), "{log}");
    assert_eq!(receiver.called(), 0);

    let directory = written(&config);
    for command in [&["dead", "list"][..], &["status"], &["pipelines", "list"]] {
        let ran = run_in(directory.path(), command, "");
        assert_eq!(ran.code, 64, "{command:?}: {ran:?}");
        assert!(ran.err.contains(&expected), "{command:?}: {ran:?}");
    }
    let (state, found, why) = checked(directory.path(), "format");
    assert_eq!((state.as_str(), found), ("fail", expected));
    assert!(why.starts_with("this version would misread the data"), "{why}");
}

#[tokio::test]
async fn documents_of_a_later_format_are_refused() {
    let receiver = Receiver::content().await;
    let stores = load(&present(), &receiver).await;
    mark_document(&stores, "profiles:2", "2 9.9.0 1700000000000").await;
    let config = config(&stores, &receiver, "20ms");
    let log = ended(&mut Served::spawn(&config, "ingest,work,http,schedule"));
    assert!(log.contains(&format!("the collection {FORMATS} at mongodb://")), "{log}");
    assert!(log.contains("has the mark profiles:2: Fairlane 9.9.0 writes format 2"), "{log}");
    assert_eq!(receiver.called(), 0);
    let (state, found, _) = checked(written(&config).path(), "mongodb format");
    assert!(state == "fail" && found.contains("has the mark profiles:2: "), "{found}");
}

#[tokio::test]
async fn documents_of_a_later_format_end_a_process_that_started_while_mongodb_was_down() {
    let receiver = Receiver::content().await;
    let mut stores = Stores::start(Persistence::Always);
    mark_document(&stores, "profiles:2", "2 9.9.0 1700000000000").await;
    stores.mongo.kill9();
    let config = config(&stores, &receiver, "20ms");
    let mut served = Served::start(&config).await;
    stores.mongo.restart(mongo::Options::default());
    let log = ended(&mut served);
    assert!(log.contains("has the mark profiles:2: Fairlane 9.9.0 writes format 2"), "{log}");
}

#[tokio::test]
async fn a_start_that_fails_marks_neither_redis_nor_mongodb() {
    let receiver = Receiver::content().await;
    let stores = Stores::start(Persistence::Always);
    let tokens =
        "[{ name = \"a\", token_file = \"/nowhere/a\", scopes = [\"read\"], bots = [\"*\"] }]";
    let config = format!("auth.tokens = {tokens}\n{}", config(&stores, &receiver, "20ms"));
    let log = ended(&mut Served::spawn(&config, "ingest,work,http,schedule"));
    assert!(log.contains("/nowhere/a"), "{log}");
    assert!(marks(&stores).await.is_empty());
    let client = mongodb::Client::with_uri_str(stores.mongo.url()).await.unwrap();
    let formats = client.database("fairlane").collection::<Document>(FORMATS);
    assert_eq!(formats.count_documents(doc! {}).await.unwrap(), 0);
    client.shutdown().await;
}

#[tokio::test]
async fn a_later_format_that_this_version_can_read_is_no_obstacle() {
    let receiver = Receiver::content().await;
    let stores = Stores::start(Persistence::Always);
    let config = config(&stores, &receiver, "20ms");
    drop(Served::start(&config).await);
    mark(&stores, "queues:2", "1 9.9.0 1700000000000").await;
    mark(&stores, "last", "9.9.0").await;
    let directory = written(&config);
    let (state, found, _) = checked(directory.path(), "format");
    assert!(state == "ok" && found.starts_with("last started: 9.9.0; "), "{found}");
    drop(Served::start(&config).await);
    let (_, found, _) = checked(directory.path(), "format");
    assert!(found.starts_with(&format!("last started: {VERSION}; ")), "{found}");
}

#[tokio::test]
async fn a_check_tells_which_version_started_last_and_which_others_run() {
    let receiver = Receiver::content().await;
    let stores = Stores::start(Persistence::Always);
    let config = config(&stores, &receiver, "20ms");
    let directory = written(&config);
    let checked = |check: &str| {
        let (state, found, _) = checked(directory.path(), check);
        assert_eq!(state, "ok", "{found}");
        found
    };
    assert_eq!(checked("format"), "no data yet");

    let served = Served::start(&config).await;
    let same = format!("last started: {VERSION}; {VERSION} changes no format");
    assert_eq!(checked("format"), same);
    assert_eq!(checked("mongodb format"), same);

    // A process of another version, and data of a version that made no marks.
    let mut redis = stores.redis.connection().await;
    let processes: Vec<(String, String)> =
        redis::cmd("HGETALL").arg("fl:processes").query_async(&mut redis).await.unwrap();
    let (id, says) = processes.first().expect("it is registered");
    let said = says.replace(&format!("\"version\":\"{VERSION}\""), "\"version\":\"0.0.9\"");
    assert_ne!(*says, said);
    drop(served);
    let mut pipe = redis::pipe();
    pipe.hset("fl:processes", format!("{id}-other"), said).del("fl:formats");
    let () = pipe.query_async(&mut redis).await.unwrap();
    let found = checked("format");
    let expected =
        format!("no mark, so format 1; {VERSION} changes no format; also running: 0.0.9 (");
    assert!(found.starts_with(&expected), "{found}");
}

#[tokio::test]
async fn a_running_process_keeps_its_marks_and_warns_of_a_later_version() {
    let receiver = Receiver::content().await;
    let stores = Stores::start(Persistence::Always);
    let served = Served::start(&config(&stores, &receiver, "20ms")).await;
    let before = marks(&stores).await;
    assert!(before.len() >= 9, "{before:?}");
    let mut redis = stores.redis.connection().await;
    let () = redis::cmd("DEL").arg("fl:formats").query_async(&mut redis).await.unwrap();
    mark(&stores, "queues:2", "2 9.9.0 1700000000000").await;
    eventually(LONG, "the marks are back", async || marks(&stores).await.len() > before.len())
        .await;
    eventually(LONG, "the process warns", async || {
        served.log().contains("a later version writes this data too; replace this process")
    })
    .await;
}
