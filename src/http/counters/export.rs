//! The export of all views of a day: one line per ad, as a stream.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use serde::{Deserialize, Serialize};
use tracing::warn;
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::OfStoredCounters;
use super::super::extract::{Path, Query};
use super::super::problem::{Kind, Problem};
use super::BotPath;
use super::daily::Day;
use crate::counters::exports::{self, Broken};
use crate::counters::view::AdId;

pub(super) const NDJSON: &str = "application/x-ndjson";
/// Marks an export that may lack older views than those of the last seconds.
const STALE: HeaderName = HeaderName::from_static("x-stale");
/// Maximum number of lines per write.
const LINES: usize = 1_000;
/// How long a request waits for the first lines.
const WITHIN: Duration = Duration::from_secs(5);
/// `Retry-After` while other exports run, in seconds.
const BUSY_SECONDS: u32 = 5;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExportQuery {
    /// The day in the time zone of the setting `counters.time_zone`.
    #[param(value_type = String, format = Date, example = "2026-11-01")]
    day: Day,
}

/// One line of an export.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Line {
    /// The ad.
    #[schema(value_type = String)]
    ad: AdId,
    /// Its views on that day, 1 or more.
    views: u64,
}

/// Export a day
///
/// A line `{"ad":"x","views":3}` for each ad that was viewed on that day, in no defined order. In a
/// process, a bot has one export at a time, a token two, and all together eight. An interrupted export
/// is recognisable: the connection ends without the last chunk. A view appears here some seconds after
/// it is part of the total, on a secondary of MongoDB up to 90 s later.
#[utoipa::path(
    get, path = "/v1/bots/{bot}/counters/export", tag = "counters", operation_id = "exportViews",
    params(BotPath, ExportQuery),
    responses(
        (status = 200, description = "The lines of the day", body = Line, content_type = NDJSON,
            headers(("X-Stale" = String, description = "`true`, if older views than those of the last seconds may be missing: views of the bot have waited for more than 10 s longer than the setting `pipelines.counters.linger`, or Redis does not tell. An export may come from a server of MongoDB that lacks the views of the last 90 s, without this header"))),
        OfStoredCounters,
    )
)]
pub(super) async fn export(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    Query(ExportQuery { day: Day(day) }): Query<ExportQuery>,
) -> Result<Response, Problem> {
    let counters = api.counters_of(&bot, &caller)?;
    let Some(turn) = counters.begin_export(caller.name(), places(&caller), &bot) else {
        let detail = "nothing was done: this process already runs an export of this bot, or the maximum \
                      of exports of this token or of all tokens; retry later, or use another process";
        return Err(Problem::new(Kind::Busy, detail).retry_after(BUSY_SECONDS));
    };
    // Asked first: MongoDB then has what does not wait any more.
    let stale = counters.is_behind(&bot).await;
    let views = counters.export(&bot, day, turn, WITHIN).await?;
    let body = Body::from_stream(chunks(views));
    let mut response = ([(header::CONTENT_TYPE, NDJSON)], body).into_response();
    if stale {
        response.headers_mut().insert(STALE, HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// The number of exports that a caller may run.
pub(in crate::http) fn places(caller: &Caller) -> usize {
    if caller.covers_all() { exports::ALL } else { exports::OF_ONE }
}

/// Groups the lines that are available into chunks. An error ends the answer without the last
/// chunk.
fn chunks(
    views: impl Stream<Item = Result<(AdId, u64), Broken>> + Send + Unpin + 'static,
) -> impl Stream<Item = Result<Vec<u8>, Broken>> + Send + 'static {
    let chunk = |views: Result<Vec<(AdId, u64)>, Broken>| {
        let mut text = Vec::new();
        for (ad, views) in views? {
            // Strings and numbers always serialise, and writes to a vector cannot fail.
            let _ = serde_json::to_writer(&mut text, &Line { ad, views });
            text.push(b'\n');
        }
        Ok(text)
    };
    // The complete lines before an error in the same chunk are dropped too: the answer is
    // incomplete in any case.
    let views = views.try_ready_chunks(LINES).map_err(|error| error.1);
    views.map(chunk).inspect_err(|error: &Broken| warn!(%error, "an export failed"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::Router;
    use axum::routing::get;
    use futures_util::stream;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_util::sync::CancellationToken;

    use super::super::super::forwarded::Proxies;
    use super::super::super::listen::{Limits, serve};
    use super::*;
    use crate::redis::RedisError;

    fn ad(number: u64) -> (AdId, u64) {
        (AdId::parse(&format!("ad \"{number}\"")).unwrap(), number)
    }

    fn failure() -> Broken {
        let (target, message) = ("here".to_owned(), "LOADING".to_owned());
        Broken::Counters(RedisError::Refused { target, command: "GET", message }.into())
    }

    #[tokio::test]
    async fn every_ad_is_a_line_and_many_lines_are_a_chunk() {
        let chunks: Vec<_> = chunks(stream::iter((1..=1_001).map(ad).map(Ok))).collect().await;
        let chunks: Vec<_> = chunks.into_iter().map(Result::unwrap).collect();
        assert_eq!(chunks.len(), 2);
        assert_eq!(chunks[1], b"{\"ad\":\"ad \\\"1001\\\"\",\"views\":1001}\n");
        assert_eq!(String::from_utf8_lossy(&chunks[0]).lines().count(), 1_000);
    }

    #[tokio::test]
    async fn an_error_on_the_way_is_the_last_item() {
        let views = stream::iter([Ok(ad(1)), Err(failure()), Ok(ad(2))]);
        let mut chunks = Box::pin(chunks(views));
        assert!(matches!(chunks.next().await, Some(Err(Broken::Counters(_)))));
    }

    /// The whole answer that a client receives for these views.
    async fn answered(
        views: impl Stream<Item = Result<(AdId, u64), Broken>> + Send + Unpin + 'static,
    ) -> String {
        let body = Body::from_stream(chunks(views));
        let body = Arc::new(Mutex::new(Some(body)));
        let routes =
            Router::new().route("/", get(async move || body.lock().unwrap().take().unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let asking = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
            stream.write_all(request).await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            stop.cancel();
            String::from_utf8(answer).unwrap()
        };
        let limits = Limits { name: "test", connections: 16, per_address: 16 };
        tokio::join!(
            serve(listener, routes, limits, Proxies::default(), stop.clone().into()),
            asking
        )
        .1
    }

    #[tokio::test]
    async fn a_broken_export_ends_without_the_last_chunk() {
        let whole = answered(stream::iter([Ok(ad(1))])).await;
        assert!(whole.ends_with("}\n\r\n0\r\n\r\n"), "{whole}");
        let later = async {
            // Lets the server send the first chunk before the error.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            Err(failure())
        };
        let cut = answered(stream::iter([Ok(ad(1))]).chain(Box::pin(stream::once(later)))).await;
        assert!(cut.contains("200 OK") && cut.ends_with("}\n\r\n"), "{cut}");
    }
}
