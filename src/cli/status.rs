//! `fairlane status`.

use clap::Args;
use serde::Serialize;

use super::error::CliError;
use super::output::{self, Output, Table, Tone, age, bytes, count, duration, number};
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::presence::{self, Pace, Process};
use crate::queue::{Failing, PipelineView};
use crate::redis::{ServerInfo, StreamKind, StreamView};

/// Milliseconds. An oldest event above this age is reported as a problem.
const OLD_MS: u64 = 60_000;
/// Milliseconds. Views reach MongoDB within 3 s, so an older one is reported as a problem.
const OLD_VIEWS_MS: u64 = 10_000;
/// Percent of the maximum memory above which memory in use is reported as a problem.
const MEMORY_PERCENT: u64 = 90;
/// Maximum number of bots that a problem names.
const NAMED: usize = 3;

const EXAMPLES: &str = "\
Examples:
  fairlane status
  fairlane status --json | jq '.problems[].remedy'
  watch -n 2 fairlane status";

/// Arguments of `fairlane status`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct StatusArgs {
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
}

/// The complete report.
#[derive(Debug, Serialize)]
struct Status {
    redis: RedisStatus,
    streams: Vec<StreamView>,
    /// Bus entries that could not be read.
    invalid: u64,
    #[serde(skip)]
    invalid_stream: String,
    processes: Vec<Process>,
    pipelines: Vec<PipelineStatus>,
    problems: Vec<Problem>,
}

#[derive(Debug, Serialize)]
struct RedisStatus {
    target: String,
    #[serde(flatten)]
    info: ServerInfo,
}

/// A pipeline with its name.
#[derive(Debug, Clone, Serialize)]
pub(super) struct PipelineStatus {
    pub(super) name: PipelineName,
    pub(super) state: PipelineState,
    #[serde(flatten)]
    pub(super) view: PipelineView,
    /// Bots for which every call fails, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failing: Option<Failing>,
    /// Workers of all processes.
    #[serde(flatten)]
    pub(super) pace: Pace,
}

/// The state of a pipeline by configuration and operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PipelineState {
    Enabled,
    /// Paused by an operator.
    Paused,
    /// `enabled = false`.
    Disabled,
    /// Present in Redis, absent from the configuration.
    Unconfigured,
}

impl PipelineState {
    fn text(self) -> &'static str {
        match self {
            Self::Enabled => "enabled",
            Self::Paused => "paused",
            Self::Disabled => "disabled",
            Self::Unconfigured => "unconfigured",
        }
    }
}

/// A problem and its remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Problem {
    problem: String,
    remedy: String,
}

/// Shows the complete status on one screen.
pub(super) async fn status(config: Config, args: &StatusArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    Session::with(config, async |session| {
        let status = read(session).await?;
        output.show(&status, |status| screen(output, status))
    })
    .await
}

async fn read(session: &Session) -> Result<Status, CliError> {
    let target = session.server.target().to_string();
    let redis = RedisStatus { target, info: session.server.info().await? };
    let mut streams = Vec::new();
    for stream in &session.config.bus.streams {
        streams.push(session.server.stream(stream).await?);
    }
    let processes = session.processes().await?;
    let pipelines = read_pipelines(session, &processes).await?;
    let invalid = session.server.invalid_entries().await?;
    let (problems, invalid_stream) = (Vec::new(), session.config.redis.prefix.invalid_stream());
    let mut status =
        Status { redis, streams, invalid, invalid_stream, processes, pipelines, problems };
    status.problems = find_problems(&status, millis(SystemClock.now()));
    Ok(status)
}

