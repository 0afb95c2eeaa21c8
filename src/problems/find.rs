//! Decides what is wrong, from facts alone.

use std::collections::{BTreeMap, BTreeSet};

use super::text::{argument, count, duration};
use super::{Code, Facts, Finding, PipelineFacts, PipelineState, Severity};
use crate::id::{BotId, PipelineName};
use crate::presence::{Failures, Process};
use crate::queue::{Failing, Throttled};
use crate::redis::{ServerInfo, StreamKind, StreamView};

/// Milliseconds. An oldest event above this age is a finding.
const OLD_MS: u64 = 60_000;
/// Milliseconds. Views reach MongoDB within 3 s; a view above this age is a finding.
const OLD_VIEWS_MS: u64 = 10_000;
/// Percent of the maximum memory from which memory in use is a finding, and from which Redis
/// counts as full.
const MEMORY_PERCENT: u64 = 80;
const FULL_PERCENT: u64 = 99;
/// Milliseconds. Redis is slow if the best of a few round trips takes longer.
const SLOW_MS: u64 = 250;
/// Milliseconds. The last failure of a pipeline may be as old as this.
const FAILED_MS: u64 = 60_000;
/// Milliseconds. Entries that have waited on the bus for longer are a finding.
const LAG_MS: u64 = 10_000;
/// Milliseconds. A process that has just started does not read the bus yet.
const STARTING_MS: u64 = 5_000;
/// Milliseconds. Dead letters of this time count as new ones.
const NEW_MS: u64 = 15 * 60_000;
/// Maximum number of bots and processes that a finding names.
pub(super) const NAMED: usize = 3;

/// Who looks.
#[derive(Clone, Copy)]
pub(crate) enum Viewer<'a> {
    /// An operator of the installation.
    All,
    /// A token for certain bots: it sees only findings that concern them.
    Bots(&'a (dyn Fn(&BotId) -> bool + Sync)),
}

/// Finds what is wrong, the most urgent first.
pub(crate) fn find(facts: &Facts, viewer: Viewer<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    match viewer {
        Viewer::Bots(covers) => {
            for pipeline in &facts.pipelines {
                of_bots(pipeline, covers, facts.now_ms, &mut found);
            }
        }
        Viewer::All => {
            if let Some(error) = &facts.redis.error {
                found.push(unavailable(error));
                return found;
            }
            of_redis(facts, &mut found);
            of_processes(facts, &mut found);
            of_bus(facts, &mut found);
            for pipeline in &facts.pipelines {
                of_pipeline(facts, pipeline, &mut found);
            }
            if let [first, others @ ..] = &*facts.not_seen {
                let more = others.len() as u64;
                let more = if more > 0 {
                    format!(" and {}", count(more, "more part"))
                } else {
                    String::new()
                };
                found.push(Finding::new(
                    Code::NotSeen,
                    format!("could not look at {}{more}: {}", first.part, first.reason),
                    "ask again; if it stays: fairlane check".to_owned(),
                ));
            }
        }
    }
    found.sort_by_key(|finding| (finding.severity, finding.code));
    found
}

fn unavailable(error: &str) -> Finding {
    Finding::new(
        Code::RedisUnavailable,
        format!(
            "Redis does not answer, so nothing is accepted or handled; nothing is lost: {error}"
        ),
        "bring Redis back; the processes need no restart: fairlane check".to_owned(),
    )
}

