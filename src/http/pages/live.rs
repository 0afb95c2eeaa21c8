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

use super::super::admit::Unhurried;
use super::super::auth::Caller;
use super::super::health::Health;
use super::super::problem::{Kind, Problem};
use super::shared::{Busiest, Overview, Slot};
use super::streams::{self, Streams};
use super::{Refusal, page_with};
use crate::trend::Point;

/// Time between two events. Each page varies it, so that pages that opened together, for example
/// after a restart, do not ask for their content at the same moment for ever.
const EVERY: Duration = Duration::from_secs(2);
/// For a token that is for certain bots, the time between two events is this many times as long as the content
/// took: such pages read much to find its bots.
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
        let (stopping, end) = (self.health.stopping.clone(), Instant::now() + LIFE);
        let share = if caller.covers_all() { 0 } else { SHARE };
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
                let asked = Instant::now();
                let event = match content(looked_at).await {
                    Ok(markup) => Event::default().data(markup.into_string()),
                    Err(Refusal(problem)) => {
                        Event::default().event("problem").data(problem.detail())
                    }
                };
                Some((Ok::<_, Infallible>(event), (content, open, asked.elapsed())))
            }
        });
        let mut response = Sse::new(events).into_response();
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // A proxy such as nginx otherwise collects events until its buffer is full.
        response.headers_mut().insert(UNBUFFERED, HeaderValue::from_static("no"));
        response.extensions_mut().insert(Unhurried);
        Ok(response)
    }
}
