//! `fairlane_http_seconds` is the time that the client perceives. Its parts show where the time
//! went.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, Response, get, metric};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
/// The pause that each test makes the client wait.
const PAUSE: Duration = Duration::from_millis(400);
/// The minimum of that pause that the metric must show, in seconds.
const SEEN: f64 = 0.3;

async fn start(server: &RedisServer, more: &[(&str, &str)]) -> (Served, Client) {
    let settings = [&[("pipelines.test.handler", "\"log\"")], more].concat();
    let process = Served::start(&config(server, "test", &settings)).await;
    let client = Client::new(&process.http());
    (process, client)
}

/// The sum and the count of a histogram, or zeros if it has no such series.
async fn seconds(process: &Served, name: &str, label: (&str, &str)) -> (f64, f64) {
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let of = |part: &str| metric(&text, &format!("fairlane_{name}_{part}"), &[label]);
    (of("sum").unwrap_or(0.0), of("count").unwrap_or(0.0))
}

/// The process records the time after the last byte has left, so the client may be ahead of it.
async fn counted(process: &Served, name: &str, label: (&str, &str), count: f64) -> f64 {
    let mut sum = 0.0;
    eventually(LONG, "the request is counted", async || {
        let (seen, of) = seconds(process, name, label).await;
        sum = seen;
        of >= count
    })
    .await;
    let (_, of) = seconds(process, name, label).await;
    assert!((of - count).abs() < 0.5, "{of} instead of {count} in {name} {label:?}");
    sum
}

#[tokio::test]
async fn a_slow_head_and_a_slow_body_count() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    let route = ("route", "/v1/events");
    let body = event("bot-1", "e", 0);
    let (kind, length) = ("application/cloudevents+json", body.len().to_string());
    let head =
        client.head("POST", "/v1/events", &[("content-type", kind), ("content-length", &length)]);
    let mut stream = TcpStream::connect(process.http()).await.unwrap();
    let mut exchange = async |pieces: [&[u8]; 2]| {
        for (at, piece) in pieces.into_iter().enumerate() {
            if at > 0 {
                tokio::time::sleep(PAUSE).await;
            }
            stream.write_all(piece).await.unwrap();
        }
        let mut answer = Vec::new();
        while Response::parse(&answer).is_none() {
            assert!(stream.read_buf(&mut answer).await.unwrap() > 0, "it was closed");
        }
        assert_eq!(Response::parse(&answer).unwrap().0.code, 202);
    };
    let whole = [head.as_bytes(), body.as_bytes()].concat();
    exchange(whole.split_at(5).into()).await;
    let slow_head = counted(&process, "http_seconds", route, 1.0).await;
    assert!(slow_head >= SEEN, "{slow_head}");

    // The same connection is idle first. Nothing is read then, so no request starts.
    tokio::time::sleep(PAUSE).await;
    exchange(whole.split_at(head.len() + 5).into()).await;
    let both = counted(&process, "http_seconds", route, 2.0).await;
    assert!(both >= slow_head + SEEN, "{both}");
    let (sum, bodies) = seconds(&process, "http_body_seconds", route).await;
    assert!(sum >= SEEN && bodies > 1.5, "{sum} s of {bodies}");
    let (handled, _) = seconds(&process, "http_handler_seconds", route).await;
    assert!(handled < both - 2.0 * SEEN, "{handled} of {both}: the handler did not take it");
    assert!(sum < both - SEEN, "{sum} of {both}: the slow head is no body");
}

#[tokio::test]
async fn a_slow_reader_counts_until_it_has_taken_the_last_byte() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    let (path, route) = ("/docs/swagger-ui-bundle.js", ("route", "/docs/{*rest}"));
    let size = client.get(path).await.body.len();
    // The answers are larger than the buffers of both sides.
    let requests = (24 << 20) / size;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut stream = socket.connect(process.http().parse().unwrap()).await.unwrap();
    let request = client.head("GET", path, &[]);
    stream.write_all(request.repeat(requests - 1).as_bytes()).await.unwrap();
    let last = client.head("GET", path, &[("connection", "close")]);
    stream.write_all(last.as_bytes()).await.unwrap();
    let mut begun = 0.0;
    eventually(LONG, "the buffers are full", async || {
        tokio::time::sleep(PAUSE / 2).await;
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let labels = [route, ("code", "200")];
        let before = std::mem::replace(
            &mut begun,
            metric(&text, "fairlane_http_requests_total", &labels).unwrap_or(0.0),
        );
        begun > 1.5 && (begun - before).abs() < 0.5
    })
    .await;
    tokio::time::sleep(PAUSE).await;
    let mut taken = 0;
    let mut buffer = vec![0; 1 << 20];
    while let Ok(read @ 1..) = stream.read(&mut buffer).await {
        taken += read;
    }
    assert!(taken >= requests * size, "{taken} bytes of {requests} answers");
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let all = requests as f64 + 1.0;
    counted(&process, "http_seconds", route, all).await;
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let slow = |name: &str| {
        let below = [route, ("le", "0.25")];
        let quick = metric(&text, &format!("fairlane_{name}_bucket"), &below).unwrap();
        metric(&text, &format!("fairlane_{name}_count"), &[route]).unwrap() - quick
    };
    for name in ["http_seconds", "http_answer_seconds"] {
        assert!(slow(name) >= 1.0, "{name}: the one that was held up\n{text}");
    }
    let (handled, _) = seconds(&process, "http_handler_seconds", route).await;
    let (answered, _) = seconds(&process, "http_answer_seconds", route).await;
    assert!(answered >= SEEN, "{answered} s beside {handled} s of the handlers");
}

