//! Troubles are staged with real processes and servers. The command line, the page, the API, the metric
//! and the alert must show each of them within seconds, agree, and forget it when it is over.
//!
//! Each test prints a line with the times, for the table in docs/operations.md.

#[cfg(all(feature = "nats", feature = "kafka"))]
mod buses;
mod handlers;
mod processes;
mod ready;
mod stores;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::cli::{Ran, run_in};
use crate::support::http::{Client, get};
use crate::support::prometheus::Prometheus;
use crate::support::redis::{Options, Persistence};
use crate::support::served::Served;
use crate::support::wait::{Stalls, eventually};

const LONG: Duration = Duration::from_secs(60);
/// A finding shows within this time on an idle machine.
const SOON: Duration = Duration::from_secs(5);
/// The interval of the scrapes.
const SCRAPE: Duration = Duration::from_secs(1);
/// True findings on a busy machine: its Redis is slow, and a read of `status` takes too long.
const BUSY: [&str; 2] = ["redis-slow", "not-seen"];
const POLL: Duration = Duration::from_millis(50);
/// The pause between two commands, or two pages: each needs much of the processor.
const LONG_POLL: Duration = Duration::from_millis(250);

/// A Redis that keeps its data, as `fairlane status` wants it.
const SAFE: Options = Options { persistence: Persistence::EverySecond, max_memory: 0, tcp: true };

/// A trouble, and how it must show.
struct Trouble {
    /// What was staged.
    name: &'static str,
    /// The code of the finding.
    code: &'static str,
    /// The pipeline that it concerns; empty: none.
    pipeline: &'static str,
    /// A part of its text.
    words: &'static str,
    /// A part of the command that helps.
    remedy: &'static str,
    alert: &'static str,
    /// The exit code of `fairlane status`.
    exit: i32,
    /// Other findings that it may cause.
    besides: &'static [&'static str],
    /// Whether the alert ends within moments. An alert that looks back on a range of time does not.
    /// `promtool test rules` shows its end.
    alert_ends: bool,
}

impl Default for Trouble {
    fn default() -> Self {
        Self {
            name: "",
            code: "",
            pipeline: "",
            words: "",
            remedy: "",
            alert: "",
            exit: 0,
            besides: &[],
            alert_ends: true,
        }
    }
}

/// A finding, as a place shows it.
#[derive(Debug, Clone, Default)]
struct Found {
    codes: BTreeSet<String>,
    /// The finding that was looked for.
    it: Option<Value>,
}

impl Found {
    fn of(problems: &Value, trouble: &Trouble) -> Self {
        let all = problems.as_array().map_or(&[][..], Vec::as_slice);
        let is_it = |one: &&Value| {
            one["code"] == trouble.code
                && one["pipeline"].as_str().unwrap_or_default() == trouble.pipeline
        };
        let codes = all.iter().map(|one| one["code"].as_str().unwrap().to_owned()).collect();
        Self { codes, it: all.iter().find(is_it).cloned() }
    }
}

/// Processes, the Prometheus that scrapes them, and the directory in which an operator runs commands.
struct Scene {
    served: Vec<Served>,
    /// Where the process listens whose pages are looked at.
    looking: Client,
    prometheus: Prometheus,
    dir: tempfile::TempDir,
    stalls: Stalls,
    /// How long it takes to look everywhere, without a trouble.
    look: Duration,
}

impl Scene {
    /// Starts a process for each configuration and its roles. The last one serves the page.
    async fn start(configs: &[(&str, &str)]) -> Self {
        let stalls = Stalls::watch();
        let dir = tempfile::tempdir().unwrap();
        let mut served = Vec::new();
        for (config, roles) in configs {
            served.push(Served::start_as(config, roles).await);
        }
        let last = served.last().expect("a process");
        let looking = Client::new(&last.http());
        fs::write(dir.path().join("fairlane.toml"), configs.last().unwrap().0).unwrap();
        let targets: Vec<String> =
            served.iter().map(|one| format!("{:?}", one.metrics())).collect();
        let config = read("dashboards/prometheus.yml")
            .replace("\"fairlane:9464\"", &targets.join(", "))
            .replace(": 5s", &format!(": {}s", SCRAPE.as_secs()));
        let prometheus = Prometheus::start(&config, &read("dashboards/alerts.yml")).await;
        let mut scene = Self { served, looking, prometheus, dir, stalls, look: Duration::ZERO };
        // The first scrapes are a few seconds after the start of Prometheus.
        eventually(LONG, "every process is scraped", async || {
            let found = scene.prometheus.query("count_over_time(up[1m]) > 1").await;
            found.unwrap().len() == scene.served.len()
        })
        .await;
        scene.look = scene.calms().await;
        scene
    }

    /// Runs a command, and expects that it succeeds.
    async fn run(&self, arguments: &[&str]) -> Ran {
        let ran = self.ran(arguments).await;
        assert_eq!(ran.code, 0, "{ran:?}");
        ran
    }

