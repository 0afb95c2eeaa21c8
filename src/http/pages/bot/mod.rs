//! The page of a bot: its queues with their leases, its rules with their statistics, and one of its
//! subscribers.

mod content;

use std::sync::Arc;

use axum::extract::{FromRequest as _, Request, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::html;
use reqwest::Url;
use serde::Deserialize;

pub(super) use self::content::state;
use self::content::{body, which};
use super::super::auth::Caller;
use super::super::automations::{Shown, shown};
use super::super::extract::{Path, Query};
use super::super::parameters::Parameters;
use super::super::problem::Problem;
use super::super::{Api, bots};
use super::overview::ranking;
use super::{Refusal, headline, reason};
use crate::automations::subscribers::Kept;
use crate::clock::millis;
use crate::config::Scope;
use crate::event::Glimpse;
use crate::history::Attempt;
use crate::id::{BotId, PipelineName};
use crate::pipeline::Protected;
use crate::queue::{BotChange, BotState, BotView, DeadOfBot, Holdings, LaneAside, LastFailure};
use crate::rate::{BURST_MAX, BotRate, LimitError, Weight};

/// Number of next events shown per queue.
const NEXT: usize = 5;
/// Number of attempts shown per queue.
const ATTEMPTS: usize = 10;
/// Maximum number and bytes of events shown of the lanes that are set aside.
const ASIDE: usize = 64;
const ASIDE_BYTES: usize = 64 << 10;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    /// The bot. A form may send an empty text.
    #[serde(default)]
    bot: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    #[serde(default)]
    subscriber: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct BotPath {
    bot: BotId,
}

/// The content of the page.
struct View {
    bot: BotId,
    /// The rules, or the reason why they cannot be shown.
    rules: Result<Vec<Shown>, String>,
    /// The queues with events, attempts, a state other than idle, dead letters, or settings for the
    /// bot.
    queues: Vec<OfBot>,
    now_ms: u64,
    may_operate: bool,
    /// Whether the token sets weights and rates: it is for all bots.
    may_set: bool,
    /// The requested subscriber, and its profile.
    subscriber: Option<(String, Option<Kept>)>,
}

/// The queue of the bot in one pipeline.
struct OfBot {
    pipeline: PipelineName,
    look: BotView,
    failure: Option<LastFailure>,
    dead: DeadOfBot,
    holds: Holdings,
    quotas: Holdings,
    /// Its last attempts, the newest first.
    attempts: Vec<Attempt>,
    /// The sequences of its next events, and the starts of these.
    next: Vec<(u64, Option<Glimpse>)>,
    /// Its lanes that are set aside.
    lanes: Vec<LaneAside>,
    kept: Option<Protected>,
}

/// Asks for a bot, and lists the bots with the longest queues.
pub(super) async fn ask(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    asked: Result<Query<Asked>, Problem>,
) -> Result<Response, Refusal> {
    let Query(Asked { bot }) = asked?;
    if !bot.is_empty() {
        let bot = BotId::parse(&bot).map_err(|error| Problem::field("bot", error.to_string()))?;
        return Ok(Redirect::to(&path(&bot)).into_response());
    }
    let looked_at = (Arc::clone(&api), caller.clone());
    let content = async |seen: Arc<(Arc<Api>, Caller)>| {
        let (api, caller) = &*seen;
        let overview = api.overview().await?;
        let busiest = api.busiest(caller, &overview).await?;
        Ok(html! {
            (headline("Bots", caller.has_token()))
            p { "Queues, rules and subscribers of a bot." }
            (which(None))
            section {
                h2 { "Bots with the longest queues" }
                (ranking(&busiest))
            }
        })
    };
    api.live.show((&caller, &headers), "Bots", looked_at, content).await
}

/// The path of the page of a bot.
pub(super) fn path(bot: &BotId) -> String {
    format!("/bots/{}", encoded(bot.as_str()))
}

/// Encodes a text for a path or query.
pub(super) fn encoded(text: &str) -> String {
    let mut url = Url::parse("http://fairlane/").ok();
    if let Some(mut segments) = url.as_mut().and_then(|url| url.path_segments_mut().ok()) {
        segments.push(text);
    }
    let path = url.as_ref().map(|url| url.path().trim_start_matches('/')).unwrap_or_default();
    path.replace('&', "%26").replace('+', "%2B")
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    Path(BotPath { bot }): Path<BotPath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    caller.check_bot(&bot)?;
    let Query(PageQuery { subscriber }) = wish?;
    let title = format!("Bot {bot}");
    let looked_at = (Arc::clone(&api), caller.clone(), bot, subscriber);
    let content = async |seen: Arc<(Arc<Api>, Caller, BotId, String)>| {
        let (api, caller, bot, subscriber) = &*seen;
        let view = look(api, caller, bot, subscriber).await?;
        Ok(body(&view, caller.has_token()))
    };
    api.live.show((&caller, &headers), &title, looked_at, content).await
}

async fn look(api: &Api, caller: &Caller, bot: &BotId, subscriber: &str) -> Result<View, Problem> {
    let (mut rules, mut known) = (Err("rules are not evaluated here".to_owned()), None);
    match api.automations() {
        Ok(editor) => {
            rules = shown(editor, bot).await.map_err(|problem| problem.detail().to_owned());
            if !subscriber.is_empty() {
                let kept = editor.subscriber(bot, subscriber).await?;
                known = Some((subscriber.to_owned(), Some(kept)));
            }
        }
        Err(problem) => rules = rules.map_err(|_| problem.detail().to_owned()),
    }
    let mut queues = Vec::new();
    let now = api.clock.now();
    for pipeline in api.queues.names().await? {
        let queue = api.queues.of(&pipeline);
        let look = queue.view_bot(bot, now).await?;
        let dead = queue.dead_of(bot).await?;
        let is_set = look.weight != Weight::ONE || look.rate.is_some() || look.burst.is_some();
        let attempts = queue.attempts(bot, ATTEMPTS).await?;
        if !attempts.is_empty()
            || look.depth > 0
            || look.state != BotState::Idle
            || dead.count > 0
            || is_set
        {
            let next = queue.glimpse_events(bot, NEXT).await?;
            let lanes = match look.set_aside {
                0 => Vec::new(),
                _ => queue.lanes_aside(bot, ASIDE, ASIDE_BYTES).await?,
            };
            let failure = queue.last_failure(&look).await?;
            let kept = queue.protected();
            let holds = queue.holdings(bot).await?;
            let quotas = queue.quotas().of(bot).into();
            queues.push(OfBot {
                pipeline,
                look,
                failure,
                dead,
                holds,
                quotas,
                attempts,
                next,
                lanes,
                kept,
            });
        }
    }
    Ok(View {
        bot: bot.clone(),
        rules,
        queues,
        now_ms: millis(now),
        may_operate: caller.check_scope(Scope::Operate).is_ok(),
        may_set: caller.check_scope(Scope::Operate).is_ok() && caller.check_all_bots().is_ok(),
        subscriber: known,
    })
}

pub(super) async fn pause(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    of.pause(&api, &caller, reason(fields)?.as_ref()).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

pub(super) async fn resume(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.resume(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

pub(super) async fn release(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.release(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

pub(super) async fn purge(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.purge(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

/// Sets what the form has. An empty field sets the bot back to what others have.
pub(super) async fn set(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
    request: Request,
) -> Result<Redirect, Refusal> {
    caller.check_all_bots()?;
    let change = change(Parameters::from_request(request, &()).await?)?;
    let queue = of.queue(&api, &caller).await?;
    of.set(&api, &caller, &queue, change).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

fn change(mut fields: Parameters) -> Result<BotChange, Problem> {
    let refused = |field: &str, text: &str, error: LimitError| {
        Problem::field(field, format!("it is {text:?}; {error}"))
    };
    let mut take = |field: &str| fields.take(field).map(|text| text.trim().to_owned());
    let weight = match take("weight") {
        None => Weight::ONE,
        Some(text) => text.parse().map_err(|error| refused("weight", &text, error))?,
    };
    let rate: Option<BotRate> = match take("rate") {
        None => None,
        Some(text) => Some(text.parse().map_err(|error| refused("rate", &text, error))?),
    };
    let burst: Option<u32> = match take("burst") {
        None => None,
        Some(text) => {
            let burst = text.parse().ok().filter(|burst| (1..=BURST_MAX).contains(burst));
            Some(burst.ok_or_else(|| refused("burst", &text, LimitError::Burst))?)
        }
    };
    fields.done(&["weight", "rate", "burst"])?;
    Ok(BotChange { weight: Some(weight), rate: rate.into(), burst: burst.into() })
}

#[cfg(test)]
mod tests;
