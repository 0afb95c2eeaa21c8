//! A product from outside the crate is served like the built-in ones: `examples/custom_product.rs`.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fairlane::app::{App, AppError};
use fairlane::config::Config;
use fairlane::formats::Format;
use fairlane::lifecycle::Shutdown;
use fairlane::product::{
    Class, OpenError, Opening, Part, Product, Route, Scope, Seat, SharedHandler, axum,
};
use tokio::task::JoinSet;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, get, metric, until_ready};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::PROGRAM;
use crate::support::wait::eventually;

#[path = "../../../examples/custom_product.rs"]
#[expect(dead_code, reason = "the test starts the product without its `main`")]
mod example;

use example::Activity;

const LONG: Duration = Duration::from_secs(20);
const STRUCTURED: &str = "application/cloudevents+json";

/// A configuration with the pipeline of the product, and its section.
fn with_section(server: &RedisServer, section: &str, more: &[(&str, &str)]) -> Config {
    let own = [("pipelines.activity.handler", "\"activity\"")];
    let text = config(server, "activity", &[&own, more].concat());
    Config::from_toml(&format!("{text}\n{section}\n"), "the test").unwrap()
}

/// The error of a start that must fail.
async fn refused(config: Config, product: impl Product) -> String {
    let built = App::builder(config).product(product).build().await;
    let error: AppError = built.expect_err("it does not start");
    error.to_string()
}