/// Collects the views of all pipelines.
pub(super) async fn read_pipelines(
    session: &Session,
    processes: &[Process],
) -> Result<Vec<PipelineStatus>, CliError> {
    let names = session.pipelines().await?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let queue = session.view(&name);
        let view = queue.view(SystemClock.now()).await?;
        let failing = if view.depth > 0 { queue.failing().await? } else { None };
        let state = match session.config.pipelines.get(&name) {
            None => PipelineState::Unconfigured,
            Some(config) if !config.enabled => PipelineState::Disabled,
            Some(_) if view.stopped => PipelineState::Paused,
            Some(_) => PipelineState::Enabled,
        };
        let pace = presence::pace(processes, &name);
        found.push(PipelineStatus { name, state, view, failing, pace });
    }
    Ok(found)
}

/// Pipelines as a table.
pub(super) fn pipeline_table(pipelines: &[PipelineStatus]) -> Table {
    let mut table = Table::new(&[
        "PIPELINE", "STATE", ">DEPTH", ">READY", ">LEASED", ">PARKED", ">PAUSED", ">DELAYED",
        ">DEAD", ">OLDEST", ">IN/S", ">OUT/S", ">WORKERS",
    ]);
    for PipelineStatus { name, state, view, pace, .. } in pipelines {
        table.row(&[
            name.to_string(),
            state.text().to_owned(),
            number(view.depth),
            number(view.ready),
            number(view.leased),
            number(view.parked),
            number(view.paused),
            number(view.delayed),
            number(view.dead),
            age(view.oldest_age_ms, view.oldest_age_ms > 0),
            rate(pace.queued_per_second),
            rate(pace.settled_per_second),
            format!("{}/{}", pace.workers_busy, pace.workers_max),
        ]);
    }
    table
}

/// Processes as a table.
fn process_table(processes: &[Process], now_ms: u64) -> Table {
    let mut table = Table::new(&["PROCESS", "VERSION", "ROLES", ">UP", ">WORKERS"]);
    for process in processes {
        let sum = |count: fn(&Pace) -> usize| process.pipelines.values().map(count).sum::<usize>();
        table.row(&[
            format!("{}:{}", process.host, process.pid),
            process.version.clone(),
            process.roles.join(","),
            duration(now_ms.saturating_sub(process.started_ms)),
            format!("{}/{}", sum(|pace| pace.workers_busy), sum(|pace| pace.workers_max)),
        ]);
    }
    table
}

/// Whole numbers above ten, where fractions are noise.
fn rate(per_second: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate, rounded")]
    if per_second >= 10.0 { number(per_second.round() as u64) } else { format!("{per_second:.1}") }
}

fn screen(output: Output, status: &Status) -> String {
    let info = &status.redis.info;
    let max = match info.memory_max {
        0 => "no maxmemory".to_owned(),
        max => format!("of {}", bytes(max)),
    };
    let mut text = format!(
        "{} {} at {}\nup {}, memory {} ({max}, {}), AOF {}\n\n",
        output.paint(Tone::Strong, "Redis"),
        info.version,
        status.redis.target,
        duration(info.uptime_seconds * 1_000),
        bytes(info.memory_used),
        info.eviction,
        if info.append_only { "on" } else { "off" },
    );
    text.push_str(&output.table(&stream_table(&status.streams)));
    text.push_str("\n\n");
    if status.processes.is_empty() {
        text.push_str("no processes");
    } else {
        let now_ms = millis(SystemClock.now());
        text.push_str(&output.table(&process_table(&status.processes, now_ms)));
    }
    text.push_str("\n\n");
    if status.pipelines.is_empty() {
        text.push_str("no pipelines");
    } else {
        text.push_str(&output.table(&pipeline_table(&status.pipelines)));
    }
    text.push_str("\n\n");
    if status.problems.is_empty() {
        text.push_str(&output.paint(Tone::Good, "nothing is wrong"));
    }
    for (at, Problem { problem, remedy }) in status.problems.iter().enumerate() {
        text.push_str(if at > 0 { "\n" } else { "" });
        text.push_str(&output.paint(Tone::Warning, "!"));
        text.extend([" ", &output::plain(problem), "\n    ", &output::plain(remedy)]);
    }
    text
}

