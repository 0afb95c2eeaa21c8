//! The page of a bot: its queues with their leases, its rules with their statistics, and one of its
//! subscribers.

mod chart;
mod content;
mod listing;
pub(super) mod rules;
mod settings;

use std::sync::Arc;

use axum::extract::{FromRequest as _, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Redirect, Response};
use futures_util::future::OptionFuture;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use reqwest::Url;
use serde::Deserialize;

use self::chart::{Flow, start_ms, starts};
use self::content::body;
pub(super) use self::content::state;
pub(super) use self::listing::ask;
use self::settings::Form;
use super::super::auth::Caller;
use super::super::automations::{Shown, shown};
use super::super::extract::{Path, Query};
use super::super::find::{veil, wait_for_attempts};
use super::super::large_reads::OneTurn;
use super::super::parameters::Parameters;
use super::super::problem::Problem;
use super::super::{Api, bots};
use super::{Refusal, reason, spoken};
use crate::automations::subscribers::Kept;
use crate::clock::millis;
use crate::condition::{Condition, Handled, Terms, Tone};
use crate::config::Scope;
use crate::counters::{self, Counters};
use crate::event::Glimpse;
use crate::history::Attempt;
use crate::id::{BotId, PipelineName};
use crate::pipeline::Protected;
use crate::presence::{self, Process};
use crate::queue::{BotView, DeadOfBot, Holdings, LaneAside, LastFailure};
use crate::rate::Weight;
use crate::redis::RedisError;

/// Number of pipelines that are looked at concurrently, each with up to four calls: together they use the
/// connections of the pool once.
const CONCURRENT: usize = 2;
/// Number of next events shown per queue.
const NEXT: usize = 5;
/// Number of attempts shown per queue.
const ATTEMPTS: usize = 10;
/// Maximum number and bytes of events shown of the lanes that are set aside.
const ASIDE: usize = 64;
const ASIDE_BYTES: usize = 64 << 10;

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
    /// Says that nothing is known of the bot.
    unseen: String,
    now_ms: u64,
    may_operate: bool,
    /// Whether the token sets weights and rates: it is for all bots.
    may_set: bool,
    /// Whether views are counted here.
    counts: bool,
    /// The requested subscriber, and its profile or the reason why it cannot be shown.
    subscriber: Option<Subscriber>,
}

type Subscriber = (String, Result<Kept, String>);

/// The queue of the bot in one pipeline.
struct OfBot {
    pipeline: PipelineName,
    look: BotView,
    /// The state in words.
    words: String,
    tone: Tone,
    flow: Flow,
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
    let automated = Box::pin(automated(api, bot, subscriber));
    let ((rules, subscriber), known) = tokio::join!(automated, in_pipelines(api, caller, bot));
    let (mut queues, mut unseen) = (Vec::new(), "Never seen".to_owned());
    for known in known? {
        match known {
            Known::Queue(queue) => queues.push(*queue),
            Known::Unseen(words) => unseen = words,
        }
    }
    let now = api.clock.now();
    Ok(View {
        bot: bot.clone(),
        rules,
        queues,
        unseen,
        now_ms: millis(now),
        may_operate: caller.check_scope(Scope::Operate).is_ok(),
        may_set: caller.check_scope(Scope::Operate).is_ok() && caller.check_all_bots().is_ok(),
        counts: api.services.of::<Counters>(counters::PIPELINE).is_ok(),
        subscriber,
    })
}

/// The rules, and the requested subscriber.
async fn automated(
    api: &Api,
    bot: &BotId,
    subscriber: &str,
) -> (Result<Vec<Shown>, String>, Option<Subscriber>) {
    let said = |problem: Problem| problem.detail().to_owned();
    let editor = match api.automations() {
        Ok(editor) => editor,
        Err(problem) => return (Err(said(problem)), None),
    };
    let known = async {
        let kept = editor.subscriber(bot, subscriber).await;
        (subscriber.to_owned(), kept.map_err(|error| said(error.into())))
    };
    let known = OptionFuture::from((!subscriber.is_empty()).then_some(known));
    let (rules, known) = tokio::join!(shown(editor, bot), known);
    (rules.map_err(said), known)
}

/// What the pipelines know of a bot. With a slow Redis, one after the other would take too long.
async fn in_pipelines(api: &Api, caller: &Caller, bot: &BotId) -> Result<Vec<Known>, Problem> {
    let (processes, names) =
        tokio::try_join!(presence::processes(api.queues.link()), api.queues.names())?;
    let with = &(processes, api.large_reads.once(caller));
    stream::iter(names)
        .map(|pipeline| async move {
            Box::pin(in_pipeline(api, caller, (bot, &pipeline), with)).await
        })
        .buffered(CONCURRENT)
        .try_collect()
        .await
}

