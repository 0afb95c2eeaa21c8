//! MongoDB: the reports of its client, in normal operation and after a fault.

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::config::MongoUrl;
use fairlane::mongo::client::{Acknowledged, Mongo, MongoError, Topology};
use mongodb::bson::doc;

use crate::support::mongo::{MongoServer, Options, free_port};
use crate::support::wait::Stopwatch;

async fn open(url: &str) -> Mongo {
    Mongo::open(&MongoUrl::parse(url).unwrap(), "fairlane").await.unwrap()
}

#[tokio::test]
async fn a_server_describes_itself_and_a_trial_write_leaves_nothing_behind() {
    let server = MongoServer::start(Options::default());
    let mongo = open(&server.url()).await;
    mongo.ping().await.unwrap();
    let before = SystemClock.now();
    let info = mongo.info().await.unwrap();
    mongo.accept(&info).unwrap();
    assert!(matches!(&info.topology, Topology::ReplicaSet { members: 1, .. }), "{info:?}");
    let off = info.time.unwrap().abs_diff(before);
    assert!(off < Duration::from_secs(5), "its clock is ours, and differs by {off:?}");
    assert_eq!(mongo.acknowledged(), Acknowledged::ByMajority);

    let before = server.collections().await;
    mongo.try_write().await.unwrap();
    assert_eq!(server.collections().await, before, "nothing stays behind");
    mongo.close().await;
}

#[tokio::test]
async fn a_single_server_says_so_and_the_url_may_ask_for_less_than_a_majority() {
    let server = MongoServer::start(Options { standalone: true, ..Options::default() });
    let mongo = open(&format!("{}/?w=1", server.url())).await;
    assert_eq!(mongo.info().await.unwrap().topology, Topology::Standalone);
    assert_eq!(mongo.acknowledged(), Acknowledged::Otherwise("w=1".to_owned()));
    mongo.close().await;
}

#[tokio::test]
async fn an_unavailable_server_is_named_within_seconds_and_without_credentials() {
    let port = free_port();
    let mongo = open(&format!("mongodb://u:secret@127.0.0.1:{port}")).await;
    let watch = Stopwatch::start();
    let error = mongo.ping().await.unwrap_err();
    watch.within(Duration::from_secs(6), "it is told");
    assert!(error.is_passing(), "{error:?}");
    let said = error.to_string();
    let expected = format!(
        "no MongoDB at mongodb://***@127.0.0.1:{port} can be used within 3 s: 127.0.0.1:{port}: Connection refused"
    );
    assert!(said.starts_with(&expected), "{said}");
    assert!(said.contains("correct mongodb.url") && !said.contains("secret"), "{said}");
    mongo.close().await;
}

#[tokio::test]
async fn a_wrong_password_is_told_from_a_missing_right_and_a_server_that_hangs() {
    let mut server = MongoServer::start(Options::default());
    let client = mongodb::Client::with_uri_str(server.url()).await.unwrap();
    for (user, role) in [("writer", "readWrite"), ("reader", "read")] {
        let create = doc! { "createUser": user, "pwd": "right", "roles": [{ "role": role, "db": "fairlane" }] };
        client.database("admin").run_command(create).await.unwrap();
    }
    client.shutdown().await;
    server.restart(Options { auth: true, ..Options::default() });
    let address = server.address();

    let wrong = open(&format!("mongodb://writer:wrong@{address}")).await;
    let error = wrong.ping().await.unwrap_err();
    assert!(matches!(error, MongoError::Credentials { .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("mongodb.url") && said.contains("authSource"), "{said}");
    assert!(!said.contains("wrong") && !error.is_passing(), "{said}");

    let reader = open(&format!("mongodb://reader:right@{address}")).await;
    reader.ping().await.unwrap();
    let error = reader.try_write().await.unwrap_err();
    assert!(matches!(error, MongoError::Forbidden { command: "insert", .. }), "{error:?}");
    assert!(error.to_string().contains("readWrite"), "{error}");

    let writer = open(&format!("mongodb://writer:right@{address}")).await;
    writer.try_write().await.unwrap();
    server.sigstop();
    let watch = Stopwatch::start();
    let error = writer.ping().await.unwrap_err();
    watch.within(Duration::from_secs(8), &format!("{error:?}"));
    assert!(error.is_passing(), "{error:?}");
    server.sigcont();
    for mongo in [wrong, reader, writer] {
        mongo.close().await;
    }
}
