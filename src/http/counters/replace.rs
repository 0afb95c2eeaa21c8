//! Replacing the counters of an ad: reset, set, forget.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use jiff::civil::Date;
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa::openapi::{Object, ObjectBuilder, Type};

use super::super::Api;
use super::super::acting;
use super::super::auth::Caller;
use super::super::docs::{Bodiless, Body, OfCounters};
use super::super::extract::{self, NoBody, Path};
use super::super::problem::Problem;
use super::AdPath;
use super::daily::Day;
use crate::counters::view::{DAYS_MAX, Replacement};
use crate::trail::Action;

/// The new figures of an ad.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Figures {
    /// The new total.
    #[schema(minimum = 0, maximum = 1_000_000_000_000_000_u64)]
    total: u64,
    /// Views by day, at most [`DAYS_MAX`], from 2000-01-01 to the day after today; their sum must not
    /// exceed the total.
    #[serde(default)]
    #[schema(schema_with = days_schema, required = false)]
    days: BTreeMap<Day, u64>,
}

pub(super) fn days_schema() -> Object {
    let views = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0));
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some(
            "Views by day, such as `2026-11-01`, from 2000-01-01 to the day after today; all other days have none. Their sum must not exceed the total: the difference was viewed on unknown days.",
        ))
        .additional_properties(Some(views))
        .max_properties(Some(DAYS_MAX))
        .examples([serde_json::json!({ "2026-11-01": 3 })])
        .build()
}

impl Figures {
    /// The replacement, with days `within` these bounds.
    fn checked(self, within: &RangeInclusive<Date>) -> Result<Replacement, Problem> {
        let checked = Replacement::checked(self.total, self.days, within);
        checked.map_err(|(field, detail)| Problem::field(field, detail))
    }
}

/// Reset an ad
///
/// Sets its total and all its days to 0. New views are counted from there.
#[utoipa::path(
    post, path = "/v1/bots/{bot}/counters/{ad}/reset", tag = "counters",
    operation_id = "resetCounter", params(AdPath),
    responses(
        (status = 204, description = "The total is 0, within seconds the days are too"),
        OfCounters, Bodiless,
    )
)]
pub(super) async fn reset(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<AdPath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    replace(&api, &caller, &path, "reset counter", &Replacement::default()).await
}

/// Set an ad
///
/// Replaces all views counted so far, for example by figures of another system. New views are
/// counted from there.
#[utoipa::path(
    put, path = "/v1/bots/{bot}/counters/{ad}", tag = "counters", operation_id = "setCounter",
    params(AdPath), request_body = Figures,
    responses(
        (status = 204, description = "The total is set, within seconds the days are too"),
        OfCounters, Body,
    )
)]
pub(super) async fn set(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<AdPath>,
    extract::Json(figures): extract::Json<Figures>,
) -> Result<StatusCode, Problem> {
    let figures = figures.checked(&api.counters_of(&path.bot, &caller)?.days())?;
    replace(&api, &caller, &path, "set counter", &figures).await
}

/// Forget an ad
///
/// Deletes all data about its views.
#[utoipa::path(
    delete, path = "/v1/bots/{bot}/counters/{ad}", tag = "counters",
    operation_id = "forgetCounter", params(AdPath),
    responses(
        (status = 204, description = "The total is 0, within seconds the days are too"),
        OfCounters, Bodiless,
    )
)]
pub(super) async fn forget(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<AdPath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    let nothing = Replacement { forget: true, ..Replacement::default() };
    replace(&api, &caller, &path, "forget counter", &nothing).await
}

async fn replace(
    api: &Api,
    caller: &Caller,
    AdPath { bot, ad }: &AdPath,
    action: &'static str,
    with: &Replacement,
) -> Result<StatusCode, Problem> {
    let counters = api.counters_of(bot, caller)?;
    let work = async { Ok(counters.replace(bot, ad, with).await?) };
    let action = Action::new(action).in_built_in(crate::counters::PIPELINE).of_bot(Some(bot));
    let action = action.target(ad).details(&format!("total {}", with.total)).often();
    api.act(caller, action, work, acting::done).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use serde_json::{Value, json};

    use super::*;
    use crate::counters::view::{FIRST_DAY, TOTAL_MAX};

    /// The replacement, or the field and the detail.
    fn read(figures: &Value) -> Result<Replacement, (String, String)> {
        let figures: Figures = serde_json::from_value(figures.clone()).unwrap();
        figures.checked(&(FIRST_DAY..=date(2026, 11, 21))).map_err(|problem| {
            let problem = serde_json::to_value(problem).unwrap();
            let text = |name: &str| problem["errors"][0][name].as_str().unwrap().to_owned();
            (text("field"), text("detail"))
        })
    }

    #[test]
    fn figures_are_read_and_days_without_views_are_left_out() {
        let read = read(
            &json!({ "total": 9, "days": { "2026-11-01": 3, "2024-02-29": 6, "2026-01-01": 0 } }),
        );
        let days = [(date(2024, 2, 29), 6), (date(2026, 11, 1), 3)].into();
        assert_eq!(read.unwrap(), Replacement { total: 9, days, forget: false });
        let most = super::tests::read(&json!({ "total": TOTAL_MAX })).unwrap();
        assert_eq!(most, Replacement { total: TOTAL_MAX, ..Replacement::default() });
    }

    #[test]
    fn figures_out_of_bounds_are_refused_by_their_field() {
        let days = |count: usize| {
            let first = date(2020, 1, 1);
            let day = |at: usize| {
                first.saturating_add(jiff::Span::new().days(i64::try_from(at).unwrap()))
            };
            (0..count).map(|at| (day(at).to_string(), json!(1))).collect::<serde_json::Map<_, _>>()
        };
        assert!(read(&json!({ "total": 744, "days": days(744) })).is_ok());
        let bounds = json!({ "total": 2, "days": { "2000-01-01": 1, "2026-11-21": 1 } });
        assert!(read(&bounds).is_ok());
        for (figures, field, detail) in [
            (
                json!({ "total": TOTAL_MAX + 1 }),
                "total",
                "it is 1000000000000001; write a whole number from 0 to 1000000000000000",
            ),
            (
                json!({ "total": 2000, "days": days(745) }),
                "days",
                "there are 745; at most 744 are allowed",
            ),
            (
                json!({ "total": 1, "days": { "1999-12-31": 1 } }),
                "days",
                "they have 1999-12-31; write days from 2000-01-01 to 2026-11-21, the day after today (counters.time_zone)",
            ),
            (
                json!({ "total": 1, "days": { "2026-11-22": 0, "9999-12-31": 1 } }),
                "days",
                "they have 2026-11-22; write days from 2000-01-01 to 2026-11-21, the day after today (counters.time_zone)",
            ),
            (
                json!({ "total": 2, "days": { "2026-11-01": 3 } }),
                "days",
                "they have 3 views, above the total (2); raise that",
            ),
            (
                json!({ "total": 2, "days": { "2026-11-01": u64::MAX, "2026-11-02": u64::MAX } }),
                "days",
                "they have 18446744073709551615 views, above the total (2); raise that",
            ),
        ] {
            let expected = (field.to_owned(), detail.to_owned());
            assert_eq!(read(&figures).unwrap_err(), expected);
        }
    }
}
