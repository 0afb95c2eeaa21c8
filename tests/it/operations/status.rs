//! The reports of `fairlane status` during faults, on a running pool.

use std::time::Duration;

use fairlane::handler::{Failure, Outcomes, Slice};
use fairlane::redis::{Server, StreamView, Target};
use redis::AsyncCommands as _;
use serde_json::Value;

use crate::support::bus::{add, event};
use crate::support::cli::{Ran, run_in};
use crate::support::config::{STREAM, config};
use crate::support::disk::Full;
use crate::support::http::{get, metric};
use crate::support::instance::Instance;
use crate::support::process::signal;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(20);

/// A running pool, and the directory in which an operator runs commands.
struct Asked {
    server: RedisServer,
    instance: Instance,
    log: Log,
    dir: tempfile::TempDir,
}

impl Asked {
    /// The handler fails for the bots `broken-…` and is unavailable for `away-…`.
    async fn start(pipeline: &str) -> Self {
        let server = RedisServer::start(Options::default());
        let log = Log::default();
        let handler = log.handler(|slice: Slice| async move {
            match slice.bot.as_str().split('-').next() {
                Some("broken") => Err(Failure::transient(0, "HTTP 500 <oops>")),
                Some("away") => Err(Failure::unavailable(0, "nobody listens")),
                _ => Ok(Outcomes::done()),
            }
        });
        let backoff = format!("pipelines.{pipeline}.backoff");
        let attempts = format!("pipelines.{pipeline}.max_attempts");
        let settings = [
            (backoff.as_str(), "{ initial = \"20ms\", max = \"20ms\", jitter = 0.0 }"),
            (attempts.as_str(), "100000"),
        ];
        let config = config(&server, pipeline, &settings);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("fairlane.toml"), &config).unwrap();
        let instance = Instance::start(&config, handler).await;
        Self { server, instance, log, dir }
    }

    async fn publish(&self, bots: &[&str]) {
        let events: Vec<_> = bots.iter().enumerate().map(|(id, bot)| event(bot, "t", id)).collect();
        add(&self.server, STREAM, &events).await;
    }

    async fn run(&self, arguments: &[&str]) -> Ran {
        let (dir, arguments) = (self.dir.path().to_owned(), arguments.join("\n"));
        let run = move || run_in(&dir, &arguments.split('\n').collect::<Vec<_>>(), "");
        let ran = tokio::task::spawn_blocking(run).await.unwrap();
        assert_eq!(ran.code, 0, "{ran:?}");
        ran
    }

    async fn status(&self) -> Value {
        serde_json::from_str(&self.run(&["status", "--json"]).await.out).unwrap()
    }

    /// The problem of the failing pipeline, if the status reports it.
    async fn failing(&self) -> Option<(String, String)> {
        let status = self.status().await;
        let text = |problem: &Value, name: &str| problem[name].as_str().unwrap().to_owned();
        let problems = status["problems"].as_array().unwrap();
        problems.iter().find_map(|problem| {
            let said = (text(problem, "problem"), text(problem, "remedy"));
            said.0.contains(" fails for ").then_some(said)
        })
    }

    async fn stream(&self) -> StreamView {
        let server = Server::new(Target::new(&self.server.url()).unwrap(), LONG);
        server.stream(STREAM).await.unwrap()
    }
}

#[tokio::test]
async fn status_tells_which_bots_a_pipeline_fails_for_since_when_and_why() {
    let asked = Asked::start("said").await;
    asked.publish(&["fine-1"]).await;
    eventually(LONG, "the fine one is done", async || asked.log.len() == 1).await;
    assert_eq!(asked.failing().await, None);

    asked.publish(&["broken-1", "broken-2", "fine-1"]).await;
    eventually(LONG, "it is told", async || {
        let told = asked.failing().await;
        told.is_some_and(|(problem, _)| problem.contains("broken-1, broken-2 (first "))
    })
    .await;
    let (problem, remedy) = asked.failing().await.unwrap();
    assert!(problem.starts_with("pipeline said fails for "), "{problem}");
    assert!(problem.ends_with("ago): HTTP 500 <oops>") && !problem.contains("fine"), "{problem}");
    assert!(remedy.contains("fairlane bots show --pipeline said broken-1 shows"), "{remedy}");

    // The start of the failures stays, and the time of the last failure moves.
    let failing = async || asked.status().await["pipelines"][0]["failing"].clone();
    let first = failing().await;
    eventually(LONG, "it fails again", async || {
        failing().await["time_ms"].as_u64() > first["time_ms"].as_u64()
    })
    .await;
    assert_eq!(failing().await["since_ms"], first["since_ms"]);
    let shown = asked.run(&["bots", "show", "--pipeline", "said", "broken-1"]).await.out;
    for said in ["failed    ", " ago: HTTP 500 <oops>", "failing   since "] {
        assert!(shown.contains(said), "{said}: {shown}");
    }

    // Once the events are gone the pipeline is not failing any more, although the last failure is
    // recent.
    for bot in ["broken-1", "broken-2"] {
        asked.run(&["bots", "pause", "--pipeline", "said", bot]).await;
        let bot = fairlane::id::BotId::parse(bot).unwrap();
        asked.instance.queue("said").purge(&bot).await.unwrap();
    }
    asked.publish(&["fine-1"]).await;
    eventually(LONG, "nothing fails", async || asked.failing().await.is_none()).await;
    asked.instance.stop().await;
}

