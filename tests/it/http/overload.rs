//! More requests than the process can answer: the refusals, their form, and the work that
//! continues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, millis};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::admission::hang;
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::counter_fleet::{Node, Stores, View, path};
use crate::support::http::{Client, Response, get, metric};
use crate::support::instance::{Instance, queue};
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::{finds_within, on};
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stalls, Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(20);
const STRUCTURED: &str = "application/cloudevents+json";

fn settings(server: &RedisServer, more: &[(&str, &str)]) -> String {
    // The program has no handler `recorder`.
    let mut all = vec![("pipelines.test.handler", "\"log\"")];
    all.extend(more);
    config(server, "test", &all)
}

async fn start(server: &RedisServer, more: &[(&str, &str)]) -> (Served, Client) {
    let process = Served::start(&settings(server, more)).await;
    let client = Client::new(&process.http());
    (process, client)
}

async fn publish(client: &Client, headers: &[(&str, &str)]) -> Response {
    let mut all = vec![("content-type", STRUCTURED)];
    all.extend(headers);
    client.send("POST", "/v1/events", &all, event("bot-1", "e", 0).as_bytes()).await
}

#[tokio::test]
async fn sighup_switches_a_class_off_and_on_again_and_a_mistake_changes_nothing() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[]).await;
    assert_eq!(publish(&client, &[]).await.code, 202);
    assert_eq!(publish(&client, &[("x-priority", "p3")]).await.code, 202);

    process.reload(&settings(&server, &[("admission.p2", "\"refuse\"")]));
    eventually(LONG, "it is switched off", async || publish(&client, &[]).await.code == 503).await;
    let refused = publish(&client, &[]).await;
    assert_eq!(refused.problem(), "overloaded");
    assert_eq!(refused.header("x-shed-reason"), Some("switch"));
    let again: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=10).contains(&again), "{again}");
    assert_eq!(client.get("/v1/pipelines").await.code, 200, "another class");
    let raised = publish(&client, &[("x-priority", "p0")]).await;
    assert_eq!(raised.code, 503, "a header raises no class");
    let lowered = client.send("GET", "/v1/pipelines", &[("x-priority", "p2")], b"").await;
    assert_eq!(lowered.code, 503, "but it can lower one");
    let wrong = client.send("GET", "/v1/pipelines", &[("x-priority", "high")], b"").await;
    assert_eq!((wrong.code, wrong.problem().as_str()), (400, "invalid-request"));

    process.reload("[admission]\np2 = \"perhaps\"\n");
    let mistake = "nothing is reloaded";
    eventually(LONG, "the mistake is told", async || process.log().contains(mistake)).await;
    assert!(process.log().contains("admission.p2"), "{}", process.log());
    assert_eq!(publish(&client, &[]).await.code, 503, "nothing is changed");

    process.reload(&settings(&server, &[]));
    eventually(LONG, "it is on again", async || publish(&client, &[]).await.code == 202).await;
}

#[tokio::test]
async fn a_deadline_that_is_over_or_missed_is_answered_in_time_with_504() {
    let server = RedisServer::start(Options::default());
    let (_process, client) = start(&server, &[]).await;
    let ask = async |ms: &str| {
        client.send("GET", "/v1/pipelines/test", &[("x-deadline-ms", ms)], b"").await
    };
    assert_eq!(ask("2000").await.code, 200);
    let over = ask("0").await;
    assert_eq!((over.code, over.problem().as_str()), (504, "deadline"));
    assert_eq!(over.header("x-shed-reason"), Some("deadline"));
    for wrong in ["soon", "-1", "3600001", "1.5"] {
        let refused = ask(wrong).await;
        assert_eq!((refused.code, refused.problem().as_str()), (400, "invalid-request"), "{wrong}");
        assert_eq!(refused.json()["errors"][0]["field"], "x-deadline-ms");
    }

    server.sigstop();
    let watch = Stopwatch::start();
    let missed = ask("300").await;
    // Without the deadline, the process would wait 5 s for Redis.
    watch.within(Duration::from_secs(4), "the deadline is told");
    server.sigcont();
    assert_eq!((missed.code, missed.problem().as_str()), (504, "deadline"));
}

