//! The HTTP interface: bodies, live pages, sites, hosts.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const ALL: &str = r#"scopes = ["publish", "read", "operate"]"#;
const STRUCTURED: &str = "application/cloudevents+json";
/// What each connection announces as its body.
const ANNOUNCED: usize = 1 << 20;

fn tenants() -> Tokens {
    Tokens::new(&[
        ("shop", &format!("{ALL}, bots = [\"shop-*\"]")),
        ("other", &format!("{ALL}, bots = [\"other-*\"]")),
        ("root", &format!("{ALL}, bots = [\"*\"]")),
    ])
}

async fn serve(server: &RedisServer, tokens: &Tokens) -> (Served, Client) {
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.test.handler", "\"log\"")];
    let process = Served::start(&config(server, "test", &settings)).await;
    let client = Client::new(&process.http());
    (process, client)
}

/// In KiB.
fn memory(process: &Served) -> i64 {
    let resident = process.status_of_kernel("VmRSS").expect("the kernel tells it");
    resident.split_whitespace().next().unwrap().parse().unwrap()
}

/// Sends the head and almost all of a body, as far as the server takes it; answers the connection.
async fn send_most(client: Client, path: &'static str) -> TcpStream {
    let length = ANNOUNCED.to_string();
    let headers = [("content-type", STRUCTURED), ("content-length", &*length)];
    let head = client.head("POST", path, &headers);
    let mut stream = client.connect().await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let sending = async {
        for _ in 1..64 {
            if stream.write_all(&[b' '; ANNOUNCED / 64]).await.is_err() {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(2), sending).await;
    stream
}

async fn flood(client: &Client, path: &'static str, connections: usize) -> Vec<TcpStream> {
    let mut sending = JoinSet::new();
    for _ in 0..connections {
        sending.spawn(send_most(client.clone(), path));
        // As long as a body may hold a place: all at once, most would be refused for want of them.
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    sending.join_all().await
}

/// The server waits longer for a body.
const EARLY: Duration = Duration::from_secs(2);

/// The answer, if it comes within this time.
async fn answer(mut stream: TcpStream, within: Duration) -> Option<Response> {
    let mut bytes = Vec::new();
    let read = async {
        while Response::parse(&bytes).is_none() {
            if !stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(within, read).await;
    Response::parse(&bytes).map(|(answer, _)| answer)
}

#[tokio::test]
async fn bodies_of_strangers_are_not_kept() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let (process, client) = serve(&server, &tokens).await;
    // The first ones of everything take memory too.
    for _ in 0..20 {
        assert_eq!(client.publish(STRUCTURED, event("shop-1", "t", 1)).await.code, 401);
    }
    let wrong = client.with_token("wrong-0123456789abcdef");
    for (client, path, connections) in [
        (&client, "/v1/events", 150),
        (&wrong, "/v1/events", 60),
        (&client, "/v1/leases/nobody-has-this/complete", 60),
        (&client, "/no-such-path", 60),
    ] {
        let before = memory(&process);
        let open = flood(client, path, connections).await;
        let grown = memory(&process) - before;
        assert!(grown < 16 << 10, "{path}: {grown} KiB more");
        drop(open);
    }
    // A client that sends little reads why it is refused.
    let refused =
        client.send("POST", "/v1/events", &[("content-type", STRUCTURED)], &[b' '; 9_000]);
    assert_eq!((refused.await.code, process.log().contains("panicked")), (401, false));
    let mut slow = TcpStream::connect(process.http()).await.unwrap();
    let head = client.head("POST", "/v1/events", &[("content-length", "10")]);
    slow.write_all(head.as_bytes()).await.unwrap();
    let told = answer(slow, LONG).await.expect("it is told before its body comes");
    assert_eq!((told.code, told.problem().as_str()), (401, "unauthorized"));
}

#[tokio::test]
async fn slow_bodies_of_one_tenant_leave_memory_and_room_for_others() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let (process, client) = serve(&server, &tokens).await;
    let hostile = client.with_token(&text("shop")).calling_from([127, 0, 0, 2]);
    let quiet = client.with_token(&text("other"));
    assert_eq!(quiet.publish(STRUCTURED, event("other-1", "t", 1)).await.code, 202);
    let before = memory(&process);
    let open = flood(&hostile, "/v1/events", 100).await;
    let grown = memory(&process) - before;
    assert!(grown < 48 << 10, "{grown} KiB more");
    // Another tenant's body may be slow too.
    let body = event("other-1", "t", 2);
    let length = body.len().to_string();
    let headers =
        [("content-type", STRUCTURED), ("content-length", &*length), ("connection", "close")];
    let mut slow = quiet.connect().await.unwrap();
    let head = quiet.head("POST", "/v1/events", &headers);
    slow.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    slow.write_all(body.as_bytes()).await.unwrap();
    assert_eq!(answer(slow, LONG).await.map(|answer| answer.code), Some(202));
    let mut refused = 0;
    let mut answers: JoinSet<_> = open.into_iter().map(|one| answer(one, EARLY)).collect();
    while let Some(answer) = answers.join_next().await {
        if let Some(answer) = answer.unwrap().filter(|answer| answer.code != 408) {
            assert_eq!((answer.code, answer.problem().as_str()), (503, "overloaded"));
            refused += 1;
        }
    }
    assert!(refused >= 60, "{refused} of 100 are refused, the others may be waited for");
}

/// Opens a live page; answers the connection and the code.
async fn live(client: &Client) -> (TcpStream, u16) {
    let head = client.head("GET", "/", &[("accept", "text/event-stream")]);
    let mut stream = client.connect().await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut begun = vec![0; "HTTP/1.1 200".len()];
    stream.read_exact(&mut begun).await.unwrap();
    let code = String::from_utf8(begun).unwrap()[9..].parse().unwrap();
    (stream, code)
}

#[tokio::test]
async fn live_pages_of_one_token_keep_no_other_out() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let settings = [("auth.tokens", &*tokens.setting), ("http.max_connections_per_address", "300")];
    let instance =
        Instance::start(&config(&server, "test", &settings), Log::default().content()).await;
    let by = |name: &str| instance.client().with_token(&text(name));
    let open = async |name: &str, count: usize| {
        let mut opened = Vec::new();
        for _ in 0..count {
            let (stream, code) = live(&by(name)).await;
            if code == 200 {
                opened.push(stream);
            }
        }
        opened
    };
    let hostile = open("shop", 80).await;
    assert_eq!(hostile.len(), 16, "a quarter of 64");
    let operators = open("root", 80).await;
    assert_eq!(operators.len(), 48, "all others");
    let quiet = open("other", 3).await;
    assert_eq!(quiet.len(), 3, "the token with the most gives way");
    drop((hostile, operators, quiet));
    eventually(LONG, "there is room again", async || live(&by("shop")).await.1 == 200).await;
    instance.stop().await;
}

#[tokio::test]
async fn the_document_and_its_page_have_the_headers_of_pages() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    for path in ["/docs/", "/docs/swagger-ui.css", "/openapi.json"] {
        let answer = instance.client().get(path).await;
        assert_eq!(answer.code, 200, "{path}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
        let policy = answer.header("content-security-policy").unwrap_or_default();
        for part in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
    }
    instance.stop().await;
}

#[tokio::test]
async fn without_tokens_no_other_page_changes_anything_by_a_get_request() {
    let server = RedisServer::start(Options::default());
    let settings =
        [("pipelines.notifications.enabled", "true"), ("callbacks.allow_nets", "[\"127.0.0.1\"]")];
    let instance =
        Instance::start(&config(&server, "test", &settings), Log::default().content()).await;
    let client = instance.client();
    for path in ["/send_delayed?delay=60&url=http://127.0.0.1:8088/", "/user_online?uid=ann"] {
        for (site, code) in [
            (None, 200),
            (Some("none"), 200),
            (Some("same-origin"), 200),
            (Some("same-site"), 403),
            (Some("cross-site"), 403),
        ] {
            let header = site.map(|site| ("sec-fetch-site", site));
            let answer = client.send("GET", path, header.as_slice(), b"").await;
            assert_eq!(answer.code, code, "{path} {site:?}: {answer:?}");
            if code == 403 {
                assert_eq!(answer.problem(), "cross-site", "{path} {site:?}");
            }
        }
    }
    // A link of another page of the site may lead to a page.
    let link = client.send("GET", "/", &[("sec-fetch-site", "same-site")], b"").await;
    assert_eq!(link.code, 200);
    instance.stop().await;
}

#[tokio::test]
async fn a_request_names_its_host_exactly_once() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let code = async |address: &str, request: String| {
        let bytes = Client::new(address).raw(request.as_bytes()).await;
        Response::parse(&bytes).map(|(answer, _)| answer.code)
    };
    let both = [instance.client().address, instance.address.to_string()];
    for (address, paths) in [
        (&both[0], &["/healthz", "/readyz", "/v1/pipelines", "/docs/", "/no-such-path"][..]),
        (&both[1], &["/healthz", "/metrics"]),
    ] {
        for path in paths {
            let get = |version: &str, hosts: &str| {
                format!("GET {path} HTTP/{version}\r\nconnection: close\r\n{hosts}\r\n")
            };
            let one = "host: localhost\r\n";
            let good = code(address, get("1.1", one)).await;
            assert!(matches!(good, Some(200 | 404)), "{path}: {good:?}");
            for hosts in ["", &one.repeat(2), "host: localhost\r\nhost: evil.example\r\n"] {
                assert_eq!(code(address, get("1.1", hosts)).await, Some(400), "{path} {hosts:?}");
            }
            let old = code(address, get("1.0", "")).await;
            assert_ne!(old, Some(400), "{path}: HTTP/1.0 knows no Host");
        }
    }
    instance.stop().await;
}