fn of_redis(facts: &Facts, found: &mut Vec<Finding>) {
    let client = redis_cli(&facts.redis.target);
    let mut add = |code, problem: String, remedy: String| {
        found.push(Finding::new(code, problem, remedy));
    };
    if let Some(ms) = facts.redis.ping_ms
        && ms >= SLOW_MS
    {
        add(
            Code::RedisSlow,
            format!("Redis is slow: a round trip takes {}", duration(ms)),
            format!("look for slow commands and a slow network: {client} SLOWLOG GET 10"),
        );
    }
    let Some(info) = &facts.redis.info else { return };
    if info.eviction != "noeviction" {
        add(
            Code::RedisEvicts,
            format!("Redis may evict events: maxmemory-policy is {}", info.eviction),
            format!("{client} CONFIG SET maxmemory-policy noeviction"),
        );
    }
    if !info.append_only {
        add(
            Code::RedisForgets,
            "Redis loses events when it restarts: appendonly is off".to_owned(),
            format!("{client} CONFIG SET appendonly yes"),
        );
    }
    if !info.append_ok {
        add(
            Code::RedisDiskFull,
            "Redis cannot write its append-only file, and refuses events".to_owned(),
            "free space on its disk, and check its log".to_owned(),
        );
    }
    if info.role != "master" {
        add(
            Code::RedisReadOnly,
            format!("this Redis is a {}: nothing can be written", info.role),
            "set redis.url to the primary".to_owned(),
        );
    }
    let remedy = "raise maxmemory, or find the longest queues: fairlane bots list --sort depth";
    match percent_used(info) {
        FULL_PERCENT.. => add(
            Code::RedisFull,
            "Redis is full: it refuses new events, and the queues still drain".to_owned(),
            remedy.to_owned(),
        ),
        percent @ MEMORY_PERCENT.. => add(
            Code::RedisMemory,
            format!("Redis uses {percent} % of its maxmemory"),
            remedy.to_owned(),
        ),
        _ => {}
    }
}