#[tokio::test]
async fn status_reports_an_unavailable_target_although_no_attempt_is_counted() {
    let asked = Asked::start("gone").await;
    asked.publish(&["away-1"]).await;
    eventually(LONG, "it is told", async || {
        let told = asked.failing().await;
        told.is_some_and(|(problem, _)| problem.contains("nobody listens"))
    })
    .await;
    let page = asked.instance.client().get("/bots/away-1").await;
    let page = String::from_utf8_lossy(&page.body).into_owned();
    assert!(
        page.contains("Every call has failed for") && page.contains("nobody listens"),
        "{page}"
    );
    asked.instance.stop().await;
}

#[tokio::test]
async fn copied_events_do_not_show_as_unread_before_the_reader_noted_them() {
    let asked = Asked::start("read").await;
    asked.publish(&["fine-1"; 40]).await;
    eventually(LONG, "it is noted once", async || asked.stream().await.unread.is_some()).await;
    for round in 2..=5 {
        asked.publish(&["fine-1"; 40]).await;
        eventually(LONG, "all are done", async || asked.log.len() == round * 40).await;
        assert_eq!(asked.stream().await.unread, Some(0), "round {round}");
    }
    asked.instance.stop().await;
}

/// A reader that is killed has copied what it did not note.
#[tokio::test]
async fn entries_that_were_copied_and_not_noted_are_unread_only_until_the_next_reader() {
    let server = RedisServer::start(Options::default());
    let (config, log) = (config(&server, "unnoted", &[]), Log::default());
    let mut connection = server.connection().await;
    let key = format!("fl:{{{STREAM}}}:read");
    let noted = async || {
        let found: Option<u32> = server.connection().await.hget(&key, "entries").await.unwrap();
        found.unwrap_or_default()
    };
    let target = || Target::new(&server.url()).unwrap();
    let unread = async || Server::new(target(), LONG).stream(STREAM).await.unwrap().unread;
    add(&server, STREAM, &[event("b", "t", 0)]).await;
    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "the first one is noted", async || noted().await == 1).await;
    let first: String = connection.hget(&key, "offset").await.unwrap();
    add(&server, STREAM, &(1..5).map(|id| event("b", "t", id)).collect::<Vec<_>>()).await;
    eventually(LONG, "all are noted", async || noted().await == 5).await;
    instance.stop().await;
    let fields = [("offset", first.as_str()), ("entries", "1")];
    let () = connection.hset_multiple(&key, &fields).await.unwrap();
    assert_eq!(unread().await, Some(4), "no process reads");

    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "all are noted again", async || noted().await == 5).await;
    assert_eq!((unread().await, log.len()), (Some(0), 5));
    instance.stop().await;
}

#[tokio::test]
async fn entries_that_were_deleted_are_not_unread_and_those_that_wait_are_counted() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "deleted", &[]);
    let mut connection = server.connection().await;
    add(&server, STREAM, &(0..10).map(|id| event("b", "t", id)).collect::<Vec<_>>()).await;
    let entries: Vec<(String, redis::Value)> = redis::cmd("XRANGE")
        .arg(STREAM)
        .arg("-")
        .arg("+")
        .query_async(&mut connection)
        .await
        .unwrap();
    for (id, _) in &entries[5..9] {
        let _: u64 =
            redis::cmd("XDEL").arg(STREAM).arg(id).query_async(&mut connection).await.unwrap();
    }
    let target = || Target::new(&server.url()).unwrap();
    let stream = async || Server::new(target(), LONG).stream(STREAM).await.unwrap();
    let log = Log::default();
    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "the rest is noted", async || stream().await.unread == Some(0)).await;
    assert_eq!(log.len(), 6);
    let address = instance.address.to_string();
    eventually(LONG, "the lag is none", async || {
        let metrics = get(&address, "/metrics").await.1;
        metric(&metrics, "fairlane_bus_lag_events", &[("stream", STREAM)]) == Some(0.0)
    })
    .await;
    instance.stop().await;

    add(&server, STREAM, &(10..17).map(|id| event("b", "t", id)).collect::<Vec<_>>()).await;
    assert_eq!(stream().await.unread, Some(7), "nobody reads");
}

