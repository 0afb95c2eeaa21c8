//! Hostile requests to every route: each gets the right refusal, as the document describes it, and
//! nothing is stored.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::bus::event;
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, Operation, Response, metric};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{Stalls, eventually};

const STRUCTURED: &str = "application/cloudevents+json";

async fn start(server: &RedisServer) -> (Instance, Client) {
    let settings = [("pipelines.notifications.enabled", "true")];
    let instance =
        Instance::start(&config(server, "test", &settings), Log::default().content()).await;
    let client = instance.client();
    (instance, client)
}

/// The content of Redis about pipelines and events, without the records of the instance itself.
async fn stored(connection: &mut MultiplexedConnection) -> BTreeMap<String, String> {
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query_async(connection).await.unwrap();
    let mut stored = BTreeMap::new();
    for key in keys {
        let kind: String = redis::cmd("TYPE").arg(&key).query_async(connection).await.unwrap();
        let command = match kind.as_str() {
            "stream" => "XLEN",
            "list" => "LLEN",
            "set" => "SCARD",
            "zset" => "ZCARD",
            "hash" => "HLEN",
            _ => continue,
        };
        let length: u64 = redis::cmd(command).arg(&key).query_async(connection).await.unwrap();
        // The instance writes these on its own: its presence, clocks and offsets.
        let own = ["fl:pipelines", "fl:shards", "fl:processes", "fl:trend", "fl:trend-minutes"]
            .contains(&key.as_str());
        if !own && !key.ends_with(":meta") && !key.ends_with(":read") && !key.ends_with(":hwm") {
            stored.insert(key, format!("{kind} {length}"));
        }
    }
    stored
}

/// Bodies that no route can use, each with its content type.
fn bodies() -> Vec<(&'static str, Vec<u8>)> {
    let deep = "[".repeat(100_000);
    let batch = "application/cloudevents-batch+json";
    let mut bodies = Vec::new();
    for kind in ["application/json", STRUCTURED, batch] {
        for body in [
            &b"{"[..],
            b"nonsense",
            b"\xff\xfe\x00",
            b"{\"weight\":\xff}",
            b"[1,2",
            b"\"text\"",
            b"12",
            b"null",
            b"{\"a\":1}",
            b"[[]]",
            b"{\"weight\":\"three\"}",
            b"{\"weight\":99999999999999999999}",
            b"{\"specversion\":\"1.0\",\"id\":\"1\",\"source\":\"s\",\"type\":\"t\",\"botid\":7}",
            b"{\"specversion\":\"1.0\",\"id\":\"1\",\"source\":\"s\",\"type\":\"t\",\"botid\":\"a\\u0000\"}",
            deep.as_bytes(),
        ] {
            bodies.push((kind, body.to_vec()));
        }
    }
    for kind in ["text/plain", "application/xml", "application/json; charset=utf-16", "/"] {
        bodies.push((kind, b"x".to_vec()));
    }
    bodies
}

#[tokio::test]
async fn no_body_that_cannot_be_used_does_anything_on_any_route() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    let mut connection = server.connection().await;
    let before = stored(&mut connection).await;
    for operation in Operation::all(&client).await {
        let path = operation.path(&[]);
        for (kind, body) in bodies() {
            let headers = [("content-type", kind)];
            let answer = client.send(&operation.method, &path, &headers, &body).await;
            let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
            let about = format!("{} {kind} {shown}: {answer:?}", operation.name());
            assert!(operation.codes.contains(&answer.code), "not documented: {about}");
            if operation.method == "GET" {
                assert!(matches!(answer.code, 200 | 400 | 404 | 413), "{about}");
            } else {
                assert!(matches!(answer.code, 400 | 404 | 413 | 415), "{about}");
                answer.problem();
            }
        }
        if !operation.needs_body {
            continue;
        }
        let empty = client.send(&operation.method, &path, &[], b"").await;
        // These routes also read parameters from the query, so the error is a missing parameter.
        let expected = match operation.template.as_str() {
            "/send_delayed" | "/user_online" => (400, "invalid-request"),
            _ => (415, "media-type"),
        };
        assert_eq!((empty.code, empty.problem().as_str()), expected, "{operation:?}");
        for kind in &operation.takes {
            let headers = [("content-type", kind.as_str()), ("content-length", "0")];
            let empty = client.send(&operation.method, &path, &headers, b"").await;
            assert_eq!((empty.code, empty.problem().as_str()), (400, "invalid-request"), "{kind}");
        }
    }
    assert_eq!(stored(&mut connection).await, before);
    instance.stop().await;
}

