//! Finds the problems in a status, each with its remedy.

use serde::Serialize;

use super::{PipelineState, PipelineStatus, Status};
use crate::cli::output::{self, count, duration};
use crate::id::{BotId, PipelineName};
use crate::queue::{Failing, Throttled};
use crate::redis::StreamKind;

/// Milliseconds. An oldest event above this age is reported as a problem.
const OLD_MS: u64 = 60_000;
/// Milliseconds. Views reach MongoDB within 3 s; a view above this age is reported as a problem.
const OLD_VIEWS_MS: u64 = 10_000;
/// Percent of the maximum memory from which memory in use is reported as a problem.
const MEMORY_PERCENT: u64 = 90;
/// Maximum number of bots that a problem names.
const NAMED: usize = 3;

/// A problem and its remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Problem {
    pub(super) problem: String,
    pub(super) remedy: String,
}

/// Finds problems. `now_ms` is Unix time in milliseconds.
pub(super) fn find_problems(status: &Status, now_ms: u64) -> Vec<Problem> {
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

/// Describes the bots of a pipeline whose calls all fail: since when, and why.
pub(super) fn fails(name: &PipelineName, failing: &Failing, now_ms: u64) -> String {
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
    let PipelineStatus { name, state, view, failing, throttled, pace } = pipeline;
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
    if let Some(Throttled { bots, bot, since_ms }) = throttled
        && now_ms.saturating_sub(*since_ms) > OLD_MS
    {
        let bot = output::argument(bot.as_str());
        add(
            format!(
                "in pipeline {name} the rate holds {} back; bot {bot} for {}",
                count(*bots, "bot"),
                duration(now_ms.saturating_sub(*since_ms)),
            ),
            format!(
                "this is as configured; see how much waits: fairlane bots show --pipeline {name} {bot}, and raise its rate: fairlane bots set --pipeline {name} {bot} --rate RATE"
            ),
        );
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
        // More workers do not help if no bot is ready.
        let remedy = if failing.is_some() {
            "its bots are in backoff after failures;"
        } else if throttled.is_some() && view.ready == 0 {
            "the rate of its bots holds them back;"
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