#[tokio::test]
async fn a_wait_for_admission_counts_for_refused_and_for_served_requests() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[("admission.limit_max", "8")]).await;
    let path = "/v1/pipelines/test";
    server.sigstop();
    let mut hanging = JoinSet::new();
    for _ in 0..8 {
        let client = client.clone();
        hanging.spawn(async move { client.get(path).await });
    }
    eventually(LONG, "there is no room", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let admitted = [("class", "p1"), ("decision", "admitted")];
        metric(&text, "fairlane_admission_total", &admitted) == Some(8.0)
    })
    .await;
    let (_, waits) = seconds(&process, "queue_wait_seconds", ("class", "p1")).await;
    let refused = client.get(path).await;
    assert_eq!((refused.code, refused.header("x-shed-reason")), (503, Some("wait")));
    let (waited, count) = seconds(&process, "queue_wait_seconds", ("class", "p1")).await;
    assert!(count - waits > 0.5 && waited >= 0.09, "{waited} s in {count} waits");
    let (_, text) = get(&process.metrics(), "/metrics").await;
    assert_eq!(metric(&text, "fairlane_shed_seconds_count", &[]), Some(1.0));
    assert!(metric(&text, "fairlane_shed_seconds_sum", &[]) >= Some(0.09), "with its wait");
    let route = ("route", "/v1/pipelines/{pipeline}");
    let (_, answered) = seconds(&process, "http_seconds", route).await;
    assert!(answered < 0.5, "it was not served: {answered}");

    // A waiting request is served once the others are answered.
    let mut waiting = JoinSet::new();
    let again = client.clone();
    waiting.spawn(async move { while again.get(path).await.code != 200 {} });
    let waiting_ones = async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        metric(&text, "fairlane_shed_seconds_count", &[]) >= Some(2.0)
    };
    eventually(LONG, "it comes again and again", waiting_ones).await;
    server.sigcont();
    for answer in hanging.join_all().await {
        assert_eq!(answer.code, 200);
    }
    waiting.join_all().await;
    let all = counted(&process, "http_seconds", route, 9.0).await;
    let (handled, _) = seconds(&process, "http_handler_seconds", route).await;
    assert!(all >= handled, "{all} s with all that is around {handled} s");
}

#[tokio::test]
async fn a_request_cut_by_its_deadline_counts_with_the_time_until_its_answer() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    server.sigstop();
    let cut = client.send("GET", "/v1/pipelines/test", &[("x-deadline-ms", "400")], b"").await;
    server.sigcont();
    assert_eq!(cut.code, 504);
    let route = ("route", "/v1/pipelines/{pipeline}");
    assert!(counted(&process, "http_seconds", route, 1.0).await >= SEEN);
    assert!(counted(&process, "http_handler_seconds", route, 1.0).await >= SEEN);
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let answered = [route, ("code", "504")];
    assert_eq!(metric(&text, "fairlane_http_requests_total", &answered), Some(1.0));
    let shed = metric(&text, "fairlane_shed_seconds_count", &[]);
    assert!(shed.is_none_or(|count| count < 0.5), "it was not refused: {shed:?}");
}

#[tokio::test]
async fn a_request_whose_client_leaves_counts_with_code_499() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    server.sigstop();
    let mut stream = TcpStream::connect(process.http()).await.unwrap();
    let head = client.head("GET", "/v1/pipelines/test", &[]);
    stream.write_all(head.as_bytes()).await.unwrap();
    eventually(LONG, "it is admitted", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let admitted = [("class", "p1"), ("decision", "admitted")];
        metric(&text, "fairlane_admission_total", &admitted) == Some(1.0)
    })
    .await;
    tokio::time::sleep(PAUSE).await;
    drop(stream);
    let route = ("route", "/v1/pipelines/{pipeline}");
    counted(&process, "http_seconds", route, 1.0).await;
    server.sigcont();
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let of = |code| metric(&text, "fairlane_http_requests_total", &[route, ("code", code)]);
    assert_eq!((of("499"), of("200")), (Some(1.0), None), "{text}");
}

#[tokio::test]
async fn a_live_page_counts_until_its_head_although_it_goes_on() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    let mut stream = TcpStream::connect(process.http()).await.unwrap();
    let head = client.head("GET", "/", &[("accept", "text/event-stream")]);
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut first = [0; 15];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    let whole = counted(&process, "http_seconds", ("route", "/"), 1.0).await;
    let mut rest = vec![0; 4_096];
    assert!(stream.read(&mut rest).await.unwrap() > 0, "it goes on");
    drop(stream);
    let after = counted(&process, "http_seconds", ("route", "/"), 1.0).await;
    assert!((after - whole).abs() < f64::EPSILON, "and counts no more");
}
