//! `/send_delayed` and `/user_online`: routes for other systems, with parameters in the query, a
//! form or JSON.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::response::{IntoResponse as _, Json, Response};
use serde::Serialize;
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::{Body, OfNotifications};
use super::super::parameters::{self, Parameters, flag_or_null_schema, flag_schema, shown};
use super::super::problem::{Kind, Problem};
use super::either;
use crate::id::BotId;
use crate::notifications::record::{Duplicates, NO_KIND, NewNotification, UID_MAX_BYTES, When};
use crate::outbound::{CheckedUrl, Policy};
use crate::trace::Entering;

const EVENT_ID: HeaderName = HeaderName::from_static("x-event-id");
/// The bot of requests that name none.
const DEFAULT_BOT: &str = "default";
/// Default time from the due time until a notification expires.
const EXPIRES_IN: Duration = Duration::from_secs(24 * 3_600);
/// The HTTP methods for a URL.
const METHODS: [Method; 5] =
    [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
/// The parameters in [`SendDelayed`].
const KNOWN: [&str; 14] = [
    "delay",
    "at",
    "url",
    "uid",
    "type",
    "recheck_url",
    "send_than_online",
    "method",
    "body",
    "key",
    "on_duplicate",
    "expires_in",
    "bot",
    "headers_from",
];

/// The parameters of `/send_delayed`, for the document. An empty value counts as absent, except for
/// flags.
#[derive(Debug, IntoParams, ToSchema)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "says in the document what `new_notification` reads")]
pub(super) struct SendDelayed {
    /// The URL to call: http or https, at a public address or in `callbacks.allow_nets`.
    #[param(max_length = 2048, example = "https://example.com/remind")]
    url: String,
    /// The delay in seconds from now, with or without fractions. Send either this or `at`. Default
    /// with `send_than_online`: 0.
    #[param(minimum = 0, maximum = 31_622_400)]
    delay: Option<f64>,
    /// The due time, RFC 3339. A time in the past is due immediately.
    #[param(example = "2026-11-20T09:00:00Z")]
    at: Option<String>,
    /// The user. A user gets one notification per `notifications.user_poll_threshold`.
    #[param(max_length = 256)]
    uid: Option<String>,
    /// The type in the statistics. Default: `none`.
    #[serde(rename = "type")]
    #[param(max_length = 64, default = "none")]
    kind: Option<String>,
    /// A URL that must answer `ok` before each attempt. Otherwise the notification is not sent.
    #[param(max_length = 2048)]
    recheck_url: Option<String>,
    /// Wait after the due time until `/user_online` reports the user. Without a value it means yes.
    #[param(schema_with = flag_schema, required = false)]
    #[schema(schema_with = flag_or_null_schema, required = false)]
    send_than_online: Option<bool>,
    /// GET, POST, PUT, PATCH or DELETE. Default: POST with a `body`, otherwise GET.
    #[param(example = "POST")]
    method: Option<String>,
    /// The body to send, up to 64 KiB. In JSON it may be an object or a list, which is sent
    /// unchanged.
    #[schema(value_type = Option<serde_json::Value>)]
    body: Option<String>,
    /// Your unique key for the notification. While another notification of the bot has the key, a
    /// new one is ignored or replaces it. Ended notifications keep their key for five minutes after
    /// they were accepted, so that you can repeat a request. Cancelled ones do not.
    #[param(max_length = 255)]
    key: Option<String>,
    /// What to do if the key is taken: `ignore` (the answer has the id of the existing
    /// notification) or `replace` (the existing one is cancelled).
    #[param(default = "ignore", example = "ignore")]
    on_duplicate: Option<String>,
    /// Seconds from the due time until the notification expires. Default: a day.
    #[param(maximum = 31_622_400, default = 86_400)]
    expires_in: Option<f64>,
    /// The bot.
    #[param(default = "default")]
    bot: Option<String>,
    /// The set of `callbacks.headers` to send: headers whose values are in files of the operator.
    /// The set must allow this bot and the host of `url`.
    #[param(max_length = 64)]
    headers_from: Option<String>,
}

/// Schedule a notification
///
/// The answer `ok` comes once Redis has stored it. Fairlane calls the URL when it is due, never
/// early, and also after crashes. The header `X-Event-Id` has the id for lookups, changes and
/// cancellation.
#[utoipa::path(
    get, path = "/send_delayed", tag = "notifications", operation_id = "sendDelayed",
    params(SendDelayed),
    responses((status = 200, description = "Accepted", body = String, content_type = "text/plain",
        headers(("X-Event-Id" = String, description = "Its id"))), OfNotifications)
)]
pub(super) async fn send_delayed(
    State(api): State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    parameters: Parameters,
) -> Result<Response, Problem> {
    refuse_head(&parts)?;
    let new = new_notification(parameters, &api.targets)?;
    caller.check_bot(&new.bot)?;
    let _taken = api.gate.charge_named(&new.bot, &parts)?;
    let notifications = api.notifications()?;
    let place = notifications.queue().name().as_str();
    let mut entering = Entering::by(&api.tracer, &parts.headers, place).about(&new.bot);
    let new = NewNotification { trace: entering.context.take(), ..new };
    let accepted = notifications.accept(&new).await.inspect_err(|error| {
        entering.fail(error.to_string());
    })?;
    drop(entering);
    Ok(([(EVENT_ID, accepted.id.to_string())], "ok").into_response())
}

