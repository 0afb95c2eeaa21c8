//! Dashboards and alerts: each of them queries series that exist, and the runbook has answers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use fairlane::metrics::{Kind, METRICS};
use regex::Regex;
use serde_json::{Value, json};

use crate::support::automation_rig::{RULES, put, tag};
use crate::support::bus::add;
use crate::support::collector::Collector;
use crate::support::config::STREAM;
use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, get};
use crate::support::prometheus::{Prometheus, promtool};
use crate::support::receiver::{Receiver, Reply};
use crate::support::redis::Persistence;
use crate::support::served::{PROGRAM, Served};
use crate::support::wait::eventually;

/// Maximum time until all series show, on a busy machine.
const LONG: Duration = Duration::from_secs(120);

/// State that all processes share through Redis. The process that samples it shows it, and the
/// others show zero.
const SHARED: &[&str] = &[
    "fairlane_async_leases",
    "fairlane_bots_throttled",
    "fairlane_bots_with_lanes_set_aside",
    "fairlane_bus_lag_events",
    "fairlane_counters_unflushed",
    "fairlane_counters_unflushed_oldest_seconds",
    "fairlane_dead_letters",
    "fairlane_notifications_due",
    "fairlane_notifications_overdue_seconds",
    "fairlane_queue_bots",
    "fairlane_queue_depth",
    "fairlane_queue_oldest_age_seconds",
    "fairlane_redis_memory_bytes",
    "fairlane_redis_replica_lag_bytes",
    "fairlane_redis_replicas",
];

static SELECTOR: LazyLock<Regex> = LazyLock::new(|| {
    let (name, labels) = (r"\b((?:fairlane|process)_[a-z0-9_]+|up)\b", r"(?:\{([^}]*)\})?");
    Regex::new(&format!(r"(max(?: by \([^)]*\))? \(|max\()?{name}{labels}(\[)?")).unwrap()
});
static LABEL: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"([a-z_]+) ?(?:=~|!~|!=|=)").unwrap());
static BY: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\b(?:by|on) \(([^)]*)\)").unwrap());
static ALERT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?m)^ +- alert: (\w+)$").unwrap());
static ANCHOR: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"#([a-z0-9-]+)$").unwrap());

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards")
}

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every dashboard by the name of its file.
fn dashboards() -> BTreeMap<String, Value> {
    let files = fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().file_name());
    let names = files.map(|name| name.into_string().unwrap());
    let names = names.filter(|name| Path::new(name).extension().is_some_and(|end| end == "json"));
    let parsed = names.map(|name| {
        let text = read(&format!("dashboards/{name}"));
        let parsed = serde_json::from_str(&text);
        let parsed: Value = parsed.unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, parsed)
    });
    parsed.collect()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn is_row(panel: &Value) -> bool {
    panel["type"] == "row"
}

/// A query to Prometheus.
#[derive(Debug, Clone)]
struct Question {
    dashboard: String,
    panel: String,
    /// The expression as it is written in the file.
    expression: String,
}

impl Question {
    /// The queries of every panel.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (dashboard, content) in dashboards() {
            for panel in list(&content, "panels").iter().filter(|panel| !is_row(panel)) {
                assert!(!list(panel, "targets").is_empty(), "{dashboard}: {panel} asks nothing");
                all.extend(list(panel, "targets").iter().map(|target| Self {
                    dashboard: dashboard.clone(),
                    panel: text(panel, "title").to_owned(),
                    expression: text(target, "expr").to_owned(),
                }));
            }
        }
        assert!(all.len() > 100, "only {} questions", all.len());
        all
    }

    fn name(&self) -> String {
        format!("{}, panel {:?}: {}", self.dashboard, self.panel, self.expression)
    }
}

/// The expression as Grafana sends it, for all processes and pipelines.
fn filled_in(expression: &str) -> String {
    let values = [
        ("$__rate_interval", "20s"),
        ("$__range", "1m"),
        ("$job", "fairlane"),
        ("$instance", ".+"),
        ("$pipeline", ".+"),
    ];
    let fill = |text: String, (name, value): &(&str, &str)| text.replace(name, value);
    let filled = values.iter().fold(expression.to_owned(), fill);
    assert!(!filled.contains('$'), "a variable that does not exist: {filled}");
    filled
}

