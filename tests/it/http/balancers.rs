//! Behind a real nginx and a real HAProxy with the recipes of `docs/edge.md`: Fairlane sees the
//! caller, and a forged header does not win.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::balancer::{Balancer, recipe, replaced};
use crate::support::config::config;
use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, get, metric};
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
/// Maximum wait for more of a stream. A balancer that holds the stream back does so forever.
const HELD_BACK: Duration = Duration::from_secs(60);

/// The addresses of two callers. The balancers call from 127.0.0.1.
const ANN: ([u8; 4], &str) = ([127, 0, 0, 2], "127.0.0.2");
const BOB: ([u8; 4], &str) = ([127, 0, 0, 3], "127.0.0.3");
/// Headers that name another address than that of the caller.
const FORGED: &[&[(&str, &str)]] = &[
    &[("x-forwarded-for", "203.0.113.7")],
    &[("x-forwarded-for", "203.0.113.7"), ("x-forwarded-for", "203.0.113.7")],
    &[("x-forwarded-for", "203.0.113.7, 127.0.0.1")],
    &[("forwarded", "for=203.0.113.7")],
    &[("forwarded", "for=203.0.113.7"), ("x-forwarded-for", "203.0.113.7")],
];

const PAUSE: &str = "/v1/pipelines/test/pause";
const LISTING: &str = "/v1/pipelines/test/bots";
const VIEWS: &str = "/views/ad-1";
const TOKEN: &str = "site-0123456789abcdef";

const PROXY_PROTOCOL: (&str, &str) = ("http.proxy_protocol", "true");

async fn start(server: &RedisServer, more: &[(&str, &str)]) -> Served {
    let settings = [
        &[
            ("pipelines.test.handler", "\"log\""),
            ("http.trusted_proxies", "[\"127.0.0.1\"]"),
            // A listing is refused, and the refusal counts for the address of its caller.
            ("admission.p3", "\"refuse\""),
        ],
        more,
    ]
    .concat();
    Served::start(&config(server, "test", &settings)).await
}

async fn nginx(process: &Served) -> Balancer {
    let http = recipe("nginx: callers by HTTP");
    Balancer::nginx(&replaced(&http, "127.0.0.1:8080", &process.http())).await
}

/// `by` is the way in which HAProxy passes on the caller's address.
async fn haproxy(by: &str, process: &Served) -> Balancer {
    let configuration = recipe(&format!("HAProxy: callers by {by}"));
    Balancer::haproxy(&replaced(&configuration, "10.0.0.5:8080", &process.http())).await
}

async fn each_caller_has_its_own_address(process: &Served, balancer: &Balancer) {
    for (from, address) in [ANN, BOB] {
        let caller = balancer.client().calling_from(from);
        assert_eq!(caller.post(PAUSE).await.code, 204);
        assert_eq!(process.operator(), address);
        assert_eq!(caller.get(LISTING).await.code, 503);
    }
    let admission = balancer.client().get("/v1/admission").await.json();
    let refused = admission["top_addresses"].as_array().expect("a list").iter();
    let refused: BTreeSet<_> = refused.filter_map(|entry| entry["address"].as_str()).collect();
    assert_eq!(refused, BTreeSet::from([ANN.1, BOB.1]));
}

/// A forged header wins neither through the balancer nor directly from an untrusted address.
async fn no_forged_header_wins(process: &Served, balancer: &Balancer) {
    let direct = Client::new(&process.http());
    for headers in FORGED {
        for (client, (from, address)) in [(balancer.client(), ANN), (direct.clone(), BOB)] {
            let paused = client.calling_from(from).send("POST", PAUSE, headers, b"").await;
            assert_eq!(paused.code, 204, "{address} {headers:?}");
            assert_eq!(process.operator(), address, "{headers:?}");
        }
    }
}

#[tokio::test]
async fn behind_nginx_each_caller_has_its_own_address() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    each_caller_has_its_own_address(&process, &nginx(&process).await).await;
}

#[tokio::test]
async fn behind_haproxy_each_caller_has_its_own_address() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    each_caller_has_its_own_address(&process, &haproxy("HTTP", &process).await).await;
}

#[tokio::test]
async fn by_the_proxy_protocol_of_haproxy_each_caller_has_its_own_address() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[PROXY_PROTOCOL]).await;
    let haproxy = haproxy("the PROXY protocol", &process).await;
    each_caller_has_its_own_address(&process, &haproxy).await;
}

