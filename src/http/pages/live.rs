//! Live pages: the script of a page requests the same path as a stream of server-sent events. Each
//! event is the current content of the page.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use maud::Markup;
use rand::Rng as _;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::super::admit::Unhurried;
use super::super::auth::Caller;
use super::super::health::Health;
use super::super::problem::{Kind, Problem};
use super::shared::{Busiest, Overview, Slot};
use super::streams::{self, Stream, Streams};
use super::{Refusal, page_with};
use crate::admission::aside::timed;
use crate::request_tenant;
use crate::trend::Point;

/// Time between two events. Each page varies it, so that pages that opened together, for example
/// after a restart, do not ask for their content at the same moment for ever.
const EVERY: Duration = Duration::from_secs(2);
/// For a token that is for certain bots, the time between two events is this many times as long as the content
/// took, without its waits for a turn: such pages read much to find its bots.
const SHARE: u32 = 20;
/// Maximum time between two events.
const EVERY_MAX: Duration = Duration::from_secs(60);
/// Maximum duration of a stream. The browser then reconnects, so a revoked token cannot keep
/// reading.
const LIFE: Duration = Duration::from_secs(600);

/// Number of tokens whose bots are ranked concurrently, so that one that takes long delays no other. Each
/// ranking uses half of the connections of the pool.
const RANKINGS: usize = 2;

/// Tells proxies to pass on each event immediately.
const UNBUFFERED: HeaderName = HeaderName::from_static("x-accel-buffering");

/// State that the live pages of a process share.
pub(crate) struct Live {
    pub(super) health: Health,
    streams: Streams,
    /// The part that every token sees: Redis is queried once, regardless of the number of viewers.
    pub(super) overview: Slot<Overview>,
    /// The points of the charts of more than 15 minutes.
    pub(super) minutes: Slot<Vec<Point>>,
    /// The busiest bots of each token, by its name.
    busiest: Mutex<HashMap<Box<str>, Slot<Busiest>>>,
    /// Turns for reading them.
    pub(super) rankings: Semaphore,
}

impl Live {
    pub(crate) fn new(health: Health) -> Self {
        let streams = Streams::default();
        let (overview, minutes, busiest) = <_>::default();
        let rankings = Semaphore::new(RANKINGS);
        Self { health, streams, overview, minutes, busiest, rankings }
    }

    /// The busiest bots of a token. While they are read, others of this token wait for them.
    pub(super) fn busiest(&self, token: &str) -> Slot<Busiest> {
        let mut all = self.busiest.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(token.into()).or_default())
    }

    /// Renders the page with `content`, or streams it.
    pub(super) async fn show<S, F, Made>(
        &self,
        (caller, headers): (&Caller, &HeaderMap),
        title: &str,
        looked_at: S,
        content: F,
    ) -> Result<Response, Refusal>
    where
        S: Send + Sync + 'static,
        F: Fn(Arc<S>) -> Made + Send + 'static,
        Made: Future<Output = Result<Markup, Refusal>> + Send,
    {
        let looked_at = Arc::new(looked_at);
        let streams = headers.get(header::ACCEPT).is_some_and(|kinds| kinds == "text/event-stream");
        if !streams {
            return Ok(page_with(title, &content(looked_at).await?, true));
        }
        let max = if caller.covers_all() { streams::ALL } else { streams::OF_ONE };
        let Some(open) = self.streams.open(caller.name(), max) else {
            let detail = format!(
                "this token has its share of the {} live pages of this process already; close one, or open this page in another process",
                streams::ALL
            );
            return Err(Problem::new(Kind::Overloaded, detail).retry_after(10).into());
        };
        let share = if caller.covers_all() { 0 } else { SHARE };
        Ok(streamed((self.health.stopping.clone(), open), share, looked_at, content))
    }
}

/// Streams a page. The stream runs outside of its request, but each content is for the same tenant.
fn streamed<S, F, Made>(
    (stopping, open): (CancellationToken, Stream),
    share: u32,
    looked_at: Arc<S>,
    content: F,
) -> Response
where
    S: Send + Sync + 'static,
    F: Fn(Arc<S>) -> Made + Send + 'static,
    Made: Future<Output = Result<Markup, Refusal>> + Send,
{
    let (tenant, end) = (request_tenant::current(), Instant::now() + LIFE);
    let first = (content, open, Duration::ZERO);
    let events = stream::unfold(first, move |(content, open, took)| {
        let (stopping, looked_at) = (stopping.clone(), Arc::clone(&looked_at));
        async move {
            let every = EVERY.max((took * share).min(EVERY_MAX));
            let pause = every.mul_f64(rand::rng().random_range(0.75..1.25));
            tokio::select! {
                biased;
                () = stopping.cancelled() => return None,
                () = open.given_up.cancelled() => return None,
                () = tokio::time::sleep(pause) => {}
            }
            if Instant::now() >= end {
                return None;
            }
            let (made, took) = timed(request_tenant::of(tenant, content(looked_at))).await;
            let event = match made {
                Ok(markup) => Event::default().data(markup.into_string()),
                Err(Refusal(problem)) => Event::default().event("problem").data(problem.detail()),
            };
            Some((Ok::<_, Infallible>(event), (content, open, took)))
        }
    });
    let mut response = Sse::new(events).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // A proxy such as nginx otherwise collects events until its buffer is full.
    response.headers_mut().insert(UNBUFFERED, HeaderValue::from_static("no"));
    response.extensions_mut().insert(Unhurried);
    response
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use maud::html;

    use super::*;
    use crate::admission::aside::aside;

    type Seen = Mutex<Vec<Option<u64>>>;

    #[tokio::test(start_paused = true)]
    async fn a_page_that_waits_for_its_turn_is_renewed_soon_after_and_for_the_same_tenant() {
        const TURN: Duration = Duration::from_secs(30);
        let seen = Arc::new(Seen::default());
        let content = async |seen: Arc<Seen>| {
            seen.lock().unwrap().push(request_tenant::current());
            aside(tokio::time::sleep(TURN)).await;
            Ok(html! { "page" })
        };
        let open = Streams::default().open("shop", 1).unwrap();
        let with = (CancellationToken::new(), open);
        let request = async { streamed(with, SHARE, Arc::clone(&seen), content) };
        let response = request_tenant::of(Some(7), request).await;
        let (mut events, begun) = (response.into_body().into_data_stream(), Instant::now());
        for _ in 0..3 {
            assert!(events.next().await.unwrap().is_ok());
        }
        assert!(begun.elapsed() < 3 * (TURN + 2 * EVERY), "{:?}", begun.elapsed());
        assert_eq!(*seen.lock().unwrap(), [Some(7); 3]);
    }
}