#[tokio::test]
async fn mongodb_gets_the_time_limit_of_the_waiting_client() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let (client, ad) = (node.client(), ("bot".to_owned(), "ad".to_owned()));
    View::new(&ad.0, &ad.1, 1).count(|| client.clone()).await;
    let path = path(&ad, "/daily");
    let waits = Duration::from_secs(3);
    let limit =
        || node.mongo.intercept(finds_within("counters_daily", waits), 1, Interception::Watch);
    let unhurried = limit();
    assert_eq!(client.get(&path).await.code, 200);
    assert!(!unhurried.has_caught(), "5 s, as always");
    drop(unhurried);
    let hurried = limit();
    let asked = client.send("GET", &path, &[("x-deadline-ms", "3000")], b"").await;
    assert_eq!(asked.code, 200);
    assert!(hurried.has_caught(), "3 s at most");

    // One search for totals serves many callers, and some may have more time than the first.
    let shared = node.mongo.intercept(
        finds_within("counters_totals", Duration::from_secs(1)),
        1,
        Interception::Watch,
    );
    let any = node.mongo.intercept(on("find", "counters_totals"), 1, Interception::Watch);
    let path = "/v1/bots/bot/counters?ids=not-cached";
    assert_eq!(client.send("GET", path, &[("x-deadline-ms", "1000")], b"").await.code, 200);
    assert!(any.has_caught() && !shared.has_caught(), "it has its own time");
}

#[tokio::test]
async fn without_room_the_lower_classes_are_refused_and_health_and_operators_are_answered() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[("admission.limit_max", "8")]).await;
    server.sigstop();
    let hanging = hang(&process, &client, 7).await;
    let refused = publish(&client, &[]).await;
    assert_eq!((refused.code, refused.problem().as_str()), (503, "overloaded"));
    let reason = refused.header("x-shed-reason").unwrap().to_owned();
    assert!(["wait", "capacity"].contains(&reason.as_str()), "{reason}");
    assert!(refused.header("retry-after").is_some());
    assert_eq!(client.get("/healthz").await.code, 200);
    assert_eq!(get(&process.metrics(), "/healthz").await.0, 200);
    // The last tenth of the limit is reserved for the highest class.
    let state = client.get("/v1/admission").await.json();
    assert_eq!((&state["limit"], &state["in_flight"]), (&json!(8), &json!(8)), "{state}");
    assert_eq!(state["shed"][0], json!({ "class": "p2", "reason": reason, "requests": 1 }));
    server.sigcont();
    for answer in hanging.join_all().await {
        assert_eq!(answer.code, 200, "what was begun is finished");
    }
    assert_eq!(publish(&client, &[]).await.code, 202, "there is room again");

    let (_, text) = get(&process.metrics(), "/metrics").await;
    let shed = [("class", "p2"), ("route", "/v1/events"), ("reason", reason.as_str())];
    assert_eq!(metric(&text, "fairlane_shed_total", &shed), Some(1.0));
    assert_eq!(metric(&text, "fairlane_inflight_limit", &[]), Some(8.0));
    let decided = [("class", "p2"), ("decision", "shed")];
    assert_eq!(metric(&text, "fairlane_admission_total", &decided), Some(1.0));
    let served_ones = [("route", "/v1/events"), ("code", "503")];
    let mixed = metric(&text, "fairlane_http_requests_total", &served_ones);
    assert_eq!(mixed, None, "the times of refusals do not mix with those of answers");
}

#[tokio::test]
async fn the_gauges_show_the_requests_in_flight_also_while_none_is_answered() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[("admission.limit_max", "8")]).await;
    let gauges = async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        ["fairlane_inflight", "fairlane_http_demand_ratio"].map(|name| metric(&text, name, &[]))
    };
    server.sigstop();
    let hanging = hang(&process, &client, 6).await;
    eventually(LONG, "six are in flight", async || gauges().await[0] == Some(6.0)).await;
    server.sigcont();
    hanging.join_all().await;
    eventually(LONG, "none is, and there is no demand", async || gauges().await == [Some(0.0); 2])
        .await;
}

