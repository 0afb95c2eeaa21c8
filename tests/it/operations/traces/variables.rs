//! The variables of OpenTelemetry, which are often set for all programs of a machine.

use std::process::Command;

use super::{RedisServer, Served, pushing, settings};
use crate::support::collector::Collector;
use crate::support::config::config;
use crate::support::receiver::Receiver;
use crate::support::redis::Options;
use crate::support::served::PROGRAM;

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const GRPC: &str = "http://localhost:4317";

#[tokio::test]
async fn an_endpoint_for_grpc_is_one_warning_of_serve_and_stops_no_command() {
    let redis = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let text = config(&redis, "push", &settings(&pushing(&receiver)));
    let served = Served::start_in(&text, &[(ENDPOINT, GRPC)]).await;
    let log = served.log();
    let warned: Vec<&str> =
        log.lines().filter(|line| line.contains("no spans are exported")).collect();
    assert_eq!(warned.len(), 1, "{log}");
    assert!(warned[0].contains("OTEL_EXPORTER_OTLP_ENDPOINT has port 4317"), "{warned:?}");
    assert!(warned[0].contains("write the port for OTLP over HTTP, usually 4318"), "{warned:?}");

    let directory = tempfile::tempdir().unwrap();
    let run = |text: &str, arguments: &[&str]| {
        std::fs::write(directory.path().join("fairlane.toml"), text).unwrap();
        let mut command = Command::new(PROGRAM);
        command.args(arguments).current_dir(directory.path()).env(ENDPOINT, GRPC);
        let output = command.output().unwrap();
        let all = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), all.concat())
    };
    for arguments in [&["status"][..], &["bots", "list"], &["pipelines", "list"]] {
        let (code, said) = run(&text, arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        assert!(!said.contains("OTEL"), "{arguments:?}: {said}");
    }
    // The configuration's own setting stays an error.
    let wrong = format!("{text}tracing.endpoint = {GRPC:?}\n");
    let (code, said) = run(&wrong, &["status"]);
    assert_eq!(code, Some(64), "{said}");
    assert!(said.contains("tracing.endpoint has port 4317"), "{said}");
}

#[tokio::test]
async fn an_endpoint_for_http_is_followed() {
    let redis = RedisServer::start(Options::default());
    let (receiver, collector) = (Receiver::content().await, Collector::start().await);
    let text = config(&redis, "push", &settings(&pushing(&receiver)));
    let endpoint = collector.endpoint();
    let served = Served::start_in(&text, &[(ENDPOINT, endpoint.trim_matches('"'))]).await;
    let client = super::Client::new(&served.http());
    let headers = [("content-type", super::STRUCTURED), ("traceparent", &*super::parent(true))];
    let body = super::event("shop", "ann", "1", "order.paid", serde_json::json!({})).to_string();
    let answer = client.send("POST", "/v1/events", &headers, body.as_bytes()).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
    collector.until(&["commit push"]).await;
    assert!(!served.log().contains("no spans are exported"), "{}", served.log());
}
