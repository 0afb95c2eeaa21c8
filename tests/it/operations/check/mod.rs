//! `fairlane check`: its findings on real servers, with and without faults.

mod database;
mod replicas;
mod targets;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fairlane::id::Prefix;
use fairlane::redis::keys;
use serde_json::Value;

use crate::support::cluster::Cluster;
use crate::support::config::{SHARDS, config};
use crate::support::fleet::{Fleet, metrics_address};
use crate::support::mongo::{self, MongoServer, free_port};
use crate::support::redis::{Options, Persistence, RedisBackend as _, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// A server with persistence, like a production installation.
fn redis() -> RedisServer {
    let persistence = Persistence::EverySecond;
    RedisServer::start(Options { persistence, tcp: true, ..Options::default() })
}

/// A directory with a configuration.
struct ConfigDirectory(tempfile::TempDir);

#[derive(Debug)]
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    /// Whether the table has this line. Any number of spaces may separate its words.
    fn says(&self, line: &str) -> bool {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        self.out.lines().any(|found| words(found).starts_with(&words(line)))
    }

    #[track_caller]
    fn expect(&self, code: i32, lines: &[&str]) {
        for line in lines {
            assert!(self.says(line), "{line:?} is missing in\n{}\n{}", self.out, self.err);
        }
        assert_eq!(self.code, code, "{}\n{}", self.out, self.err);
    }
}