#[tokio::test]
async fn no_parameter_that_cannot_be_used_does_anything_on_any_route() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    let mut connection = server.connection().await;
    let before = stored(&mut connection).await;
    let long = "x".repeat(300);
    for operation in Operation::all(&client).await {
        let json = [("content-type", "application/json")];
        let body = match &*operation.method {
            _ if operation.takes.is_empty() => &b""[..],
            "PUT" => b"{\"weight\":2}",
            _ if operation.template.ends_with("/replay") => b"{\"from\":\"1h ago\"}",
            _ => b"{}",
        };
        let mut paths = Vec::new();
        let wrong = ["%ff", "%00", "%0a", &long];
        for value in wrong.iter().chain(&["UPPER", "a%20b", "-x"]) {
            paths.push((operation.path(&[("pipeline", value)]), "pipeline"));
        }
        for value in wrong {
            paths.push((operation.path(&[("bot", value)]), "bot"));
            paths.push((operation.path(&[("ad", value)]), "ad"));
        }
        for value in
            ["%ff", "x", "1", "1.2", "99999.1-1", "0.1-", "0.-1-1", "0.99999999999999999999-1"]
        {
            paths.push((operation.path(&[("id", value)]), "id"));
        }
        for (path, parameter) in paths {
            if !operation.template.contains(&format!("{{{parameter}}}")) {
                continue;
            }
            let answer = client.send(&operation.method, &path, &json, body).await;
            let about = format!("{} {path}: {answer:?}", operation.method);
            assert!(operation.codes.contains(&answer.code), "not documented: {about}");
            // Only the data shows that this shard does not exist.
            assert!(answer.code == 400 || path.contains("99999.1-1"), "{about}");
            if answer.code == 400 {
                let flaws = answer.json()["errors"].clone();
                assert_eq!(flaws[0]["field"], parameter, "{about}");
            }
        }
        let unknown = operation.path(&[("pipeline", "unknown")]);
        if unknown != operation.path(&[]) {
            let answer = client.send(&operation.method, &unknown, &json, body).await;
            assert_eq!((answer.code, answer.problem().as_str()), (404, "no-pipeline"), "{unknown}");
        }
    }
    for query in [
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=x",
        "limit=",
        "limit=1&limit=2",
        "limt=1",
        "sort=size",
        "cursor=!",
        "cursor=x",
        "cursor=AAAA",
        "limit=%ff",
        "%ff=1",
        "bot=%00",
    ] {
        for list in ["bots", "dead"] {
            let answer = client.get(&format!("/v1/pipelines/test/{list}?{query}")).await;
            assert_eq!(
                (answer.code, answer.problem().as_str()),
                (400, "invalid-request"),
                "{list} {query}"
            );
        }
    }
    assert_eq!(stored(&mut connection).await, before);
    instance.stop().await;
}

#[tokio::test]
async fn every_route_of_the_document_is_served_and_no_other_method_and_path() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    let operations = Operation::all(&client).await;
    for operation in &operations {
        let path = operation.path(&[]);
        let answer = client.send(&operation.method, &path, &[], b"").await;
        assert_ne!(answer.code, 405, "{}", operation.name());
        assert!(answer.code != 404 || answer.problem() != "no-route", "{}", operation.name());
        assert!(operation.codes.contains(&answer.code), "{}: {answer:?}", operation.name());

        let here = |method: &str| {
            let same = |other: &&Operation| other.template == operation.template;
            operations.iter().filter(same).any(|other| other.method == method)
        };
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
            if here(method) {
                continue;
            }
            let answer = client.send(method, &path, &[], b"").await;
            assert_eq!(
                (answer.code, answer.problem().as_str()),
                (405, "method"),
                "{method} {path}"
            );
            let allow = answer.header("allow").unwrap();
            assert!(allow.contains(&operation.method), "{method} {path}: {allow}");
        }
    }
    for path in
        ["/nope", "/v1", "/v1/", "/v1/pipelines/", "/v1/pipelines/test/bots/", "/docs/nope", "//"]
    {
        let answer = client.get(path).await;
        assert_eq!(answer.code, 404, "{path}");
        answer.problem();
    }
    let page = client.get("/docs/").await;
    assert!(page.code == 200 && String::from_utf8_lossy(&page.body).contains("swagger-ui"));
    for part in ["swagger-initializer.js", "swagger-ui.css", "swagger-ui-bundle.js", "index.css"] {
        let answer = client.get(&format!("/docs/{part}")).await;
        assert_eq!(answer.code, 200, "{part}");
        // The pages work offline: they ask no other server.
        let text = String::from_utf8_lossy(&answer.body);
        let initial = part == "swagger-initializer.js";
        assert!(
            !initial || (text.contains("/openapi.json") && !text.contains("https://")),
            "{text}"
        );
    }
    instance.stop().await;
}