#[tokio::test]
async fn over_its_quota_a_bot_is_served_while_there_is_room_and_told_429_when_there_is_not() {
    let server = RedisServer::start(Options::default());
    let quota = [("admission.bot_rate", "1"), ("admission.limit_max", "8")];
    let (process, client) = start(&server, &quota).await;
    let show = async |bot: &str| client.get(&format!("/v1/pipelines/test/bots/{bot}")).await;
    for _ in 0..5 {
        assert_eq!(show("busy").await.code, 200, "nobody else wants the room");
    }
    server.sigstop();
    let hanging = hang(&process, &client, 6).await;
    // If the machine stalls for a second, the quota of the bot gains one request, which then waits
    // for Redis.
    let refused = match tokio::time::timeout(Duration::from_secs(1), show("busy")).await {
        Ok(refused) => refused,
        Err(_) => show("busy").await,
    };
    assert_eq!((refused.code, refused.problem().as_str()), (429, "quota"));
    assert_eq!(refused.header("x-shed-reason"), Some("quota"));
    assert!(refused.header("retry-after").is_some());
    let events: Vec<_> = (0..3).map(|n| event("busy", "e", n)).collect();
    let batch = format!("[{}]", events.join(","));
    let refused = client.publish("application/cloudevents-batch+json", batch).await;
    assert_eq!((refused.code, refused.problem().as_str()), (429, "quota"));
    server.sigcont();
    hanging.join_all().await;
    assert_eq!(show("busy").await.code, 200);
    let (_, text) = get(&process.metrics(), "/metrics").await;
    for (class, route) in [("p1", "/v1/pipelines/{pipeline}/bots/{bot}"), ("p2", "/v1/events")] {
        let labels = [("class", class), ("route", route), ("reason", "quota")];
        assert_eq!(metric(&text, "fairlane_shed_total", &labels), Some(1.0), "{route}");
    }
}

#[tokio::test]
async fn a_slow_body_delays_no_other_client() {
    let server = RedisServer::start(Options::default());
    let (process, client) = start(&server, &[("admission.limit_max", "4")]).await;
    let mut slow = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(process.http()).await.unwrap();
        let headers = [("content-type", STRUCTURED), ("content-length", "200")];
        let head = client.head("POST", "/v1/events", &headers);
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(b"{").await.unwrap();
        slow.push(stream);
    }
    // The process has read what came of them by then.
    tokio::time::sleep(Duration::from_millis(200)).await;
    for _ in 0..20 {
        // On a machine that stalls, one request may wait too long. If slow bodies held places, all
        // would fail.
        eventually(LONG, "it is published", async || publish(&client, &[]).await.code == 202).await;
    }
    let state = client.get("/v1/admission").await.json();
    assert_eq!(state["in_flight"], 1, "itself: {state}");
}

#[tokio::test]
async fn one_address_has_so_many_connections_and_others_are_not_kept_out() {
    let server = RedisServer::start(Options::default());
    let few = [("http.max_connections", "40"), ("http.max_connections_per_address", "20")];
    let (process, client) = start(&server, &few).await;
    let address = process.http();
    let connect = async |from: [u8; 4]| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(address.parse().unwrap()).await.unwrap()
    };
    let mut flood = Vec::new();
    for _ in 0..30 {
        flood.push(connect([127, 0, 0, 2]).await);
    }
    let refused = async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        metric(&text, "fairlane_http_connections_refused_total", &[("listener", "http")])
    };
    eventually(LONG, "ten are refused", async || refused().await == Some(10.0)).await;
    let mut closed = 0;
    for stream in &mut flood {
        let mut byte = [0];
        let read = tokio::time::timeout(Duration::from_millis(50), stream.read(&mut byte)).await;
        closed += usize::from(matches!(read, Ok(Ok(0) | Err(_))));
    }
    assert_eq!(closed, 10, "beyond 20 they are closed at once");
    assert_eq!(client.get("/healthz").await.code, 200, "another address");
    assert_eq!(refused().await, Some(10.0));
    drop(flood);
    eventually(LONG, "its connections are over", async || {
        let mut stream = connect([127, 0, 0, 2]).await;
        let head = client.head("GET", "/healthz", &[("connection", "close")]);
        let _ = stream.write_all(head.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        Response::parse(&answer).is_some_and(|(answer, _)| answer.code == 200)
    })
    .await;
}

#[tokio::test]
async fn in_shadow_refusals_are_counted_and_everything_is_served() {
    let server = RedisServer::start(Options::default());
    let shadow = [("admission.limit_max", "4"), ("admission.p1", "\"shadow\"")];
    let (process, client) = start(&server, &shadow).await;
    server.sigstop();
    let hanging = hang(&process, &client, 20).await;
    server.sigcont();
    for answer in hanging.join_all().await {
        assert_eq!(answer.code, 200);
    }
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let decided = [("class", "p1"), ("decision", "shadow")];
    assert_eq!(metric(&text, "fairlane_admission_total", &decided), Some(16.0));
}

#[tokio::test]
async fn no_huge_pages_are_cleared_while_somebody_waits() {
    let server = RedisServer::start(Options::default());
    let (process, _client) = start(&server, &[]).await;
    let enabled = process.status_of_kernel("THP_enabled");
    // Kernels before 5.0 do not report this.
    assert!(enabled.is_none_or(|enabled| enabled == "0"), "they are given to it");
}