    async fn ran(&self, arguments: &[&str]) -> Ran {
        let (dir, arguments) = (self.dir.path().to_owned(), arguments.join("\n"));
        let run = move || run_in(&dir, &arguments.split('\n').collect::<Vec<_>>(), "");
        tokio::task::spawn_blocking(run).await.unwrap()
    }

    /// Waits until nothing is wrong anywhere. Returns how long the last look took.
    async fn calms(&self) -> Duration {
        let mut left = String::new();
        let calm = async {
            loop {
                let began = Instant::now();
                let ran = self.ran(&["status"]).await;
                let page = self.page().await;
                let listed = self.listed().await["problems"].clone();
                let metrics = self.metrics().await;
                left = format!("{}\n{listed}\n{metrics:?}", ran.out);
                if ran.out.contains("nothing is wrong")
                    && page.contains("Nothing is wrong.")
                    && listed == serde_json::json!([])
                    && metrics.is_empty()
                {
                    return began.elapsed();
                }
                tokio::time::sleep(LONG_POLL).await;
            }
        };
        let calmed = tokio::time::timeout(LONG, calm).await;
        calmed.unwrap_or_else(|_| panic!("something is wrong without a trouble:\n{left}"))
    }

    /// Waits until the bus shows no unread entry, after at least one was copied.
    async fn settles(&self, pipeline: &str) {
        eventually(LONG, "the event is handled", async || {
            let ran = self.ran(&["status", "--json"]).await;
            let said: Value = serde_json::from_str(&ran.out).unwrap_or_default();
            said["streams"][0]["unread"] == 0 && said["pipelines"][0]["name"] == pipeline
        })
        .await;
    }

    async fn page(&self) -> String {
        String::from_utf8_lossy(&self.looking.get("/").await.body).into_owned()
    }

    async fn listed(&self) -> Value {
        let answer = self.looking.get("/v1/problems").await;
        assert_eq!(answer.code, 200, "{answer:?}");
        answer.json()
    }

    async fn status(&self, trouble: &Trouble) -> Found {
        let ran = self.ran(&["status", "--json"]).await;
        let said: Value = serde_json::from_str(&ran.out).unwrap_or_default();
        let found = Found::of(&said["problems"], trouble);
        if found.it.is_some() {
            assert_eq!(ran.code, trouble.exit, "{ran:?}");
        }
        found
    }

    /// The codes whose metric is 1 in any process.
    async fn metrics(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for one in &self.served {
            // A process that is stopped or frozen is not asked.
            let asked = get_soon(&one.metrics(), "/metrics").await;
            let series = asked.lines().filter(|line| line.starts_with("fairlane_problems{"));
            for line in series.filter(|line| line.ends_with(" 1")) {
                let label = |name: &str| {
                    let rest = line.split_once(&format!("{name}=\"")).map(|(_, rest)| rest);
                    rest.and_then(|rest| rest.split_once('"')).map_or("", |(value, _)| value)
                };
                found.insert((label("problem").to_owned(), label("pipeline").to_owned()));
            }
        }
        found
    }

    /// The number of series of an alert now.
    async fn alert(&self, name: &str) -> usize {
        let alerts = self.prometheus.alerts().await;
        let alert = alerts.iter().find(|alert| alert["name"] == name);
        let alert = alert.unwrap_or_else(|| panic!("there is no alert {name}"));
        let found = self.prometheus.query(alert["query"].as_str().unwrap()).await;
        found.unwrap_or_else(|error| panic!("{name}: {error}")).len()
    }

