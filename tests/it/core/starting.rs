//! The position from which a pipeline takes events, and the start while a store is slow,
//! unavailable or full.

use std::time::{Duration, Instant};

use fairlane::app::Roles;
use futures_util::future::join_all;
use redis::AsyncCommands as _;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config, configs};
use crate::support::http::{Client, metric};
use crate::support::instance::Instance;
use crate::support::interceptor::Interception;
use crate::support::mongo::{self, MongoServer, free_port};
use crate::support::mongo_proxy::MongoProxy;
use crate::support::proxy::{Proxy, ProxyMode, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
/// The minimum retention. Trimming happens when a reader starts and every five seconds.
const SHORT: (&str, &str) = ("bus.retention", "\"1s\"");
const NEW: &str = "\"new\"";
const JSON_BATCH: &str = "application/cloudevents-batch+json";

fn events(ids: std::ops::Range<u32>) -> Vec<String> {
    ids.map(|id| event("b", "test", id)).collect()
}

fn ids(ids: std::ops::Range<u32>) -> Vec<String> {
    ids.map(|id| id.to_string()).collect()
}

/// Asks without a pause until the answer is 200, so that the next event is published at the
/// earliest possible moment.
async fn is_ready(client: &Client) {
    let begun = Instant::now();
    while client.get("/readyz").await.code != 200 {
        assert!(begun.elapsed() < 3 * LONG, "{:?}", client.get("/readyz").await);
    }
}

/// Publishes ten events as soon as the process is ready.
async fn publish_at_once(server: &RedisServer, stream: &str, client: &Client, over_http: bool) {
    let mut connection = server.connection().await;
    let (texts, mut pipe) = (events(10..20), redis::pipe());
    for text in &texts {
        pipe.cmd("XADD").arg(stream).arg("*").arg("event").arg(text).ignore();
    }
    is_ready(client).await;
    if over_http {
        let answer = client.publish(JSON_BATCH, format!("[{}]", texts.join(","))).await;
        assert_eq!(answer.code, 202, "{answer:?}");
    } else {
        let () = pipe.query_async(&mut connection).await.unwrap();
    }
}

/// Starts a new pipeline on a stream that is not empty.
async fn first_start(server: &RedisServer, name: String, mongo: &str, over_http: bool) {
    let (stream, start) = (format!("s-{name}"), format!("pipelines.{name}.start"));
    let (streams, url) = (format!("[{stream:?}]"), format!("{mongo:?}"));
    let settings = [
        ("bus.streams", &*streams),
        ("mongodb.url", &url),
        ("pipelines.automations.enabled", "true"),
        (&start, NEW),
    ];
    add(server, &stream, &events(0..10)).await;
    let log = Log::default();
    let instance = Instance::start(&config(server, &name, &settings), log.content()).await;
    publish_at_once(server, &stream, &instance.client(), over_http).await;
    eventually(LONG, "what came after it was ready is handled", async || log.len() >= 10).await;
    assert_eq!(log.ids(&name), ids(10..20), "{name}");
    instance.stop().await;
}

/// 97 starts within this process, and three starts of the program itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_hundred_starts_nothing_published_after_ready_is_skipped() {
    let server = RedisServer::start(Options::default());
    let mongo = MongoServer::start(mongo::Options::default());
    let proxy = MongoProxy::start_before(mongo.address()).await;
    proxy.set(ProxyMode::Delay(Duration::from_millis(400)));
    let unavailable = format!("mongodb://127.0.0.1:{}", free_port());
    let stores = [("up", mongo.url()), ("off", unavailable), ("slow", proxy.mongo_url())];
    for (which, (state, url)) in stores.iter().enumerate() {
        let count = if which == 0 { 33 } else { 32 };
        let starts = (0..count).map(|number| {
            first_start(&server, format!("start-{state}-{number}"), url, number % 2 == 1)
        });
        join_all(starts).await;
        // The program itself starts here.
        let name = format!("start-{state}");
        let settings = [
            ("mongodb.url", &*format!("{url:?}")),
            ("pipelines.automations.enabled", "true"),
            (&*format!("pipelines.{name}.start"), NEW),
            (&*format!("pipelines.{name}.handler"), "\"log\""),
        ];
        add(&server, STREAM, &events(0..10)).await;
        let process = Served::start(&config(&server, &name, &settings)).await;
        publish_at_once(&server, STREAM, &Client::new(&process.http()), which % 2 == 1).await;
        let metrics = Client::new(&process.metrics());
        eventually(LONG, "what came after it was ready is handled", async || {
            let labels = [("pipeline", &*name), ("outcome", "done")];
            let text = metrics.get("/metrics").await.body;
            let text = String::from_utf8_lossy(&text).into_owned();
            metric(&text, "fairlane_events_total", &labels) == Some(10.0)
        })
        .await;
    }
}

