//! `fairlane check`.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::error::{CliError, Exit};
use super::output::{Output, Table, Tone, count, duration};
use super::session::{Redis, TIMEOUT};
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::{Config, ConfigError, PipelineConfig};
use crate::fanout::Filter;
use crate::id::PipelineName;
use crate::keyspace::{Server, ServerInfo, StoreError, StreamKind};

/// The oldest Redis that has what the scripts need.
const OLDEST_VERSION: (u32, u32) = (7, 0);
/// Clocks may differ by this much.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Examples:
  fairlane check
  fairlane check --config /etc/fairlane/fairlane.toml
  fairlane check --json | jq '.[] | select(.state != \"ok\")'

Exit codes: 0 nothing failed, 1 something failed, 64 the configuration is wrong, 69 Redis does not
answer. Warnings do not fail.";

/// Arguments of `fairlane check`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArgs {
    /// Print a JSON list instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warn,
    Fail,
}

/// What one check found.
#[derive(Debug, Serialize)]
struct Finding {
    state: State,
    check: String,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    /// What scripts are told when it failed.
    #[serde(skip)]
    exit: Exit,
}

impl Finding {
    fn ok(check: impl Into<String>, found: impl Into<String>) -> Self {
        let (check, found) = (check.into(), found.into());
        Self { state: State::Ok, check, found, remedy: None, exit: Exit::Failed }
    }

    fn warn(check: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state: State::Warn, remedy: Some(remedy.into()), ..Self::ok(check, found) }
    }

    fn fail(check: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state: State::Fail, ..Self::warn(check, found, remedy) }
    }

    fn exits(self, exit: Exit) -> Self {
        Self { exit, ..self }
    }
}

/// Checks everything that can be checked, also after something failed.
pub(super) async fn check(
    config: Result<Config, ConfigError>,
    args: &CheckArgs,
) -> Result<(), CliError> {
    let mut findings = Vec::new();
    match config {
        Ok(config) => {
            findings.extend(check_config(&config));
            findings.extend(check_redis(&config).await);
        }
        Err(error) => findings.push(
            Finding::fail("configuration", error.to_string(), "correct that setting")
                .exits(Exit::Usage),
        ),
    }
    let output = Output::new(args.json);
    output.show(&findings, |findings| text(output, findings))?;
    let failed = findings.iter().filter(|finding| finding.state == State::Fail);
    match failed.clone().map(|finding| finding.exit).max() {
        Some(exit) => Err(CliError::Findings { failed: failed.count(), exit }),
        None => Ok(()),
    }
}

fn text(output: Output, findings: &[Finding]) -> String {
    let mut table = Table::new(&["STATE", "CHECK", "FOUND"]);
    for Finding { state, check, found, .. } in findings {
        let (tone, word) = match state {
            State::Ok => (Tone::Good, "ok"),
            State::Warn => (Tone::Warning, "warn"),
            State::Fail => (Tone::Bad, "fail"),
        };
        table.toned_row(tone, &[word.to_owned(), check.clone(), found.clone()]);
    }
    let mut text = output.table(&table);
    let helping = findings.iter().filter_map(|found| Some((found, found.remedy.as_deref()?)));
    for (at, (Finding { check, found, .. }, remedy)) in helping.enumerate() {
        text.push_str(if at == 0 { "\n\n" } else { "\n" });
        text.push_str(&output.paint(Tone::Strong, check));
        text.extend([": ", found, "\n    ", remedy]);
    }
    text
}

/// The configuration by itself: what loading it could not refuse.
fn check_config(config: &Config) -> Vec<Finding> {
    let redis = config.redis.url.as_ref().map_or_else(
        || format!("a private Redis under {}", config.data_dir.display()),
        ToString::to_string,
    );
    let mut findings = vec![Finding::ok("configuration", format!("readable; {redis}"))];
    for (name, pipeline) in config.pipelines.iter().filter(|(_, pipeline)| pipeline.enabled) {
        findings.push(check_pipeline(name, pipeline));
    }
    if findings.len() == 1 {
        findings.push(Finding::warn(
            "pipelines",
            "none is enabled",
            "add a section [pipelines.NAME]; `fairlane config` prints one",
        ));
    }
    findings
}

