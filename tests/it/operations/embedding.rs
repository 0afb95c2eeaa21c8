//! A program that embeds Fairlane: its own settings count, it stops as it wants, and it shares its process.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use fairlane::app::{App, AppError};
use fairlane::config::Config;
use fairlane::lifecycle::Shutdown;
use fairlane::product::{OpenError, Opening, Part, Product, Seat, SharedHandler};
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, until_ready};
use crate::support::process::{WorkerProcess, signal};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::roles::own::{FILE, OWN, Own};
use crate::support::roles::worker::CONFIG;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const HANDLER: (&str, &str) = ("pipelines.own.handler", "\"own\"");
const RUNS: &str = "fairlane is running";

/// A process with the handler `own`, which prints each slice.
struct Program {
    process: WorkerProcess,
    directory: TempDir,
}

impl Program {
    /// Starts with this file.
    fn start(file: &str, own: &Own) -> Self {
        Self::start_with(file, (OWN, serde_json::to_string(own).unwrap()))
    }

    fn start_with(file: &str, variable: (&str, String)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fairlane.toml");
        fs::write(&path, file).unwrap();
        let path = (FILE, path.display().to_string());
        let process = WorkerProcess::spawn("own", &[path, variable]);
        Self { process, directory }
    }

    /// Changes its file.
    fn write(&self, file: &str) {
        fs::write(self.directory.path().join("fairlane.toml"), file).unwrap();
    }

    /// The printed lines with this text.
    fn lines(&self, text: &str) -> Vec<String> {
        self.process.lines().into_iter().filter(|line| line.contains(text)).collect()
    }

    async fn says(&self, text: &str) {
        eventually(LONG, text, async || !self.lines(text).is_empty()).await;
    }

    async fn reload(&self) {
        signal(self.process.id(), "HUP");
        self.says("the configuration is reloaded").await;
    }

    /// A client of its HTTP interface.
    fn client(&self) -> Client {
        let line = self.lines(RUNS).pop().unwrap();
        let address = line.split_once(" http=").and_then(|(_, rest)| rest.split(' ').next());
        Client::new(address.unwrap())
    }

    fn stop(&mut self) {
        self.process.sigterm();
        let status = self.process.wait_exit(LONG);
        assert!(status.is_some_and(|status| status.success()), "{:#?}", self.lines(""));
    }
}

#[tokio::test]
async fn a_grace_period_that_the_program_sets_lets_its_handler_finish_also_after_a_reload() {
    for is_reloaded in [false, true] {
        let server = RedisServer::start(Options::default());
        let short = [("pipelines.own.handler_timeout", "\"1s\""), ("shutdown_grace", "\"1s\"")];
        let own = Own { grace: Some(LONG), takes: Duration::from_secs(4), ..Own::default() };
        let file = config(&server, "own", &[&[HANDLER][..], &short].concat());
        let mut program = Program::start(&file, &own);
        program.says(RUNS).await;
        if is_reloaded {
            program.reload().await;
        }
        add(&server, STREAM, &[event("bot", "test", 0)]).await;
        program.says("begun").await;
        program.stop();
        assert_eq!(program.lines("slice 1 total"), ["slice 1 total 1"]);
    }
}

#[tokio::test]
async fn a_quota_that_the_program_sets_stays_if_only_the_admission_in_the_file_changes() {
    let server = RedisServer::start(Options::default());
    let own = Own { bot_rate: Some(7), ..Own::default() };
    let mut program = Program::start(&config(&server, "own", &[HANDLER]), &own);
    program.says(RUNS).await;
    let client = program.client();
    let quotas = async || client.get("/v1/admission").await.json()["quotas"].clone();
    let with = |token_rate: u32| {
        let quota = |rate: u32| json!({ "rate": rate, "in_flight": 0 });
        json!({ "bot": quota(7), "token": quota(token_rate) })
    };
    eventually(LONG, "it has the quota", async || quotas().await == with(0)).await;
    program.write(&config(&server, "own", &[HANDLER, ("admission.token_rate", "9")]));
    program.reload().await;
    assert_eq!(quotas().await, with(9));
    assert_eq!(program.lines(RUNS).len(), 1, "no other instance is needed");
    program.stop();
}

#[tokio::test]
async fn a_redis_that_the_program_names_is_waited_for_at_the_start() {
    let mut server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let file = config(&server, "own", &[HANDLER]).replace("redis.url", "# redis.url");
    let own = Own { redis: Some(server.url()), ..Own::default() };
    server.kill9();
    let mut program = Program::start(&file, &own);
    program.says("waiting for Redis before the start").await;
    server.restart();
    program.says(RUNS).await;
    program.stop();
}

