//! Behind proxies: the caller is the client, and no client can pose as another.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::config::config;
use crate::support::http::{Client, Response, get, metric};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
/// The address of the trusted proxy, and another address.
const PROXY: [u8; 4] = [127, 0, 0, 2];
const OTHER: [u8; 4] = [127, 0, 0, 1];
const TRUSTED: (&str, &str) = ("http.trusted_proxies", "[\"127.0.0.2\"]");

async fn start(server: &RedisServer, more: &[(&str, &str)]) -> (Served, Client) {
    let settings = [&[("pipelines.test.handler", "\"log\""), TRUSTED], more].concat();
    let process = Served::start(&config(server, "test", &settings)).await;
    let client = Client::new(&process.http());
    (process, client)
}

async fn connect(client: &Client, from: [u8; 4]) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(client.address.parse().unwrap()).await.unwrap()
}

/// Sends bytes and reads to the end of the connection. `None` means that no answer came.
async fn exchange(mut stream: TcpStream, bytes: &[u8]) -> Option<Response> {
    let mut answer = Vec::new();
    // The server may close the connection before all bytes are sent or read.
    let _ = stream.write_all(bytes).await;
    let read = tokio::time::timeout(LONG, stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "it is not closed");
    Response::parse(&answer).map(|(answer, _)| answer)
}

async fn ask(
    client: &Client,
    from: [u8; 4],
    (method, path): (&str, &str),
    headers: &[(&str, &str)],
) -> Response {
    let headers = [&[("connection", "close")], headers].concat();
    let head = client.head(method, path, &headers);
    exchange(connect(client, from).await, head.as_bytes()).await.expect("an answer")
}

#[tokio::test]
async fn the_caller_is_the_client_that_a_trusted_proxy_names_and_a_spoofed_header_is_ignored() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    for (from, headers, caller) in [
        (PROXY, &[("x-forwarded-for", "6.6.6.6, 203.0.113.7")][..], "203.0.113.7"),
        (PROXY, &[("forwarded", "for=\"[2001:db8::7]:4711\";proto=https")], "2001:db8::7"),
        (PROXY, &[("x-forwarded-for", "_hidden")], "127.0.0.2"),
        (PROXY, &[("x-forwarded-for", "203.0.113.7"), ("forwarded", "for=6.6.6.6")], "127.0.0.2"),
        (PROXY, &[], "127.0.0.2"),
        (OTHER, &[("x-forwarded-for", "203.0.113.7")], "127.0.0.1"),
        (OTHER, &[("forwarded", "for=203.0.113.7")], "127.0.0.1"),
    ] {
        let paused = ask(&client, from, ("POST", "/v1/pipelines/test/pause"), headers).await;
        assert_eq!(paused.code, 204, "{headers:?}");
        assert_eq!(process.operator(), caller, "{from:?} {headers:?}");
    }
}

#[tokio::test]
async fn behind_a_proxy_a_foreign_host_or_page_is_refused_as_without_one() {
    let server = RedisServer::start(Options::default());
    let (_process, client) = start(&server, &[("http.hosts", "[\"fairlane.example\"]")]).await;
    let ours = ("host", "fairlane.example");
    let forwarded = ("x-forwarded-for", "203.0.113.7");
    let post = ("POST", "/v1/pipelines/test/pause");
    for (headers, code) in [
        (&[ours][..], 204),
        // The page was loaded over TLS, which ends at the proxy.
        (&[ours, ("origin", "https://fairlane.example"), ("x-forwarded-proto", "https")], 204),
        (&[ours, ("origin", "https://evil.example")], 403),
        // Any page can send this header, so it proves nothing about the called host.
        (&[ours, ("origin", "https://evil.example"), ("x-forwarded-host", "evil.example")], 403),
        (&[("host", "evil.example"), ("x-forwarded-host", "fairlane.example")], 421),
        (&[("host", "evil.example"), ("forwarded", "host=fairlane.example;for=203.0.113.7")], 421),
    ] {
        for from in [PROXY, OTHER] {
            let answer = ask(&client, from, post, &[headers, &[forwarded]].concat()).await;
            assert_eq!(answer.code, code, "{from:?} {headers:?}");
        }
    }
}