#[tokio::test]
async fn a_pipeline_added_to_a_running_fleet_takes_events_once_its_first_process_is_ready() {
    let server = RedisServer::start(Options::default());
    let (old_log, new_log) = (Log::default(), Log::default());
    let streams = ("bus.streams", "[\"fairlane:events\", \"control\"]");
    let old = configs(&server, &["fleet-old"], &[SHORT, streams]);
    add(&server, STREAM, &events(0..10)).await;
    let old = Instance::start(&old, old_log.content()).await;
    eventually(LONG, "the old process reads", async || old_log.len() == 10).await;

    let settings = [SHORT, ("pipelines.fleet-new.start", NEW)];
    let new = configs(&server, &["fleet-old", "fleet-new"], &settings);
    let new = Instance::start(&new, new_log.content()).await;
    publish_at_once(&server, STREAM, &new.client(), false).await;
    // The old process still reads, and trims what it has handled. It empties the stream that the
    // new process does not read, twice. In the other stream it keeps what the new pipeline needs.
    let length = async |stream| server.connection().await.xlen::<_, usize>(stream).await.unwrap();
    for round in 1..=2 {
        add(&server, "control", &events(0..5)).await;
        eventually(LONG, "the old process trims", async || length("control").await <= 1).await;
        let all = old_log.len() + new_log.count("fleet-old");
        assert_eq!(all, 20 + 5 * round, "the old pipeline has everything");
    }
    assert!(length(STREAM).await >= 10, "{} are left", length(STREAM).await);
    assert_eq!(new_log.ids("fleet-new"), Vec::<String>::new(), "nobody reads for it yet");
    old.stop().await;
    eventually(LONG, "the new process reads", async || new_log.count("fleet-new") >= 10).await;
    assert_eq!(new_log.ids("fleet-new"), ids(10..20));
    // No pipeline holds back the trimming of the bus any more.
    add(&server, STREAM, &events(20..21)).await;
    eventually(LONG, "it is trimmed", async || length(STREAM).await <= 1).await;
    new.stop().await;
}

#[tokio::test]
async fn events_accepted_by_a_process_that_only_answers_http_are_for_its_pipelines() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let config = config(&server, "front", &[("pipelines.front.start", NEW)]);
    add(&server, STREAM, &events(0..10)).await;
    let http = Roles { ingest: false, work: false, http: true, schedule: false };
    let front = Instance::start_as(http, &config, log.content()).await;
    publish_at_once(&server, STREAM, &front.client(), true).await;
    front.stop().await;
    let others = Roles { http: false, ..Roles::ALL };
    let _others = Instance::start_as(others, &config, log.content()).await;
    eventually(LONG, "it is handled", async || log.len() >= 10).await;
    assert_eq!(log.ids("front"), ids(10..20));
}

#[tokio::test]
async fn a_shard_that_could_not_be_placed_starts_where_its_pipeline_does() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let config = config(&server, "placed", &[("pipelines.placed.start", NEW)]);
    add(&server, STREAM, &events(0..10)).await;
    let instance = Instance::start(&config, log.content()).await;
    is_ready(&instance.client()).await;
    instance.stop().await;
    // The state after a start at which the server of every shard was unavailable.
    let mut connection = server.connection().await;
    for shard in 0..8 {
        let key = format!("fl:{{placed:{shard}}}:hwm");
        let removed: u32 = connection.hdel(key, STREAM).await.unwrap();
        assert_eq!(removed, 1, "shard {shard} had its place");
    }
    add(&server, STREAM, &events(10..20)).await;
    let _instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "it is handled", async || log.len() >= 10).await;
    assert_eq!(log.ids("placed"), ids(10..20));
}

