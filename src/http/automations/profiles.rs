//! The profiles of subscribers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::{Body, OfAutomations};
use super::super::extract::{self, Path};
use super::super::problem::{Kind, Problem};
use crate::automations::profile::{Profile, REPLACED};
use crate::automations::subscribers::Kept;
use crate::clock::rfc3339;
use crate::event::{ATTRIBUTE_MAX_BYTES, Event};
use crate::id::BotId;
use crate::queue::{PushError, PushOptions};

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct SubscriberPath {
    /// The bot.
    bot: BotId,
    /// The subscriber: the `subject` of its events.
    #[param(min_length = 1, max_length = 1024)]
    subscriber: String,
}

impl SubscriberPath {
    fn check(&self) -> Result<(), Problem> {
        if self.subscriber.len() > ATTRIBUTE_MAX_BYTES {
            let bytes = self.subscriber.len();
            let detail = format!("it has {bytes} bytes; at most {ATTRIBUTE_MAX_BYTES} are allowed");
            return Err(Problem::field("subscriber", detail));
        }
        Ok(())
    }
}

/// The profile of a subscriber.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Subscriber)]
pub(super) struct Known {
    /// The subscriber.
    id: String,
    /// Its tags and fields.
    #[serde(flatten)]
    profile: Profile,
    /// When the last event arrived that changed the profile or made a rule act.
    #[schema(format = DateTime)]
    changed: String,
}

/// The event in the bot's queue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = QueuedProfile)]
pub(super) struct Queued {
    /// The id of the event that replaces the profile.
    event: String,
}

/// A subscriber
///
/// The profile as filters see it, built from the events of the bot. Queued events are not yet
/// included. A deleted profile is not found.
#[utoipa::path(
    get, path = "/v1/bots/{bot}/subscribers/{subscriber}", tag = "automations",
    operation_id = "getSubscriber", params(SubscriberPath),
    responses((status = 200, description = "The profile", body = Known), OfAutomations)
)]
pub(super) async fn get(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<SubscriberPath>,
) -> Result<Json<Known>, Problem> {
    path.check()?;
    let SubscriberPath { bot, subscriber } = path;
    let editor = api.automations_of(&bot, &caller)?;
    let Kept { sequence, profile, .. } = editor.subscriber(&bot, &subscriber).await?;
    let sequence = sequence.ok_or_else(|| {
        let detail = format!(
            "subscriber {subscriber:?} of bot {:?} has no profile: it was deleted, or never created. Profiles are kept from the bot's first rule on, and events may still be queued",
            bot.as_str()
        );
        Problem::new(Kind::NoSubscriber, detail)
    })?;
    let changed = rfc3339(sequence.get() / 1_000);
    Ok(Json(Known { id: subscriber, profile, changed }))
}

/// Set a subscriber
///
/// Replaces the whole profile; an empty one deletes it. The change goes through the queue of the bot as
/// the event `subscriber.replaced`, so it keeps its place among earlier and later events. If the queue is
/// full, the answer is 503, and nothing is changed.
#[utoipa::path(
    put, path = "/v1/bots/{bot}/subscribers/{subscriber}", tag = "automations",
    operation_id = "putSubscriber", params(SubscriberPath), request_body = Profile,
    responses((status = 202, description = "The change is queued", body = Queued), OfAutomations, Body)
)]
pub(super) async fn put(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<SubscriberPath>,
    extract::Json(profile): extract::Json<Profile>,
) -> Result<(StatusCode, Json<Queued>), Problem> {
    path.check()?;
    let SubscriberPath { bot, subscriber } = path;
    let editor = api.automations_of(&bot, &caller)?;
    profile.check().map_err(|(field, detail)| Problem::field(&field, detail))?;
    let unusable = |error: String| Problem::field("subscriber", error);
    let event = Event::builder(REPLACED, &bot).subject(subscriber);
    let event = event.data(&profile).map_err(|error| unusable(error.to_string()))?;
    let event = event.build().map_err(|error| unusable(error.to_string()))?;
    let id = event.id().to_owned();
    // As a dead letter, it would replace later profiles when it is redriven.
    let queue = editor.queue().dropping_new();
    let pushed = queue.push(&bot, &[event], PushOptions::default()).await;
    let pushed = pushed.map_err(|error| match error {
        PushError::Redis(error) => error.into(),
        error => unusable(error.to_string()),
    })?;
    if pushed.queued.appended == 0 {
        let detail = "nothing was changed: the queue of the bot is full (pipelines.automations.max_queue); retry later";
        return Err(Problem::new(Kind::Full, detail).retry_after(5));
    }
    Ok((StatusCode::ACCEPTED, Json(Queued { event: id })))
}