#[tokio::test]
async fn an_oversized_body_is_refused_before_it_is_sent_and_while_it_is() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    for operation in Operation::all(&client).await {
        let headers = [("content-length", "1048577"), ("content-type", STRUCTURED)];
        let head = client.head(&operation.method, &operation.path(&[]), &headers);
        // The test never sends the body.
        let (answer, _) = Response::parse(&client.raw(head.as_bytes()).await).map_or_else(
            || panic!("no answer on {}", operation.name()),
            |(answer, rest)| (answer, rest.len()),
        );
        assert_eq!((answer.code, answer.problem().as_str()), (413, "body-too-large"));
        let health = operation.scopes.is_none();
        assert!(health || operation.codes.contains(&413), "{}", operation.name());
    }
    let headers = [("transfer-encoding", "chunked"), ("content-type", STRUCTURED)];
    let mut request = client.head("POST", "/v1/events", &headers).into_bytes();
    request.extend(b"100001\r\n");
    request.extend(vec![b' '; 0x10_0001]);
    request.extend(b"\r\n0\r\n\r\n");
    let bytes = client.raw(&request).await;
    let (answer, _) = Response::parse(&bytes).expect("an answer");
    assert_eq!((answer.code, answer.problem().as_str()), (413, "body-too-large"));

    // A body of exactly the maximum size.
    let mut body = event("b", "t", 1).into_bytes();
    body.resize(1 << 20, b' ');
    assert_eq!(client.publish(STRUCTURED, &body).await.code, 202);
    instance.stop().await;
}

#[tokio::test]
async fn slow_heads_and_slow_bodies_are_cut_and_do_not_hold_up_others() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    let (stalls, begun) = (Stalls::watch(), Instant::now());
    // One byte a second keeps a connection busy, but not forever.
    let trickle = async |start: String| {
        let mut stream = TcpStream::connect(&client.address).await.unwrap();
        stream.write_all(start.as_bytes()).await.unwrap();
        let (mut reading, mut writing) = stream.split();
        let mut answer = Vec::new();
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                read = reading.read_buf(&mut answer) => if !read.is_ok_and(|bytes| bytes > 0) { break },
                _ = tick.tick() => { let _ = writing.write_all(b" ").await; }
            }
        }
        (answer, begun.elapsed())
    };
    let headers = [("content-type", STRUCTURED), ("content-length", "1000")];
    let (silent, head, body, others) = tokio::join!(
        trickle("G".to_owned()),
        trickle("GET /healthz HTTP/1.1\r\nx-slow:".to_owned()),
        trickle(client.head("POST", "/v1/events", &headers) + "{"),
        async {
            for id in 0..50 {
                assert_eq!(client.publish(STRUCTURED, event("b", "t", id)).await.code, 202);
            }
            begun.elapsed()
        },
    );
    let stall = stalls.longest();
    let between = |took: Duration, least, most| {
        let range = Duration::from_secs(least)..Duration::from_secs(most) + stall;
        assert!(range.contains(&took), "{took:?} is not in {range:?}");
    };
    between(silent.1, 4, 9);
    between(head.1, 4, 9);
    between(body.1, 9, 16);
    let (answer, _) = Response::parse(&body.0).expect("the slow body is told so");
    assert_eq!((answer.code, answer.problem().as_str()), (408, "body-too-slow"));
    assert!(others < Duration::from_secs(5) + stall, "others took {others:?}");
    instance.stop().await;
}