#[tokio::test]
async fn a_configuration_that_the_program_made_is_the_same_after_a_reload_beside_another_file() {
    let server = RedisServer::start(Options::default());
    let [own, other] = ["own", "other"].map(|name| {
        let handler = format!("pipelines.{name}.handler");
        config(&server, name, &[(handler.as_str(), "\"own\"")])
    });
    let mut program = Program::start_with(&other, (CONFIG, own));
    program.says(RUNS).await;
    program.reload().await;
    let runs = program.lines(RUNS);
    let places: BTreeSet<_> =
        runs.iter().filter_map(|line| Some(line.split_once(RUNS)?.1)).collect();
    assert_eq!((runs.len(), places.len()), (2, 1), "addresses and pipelines stay: {runs:#?}");
    add(&server, STREAM, &[event("bot", "test", 0)]).await;
    program.says("slice 1 total 1").await;
    program.stop();
}

#[test]
fn a_program_with_another_recorder_of_metrics_is_told_which_one_to_install() {
    let mut process = WorkerProcess::spawn("measured", &[]);
    let status = process.wait_exit(LONG);
    let lines = process.lines();
    assert!(status.is_some_and(|status| status.success()), "{lines:#?}");
    let told = lines.iter().find(|line| line.starts_with("error: "));
    assert!(told.is_some_and(|line| line.contains("fairlane::metrics::install()")), "{lines:#?}");
}

#[tokio::test]
async fn an_instance_whose_future_is_dropped_handles_no_further_event() {
    let server = RedisServer::start(Options::default());
    let config = Config::from_toml(&config(&server, "dropped", &[]), "the test").unwrap();
    let log = Log::default();
    let app = App::builder(config).handler("recorder", log.content());
    let app = Box::pin(app.build()).await.unwrap();
    let metrics = app.metrics_address().unwrap().to_string();
    let shutdown = Shutdown::new();
    let mut running = JoinSet::new();
    running.spawn(app.run(shutdown.clone()));
    until_ready(&metrics).await;
    add(&server, STREAM, &[event("bot", "test", 0)]).await;
    eventually(LONG, "it is handled", async || log.len() == 1).await;
    running.shutdown().await;
    timeout(LONG, shutdown.wait()).await.expect("its tasks end");
    add(&server, STREAM, &[event("bot", "test", 1)]).await;
    // It would be handled by then.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(log.len(), 1);
}

/// A product that does this when it starts.
#[derive(Clone, Copy)]
struct Starting(fn(&Seat<'_>));

impl Product for Starting {
    fn pipeline(&self) -> &'static str {
        "own"
    }

    fn open(&self, _: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        Ok(Arc::new(*self))
    }
}

impl Part for Starting {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        Log::default().content().into()
    }

    fn start(&self, seat: &Seat<'_>) {
        (self.0)(seat);
    }
}

#[tokio::test]
async fn a_panic_of_a_product_while_it_starts_ends_the_instance_and_its_private_redis() {
    let directory = tempfile::tempdir().unwrap();
    let text = format!(
        "data_dir = {:?}\nhttp.listen = \"127.0.0.1:0\"\nmetrics.listen = \"127.0.0.1:0\"\n\
         pipelines.automations.enabled = false\npipelines.counters.enabled = false\n\
         pipelines.notifications.enabled = false\npipelines.own.events = [\"*\"]\n\
         pipelines.own.handler = \"own\"\n",
        directory.path(),
    );
    let config = Config::from_toml(&text, "the test").unwrap();
    let app = App::builder(config).product(Starting(|_| panic!("as it should")));
    let app = Box::pin(app.build()).await.unwrap();
    let socket = directory.path().join("redis/redis.sock");
    assert!(socket.exists());
    let ended = timeout(LONG, Box::pin(app.run(Shutdown::new()))).await.expect("it ends");
    assert!(matches!(ended, Err(AppError::Panicked)), "{ended:?}");
    assert!(!socket.exists(), "its private Redis is stopped");
}

#[tokio::test]
async fn a_task_that_never_ends_delays_a_stop_from_code_only_by_the_grace_period() {
    let server = RedisServer::start(Options::default());
    let config = Config::from_toml(&config(&server, "own", &[HANDLER]), "the test").unwrap();
    let endless = Starting(|seat| drop(seat.shutdown.spawn(std::future::pending::<()>())));
    let app = Box::pin(App::builder(config).product(endless).build()).await.unwrap();
    let shutdown = Shutdown::new();
    let running = Box::pin(app.run(shutdown.clone()));
    let stop = shutdown.stop_within(Duration::from_millis(100));
    let ended = async { tokio::join!(running, stop) };
    let (ran, ()) = timeout(LONG, ended).await.expect("it ends");
    ran.unwrap();
}
