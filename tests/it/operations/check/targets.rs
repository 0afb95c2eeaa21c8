//! The probes of the targets of push pipelines.

use std::io::Read as _;
use std::net::{Ipv4Addr, TcpListener};

use super::super::tls;
use super::{Ran, check, redis};
use crate::support::mongo::free_port;
use crate::support::papers::Papers;
use crate::support::redis::RedisServer;

/// The settings of an additional push pipeline.
fn push(url: &str) -> [(&'static str, String); 3] {
    [
        ("pipelines.shop.handler", "\"push\"".to_owned()),
        ("pipelines.shop.events", "[\"order.*\"]".to_owned()),
        ("pipelines.shop.url", format!("{url:?}")),
    ]
}

fn check_push(redis: &RedisServer, url: &str, secrets: &str) -> Ran {
    let push = push(url);
    let mut settings: Vec<_> = push.iter().map(|(key, value)| (*key, value.as_str())).collect();
    settings.push(("callbacks.secrets", secrets));
    check(redis, &settings)
}

#[tokio::test]
async fn a_target_is_connected_to_and_sent_nothing() {
    let redis = redis();
    let receiver = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = receiver.local_addr().unwrap().port();
    let listening = std::thread::spawn(move || {
        let (mut stream, _) = receiver.accept().unwrap();
        let mut sent = Vec::new();
        stream.read_to_end(&mut sent).unwrap();
        sent
    });
    let secret = "[\"whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=\"]";
    let ran = check_push(&redis, &format!("http://localhost:{port}/hook?key=hidden"), secret);
    let pushes = format!("ok pipeline shop pushes to http://localhost:{port}/hook, events order.*");
    ran.expect(
        0,
        &[&pushes, "ok callbacks calls are signed with 1 secret", "ok target of shop localhost ("],
    );
    let target = ran.out.lines().find(|line| line.contains("target of shop")).unwrap();
    assert!(target.contains("127.0.0.1"), "{target}");
    assert!(target.ends_with(&format!("port {port} answers")), "{target}");
    assert!(!format!("{ran:?}").contains("hidden") && !format!("{ran:?}").contains("MDEy"));
    assert_eq!(listening.join().unwrap(), b"", "a check is no call");
}

#[tokio::test]
async fn a_target_that_cannot_be_reached_is_explained() {
    let redis = redis();
    let unknown = check_push(&redis, "https://nobody.invalid/hook", "[]");
    unknown.expect(
        69,
        &[
            "warn callbacks no secrets: calls are not signed",
            "a receiver cannot tell them from forged ones; set callbacks.secrets",
            "fail target of shop nobody.invalid: the name cannot be looked up: ",
            "the pipeline's bots wait until it can be reached; check the name server, or correct pipelines.shop.url",
        ],
    );
    let port = free_port();
    let refused = check_push(&redis, &format!("http://127.0.0.1:{port}/"), "[]");
    let found = format!("fail target of shop 127.0.0.1 port {port}: Connection refused");
    refused.expect(
        69,
        &[&found, "the pipeline's bots wait until it can be reached; start the receiver"],
    );

    // This server answers, but without TLS.
    let plain = redis.tcp_addr();
    let no_tls = check_push(&redis, &format!("https://{plain}/"), "[]");
    let found = format!("fail target of shop {} port {}: ", plain.ip(), plain.port());
    no_tls.expect(69, &[&found]);
}

#[tokio::test]
async fn a_target_with_a_certificate_of_an_unknown_authority_needs_that_authority() {
    let (redis, papers) = (redis(), Papers::new());
    // Any server that speaks TLS.
    let receiver = tls::server(&papers, "no");
    let port = receiver.tls_port();
    let ran = check_push(&redis, &format!("https://127.0.0.1:{port}/"), "[]");
    let found = format!(
        "fail target of shop 127.0.0.1 port {port}: invalid peer certificate: UnknownIssuer"
    );
    ran.expect(
        69,
        &[
            &found,
            "the pipeline's bots wait until it can be reached; add its CA to the certificates of this machine (in a container: name a file with all CAs in SSL_CERT_FILE), and restart, or correct pipelines.shop.url",
        ],
    );
}