fn stream_table(streams: &[StreamView]) -> Table {
    let mut table = Table::new(&["BUS STREAM", ">LENGTH", ">UNREAD", "READER", "GROUPS"]);
    for view in streams {
        let groups: Vec<_> = view
            .groups
            .iter()
            .map(|group| {
                let lag = group.lag.map_or_else(|| "?".to_owned(), number);
                format!("{} (lag {lag}, pending {})", group.name, number(group.pending))
            })
            .collect();
        table.row(&[
            view.stream.clone(),
            match view.kind {
                StreamKind::Absent => "none yet".to_owned(),
                StreamKind::Stream => number(view.length),
                StreamKind::Other => "no stream".to_owned(),
            },
            view.unread.map_or_else(|| "-".to_owned(), number),
            if view.reader { "yes" } else { "no" }.to_owned(),
            if groups.is_empty() { "-".to_owned() } else { groups.join(", ") },
        ]);
    }
    table
}

/// Finds problems. `now_ms` is Unix time in milliseconds.
fn find_problems(status: &Status, now_ms: u64) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut add = |problem: String, remedy: String| problems.push(Problem { problem, remedy });
    let (info, client) = (&status.redis.info, redis_cli(&status.redis.target));
    if info.eviction != "noeviction" {
        add(
            format!("Redis may evict events: maxmemory-policy is {}", info.eviction),
            format!("{client} CONFIG SET maxmemory-policy noeviction"),
        );
    }
    if !info.append_only {
        add(
            "Redis loses events when it restarts: appendonly is off".to_owned(),
            format!("{client} CONFIG SET appendonly yes"),
        );
    }
    if !info.append_ok {
        add(
            "Redis cannot write its append-only file, and refuses events".to_owned(),
            "free space on its disk, and check its log".to_owned(),
        );
    }
    if info.role != "master" {
        add(
            format!("this Redis is a {}: nothing can be written", info.role),
            "set redis.url to the primary".to_owned(),
        );
    }
    if info.memory_max > 0 && info.memory_used / (info.memory_max / 100).max(1) >= MEMORY_PERCENT {
        add(
            format!("Redis uses more than {MEMORY_PERCENT} % of its maxmemory"),
            "raise maxmemory, or find the longest queues: fairlane bots list --sort depth"
                .to_owned(),
        );
    }
    if status.processes.is_empty() {
        add(
            "no `fairlane serve` runs, so nothing is read, handled or sent".to_owned(),
            "fairlane serve".to_owned(),
        );
    }
    for view in &status.streams {
        if view.kind == StreamKind::Other {
            add(
                format!("{} is no stream, so it cannot be the bus", view.stream),
                "rename that key, or set bus.streams".to_owned(),
            );
        } else if !view.reader && view.unread.unwrap_or(view.length) > 0 {
            add(
                format!("no process reads {}", view.stream),
                "start `fairlane serve` with the role ingest".to_owned(),
            );
        }
    }
    if status.invalid > 0 {
        add(
            format!("put aside because it could not be read: {}", count(status.invalid, "event")),
            format!("{client} XREVRANGE {} + - COUNT 10", status.invalid_stream),
        );
    }
    for pipeline in &status.pipelines {
        pipeline_problems(pipeline, now_ms, &mut add);
    }
    problems
}

/// The `redis-cli` command for this Redis.
fn redis_cli(target: &str) -> String {
    // For a cluster: its first node.
    let (first, cluster) = target.split_once(',').map_or((target, ""), |(first, _)| (first, " -c"));
    match first.rsplit_once(':') {
        _ if target.starts_with('/') => format!("redis-cli -s {target}"),
        Some((host, port)) => format!("redis-cli{cluster} -h {host} -p {port}"),
        None => "redis-cli".to_owned(),
    }
}

