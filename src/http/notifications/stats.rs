//! What was received, sent, refused and so on: by type, by day or hour.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::OfNotifications;
use super::super::extract::Query;
use super::super::problem::Problem;
use crate::clock::{millis, rfc3339};
use crate::notifications::queue::{Span, Tally};

/// The unit of the statistics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in super::super) enum By {
    /// Days of UTC; kept for 400.
    #[default]
    Day,
    /// Hours; kept for 192.
    Hour,
}

impl By {
    fn seconds(self) -> u64 {
        match self {
            Self::Day => 86_400,
            Self::Hour => 3_600,
        }
    }

    fn span(self, number: u64) -> Span {
        match self {
            Self::Day => Span::Day(number),
            Self::Hour => Span::Hour(number),
        }
    }

    /// How many are shown if not said, and how many are kept.
    fn bounds(self) -> (u64, u64) {
        match self {
            Self::Day => (14, 400),
            Self::Hour => (24, 192),
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StatsQuery {
    /// By day if left out.
    #[param(inline)]
    by: Option<By>,
    /// So many days or hours, this one included: otherwise 14 days, 24 hours; at most 400 and 192.
    #[param(minimum = 1, maximum = 400)]
    last: Option<u64>,
}

/// Notifications by time and type.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Statistics {
    /// The unit.
    by: By,
    /// The newest first; nothing for types and times without any.
    stats: Vec<Row>,
}

/// The notifications of a type in a day or an hour.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
#[schema(as = NotificationCounts)]
pub(in super::super) struct Row {
    /// When the day or hour begins.
    #[schema(format = DateTime)]
    pub(in super::super) begins: String,
    /// The type: one of the first 50 that there were, or `other`.
    #[serde(rename = "type")]
    pub(in super::super) kind: String,
    /// Accepted.
    pub(in super::super) received: u64,
    /// The receiver answered with success.
    pub(in super::super) sent: u64,
    /// The recheck did not want it.
    pub(in super::super) refused: u64,
    /// The user had got another one just before, or as many as the caps allow.
    pub(in super::super) throttled: u64,
    /// Nobody was online, or nothing could be sent, until it expired.
    pub(in super::super) expired: u64,
    /// Attempts that failed and were to be repeated.
    pub(in super::super) retried: u64,
    /// Given up: dead letters.
    pub(in super::super) dead: u64,
    /// Cancelled or replaced.
    pub(in super::super) cancelled: u64,
    /// Half of the first attempts were at most so late, in ms, rounded up: by half at most below a minute, to the double at most below two hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in super::super) late_p50_ms: Option<u64>,
    /// All but a hundredth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in super::super) late_p99_ms: Option<u64>,
}

impl Row {
    pub(in super::super) fn new(begins: String, kind: String, tally: &Tally) -> Self {
        Self {
            begins,
            kind,
            received: tally.count("received"),
            sent: tally.count("sent"),
            refused: tally.count("refused"),
            throttled: tally.count("throttled"),
            expired: tally.count("expired"),
            retried: tally.count("retried"),
            dead: tally.count("dead"),
            cancelled: tally.count("cancelled"),
            late_p50_ms: tally.late_ms(0.5),
            late_p99_ms: tally.late_ms(0.99),
        }
    }
}

/// Count notifications
///
/// By type and day or hour, each thing when it happened: what was received yesterday may be sent
/// today. For tokens of all bots: types are what tenants call them.
#[utoipa::path(
    get, path = "/v1/notifications/stats", tag = "notifications", operation_id = "countNotifications",
    params(StatsQuery),
    responses((status = 200, description = "The statistics", body = Statistics), OfNotifications)
)]
pub(super) async fn stats(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Query(query): Query<StatsQuery>,
) -> Result<Json<Statistics>, Problem> {
    caller.check_all_bots()?;
    let by = query.by.unwrap_or_default();
    let (default, most) = by.bounds();
    let last = query.last.unwrap_or(default);
    if !(1..=most).contains(&last) {
        let detail = format!("it is {last}; write a whole number from 1 to {most}");
        return Err(Problem::field("last", detail));
    }
    let stats = tallies(&api, by, last).await?.into_iter().flat_map(|(begins, stats)| {
        stats.into_iter().map(move |(kind, tally)| Row::new(begins.clone(), kind, &tally))
    });
    Ok(Json(Statistics { by, stats: stats.collect() }))
}

/// What was counted in each of the last so many days or hours, the newest first.
pub(in super::super) async fn tallies(
    api: &Api,
    by: By,
    last: u64,
) -> Result<Vec<(String, crate::notifications::queue::Stats)>, Problem> {
    let this = millis(api.clock.now()) / 1_000 / by.seconds();
    let numbers: Vec<u64> = (0..last).map(|ago| this.saturating_sub(ago)).collect();
    let spans: Vec<Span> = numbers.iter().map(|number| by.span(*number)).collect();
    let stats = api.notifications()?.stats(&spans).await?;
    let begins = numbers.iter().map(|number| rfc3339(number * by.seconds() * 1_000));
    Ok(begins.zip(stats).collect())
}