/// Memory in use, in percent of the maximum; 0 without a maximum.
fn percent_used(info: &ServerInfo) -> u64 {
    let used = u128::from(info.memory_used) * 100;
    let percent = used.checked_div(u128::from(info.memory_max)).unwrap_or(0);
    u64::try_from(percent).unwrap_or(u64::MAX)
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

fn named(process: &Process) -> String {
    format!("{}:{}", process.host, process.pid)
}

/// A few names, and the number of the others.
fn some_of(names: &[String], thing: &str) -> String {
    let mut some: Vec<String> = names.iter().take(NAMED).cloned().collect();
    let more = names.len().saturating_sub(NAMED) as u64;
    if more > 0 {
        some.push(count(more, &format!("more {thing}")));
    }
    some.join(", ")
}

fn of_processes(facts: &Facts, found: &mut Vec<Finding>) {
    if facts.processes.is_empty() {
        if !facts.not_seen.iter().any(|part| part.part == "the processes") {
            found.push(Finding::new(
                Code::NoProcess,
                "no `fairlane serve` runs, so nothing is read, handled or sent".to_owned(),
                "fairlane serve".to_owned(),
            ));
        }
        return;
    }
    let without: Vec<String> = facts
        .processes
        .iter()
        .filter(|process| process.mongodb == Some(false))
        .map(named)
        .collect();
    if !without.is_empty() || facts.mongodb == Some(false) {
        let who = if without.is_empty() {
            "this process".to_owned()
        } else {
            some_of(&without, "machine")
        };
        found.push(
            Finding::new(
                Code::MongodbUnavailable,
                format!("MongoDB does not answer {who}: views and events for rules wait in Redis, and nothing is lost"),
                "bring MongoDB back; the processes need no restart: fairlane check".to_owned(),
            )
            .of_processes(without),
        );
    }
    let mut hosts: BTreeMap<&str, (u32, u64, Vec<String>)> = BTreeMap::new();
    for process in &facts.processes {
        for open in &process.breakers {
            let (failures, seconds, processes) =
                hosts.entry(&open.host).or_insert((0, u64::MAX, Vec::new()));
            *failures = open.failures.max(*failures);
            *seconds = open.seconds.min(*seconds);
            processes.push(named(process));
        }
    }
    for (host, (failures, seconds, processes)) in hosts {
        let failures = count(failures.into(), "consecutive failure");
        found.push(
            Finding::new(
                Code::HostUnavailable,
                format!(
                    "{host} fails: its circuit breaker is open after {failures}, and the next probe is in {}",
                    duration(seconds * 1_000)
                ),
                "repair that server; Fairlane sends again by itself, and drops nothing: fairlane dead list --pipeline notifications shows what expired".to_owned(),
            )
            .of_processes(processes),
        );
    }
    differing(facts, found);
}

/// Processes that copy one bus stream for different pipelines.
fn differing(facts: &Facts, found: &mut Vec<Finding>) {
    let off_bus: BTreeSet<&PipelineName> =
        facts.pipelines.iter().filter(|of| !of.takes_of_bus).map(|of| &of.name).collect();
    for stream in facts.streams.iter().map(|view| &view.stream) {
        let readers = facts.processes.iter().filter(|process| {
            process.streams.contains(stream) && process.roles.iter().any(|role| role == "ingest")
        });
        let mut sets: BTreeMap<BTreeSet<&PipelineName>, Vec<&Process>> = BTreeMap::new();
        for process in readers {
            let names = process.pipelines.keys().filter(|name| !off_bus.contains(name)).collect();
            sets.entry(names).or_default().push(process);
        }
        if sets.len() < 2 {
            continue;
        }
        let mut shown: Vec<String> = Vec::new();
        for (names, processes) in sets.iter().take(NAMED) {
            let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            shown.push(format!("{} has {names}", named(processes[0])));
        }
        let since = sets.values().flatten().map(|process| process.started_ms).max();
        let processes = sets.values().map(|processes| named(processes[0])).collect();
        found.push(
            Finding::new(
                Code::PipelinesDiffer,
                format!("processes that read {stream} have different pipelines, so some get no events: {}", shown.join("; ")),
                "give all processes that read one bus the same pipelines, and restart them: fairlane config".to_owned(),
            )
            .since(since)
            .of_processes(processes),
        );
    }
}

fn of_bus(facts: &Facts, found: &mut Vec<Finding>) {
    let is_taken =
        facts.pipelines.iter().any(|of| of.takes_of_bus && of.state != PipelineState::Disabled);
    for view in &facts.streams {
        if view.kind == StreamKind::Other {
            found.push(Finding::new(
                Code::NotAStream,
                format!("{} is no stream, so it cannot be the bus", view.stream),
                "rename that key, or set bus.streams".to_owned(),
            ));
        } else if is_taken && is_unread(facts, view) {
            let behind = view.unread.map_or_else(String::new, |unread| {
                format!(", and {} behind", is_are(unread, "entry", "entries"))
            });
            found.push(
                Finding::new(
                    Code::NoReader,
                    format!("no process reads {}{behind}", view.stream),
                    "start `fairlane serve` with the role ingest".to_owned(),
                )
                .since(view.unread_since_ms),
            );
        } else if let Some(since) = view.unread_since_ms
            && view.reader
            && facts.now_ms.saturating_sub(since) > LAG_MS
        {
            let unread = is_are(view.unread.unwrap_or(1), "entry", "entries");
            found.push(
                Finding::new(
                    Code::BusLag,
                    format!(
                        "{unread} of {} not copied yet, the first for {}",
                        view.stream,
                        duration(facts.now_ms.saturating_sub(since))
                    ),
                    "wait until they are copied; if the number grows, start more processes: fairlane serve".to_owned(),
                )
                .since(since),
            );
        }
    }
    if facts.invalid > 0 {
        let client = redis_cli(&facts.redis.target);
        found.push(Finding::new(
            Code::InvalidEntries,
            format!("put aside because it could not be read: {}", count(facts.invalid, "event")),
            format!("{client} XREVRANGE {} + - COUNT 10", facts.invalid_stream),
        ));
    }
}

fn is_are(number: u64, one: &str, many: &str) -> String {
    match number {
        1 => format!("1 {one} is"),
        number => format!("{} {many} are", super::text::number(number)),
    }
}

/// Whether entries of a stream wait and no process reads it.
fn is_unread(facts: &Facts, view: &StreamView) -> bool {
    if view.reader || view.unread.unwrap_or(view.length) == 0 {
        return false;
    }
    let mut readers = facts.processes.iter().filter(|process| {
        // A process of an earlier version does not tell its streams.
        let reads = process.streams.is_empty() || process.streams.contains(&view.stream);
        reads && process.roles.iter().any(|role| role == "ingest")
    });
    let starts = |process: &Process| facts.now_ms.saturating_sub(process.started_ms) < STARTING_MS;
    // Where no position was recorded, a new pipeline may start at the end.
    view.unread.is_some() && !readers.clone().any(starts)
        || view.unread.is_none() && readers.next().is_none()
}

/// Describes the bots of a pipeline whose calls all fail: since when, and why.
pub(super) fn fails(name: &PipelineName, failing: &Failing, now_ms: u64) -> String {
    let Failing { bots, reason, time_ms, since_ms, .. } = failing;
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
    let bot = argument(bot.as_str());
    format!(
        "repair the service that its handler calls; fairlane bots show --pipeline {name} {bot} shows its queued events, and fairlane bots release --pipeline {name} {bot} tries it immediately"
    )
}

/// The failures of a pipeline in all processes that have called its handler without success.
fn failures<'a>(facts: &'a Facts, name: &PipelineName) -> Vec<(&'a Process, &'a Failures)> {
    let of =
        facts.processes.iter().filter_map(|process| Some((process, process.failing.get(name)?)));
    of.filter(|(_, failures)| facts.now_ms.saturating_sub(failures.time_ms) < FAILED_MS).collect()
}