    /// Waits until the trouble shows everywhere. Prints the times, and checks them.
    async fn shows(&self, trouble: &Trouble, began: Instant) {
        let seen = Mutex::new(Vec::new());
        let waits = |what: &'static str, pause: Duration| {
            assert!(
                began.elapsed() < LONG,
                "{}: {what} does not show {}, but {:?}",
                trouble.name,
                trouble.code,
                seen.lock().unwrap(),
            );
            tokio::time::sleep(pause)
        };
        let is_seen = |what: &'static str| {
            let took = began.elapsed();
            seen.lock().unwrap().push((what, took));
            took
        };
        let status = async {
            let mut found = self.status(trouble).await;
            while found.it.is_none() {
                waits("status", LONG_POLL).await;
                found = self.status(trouble).await;
            }
            (is_seen("status"), found)
        };
        let listed = async {
            while Found::of(&self.listed().await["problems"], trouble).it.is_none() {
                waits("GET /v1/problems", POLL).await;
            }
            is_seen("GET /v1/problems")
        };
        let key = format!("data-key=\"{}/{}\"", trouble.code, trouble.pipeline);
        let page = async {
            while !self.page().await.contains(&key) {
                waits("the page", LONG_POLL).await;
            }
            is_seen("the page")
        };
        let series = (trouble.code.to_owned(), trouble.pipeline.to_owned());
        let metric = async {
            while !self.metrics().await.contains(&series) {
                waits("the metric", POLL).await;
            }
            is_seen("the metric")
        };
        let alert = async {
            while self.alert(trouble.alert).await == 0 {
                waits("the alert", POLL).await;
            }
            is_seen("the alert")
        };
        let ((status, found), listed, page, metric, alert) =
            tokio::join!(status, listed, page, metric, alert);
        let it = found.it.expect("it was found");
        let s = |time: Duration| format!("{:.1}", time.as_secs_f64());
        println!(
            "TROUBLE | {} | {} | {} | {} | {} | {} | {} | {} |",
            trouble.name,
            trouble.code,
            s(status),
            s(page),
            s(listed),
            s(metric),
            s(alert),
            trouble.alert,
        );
        self.is_told(trouble, &it).await;
        self.agree(trouble).await;
        // A pause of the machine delays several steps one after the other. On a busy one, each look is slow.
        let slack = self.stalls.longest() * 4 + self.look;
        for (what, time, limit) in [
            ("status", status, SOON),
            ("the page", page, SOON),
            ("GET /v1/problems", listed, SOON),
            // Another process may have to take over from the one that reported it.
            ("the metric", metric, SOON + SCRAPE),
            ("the alert", alert, SOON + 2 * SCRAPE),
        ] {
            assert!(time <= limit + slack, "{}: {what} took {time:?}; {slack:?}", trouble.name);
        }
    }

    /// Checks the words of a finding: for a person, and where it leads to.
    async fn is_told(&self, trouble: &Trouble, it: &Value) {
        for (field, words) in [("problem", trouble.words), ("remedy", trouble.remedy)] {
            let text = it[field].as_str().unwrap();
            assert!(text.contains(words), "{}: {words:?} is not in {text:?}", trouble.name);
        }
        let ran = self.ran(&["status"]).await;
        let runbook = it["runbook"].as_str().unwrap();
        for words in [trouble.words, trouble.remedy, runbook] {
            assert!(ran.out.contains(words), "{}: no {words:?} in\n{}", trouble.name, ran.out);
        }
        let anchor = runbook.trim_start_matches("docs/runbook.md");
        let page = self.page().await;
        assert!(page.contains(&format!("/runbook{anchor}\"")), "{}: {page}", trouble.name);
        let shown = self.looking.get("/runbook").await;
        let id = format!("id=\"{}\"", anchor.trim_start_matches('#'));
        assert!(String::from_utf8_lossy(&shown.body).contains(&id), "{}: no {id}", trouble.name);
    }

    /// The places show the same findings, and none that the trouble does not explain. What a busy machine
    /// causes must pass.
    async fn agree(&self, trouble: &Trouble) {
        let (mut last, mut explained_at) = (String::new(), Instant::now());
        let agreed = async {
            loop {
                let status = self.status(trouble).await.codes;
                let listed = Found::of(&self.listed().await["problems"], trouble).codes;
                let page = self.page().await;
                let metrics: BTreeSet<String> =
                    self.metrics().await.into_iter().map(|(code, _)| code).collect();
                let shown: BTreeSet<String> = page
                    .split("data-key=\"")
                    .filter_map(|rest| Some(rest.split_once('/')?.0.to_owned()))
                    .filter(|code| status.contains(code) || listed.contains(code))
                    .collect();
                last = format!("status {status:?}, API {listed:?}, page {shown:?}, {metrics:?}");
                let explained =
                    |code: &str| code == trouble.code || trouble.besides.contains(&code);
                let strange: Vec<_> = status.iter().filter(|code| !explained(code)).collect();
                if strange.is_empty() {
                    explained_at = Instant::now();
                }
                let agree = status.contains(trouble.code)
                    && [&listed, &shown, &metrics].into_iter().all(|other| *other == status);
                if agree && strange.is_empty() {
                    return;
                }
                let is_busy = strange.iter().all(|code| BUSY.contains(&code.as_str()));
                let passes = explained_at.elapsed() < 2 * SOON + 4 * self.stalls.longest();
                assert!(!agree || is_busy && passes, "{}: {strange:?} too: {last}", trouble.name);
                tokio::time::sleep(LONG_POLL).await;
            }
        };
        let agreed = tokio::time::timeout(LONG, agreed).await;
        assert!(agreed.is_ok(), "{}: they differ: {last}", trouble.name);
    }

    /// Waits until the trouble is gone everywhere.
    async fn ends(&self, trouble: &Trouble) {
        let began = Instant::now();
        self.calms().await;
        println!("TROUBLE over | {} | {:.1} s", trouble.name, began.elapsed().as_secs_f64());
        if trouble.alert_ends {
            eventually(LONG, "the alert ends", async || self.alert(trouble.alert).await == 0).await;
        }
    }

    /// Nothing shows before the trouble. An alert may look back on the start of the processes.
    async fn is_quiet(&self, trouble: &Trouble) {
        eventually(2 * LONG, "the alert is quiet", async || self.alert(trouble.alert).await == 0)
            .await;
    }
}

/// The answer, or nothing of a process that does not answer.
async fn get_soon(address: &str, path: &str) -> String {
    let asked = tokio::time::timeout(Duration::from_secs(1), get(address, path)).await;
    asked.map(|(_, text)| text).unwrap_or_default()
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
