//! What one reading found, as rows.

use std::collections::HashMap;

use crate::id::{BotId, PipelineName};
use crate::problems::{Facts, Finding, PipelineFacts, PipelineState, Severity, Viewer, find};
use crate::queue::{BotState, BotView};

/// What one reading found.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    /// When it was read, ms since 1970.
    pub(super) time_ms: u64,
    /// The Redis that was read.
    pub(super) target: String,
    pub(super) pipelines: Vec<PipelineRow>,
    pub(super) bots: Vec<BotRow>,
    pub(super) problems: Vec<Finding>,
    /// Pipelines that could not be looked at. Their rows stay as they were.
    pub(super) not_seen: Vec<PipelineName>,
}

/// A pipeline.
#[derive(Debug, Clone)]
pub(super) struct PipelineRow {
    pub(super) name: PipelineName,
    pub(super) state: PipelineState,
    /// An operator has paused it, also if this configuration lacks or disables it.
    pub(super) is_paused: bool,
    pub(super) depth: u64,
    pub(super) in_rate: f64,
    pub(super) out_rate: f64,
    pub(super) oldest_ms: u64,
    /// Number of bots that fail, among those that were checked.
    pub(super) failing: usize,
    /// The most urgent finding.
    pub(super) severity: Option<Severity>,
    /// It could not be read this time.
    pub(super) is_old: bool,
}

/// A bot in a pipeline.
#[derive(Debug, Clone)]
pub(super) struct BotRow {
    pub(super) pipeline: PipelineName,
    pub(super) bot: BotId,
    pub(super) state: BotState,
    pub(super) depth: u64,
    pub(super) oldest_ms: u64,
    /// Since when it fails, ms since 1970.
    pub(super) failing_since_ms: Option<u64>,
    /// Why it waits.
    pub(super) reason: String,
}

impl Snapshot {
    /// The rows of facts and of the bots that were read with them.
    pub(super) fn new(facts: &Facts, bots: Vec<(PipelineName, BotView)>) -> Self {
        let problems = find(facts, Viewer::All);
        let worst = |name: &PipelineName| {
            let of_it = problems.iter().filter(|found| found.pipeline.as_ref() == Some(name));
            of_it.map(|found| found.severity).min()
        };
        let row = |facts: &PipelineFacts| PipelineRow {
            name: facts.name.clone(),
            state: facts.state,
            is_paused: facts.view.stopped,
            depth: facts.view.depth,
            in_rate: facts.pace.queued_per_second,
            out_rate: facts.pace.settled_per_second,
            oldest_ms: facts.view.oldest_age_ms,
            failing: facts.failing.as_ref().map_or(0, |failing| failing.bots.len()),
            severity: worst(&facts.name),
            is_old: false,
        };
        let not_seen = facts
            .not_seen
            .iter()
            .filter_map(|part| PipelineName::parse(part.part.strip_prefix("pipeline ")?).ok());
        let failures = failures(&facts.pipelines);
        let bots = bots.into_iter().map(|(pipeline, view)| bot(&failures, pipeline, view));
        Self {
            time_ms: facts.now_ms,
            target: facts.redis.target.clone(),
            pipelines: facts.pipelines.iter().map(row).collect(),
            bots: bots.collect(),
            not_seen: not_seen.collect(),
            problems,
        }
    }
}

/// Since when a bot fails, and why.
type Failures<'a> = HashMap<(&'a PipelineName, &'a BotId), (u64, &'a str)>;

fn failures(pipelines: &[PipelineFacts]) -> Failures<'_> {
    let mut found = HashMap::new();
    for PipelineFacts { name, failing, .. } in pipelines {
        if let Some(failing) = failing {
            for (bot, last) in failing.bots.iter().zip(&failing.each) {
                found.insert((name, bot), (last.since_ms, last.reason.as_str()));
            }
        }
    }
    found
}

fn bot(failures: &Failures<'_>, pipeline: PipelineName, view: BotView) -> BotRow {
    let failure = failures.get(&(&pipeline, &view.bot)).copied();
    let reason = match (failure, view.state) {
        (Some((_, reason)), _) => reason.to_owned(),
        (None, BotState::Paused) => "paused by an operator".to_owned(),
        (None, _) if view.throttled_since_ms.is_some() => "its rate holds it back".to_owned(),
        (None, BotState::Parked) => "waits".to_owned(),
        (None, _) => String::new(),
    };
    BotRow {
        pipeline,
        bot: view.bot,
        state: view.state,
        depth: view.depth,
        oldest_ms: view.oldest_age_ms,
        failing_since_ms: failure.map(|(since_ms, _)| since_ms),
        reason,
    }
}
