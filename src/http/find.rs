//! Where an event is, and the attempts of a bot.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::bots::BotPath;
use super::docs::{OfEvent, OfPipeline};
use super::extract::{Path, Query};
use super::large_reads::OneTurn;
use super::page::{Limit, fitting};
use super::problem::{Kind, Problem};
use crate::find::{Found, Places, Wanted, find};
use crate::history::Attempt;
use crate::id::BotId;
use crate::queue::Queue;

/// The search of the bus ends after this time.
const WITHIN: Duration = Duration::from_secs(5);
/// The same for tokens that are for certain bots: they must not keep Redis busy.
const WITHIN_OF_BOT: Duration = Duration::from_secs(1);
/// Maximum length of an id or a source, as for events.
const ID_MAX: usize = 1_024;

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(show)).routes(routes!(attempts))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct EventPath {
    /// The id of the event, percent-encoded.
    event: String,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FindQuery {
    /// The bot of the event. Required if the token is for certain bots only.
    #[param(value_type = Option<String>)]
    bot: Option<BotId>,
    /// The source of the event; without it, any source.
    #[param(min_length = 1, max_length = 1024)]
    source: Option<String>,
    /// Entries of the bus before this time are not read, ms since 1970.
    since_ms: Option<u64>,
}

/// Find an event
///
/// Its entry of the bus, and its state in each pipeline with the attempts at it that are kept. Reads the
/// bus from its end, for at most 5 s and 512 MiB, and 1 s for a token that is for certain
/// bots; `searched` says how far. The answer has status 404 if
/// nothing is known of the event.
#[utoipa::path(
    get, path = "/v1/events/{event}", tag = "events", operation_id = "findEvent",
    params(EventPath, FindQuery),
    responses(
        (status = 200, description = "The event", body = Found),
        OfEvent,
    )
)]
async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<EventPath>,
    Query(query): Query<FindQuery>,
) -> Result<Json<Found>, Problem> {
    let since = query.since_ms.map(Duration::from_millis);
    let wanted = Wanted { id: path.event, source: query.source, bot: query.bot, since };
    let found = search(&api, &caller, &wanted).await?;
    if found.known {
        return Ok(Json(found));
    }
    let now_ms = crate::clock::millis(api.clock.now());
    let looked = found.searched_words(now_ms, |ms| format!("{} s", ms / 1_000));
    let hint = if wanted.bot.is_some() { "" } else { "; name its bot to search its queues too" };
    let detail = format!("nothing is known of event {:?}; searched {looked}{hint}", wanted.id);
    Err(Problem::new(Kind::NoEvent, detail))
}

/// Finds an event for a caller.
pub(super) async fn search(api: &Api, caller: &Caller, wanted: &Wanted) -> Result<Found, Problem> {
    for (field, text) in [("event", Some(&wanted.id)), ("source", wanted.source.as_ref())] {
        let bad = text.is_some_and(|text| text.is_empty() || text.len() > ID_MAX);
        if bad {
            return Err(Problem::field(field, format!("write 1 to {ID_MAX} bytes")));
        }
    }
    match &wanted.bot {
        Some(bot) => caller.check_bot(bot)?,
        None if caller.check_all_bots().is_err() => {
            let detail = "the token is for certain bots: name the bot of the event";
            return Err(Problem::field("bot", detail));
        }
        None => {}
    }
    // A search reads much: one at a time, by turns over tokens.
    let _turn = api.searches.take(caller.name()).await?;
    let mut pipelines = Vec::new();
    for name in api.queues.names().await? {
        pipelines.push((api.queues.of(&name), api.queues.configured(&name).cloned()));
    }
    let places = Places {
        link: api.queues.link(),
        streams: &api.streams,
        pipelines,
        now: api.clock.now(),
        within: if caller.covers_all() { WITHIN } else { WITHIN_OF_BOT },
        sees_all: caller.covers_all(),
    };
    let mut found = find(&places, wanted).await?;
    for attempt in found.pipelines.iter_mut().flat_map(|of| &mut of.attempts) {
        veil(caller, attempt);
    }
    Ok(found)
}

/// Machines are shown to tokens for all bots only.
pub(super) fn veil(caller: &Caller, attempt: &mut Attempt) {
    if !caller.covers_all() {
        attempt.process.clear();
    }
}

/// Waits for the turn of the request if it looks for the attempts of a bot among many of other bots.
pub(super) async fn wait_for_attempts(
    turn: &OneTurn<'_>,
    queue: &Queue,
    bot: &BotId,
) -> Result<(), Problem> {
    if turn.is_for_certain() && queue.keeps_many_attempts(bot).await? {
        turn.take_of_certain().await?;
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AttemptsQuery {
    /// Maximum number of attempts: 1 to 1,000; default 100.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
}

/// The attempts of a bot.
#[derive(Debug, Serialize, ToSchema)]
struct Attempts {
    /// The newest first.
    attempts: Vec<Attempt>,
}

/// List the attempts of a bot
///
/// The last slices of the bot, as far as `history` keeps them: when, which events, how they ended, and
/// what the receiver answered. What ended in the last second may be missing.
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}/bots/{bot}/attempts", tag = "bots",
    operation_id = "listAttempts", params(BotPath, AttemptsQuery),
    responses((status = 200, description = "The attempts", body = Attempts), OfPipeline)
)]
async fn attempts(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<BotPath>,
    Query(query): Query<AttemptsQuery>,
) -> Result<Json<Attempts>, Problem> {
    let limit = Limit { default: 100, least: 1, most: 1_000 }.of(query.limit)?;
    caller.check_bot(&path.bot)?;
    let queue = api.queues.find(&path.pipeline).await?;
    let turn = api.large_reads.once(&caller);
    wait_for_attempts(&turn, &queue, &path.bot).await?;
    let mut found = queue.attempts(&path.bot, limit).await?;
    for attempt in &mut found {
        veil(&caller, attempt);
    }
    let (attempts, _) = fitting(found.into_iter());
    Ok(Json(Attempts { attempts }))
}