/// What is left of a Redis that lost its last writes, and `published` since it is back. All connections
/// break.
async fn lose_places(server: &RedisServer, pipeline: &str, published: &mut redis::Pipeline) {
    let mut connection = server.connection().await;
    let mut pipe = redis::pipe();
    pipe.atomic().hdel(format!("fl:{{{STREAM}}}:starts"), pipeline).ignore();
    for shard in 0..8 {
        pipe.hdel(format!("fl:{{{pipeline}:{shard}}}:hwm"), STREAM).ignore();
    }
    for command in published.cmd_iter() {
        pipe.add_command(command.clone()).ignore();
    }
    pipe.cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").arg("SKIPME").arg("yes").ignore();
    let () = pipe.query_async(&mut connection).await.unwrap();
}

#[tokio::test]
async fn a_running_process_remembers_the_start_that_redis_lost_unless_the_stream_is_a_new_one() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let config = config(&server, "lost", &[("pipelines.lost.start", NEW)]);
    add(&server, STREAM, &events(0..10)).await;
    let instance = Instance::start(&config, log.content()).await;
    is_ready(&instance.client()).await;
    let mut published = redis::pipe();
    for text in events(10..20) {
        published.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(text);
    }
    lose_places(&server, "lost", &mut published).await;
    eventually(LONG, "what was published since is handled", async || log.len() >= 10).await;
    assert_eq!(log.ids("lost"), ids(10..20));

    // Its entries are older than the start.
    let mut created = redis::pipe();
    created.cmd("DEL").arg(STREAM);
    created.cmd("XADD").arg(STREAM).arg("1-1").arg("event").arg(&events(20..21)[0]);
    lose_places(&server, "lost", &mut created).await;
    let placed = async || {
        let mut connection = server.connection().await;
        connection.hget::<_, _, Option<String>>("fl:{lost:0}:hwm", STREAM).await.unwrap()
    };
    eventually(LONG, "it starts again", async || placed().await.as_deref() == Some("1-1")).await;
    let mut later = redis::cmd("XADD");
    later.arg(STREAM).arg("1-2").arg("event").arg(&events(21..22)[0]);
    let () = later.query_async(&mut server.connection().await).await.unwrap();
    eventually(LONG, "what comes is handled", async || log.len() >= 11).await;
    assert_eq!(log.ids("lost")[10..], ids(21..22));
}

async fn limit_memory(server: &RedisServer, bytes: i64) {
    let mut connection = server.connection().await;
    let mut command = redis::cmd("CONFIG");
    command.arg("SET").arg("maxmemory").arg(bytes);
    let () = command.query_async(&mut connection).await.unwrap();
}

/// So small that every server is full with it.
const FULL: i64 = 1 << 20;

/// Makes the server full, with a million bytes that one command can remove.
async fn fill(server: &RedisServer) {
    let () = server.connection().await.set("ballast", vec![b'x'; 1 << 20]).await.unwrap();
    limit_memory(server, FULL).await;
}

#[tokio::test]
async fn a_process_starts_on_a_full_redis_and_drains_it() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let text = configs(&server, &["full-old"], &[]);
    add(&server, STREAM, &events(0..50)).await;
    // The events are copied and not handled.
    let ingest = Roles { ingest: true, work: false, http: false, schedule: false };
    let instance = Instance::start_as(ingest, &text, log.content()).await;
    let queue = instance.queue("full-old").clone();
    eventually(LONG, "it is copied", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 50
    })
    .await;
    instance.stop().await;
    fill(&server).await;

    let instance = Instance::start(&text, log.content()).await;
    is_ready(&instance.client()).await;
    eventually(LONG, "it is handled", async || log.len() >= 50).await;
    assert_eq!(log.ids("full-old"), ids(0..50));
    instance.stop().await;
}

