//! The probes of MongoDB, and of the counters that need it.

use mongodb::bson::doc;

use super::{ConfigDirectory, check, redis};
use crate::support::mongo::{self, MongoServer, free_port};

#[tokio::test]
async fn a_mongodb_that_refuses_or_promises_little_is_explained() {
    let redis = redis();
    let options = mongo::Options { standalone: true, ..mongo::Options::default() };
    let mut mongo = MongoServer::start(options);
    let url = |user: &str, options: &str| {
        format!("\"mongodb://{user}{}/{options}\"", mongo_address(&mongo))
    };
    check(&redis, &[("mongodb.url", &url("", "?w=1"))]).expect(
        0,
        &[
            "warn mongodb topology a standalone server",
            "a majority of one means little: nothing has a copy, and there is no failover; make it",
            "warn mongodb writes mongodb.url asks for w=1",
            "a failover may undo what was acknowledged; remove w and journal from the options",
        ],
    );
    let client = mongodb::Client::with_uri_str(mongo.url()).await.unwrap();
    let roles = [doc! { "role": "read", "db": "fairlane" }];
    let reader = doc! { "createUser": "reader", "pwd": "right", "roles": roles };
    client.database("admin").run_command(reader).await.unwrap();
    client.shutdown().await;
    let wrong = url("reader:wr0ng@", "");
    let right = url("reader:right@", "");
    mongo.restart(mongo::Options { auth: true, ..mongo::Options::default() });
    let ran = check(&redis, &[("mongodb.url", &wrong)]);
    ran.expect(
        1,
        &[
            "fail mongodb MongoDB at mongodb://***@127.0.0.1:",
            "it cannot be used at all; correct user and password in mongodb.url",
        ],
    );
    assert!(!format!("{ran:?}").contains("wr0ng"), "{ran:?}");
    check(&redis, &[("mongodb.url", &right)]).expect(
        1,
        &[
            "ok mongodb answers at",
            "fail mongodb rights MongoDB at mongodb://***@127.0.0.1:",
            "Fairlane writes, reads and deletes there; give the user the role readWrite",
        ],
    );
}

fn mongo_address(server: &MongoServer) -> String {
    server.address().to_string()
}

#[tokio::test]
async fn the_database_of_the_counters_is_told() {
    let redis = redis();
    let elsewhere = check(&redis, &[]);
    let lines = ["ok mongodb not used (mongodb.url is empty)"];
    elsewhere.expect(0, &["ok pipeline counters does not run: it needs mongodb.url", lines[0]]);

    let off = [("pipelines.counters.enabled", "false")];
    check(&redis, &off).expect(0, &lines);
    assert!(!check(&redis, &off).says("ok pipeline counters"));

    let place = ConfigDirectory::new("", &[]);
    let counts = "ok pipeline counters runs where a private MongoDB can be started: see mongodb";
    let missing = "ok mongodb not used: /nowhere/mongod cannot be started (No such file";
    place.run_with(&[], &[("FAIRLANE_MONGOD", "/nowhere/mongod")]).expect(0, &[counts, missing]);
    let there = "ok mongodb a private one beside the private Redis: /bin/true";
    place.run_with(&[], &[("FAIRLANE_MONGOD", "/bin/true")]).expect(0, &[counts, there]);
    let data = place.0.path().join("fairlane-data/mongodb/data");
    std::fs::create_dir_all(&data).unwrap();
    place.run_with(&[], &[("FAIRLANE_MONGOD", "/nowhere/mongod")]).expect(0, &[missing]);
    std::fs::write(data.join("journal"), "").unwrap();
    let stranded = place.run_with(&[], &[("FAIRLANE_MONGOD", "/nowhere/mongod")]);
    stranded.expect(69, &["fail mongodb /nowhere/mongod cannot be started (No such file"]);
    assert!(stranded.out.contains("fairlane-data/mongodb/data holds data"), "{}", stranded.out);
    place.run_with(&[], &[("FAIRLANE_MONGOD", "/bin/true")]).expect(0, &[there]);

    let url = format!("mongodb://127.0.0.1:{}", free_port());
    let away = check(&redis, &[("mongodb.url", &format!("{url:?}"))]);
    away.expect(69, &["ok pipeline counters handler counter, events ad.viewed", "fail mongodb"]);
}
