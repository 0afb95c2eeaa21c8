//! Decides what is wrong, from facts alone.

use std::collections::BTreeSet;

use super::installation::{of_bus, of_processes, of_redis, unavailable};
use super::text::{argument, count, duration};
use super::{Code, Facts, Finding, PipelineFacts, PipelineState, Severity};
use crate::clock::millis;
use crate::id::{BotId, PipelineName};
use crate::presence::{Failures, Process, running};
use crate::queue::{Failing, PauseNote, Throttled};

/// Milliseconds. An oldest event above this age is a finding.
const OLD_MS: u64 = 60_000;
/// Milliseconds. A bot that its rate holds back for longer is a notice, and a warning above [`OLD_MS`].
const HELD_MS: u64 = 2_000;
/// Milliseconds. Views reach MongoDB within 3 s; a view above this age is a finding.
const OLD_VIEWS_MS: u64 = 10_000;
/// Milliseconds. The last failure of a pipeline may be as old as this.
const FAILED_MS: u64 = 60_000;
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
                found.push(unavailable(error, facts.redis.others_answer));
            }
            if facts.only_error().is_some() {
                return found;
            }
            of_redis(facts, &mut found);
            of_processes(facts, &mut found);
            of_bus(facts, &mut found);
            for pipeline in &facts.pipelines {
                of_pipeline(facts, pipeline, &mut found);
            }
            // Processes that run cannot register in the first case, so after a while they seem gone.
            if facts.redis.refuses_writes || !facts.knows_processes() {
                let needs_one =
                    [Code::NoProcess, Code::NoReader, Code::NoWorkers, Code::NotConfigured];
                found.retain(|finding| !needs_one.contains(&finding.code));
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

/// Describes the bots of a pipeline whose calls all fail: since when, and why.
pub(super) fn fails(name: &PipelineName, failing: &Failing, now_ms: u64) -> String {
    let Failing { bots, reason, time_ms, since_ms, .. } = failing;
    let mut who: Vec<String> = bots.iter().take(NAMED).map(ToString::to_string).collect();
    let more = bots.len().saturating_sub(NAMED) as u64;
    if more > 0 {
        who.push(format!("at least {}", count(more, "more bot")));
    }
    format!(
        "pipeline {name} fails for {} (first {} ago, last {} ago): {reason}",
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
    let processes = failures.iter().map(|(process, _)| process.at()).collect();
    let finding = if let Some(failing) = failing {
        let (problem, remedy) =
            (fails(name, failing, facts.now_ms), what_helps(name, &failing.bots[0]));
        Finding::new(code, problem, remedy).since(failing.since_ms).of_bots(&failing.bots)
    } else {
        let (_, last) = failures.iter().max_by_key(|(_, failures)| failures.time_ms)?;
        let since = failures.iter().map(|(_, failures)| failures.since_ms).min()?;
        let calls = failures.iter().map(|(_, failures)| failures.calls).sum();
        let problem = format!(
            "pipeline {name} fails: {} without a success (first {} ago, last {} ago): {}",
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
    let held_ms = now_ms.saturating_sub(*since_ms);
    if held_ms <= HELD_MS {
        return None;
    }
    let quoted = argument(bot.as_str());
    let mut finding = Finding::new(
        Code::BotsThrottled,
        format!(
            "in pipeline {name} the rate holds back {}; bot {quoted} for {}",
            count(*bots, "bot"),
            duration(held_ms),
        ),
        format!(
            "this is as configured; see how much waits: fairlane bots show --pipeline {name} {quoted}, and raise its rate: fairlane bots set --pipeline {name} {quoted} --rate RATE"
        ),
    );
    if held_ms <= OLD_MS {
        finding.severity = Severity::Notice;
    }
    Some(finding.since(*since_ms).in_pipeline(name).of_bots([bot]))
}

/// `note`: since when, by whom, and why, if that is known and the viewer may know it.
fn paused_finding(name: &PipelineName, note: Option<&PauseNote>, now_ms: u64) -> Finding {
    let how = note.map_or_else(|| "paused".to_owned(), |note| note.words(now_ms, duration));
    let (problem, remedy) =
        (format!("pipeline {name} is {how}"), format!("fairlane pipelines resume {name}"));
    let finding = Finding::new(Code::PipelinePaused, problem, remedy).in_pipeline(name);
    finding.since(note.map(|note| note.since_ms))
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
        // The reason may be about other bots.
        found.push(paused_finding(name, None, now_ms));
    }
    found.extend(dead_finding(pipeline, &covers, None, now_ms));
}

fn unconfigured_finding(facts: &Facts, name: &PipelineName) -> Finding {
    let problem = format!("pipeline {name} is in Redis but not in the configuration");
    let runners: Vec<_> = running(&facts.processes, name).map(Process::at).collect();
    if runners.is_empty() {
        let remedy =
            format!("configure [pipelines.{name}], or delete it: fairlane pipelines drop {name}");
        return Finding::new(Code::NotConfigured, problem, remedy);
    }
    // Another configuration has it, so its events are handled.
    let problem = format!("{problem}; it runs on {}", runners[0]);
    let remedy = "use the configuration of that process: --config FILE".to_owned();
    Finding::new(Code::NotConfigured, problem, remedy).of_processes(runners)
}

fn of_pipeline(facts: &Facts, pipeline: &PipelineFacts, found: &mut Vec<Finding>) {
    let PipelineFacts { name, state, view, failing, throttled, pace, .. } = pipeline;
    let now_ms = facts.now_ms;
    let mut add = |finding: Finding| found.push(finding.in_pipeline(name));
    if *state == PipelineState::Unconfigured {
        add(unconfigured_finding(facts, name));
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
        add(paused_finding(name, view.pause.as_ref(), now_ms));
    }
    dead_finding(pipeline, &|_| true, Some(view.dead), now_ms).into_iter().for_each(&mut add);
    if view.paused > 0 {
        add(Finding::new(
            Code::BotsPaused,
            format!("paused in pipeline {name}: {}", count(view.paused, "bot")),
            format!(
                "fairlane bots list --pipeline {name} --state paused, then fairlane bots resume BOT --pipeline {name}"
            ),
        ));
    }
    let waits = is_enabled && !view.stopped;
    let since = now_ms.saturating_sub(view.oldest_age_ms);
    // Events that wait for further ones are not late.
    let late_ms = view.oldest_age_ms.saturating_sub(millis(pipeline.linger));
    if waits && name.is(crate::counters::PIPELINE) && view.oldest_age_ms > OLD_VIEWS_MS {
        let finding = Finding::new(
            Code::ViewsLate,
            format!("views wait {} for MongoDB", duration(view.oldest_age_ms)),
            "nothing is lost; see whether MongoDB answers: fairlane check".to_owned(),
        );
        add(finding.since(since));
    } else if waits && late_ms > OLD_MS {
        // More workers do not help if no bot is ready.
        let remedy = if failing.is_some() {
            "its bots are in backoff after failures;"
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