/// What a pipeline knows of a bot.
enum Known {
    Queue(Box<OfBot>),
    /// Nothing, in words.
    Unseen(String),
}

async fn in_pipeline(
    api: &Api,
    caller: &Caller,
    (bot, pipeline): (&BotId, &PipelineName),
    (processes, turn): &(Vec<Process>, OneTurn<'_>),
) -> Result<Known, Problem> {
    let (queue, now) = (api.queues.of(pipeline), api.clock.now());
    wait_for_attempts(turn, &queue, bot).await?;
    let now_ms = millis(now);
    let looked = async {
        let look = queue.view_bot(bot, now).await?;
        let failure = queue.last_failure(&look).await?;
        Ok::<_, RedisError>((look, failure))
    };
    let attempted = async {
        let recent = queue.recent(bot, start_ms(now_ms)).await?;
        let attempts = match recent.attempts.get(..ATTEMPTS) {
            Some(last) => last.to_vec(),
            None => queue.attempts(bot, ATTEMPTS).await?,
        };
        Ok::<_, RedisError>((recent, attempts))
    };
    let ((mut look, failure), (recent, mut attempts), holds, stopped) =
        tokio::try_join!(looked, attempted, queue.holdings(bot), queue.is_stopped(bot))?;
    bots::veil(caller, &mut look);
    for attempt in &mut attempts {
        veil(caller, attempt);
    }
    let terms = Terms::of(api.queues.configured(pipeline), caller.check_all_bots().is_ok());
    let handled = presence::handler_of(processes, pipeline, bot).map(|(process, since_ms)| {
        // Machines are shown to tokens for all bots only.
        let host = if caller.covers_all() { process.host.as_str() } else { "process" };
        Handled { since_ms, process: (host, process.pid) }
    });
    let condition = Condition {
        look: &look,
        failure: failure.as_ref(),
        attempts: &attempts,
        holds: &holds,
        stopped,
        handled,
        terms: &terms,
    };
    let (words, tone) = (condition.words(now_ms, spoken), condition.tone());
    let is_set = look.weight != Weight::ONE || look.rate.is_some() || look.burst.is_some();
    if condition.is_unseen() && !is_set {
        return Ok(Known::Unseen(words));
    }
    if bots::reads_much(&holds) {
        turn.take_of_certain().await?;
    }
    // Lanes that are set aside are not in the order of arrival.
    let length = look.depth.saturating_sub(look.set_aside);
    let minutes = starts(now_ms);
    let (before, dead, lanes, next) = tokio::try_join!(
        queue.arrived_until(bot, &minutes, length),
        bots::dead_of(&queue, bot, &holds),
        async {
            match look.set_aside {
                0 => Ok(Vec::new()),
                _ => queue.lanes_aside(bot, ASIDE, ASIDE_BYTES).await,
            }
        },
        async {
            match look.depth {
                0 => Ok(Vec::new()),
                _ => queue.glimpse_events(bot, NEXT).await,
            }
        },
    )?;
    let flow = Flow::new(&recent, &before, length, now_ms);
    let (kept, quotas) = (queue.protected(), queue.quotas().of(bot).into());
    let pipeline = pipeline.clone();
    Ok(Known::Queue(Box::new(OfBot {
        pipeline,
        look,
        words,
        tone,
        flow,
        failure,
        dead,
        holds,
        quotas,
        attempts,
        next,
        lanes,
        kept,
    })))
}

/// The start of a long text.
fn short(text: &str) -> String {
    const CHARACTERS: usize = 120;
    let mut shown: String = text.chars().take(CHARACTERS).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
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

/// Sets what the form has. An empty field sets the bot back to what others have. A form with a wrong
/// field is shown again.
pub(super) async fn set(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
    request: Request,
) -> Result<Response, Refusal> {
    caller.check_all_bots()?;
    let queue = of.queue(&api, &caller).await?;
    let mut fields = Parameters::from_request(request, &()).await?;
    let mut take = |name| fields.take(name).unwrap_or_default();
    let (weight, rate, burst) = (take("weight"), take("rate"), take("burst"));
    let form = Form::new(weight, rate, burst);
    fields.done(&["weight", "rate", "burst"])?;
    let change = match form.change() {
        Ok(change) => change,
        Err(form) => {
            let title = format!("Limits of bot {}", of.bot);
            let content = form.page(&of.bot, &of.pipeline, caller.has_token());
            return Ok((StatusCode::BAD_REQUEST, super::page(&title, &content)).into_response());
        }
    };
    of.set(&api, &caller, &queue, change).await?;
    Ok(Redirect::to(&path(&of.bot)).into_response())
}

#[cfg(test)]
mod tests;