#[tokio::test]
async fn a_forged_header_that_passes_through_nginx_does_not_win() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    no_forged_header_wins(&process, &nginx(&process).await).await;
}

#[tokio::test]
async fn a_forged_header_that_passes_through_haproxy_does_not_win() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    no_forged_header_wins(&process, &haproxy("HTTP", &process).await).await;
}

#[tokio::test]
async fn a_forged_header_behind_the_proxy_protocol_does_not_win() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[PROXY_PROTOCOL]).await;
    no_forged_header_wins(&process, &haproxy("the PROXY protocol", &process).await).await;
}

/// Opens a live page, which keeps its connection open.
async fn live_page(client: &Client) -> TcpStream {
    let mut stream = client.connect().await.unwrap();
    let head = client.head("GET", "/", &[("accept", "text/event-stream")]);
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    stream
}

#[tokio::test]
async fn by_the_proxy_protocol_of_haproxy_each_caller_has_its_share_of_connections() {
    let server = RedisServer::start(Options::default());
    let settings = [PROXY_PROTOCOL, ("http.max_connections_per_address", "2")];
    let process = start(&server, &settings).await;
    let haproxy = haproxy("the PROXY protocol", &process).await;
    let ann = haproxy.client().calling_from(ANN.0);
    let _open = [live_page(&ann).await, live_page(&ann).await];
    assert_eq!(ann.get("/healthz").await.code, 0, "two are open");
    assert_eq!(haproxy.client().calling_from(BOB.0).get("/healthz").await.code, 200);
}

async fn read_until(stream: &mut TcpStream, bytes: &mut Vec<u8>, done: impl Fn(&[u8]) -> bool) {
    while !done(bytes.as_slice()) {
        let read = tokio::time::timeout(HELD_BACK, stream.read_buf(bytes)).await;
        let shown = || String::from_utf8_lossy(bytes).into_owned();
        let read = read.unwrap_or_else(|_| panic!("held back after {:?}", shown()));
        assert!(read.unwrap() > 0, "ended after {:?}", shown());
    }
}

async fn each_event_of_a_live_page_arrives_whole(process: &Served, balancer: &Balancer) {
    let mut stream = live_page(&balancer.client()).await;
    let mut bytes = Vec::new();
    let begins = b"\ndata: ";
    read_until(&mut stream, &mut bytes, |bytes| bytes.windows(begins.len()).any(|w| w == begins))
        .await;
    // From now on, no further event can push the end of this event out of a buffer.
    process.sigstop();
    read_until(&mut stream, &mut bytes, |bytes| bytes.ends_with(b"\n\n\r\n")).await;
}

#[tokio::test]
async fn behind_nginx_each_event_of_a_live_page_arrives_whole() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    each_event_of_a_live_page_arrives_whole(&process, &nginx(&process).await).await;
}

#[tokio::test]
async fn behind_haproxy_each_event_of_a_live_page_arrives_whole() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    each_event_of_a_live_page_arrives_whole(&process, &haproxy("HTTP", &process).await).await;
}

/// The body arrived, because Fairlane itself refuses it.
async fn the_largest_body_arrives(balancer: &Balancer) {
    let body = vec![0_u8; 1 << 20];
    let answer = balancer.client().publish("application/cloudevents+json", body).await;
    assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-request"));
}

#[tokio::test]
async fn behind_nginx_the_largest_body_arrives() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    the_largest_body_arrives(&nginx(&process).await).await;
}

#[tokio::test]
async fn behind_haproxy_the_largest_body_arrives() {
    let server = RedisServer::start(Options::default());
    let process = start(&server, &[]).await;
    the_largest_body_arrives(&haproxy("HTTP", &process).await).await;
}

