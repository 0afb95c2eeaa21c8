//! Encrypted connections, and the reports when they fail.

use std::path::PathBuf;
use std::time::Duration;

use fairlane::app::App;
use fairlane::config::Config;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use tempfile::TempDir;

use crate::support::bus::{add, event};
use crate::support::cluster::Cluster;
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisBackend, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// A certificate authority, and a certificate of this machine that it signed.
struct Papers {
    directory: TempDir,
}

impl Papers {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        authority.distinguished_name.push(DnType::CommonName, "the authority of a test");
        let key = KeyPair::generate().unwrap();
        let papers = Self { directory };
        std::fs::write(papers.path("ca"), authority.self_signed(&key).unwrap().pem()).unwrap();
        let authority = Issuer::new(authority, key);
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
        std::fs::write(papers.path("cert"), own.pem()).unwrap();
        std::fs::write(papers.path("key"), key.serialize_pem()).unwrap();
        papers
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.pem"))
    }

    /// The arguments with which a server speaks TLS on its second port.
    fn arguments(&self, clients: &str) -> Vec<String> {
        let [ca, cert, key] =
            ["ca", "cert", "key"].map(|name| self.path(name).display().to_string());
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

    fn server(&self, clients: &str) -> RedisServer {
        let mut arguments = self.arguments(clients);
        arguments.extend(["--tls-port".to_owned(), "{tls}".to_owned()]);
        RedisServer::start_with(Options { tcp: true, ..Options::default() }, &arguments)
    }

    /// A setting that names one of the files.
    fn file(&self, name: &str) -> String {
        format!("\"{}\"", self.path(name).display())
    }
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
    let server = papers.server("yes");
    let (url, ca) = (encrypted(&server), papers.file("ca"));
    let (cert, key) = (papers.file("cert"), papers.file("key"));
    let trusting = [("redis.url", &*url), ("redis.ca_file", &*ca)];
    let shown = [("redis.cert_file", &*cert), ("redis.key_file", &*key)];
    let settings = [trusting, shown].concat();
    handles(&server, &config(&server, "test", &settings)).await;
    let error = refusal(&config(&server, "test", &trusting)).await;
    assert!(error.contains("redis.cert_file"), "{error}");
}

#[tokio::test]
async fn the_reason_why_tls_fails_is_told() {
    let (papers, others) = (Papers::new(), Papers::new());
    let server = papers.server("no");
    let (url, ca) = (encrypted(&server), papers.file("ca"));
    handles(&server, &config(&server, "test", &[("redis.url", &url), ("redis.ca_file", &ca)]))
        .await;

    let wrong = others.file("ca");
    for settings in
        [vec![("redis.url", &*url)], vec![("redis.url", &*url), ("redis.ca_file", &wrong)]]
    {
        let error = refusal(&config(&server, "test", &settings)).await;
        assert!(error.contains("certificate") && error.contains("redis.ca_file"), "{error}");
    }
    let plain = format!("\"rediss://{}\"", server.tcp_addr());
    let error = refusal(&config(&server, "test", &[("redis.url", &plain)])).await;
    assert!(error.contains("does not speak TLS"), "{error}");
    let turned = url.replace("rediss", "redis");
    let error = refusal(&config(&server, "test", &[("redis.url", &turned)])).await;
    assert!(error.contains("cannot connect to Redis"), "{error}");
}

#[tokio::test]
async fn a_cluster_tells_the_ports_on_which_its_nodes_speak_tls() {
    let papers = Papers::new();
    let cluster = Cluster::encrypted(&papers.arguments("no")).await;
    let url = format!("\"{}\"", cluster.encrypted_url());
    let ca = papers.file("ca");
    let settings = [("redis.url", &*url), ("redis.ca_file", &*ca)];
    handles(&cluster, &config(&cluster, "test", &settings)).await;
}
