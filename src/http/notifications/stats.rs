//! Statistics of notifications: received, sent, refused and so on, by type and by day or hour.

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
    /// Days in UTC; kept for 400 days.
    #[default]
    Day,
    /// Hours; kept for 192 hours.
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

    /// The default and the maximum number of days or hours.
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
    /// Default: day.
    #[param(inline)]
    by: Option<By>,
    /// Number of days or hours, including the current one. Default: 14 days, 24 hours; at most 400
    /// and 192.
    #[param(minimum = 1, maximum = 400)]
    last: Option<u64>,
}

/// Notifications by time and type.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Statistics {
    /// The unit.
    by: By,
    /// Newest first. Types and times without notifications are left out.
    stats: Vec<Row>,
}

/// The notifications of a type in a day or an hour.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
#[schema(as = NotificationCounts)]
pub(in super::super) struct Row {
    /// The start of the day or hour.
    #[schema(format = DateTime)]
    pub(in super::super) begins: String,
    /// The type: one of the first 50 types, or `other`.
    #[serde(rename = "type")]
    pub(in super::super) kind: String,
    /// Accepted notifications.
    pub(in super::super) received: u64,
    /// The receiver answered with success.
    pub(in super::super) sent: u64,
    /// The recheck URL refused.
    pub(in super::super) refused: u64,
    /// The user got another one just before, or reached a cap.
    pub(in super::super) throttled: u64,
    /// Expired before the user was online or the notification could be sent.
    pub(in super::super) expired: u64,
    /// Failed attempts that are retried.
    pub(in super::super) retried: u64,
    /// Given up: dead letters.
    pub(in super::super) dead: u64,
    /// Cancelled or replaced notifications.
    pub(in super::super) cancelled: u64,
    /// The median delay of the first attempts, in ms, rounded up to the next step. The result is
    /// at most twice the exact value up to two hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in super::super) late_p50_ms: Option<u64>,
    /// The 99th percentile of the same delay.
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
/// By type and day or hour. Each event counts at its own time: a notification received yesterday
/// may be sent today. Only for tokens of all bots, because types belong to tenants.
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

/// The counts of the last days or hours, newest first.
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
