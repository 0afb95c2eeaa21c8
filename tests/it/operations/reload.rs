//! A process takes over a new configuration while it works.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, configs};
use crate::support::http::{Client, get, metric, until_ready};
use crate::support::process::{WorkerProcess, signal};
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{Options, RedisServer, free_port};
use crate::support::roles::own::FILE;
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const OPERATOR: &str = "0123456789abcdef-operator";
const TOKENS: &str = "\n[[auth.tokens]]\nname = \"operator\"\ntoken_file = \"operator\"\nscopes = [\"operate\", \"read\"]\n";

/// A receiver whose answers take longer than the load comes, so that slices run during each reload.
async fn slow_receiver() -> Receiver {
    Receiver::start(|_| async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        Reply::new(200, "")
    })
    .await
}

pub(super) fn config(
    server: &RedisServer,
    receiver: &Receiver,
    pipelines: &[&str],
    batch: u32,
) -> String {
    let url = format!("{:?}", receiver.url());
    let mut settings = Vec::new();
    for name in pipelines {
        settings.push((format!("pipelines.{name}.handler"), "\"push\"".to_owned()));
        settings.push((format!("pipelines.{name}.url"), url.clone()));
        settings.push((format!("pipelines.{name}.batch"), batch.to_string()));
        settings.push((format!("pipelines.{name}.events"), format!("[\"{name}\"]")));
    }
    let settings: Vec<_> =
        settings.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    configs(server, pipelines, &settings)
}

/// Publishes single events over HTTP until the end. Returns the ids that were accepted.
async fn publish(client: &Client, publisher: usize, over: &watch::Sender<bool>) -> Vec<String> {
    let mut accepted = Vec::new();
    while !*over.borrow() {
        let id = format!("{publisher}-{}", accepted.len());
        let body = event(&format!("bot-{publisher}"), "one", &id);
        let answer = client.publish("application/cloudevents+json", &body).await;
        assert_eq!(answer.code, 202, "{answer:?}");
        accepted.push(id);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    accepted
}

#[tokio::test(flavor = "multi_thread")]
async fn reloads_under_load_refuse_no_request_repeat_no_event_and_lose_no_lease() {
    let server = RedisServer::start(Options::default());
    let receiver = slow_receiver().await;
    let process = Served::start(&config(&server, &receiver, &["one"], 5)).await;
    let client = Client::new(&process.http());
    let over = watch::Sender::new(false);
    let publishing = join_all((0..4).map(|publisher| publish(&client, publisher, &over)));
    let reloading = async {
        for round in 0..3 {
            let names: &[&str] = if round % 2 == 0 { &["one", "two"] } else { &["one"] };
            process.write("fairlane.toml", &config(&server, &receiver, names, 6 + round));
            let answer = client.post("/v1/reload").await;
            assert_eq!(answer.code, 200, "{answer:?}");
            let changed = answer.json()["changed"].clone();
            assert!(
                changed.as_array().unwrap().contains(&json!("pipelines.one.batch")),
                "{changed}"
            );
            let (_, metrics) = get(&process.metrics(), "/metrics").await;
            let shown = metrics.contains("pipeline=\"two\"");
            assert_eq!(shown, names.contains(&"two"), "a removed pipeline has no metrics");
            // The new pipeline gets the events that are published from now on.
            if names.contains(&"two") {
                let id = format!("two-{round}");
                let body = event("bot-two", "two", &id);
                let answer = client.publish("application/cloudevents+json", &body).await;
                assert_eq!(answer.code, 202, "{answer:?}");
                eventually(LONG, "the new pipeline handles it", async || {
                    receiver.calls().iter().any(|call| call.ids().contains(&id))
                })
                .await;
            }
        }
        over.send_replace(true);
    };
    let (accepted, ()) = tokio::join!(publishing, reloading);
    let accepted: Vec<String> = accepted.into_iter().flatten().collect();
    let counts = || {
        let mut counts = BTreeMap::<String, u32>::new();
        for id in receiver.calls().iter().flat_map(Call::ids) {
            *counts.entry(id).or_default() += 1;
        }
        counts
    };
    eventually(LONG, "all are handled", async || {
        let counts = counts();
        accepted.iter().all(|id| counts.contains_key(id))
    })
    .await;
    let repeated: Vec<_> = counts().into_iter().filter(|(_, count)| *count > 1).collect();
    assert_eq!(repeated, [], "of {}", accepted.len());
    let (_, metrics) = get(&process.metrics(), "/metrics").await;
    let lost = metric(&metrics, "fairlane_leases_lost_total", &[("pipeline", "one")]);
    assert!(lost.is_none_or(|lost| lost < 1.0), "{lost:?}");
    assert_eq!(get(&process.metrics(), "/readyz").await.0, 200);
}

#[tokio::test]
async fn a_configuration_that_cannot_be_used_changes_nothing_and_the_answer_says_why() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let good = config(&server, &receiver, &["one"], 5);
    let process = Served::start(&good).await;
    let client = Client::new(&process.http());
    for (bad, part) in [
        (good.replace("= 5", "= 0"), "pipelines.one.batch"),
        (good.replace("\"push\"", "\"nothing\""), "nothing"),
        ("no toml".to_owned(), "fairlane.toml:1"),
        // A file that is just being written.
        (String::new(), "redis.url"),
        (format!("{good}\nredis.shards = 3\n"), "shards"),
    ] {
        process.write("fairlane.toml", &bad);
        let answer = client.post("/v1/reload").await;
        let told = answer.json()["detail"].as_str().unwrap_or_default().to_owned();
        assert!(answer.code == 400 && told.contains(part), "{part}: {answer:?}");
        assert!(told.contains("nothing changed"), "{told}");
        let body = event("b", "one", part);
        let answer = client.publish("application/cloudevents+json", &body).await;
        assert_eq!(answer.code, 202, "{answer:?}");
        eventually(LONG, "it works as before", async || {
            receiver.calls().iter().any(|call| call.ids().contains(&part.to_owned()))
        })
        .await;
    }
}