fn check_pipeline(name: &PipelineName, pipeline: &PipelineConfig) -> Finding {
    let check = format!("pipeline {name}");
    if let Some(Err(error)) = pipeline.filter.as_deref().map(Filter::compile) {
        let remedy = format!("correct pipelines.{name}.filter");
        return Finding::fail(check, error.to_string(), remedy).exits(Exit::Usage);
    }
    let filtered = if pipeline.filter.is_some() { ", filtered" } else { "" };
    let events = pipeline.events.join(", ");
    if pipeline.handler == "push" {
        if let Some(url) = &pipeline.url {
            return Finding::ok(check, format!("pushes to {url}, events {events}{filtered}"));
        }
        let remedy = format!("set pipelines.{name}.url to the receiver's URL");
        return Finding::fail(check, "handler push without a url", remedy).exits(Exit::Usage);
    }
    if pipeline.handler != "log" {
        let found = format!("handler {} is not built in (log and push are)", pipeline.handler);
        return Finding::warn(
            check,
            found,
            "only a program that registers it can run this pipeline",
        );
    }
    Finding::ok(check, format!("handler {}, events {events}{filtered}", pipeline.handler))
}

async fn check_redis(config: &Config) -> Vec<Finding> {
    let redis = match Redis::open(config).await {
        Ok(redis) => redis,
        Err(error) => {
            let remedy = "do what it says, or set redis.url to a running Redis";
            let exit = error.exit();
            return vec![Finding::fail("redis", error.to_string(), remedy).exits(exit)];
        }
    };
    let findings = match redis.target() {
        Ok(target) => check_server(config, &Server::new(target, TIMEOUT)).await,
        Err(error) => {
            vec![Finding::fail("redis", error.to_string(), "correct redis.url").exits(Exit::Usage)]
        }
    };
    redis.close().await;
    findings
}

async fn check_server(config: &Config, server: &Server) -> Vec<Finding> {
    let info = match server.info().await {
        Ok(info) => info,
        Err(error) => return vec![refused("redis", &error)],
    };
    let uptime = duration(info.uptime_seconds * 1_000);
    let mut findings =
        vec![Finding::ok("redis", format!("answers at {}, up {uptime}", server.target()))];
    findings.push(check_version(&info));
    findings.push(check_role(&info));
    findings.push(check_eviction(&info));
    findings.push(check_durability(&info, server.setting("appendfsync").await));
    findings.push(match server.try_scripts().await {
        Ok(()) => Finding::ok("scripts", "may be loaded and run"),
        Err(error) => refused("scripts", &error),
    });
    findings.push(match server.try_keys().await {
        Ok(()) => Finding::ok("keys", "may be written under fl:"),
        Err(error) => refused("keys", &error),
    });
    findings.push(match server.time().await {
        Ok(time) => check_clock(SystemClock.now().abs_diff(time)),
        Err(error) => refused("clock", &error),
    });
    findings.push(match server.shards().await {
        Ok(stored) => {
            check_shards(config.redis.shards.get(), stored.map(crate::id::ShardCount::get))
        }
        Err(error) => refused("shards", &error),
    });
    for stream in &config.bus.streams {
        findings.push(check_stream(server, stream).await);
    }
    findings
}

fn refused(check: &str, error: &StoreError) -> Finding {
    let away = matches!(error, StoreError::Connect { .. } | StoreError::Unknown { .. });
    let remedy = match error {
        _ if away => {
            "start that Redis, or correct redis.url (FAIRLANE__REDIS__URL), its user and password"
        }
        StoreError::Refused { message, .. } if message.starts_with("NOPERM") => {
            "give this user the rights: ACL SETUSER … +@all ~fl:* ~fairlane:* &fl:*, and the bus streams"
        }
        StoreError::Refused { message, .. } if message.starts_with("OOM") => {
            "raise maxmemory, or let `fairlane serve` drain the queues"
        }
        StoreError::Refused { message, .. } if message.starts_with("READONLY") => {
            "set redis.url to the primary"
        }
        _ => "see the log of that Redis",
    };
    let exit = if away { Exit::Unavailable } else { Exit::Failed };
    Finding::fail(check, error.to_string(), remedy).exits(exit)
}

fn check_version(info: &ServerInfo) -> Finding {
    let found = info.version.clone();
    if info.version_numbers() >= OLDEST_VERSION {
        return Finding::ok("version", found);
    }
    Finding::fail("version", found, "install Redis 7.0 or newer, or Valkey")
}

fn check_role(info: &ServerInfo) -> Finding {
    if info.role == "master" {
        return Finding::ok("role", "master");
    }
    Finding::fail(
        "role",
        format!("{}: cannot be written to", info.role),
        "set redis.url to the primary",
    )
}

fn check_eviction(info: &ServerInfo) -> Finding {
    let remedy = "CONFIG SET maxmemory-policy noeviction, and in redis.conf";
    match (info.eviction.as_str(), info.memory_max) {
        ("noeviction", _) => Finding::ok("eviction", "noeviction"),
        (policy, 0) => {
            let finding = format!("{policy}: once maxmemory is set, events would be thrown away");
            Finding::warn("eviction", finding, remedy)
        }
        (policy, _) => {
            let finding = format!("{policy}: events are thrown away when memory is full");
            Finding::fail("eviction", finding, remedy)
        }
    }
}