/// A series in an expression.
struct Selector<'a> {
    name: &'a str,
    labels: Vec<&'a str>,
    is_range: bool,
    is_maximum: bool,
}

fn selectors(expression: &str) -> Vec<Selector<'_>> {
    let found = SELECTOR.captures_iter(expression);
    found
        .map(|found| Selector {
            name: found.get(2).expect("it matched").as_str(),
            labels: found.get(3).map_or_else(Vec::new, |labels| {
                let found = LABEL.captures_iter(labels.as_str());
                found.map(|label| label.get(1).expect("it matched").as_str()).collect()
            }),
            is_range: found.get(4).is_some(),
            is_maximum: found.get(1).is_some(),
        })
        .collect()
}

/// The metric of the table behind a series, and whether the series is a part of a histogram.
fn known(series: &str) -> Option<(&'static str, Kind, bool)> {
    let find = |name: &str| METRICS.iter().find(|metric| metric.name == name);
    if let Some(metric) = find(series) {
        return Some((metric.name, metric.kind, false));
    }
    let parts = ["_bucket", "_sum", "_count"];
    let whole = parts.iter().find_map(|part| find(series.strip_suffix(part)?))?;
    Some((whole.name, whole.kind, true))
}

/// The mistakes in the names of an expression.
fn wrong_names(expression: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let all = selectors(expression);
    if all.is_empty() {
        wrong.push("asks for no metric".to_owned());
    }
    for Selector { name, .. } in all {
        if name == "up" || name.starts_with("process_") {
            continue;
        }
        match known(name) {
            None => wrong.push(format!("{name} is not in src/metrics")),
            Some((_, Kind::Seconds | Kind::Count, false)) => {
                wrong.push(format!("{name} is a histogram: _bucket, _sum or _count is missing"));
            }
            Some((_, Kind::Counter | Kind::Gauge, true)) => {
                wrong.push(format!("{name} is not a histogram"));
            }
            Some(_) => {}
        }
    }
    wrong
}

#[test]
fn every_panel_asks_for_metrics_that_exist_and_every_metric_is_on_a_panel() {
    let mut shown = BTreeSet::new();
    for question in Question::all() {
        let name = question.name();
        let wrong = wrong_names(&question.expression);
        assert!(wrong.is_empty(), "{name}: {wrong:?}");
        for selector in selectors(&question.expression) {
            let metric = selector.name;
            assert!(selector.labels.contains(&"job"), "{name}: {metric} of all installations");
            let Some((of, kind, _)) = known(metric) else { continue };
            shown.insert(of);
            let grows = kind != Kind::Gauge;
            assert_eq!(selector.is_range, grows, "{name}: {metric} only grows: {grows}");
            if SHARED.contains(&metric) {
                assert!(selector.is_maximum, "{name}: {metric} is shared: max, not sum");
                let one = selector.labels.contains(&"instance");
                assert!(!one, "{name}: {metric} is shared: the process shown may not sample it");
            }
        }
    }
    let absent: Vec<_> = METRICS.iter().filter(|metric| !shown.contains(metric.name)).collect();
    assert!(absent.is_empty(), "on no dashboard: {absent:?}");
    for (dashboard, content) in dashboards() {
        let variables = list(&content["templating"], "list").iter();
        let variables = variables.filter(|variable| variable["type"] == "query");
        let asked = variables.map(|variable| text(variable, "definition").to_owned());
        let notes = list(&content["annotations"], "list").iter();
        let notes = notes.filter_map(|note| note["expr"].as_str()).map(str::to_owned);
        for expression in asked.chain(notes) {
            let wrong = wrong_names(&expression);
            assert!(wrong.is_empty(), "{dashboard}: {expression}: {wrong:?}");
        }
    }
}