#[tokio::test]
async fn on_a_full_redis_a_process_with_a_new_pipeline_drains_the_others_and_says_why_it_is_not_ready()
 {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let old = configs(&server, &["lack-old"], &[]);
    let instance = Instance::start(&old, log.content()).await;
    add(&server, STREAM, &events(0..10)).await;
    eventually(LONG, "it is handled", async || log.len() == 10).await;
    instance.stop().await;
    let ingest = Roles { ingest: true, work: false, http: false, schedule: false };
    let instance = Instance::start_as(ingest, &old, log.content()).await;
    add(&server, STREAM, &events(10..20)).await;
    let queue = instance.queue("lack-old").clone();
    eventually(LONG, "it is copied", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 10
    })
    .await;
    instance.stop().await;
    fill(&server).await;

    let settings = [("pipelines.lack-new.start", NEW)];
    let both = configs(&server, &["lack-old", "lack-new"], &settings);
    let instance = Instance::start_unready(&both, log.content()).await;
    let client = instance.client();
    eventually(LONG, "the old pipeline is drained", async || log.len() == 20).await;
    let mut said = client.get("/readyz").await;
    eventually(LONG, "it says why it is not ready", async || {
        said = client.get("/readyz").await;
        said.json()["reason"].as_str().is_some_and(|reason| reason.contains("Redis is full"))
    })
    .await;
    assert_eq!((said.code, &said.json()["status"]), (503, &"starting".into()), "{said:?}");
    let refused = client.publish(JSON_BATCH, format!("[{}]", events(20..21)[0])).await;
    assert_eq!((refused.code, &*refused.problem()), (503, "starting"), "{refused:?}");

    limit_memory(&server, 0).await;
    publish_at_once(&server, STREAM, &client, true).await;
    eventually(LONG, "both take it", async || log.len() == 40).await;
    assert_eq!(log.ids("lack-new"), ids(10..20));
    instance.stop().await;
}

const WAITS: &str = "waiting for Redis before the start";

fn spawned(server: &RedisServer) -> Served {
    let log = [("pipelines.early.handler", "\"log\"")];
    Served::spawn(&config(server, "early", &log), "work,http")
}

async fn says(process: &Served, text: &str) {
    eventually(LONG, text, async || process.log().contains(text)).await;
}

#[tokio::test]
async fn a_process_that_starts_before_its_redis_waits_for_it() {
    let mut server = RedisServer::start(Options { tcp: true, ..Options::default() });
    server.kill9();
    let mut process = spawned(&server);
    says(&process, WAITS).await;
    server.restart();
    says(&process, "fairlane is running").await;
    process.sigterm();
    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0), "{}", process.log());
}

#[tokio::test]
async fn a_process_ends_if_no_redis_answers_within_5_s_of_its_start() {
    let mut server = RedisServer::start(Options { tcp: true, ..Options::default() });
    server.kill9();
    let (mut process, started) = (spawned(&server), Instant::now());
    let status = process.wait_exit(LONG).expect("it ends");
    assert_eq!(status.code(), Some(69), "{}", process.log());
    assert!(started.elapsed() > Duration::from_secs(4), "{:?}", started.elapsed());
    assert!(process.log().contains("error: cannot connect to Redis at"), "{}", process.log());
}

/// A frozen server accepts connections and answers nothing.
#[tokio::test]
async fn a_process_does_not_hang_at_its_start_because_redis_is_frozen() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    server.sigstop();
    let mut process = spawned(&server);
    says(&process, WAITS).await;
    let status = process.wait_exit(LONG).expect("it ends");
    assert_eq!(status.code(), Some(69), "{}", process.log());

    let mut process = spawned(&server);
    says(&process, WAITS).await;
    server.sigcont();
    says(&process, "fairlane is running").await;
    process.sigterm();
    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0), "{}", process.log());
}

/// A Redis that has just answered may be slow or restart a moment later.
#[tokio::test]
async fn a_start_asks_again_if_redis_does_not_answer_one_of_its_commands() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let lost = proxy.intercept(holds([":lease-key"]), 1, Interception::LoseReply);
    let (log, url) = ("pipelines.early.handler", format!("{:?}", proxy.url()));
    let settings = [(log, "\"log\""), ("redis.url", &*url)];
    let process = Served::spawn(&config(&server, "early", &settings), "work,http");
    says(&process, "asking it again").await;
    says(&process, "fairlane is running").await;
    assert!(lost.has_caught());
}