fn failing_finding(
    facts: &Facts,
    name: &PipelineName,
    failing: Option<&Failing>,
) -> Option<Finding> {
    let failures = failures(facts, name);
    let code = if failures.is_empty() { Code::BotsFail } else { Code::PipelineFails };
    let processes = failures.iter().map(|(process, _)| named(process)).collect();
    let finding = if let Some(failing) = failing {
        let (problem, remedy) =
            (fails(name, failing, facts.now_ms), what_helps(name, &failing.bots[0]));
        Finding::new(code, problem, remedy).since(failing.since_ms).of_bots(&failing.bots)
    } else {
        let (_, last) = failures.iter().max_by_key(|(_, failures)| failures.time_ms)?;
        let since = failures.iter().map(|(_, failures)| failures.since_ms).min()?;
        let calls = failures.iter().map(|(_, failures)| failures.calls).sum();
        let problem = format!(
            "pipeline {name} fails, {} without a success since {} ago; the last time {} ago: {}",
            count(calls, "call"),
            duration(facts.now_ms.saturating_sub(since)),
            duration(facts.now_ms.saturating_sub(last.time_ms)),
            last.reason,
        );
        let remedy = format!(
            "repair the service that its handler calls; fairlane dead list --pipeline {name} shows the events that are not tried again"
        );
        Finding::new(code, problem, remedy).since(since)
    };
    Some(finding.in_pipeline(name).of_processes(processes))
}

fn throttled_finding(name: &PipelineName, throttled: &Throttled, now_ms: u64) -> Option<Finding> {
    let Throttled { bots, bot, since_ms, .. } = throttled;
    if now_ms.saturating_sub(*since_ms) <= OLD_MS {
        return None;
    }
    let quoted = argument(bot.as_str());
    let finding = Finding::new(
        Code::BotsThrottled,
        format!(
            "in pipeline {name} the rate holds {} back; bot {quoted} for {}",
            count(*bots, "bot"),
            duration(now_ms.saturating_sub(*since_ms)),
        ),
        format!(
            "this is as configured; see how much waits: fairlane bots show --pipeline {name} {quoted}, and raise its rate: fairlane bots set --pipeline {name} {quoted} --rate RATE"
        ),
    );
    Some(finding.since(*since_ms).in_pipeline(name).of_bots([bot]))
}

fn paused_finding(name: &PipelineName) -> Finding {
    let (problem, remedy) =
        (format!("pipeline {name} is paused"), format!("fairlane pipelines resume {name}"));
    Finding::new(Code::PipelinePaused, problem, remedy).in_pipeline(name)
}

/// `known`: how many dead letters there are, if the viewer may know it.
fn dead_finding(
    pipeline: &PipelineFacts,
    wanted: &dyn Fn(&BotId) -> bool,
    known: Option<u64>,
    now_ms: u64,
) -> Option<Finding> {
    let name = &pipeline.name;
    let letters: Vec<_> = pipeline.letters.iter().filter(|(bot, _)| wanted(bot)).collect();
    let number = known.unwrap_or(letters.len() as u64);
    if number == 0 {
        return None;
    }
    let new = letters.iter().filter(|(_, letter)| now_ms.saturating_sub(letter.time_ms) < NEW_MS);
    let (new, newest) = (new.count(), letters.first());
    let newest = newest.map_or_else(String::new, |(bot, letter)| {
        let old = duration(now_ms.saturating_sub(letter.time_ms));
        format!("; the newest {old} ago of bot {}: {}", argument(bot.as_str()), letter.reason)
    });
    let mut finding = Finding::new(
        Code::DeadLetters,
        format!("pipeline {name} has {}{newest}", count(number, "dead letter")),
        format!("fairlane dead list --pipeline {name}"),
    )
    .in_pipeline(name);
    let bots: BTreeSet<&BotId> = letters.iter().map(|(bot, _)| bot).collect();
    finding = finding.of_bots(bots);
    // Old ones are only kept.
    if new == 0 {
        finding.severity = Severity::Notice;
    }
    Some(finding)
}

