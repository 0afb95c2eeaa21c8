//! View counters: a view is counted in Redis immediately and stored in MongoDB within seconds.
//!
//! The path contains the ad. To address an ad with the name of a route (`export`, `import`,
//! `query`), percent-encode one of its letters: the route has priority over the plain name.

mod daily;
mod export;
mod import;
mod replace;
mod totals;

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) use self::export::places as export_places;
use super::Api;
use super::auth::Caller;
use super::docs::{Body, OfCounters};
use super::extract::{JsonOrNothing, Path};
use super::problem::{Kind, Problem};
use crate::counters::Counters;
use crate::counters::view::{self, AdId, VIEWS_MAX};
use crate::id::BotId;

/// Maximum length of `Idempotency-Key`, in bytes.
const KEY_MAX_BYTES: usize = 255;
const KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Requires the scope `publish` or `count`.
pub(super) fn counting() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(view))
}

/// Requires the scope `read` or `count`.
pub(super) fn telling() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default()
        .routes(routes!(totals::list))
        .routes(routes!(totals::query))
        .routes(routes!(daily::daily))
}

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(export::export))
}

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default()
        .routes(routes!(import::import))
        .routes(routes!(replace::reset))
        .routes(routes!(replace::set))
        .routes(routes!(replace::forget))
}

impl Api {
    /// The counters of a bot, if they run and the caller has access to the bot.
    pub(super) fn counters_of(&self, bot: &BotId, caller: &Caller) -> Result<&Counters, Problem> {
        caller.check_bot(bot)?;
        self.services.of(crate::counters::PIPELINE).map_err(|reason| {
            Problem::new(Kind::NoCounters, format!("the counters do not run here: {reason}"))
        })
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct BotPath {
    /// The bot, percent-encoded.
    bot: BotId,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct AdPath {
    /// The bot, percent-encoded.
    bot: BotId,
    /// The ad, percent-encoded: 1 to 128 bytes without control characters. For an ad named
    /// `export`, `import` or `query`, encode a letter too: `%65xport`, `%69mport`, `%71uery`.
    #[param(value_type = String, min_length = 1, max_length = 128)]
    ad: AdId,
}

/// The header `Idempotency-Key`, if present.
#[derive(Debug)]
struct IdempotencyKey(Option<HeaderValue>);

impl IdempotencyKey {
    fn as_str(&self) -> Option<&str> {
        self.0.as_ref()?.to_str().ok()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let mut keys = parts.headers.get_all(KEY).iter();
        let key = keys.next();
        if keys.next().is_some() {
            return Err(Problem::field("Idempotency-Key", "it is present twice; send one"));
        }
        let usable = |key: &HeaderValue| {
            (1..=KEY_MAX_BYTES).contains(&key.len())
                && key.as_bytes().iter().all(u8::is_ascii_graphic)
        };
        if key.is_some_and(|key| !usable(key)) {
            let detail =
                format!("it is not 1 to {KEY_MAX_BYTES} visible ASCII characters, such as a UUID");
            return Err(Problem::field("Idempotency-Key", detail));
        }
        Ok(Self(key.cloned()))
    }
}

/// A number of views of an ad.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Views {
    /// Default: 1.
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    n: Option<i64>,
}

/// The total of an ad.
#[derive(Debug, Serialize, ToSchema)]
struct Total {
    /// Includes the new views. `null` if no store can return it now; the views are counted all the
    /// same.
    total: Option<u64>,
}

/// Count a view
///
/// Counts 1 to 1,000 views, on the day of their arrival. A repeated request with the same
/// `Idempotency-Key` within an hour counts nothing, and gets the answer of the first one.
#[utoipa::path(
    post, path = "/v1/bots/{bot}/counters/{ad}/views", tag = "counters", operation_id = "countView",
    params(
        AdPath,
        (
            "Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
            pattern = "^[!-~]+$", description = "A text that is unique for each view",
        ),
    ),
    request_body(content = Option<Views>),
    responses((status = 200, description = "Counted", body = Total), OfCounters, Body)
)]
async fn view(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(AdPath { bot, ad }): Path<AdPath>,
    key: IdempotencyKey,
    JsonOrNothing(Views { n }): JsonOrNothing<Views>,
) -> Result<Json<Total>, Problem> {
    let counters = api.counters_of(&bot, &caller)?;
    let n = n.unwrap_or(1);
    let n = view::views(n).map_err(|_| {
        Problem::field("n", format!("it is {n}; write a whole number from 1 to {VIEWS_MAX}"))
    })?;
    // The rate of a public token limits requests, so each request may count only one view.
    if caller.is_public() && n > 1 {
        let detail = "it is above 1, which a token with the scope \"count\" cannot send";
        return Err(Problem::field("n", detail));
    }
    let total = counters.view(&bot, &ad, n, key.as_str()).await?;
    Ok(Json(Total { total }))
}

#[cfg(test)]
mod tests {
    use axum::http::Request;
    use axum::response::IntoResponse as _;

    use super::*;

    async fn key(values: &[&[u8]]) -> Result<Option<String>, u16> {
        let mut request = Request::builder();
        for value in values {
            request = request.header(KEY, HeaderValue::from_bytes(value).unwrap());
        }
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        let key = IdempotencyKey::from_request_parts(&mut parts, &()).await;
        key.map(|key| key.as_str().map(str::to_owned))
            .map_err(|problem| problem.into_response().status().as_u16())
    }

    #[tokio::test]
    async fn an_idempotency_key_is_one_of_1_to_255_visible_characters() {
        assert_eq!(key(&[]).await, Ok(None));
        assert_eq!(key(&[b"a"]).await, Ok(Some("a".to_owned())));
        let longest = [b'~'; KEY_MAX_BYTES];
        assert_eq!(key(&[&longest]).await.unwrap().unwrap().len(), KEY_MAX_BYTES);
        for wrong in [&b""[..], b"a b", b"\t", "ä".as_bytes(), b"\xff", &[b'x'; 256]] {
            assert_eq!(key(&[wrong]).await, Err(400), "{wrong:?}");
        }
        assert_eq!(key(&[b"a", b"a"]).await, Err(400));
    }
}