/// HAProxy sends requests to a ready process. It sends none to a process that is stopping, although
/// that process still answers.
async fn haproxy_follows_the_readiness(by: &str, more: &[(&str, &str)]) {
    let server = RedisServer::start(Options::default());
    let settings = [&[("shutdown_delay", "\"10m\"")], more].concat();
    let process = start(&server, &settings).await;
    let haproxy = haproxy(by, &process).await;
    // One of the requests is the test's own. Two failed checks would make the process unavailable,
    // but these passed.
    eventually(LONG, "HAProxy has checked the process", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let checks = [("route", "/readyz"), ("code", "200")];
        metric(&text, "fairlane_http_requests_total", &checks).is_some_and(|count| count > 2.5)
    })
    .await;
    assert_eq!(haproxy.client().get("/healthz").await.code, 200);
    process.sigterm();
    eventually(LONG, "HAProxy sends no more requests", async || {
        haproxy.client().get("/healthz").await.code != 200
    })
    .await;
    let direct = Client::new(&process.http()).calling_from(BOB.0);
    assert_eq!(direct.get("/healthz").await.code, 200);
    let (_, text) = get(&process.metrics(), "/metrics").await;
    for reason in ["v1", "missing", "malformed"] {
        let labels = [("listener", "http"), ("reason", reason)];
        let wrong = metric(&text, "fairlane_http_proxy_errors_total", &labels);
        assert!(wrong.is_none_or(|count| count < 0.5), "{reason}: {wrong:?}");
    }
}

#[tokio::test]
async fn haproxy_sends_requests_only_to_a_ready_process() {
    haproxy_follows_the_readiness("HTTP", &[]).await;
}

#[tokio::test]
async fn with_the_proxy_protocol_haproxy_sends_requests_only_to_a_ready_process() {
    haproxy_follows_the_readiness("the PROXY protocol", &[PROXY_PROTOCOL]).await;
}

/// A site whose pages count views through its own nginx.
struct Site {
    nginx: Balancer,
    _process: Served,
    _stores: Stores,
    _directory: TempDir,
}

impl Site {
    /// `rate` limits the requests of one address.
    async fn start(rate: &str) -> Self {
        let stores = Stores::start(Persistence::None);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        std::fs::write(&file, TOKEN).unwrap();
        let file = file.display().to_string();
        let tokens = format!(
            "[{{ name = \"site\", token_file = {file:?}, scopes = [\"publish\"], bots = [\"shop-7\"] }}]"
        );
        let process = Served::start(&stores.direct(&[("auth.tokens", &tokens)])).await;
        let zone = recipe("nginx: the rate of the relay, in the http block");
        let zone = replaced(&zone, "rate=5r/s", rate);
        let relay = recipe("nginx: the relay, in the site's own server block");
        let relay = replaced(&relay, "127.0.0.1:8080", &process.http());
        let relay = replaced(&relay, "TOKEN_WITH_THE_SCOPE_publish", TOKEN);
        let nginx = Balancer::nginx(&format!("{zone}server {{\nlisten 80;\n{relay}}}\n")).await;
        Self { nginx, _process: process, _stores: stores, _directory: directory }
    }
}

#[tokio::test]
async fn the_relay_counts_one_view_for_each_request_of_the_sites_own_pages() {
    let site = Site::start("rate=5r/s").await;
    let page = site.nginx.client();
    for (total, headers, body) in [
        (1, &[("origin", "https://shop.example"), ("sec-fetch-site", "same-origin")][..], &b""[..]),
        (2, &[], b""),
        // The site's token is used, never a token or a cookie of the caller.
        (3, &[("authorization", "Bearer of-the-caller"), ("cookie", "session=1")], b""),
        (4, &[("content-type", "application/json")], b"{\"n\":1000}"),
    ] {
        let counted = page.send("POST", VIEWS, headers, body).await;
        assert_eq!(counted.code, 200, "{headers:?}");
        assert_eq!(counted.json(), json!({ "total": total }), "{headers:?}");
    }
    let foreign = [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")];
    assert_eq!(page.send("POST", VIEWS, &foreign, b"").await.code, 403);
    assert_eq!(page.get(VIEWS).await.code, 403);
    assert_eq!(page.post("/views/ad-1/reset").await.code, 404);
    let last = page.post(VIEWS).await;
    assert_eq!(last.json(), json!({ "total": 5 }), "the others counted nothing");
}

#[tokio::test]
async fn the_relay_limits_the_rate_of_each_address() {
    // The rate is so low that a busy machine exceeds it too.
    let site = Site::start("rate=1r/m").await;
    let ann = site.nginx.client().calling_from(ANN.0);
    let mut codes = Vec::new();
    for _ in 0..30 {
        codes.push(ann.post(VIEWS).await.code);
    }
    // The first request and the burst are accepted.
    assert_eq!(codes[..21], [200_u16; 21]);
    assert!(codes[21..].contains(&429), "{codes:?}");
    let bob = site.nginx.client().calling_from(BOB.0);
    assert_eq!(bob.post(VIEWS).await.code, 200, "another address");
}