/// What concerns certain bots. The numbers of all bots together, and the machines, are not theirs
/// to know.
fn of_bots(
    pipeline: &PipelineFacts,
    covers: &(dyn Fn(&BotId) -> bool + Sync),
    now_ms: u64,
    found: &mut Vec<Finding>,
) {
    let name = &pipeline.name;
    if let Some(failing) = pipeline.failing.as_ref().and_then(|failing| failing.of(&covers)) {
        let (problem, remedy) = (fails(name, &failing, now_ms), what_helps(name, &failing.bots[0]));
        let finding = Finding::new(Code::BotsFail, problem, remedy).in_pipeline(name);
        found.push(finding.since(failing.since_ms).of_bots(&failing.bots));
    }
    let throttled = pipeline.throttled.as_ref().and_then(|throttled| throttled.of(&covers));
    found.extend(throttled.and_then(|throttled| throttled_finding(name, &throttled, now_ms)));
    if pipeline.view.stopped {
        found.push(paused_finding(name));
    }
    found.extend(dead_finding(pipeline, &covers, None, now_ms));
}

fn of_pipeline(facts: &Facts, pipeline: &PipelineFacts, found: &mut Vec<Finding>) {
    let PipelineFacts { name, state, view, failing, throttled, pace, .. } = pipeline;
    let now_ms = facts.now_ms;
    let mut add = |finding: Finding| found.push(finding.in_pipeline(name));
    if *state == PipelineState::Unconfigured {
        add(Finding::new(
            Code::NotConfigured,
            format!("pipeline {name} is in Redis but not in the configuration"),
            format!("configure [pipelines.{name}], or delete it: fairlane pipelines drop {name}"),
        ));
    }
    let is_enabled = *state == PipelineState::Enabled;
    if is_enabled && view.depth > 0 && pace.workers_max == 0 {
        let waiting = count(view.depth, "event");
        add(Finding::new(
            Code::NoWorkers,
            format!("pipeline {name} has {waiting} and no process that handles them"),
            "fairlane serve".to_owned(),
        ));
    }
    if let Some(finding) = failing_finding(facts, name, failing.as_ref()) {
        add(finding);
    }
    let slowed = throttled.as_ref().and_then(|all| throttled_finding(name, all, now_ms));
    slowed.into_iter().for_each(&mut add);
    if view.stopped {
        add(paused_finding(name));
    }
    dead_finding(pipeline, &|_| true, Some(view.dead), now_ms).into_iter().for_each(&mut add);
    if view.paused > 0 {
        add(Finding::new(
            Code::BotsPaused,
            format!("paused in pipeline {name}: {}", count(view.paused, "bot")),
            format!(
                "fairlane bots list --pipeline {name}, then fairlane bots resume BOT --pipeline {name}"
            ),
        ));
    }
    let waits = is_enabled && !view.stopped;
    let since = now_ms.saturating_sub(view.oldest_age_ms);
    if waits && name.is(crate::counters::PIPELINE) && view.oldest_age_ms > OLD_VIEWS_MS {
        let finding = Finding::new(
            Code::ViewsLate,
            format!("views wait {} for MongoDB", duration(view.oldest_age_ms)),
            "nothing is lost; see whether MongoDB answers: fairlane check".to_owned(),
        );
        add(finding.since(since));
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
        let late = duration(view.oldest_age_ms);
        let finding = Finding::new(
            Code::PipelineLate,
            format!("pipeline {name} is late: its oldest event waits {late}"),
            format!(
                "{remedy} list its bots by age: fairlane bots list --pipeline {name} --sort age"
            ),
        );
        add(finding.since(since));
    }
}