/// Describes bots of a pipeline for which every call fails: since when, and why.
fn fails(name: &PipelineName, failing: &Failing, now_ms: u64) -> String {
    let Failing { bots, reason, time_ms, since_ms } = failing;
    let mut who: Vec<String> = bots.iter().take(NAMED).map(ToString::to_string).collect();
    let more = bots.len().saturating_sub(NAMED) as u64;
    if more > 0 {
        who.push(format!("at least {}", count(more, "more bot")));
    }
    format!(
        "pipeline {name} fails for {}, since {} ago; the last time {} ago: {reason}",
        who.join(", "),
        duration(now_ms.saturating_sub(*since_ms)),
        duration(now_ms.saturating_sub(*time_ms)),
    )
}

fn what_helps(name: &PipelineName, bot: &BotId) -> String {
    let bot = output::argument(bot.as_str());
    format!(
        "repair the service that its handler calls; fairlane bots show --pipeline {name} {bot} shows its queued events, and fairlane bots release --pipeline {name} {bot} tries it immediately"
    )
}

fn pipeline_problems(pipeline: &PipelineStatus, now_ms: u64, add: &mut impl FnMut(String, String)) {
    let PipelineStatus { name, state, view, failing, pace } = pipeline;
    if *state == PipelineState::Unconfigured {
        add(
            format!("pipeline {name} is in Redis but not in the configuration"),
            format!("configure [pipelines.{name}], or delete it: fairlane pipelines drop {name}"),
        );
    }
    if *state == PipelineState::Enabled && view.depth > 0 && pace.workers_max == 0 {
        add(
            format!(
                "pipeline {name} has {} and no process that handles them",
                count(view.depth, "event")
            ),
            "fairlane serve".to_owned(),
        );
    }
    if let Some(failing) = failing {
        add(fails(name, failing, now_ms), what_helps(name, &failing.bots[0]));
    }
    if view.stopped {
        add(format!("pipeline {name} is paused"), format!("fairlane pipelines resume {name}"));
    }
    if view.dead > 0 {
        add(
            format!("pipeline {name} has {}", count(view.dead, "dead letter")),
            format!("fairlane dead list --pipeline {name}"),
        );
    }
    if view.paused > 0 {
        add(
            format!("paused in pipeline {name}: {}", count(view.paused, "bot")),
            format!(
                "fairlane bots list --pipeline {name}, then fairlane bots resume BOT --pipeline {name}"
            ),
        );
    }
    let waits = matches!(state, PipelineState::Enabled) && !view.stopped;
    if waits && name.is(crate::counters::PIPELINE) && view.oldest_age_ms > OLD_VIEWS_MS {
        add(
            format!("views wait {} for MongoDB", duration(view.oldest_age_ms)),
            "nothing is lost; see whether MongoDB answers: fairlane check".to_owned(),
        );
    } else if waits && view.oldest_age_ms > OLD_MS {
        // Idle workers mean that more workers would not help.
        let remedy = if failing.is_some() {
            "its bots are in backoff after failures;"
        } else if view.ready == 0 && view.parked > 0 {
            "its bots are parked, after failures or because the handler asked to wait;"
        } else {
            "start more `fairlane serve --roles work`, or"
        };
        add(
            format!(
                "pipeline {name} is late: its oldest event waits {}",
                duration(view.oldest_age_ms)
            ),
            format!(
                "{remedy} list its bots by age: fairlane bots list --pipeline {name} --sort age"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn healthy() -> Status {
        Status {
            redis: RedisStatus {
                target: "redis.sock".to_owned(),
                info: ServerInfo {
                    version: "7.0.15".to_owned(),
                    role: "master".to_owned(),
                    uptime_seconds: 3_600,
                    memory_used: 1 << 20,
                    memory_max: 1 << 30,
                    eviction: "noeviction".to_owned(),
                    clients: 1,
                    clients_max: 10_000,
                    append_only: true,
                    append_ok: true,
                },
            },
            streams: vec![StreamView {
                stream: "fairlane:events".to_owned(),
                kind: StreamKind::Stream,
                length: 10,
                unread: Some(0),
                reader: false,
                groups: Vec::new(),
            }],
            invalid: 0,
            invalid_stream: "fairlane:invalid".to_owned(),
            processes: vec![Process {
                id: "a".to_owned(),
                host: "here".to_owned(),
                pid: 1,
                version: "1".to_owned(),
                roles: vec!["work".to_owned()],
                started_ms: 0,
                pipelines: BTreeMap::new(),
                breakers: Vec::new(),
            }],
            pipelines: vec![PipelineStatus {
                name: PipelineName::parse("log").unwrap(),
                state: PipelineState::Enabled,
                view: PipelineView::default(),
                failing: None,
                pace: Pace::default(),
            }],
            problems: Vec::new(),
        }
    }

    #[test]
    fn nothing_is_wrong_with_a_healthy_installation() {
        assert_eq!(find_problems(&healthy(), 0), []);
        let text = screen(Output::new(false), &healthy());
        assert!(text.ends_with("nothing is wrong"), "{text}");
    }

    #[test]
    fn each_problem_names_the_remedy() {
        type Harm = fn(&mut Status);
        let cases: [(Harm, &str); 16] = [
            (|s| s.redis.info.eviction = "allkeys-lru".to_owned(), "maxmemory-policy noeviction"),
            (|s| s.redis.info.append_only = false, "CONFIG SET appendonly yes"),
            (|s| s.redis.info.append_ok = false, "its disk"),
            (|s| s.redis.info.role = "slave".to_owned(), "primary"),
            (|s| s.redis.info.memory_used = 1 << 30, "raise maxmemory"),
            (|s| s.processes.clear(), "fairlane serve"),
            (|s| s.streams[0].kind = StreamKind::Other, "bus.streams"),
            (|s| s.streams[0].unread = Some(1), "role ingest"),
            (|s| s.invalid = 1, "XREVRANGE fairlane:invalid"),
            (|s| s.pipelines[0].view.dead = 1, "fairlane dead list --pipeline log"),
            (|s| s.pipelines[0].view.stopped = true, "fairlane pipelines resume log"),
            (|s| s.pipelines[0].view.paused = 1, "fairlane bots list --pipeline log"),
            (|s| s.pipelines[0].view.oldest_age_ms = 60_001, "start more `fairlane serve"),
            (
                |s| {
                    let view = &mut s.pipelines[0].view;
                    (view.oldest_age_ms, view.ready, view.parked) = (60_001, 0, 1);
                },
                "its bots are parked, after failures or because the handler asked to wait; list its bots by age: fairlane bots list",
            ),
            (
                |s| {
                    s.pipelines[0].failing = Some(Failing {
                        bots: vec![BotId::parse("it's").unwrap()],
                        reason: "no".to_owned(),
                        time_ms: 90_000,
                        since_ms: 40_000,
                    });
                },
                r"fairlane bots show --pipeline log 'it'\''s' shows",
            ),
            (|s| s.pipelines[0].state = PipelineState::Unconfigured, "fairlane pipelines drop log"),
        ];
        for (harm, remedy) in cases {
            let mut status = healthy();
            harm(&mut status);
            let problems = find_problems(&status, 100_000);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].remedy.contains(remedy), "{problems:?}");
        }
    }

    #[test]
    fn a_pipeline_that_fails_is_told_with_its_bots_the_time_and_the_reason() {
        let bots = ["a", "b", "c", "d", "e"].map(|bot| BotId::parse(bot).unwrap()).to_vec();
        let (reason, now_ms) = ("HTTP 500".to_owned(), 100_000);
        let mut failing = Failing { bots, reason, time_ms: 90_000, since_ms: 35_000 };
        let name = PipelineName::parse("log").unwrap();
        assert_eq!(
            fails(&name, &failing, now_ms),
            "pipeline log fails for a, b, c, at least 2 more bots, since 1m 5s ago; the last time 10s ago: HTTP 500"
        );
        failing.bots.truncate(1);
        assert!(fails(&name, &failing, now_ms).starts_with("pipeline log fails for a, since"));
    }
}