#[test]
fn every_panel_is_laid_out_explained_and_has_a_unit() {
    let mut uids = BTreeSet::new();
    for (dashboard, content) in dashboards() {
        assert!(uids.insert(text(&content, "uid").to_owned()), "{dashboard}: its uid is taken");
        for key in ["uid", "title", "description"] {
            assert!(!text(&content, key).is_empty(), "{dashboard} has no {key}");
        }
        assert_eq!(content["tags"], json!(["fairlane"]), "{dashboard}");
        assert_eq!(content["editable"], false, "{dashboard}");
        assert_eq!(content["links"][0]["tags"], json!(["fairlane"]), "{dashboard}");
        let (mut ids, mut titles) = (BTreeSet::new(), BTreeSet::new());
        let mut taken: BTreeMap<(u64, u64), String> = BTreeMap::new();
        for panel in list(&content, "panels") {
            let title = text(panel, "title");
            let name = format!("{dashboard}, panel {title:?}");
            assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{name}: its id is taken");
            let place = &panel["gridPos"];
            let [x, y, w, h] = ["x", "y", "w", "h"]
                .map(|key| place[key].as_u64().unwrap_or_else(|| panic!("{name} has no {key}")));
            assert!(w > 0 && h > 0 && x + w <= 24, "{name} is not on the grid: {place}");
            for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
                let other = taken.insert(cell, title.to_owned());
                assert!(other.is_none(), "{name} lies over {other:?}");
            }
            if is_row(panel) {
                continue;
            }
            assert!(
                titles.insert((title.to_owned(), text(panel, "type").to_owned())),
                "{name}: twice"
            );
            assert!(text(panel, "description").len() > 20, "{name} is not explained");
            let unit = text(&panel["fieldConfig"]["defaults"], "unit");
            assert!(!unit.is_empty(), "{name} has no unit");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{name}");
        }
    }
    assert!(uids.len() >= 5, "{uids:?}");
}

/// The anchor that Markdown renderers give to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The sections of the runbook by their anchors.
fn sections() -> BTreeMap<String, String> {
    let runbook = read("docs/runbook.md");
    let sections = runbook.split("\n## ").skip(1);
    let sections = sections.map(|section| {
        let (heading, body) = section.split_once('\n').unwrap_or((section, ""));
        (anchor(heading), body.to_owned())
    });
    sections.collect()
}

#[test]
fn every_link_to_the_runbook_leads_to_a_section_with_instructions() {
    let sections = sections();
    let exists = |name: &str, address: &str| {
        let anchor = ANCHOR.captures(address).map(|found| found[1].to_owned());
        let anchor = anchor.unwrap_or_else(|| panic!("{name}: {address:?} names no section"));
        assert!(sections.contains_key(&anchor), "{name}: no section {anchor:?} in docs/runbook.md");
        anchor
    };
    for (dashboard, content) in dashboards() {
        for panel in list(&content, "panels") {
            for link in list(panel, "links") {
                let address = text(link, "url");
                let name = format!("{dashboard}, panel {:?}", text(panel, "title"));
                assert!(address.starts_with("${runbook}#"), "{name}: {address}");
                exists(&name, address);
            }
        }
    }
    let rules = read("dashboards/alerts.yml");
    let alerts: Vec<_> = ALERT.captures_iter(&rules).map(|found| found[1].to_owned()).collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    let parts = rules.split("- alert: ").skip(1);
    for (alert, part) in alerts.iter().zip(parts) {
        let address = part.lines().find_map(|line| line.trim().strip_prefix("runbook_url: "));
        let address = address.unwrap_or_else(|| panic!("{alert} names no section"));
        assert!(address.starts_with("docs/runbook.md#"), "{alert}: {address}");
        let section = &sections[&exists(alert, address)];
        assert!(section.contains(&format!("`{alert}`")), "{alert}: not named in {address}");
        for needed in ["for: ", "severity: ", "summary: ", "description: "] {
            assert!(part.contains(needed), "{alert} has no {needed}");
        }
    }
    for (anchor, section) in &sections {
        for part in ["**You see**", "**It means**", "**Do**", "**It is over**"] {
            assert!(section.contains(part), "docs/runbook.md#{anchor} has no {part}");
        }
    }
}

