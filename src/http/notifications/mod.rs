//! Delayed notifications: scheduling, lookup, changes, cancellation, release, statistics.

mod send;
pub(super) mod stats;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

#[cfg(any(test, fuzzing))]
pub(super) use self::send::new_notification;
use super::Api;
use super::acting;
use super::auth::Caller;
use super::docs::{Amending, Bodiless, Body, OfNotification};
use super::extract::{self, NoBody, Path};
use super::parameters;
use super::problem::{Kind, Problem};
use crate::clock::rfc3339;
use crate::id::BotId;
use crate::notifications::record::{Kept, NotificationId, State as Stage, When};
use crate::notifications::scripts::{Amended, Amendment};
use crate::notifications::{AcceptError, Notifications};
use crate::trail::Action;

/// Requires the scope `publish`.
pub(super) fn publishing() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default()
        .routes(routes!(send::send_delayed, send::send_delayed_by_post))
        .routes(routes!(send::user_online, send::user_online_by_post))
        .routes(routes!(cancel, change))
}

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(show)).routes(routes!(stats::stats))
}

impl Api {
    /// The notifications, if they run.
    pub(super) fn notifications(&self) -> Result<&Notifications, Problem> {
        self.services.get().ok_or_else(|| {
            let detail = "notifications do not run here: pipelines.notifications.enabled is false";
            Problem::new(Kind::NoNotifications, detail)
        })
    }
}

impl From<AcceptError> for Problem {
    fn from(error: AcceptError) -> Self {
        match error {
            AcceptError::Unusable(unusable) => {
                Self::field(unusable.parameter, format!("it {}", unusable.problem))
            }
            AcceptError::Store(error) => error.into(),
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct NotificationPath {
    /// The notification: the value of `X-Event-Id`.
    #[param(value_type = String)]
    notification: NotificationId,
}

impl NotificationPath {
    /// The notification. One of another bot does not exist for the caller.
    async fn find(&self, api: &Api, caller: &Caller) -> Result<Kept, Problem> {
        let kept = api.notifications()?.find(self.notification).await?;
        kept.filter(|kept| caller.covers(&kept.bot)).ok_or_else(|| self.none())
    }

    /// Changes the notification. To cancel a cancelled one changes nothing. Returns its bot.
    pub(super) async fn amend(
        &self,
        api: &Api,
        caller: &Caller,
        (name, amendment): (&str, Amendment),
    ) -> Result<BotId, Problem> {
        let kept = self.find(api, caller).await?;
        let cancels = matches!(amendment, Amendment::Cancel);
        let work = async {
            match api.notifications()?.amend(&kept, amendment).await? {
                Amended::Done => Ok(true),
                Amended::Not(Stage::Cancelled) if cancels => Ok(false),
                Amended::Not(state) => Err(over(state)),
                Amended::Gone => Err(self.none()),
            }
        };
        let action = Action::new(name).in_built_in(crate::notifications::PIPELINE);
        let action = action.of_bot(Some(&kept.bot)).target(self.notification).often();
        api.act(caller, action, work, acting::changed).await?;
        Ok(kept.bot)
    }

    fn none(&self) -> Problem {
        let id = self.notification;
        let detail =
            format!("there is no notification {id}; it is kept for up to 7 days after its end");
        Problem::new(Kind::NoNotification, detail)
    }
}

/// A notification.
#[derive(Debug, Serialize, ToSchema)]
struct Notification {
    /// Its id.
    #[schema(value_type = String, example = "3.0192f1b0c1d27c3e8f00112233445566")]
    id: NotificationId,
    /// Its bot.
    bot: BotId,
    /// Its user; empty for none.
    uid: String,
    /// Its type in the statistics.
    #[serde(rename = "type")]
    kind: String,
    /// Its state.
    state: Stage,
    /// When it was accepted.
    #[schema(format = DateTime)]
    created: String,
    /// When it is or was due.
    #[schema(format = DateTime)]
    due: String,
    /// When it expires.
    #[schema(format = DateTime)]
    expires: String,
    /// When Fairlane looks at it next: to send it, to retry, or, while it waits for its user, to
    /// expire it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    next: Option<String>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime)]
    ended: Option<String>,
    /// Whether it waits for its user to be online.
    send_than_online: bool,
    /// Number of started attempts.
    attempts: u32,
    /// Why it ended, or why the last attempt failed.
    reason: String,
    /// The URL to call.
    url: String,
}

impl From<Kept> for Notification {
    fn from(kept: Kept) -> Self {
        Self {
            id: kept.id,
            bot: kept.bot,
            uid: kept.uid,
            kind: kept.kind,
            state: kept.state,
            created: rfc3339(kept.created_ms),
            due: rfc3339(kept.due_ms),
            expires: rfc3339(kept.expires_ms),
            next: kept.next_ms.map(rfc3339),
            ended: kept.ended_ms.map(rfc3339),
            send_than_online: kept.waits,
            attempts: kept.attempts,
            reason: kept.reason,
            url: kept.url,
        }
    }
}

/// Look up a notification
///
/// A notification is kept for up to 7 days after its end, and shorter if the results of its bot exceed
/// `quotas.result_bytes`.
#[utoipa::path(
    get, path = "/v1/notifications/{notification}", tag = "notifications",
    operation_id = "showNotification", params(NotificationPath),
    responses((status = 200, description = "Its state", body = Notification), OfNotification)
)]
async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<NotificationPath>,
) -> Result<Json<Notification>, Problem> {
    path.find(&api, &caller).await.map(|kept| Json(kept.into()))
}

