//! `/send_delayed` and `/user_online`: what other systems call, with their parameters in the query,
//! in a form or in JSON.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{HeaderName, Method};
use axum::response::{IntoResponse as _, Json, Response};
use serde::Serialize;
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::{Body, OfNotifications};
use super::super::parameters::{self, Parameters, flag_or_null_schema, flag_schema, shown};
use super::super::problem::Problem;
use super::either;
use crate::id::BotId;
use crate::notifications::record::{Duplicates, NO_KIND, NewNotification, UID_MAX_BYTES, When};
use crate::outbound::{CheckedUrl, Policy};

const EVENT_ID: HeaderName = HeaderName::from_static("x-event-id");
/// The bot of what names none.
const DEFAULT_BOT: &str = "default";
/// A notification is given up so long after it was due, if it does not say.
const EXPIRES_IN: Duration = Duration::from_secs(24 * 3_600);
/// How a URL may be called.
const METHODS: [Method; 5] =
    [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
/// What [`SendDelayed`] describes.
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

/// What `/send_delayed` is told, for the document; an empty value counts as left out, but for flags.
#[derive(Debug, IntoParams, ToSchema)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "says in the document what `new_notification` reads")]
pub(super) struct SendDelayed {
    /// The URL that is called: http or https, at a public address or in `callbacks.allow_nets`.
    #[param(max_length = 2048, example = "https://example.com/remind")]
    url: String,
    /// When it is due, in seconds from now, with fractions or without. Either this or `at`; with
    /// `send_than_online` 0 if left out.
    #[param(minimum = 0, maximum = 31_622_400)]
    delay: Option<f64>,
    /// When it is due, RFC 3339. What has passed is due at once.
    #[param(example = "2026-11-20T09:00:00Z")]
    at: Option<String>,
    /// For which user: one gets a notification in `notifications.user_poll_threshold`.
    #[param(max_length = 256)]
    uid: Option<String>,
    /// What it is called in the statistics; `none` if left out.
    #[serde(rename = "type")]
    #[param(max_length = 64, default = "none")]
    kind: Option<String>,
    /// This URL must answer `ok` before each attempt, else nothing is sent.
    #[param(max_length = 2048)]
    recheck_url: Option<String>,
    /// Once due it waits until `/user_online` tells that the user is. There without a value it
    /// means yes.
    #[param(schema_with = flag_schema, required = false)]
    #[schema(schema_with = flag_or_null_schema, required = false)]
    send_than_online: Option<bool>,
    /// GET, POST, PUT, PATCH or DELETE; POST where there is a `body`, else GET.
    #[param(example = "POST")]
    method: Option<String>,
    /// What is sent, up to 64 KiB. In JSON it may be an object or a list, which is sent as it is
    /// written.
    #[schema(value_type = Option<serde_json::Value>)]
    body: Option<String>,
    /// A name of yours for it. While a notification of the bot has it, another one with it is not
    /// accepted, or replaces it. Ended ones keep it for five minutes after they were accepted, so
    /// that a request may be repeated; cancelled ones do not.
    #[param(max_length = 255)]
    key: Option<String>,
    /// What is done when the key is taken: `ignore` (the answer has the id of the one that has it)
    /// or `replace` (that one is cancelled).
    #[param(default = "ignore", example = "ignore")]
    on_duplicate: Option<String>,
    /// It is given up so many seconds after it was due; a day if left out.
    #[param(maximum = 31_622_400, default = 86_400)]
    expires_in: Option<f64>,
    /// Whose it is.
    #[param(default = "default")]
    bot: Option<String>,
    /// The set of `callbacks.headers` that is sent with it: headers whose values are in files of the
    /// operator. It must be for this bot and for the host of `url`.
    #[param(max_length = 64)]
    headers_from: Option<String>,
}

/// Send a notification later
///
/// `ok` is answered once Redis has it: then the URL is called when it is due, never early, whatever
/// crashes. The header `X-Event-Id` has the id to look it up, move or cancel it by.
#[utoipa::path(
    get, path = "/send_delayed", tag = "notifications", operation_id = "sendDelayed",
    params(SendDelayed),
    responses((status = 200, description = "It is accepted", body = String, content_type = "text/plain",
        headers(("X-Event-Id" = String, description = "Its id"))), OfNotifications)
)]
pub(super) async fn send_delayed(
    State(api): State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    parameters: Parameters,
) -> Result<Response, Problem> {
    let new = new_notification(parameters, &api.targets)?;
    caller.check_bot(&new.bot)?;
    let _taken = api.door.charge_named(&new.bot, &parts)?;
    let accepted = api.notifications()?.accept(&new).await?;
    Ok(([(EVENT_ID, accepted.id.to_string())], "ok").into_response())
}

