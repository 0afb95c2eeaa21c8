//! The head of a request: its class, its deadline, its bot, its caller.

use std::borrow::Cow;
use std::hash::{Hash as _, Hasher as _};
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, Uri, header};
use rustc_hash::FxHasher;

use super::super::auth::Caller;
use super::super::extract;
use super::super::listen::{Peer, network};
use super::super::problem::Problem;
use super::super::routes::Route;
use crate::admission::Class;

/// The deadline of the caller.
const DEADLINE: HeaderName = HeaderName::from_static("x-deadline-ms");
/// The highest class that the caller wants.
const PRIORITY: HeaderName = HeaderName::from_static("x-priority");
/// Maximum deadline.
const DEADLINE_MAX_MS: u64 = 3_600_000;
/// A request takes one place per started unit of this many bytes of its body: about sixty events.
const BYTES_OF_A_PLACE: u64 = 16 << 10;

/// The number of places that a request with a body of this size takes.
pub(super) fn places(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(BYTES_OF_A_PLACE)).unwrap_or(usize::MAX).max(1)
}

/// The class of a request: that of its route, or a lower one on request.
pub(super) fn class(route: &Route, headers: &HeaderMap) -> Result<Class, Problem> {
    let Some(wanted) = headers.get(&PRIORITY) else { return Ok(route.class) };
    let known = Class::ALL.into_iter().find(|class| wanted.as_bytes() == class.as_str().as_bytes());
    let detail = "write p1, p2 or p3; it can lower the class of a request, not raise it";
    known.map(|class| class.max(route.class)).ok_or_else(|| Problem::field("x-priority", detail))
}

/// The remaining time of a request.
pub(super) fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, Problem> {
    let Some(value) = headers.get(&DEADLINE) else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.parse().ok());
    let ms = ms.filter(|ms| *ms <= DEADLINE_MAX_MS).ok_or_else(|| {
        let detail = format!("write whole milliseconds from now, 0 to {DEADLINE_MAX_MS}");
        Problem::field("x-deadline-ms", detail)
    })?;
    Ok(Some(Duration::from_millis(ms)))
}

/// The bot in a path or query, still encoded.
pub(super) fn bot_of(uri: &Uri) -> Option<&str> {
    let Some((_, rest)) = uri.path().split_once("/bots/") else {
        return uri.query()?.split('&').find_map(|pair| pair.strip_prefix("bot="));
    };
    rest.split('/').next().filter(|bot| !bot.is_empty())
}

/// The decoded name of a bot in a path or query.
pub(super) fn decoded(bot: &str) -> Cow<'_, str> {
    if !bot.contains('%') {
        return bot.into();
    }
    let bytes = extract::percent_decoded(bot.as_bytes());
    String::from_utf8_lossy(&bytes).into_owned().into()
}

/// The caller as a number, from its token or its address, and the bot. No caller can use up the
/// share of another one without its token. With a public token, each address is its own caller.
pub(super) fn caller(request: &Request, claimed: Option<&Caller>) -> u64 {
    let mut hasher = FxHasher::default();
    let token = request.headers().get(header::AUTHORIZATION);
    if let Some(token) = token {
        token.as_bytes().hash(&mut hasher);
    }
    if let Some(Peer(peer)) = request.extensions().get()
        && (token.is_none() || claimed.is_some_and(Caller::is_public))
    {
        network(*peer).hash(&mut hasher);
    }
    bot_of(request.uri()).hash(&mut hasher);
    hasher.finish().max(1)
}