/// A process with a private Redis.
const PRIVATE: &str = "data_dir = \"data\"\n\
    http.listen = \"127.0.0.1:0\"\nmetrics.listen = \"127.0.0.1:0\"\n\
    [pipelines.one]\nhandler = \"log\"\nevents = [\"*\"]\n";

async fn run_beside(process: &Served, arguments: &'static [&'static str]) -> Ran {
    let dir = process.directory().to_owned();
    tokio::task::spawn_blocking(move || run_in(&dir, arguments, "")).await.unwrap()
}

/// Runs a command beside a process whose private Redis is frozen. It must end within seconds.
async fn run_beside_frozen(arguments: &'static [&'static str]) -> Ran {
    let mut process = Served::start(PRIVATE).await;
    let log = process.log();
    let line = log.lines().find(|line| line.contains("private Redis is ready")).unwrap();
    let line: Value = serde_json::from_str(line).unwrap();
    let pid = u32::try_from(line["fields"]["pid"].as_u64().unwrap()).unwrap();
    signal(pid, "STOP");
    let watch = Stopwatch::start();
    let ran = run_beside(&process, arguments).await;
    signal(pid, "CONT");
    watch.within_steps(Duration::from_secs(8), 2, &arguments.join(" "));
    assert_eq!(ran.code, 69, "{ran:?}");
    // A killed process would leave its Redis behind.
    process.sigterm();
    process.wait_exit(LONG).expect("it stops");
    ran
}

#[tokio::test]
async fn a_frozen_private_redis_holds_the_status_up_for_seconds_only() {
    let status = run_beside_frozen(&["status", "--json"]).await;
    let said: Value = serde_json::from_str(&status.out).unwrap();
    assert_eq!(said["problems"][0]["code"], "redis-unavailable", "{said}");
    assert!(status.err.contains("the private Redis under"), "{status:?}");
}

#[tokio::test]
async fn a_frozen_private_redis_holds_the_check_up_for_seconds_only() {
    let check = run_beside_frozen(&["check", "--json"]).await;
    let said: Value = serde_json::from_str(&check.out).unwrap();
    let of = |name: &str| {
        let found = said.as_array().unwrap().iter().find(|finding| finding["check"] == name);
        found.unwrap_or_else(|| panic!("no {name} in {said}"))
    };
    assert_eq!(of("redis")["state"], "fail", "{said}");
    let found = of("redis")["found"].as_str().unwrap();
    assert!(found.contains("data/redis/redis.log"), "{found}");
    assert_eq!(of("pipeline one")["state"], "ok", "{said}");
}

#[tokio::test]
async fn a_private_redis_that_cannot_write_to_its_disk_counts_as_one_that_answers() {
    let mut process = Served::start(PRIVATE).await;
    let socket = process.directory().join("data/redis/redis.sock");
    let client = redis::Client::open(format!("redis+unix://{}", socket.display())).unwrap();
    let full = Full::fill(client.get_multiplexed_async_connection().await.unwrap()).await;
    let status = run_beside(&process, &["status", "--json"]).await;
    let said: Value = serde_json::from_str(&status.out).unwrap();
    assert_eq!(status.code, 0, "{status:?}");
    assert_eq!(said["problems"][0]["code"], "redis-disk-full", "{said}");
    let pause = run_beside(&process, &["pipelines", "pause", "one"]).await;
    assert_eq!(pause.code, 69, "{pause:?}");
    assert!(pause.err.contains("MISCONF"), "{pause:?}");
    assert!(pause.err.contains("free space on its disk"), "{pause:?}");
    let check = run_beside(&process, &["check"]).await;
    assert!(check.out.contains("the last snapshot (BGSAVE) failed"), "{check:?}");
    // It asks every two seconds.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let log = process.log();
    assert!(!log.contains("the private Redis does not answer"), "{log}");
    full.free().await;
    process.sigterm();
    process.wait_exit(LONG).expect("it stops");
}

#[tokio::test]
async fn a_lost_signing_key_comes_back_and_another_one_is_taken_over() {
    const KEY: &str = "fl:lease-key";
    let server = RedisServer::start(Options::default());
    let config = config(&server, "key", &[("pipelines.key.handler", "\"log\"")]);
    let process = Served::start(&config).await;
    let mut connection = server.connection().await;
    let first: Vec<u8> = connection.get(KEY).await.unwrap();
    let () = connection.del(KEY).await.unwrap();
    eventually(LONG, "the key is there again", async || {
        connection.get::<_, Option<Vec<u8>>>(KEY).await.unwrap().as_ref() == Some(&first)
    })
    .await;
    let () = connection.set(KEY, vec![7_u8; 32]).await.unwrap();
    eventually(LONG, "the process uses the other key", async || {
        process.log().contains("Redis has another signing key")
    })
    .await;
}