#[test]
fn every_alert_is_tested_both_ways() {
    let (rules, tests) = (read("dashboards/alerts.yml"), read("dashboards/alerts.test.yml"));
    for found in ALERT.captures_iter(&rules) {
        let alert = &found[1];
        let asked = format!("ALERTS{{alertname=\"{alert}\", alertstate=\"firing\"");
        let fires = |line: &str| line.contains("- labels: ") && line.contains(&asked);
        assert!(tests.lines().any(fires), "no test in which {alert} fires");
        let mut questions = tests.split("- expr: ").filter(|part| part.starts_with(&asked));
        let quiet = questions.any(|part| part.contains("exp_samples: []"));
        assert!(quiet, "no test in which {alert} does not fire");
    }
}

#[test]
fn promtool_accepts_the_configuration_the_alerts_and_their_tests() {
    promtool(&directory(), &["check", "config", "prometheus.yml"]);
    promtool(&directory(), &["check", "rules", "alerts.yml"]);
    promtool(&directory(), &["test", "rules", "alerts.test.yml"]);
}

/// Checks the commands as the runbook writes them.
#[test]
fn every_command_of_the_runbook_exists() {
    let runbook = read("docs/runbook.md");
    let inline = Regex::new(r"(?:`|(?m:^))(fairlane [a-z][^`\n|;]*)").unwrap();
    let mut known: BTreeMap<Vec<String>, String> = BTreeMap::new();
    let mut commands = 0;
    for found in inline.captures_iter(&runbook) {
        let command = found[1].split(" #").next().expect("there is a first").trim();
        let words: Vec<&str> = command.split_whitespace().skip(1).collect();
        let groups = ["bots", "dead", "pipelines"];
        let depth = if groups.contains(&words[0]) { 2 } else { 1 };
        let path: Vec<String> = words.iter().take(depth).map(|word| (*word).to_owned()).collect();
        let help = known.entry(path.clone()).or_insert_with(|| {
            let output = Command::new(PROGRAM).args(&path).arg("--help").output().unwrap();
            assert!(output.status.success(), "docs/runbook.md: there is no {command:?}");
            String::from_utf8(output.stdout).unwrap()
        });
        for option in words.iter().filter(|word| word.starts_with('-') && word.len() > 1) {
            let known = help.split_whitespace().any(|word| word.trim_matches(',') == *option);
            assert!(known, "docs/runbook.md: {command:?}: no option {option} in\n{help}");
        }
        commands += 1;
    }
    assert!(commands > 20, "only {commands} commands");
}

/// The labels of every series that a process shows.
fn labels(scraped: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in scraped.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, _)) = line.rsplit_once(' ') else { continue };
        let (name, rest) = series.split_once('{').unwrap_or((series, ""));
        let found = LABEL.captures_iter(rest).map(|label| label[1].to_owned());
        all.entry(name.to_owned()).or_default().extend(found);
    }
    all
}

/// Labels in an expression that its metrics do not have.
fn wrong_labels(expression: &str, shown: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let (mut wrong, mut any) = (Vec::new(), BTreeSet::from(["job", "instance"]));
    for Selector { name, labels, .. } in selectors(expression) {
        let of = shown.get(name).cloned().unwrap_or_default();
        if name != "up" && !shown.contains_key(name) {
            wrong.push(format!("no series of {name}"));
        }
        let unknown = |label: &&&str| !["job", "instance"].contains(label) && !of.contains(**label);
        wrong.extend(labels.iter().filter(unknown).map(|label| format!("{name} has no {label}")));
        any.extend(shown.get(name).into_iter().flatten().map(String::as_str));
    }
    for found in BY.captures_iter(expression) {
        let named = found.get(1).expect("it matched").as_str().split(", ").map(str::trim);
        wrong.extend(named.filter(|label| !any.contains(label)).map(|l| format!("no label {l}")));
    }
    wrong
}