impl ConfigDirectory {
    /// One pipeline on a Redis. `settings` are further keys with their values in TOML.
    fn new(redis: &str, settings: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let redis = format!("{redis:?}");
        let any_port = "\"127.0.0.1:0\"";
        let mut all = BTreeMap::from([
            ("redis.url", redis.as_str()),
            ("http.listen", any_port),
            ("metrics.listen", any_port),
            ("pipelines.log.handler", "\"log\""),
            ("pipelines.log.events", "[\"*\"]"),
        ]);
        all.extend(settings.iter().copied());
        let text = all.iter().fold(String::new(), |mut text, (key, value)| {
            writeln!(text, "{key} = {value}").unwrap();
            text
        });
        std::fs::write(dir.path().join("fairlane.toml"), text).unwrap();
        Self(dir)
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, &[])
    }

    fn run_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_fairlane"))
            .arg("check")
            .args(arguments)
            .current_dir(self.0.path())
            .env_remove("RUST_LOG")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        Ran {
            code: output.status.code().unwrap(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn check(redis: &RedisServer, settings: &[(&str, &str)]) -> Ran {
    ConfigDirectory::new(&redis.url(), settings).run(&[])
}

async fn ask(server: &RedisServer, command: &[&str]) -> redis::Value {
    let mut connection = server.connection().await;
    redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn the_audit_reports_notifications_in_no_structure_and_schedules_them_again() {
    let redis = redis();
    let place = ConfigDirectory::new(&redis.url(), &[("redis.shards", "1")]);
    let ran = place.run(&["--audit"]);
    ran.expect(0, &["ok audit looked at 0 notifications; none was lost"]);
    let id = "0.0192f1b0c1d27c3e8f00112233445566";
    let record = format!("fl:{{notifications:0}}:n:{id}");
    let fields = [
        "state",
        "scheduled",
        "bot",
        "shop",
        "uid",
        "",
        "type",
        "none",
        "label",
        "none",
        "url",
        "http://93.184.216.34/",
        "due",
        "4000000000000",
        "expires",
        "4000086400000",
        "online",
        "0",
        "created",
        "1",
        "attempts",
        "0",
        "s",
        "0",
    ];
    ask(&redis, &[&["HSET", &record][..], &fields].concat()).await;
    let ran = place.run(&["--audit"]);
    ran.expect(0, &["warn audit looked at 1 notification; 1 in no structure"]);
    let due = ask(&redis, &["ZSCORE", "fl:{notifications:0}:due", id]).await;
    assert_eq!(redis::from_redis_value::<String>(due).unwrap(), "4000000000000");
    place.run(&["--audit"]).expect(0, &["ok audit looked at 1 notification; none was lost"]);
}

#[tokio::test]
async fn all_is_well_with_real_servers_and_nothing_stays_behind() {
    let (redis, mongo) = (redis(), MongoServer::start(mongo::Options::default()));
    let url = format!("{:?}", mongo.url());
    let place = ConfigDirectory::new(&redis.url(), &[("mongodb.url", &url)]);
    let before = mongo.collections().await;
    let ran = place.run(&[]);
    let answers = format!("ok mongodb answers at {}", mongo.url());
    ran.expect(
        0,
        &[
            "ok configuration ./fairlane.toml; redis+unix://",
            "ok pipeline log handler log, events *",
            "ok redis answers at ",
            "ok version 7.",
            "ok role master",
            "ok eviction noeviction",
            "ok durability appendfsync everysec: a power cut loses up to 2 s",
            "ok memory ",
            "ok clients ",
            "ok clock differs from ours by ",
            "ok scripts may be loaded and run",
            "ok keys may be written under fl:",
            "ok channels messages published under fl: are received",
            "ok shards 16; no data yet",
            "ok data no pipeline ever ran here",
            "ok format no data yet",
            "ok bus fairlane:events no event yet",
            &answers,
            "ok mongodb version ",
            "ok mongodb topology replica set ",
            "ok mongodb writes count when a majority has them",
            "ok mongodb clock differs from ours by ",
            "ok mongodb rights database fairlane may be written",
            "ok mongodb format no mark, so format 1; ",
            "ok http.listen 127.0.0.1:0: any free port",
            "ok auth no tokens: open to every program of this machine",
        ],
    );
    assert!(ran.out.ends_with(" 0 failures\n") && ran.err.is_empty(), "{ran:?}");
    assert!(!ran.out.contains('\u{1b}'), "no colours outside a terminal");
    let left: Vec<String> = redis::from_redis_value(ask(&redis, &["KEYS", "*"]).await).unwrap();
    assert_eq!(left, [""; 0]);
    assert_eq!(mongo.collections().await, before);

    let json: Value = serde_json::from_str(&place.run(&["--json"]).out).unwrap();
    let findings = json.as_array().unwrap();
    for finding in findings {
        let keys: Vec<_> = finding.as_object().unwrap().keys().map(String::as_str).collect();
        let explained: &[_] = if finding["state"] == "ok" {
            &["check", "found", "state"]
        } else {
            &["check", "found", "remedy", "state", "why"]
        };
        assert_eq!(keys, explained, "{finding}");
    }
    assert!(findings.iter().any(|finding| finding["check"] == "mongodb rights"), "{json}");
}

#[tokio::test]
async fn a_redis_that_may_lose_events_is_explained() {
    let redis = redis();
    ask(&redis, &["CONFIG", "SET", "appendonly", "no"]).await;
    ask(&redis, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    check(&redis, &[]).expect(
        0,
        &[
            "warn eviction allkeys-lru",
            "warn eviction: allkeys-lru",
            "once maxmemory is set, events would be evicted; CONFIG SET maxmemory-policy noeviction",
            "warn durability appendonly is off",
            "a restart of Redis loses what is queued; CONFIG SET appendonly yes, and in redis.conf",
        ],
    );
    ask(&redis, &["CONFIG", "SET", "maxmemory", "1gb"]).await;
    ask(&redis, &["CONFIG", "SET", "maxclients", "6"]).await;
    check(&redis, &[]).expect(
        1,
        &[
            "fail eviction allkeys-lru",
            "queued events are evicted when memory is full",
            "fail clients ",
            "one more process could not connect; CONFIG SET maxclients",
        ],
    );
}

#[tokio::test]
async fn a_replica_is_no_place_for_queues() {
    let (primary, replica) = (redis(), redis());
    let port = primary.tcp_addr().port().to_string();
    ask(&replica, &["REPLICAOF", "127.0.0.1", &port]).await;
    check(&replica, &[]).expect(
        1,
        &[
            "fail role slave",
            "a replica cannot be written to; set redis.url to the primary",
            "fail keys Redis at ",
        ],
    );
}

#[tokio::test]
async fn a_user_without_rights_learns_which_one_is_missing() {
    let redis = redis();
    let as_user = |rights: &'static str| {
        let redis = &redis;
        async move {
            let words = format!("ACL SETUSER u reset on >pw {rights}");
            ask(redis, &words.split(' ').collect::<Vec<_>>()).await;
            let url = format!("redis://u:pw@{}", redis.tcp_addr());
            ConfigDirectory::new(&url, &[]).run(&[])
        }
    };
    as_user("+@all ~fl:* ~fairlane:* &fl:*").await.expect(0, &["ok scripts", "ok keys"]);
    let ran = as_user("+@all -evalsha ~fl:* ~fairlane:* &fl:*").await;
    ran.expect(1, &["fail scripts Redis at", "ok keys", "Fairlane needs this right; give it"]);
    as_user("+@all ~fairlane:* &fl:*").await.expect(1, &["fail scripts", "fail keys"]);
    as_user("+@all ~fl:* ~fairlane:*").await.expect(1, &["ok scripts", "fail channels"]);
    // The user may read the stream but not trim it.
    let ran = as_user("+@all ~fl:* %R~fairlane:* &fl:*").await;
    ran.expect(1, &["ok channels", "fail bus fairlane:events Redis at"]);
    as_user("+@all ~fl:* &fl:*").await.expect(1, &["ok keys", "fail bus fairlane:events"]);
    // Without the right to call INFO, the check stops.
    as_user("+@all -info ~fl:* ~fairlane:* &fl:*").await.expect(1, &["fail redis Redis at"]);
    ask(&redis, &["ACL", "SETUSER", "u", "reset", "on", ">other", "+@all"]).await;
    let url = format!("redis://u:secret@{}", redis.tcp_addr());
    let ran = ConfigDirectory::new(&url, &[]).run(&[]);
    assert!(!format!("{ran:?}").contains("secret"), "{ran:?}");
    ran.expect(69, &["fail redis cannot connect to Redis at", "nothing is copied or handled"]);
}

#[tokio::test]
async fn data_that_does_not_fit_the_configuration_is_found_out() {
    let redis = redis();
    ask(&redis, &["SET", "fl:shards", "8"]).await;
    ask(&redis, &["HSET", "fl:pipelines", "log", "1", "old", "1"]).await;
    ask(&redis, &["SET", "fairlane:events", "no stream"]).await;
    ask(&redis, &["XADD", "others", "*", "event", "{}"]).await;
    ask(&redis, &["XGROUP", "CREATE", "others", "billing", "0"]).await;
    let streams = ("bus.streams", "[\"fairlane:events\", \"others\"]");
    check(&redis, &[streams]).expect(
        64,
        &[
            "fail shards redis.shards is 16, but the data in this Redis was created with 8",
            "with another number, events of a bot would be searched in the wrong shard; set redis.shards = 8",
            "warn data not in the configuration: old",
            "its queued events are never handled; configure [pipelines.old], or delete it: fairlane pipelines drop old",
            "fail bus fairlane:events the key holds something that is no stream",
            "no event can be published or read; rename that key, or set bus.streams",
            "warn bus others 1 event, 1 unread, no reader now; group billing (lag 1, pending 0)",
            "no process reads it, so nothing is handled; start `fairlane serve` with the role ingest",
        ],
    );
}

#[tokio::test]
async fn every_probe_runs_although_redis_is_unavailable() {
    let port = free_port();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let listen = format!("\"{address}\"");
    let url = format!("redis://u:secret@127.0.0.1:{port}");
    let mongodb = format!("\"mongodb://u:secret@127.0.0.1:{port}\"");
    let settings = [("http.listen", listen.as_str()), ("mongodb.url", mongodb.as_str())];
    let place = ConfigDirectory::new(&url, &settings);
    let started = Instant::now();
    let ran = place.run(&[]);
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    let held = format!("fail http.listen {address}: Address already in use");
    ran.expect(
        69,
        &[
            "ok pipeline log",
            "fail redis cannot connect to Redis at 127.0.0.1:",
            "nothing is copied or handled while Redis is unavailable; start that Redis, or correct redis.url",
            "fail mongodb no MongoDB at mongodb://***@127.0.0.1:",
            "/readyz says degraded, and what needs MongoDB waits; start it, or correct mongodb.url",
            &held,
            "`fairlane serve` cannot listen there, and does not start; set http.listen to a free port",
        ],
    );
    assert!(!format!("{ran:?}").contains("secret"), "{ran:?}");
    assert!(ran.err.contains("3 of the checks failed"), "{ran:?}");
}

#[tokio::test]
async fn a_configuration_that_cannot_be_loaded_is_the_only_finding() {
    let place = ConfigDirectory::new("redis://", &[]);
    let ran = place.run(&[]);
    ran.expect(64, &["fail configuration ./fairlane.toml:5: redis.url is not a usable Redis URL"]);
    let ran = place.run(&["--json"]);
    let json: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, json.as_array().unwrap().len()), (64, 1), "{ran:?}");
    assert_eq!(json[0]["exit"], Value::Null);
}

#[tokio::test]
async fn a_running_fleet_is_no_obstacle() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.start(1).await;
    let address = metrics_address(&fleet.workers[0]).unwrap();
    let (listen, shards) = (format!("{address:?}"), SHARDS.to_string());
    let settings = [("metrics.listen", listen.as_str()), ("redis.shards", &shards)];
    let place = ConfigDirectory::new(&fleet.server.url(), &settings);
    let running = format!("ok metrics.listen {address}: Fairlane is running there");
    let known = "ok data not in this configuration: ";
    eventually(LONG, "the process is known and reads the bus", async || {
        let ran = place.run(&[]);
        ran.says(known) && ran.says("ok bus fairlane:events no event yet, is read")
    })
    .await;
    place.run(&[]).expect(0, &[&running, "ok shards 8", known]);
}