#[tokio::test]
async fn a_trusted_proxy_has_as_many_connections_as_it_wants_and_others_their_share() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[("http.max_connections_per_address", "4")]).await;
    let mut open = Vec::new();
    for _ in 0..20 {
        open.push(connect(&client, PROXY).await);
    }
    for stream in &mut open {
        stream.write_all(client.head("GET", "/healthz", &[]).as_bytes()).await.unwrap();
        let mut first = [0; 15];
        stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200 OK");
    }
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(connect(&client, OTHER).await);
    }
    let head = client.head("GET", "/healthz", &[("connection", "close")]);
    let fifth = exchange(connect(&client, OTHER).await, head.as_bytes()).await;
    assert!(fifth.is_none(), "{fifth:?}");
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let refused = metric(&text, "fairlane_http_connections_refused_total", &[("listener", "http")]);
    assert_eq!(refused, Some(1.0));
}

/// A header of version 2 for a client over IPv4.
fn version_2(command: u8, source: [u8; 4]) -> Vec<u8> {
    let signature = b"\r\n\r\n\0\r\nQUIT\n";
    [signature, &[0x20 | command, 0x11, 0, 12][..], &source, &[127, 0, 0, 1, 1, 2, 3, 4]].concat()
}

#[tokio::test]
async fn the_proxy_protocol_tells_the_caller_and_each_has_its_share_of_connections() {
    let server = RedisServer::start(Options::default());
    let few = [("http.proxy_protocol", "true"), ("http.max_connections_per_address", "2")];
    let (process, client) = start(&server, &few).await;
    let head = client.head("POST", "/v1/pipelines/test/pause", &[("connection", "close")]);
    let through = async |header: &[u8]| {
        let stream = connect(&client, PROXY).await;
        exchange(stream, &[header, head.as_bytes()].concat()).await
    };
    let caller = [203, 0, 113, 9];
    assert_eq!(through(&version_2(1, caller)).await.expect("an answer").code, 204);
    assert_eq!(process.operator(), "203.0.113.9");
    assert_eq!(through(&version_2(0, caller)).await.expect("an answer").code, 204);
    assert_eq!(process.operator(), "127.0.0.2", "a connection of its own");
    // Other addresses send no header and may not send one.
    assert_eq!(ask(&client, OTHER, ("GET", "/healthz"), &[]).await.code, 200);
    let spoofed = [&version_2(1, caller)[..], head.as_bytes()].concat();
    let spoofed = exchange(connect(&client, OTHER).await, &spoofed).await;
    assert!(spoofed.is_none_or(|answer| answer.code == 400));

    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(&client, PROXY).await;
        let alive = client.head("GET", "/healthz", &[]);
        stream.write_all(&[&version_2(1, caller), alive.as_bytes()].concat()).await.unwrap();
        let mut first = [0; 15];
        stream.read_exact(&mut first).await.unwrap();
        open.push(stream);
    }
    assert!(through(&version_2(1, caller)).await.is_none(), "it has two open already");
    assert!(through(&version_2(1, [203, 0, 113, 10])).await.is_some(), "another client");
    drop(open);
    eventually(LONG, "there is room again", async || {
        through(&version_2(1, caller)).await.is_some()
    })
    .await;
}

#[tokio::test]
async fn a_connection_without_a_usable_header_is_closed_and_counted_by_its_reason() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[("http.proxy_protocol", "true")]).await;
    let request = client.head("GET", "/healthz", &[("connection", "close")]);
    let line = format!("PROXY TCP4 203.0.113.7 127.0.0.1 1 80\r\n{request}");
    let mut wrong_version = version_2(1, [203, 0, 113, 7]);
    wrong_version[12] = 0x31;
    for (bytes, reason) in
        [(line.as_bytes(), "v1"), (request.as_bytes(), "missing"), (&wrong_version, "malformed")]
    {
        let answer = exchange(connect(&client, PROXY).await, bytes).await;
        assert!(answer.is_none(), "{reason}: {answer:?}");
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let labels = [("listener", "http"), ("reason", reason)];
        assert_eq!(metric(&text, "fairlane_http_proxy_errors_total", &labels), Some(1.0));
    }
    // A balancer that only checks whether the port is open causes no error.
    drop(connect(&client, PROXY).await);
    let silent = connect(&client, PROXY).await;
    eventually(LONG, "silence ends too", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let labels = [("listener", "http"), ("reason", "timeout")];
        metric(&text, "fairlane_http_proxy_errors_total", &labels) == Some(1.0)
    })
    .await;
    drop(silent);
    let log = process.log();
    assert!(log.contains("send-proxy-v2"), "the remedy is told: {log}");
    assert_eq!(log.matches("no valid PROXY protocol header").count(), 1, "once a minute");
}