/// Creates traffic for every metric: events, rules, views, notifications, a refusal.
async fn traffic(client: &Client, stores: &Stores, receiver: &Receiver, round: u32) {
    let bot = format!("shop-{}", round % 8);
    let id = format!("event-{round}");
    let event = tag(&bot, "ann", &id, &format!("tag-{round}")).to_string();
    add(&stores.redis, STREAM, &[event]).await;
    let views = format!("/v1/bots/shop-1/counters/ad-{}/views", round % 5);
    client.post(&views).await;
    client.get(&format!("/v1/bots/shop-1/counters?ids=ad-0,ad-1,never-seen-{round}")).await;
    let json = [("content-type", "application/json")];
    client.send("POST", "/v1/bots/shop-1/counters/query", &json, b"{\"ids\":[\"ad-0\"]}").await;
    let url: String = url::form_urlencoded::byte_serialize(receiver.url().as_bytes()).collect();
    client.get(&format!("/send_delayed?delay=0&type=hello&url={url}")).await;
    assert_eq!(client.get("/v1/pipelines/tags/bots").await.code, 503, "its class is refused");
    assert_eq!(client.get("/v1/pipelines/none").await.code, 404);
    client.get("/healthz").await;
}

#[tokio::test]
async fn every_panel_shows_something_of_a_process_at_work() {
    let stores = Stores::start(Persistence::Always);
    stores.redis.ask(&["CONFIG", "SET", "maxmemory", "1gb"]).await;
    let receiver = Receiver::start(async |_| Reply::new(200, "ok")).await;
    let collector = Collector::start().await;
    let endpoint = collector.endpoint();
    let settings = [
        ("pipelines.tags.handler", "\"log\""),
        ("pipelines.tags.events", "[\"tag.*\"]"),
        ("pipelines.tags.start", "\"earliest\""),
        ("pipelines.tags.handler_timeout", "\"5s\""),
        // This setting makes refusals for the dashboards.
        ("admission.p3", "\"refuse\""),
        ("tracing.endpoint", &*endpoint),
        ("tracing.root_ratio", "1.0"),
    ];
    let served = Served::start(&stores.direct(&[RULES, &settings].concat())).await;
    let client = Client::new(&served.http());
    let rule =
        json!({ "on": ["tag.applied"], "actions": [{ "notify": { "url": receiver.url() } }] });
    for bot in 0..8 {
        put(&client, &format!("shop-{bot}"), "greet", &rule).await;
    }
    let config = read("dashboards/prometheus.yml");
    let config = config.replace("fairlane:9464", &served.metrics()).replace(": 5s", ": 1s");
    let rules = read("dashboards/alerts.yml");
    let prometheus = Prometheus::start(&config, &rules).await;

    let (mut open, mut round, started) = (Question::all(), 0, Instant::now());
    eventually(LONG * 2, "every panel shows something", async || {
        round += 1;
        traffic(&client, &stores, &receiver, round).await;
        let mut left = Vec::new();
        for question in std::mem::take(&mut open) {
            let found = prometheus.query(&filled_in(&question.expression)).await;
            let found = found.unwrap_or_else(|error| panic!("{}: {error}", question.name()));
            if !found.iter().any(|(_, value)| value.is_finite()) {
                left.push(question);
            }
        }
        open = left;
        let names: Vec<String> = open.iter().map(Question::name).collect();
        assert!(started.elapsed() < LONG, "nothing to see in\n{}", names.join("\n"));
        open.is_empty()
    })
    .await;

    let (_, scraped) = get(&served.metrics(), "/metrics").await;
    let shown = labels(&scraped);
    for question in Question::all() {
        let wrong = wrong_labels(&filled_in(&question.expression), &shown);
        assert!(wrong.is_empty(), "{}: {wrong:?}", question.name());
    }
    let alerts = prometheus.alerts().await;
    assert_eq!(alerts.len(), ALERT.captures_iter(&rules).count());
    for alert in alerts {
        let (name, query) = (text(&alert, "name"), text(&alert, "query"));
        let wrong = [wrong_names(query), wrong_labels(query, &shown)].concat();
        assert!(wrong.is_empty(), "alert {name}: {query}: {wrong:?}");
        assert_ne!(alert["state"], "firing", "alert {name} fires, though nothing is wrong");
        eventually(LONG, name, async || {
            let now = prometheus.alerts().await;
            let now = now.iter().find(|now| now["name"] == alert["name"]).expect("it stays");
            assert_eq!(text(now, "lastError"), "", "alert {name}");
            now["health"] == "ok"
        })
        .await;
    }
}