/// Cancel a notification
///
/// Fails if it is in flight or has ended in another way. Cancelling it again changes nothing.
#[utoipa::path(
    delete, path = "/v1/notifications/{notification}", tag = "notifications",
    operation_id = "cancelNotification", params(NotificationPath),
    responses((status = 204, description = "Cancelled"), OfNotification, Amending, Bodiless)
)]
async fn cancel(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<NotificationPath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    path.amend(&api, &caller, ("cancel notification", Amendment::Cancel)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The new due time of a notification: exactly one of `delay` and `at`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Change {
    /// In this many seconds.
    #[schema(minimum = 0, example = 90)]
    delay: Option<f64>,
    /// At this time, RFC 3339.
    #[schema(example = "2026-11-20T09:00:00Z")]
    at: Option<String>,
}

impl Change {
    fn when(self, now: Duration) -> Result<When, Problem> {
        let refused = |name| move |detail| Problem::field(name, detail);
        let delay = self.delay.map(|delay| parameters::seconds(&delay.to_string()));
        let delay = delay.transpose().map_err(refused("delay"))?;
        let at = self.at.map(|at| parameters::time(&at)).transpose().map_err(refused("at"))?;
        let when = either(delay, at)?
            .ok_or_else(|| Problem::field("delay", "it is missing; send delay or at"))?;
        when.check(now).map_err(AcceptError::from)?;
        Ok(when)
    }
}

/// The due time of a notification: from either its delay or its time.
fn either(delay: Option<Duration>, at: Option<Duration>) -> Result<Option<When>, Problem> {
    if delay.is_some() && at.is_some() {
        return Err(Problem::field("at", "delay is present too; send one of them"));
    }
    Ok(delay.map(When::After).or(at.map(When::At)))
}

/// Reschedule a notification
///
/// Moves its expiry by the same time. `{"delay":0}` sends it now, in the order of its bot. Fails while it is in flight, and after its end.
#[utoipa::path(
    patch, path = "/v1/notifications/{notification}", tag = "notifications",
    operation_id = "changeNotification", params(NotificationPath), request_body(content = Change),
    responses((status = 200, description = "Its new state", body = Notification), OfNotification, Amending, Body)
)]
async fn change(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<NotificationPath>,
    extract::Json(change): extract::Json<Change>,
) -> Result<Json<Notification>, Problem> {
    let amendment = Amendment::Move(change.when(api.clock.now())?);
    path.amend(&api, &caller, ("reschedule notification", amendment)).await?;
    path.find(&api, &caller).await.map(|kept| Json(kept.into()))
}

/// The problem for a notification that cannot be changed any more.
fn over(state: Stage) -> Problem {
    let detail = format!("it is {state}; only a scheduled or waiting notification can be changed");
    Problem::new(Kind::NotificationOver, detail)
}
