//! Views per day.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use jiff::Span;
use jiff::civil::Date;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::OfStoredCounters;
use super::super::extract::{Path, Query};
use super::super::problem::Problem;
use super::AdPath;
use crate::counters::Days;
pub(super) use crate::counters::view::Day;

/// Maximum length of a period, in months.
const MONTHS_MAX: i32 = 24;
/// Default number of days, including today.
const DAYS: i32 = 30;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DailyQuery {
    /// The first day. Default: 29 days before `to`.
    #[param(value_type = Option<String>, format = Date, example = "2026-11-01")]
    pub(super) from: Option<Day>,
    /// The last day, less than 24 months after `from`. Default: today.
    #[param(value_type = Option<String>, format = Date, example = "2026-11-20")]
    pub(super) to: Option<Day>,
}

impl DailyQuery {
    /// The first and the last day.
    pub(super) fn span(&self, today: Date) -> Result<(Date, Date), Problem> {
        let to = self.to.map_or(today, |Day(to)| to);
        let earlier = || to.saturating_sub(Span::new().days(DAYS - 1));
        let from = self.from.map_or_else(earlier, |Day(from)| from);
        if from > to {
            let detail = match self.to {
                Some(_) => format!("it is {from}, after to ({to}); swap them"),
                None => {
                    format!("it is {from}, after today ({to}); send an earlier day, or to as well")
                }
            };
            return Err(Problem::field("from", detail));
        }
        // The sum fails only at the end of the calendar, where no period can be too long.
        let end = from.checked_add(Span::new().months(MONTHS_MAX));
        if end.is_ok_and(|end| to >= end) {
            let detail = format!(
                "it is {to}, {MONTHS_MAX} months or more after from ({from}); ask for a shorter period"
            );
            return Err(Problem::field("to", detail));
        }
        Ok((from, to))
    }
}

/// Views per day.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Daily {
    /// Every day of the period, earliest first.
    days: Vec<DayViews>,
    /// Present, and `true`, if older views than those of the last seconds may be missing: views of the
    /// bot have waited for more than 10 s longer than the setting `pipelines.counters.linger`, or Redis
    /// does not tell.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    stale: bool,
}

/// The views of a day.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DayViews {
    /// The day in the time zone of the setting `counters.time_zone`.
    #[schema(value_type = String, format = Date)]
    pub(super) day: Date,
    /// 0 for a day without views.
    pub(super) views: u64,
}

/// Views per day
///
/// For at most 24 months. A view appears here some seconds after it is part of the total. While it takes
/// longer, the answer has `"stale": true`.
#[utoipa::path(
    get, path = "/v1/bots/{bot}/counters/{ad}/daily", tag = "counters",
    operation_id = "dailyViews", params(AdPath, DailyQuery),
    responses((status = 200, description = "Every day", body = Daily), OfStoredCounters)
)]
pub(super) async fn daily(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(AdPath { bot, ad }): Path<AdPath>,
    Query(query): Query<DailyQuery>,
) -> Result<Json<Daily>, Problem> {
    let counters = api.counters_of(&bot, &caller)?;
    let (from, to) = query.span(counters.today())?;
    let Days { mut of_ads, stale } = counters.daily(&bot, &[ad], from, to).await?;
    let days = of_ads.pop().unwrap_or_default().into_iter();
    let days = days.map(|(day, views)| DayViews { day, views }).collect();
    Ok(Json(Daily { days, stale }))
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;

    use super::*;

    #[test]
    fn a_day_is_read_in_one_form_only() {
        assert_eq!(Day::parse("2026-11-01"), Some(Day(date(2026, 11, 1))));
        assert_eq!(Day::parse("2024-02-29"), Some(Day(date(2024, 2, 29))));
        for wrong in [
            "",
            "2026-11-1",
            "2026-11-31",
            "2025-02-29",
            "2026-13-01",
            "2026-00-10",
            "20261101",
            "2026-11-01T10:00",
            "2026-W01-1",
            "+02026-11-01",
            "-2026-11-0",
            "2026/11/01",
            "today",
            "2026-11-0\u{661}",
            " 2026-11-01",
            "0000-12-31",
        ] {
            assert_eq!(Day::parse(wrong), None, "{wrong:?}");
        }
    }

    fn span(from: Option<&str>, to: Option<&str>) -> Result<(String, String), String> {
        let day = |text: &str| Day::parse(text).unwrap();
        let query = DailyQuery { from: from.map(day), to: to.map(day) };
        match query.span(date(2026, 11, 20)) {
            Ok((from, to)) => Ok((from.to_string(), to.to_string())),
            Err(problem) => {
                let problem = serde_json::to_value(problem).unwrap();
                Err(problem["detail"].as_str().unwrap().to_owned())
            }
        }
    }

    #[test]
    fn omitted_dates_mean_the_last_30_days() {
        let days = |from: &str, to: &str| Ok((from.to_owned(), to.to_owned()));
        assert_eq!(span(None, None), days("2026-10-22", "2026-11-20"));
        assert_eq!(span(Some("2026-11-20"), None), days("2026-11-20", "2026-11-20"));
        assert_eq!(span(None, Some("2026-03-01")), days("2026-01-31", "2026-03-01"));
        assert_eq!(span(Some("2027-01-01"), Some("2027-01-02")), days("2027-01-01", "2027-01-02"));
        assert_eq!(span(Some("9999-12-31"), Some("9999-12-31")), days("9999-12-31", "9999-12-31"));
        assert_eq!(span(None, Some("0001-01-01")), days("0000-12-03", "0001-01-01"));
    }

    #[test]
    fn reversed_days_and_more_than_24_months_are_refused() {
        assert_eq!(
            span(Some("2026-11-02"), Some("2026-11-01")).unwrap_err(),
            "from: it is 2026-11-02, after to (2026-11-01); swap them"
        );
        assert_eq!(
            span(Some("2026-11-21"), None).unwrap_err(),
            "from: it is 2026-11-21, after today (2026-11-20); send an earlier day, or to as well"
        );
        assert!(span(Some("2024-11-21"), Some("2026-11-20")).is_ok());
        assert_eq!(
            span(Some("2024-11-20"), Some("2026-11-20")).unwrap_err(),
            "to: it is 2026-11-20, 24 months or more after from (2024-11-20); ask for a shorter period"
        );
    }
}