#[tokio::test]
async fn a_reload_that_outlasts_its_request_is_in_the_trail_with_its_result() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let receiver = Receiver::content().await;
    let [before, now] = [5, 6].map(|batch| {
        config(&server, &receiver, &["one"], batch).replace(&server.url(), &proxy.url())
    });
    let process = Served::start(&before).await;
    let client = Client::new(&process.http());
    process.write("fairlane.toml", &now);
    // The new instance waits for Redis.
    proxy.set(ProxyMode::Hold);
    let answer = client.send("POST", "/v1/reload", &[("x-deadline-ms", "500")], b"").await;
    assert_eq!((answer.code, answer.problem().as_str()), (504, "deadline"), "{answer:?}");
    proxy.set(ProxyMode::Pass);
    eventually(LONG, "the trail has its result", async || {
        let trail = client.get("/v1/audit").await.json();
        let last = &trail["actions"][0];
        last["action"] == "reload" && last["result"] == "done: pipelines.one.batch"
    })
    .await;
}

/// How many of 20 connections are taken while the process accepts none.
async fn waiting(process: &Served) -> usize {
    process.sigstop();
    let mut all = Vec::new();
    while all.len() < 20 {
        let connecting = TcpStream::connect(process.http());
        let Ok(Ok(stream)) = timeout(Duration::from_secs(1), connecting).await else { break };
        all.push(stream);
    }
    process.sigcont();
    all.len()
}

#[tokio::test]
async fn a_reload_changes_how_many_connections_wait_to_be_accepted() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let with = |backlog: u32| {
        format!("{}http.backlog = {backlog}\n", config(&server, &receiver, &["one"], 5))
    };
    let process = Served::start(&with(2)).await;
    let few = waiting(&process).await;
    assert!(few < 20, "{few}");
    process.write("fairlane.toml", &with(64));
    let answer = Client::new(&process.http()).post("/v1/reload").await;
    assert_eq!(answer.json(), json!({"changed": ["http.backlog"]}), "{answer:?}");
    assert_eq!(waiting(&process).await, 20);
}

#[tokio::test]
async fn a_reload_that_changes_only_the_address_of_a_port_is_refused_and_names_the_restart() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let good = config(&server, &receiver, &["one"], 5);
    let process = Served::start(&good).await;
    let (http, metrics) = (process.http(), process.metrics());
    let all = http.replace("127.0.0.1", "0.0.0.0");
    let with = |http: &str, metrics: &str| {
        let listens = |line: &&str| !line.contains(".listen = ");
        let kept: Vec<&str> = good.lines().filter(listens).collect();
        format!(
            "{}\nauth.allow_anonymous = true\nhttp.listen = {http:?}\nmetrics.listen = {metrics:?}\n",
            kept.join("\n")
        )
    };
    let client = Client::new(&http);
    for (text, own, of, key) in [
        (with(&all, "127.0.0.1:0"), &http, "http.listen", "http.listen"),
        (with(&metrics, &http), &http, "http.listen", "metrics.listen"),
    ] {
        process.write("fairlane.toml", &text);
        let answer = client.post("/v1/reload").await;
        let told = answer.json()["detail"].as_str().unwrap_or_default().to_owned();
        let reason =
            format!("this process itself listens on {own} ({of}), so restart it to change {key}");
        assert!(answer.code == 400 && told.contains(&reason), "{answer:?}");
    }
    process.write("fairlane.toml", &good);
    assert_eq!(client.post("/v1/reload").await.code, 200);
}

