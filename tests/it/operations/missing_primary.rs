//! What operators are told while a primary of a cluster is missing.

use std::time::Duration;

use serde_json::Value;

use crate::support::cli::run_in;
use crate::support::cluster::Cluster;
use crate::support::config::config;
use crate::support::http::Client;
use crate::support::redis::Options;
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
/// The primaries of the number of shards, and of the processes.
const SHARDS: usize = 0;
const PROCESSES: usize = 2;

fn codes(problems: &Value) -> Vec<&str> {
    let problems = problems.as_array().map(Vec::as_slice).unwrap_or_default();
    problems.iter().filter_map(|problem| problem["code"].as_str()).collect()
}

/// Whether only this primary is blamed, and another finding is told too.
fn is_told(problems: &Value, lost: &str) -> bool {
    let (codes, first) = (codes(problems), problems[0]["problem"].as_str().unwrap_or_default());
    codes.first() == Some(&"redis-unavailable")
        && first.starts_with("Primaries of Redis do not answer")
        && first.ends_with(lost)
        && codes.contains(&"redis-forgets")
        && !codes.contains(&"no-process")
}

/// The findings of `fairlane status`, and how it ends.
fn status(dir: &tempfile::TempDir) -> (i32, Value) {
    let ran = run_in(dir.path(), &["status", "--json"], "");
    let said: Value = serde_json::from_str(&ran.out).unwrap_or_default();
    (ran.code, said["problems"].clone())
}

#[tokio::test]
async fn one_missing_primary_is_told_as_such_and_hides_no_other_finding() {
    let mut cluster = Cluster::start(Options::default(), 3, false).await;
    for (key, place) in [("fl:shards", SHARDS), ("fl:processes", PROCESSES)] {
        assert_eq!(usize::from(cluster.slot_of(key).await) * 3 / 16_384, place, "{key}");
    }
    let config = config(&cluster, "test", &[("pipelines.test.handler", "\"log\"")]);
    let process = Served::start(&config).await;
    let client = Client::new(&process.http());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fairlane.toml"), &config).unwrap();
    let told = async |lost: &str| {
        eventually(LONG, "the status tells", async || {
            let (code, problems) = status(&dir);
            code == 69 && is_told(&problems, lost)
        })
        .await;
        eventually(LONG, "the API tells", async || {
            is_told(&client.get("/v1/problems").await.json()["problems"], lost)
        })
        .await;
    };
    cluster.nodes[SHARDS].sigstop();
    told(&cluster.nodes[SHARDS].tcp_addr().to_string()).await;
    cluster.nodes[SHARDS].sigcont();
    eventually(LONG, "all answer", async || {
        let (code, problems) = status(&dir);
        code == 0 && codes(&problems) == ["redis-forgets"]
    })
    .await;
    cluster.nodes[PROCESSES].kill9();
    told(&cluster.nodes[PROCESSES].tcp_addr().to_string()).await;
}