#[tokio::test]
async fn a_connection_takes_one_request_after_another_also_before_the_answers() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    let body = event("b", "t", 1);
    let length = body.len().to_string();
    let publish = client.head(
        "POST",
        "/v1/events",
        &[("content-type", STRUCTURED), ("content-length", &length)],
    ) + &body;
    let show = client.head("GET", "/v1/pipelines/test", &[]);
    let wrong = client.head("GET", "/nope", &[]);
    let last = client.head("GET", "/healthz", &[("connection", "close")]);
    let bytes =
        client.raw([publish.as_str(), &show, &wrong, &publish, &last].concat().as_bytes()).await;
    let (mut rest, mut codes) = (bytes.as_slice(), Vec::new());
    while let Some((answer, after)) = Response::parse(rest) {
        codes.push(answer.code);
        rest = after;
    }
    assert_eq!(codes, [202, 200, 404, 202, 200]);
    instance.stop().await;
}

#[tokio::test]
async fn bytes_that_are_no_http_are_answered_or_closed_and_the_server_continues() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    let host = &client.address;
    let many = "x: 1\r\n".repeat(200);
    for (request, codes) in [
        ("nonsense\r\n\r\n".to_owned(), &[400][..]),
        ("\u{16}\u{3}\u{1}\u{2}\u{0}".repeat(10), &[400]),
        (format!("GET / HTTP/3.0\r\nhost: {host}\r\n\r\n"), &[400, 505]),
        (format!("GET /{} HTTP/1.1\r\nhost: {host}\r\n\r\n", "x".repeat(100_000)), &[414, 431]),
        (format!("GET / HTTP/1.1\r\nhost: {host}\r\nx: {}\r\n\r\n", "x".repeat(100_000)), &[431]),
        (format!("GET / HTTP/1.1\r\nhost: {host}\r\n{many}\r\n"), &[431]),
        (format!("POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-length: x\r\n\r\n"), &[400]),
        (format!("POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-length: -1\r\n\r\n"), &[400]),
        (
            format!(
                "POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-type: {STRUCTURED}\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
            ),
            &[400],
        ),
    ] {
        let bytes = client.raw(request.as_bytes()).await;
        let code = Response::parse(&bytes).map(|(answer, _)| answer.code);
        // The server may close the connection without an answer when a head is too large.
        assert!(
            code.is_none_or(|code| codes.contains(&code)),
            "{code:?}: {:?}",
            &request[..40.min(request.len())]
        );
    }
    // A client that disconnects in the middle of its body.
    let headers = [("content-type", STRUCTURED), ("content-length", "1000")];
    let mut stream = TcpStream::connect(host).await.unwrap();
    let head = client.head("POST", "/v1/events", &headers);
    stream.write_all(head.as_bytes()).await.unwrap();
    drop(stream);
    assert_eq!(client.get("/healthz").await.code, 200);
    let mut connection = server.connection().await;
    let length: u64 = redis::cmd("XLEN").arg(STREAM).query_async(&mut connection).await.unwrap();
    assert_eq!(length, 0);
    instance.stop().await;
}

#[tokio::test]
async fn requests_are_counted_by_the_template_of_their_route() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = start(&server).await;
    assert_eq!(client.get("/v1/pipelines/test/bots/counted-bot").await.code, 200);
    assert_eq!(client.get("/counted-nowhere").await.code, 404);
    let (_, text) = crate::support::http::get(&instance.address.to_string(), "/metrics").await;
    let count = |route, code| {
        metric(&text, "fairlane_http_requests_total", &[("route", route), ("code", code)])
    };
    assert!(count("/v1/pipelines/{pipeline}/bots/{bot}", "200") >= Some(1.0), "{text}");
    assert!(count("unmatched", "404") >= Some(1.0), "{text}");
    eventually(Duration::from_secs(10), "and timed, once the last byte has left", async || {
        let (_, text) = crate::support::http::get(&instance.address.to_string(), "/metrics").await;
        metric(&text, "fairlane_http_seconds_count", &[("route", "unmatched")]) >= Some(1.0)
    })
    .await;
    assert!(!text.contains("counted-"), "a label holds what a client sent");
    instance.stop().await;
}