#[tokio::test]
async fn a_process_that_has_left_its_private_redis_does_not_return_to_it_with_an_emptied_file() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let good = config(&server, &receiver, &["one"], 5);
    let good = format!("{good}pipelines.counters.enabled = false\n");
    let url = good.lines().find(|line| line.starts_with("redis.url")).unwrap();
    let mut process = Served::start(&good.replace(url, "data_dir = \"data\"")).await;
    let client = Client::new(&process.http());
    process.write("fairlane.toml", &good);
    let answer = client.post("/v1/reload").await;
    assert_eq!(answer.code, 200, "{answer:?}");
    process.write("fairlane.toml", "");
    let answer = client.post("/v1/reload").await;
    let told = answer.json()["detail"].as_str().unwrap_or_default().to_owned();
    assert!(answer.code == 400 && told.contains("redis.url is no longer set"), "{answer:?}");
    // A killed process would leave its private Redis behind.
    process.sigterm();
    process.wait_exit(LONG).expect("it ends");
}

/// A process that waits for its Redis, which answers once `meanwhile` has run, and then starts.
async fn started_late(text: &str, server: &mut RedisServer, meanwhile: impl Fn(&Served)) -> Served {
    server.kill9();
    let process = Served::spawn(text, "ingest,work,http,schedule");
    let says = async |text: &str| {
        eventually(LONG, text, async || process.log().contains(text)).await;
    };
    says("waiting for Redis before the start").await;
    meanwhile(&process);
    server.restart();
    says("fairlane is running").await;
    until_ready(&process.metrics()).await;
    process
}

/// The first instance has the configuration from before the wait.
#[tokio::test]
async fn an_edit_while_a_start_waits_for_redis_is_reported_by_the_next_reload() {
    let mut server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let receiver = Receiver::content().await;
    let [before, edited] = [5, 6].map(|batch| config(&server, &receiver, &["one"], batch));
    let edits = |process: &Served| process.write("fairlane.toml", &edited);
    let process = started_late(&before, &mut server, edits).await;
    let answer = Client::new(&process.http()).post("/v1/reload").await;
    assert_eq!(answer.json(), json!({"changed": ["pipelines.one.batch"]}), "{answer:?}");
}

#[tokio::test]
async fn a_file_that_is_broken_while_a_start_waits_for_redis_hides_no_token_file() {
    let mut server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let receiver = Receiver::content().await;
    let with_tokens = format!("{}{TOKENS}", config(&server, &receiver, &["one"], 5));
    let breaks = |process: &Served| {
        process.write("operator", OPERATOR);
        process.write("fairlane.toml", "no toml");
    };
    let process = started_late(&with_tokens, &mut server, breaks).await;
    process.write("fairlane.toml", &with_tokens);
    let other = OPERATOR.replace("operator", "rotated");
    process.write("operator", &other);
    let client = Client::new(&process.http()).with_token(&other);
    eventually(LONG, "the new token is known", async || {
        client.get("/v1/pipelines").await.code == 200
    })
    .await;
}

#[tokio::test]
async fn a_changed_token_file_is_noticed() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let with_tokens = format!("{}{TOKENS}", config(&server, &receiver, &["one"], 5));
    let process = Served::start(&config(&server, &receiver, &["one"], 5)).await;
    process.write("operator", OPERATOR);
    process.reload(&with_tokens);
    let client = Client::new(&process.http());
    let code = async |token: &str| client.with_token(token).get("/v1/pipelines").await.code;
    // Before, no request needs a token.
    let unknown = "0123456789abcdef-unknown";
    eventually(LONG, "a token is needed", async || code(unknown).await == 401).await;
    assert_eq!(code(OPERATOR).await, 200);
    let other = OPERATOR.replace("operator", "rotated");
    process.write("operator", &other);
    eventually(LONG, "the new token is known", async || code(&other).await == 200).await;
    eventually(LONG, "the old one is not", async || code(OPERATOR).await == 401).await;
}

/// What could not be applied is tried again, at first after ten seconds.
#[tokio::test]
async fn a_token_file_that_changes_while_redis_is_unavailable_counts_once_it_is_back() {
    let mut server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let with_tokens = format!("{}{TOKENS}", config(&server, &receiver, &["one"], 5));
    let process = Served::start(&config(&server, &receiver, &["one"], 5)).await;
    process.write("operator", OPERATOR);
    process.reload(&with_tokens);
    let client = Client::new(&process.http());
    let code = async |token: &str| client.with_token(token).get("/v1/pipelines").await.code;
    let unknown = "0123456789abcdef-unknown";
    eventually(LONG, "a token is needed", async || code(unknown).await == 401).await;
    server.kill9();
    let other = OPERATOR.replace("operator", "rotated");
    process.write("operator", &other);
    eventually(LONG * 2, "nothing is reloaded", async || {
        process.log().contains("nothing is reloaded")
    })
    .await;
    assert_eq!(code(&other).await, 401);
    server.restart();
    let back = Instant::now();
    eventually(LONG, "the new token is known", async || code(&other).await == 200).await;
    assert!(back.elapsed() < Duration::from_secs(45), "{:?}", back.elapsed());
    assert_eq!(code(OPERATOR).await, 401);
}

