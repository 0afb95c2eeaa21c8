//! Publishing events to the bus.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Json, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::admit::NamedBots;
use super::auth::Caller;
use super::cloudevents::{Events, Mode};
use super::docs::{Body, Parameters};
use super::extract;
use super::problem::{Flaw, Kind, Problem};
use super::traced::Traced;
use crate::admission::aside::aside;
use crate::bus::BusError;
use crate::bus::backlog::Exceeded;
use crate::bus::source::Outgoing;
use crate::event::Event;
use crate::id::BotId;

/// Requires the scope `publish`.
pub(super) fn publishing() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(publish))
}

/// The accepted events.
#[derive(Debug, Serialize, ToSchema)]
#[expect(clippy::struct_field_names, reason = "the names are those of the answer")]
pub(super) struct Accepted {
    /// Number of accepted events: all events of the request.
    accepted: usize,
    /// The event types that no enabled pipeline takes, and no rule of the bot that this process
    /// knows. The bus stores such events, but no queue gets a copy. Absent if there are none. A
    /// process without the roles `work` and `ingest` knows no rules.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(required = false, max_items = 1_000)]
    unmatched: BTreeSet<Box<str>>,
    /// The accepted events in the order of the request; only with `Prefer: return=representation`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 1_000)]
    events: Option<Vec<OnBus>>,
}

/// An accepted event on the bus.
#[derive(Debug, Serialize, ToSchema)]
struct OnBus {
    /// Its id.
    id: String,
    /// Its place on the stream of the bus.
    #[schema(pattern = "^[0-9]+-[0-9]+$", example = "1764000000000-0")]
    offset: String,
}

/// Whether the client wants the accepted events in the answer (RFC 7240).
fn wants_representation(headers: &HeaderMap) -> bool {
    let values = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    // Of two preferences of the same name, the first one counts.
    let mut wanted = values.flat_map(|value| value.split(',')).filter_map(|preference| {
        let preference = preference.split(';').next().unwrap_or_default();
        let (name, value) = preference.split_once('=')?;
        let value = value.trim().trim_matches('"').to_ascii_lowercase();
        name.trim().eq_ignore_ascii_case("return").then_some(value)
    });
    wanted.next().as_deref() == Some("representation")
}

/// The id of a valid event.
fn id_of(text: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct WithId {
        id: String,
    }
    serde_json::from_slice(text).map(|WithId { id }| id).unwrap_or_default()
}

/// Publish events
///
/// One CloudEvent (structured, or binary with its attributes in headers `ce-…`) or a batch of up to
/// 1,000. The bus stores all events or none, and the answer comes after that. `unmatched` lists
/// types that no pipeline takes, for example mistyped ones. `application/json` is accepted as an
/// event or a batch too. Duplicate ids and expired events are not detected here. With
/// `Prefer: return=representation` the answer has the id and the place on the bus of each event.
#[utoipa::path(
    post, path = "/v1/events", tag = "events", operation_id = "publishEvents",
    params(
        ("Prefer" = Option<String>, Header, description = "`return=representation`: the answer has `events`"),
    ),
    request_body(content(
        (Event = "application/cloudevents+json"),
        (Vec<Event> = "application/cloudevents-batch+json"),
        (Event = "application/json"),
    )),
    responses(
        (status = 202, description = "The bus has stored the events", body = Accepted,
            headers(("Preference-Applied" = String, description = "`return=representation`, if the client asked for it"))),
        Body,
        Parameters,
    )
)]
async fn publish(
    State(api): State<Arc<Api>>,
    caller: Caller,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let mode = Mode::of(&parts.headers)?;
    let body = extract::read(&parts.headers, body).await?;
    let events = mode.read(&parts.headers, &body)?;
    let accepted = store(&api, &caller, &parts, events).await?;
    let applied = accepted.events.is_some();
    let applied = applied.then_some([("preference-applied", "return=representation")]);
    Ok((StatusCode::ACCEPTED, applied, Json(accepted)).into_response())
}

/// Why events are not stored, or are not known to be.
pub(super) struct Unstored {
    pub(super) problem: Problem,
    /// Whether the bus may have them all the same.
    pub(super) is_unsure: bool,
}

impl From<Problem> for Unstored {
    fn from(problem: Problem) -> Self {
        Self { problem, is_unsure: false }
    }
}

impl From<Unstored> for Problem {
    fn from(unstored: Unstored) -> Self {
        unstored.problem
    }
}