#[tokio::test]
async fn the_example_counts_events_for_both_instances_of_a_reload_and_forgets_quiet_bots() {
    let server = RedisServer::start(Options::default());
    let tokens = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = tokens.path().join(name);
        std::fs::write(&path, format!("{name}-0123456789abcdef")).unwrap();
        path.display().to_string()
    };
    let auth = format!(
        "[{{ name = \"all\", token_file = {:?}, scopes = [\"publish\", \"read\", \"operate\"], bots = [\"*\"] }}, \
         {{ name = \"ann\", token_file = {:?}, scopes = [\"read\"], bots = [\"ann\"] }}]",
        file("all"),
        file("ann"),
    );
    let section = "[products.activity]\nforget_after_seconds = 3";
    let config = with_section(&server, section, &[("auth.tokens", &auth)]);
    let activity = Activity::default();
    let (mut stops, mut running) = (Vec::new(), JoinSet::new());
    let mut start = async || {
        let builder = App::builder(config.clone()).product(activity.clone());
        let app = Box::pin(builder.build()).await.unwrap();
        let (http, metrics) = (app.http_address().unwrap().unwrap(), app.metrics_address());
        let shutdown = Shutdown::new();
        stops.push(shutdown.soft.clone());
        running.spawn(app.run(shutdown));
        let metrics = metrics.unwrap().to_string();
        until_ready(&metrics).await;
        (http.to_string(), metrics)
    };
    let ((http, metrics), (new, _)) = (start().await, start().await);
    let client = Client::new(&http);
    let all = client.with_token("all-0123456789abcdef");
    let of_ann = |address: &str| Client::new(address).with_token("ann-0123456789abcdef");
    let (ann, new) = (of_ann(&http), of_ann(&new));

    for n in 0..3 {
        let answer = all.publish(STRUCTURED, event("ann", "e", n)).await;
        assert_eq!(answer.code, 202, "{answer:?}");
    }
    let path = "/v1/bots/ann/activity";
    eventually(LONG, "both instances tell its three events", async || {
        ann.get(path).await.json() == 3 && new.get(path).await.json() == 3
    })
    .await;
    assert_eq!(client.get(path).await.code, 401, "it asks for a token");
    let other = ann.get("/v1/bots/bob/activity").await;
    assert_eq!(other.code, 403, "it asks for a token of the bot: {other:?}");
    let purged = all.send("DELETE", "/v1/pipelines/activity/bots/ann/queue", &[], b"").await;
    assert_eq!(purged.code, 409, "{purged:?}");
    assert_eq!(purged.problem(), "counts-events");
    let bots = async || metric(&get(&metrics, "/metrics").await.1, "activity_bots", &[]);
    eventually(LONG, "its task shows the bot", async || bots().await == Some(1.0)).await;
    eventually(LONG, "its task forgets the bot", async || bots().await == Some(0.0)).await;
    assert_eq!(ann.get(path).await.json(), 0);
    let counted = metric(
        &get(&metrics, "/metrics").await.1,
        "fairlane_http_requests_total",
        &[("route", "/v1/bots/{bot}/activity"), ("code", "401")],
    );
    assert_eq!(counted, Some(1.0), "its requests are counted as all others");

    for stop in stops {
        stop.cancel();
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_section_that_its_product_does_not_understand_stops_the_start_and_is_named() {
    let server = RedisServer::start(Options::default());
    let section = "[products.activity]\nforget_after = 3";
    let error = refused(with_section(&server, section, &[]), Activity::default()).await;
    assert!(error.starts_with("the test:"), "{error}");
    assert!(error.contains("products.activity") && error.contains("forget_after"), "{error}");
    let error =
        refused(with_section(&server, "[products.activty]", &[]), Activity::default()).await;
    assert!(error.contains("\"products.activty\"") && error.contains("activity"), "{error}");
}

#[tokio::test]
async fn check_warns_of_a_section_whose_product_this_program_does_not_have() {
    let server = RedisServer::start(Options::default());
    let directory = tempfile::tempdir().unwrap();
    let text = config(&server, "activity", &[("pipelines.activity.handler", "\"log\"")]);
    let file = directory.path().join("fairlane.toml");
    std::fs::write(&file, format!("{text}\n[products.activity]\n")).unwrap();
    let output = Command::new(PROGRAM).args(["check", "--config"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("products.activity") && said.contains("no product"), "{said}");
}

/// A product that serves a route that belongs to another one.
struct Greedy(&'static str);

struct GreedyPart(&'static str);

impl Product for Greedy {
    fn pipeline(&self) -> &'static str {
        "activity"
    }

    fn open(&self, _: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        Ok(Arc::new(GreedyPart(self.0)))
    }
}

impl Part for GreedyPart {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        Log::default().content().into()
    }

    fn routes(&self) -> Vec<Route> {
        let handler = axum::routing::get(async || "mine");
        vec![Route::new(self.0, Scope::Read, Class::P1, handler)]
    }
}

#[tokio::test]
async fn a_route_that_is_served_already_or_not_below_v1_stops_the_start() {
    let server = RedisServer::start(Options::default());
    for template in ["/v1/bots/{any}/counters", "/mine"] {
        let error = refused(with_section(&server, "", &[]), Greedy(template)).await;
        assert!(error.contains(template), "{error}");
    }
}

/// The product of the example. Its data has a later format.
#[derive(Default)]
struct Later(Activity);

static LATER: [Format; 1] =
    [Format { number: 2, oldest_reader: 2, ..Format::first("activity", "counts") }];

impl Product for Later {
    fn pipeline(&self) -> &'static str {
        self.0.pipeline()
    }

    fn formats(&self) -> &'static [Format] {
        &LATER
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        self.0.open(opening)
    }
}

#[tokio::test]
async fn a_start_that_fails_does_not_mark_the_data_so_the_earlier_version_still_starts() {
    let server = RedisServer::start(Options::default());
    let tokens =
        "[{ name = \"a\", token_file = \"/nowhere/a\", scopes = [\"read\"], bots = [\"*\"] }]";
    let config = with_section(&server, "", &[("auth.tokens", tokens)]);
    let error = refused(config, Later::default()).await;
    assert!(error.contains("/nowhere/a"), "{error}");
    let has_mark = async || server.ask(&["HEXISTS", "fl:formats", "activity:2"]).await;
    assert_eq!(has_mark().await, "0");
    let builder = App::builder(with_section(&server, "", &[])).product(Later::default());
    drop(Box::pin(builder.build()).await.unwrap());
    assert_eq!(has_mark().await, "1");
}
