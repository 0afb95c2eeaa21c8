//! `/readyz?verbose`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{LONG, SAFE};
use crate::support::cli::run_in;
use crate::support::cluster::Cluster;
use crate::support::config::config;
use crate::support::http::{Client, get, metric};
use crate::support::redis::RedisServer;
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

/// The answer of `/readyz` for a query.
async fn ready(client: &Client, query: &str) -> (u16, Value) {
    let answer = client.get(&format!("/readyz{query}")).await;
    (answer.code, answer.json())
}

#[tokio::test]
async fn findings_beside_the_readiness_are_names_unless_a_token_may_read() {
    let server = RedisServer::start(SAFE);
    let tokens = Tokens::new(&[
        ("reader", "scopes = [\"read\"], bots = [\"*\"]"),
        ("shop", "scopes = [\"read\"], bots = [\"a\"]"),
        ("publisher", "scopes = [\"publish\"], bots = [\"*\"]"),
    ]);
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.ready.handler", "\"log\"")];
    let config = config(&server, "ready", &settings);
    let process = Served::start(&config).await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fairlane.toml"), &config).unwrap();
    let (stranger, metrics) = (Client::new(&process.http()), Client::new(&process.metrics()));
    let by = |name: &str| stranger.with_token(&text(name));

    let (code, plain) = ready(&stranger, "").await;
    assert_eq!((code, &plain), (200, &json!({ "status": "ready", "redis": "up" })));
    let calm = json!({ "status": "ready", "redis": "up", "problems": [] });
    eventually(LONG, "nothing is wrong", async || ready(&stranger, "?verbose").await.1 == calm)
        .await;

    assert_eq!(run_in(dir.path(), &["pipelines", "pause", "ready"], "").code, 0);
    let name = json!({
        "code": "pipeline-paused", "severity": "warning",
        "runbook": "docs/runbook.md#paused-pipeline",
    });
    let names = json!({ "status": "ready", "redis": "up", "problems": [name] });
    for (client, query) in [
        (&stranger, "?verbose"),
        (&stranger, "?verbose=true"),
        (&by("publisher"), "?verbose"),
        (&stranger.with_token("of nobody, and long"), "?verbose"),
        (&metrics, "?verbose"),
        // The tokens are those of `http.listen`.
        (&metrics.with_token(&text("reader")), "?verbose"),
    ] {
        eventually(LONG, "the finding is named", async || {
            ready(client, query).await == (200, names.clone())
        })
        .await;
    }
    for name in ["reader", "shop"] {
        let (code, said) = ready(&by(name), "?verbose").await;
        let found = &said["problems"][0];
        assert_eq!((code, &said["status"]), (200, &json!("ready")), "{name}");
        assert_eq!(found["pipeline"], "ready", "{name}");
        // Who paused a pipeline is no tenant's business.
        let problem = found["problem"].as_str().unwrap();
        match name {
            "reader" => {
                assert!(problem.starts_with("pipeline ready is paused by cli:"), "{problem}");
            }
            _ => assert_eq!(problem, "pipeline ready is paused"),
        }
        assert_eq!(found["remedy"], "fairlane pipelines resume ready", "{name}");
    }
    for query in ["", "?verbose=false", "?verbose&verbose", "?other"] {
        assert_eq!(ready(&stranger, query).await, (200, plain.clone()), "{query}");
    }

    // Without Redis, the list says so, and the answer is as late as without it.
    server.sigstop();
    let began = Instant::now();
    let (code, said) = ready(&by("reader"), "?verbose").await;
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!((code, &said["status"]), (503, &json!("unavailable")), "{said}");
    let problem = said["problems"][0]["problem"].as_str().unwrap();
    assert!(problem.starts_with("Redis does not answer"), "{problem}");
    let keys: BTreeSet<String> = ready(&stranger, "?verbose").await.1["problems"][0]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    assert_eq!(keys, ["code", "severity", "runbook"].map(str::to_owned).into());
    server.sigcont();
}

/// Otherwise one missing primary would take every process out of its load balancer.
#[tokio::test]
async fn a_process_is_ready_while_a_primary_of_its_cluster_answers_and_says_how_many_do_not() {
    let mut cluster = Cluster::start(SAFE, 3, false).await;
    let tokens = Tokens::new(&[
        ("reader", "scopes = [\"read\"], bots = [\"*\"]"),
        ("shop", "scopes = [\"read\"], bots = [\"a\"]"),
    ]);
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.test.handler", "\"log\"")];
    let process = Served::start(&config(&cluster, "test", &settings)).await;
    let stranger = Client::new(&process.http());
    let by = |name: &str| stranger.with_token(&text(name));
    let calm = json!({ "status": "ready", "redis": "up" });
    eventually(LONG, "all answer", async || ready(&stranger, "").await == (200, calm.clone()))
        .await;

    let lost = cluster.nodes[0].tcp_addr().to_string();
    let degraded = json!({ "status": "degraded", "redis": "up", "primaries_down": 1 });
    // One that is frozen is as good as one that is missing.
    cluster.nodes[0].sigstop();
    for trouble in ["frozen", "killed"] {
        if trouble == "killed" {
            cluster.nodes[0].kill9();
        }
        eventually(LONG, trouble, async || ready(&stranger, "").await == (200, degraded.clone()))
            .await;
        let (code, said) = ready(&by("reader"), "?verbose").await;
        let problem = said["problems"][0]["problem"].as_str().unwrap();
        assert!(code == 200 && problem.contains(&lost), "{trouble}: {said}");
        for client in [&stranger, &by("shop")] {
            let (code, said) = ready(client, "?verbose").await;
            assert!(code == 200 && !said.to_string().contains(&lost), "{trouble}: {said}");
        }
    }
    eventually(LONG, "the metric of the alert says so too", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        metric(&text, "fairlane_redis_up", &[]) == Some(0.0)
    })
    .await;

    // The last one has no majority, so it refuses all keys, although it answers PING.
    cluster.nodes[1].kill9();
    let down = json!({ "status": "unavailable", "redis": "down" });
    eventually(LONG, "none serves", async || ready(&stranger, "").await == (503, down.clone()))
        .await;
}