fn check_durability(info: &ServerInfo, fsync: Result<Option<String>, StoreError>) -> Finding {
    const CHECK: &str = "durability";
    if !info.append_only {
        let finding = "appendonly is off: a restart of Redis loses events";
        return Finding::warn(CHECK, finding, "CONFIG SET appendonly yes, and in redis.conf");
    }
    if !info.append_ok {
        let finding = "the append-only file cannot be written, so Redis refuses events";
        return Finding::fail(CHECK, finding, "free space on its disk, and look into its log");
    }
    match fsync.ok().flatten().as_deref() {
        Some("always") => Finding::ok(CHECK, "appendfsync always: a power cut loses nothing"),
        Some("no") => Finding::warn(
            CHECK,
            "appendfsync no: a power cut may lose half a minute",
            "CONFIG SET appendfsync everysec, and in redis.conf",
        ),
        Some(fsync) => {
            Finding::ok(CHECK, format!("appendfsync {fsync}: a power cut loses up to 2 s"))
        }
        None => Finding::ok(CHECK, "appendonly is on; appendfsync may not be read"),
    }
}

fn check_clock(difference: Duration) -> Finding {
    let shown = format!("differs by {}", duration(millis(difference)));
    if difference <= CLOCK_TOLERANCE {
        return Finding::ok("clock", shown);
    }
    let remedy = "synchronise both machines (NTP): ages and delays are off by that much";
    Finding::warn("clock", shown, remedy)
}

fn check_shards(configured: u16, stored: Option<u16>) -> Finding {
    match stored {
        None => Finding::ok("shards", format!("{configured}; no data yet")),
        Some(stored) if stored == configured => Finding::ok("shards", stored.to_string()),
        Some(stored) => {
            let error = CliError::Shards { configured, stored };
            let remedy = format!("set redis.shards = {stored}");
            Finding::fail("shards", error.to_string(), remedy).exits(Exit::Usage)
        }
    }
}

async fn check_stream(server: &Server, stream: &str) -> Finding {
    let check = format!("bus {stream}");
    match server.stream(stream).await {
        Err(error) => refused(&check, &error),
        Ok(view) => match view.kind {
            StreamKind::Stream => Finding::ok(check, count(view.length, "event")),
            StreamKind::Absent => Finding::ok(check, "no event yet"),
            StreamKind::Other => Finding::fail(
                check,
                "the key holds something that is no stream",
                "rename that key, or set bus.streams",
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> ServerInfo {
        ServerInfo {
            version: "7.0.15".to_owned(),
            role: "master".to_owned(),
            uptime_seconds: 1,
            memory_used: 1,
            memory_max: 0,
            eviction: "noeviction".to_owned(),
            append_only: true,
            append_ok: true,
        }
    }

    #[test]
    fn a_server_that_may_lose_events_is_found_out() {
        let fsync = |text: &str| Ok(Some(text.to_owned()));
        let lru = ServerInfo { eviction: "allkeys-lru".to_owned(), ..info() };
        let cases = [
            (check_eviction(&info()), State::Ok),
            (check_eviction(&lru), State::Warn),
            (check_eviction(&ServerInfo { memory_max: 1, ..lru }), State::Fail),
            (check_durability(&info(), fsync("everysec")), State::Ok),
            (check_durability(&info(), fsync("no")), State::Warn),
            (check_durability(&info(), Ok(None)), State::Ok),
            (
                check_durability(&ServerInfo { append_only: false, ..info() }, fsync("always")),
                State::Warn,
            ),
            (
                check_durability(&ServerInfo { append_ok: false, ..info() }, fsync("always")),
                State::Fail,
            ),
            (check_version(&ServerInfo { version: "6.2.9".to_owned(), ..info() }), State::Fail),
            (check_version(&ServerInfo { version: "10.0.1".to_owned(), ..info() }), State::Ok),
            (check_role(&ServerInfo { role: "slave".to_owned(), ..info() }), State::Fail),
            (check_clock(Duration::from_millis(999)), State::Ok),
            (check_clock(Duration::from_millis(1_001)), State::Warn),
            (check_shards(16, None), State::Ok),
            (check_shards(16, Some(4)), State::Fail),
        ];
        for (finding, state) in cases {
            assert_eq!(finding.state, state, "{finding:?}");
            assert_eq!(finding.remedy.is_some(), state != State::Ok, "{finding:?}");
        }
    }
}
