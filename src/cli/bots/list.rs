//! `fairlane bots list`.

use clap::ValueEnum;
use serde::Serialize;

use super::super::error::CliError;
use super::super::output::{Output, Table, age, duration, number};
use super::super::session::Session;
use super::state;
use crate::clock::{Clock as _, SystemClock};
use crate::id::PipelineName;
use crate::queue::{BotFilter, BotOrder, BotState, ListedBot};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Sort {
    /// The longest queues first.
    #[default]
    Depth,
    /// The queues with the oldest first event first.
    Age,
}

/// The state of the bots to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum OnlyState {
    /// Waiting for a worker.
    Ready,
    /// Leased by a worker or a receiver.
    Leased,
    /// Waiting to retry, waiting to batch, or throttled by its rate.
    Parked,
    /// Paused by an operator.
    Paused,
}

impl OnlyState {
    pub(super) fn state(self) -> BotState {
        match self {
            Self::Ready => BotState::Ready,
            Self::Leased => BotState::Leased,
            Self::Parked => BotState::Parked,
            Self::Paused => BotState::Paused,
        }
    }
}

impl Sort {
    fn order(self) -> BotOrder {
        match self {
            Self::Depth => BotOrder::Depth,
            Self::Age => BotOrder::Age,
        }
    }
}

#[derive(Debug, Serialize)]
struct Listed {
    pipeline: PipelineName,
    #[serde(flatten)]
    bot: ListedBot,
}

pub(super) async fn list(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    sort: Sort,
    limit: u32,
    filter: BotFilter<'_>,
) -> Result<(), CliError> {
    let (limit, now) = (limit as usize, SystemClock.now());
    let mut found = Vec::new();
    for pipeline in session.pipelines_or(wanted).await? {
        let queue = session.view(&pipeline);
        let page = queue.list_some(sort.order(), None, limit, filter, now).await?;
        let bots = queue.explain(page.bots, now, duration).await?;
        found.extend(bots.into_iter().map(|bot| Listed { pipeline: pipeline.clone(), bot }));
    }
    found.sort_by_key(|Listed { bot: ListedBot { view, .. }, .. }| {
        std::cmp::Reverse(if sort == Sort::Age { view.oldest_age_ms } else { view.depth })
    });
    found.truncate(limit);
    let is_any = filter.state.is_none() && !filter.failing;
    output.show(&found, |found| {
        let mut table = Table::new(&[
            "BOT",
            "PIPELINE",
            "STATE",
            ">DEPTH",
            ">OLDEST",
            ">ATTEMPTS",
            ">WEIGHT",
            "REASON",
        ]);
        for Listed { pipeline, bot: ListedBot { view, reason, .. } } in found {
            table.row(&[
                view.bot.to_string(),
                pipeline.to_string(),
                state(view.state).to_owned(),
                number(view.depth),
                age(view.oldest_age_ms, view.depth > 0),
                number(view.attempts.into()),
                view.weight.to_string(),
                reason.clone().unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        match (table.is_empty(), is_any) {
            (false, _) => output.table(&table),
            (true, true) => "no bot has queued events".to_owned(),
            (true, false) => "no such bot".to_owned(),
        }
    })
}