#[tokio::test]
async fn more_connections_than_files_are_refused_at_start_with_the_remedy() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("fairlane.toml");
    std::fs::write(&file, settings(&server, &[("http.max_connections", "5000")])).unwrap();
    let program = crate::support::served::PROGRAM;
    let command = format!("ulimit -n 2048; exec {program} serve --config {}", file.display());
    let output = tokio::process::Command::new("sh").args(["-c", &command]).output();
    let output = tokio::time::timeout(LONG, output).await.unwrap().unwrap();
    assert_eq!(output.status.code(), Some(64));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in ["http.max_connections is 5000", "2048", "LimitNOFILE"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}

/// Takes 2 ms for each event, dead-letters some, and notes how many ms after its expiry an event arrived at
/// most.
struct Slow {
    late_ms: Arc<AtomicU64>,
}

impl Handler for Slow {
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let now = millis(environment.clock.now());
        let mut outcomes = Outcomes::done();
        for (index, delivery) in slice.events.iter().enumerate() {
            let ms: u64 = delivery.event.source().parse().unwrap();
            if ms > 0 {
                self.late_ms.fetch_max(now.saturating_sub(ms), Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
            if delivery.event.kind() == "poison" {
                outcomes = outcomes.dead(index, "poison");
            }
        }
        Ok(outcomes)
    }
}

#[tokio::test]
async fn of_more_events_than_can_be_handled_in_time_each_is_done_dead_expired_or_queued_and_none_handled_late()
 {
    const EVENTS: u64 = 6_000;
    let server = RedisServer::start(Options::default());
    let few = [("pipelines.flooded.workers.max", "4"), ("pipelines.flooded.batch", "5")];
    let config = config(&server, "flooded", &few);
    let begin = SystemClock.now();
    let events: Vec<String> = (0..EVENTS)
        .map(|n| {
            // A third of the events expire within the first seconds, and one in twenty is
            // dead-lettered.
            let ends = if n % 3 == 0 { begin + Duration::from_millis(200 + n / 3) } else { Duration::ZERO };
            let mut event = json!({
                "specversion": "1.0", "id": n.to_string(), "source": ends.as_millis().to_string(),
                "type": if n % 20 == 1 { "poison" } else { "e" }, "botid": format!("bot-{}", n % 50),
            });
            if n % 3 == 0 {
                let ends = jiff::Timestamp::from_millisecond(ends.as_millis().try_into().unwrap());
                event["expirytime"] = json!(ends.unwrap().to_string());
            }
            event.to_string()
        })
        .collect();
    add(&server, STREAM, &events).await;
    let (late_ms, stalls) = (Arc::new(AtomicU64::new(0)), Stalls::watch());
    let instance = Instance::start(&config, Slow { late_ms: Arc::clone(&late_ms) }).await;
    // However slowly they are copied, most are queued at first.
    instance.queue("flooded").pause(None).await.unwrap();
    let copied = async || {
        let text = fairlane::metrics::render();
        metric(&text, "fairlane_fanout_copies_total", &[("pipeline", "flooded")])
    };
    eventually(LONG, "all are copied", async || copied().await == Some(6_000.0)).await;
    instance.queue("flooded").resume(None).await.unwrap();
    let ended = || {
        let text = fairlane::metrics::render();
        ["done", "dead", "expired"].map(|outcome| {
            let labels = [("pipeline", "flooded"), ("outcome", outcome)];
            metric(&text, "fairlane_events_total", &labels).unwrap_or_default()
        })
    };
    let most = async || ended().iter().sum::<f64>() > 4_000.0;
    eventually(LONG, "most have ended", most).await;
    instance.stop().await;

    let [done, dead, expired] = ended();
    let queue = queue(&config, "flooded").await;
    let view = queue.view(SystemClock.now()).await.unwrap();
    #[expect(clippy::cast_precision_loss, reason = "thousands")]
    let (queued, letters) = (view.depth as f64, view.dead as f64);
    let all = format!("{done} done, {dead} dead, {expired} expired, {queued} queued");
    assert!((done + dead + expired + queued - 6_000.0).abs() < 0.5, "{all}");
    assert!((letters - dead - expired).abs() < 0.5, "{letters} letters: {all}");
    assert!(done > 0.0 && dead > 0.0 && expired > 0.0 && queued > 0.0, "{all}");
    // An event must not have expired when the slice was taken. The handler reads its clock a little later.
    let (late_ms, stall) = (late_ms.load(Ordering::Relaxed), stalls.longest());
    assert!(late_ms <= 20 + millis(stall), "{late_ms} ms late, stalled for {stall:?}: {all}");
}