#[tokio::test]
async fn fairlane_on_its_own_port_is_recognised_behind_the_proxy_protocol() {
    let redis = redis();
    let proxies = [("http.trusted_proxies", "[\"127.0.0.1\"]"), ("http.proxy_protocol", "true")];
    let log = [&[("pipelines.test.handler", "\"log\"")], &proxies[..]].concat();
    let served = Served::start(&config(&redis, "test", &log)).await;
    let (address, shards) = (served.http(), SHARDS.to_string());
    let listen = format!("{address:?}");
    let own = [&[("http.listen", &*listen), ("redis.shards", &*shards)], &proxies[..]].concat();
    let running = format!("ok http.listen {address}: Fairlane is running there");
    check(&redis, &own).expect(0, &[&running]);
}

#[tokio::test]
async fn a_stream_of_another_environment_may_be_read_if_it_is_not_trimmed() {
    let redis = redis();
    let other = Prefix::parse("other").unwrap();
    ask(&redis, &["SET", &keys::shards(&other), "16"]).await;
    ask(&redis, &["HSET", &keys::read(&other, "fairlane:events"), "entries", "0"]).await;
    let warning = "other reads fairlane:events too: both handle its events and trim it; name other";
    check(&redis, &[]).expect(0, &["warn prefix fl; also in this Redis: other", warning]);
    let read_only = check(&redis, &[("bus.trim", "false")]);
    read_only.expect(0, &["ok prefix fl; also in this Redis: other; other reads fairlane:events"]);
}