/// Schedule a notification
///
/// As by GET, with the parameters in the query, a form or JSON.
#[utoipa::path(
    post, path = "/send_delayed", tag = "notifications", operation_id = "sendDelayedByPost",
    request_body(content(
        (Option<SendDelayed> = "application/json"),
        (Option<SendDelayed> = "application/x-www-form-urlencoded"),
    )),
    responses((status = 200, description = "Accepted", body = String, content_type = "text/plain",
        headers(("X-Event-Id" = String, description = "Its id"))), OfNotifications, Body)
)]
pub(super) async fn send_delayed_by_post(
    api: State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    parameters: Parameters,
) -> Result<Response, Problem> {
    send_delayed(api, caller, parts, parameters).await
}

/// The router passes HEAD to the handler of GET. A client that sends it, such as a preview of a link,
/// does not mean to schedule or to release anything.
fn refuse_head(parts: &Parts) -> Result<(), Problem> {
    if parts.method != Method::HEAD {
        return Ok(());
    }
    let allowed = HeaderValue::from_static("GET, POST");
    let detail = "nothing was done: HEAD would do what GET does; send GET or POST";
    Err(Problem::new(Kind::Method, detail).header(header::ALLOW, allowed))
}

fn bot(parameters: &mut Parameters) -> Result<BotId, Problem> {
    let bot = parameters.take("bot").unwrap_or_else(|| DEFAULT_BOT.to_owned());
    BotId::parse(&bot).map_err(|error| Problem::field("bot", error.to_string()))
}

