//! `fairlane bots show`.

use serde::Serialize;

use super::super::error::CliError;
use super::super::output::{Output, Table, Tone, age, duration, number, plain};
use super::super::session::Session;
use super::{condition, held, limits, set_aside, state};
use crate::clock::{Clock as _, SystemClock, micros, millis};
use crate::id::{BotId, PipelineName};
use crate::queue::{
    BotView, DeadOfBot, Holdings, LaneAside, LastFailure, Queue, QueuedEvent, memory,
};

#[derive(Debug, Serialize)]
struct Shown {
    pipeline: PipelineName,
    #[serde(flatten)]
    view: BotView,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<LastFailure>,
    holds: Holdings,
    quotas: Holdings,
    dead_letters: DeadOfBot,
    next: Vec<QueuedEvent>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lanes_aside: Vec<LaneAside>,
    /// Nothing is known of the bot; bots with a name like that.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown: Option<Unknown>,
}

#[derive(Debug, Serialize)]
struct Unknown {
    near: Vec<BotId>,
}

pub(super) async fn show(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    bot: &BotId,
    limit: u32,
) -> Result<(), CliError> {
    let pipeline = session.choose(wanted).await?;
    let (queue, now) = (session.view(&pipeline), SystemClock.now());
    let view = queue.view_bot(bot, now).await?;
    let next = queue.next_events(bot, limit as usize).await?;
    let lanes_aside = queue.lanes_aside(bot, limit as usize, Queue::ASIDE_BYTES).await?;
    let last_failure = queue.last_failure(&view).await?;
    let dead_letters = queue.dead_of(bot).await?;
    let holds = queue.holdings(bot).await?;
    let unknown = if queue.is_unknown(&view, &dead_letters, &holds).await? {
        Some(Unknown { near: queue.bots_like(bot, &|_| true).await? })
    } else {
        None
    };
    memory::observe(queue.link(), queue.quotas()).await?;
    let quotas = queue.quotas().of(bot).into();
    let words =
        condition::words(session, &queue, &view, (last_failure.as_ref(), &holds), now).await?;
    let shown = Shown {
        pipeline,
        view,
        last_failure,
        holds,
        quotas,
        dead_letters,
        next,
        lanes_aside,
        unknown,
    };
    output.show(&shown, |shown| {
        let Shown { pipeline, view, last_failure, holds, quotas, dead_letters, .. } = shown;
        let Shown { next, lanes_aside, unknown, .. } = shown;
        if let Some(Unknown { near }) = unknown {
            return unknown_text(bot, pipeline, near);
        }
        let until = view.until_ms.map_or_else(String::new, |until| {
            format!(", {} left", duration(until.saturating_sub(millis(now))))
        });
        let mut text = format!(
            "{} in pipeline {pipeline}\n{words}\nstate     {}{until}\ndepth     {}\noldest    {}\nfence     {}\nattempts  {}\nweight    {}",
            output.paint(Tone::Strong, view.bot.as_str()),
            state(view.state),
            number(view.depth),
            age(view.oldest_age_ms, view.depth > 0),
            view.fence.map_or_else(|| "-".to_owned(), |fence| fence.to_string()),
            number(view.attempts.into()),
            view.weight,
        );
        if view.rate.is_some() || view.burst.is_some() {
            text.extend(["\nlimits    ", &limits(view)]);
        }
        if let Some(since) = view.throttled_since_ms {
            let ago = duration(millis(now).saturating_sub(since));
            text.extend(["\nthrottled for ", &ago, ": its rate holds it back"]);
        }
        if let Some(LastFailure { reason, time_ms, since_ms }) = last_failure {
            let ago = |ms: u64| duration(millis(now).saturating_sub(ms));
            text.extend(["\nfailed    ", &ago(*time_ms), " ago: ", &plain(reason)]);
            text.extend(["\nfailing   since ", &ago(*since_ms), " ago"]);
        }
        text.push_str(&held::quotas(holds, quotas));
        text.push_str(&held::dead(dead_letters, holds, (pipeline, &view.bot), millis(now)));
        if !next.is_empty() {
            let mut table = Table::new(&["NEXT EVENT", "TYPE", ">AGE"]);
            for QueuedEvent { sequence, event } in next {
                let (id, kind) = event.as_ref().map_or(("(not readable)", "-"), |e| (e.id(), e.kind()));
                let old = micros(now).saturating_sub(*sequence) / 1_000;
                table.row(&[id.to_owned(), kind.to_owned(), duration(old)]);
            }
            text.push_str("\n\n");
            text.push_str(&output.table(&table));
        }
        text.push_str(&set_aside::text(lanes_aside, output, now));
        text
    })
}

/// What is shown of a bot that a pipeline does not know.
fn unknown_text(bot: &BotId, pipeline: &PipelineName, near: &[BotId]) -> String {
    let near: Vec<String> = near.iter().map(|bot| plain(bot.as_str())).collect();
    let hint = match near.as_slice() {
        [] => String::new(),
        near => format!("; did you mean {}?", near.join(" or ")),
    };
    format!(
        "bot {} was never seen in pipeline {pipeline}, or left nothing there{hint}",
        plain(bot.as_str())
    )
}