/// Puts events on the bus for a caller, if all of them are for its bots.
pub(super) async fn store(
    api: &Arc<Api>,
    caller: &Caller,
    parts: &Parts,
    mut events: Events<'_>,
) -> Result<Accepted, Unstored> {
    let foreign: Vec<Flaw> = (events.bots.iter().enumerate())
        .filter(|(_, bot)| !caller.covers(bot))
        .map(|(index, bot)| Flaw {
            index: Some(index),
            field: Some("botid".to_owned()),
            detail: format!("the token is not for bot {:?}", bot.as_str()),
        })
        .collect();
    if !foreign.is_empty() {
        let detail = match foreign.len() {
            1 => "nothing was stored: the token is not for the bot of 1 event".to_owned(),
            n => format!("nothing was stored: the token is not for the bots of {n} events"),
        };
        return Err(Problem::new(Kind::Forbidden, detail).errors(foreign).into());
    }
    let mut counts = BTreeMap::<&BotId, u32>::new();
    for bot in &events.bots {
        *counts.entry(bot).or_default() += 1;
    }
    for bot in counts.keys() {
        NamedBots::note(&parts.extensions, bot.as_str());
    }
    // The events count as in flight until they are published.
    let _taken = counts
        .iter()
        .map(|(bot, count)| api.gate.charge_bot(bot, *count, parts))
        .collect::<Result<Vec<_>, _>>()?;
    api.startup.ended().await.map_err(|reason| {
        let detail = format!("nothing was stored: this process is not ready yet: {reason}");
        Problem::new(Kind::Starting, detail).retry_after(1)
    })?;
    let senders = senders(api, caller, &counts);
    let entered = aside(api.backlog.enter(senders)).await;
    let mut entered = entered.map_err(|Exceeded { place, events }| {
        let bot = counts.keys().nth(place).copied();
        api.gate.refuse_backlog(bot, events, parts)
    })?;
    let mut traced = Traced::of(api, &parts.headers, &mut events);
    let outgoing: Vec<Outgoing<'_>> = events
        .texts
        .iter()
        .zip(&events.bots)
        .map(|(json, bot)| Outgoing { json: json.as_ref(), bot: bot.as_str() })
        .collect();
    entered.sends();
    let published = api.bus.publish(&outgoing).await;
    drop(outgoing);
    let offsets = match published {
        Ok(offsets) => offsets,
        Err(error) => {
            traced.fail(&error);
            let is_sure = match &error {
                BusError::Redis(error) => !error.may_have_run(),
                error => matches!(error, BusError::Connect { .. } | BusError::Refused { .. }),
            };
            if is_sure {
                entered.failed();
            }
            return Err(Unstored { problem: error.into(), is_unsure: !is_sure });
        }
    };
    entered.added(offsets.last().copied().unwrap_or_default());
    drop(traced);
    let applied = wants_representation(&parts.headers);
    let on_bus = applied.then(|| {
        let pairs = events.texts.iter().zip(&offsets);
        pairs.map(|(text, offset)| OnBus { id: id_of(text), offset: offset.to_string() }).collect()
    });
    let kinds = events.bots.iter().zip(events.kinds);
    let unmatched = kinds.filter(|(bot, kind)| !api.taken.takes(bot, kind));
    let unmatched = unmatched.map(|(_, kind)| kind).collect();
    Ok(Accepted { accepted: events.texts.len(), unmatched, events: on_bus })
}

/// The senders whose uncopied events are bounded, with their number of events: each bot, and last
/// the token, if it is not for all bots.
fn senders(api: &Api, caller: &Caller, counts: &BTreeMap<&BotId, u32>) -> Vec<(u64, u64)> {
    let sender = |kind: char, name: &str| api.backlog.sender((kind, name));
    let bots = counts.iter().map(|(bot, count)| (sender('b', bot.as_str()), u64::from(*count)));
    let mut senders: Vec<_> = bots.collect();
    if caller.has_token() && !caller.covers_all() {
        let events = counts.values().map(|count| u64::from(*count)).sum();
        senders.push((sender('t', caller.name()), events));
    }
    senders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preference_is_read_as_rfc_7240_says() {
        let wants = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("prefer", value.parse().unwrap());
            }
            wants_representation(&headers)
        };
        for yes in [
            &["return=representation"][..],
            &["Return = \"representation\"; foo=1"],
            &["wait=10, return=representation"],
            &["respond-async", "return=representation"],
            &["return=representation, return=minimal"],
        ] {
            assert!(wants(yes), "{yes:?}");
        }
        for no in [&[][..], &["return=minimal"], &["representation"], &["returns=representation"]] {
            assert!(!wants(no), "{no:?}");
        }
        assert!(!wants(&["return=minimal, return=representation"]));
    }

    #[test]
    fn the_id_of_an_event_is_read_from_its_text() {
        assert_eq!(id_of(br#"{"specversion":"1.0","id":"a\"b","type":"t"}"#), "a\"b");
    }
}