/// Reads the parameters of a notification; `targets` checks its URLs.
pub(in super::super) fn new_notification(
    mut given: Parameters,
    targets: &Policy,
) -> Result<NewNotification, Problem> {
    let url = |text: &str| {
        CheckedUrl::parse(text, targets).map(|_| text.to_owned()).map_err(|error| error.to_string())
    };
    let missing =
        |name: &str, remedy: &str| Problem::field(name, format!("it is missing; {remedy}"));
    let (bot, uid) = (bot(&mut given)?, given.take("uid").unwrap_or_default());
    let waits = given.flag("send_than_online")?.unwrap_or_default();
    let delay = given.read("delay", parameters::seconds)?;
    let when = match either(delay, given.read("at", parameters::time)?)? {
        Some(when) => when,
        None if waits => When::After(Duration::ZERO),
        None => {
            let remedy = "send the delay in seconds, or the time as at";
            return Err(missing("delay", remedy));
        }
    };
    let target = given.read("url", url)?;
    let target = target.ok_or_else(|| missing("url", "send the URL to call"))?;
    let recheck = given.read("recheck_url", url)?.unwrap_or_default();
    let body = given.take("body").unwrap_or_default();
    let method = given.read("method", |text| {
        let method = METHODS.iter().find(|method| method.as_str().eq_ignore_ascii_case(text));
        method
            .ok_or_else(|| format!("it is {}; write GET, POST, PUT, PATCH or DELETE", shown(text)))
    })?;
    let method = method.unwrap_or(if body.is_empty() { &Method::GET } else { &Method::POST });
    if *method == Method::GET && !body.is_empty() {
        return Err(Problem::field("body", "GET sends no body; send another method"));
    }
    let key = given.take("key");
    let duplicates = given.read("on_duplicate", |text| match text {
        "ignore" => Ok(Duplicates::Ignore),
        "replace" => Ok(Duplicates::Replace),
        _ => Err(format!("it is {}; write ignore or replace", shown(text))),
    })?;
    if key.is_none() && duplicates.is_some() {
        return Err(missing("key", "on_duplicate applies only with a key"));
    }
    let new = NewNotification {
        bot,
        uid,
        kind: given.take("type").unwrap_or_else(|| NO_KIND.to_owned()),
        when,
        expires_in: given.read("expires_in", parameters::seconds)?.unwrap_or(EXPIRES_IN),
        waits,
        url: target,
        method: method.to_string(),
        body,
        recheck,
        headers: given.take("headers_from").unwrap_or_default(),
        key: key.map(|key| (key, duplicates.unwrap_or_default())),
        trace: None,
    };
    given.done(&KNOWN)?;
    Ok(new)
}

/// The user that is online.
#[derive(Debug, IntoParams, ToSchema)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "says in the document what `user_online` reads")]
pub(super) struct UserOnline {
    /// The user.
    #[param(min_length = 1, max_length = 256)]
    uid: String,
    /// The bot.
    #[param(default = "default")]
    bot: Option<String>,
}

/// The released notifications.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Queued {
    /// Number of notifications that are sent now: 0 or 1.
    #[schema(maximum = 1)]
    queued: u64,
}

/// Report a user as online
///
/// Releases the notification that has waited longest for the user (`send_than_online`). It must be
/// due, and the last one must have been sent at least `notifications.online_threshold` ago. Further
/// ones wait for the next call.
#[utoipa::path(
    get, path = "/user_online", tag = "notifications", operation_id = "userOnline",
    params(UserOnline),
    responses((status = 200, description = "Noted", body = Queued), OfNotifications)
)]
pub(super) async fn user_online(
    State(api): State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    mut parameters: Parameters,
) -> Result<Json<Queued>, Problem> {
    refuse_head(&parts)?;
    let (bot, uid) = (bot(&mut parameters)?, parameters.take("uid"));
    parameters.done(&["uid", "bot"])?;
    let uid =
        uid.ok_or_else(|| Problem::field("uid", "it is missing; send the user that is online"))?;
    if uid.len() > UID_MAX_BYTES || uid.chars().any(char::is_control) {
        let detail = format!(
            "it is not 1 to {UID_MAX_BYTES} bytes without control characters, so no notification waits for it"
        );
        return Err(Problem::field("uid", detail));
    }
    caller.check_bot(&bot)?;
    let _taken = api.gate.charge_named(&bot, &parts)?;
    let queued = api.notifications()?.online(&bot, &uid).await?;
    Ok(Json(Queued { queued }))
}

/// Report a user as online
///
/// As by GET, with the parameters in the query, a form or JSON.
#[utoipa::path(
    post, path = "/user_online", tag = "notifications", operation_id = "userOnlineByPost",
    request_body(content(
        (Option<UserOnline> = "application/json"),
        (Option<UserOnline> = "application/x-www-form-urlencoded"),
    )),
    responses((status = 200, description = "Noted", body = Queued), OfNotifications, Body)
)]
pub(super) async fn user_online_by_post(
    api: State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    parameters: Parameters,
) -> Result<Json<Queued>, Problem> {
    user_online(api, caller, parts, parameters).await
}