#[tokio::test]
async fn headers_for_the_collector_that_cannot_be_read_are_found_before_the_start() {
    let redis = redis();
    let place = ConfigDirectory::new(&redis.url(), &[("tracing.headers_file", "\"headers\"")]);
    let missing = "fail tracing.headers_file tracing.headers_file: headers cannot be read: ";
    let why = "`fairlane serve` does not start with it; correct that file or setting";
    place.run(&[]).expect(1, &[missing, why]);
    std::fs::write(place.0.path().join("headers"), "authorization: Bearer x\n").unwrap();
    place.run(&[]).expect(0, &["ok tracing.headers_file 1 header can be read"]);
}

#[tokio::test]
async fn tokens_that_cannot_be_read_are_found_before_the_start() {
    let redis = redis();
    let tokens = "[{ name = \"shop\", token_file = \"token\", scopes = [\"publish\"] }]";
    let place = ConfigDirectory::new(&redis.url(), &[("auth.tokens", tokens)]);
    let missing = "fail auth auth.tokens: the file token of token \"shop\" cannot be read: ";
    place
        .run(&[])
        .expect(1, &[missing, "`fairlane serve` does not start with it; correct that setting"]);
    std::fs::write(place.0.path().join("token"), "0123456789abcdef").unwrap();
    place.run(&[]).expect(0, &["ok auth 1 token can be read"]);
    let open = ("http.listen", "\"0.0.0.0:0\"");
    let anybody = check(&redis, &[open, ("auth.allow_anonymous", "true")]);
    anybody.expect(0, &["warn auth no tokens, and http.listen is 0.0.0.0:0"]);
}

#[tokio::test]
async fn every_primary_of_a_cluster_is_looked_at() {
    let persistence = Persistence::EverySecond;
    let options = Options { persistence, ..Options::default() };
    let mut cluster = Cluster::start(options, 3, false).await;
    let place = ConfigDirectory::new(&cluster.url(), &[]);
    let at = |place: usize| cluster.nodes[place].tcp_addr();
    let addresses = [at(0), at(1), at(2)];
    let line =
        |what: &str, place: usize, found: &str| format!("{} {} {found}", what, addresses[place]);
    let mut fine = vec!["ok cluster 3 primaries hold all slots".to_owned()];
    for place in 0..3 {
        fine.push(line("ok redis", place, "answers at "));
        fine.push(line("ok scripts", place, "may be loaded and run"));
        fine.push(line("ok keys", place, "may be written under fl:"));
    }
    place.run(&[]).expect(0, &fine.iter().map(String::as_str).collect::<Vec<_>>());

    cluster.tell(1, &["CONFIG", "SET", "appendonly", "no"]).await;
    place.run(&[]).expect(
        0,
        &[
            &line("ok durability", 0, "appendfsync everysec"),
            &line("warn durability", 1, "appendonly is off"),
        ],
    );
    cluster.nodes[2].kill9();
    place.run(&[]).expect(
        69,
        &[
            &line("ok keys", 0, "may be written under fl:"),
            &line("fail redis", 2, "cannot connect to Redis at "),
            "nothing is copied or handled while Redis is unavailable; start that Redis",
        ],
    );
}
