//! Encrypted connections, and the reports when they fail.

use std::time::Duration;

use fairlane::app::App;
use fairlane::config::Config;
use futures_util::future::join_all;

use crate::support::bus::{add, event};
use crate::support::cli::run_in;
use crate::support::cluster::Cluster;
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::papers::Papers;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisBackend, RedisServer};
use crate::support::sentinel::{SERVICE, Sentinel};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// The arguments with which a server of Redis speaks TLS on its second port.
fn arguments(papers: &Papers, clients: &str) -> Vec<String> {
    let [ca, cert, key] = ["ca", "cert", "key"].map(|name| papers.path(name).display().to_string());
    [
        ["--tls-cert-file", &cert],
        ["--tls-key-file", &key],
        ["--tls-ca-cert-file", &ca],
        ["--tls-auth-clients", clients],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect()
}

/// A Redis that also speaks TLS.
pub(super) fn server(papers: &Papers, clients: &str) -> RedisServer {
    let mut arguments = arguments(papers, clients);
    arguments.extend(["--tls-port".to_owned(), "{tls}".to_owned()]);
    RedisServer::start_with(Options { tcp: true, ..Options::default() }, &arguments)
}

fn encrypted(server: &RedisServer) -> String {
    format!("\"rediss://127.0.0.1:{}\"", server.tls_port())
}

/// The error of a start with this configuration.
async fn refusal(config: &str) -> String {
    let config = Config::from_toml(config, "the test").unwrap();
    let app = App::builder(config).handler("recorder", Log::default().content());
    app.build().await.unwrap_err().to_string()
}

async fn handles(server: &impl RedisBackend, config: &str) {
    let log = Log::default();
    let instance = Instance::start(config, log.content()).await;
    let events: Vec<String> =
        (0..200).map(|id| event(&format!("bot-{}", id % 10), "test", id)).collect();
    add(server, STREAM, &events).await;
    eventually(LONG, "all are handled", async || log.len() >= 200).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_whole_instance_speaks_tls_and_shows_its_certificate_where_redis_asks() {
    let papers = Papers::new();
    let server = server(&papers, "yes");
    let (url, ca) = (encrypted(&server), papers.file("ca"));
    let (cert, key) = (papers.file("cert"), papers.file("key"));
    let trusting = [("redis.url", &*url), ("redis.ca_file", &*ca)];
    let shown = [("redis.cert_file", &*cert), ("redis.key_file", &*key)];
    let settings = [trusting, shown].concat();
    handles(&server, &config(&server, "test", &settings)).await;
    let error = refusal(&config(&server, "test", &trusting)).await;
    assert!(error.contains("redis.cert_file"), "{error}");
}

#[test]
fn a_key_that_does_not_belong_to_the_certificate_is_a_mistake_in_the_configuration() {
    let (papers, others) = (Papers::new(), Papers::new());
    let directory = tempfile::tempdir().unwrap();
    let (cert, key) = (papers.file("cert"), others.file("key"));
    let text = format!("[redis]\nurl = \"rediss://h\"\ncert_file = {cert}\nkey_file = {key}\n");
    std::fs::write(directory.path().join("fairlane.toml"), text).unwrap();
    let ran = run_in(directory.path(), &["status"], "");
    assert_eq!(ran.code, 64, "{ran:?}");
    let key = others.path("key");
    let said = format!(
        "fairlane.toml:4: redis.key_file names {}, which does not belong to redis.cert_file",
        key.display()
    );
    assert!(ran.err.contains(&said), "{ran:?}");
}

#[tokio::test]
async fn the_reason_why_tls_fails_is_told() {
    let (papers, others) = (Papers::new(), Papers::new());
    let server = server(&papers, "no");
    let (url, ca) = (encrypted(&server), papers.file("ca"));
    handles(&server, &config(&server, "test", &[("redis.url", &url), ("redis.ca_file", &ca)]))
        .await;

    let wrong = others.file("ca");
    let plain = format!("\"rediss://{}\"", server.tcp_addr());
    let turned = url.replace("rediss", "redis");
    let (certificate, remedy) = ("certificate", "redis.ca_file");
    // Each start waits for a while for a Redis that it can use.
    let starts = [
        (vec![("redis.url", &*url)], [certificate, remedy]),
        (vec![("redis.url", &*url), ("redis.ca_file", &*wrong)], [certificate, remedy]),
        (vec![("redis.url", &*plain)], ["does not speak TLS"; 2]),
        (vec![("redis.url", &*turned)], ["cannot connect to Redis"; 2]),
    ];
    let starts = starts.map(async |(settings, expected)| {
        let error = refusal(&config(&server, "test", &settings)).await;
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    });
    join_all(starts).await;
}

#[tokio::test]
async fn a_cluster_tells_the_ports_on_which_its_nodes_speak_tls() {
    let papers = Papers::new();
    let cluster = Cluster::encrypted(&arguments(&papers, "no")).await;
    let url = format!("\"{}\"", cluster.encrypted_url());
    let ca = papers.file("ca");
    let settings = [("redis.url", &*url), ("redis.ca_file", &*ca)];
    handles(&cluster, &config(&cluster, "test", &settings)).await;
}

#[tokio::test]
async fn sentinels_that_speak_tls_and_ask_for_a_password_name_a_redis_that_does_too() {
    let papers = Papers::new();
    let server = server(&papers, "no");
    server.ask(&["ACL", "SETUSER", "worker", "on", ">of-redis", "~*", "&*", "+@all"]).await;
    let own =
        ["--port 0", "--tls-port {port}", "--tls-replication yes", "--requirepass of-sentinel"];
    let mut lines = own.map(str::to_owned).to_vec();
    lines.extend(arguments(&papers, "no").chunks(2).map(|pair| pair.join(" ")));
    let settings = lines.join("\n").replace("--", "") + "\n";
    let sentinel = Sentinel::start_with(server.tls_port(), &settings);
    let ca = papers.file("ca");
    let with = |user: &str, more: &str| {
        let address = sentinel.address();
        let url = format!("\"rediss+sentinel://{user}@{address}/{SERVICE}{more}\"");
        config(&server, "test", &[("redis.url", &url), ("redis.ca_file", &ca)])
    };
    let password = "?sentinel_password=of-sentinel";
    handles(&server, &with("worker:of-redis", password)).await;

    let error = refusal(&with("worker:of-redis", "")).await;
    assert!(error.contains("NOAUTH") && error.contains("sentinel_password=PASSWORD"), "{error}");
    let error = refusal(&with("worker:of-redis", "?sentinel_password=wrong")).await;
    assert!(error.contains("wrong password") && error.contains("sentinel_password"), "{error}");
    let error = refusal(&with("worker:wrong", password)).await;
    assert!(error.contains("correct USER:PASSWORD in redis.url"), "{error}");
    assert!(!error.contains("of-sentinel"), "{error}");
    let plain = format!("\"redis+sentinel://{}/{SERVICE}\"", sentinel.address());
    let error = refusal(&config(&server, "test", &[("redis.url", &plain)])).await;
    assert!(error.contains("no sentinel answers"), "{error}");
}