#[tokio::test]
async fn a_process_that_waits_for_redis_stops_when_it_is_asked_to() {
    let mut server = RedisServer::start(Options { tcp: true, ..Options::default() });
    server.kill9();
    let mut process = spawned(&server);
    says(&process, WAITS).await;
    process.sigterm();
    assert_eq!(process.wait_exit(LONG).expect("it ends").code(), Some(0), "{}", process.log());
    assert!(!process.log().contains("error: "), "{}", process.log());
}

/// A large Redis loads its data for minutes after a restart, and says so.
#[tokio::test]
async fn a_redis_that_loads_its_data_is_waited_for_longer() {
    let slowly = ["--key-load-delay", "500"].map(str::to_owned);
    let options =
        Options { tcp: true, persistence: Persistence::EverySecond, ..Options::default() };
    let mut server = RedisServer::start_with(options, &slowly);
    let fill = "for i = 1, 16000 do redis.call('SET', 'other:' .. i, i) end";
    server.ask(&["EVAL", fill, "0"]).await;
    server.kill9();
    let process = spawned(&server);
    let started = Instant::now();
    let loading = std::thread::spawn(move || {
        server.restart();
        server
    });
    says(&process, "LOADING").await;
    says(&process, "fairlane is running").await;
    assert!(started.elapsed() > Duration::from_secs(6), "{:?}", started.elapsed());
    drop(loading.join());
}

#[tokio::test]
async fn a_first_start_on_a_full_redis_says_so() {
    let server = RedisServer::start(Options::default());
    fill(&server).await;
    let log = [("pipelines.first.handler", "\"log\"")];
    let mut process = Served::spawn(&config(&server, "first", &log), "work");
    let status = process.wait_exit(LONG).expect("it ends");
    assert_eq!(status.code(), Some(69));
    let log = process.log();
    assert!(log.contains("Redis is full") && log.contains("raise its maxmemory"), "{log}");
}

/// A bus fills Redis. All its entries but the last are copied, and the process that starts then
/// may trim them: the one that copied them had to keep them longer. `lost` means that the process
/// was killed before it moved the idle shards forward.
async fn a_full_bus_makes_room(pipeline: &str, lost: bool) {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let kept = configs(&server, &[pipeline], &[]);
    let data = "x".repeat(50_000);
    let large: Vec<String> = (0..200)
        .map(|id| {
            let event = serde_json::json!({
                "specversion": "1.0", "id": format!("{id}"), "source": "test", "type": "test",
                "botid": "b", "data": data,
            });
            event.to_string()
        })
        .collect();
    let instance = Instance::start(&kept, log.content()).await;
    add(&server, STREAM, &large).await;
    eventually(LONG, "it is handled", async || log.len() == 200).await;
    let busy = instance.queue(pipeline).shard_of(&"b".parse().unwrap());
    instance.stop().await;
    let mut connection = server.connection().await;
    if lost {
        for n in (0..8).filter(|n| *n != busy.index()) {
            let key = format!("fl:{{{pipeline}:{n}}}:hwm");
            let () = connection.hset(key, STREAM, "0-0").await.unwrap();
        }
    }
    add(&server, STREAM, &events(200..201)).await;
    let info: String = redis::cmd("INFO").arg("memory").query_async(&mut connection).await.unwrap();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    // Without the bus, Redis has free memory.
    limit_memory(&server, used.trim().parse::<i64>().unwrap() - (4 << 20)).await;
    let full = redis::cmd("SET").arg("a").arg("b").query_async::<()>(&mut connection).await;
    assert!(full.unwrap_err().to_string().contains("OOM"), "it is full");

    let text = configs(&server, &[pipeline], &[SHORT]);
    let instance = Instance::start(&text, log.content()).await;
    eventually(LONG, "the last entry is handled", async || log.len() > 200).await;
    let left: usize = connection.xlen(STREAM).await.unwrap();
    assert!(left <= 2, "{left} entries are left");
    assert_eq!(log.ids(pipeline)[200..], ids(200..201));
    instance.stop().await;
}

#[tokio::test]
async fn a_full_redis_is_trimmed_before_anything_is_copied() {
    a_full_bus_makes_room("room", false).await;
}

#[tokio::test]
async fn a_full_redis_is_trimmed_although_idle_shards_were_not_moved_forward() {
    a_full_bus_makes_room("room-lost", true).await;
}