/// Send a notification later
///
/// As by GET, with the parameters in the query, in a form or in JSON.
#[utoipa::path(
    post, path = "/send_delayed", tag = "notifications", operation_id = "sendDelayedByPost",
    request_body(content(
        (Option<SendDelayed> = "application/json"),
        (Option<SendDelayed> = "application/x-www-form-urlencoded"),
    )),
    responses((status = 200, description = "It is accepted", body = String, content_type = "text/plain",
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

fn bot(parameters: &mut Parameters) -> Result<BotId, Problem> {
    let bot = parameters.take("bot").unwrap_or_else(|| DEFAULT_BOT.to_owned());
    BotId::parse(&bot).map_err(|error| Problem::field("bot", error.to_string()))
}

/// Reads the parameters of a notification; its URLs are judged by `targets`.
fn new_notification(mut given: Parameters, targets: &Policy) -> Result<NewNotification, Problem> {
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
            let remedy = "write after how many seconds it is due, or when with at";
            return Err(missing("delay", remedy));
        }
    };
    let target = given.read("url", url)?;
    let target = target.ok_or_else(|| missing("url", "write the URL that is to be called"))?;
    let recheck = given.read("recheck_url", url)?.unwrap_or_default();
    let body = given.take("body").unwrap_or_default();
    let method = given.read("method", |text| {
        let method = METHODS.iter().find(|method| method.as_str().eq_ignore_ascii_case(text));
        method
            .ok_or_else(|| format!("it is {}; write GET, POST, PUT, PATCH or DELETE", shown(text)))
    })?;
    let method = method.unwrap_or(if body.is_empty() { &Method::GET } else { &Method::POST });
    if *method == Method::GET && !body.is_empty() {
        return Err(Problem::field("body", "it is not sent with GET; write another method"));
    }
    let key = given.take("key");
    let duplicates = given.read("on_duplicate", |text| match text {
        "ignore" => Ok(Duplicates::Ignore),
        "replace" => Ok(Duplicates::Replace),
        _ => Err(format!("it is {}; write ignore or replace", shown(text))),
    })?;
    if key.is_none() && duplicates.is_some() {
        return Err(missing("key", "on_duplicate says what is done when it is taken"));
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
    };
    given.done(&KNOWN)?;
    Ok(new)
}

/// Who is online.
#[derive(Debug, IntoParams, ToSchema)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "says in the document what `user_online` reads")]
pub(super) struct UserOnline {
    /// The user.
    #[param(min_length = 1, max_length = 256)]
    uid: String,
    /// Whose.
    #[param(default = "default")]
    bot: Option<String>,
}

/// What was released.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Queued {
    /// How many notifications are sent now: 0 or 1.
    #[schema(maximum = 1)]
    queued: u64,
}

/// Tell that a user is online
///
/// The notification that has waited longest for that (`send_than_online`) is sent, if it is due and
/// the last one was at least `notifications.online_threshold` ago; the others wait for the next call.
#[utoipa::path(
    get, path = "/user_online", tag = "notifications", operation_id = "userOnline",
    params(UserOnline),
    responses((status = 200, description = "It is noted", body = Queued), OfNotifications)
)]
pub(super) async fn user_online(
    State(api): State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    mut parameters: Parameters,
) -> Result<Json<Queued>, Problem> {
    let (bot, uid) = (bot(&mut parameters)?, parameters.take("uid"));
    parameters.done(&["uid", "bot"])?;
    let uid = uid.ok_or_else(|| Problem::field("uid", "it is missing; write who is online"))?;
    if uid.len() > UID_MAX_BYTES || uid.chars().any(char::is_control) {
        let detail = format!(
            "it is none of 1 to {UID_MAX_BYTES} bytes without control characters, so nothing waits for it"
        );
        return Err(Problem::field("uid", detail));
    }
    caller.check_bot(&bot)?;
    let _taken = api.door.charge_named(&bot, &parts)?;
    let queued = api.notifications()?.online(&bot, &uid).await?;
    Ok(Json(Queued { queued }))
}

/// Tell that a user is online
///
/// As by GET, with the parameters in the query, in a form or in JSON.
#[utoipa::path(
    post, path = "/user_online", tag = "notifications", operation_id = "userOnlineByPost",
    request_body(content(
        (Option<UserOnline> = "application/json"),
        (Option<UserOnline> = "application/x-www-form-urlencoded"),
    )),
    responses((status = 200, description = "It is noted", body = Queued), OfNotifications, Body)
)]
pub(super) async fn user_online_by_post(
    api: State<Arc<Api>>,
    caller: Caller,
    parts: Parts,
    parameters: Parameters,
) -> Result<Json<Queued>, Problem> {
    user_online(api, caller, parts, parameters).await
}