/// The instance before sets its gauges to 0 when it ends.
#[tokio::test]
async fn gauges_of_a_process_are_true_after_a_reload() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let process = Served::start(&config(&server, &receiver, &["one"], 5)).await;
    let client = Client::new(&process.http());
    assert_eq!(client.post("/v1/pipelines/one/pause").await.code, 204);
    let gauge = async |name: &str, label: (&str, &str)| {
        let (_, metrics) = get(&process.metrics(), "/metrics").await;
        metric(&metrics, name, &[label])
    };
    let paused = ("problem", "pipeline-paused");
    let problem = async || gauge("fairlane_problems", paused).await;
    eventually(LONG, "it is a problem", async || problem().await == Some(1.0)).await;
    // Its body arrives slowly: it is still open when the instance accepts no more.
    let mut slow = TcpStream::connect(process.http()).await.unwrap();
    let headers = [("content-type", "application/cloudevents+json"), ("content-length", "10")];
    slow.write_all(client.head("POST", "/v1/events", &headers).as_bytes()).await.unwrap();
    process.write("fairlane.toml", &config(&server, &receiver, &["one"], 6));
    assert_eq!(client.post("/v1/reload").await.code, 200);
    // The instance before works beside it for six seconds, and then ends.
    tokio::time::sleep(Duration::from_secs(8)).await;
    eventually(LONG, "it is still one", async || problem().await == Some(1.0)).await;
    drop(slow);
    let open = async |count: u32| {
        let connections = join_all((0..count).map(|_| TcpStream::connect(process.http()))).await;
        let shown = || gauge("fairlane_http_connections", ("listener", "http"));
        eventually(LONG, "they are counted", async || shown().await == Some(count.into())).await;
        drop(connections);
    };
    open(3).await;
    open(2).await;
    assert_eq!(client.post("/v1/pipelines/one/resume").await.code, 204);
    eventually(LONG, "it is none any more", async || {
        problem().await.is_none_or(|problem| problem < 1.0)
    })
    .await;
}

#[tokio::test]
async fn a_reload_that_removes_an_unavailable_mongodb_ends_its_metric() {
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let without = config(&server, &receiver, &["one"], 5);
    let with = format!("{without}mongodb.url = \"mongodb://127.0.0.1:{}\"\n", free_port());
    let process = Served::start(&with).await;
    let up =
        async || metric(&get(&process.metrics(), "/metrics").await.1, "fairlane_mongodb_up", &[]);
    eventually(LONG, "it is down", async || up().await == Some(0.0)).await;
    process.write("fairlane.toml", &without);
    let answer = Client::new(&process.http()).post("/v1/reload").await;
    assert_eq!(answer.code, 200, "{answer:?}");
    assert_eq!(up().await, None);
}

/// Its handler counts over all instances of the process.
#[tokio::test]
async fn a_program_with_its_own_handler_reloads_at_sighup_and_goes_on_counting() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("fairlane.toml");
    let write = |batch: &str| {
        let settings = [("pipelines.own.handler", "\"own\""), ("pipelines.own.batch", batch)];
        let new = directory.path().join("new");
        fs::write(&new, configs(&server, &["own"], &settings)).unwrap();
        fs::rename(new, &file).unwrap();
    };
    write("1");
    let mut process = WorkerProcess::spawn("own", &[(FILE, file.display().to_string())]);
    let says = async |text: &str| {
        eventually(LONG, text, async || process.lines().iter().any(|line| line.contains(text)))
            .await;
    };
    let publish = async |first: usize| {
        let events: Vec<String> = (first..first + 20).map(|id| event("bot", "test", id)).collect();
        add(&server, STREAM, &events).await;
    };
    says("fairlane is running").await;
    publish(0).await;
    says("slice 1 total 20").await;
    write("20");
    signal(process.id(), "HUP");
    says("the configuration is reloaded").await;
    // The old instance works too, for some seconds, and may handle all events of a round.
    let larger = |line: &String| line.contains("slice ") && !line.contains("slice 1 ");
    let (mut sent, begun) = (20, Instant::now());
    while !process.lines().iter().any(larger) {
        assert!(begun.elapsed() < LONG, "{:#?}", process.lines());
        publish(sent).await;
        sent += 20;
        says(&format!("total {sent}")).await;
    }
    write("0");
    signal(process.id(), "HUP");
    says("nothing is reloaded").await;
    publish(sent).await;
    says(&format!("total {}", sent + 20)).await;
    process.sigterm();
    assert!(process.wait_exit(LONG).is_some_and(|status| status.success()));
}
