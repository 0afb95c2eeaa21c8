//! Totals of many ads: by far the most frequent request.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use jiff::civil::Date;
use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::{Body, OfCounters};
use super::super::extract::{self, Path, Query};
use super::super::problem::Problem;
use super::BotPath;
use super::daily::{DailyQuery, Day, DayViews};
use crate::counters::view::AdId;
use crate::counters::{Counters, Days, Totals};
use crate::id::BotId;

/// Maximum number of ads per request.
const IDS_MAX: usize = 1_000;
/// The maximum length of a total, with the punctuation around it.
const TOTAL_BYTES: usize = 25;
/// Maximum number of daily figures in one answer: 1,000 ads for a month.
const DAYS_MAX: usize = 31_000;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct IdsQuery {
    /// Up to 1,000 ads, separated by commas, each percent-encoded and of at most 128 bytes. They
    /// must fit into a request head of 32 KiB.
    #[param(example = "a,b,c")]
    ids: String,
}

/// The requested ads.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Ids)]
pub(super) struct Asked {
    /// At most 1,000 ads of at most 128 bytes each. A repeated ad gets one total.
    #[serde(deserialize_with = "up_to_most")]
    #[schema(value_type = Vec<String>, max_items = 1000)]
    ids: Vec<AdId>,
    /// With `from` or `to`, the answer includes the days. `from` is the first day. Default: 29 days
    /// before `to`.
    #[schema(value_type = Option<String>, format = Date, example = "2026-11-01")]
    from: Option<Day>,
    /// The last day, less than 24 months after `from`. Default: today. Ads times days: at most
    /// 31,000.
    #[schema(value_type = Option<String>, format = Date, example = "2026-11-20")]
    to: Option<Day>,
}

/// Totals of ads.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename = "Totals")]
pub(super) struct Shown<'a> {
    /// By ad, in the requested order. 0 for an ad without views; `null` if no store can return it
    /// now.
    #[schema(value_type = std::collections::BTreeMap<String, Option<u64>>)]
    totals: ByAd<'a>,
    /// Present, and `true`, if views may be missing: those of the last seconds while Redis is
    /// unavailable, or those of uncached ads that are just being written to MongoDB. With `days`, also
    /// if views of the bot have waited for more than 10 s longer than the setting
    /// `pipelines.counters.linger`: the days may lack them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    stale: bool,
    /// By ad, if days are requested: every day, earliest first. A view appears here some seconds
    /// after it is part of the total.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, Vec<DayViews>>>, required = false)]
    days: Option<DaysByAd<'a>>,
}

/// Serialised directly, without an intermediate map.
#[derive(Debug)]
struct DaysByAd<'a> {
    ads: &'a [AdId],
    days: &'a [Vec<(Date, u64)>],
}

impl Serialize for DaysByAd<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.ads.len()))?;
        for (ad, days) in self.ads.iter().zip(self.days) {
            let days = days.iter().map(|&(day, views)| DayViews { day, views });
            map.serialize_entry(ad, &days.collect::<Vec<_>>())?;
        }
        map.end()
    }
}

/// Serialised directly, without an intermediate map.
#[derive(Debug)]
struct ByAd<'a> {
    ads: &'a [AdId],
    totals: &'a [Option<u64>],
}

impl Serialize for ByAd<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.ads.len()))?;
        for (ad, total) in self.ads.iter().zip(self.totals) {
            map.serialize_entry(ad, total)?;
        }
        map.end()
    }
}

/// Totals of ads
///
/// For up to 1,000 ads, if they fit into the URL. An ad whose id contains a comma needs the POST
/// route `/v1/bots/{bot}/counters/query`.
#[utoipa::path(
    get, path = "/v1/bots/{bot}/counters", tag = "counters", operation_id = "listTotals",
    params(BotPath, IdsQuery),
    responses((status = 200, description = "Their totals", body = Shown), OfCounters)
)]
pub(super) async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    Query(IdsQuery { ids }): Query<IdsQuery>,
) -> Result<Response, Problem> {
    let counters = api.counters_of(&bot, &caller)?;
    tell(counters, &bot, listed(&ids)?, None).await
}

/// Totals and days of many ads
///
/// The totals of up to 1,000 ads in the body. With `from` or `to`, also the views of each ad per
/// day. Changes nothing.
#[utoipa::path(
    post, path = "/v1/bots/{bot}/counters/query", tag = "counters", operation_id = "queryTotals",
    params(BotPath), request_body = Asked,
    responses((status = 200, description = "Their totals, and days", body = Shown), OfCounters, Body)
)]
pub(super) async fn query(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    extract::Json(Asked { ids, from, to }): extract::Json<Asked>,
) -> Result<Response, Problem> {
    let counters = api.counters_of(&bot, &caller)?;
    let span = (from.is_some() || to.is_some())
        .then(|| DailyQuery { from, to }.span(counters.today()))
        .transpose()?;
    tell(counters, &bot, ids, span).await
}

async fn tell(
    counters: &Counters,
    bot: &BotId,
    ids: Vec<AdId>,
    span: Option<(Date, Date)>,
) -> Result<Response, Problem> {
    let ads = without_repetitions(ids);
    if let Some((from, to)) = span {
        bounded(ads.len(), from, to)?;
    }
    let (totals, days) = if ads.is_empty() {
        (Totals { totals: Vec::new(), stale: false }, span.map(|_| Days::default()))
    } else {
        let totals = async { counters.totals(bot, &ads).await };
        let days = async {
            let Some((from, to)) = span else { return Ok(None) };
            Box::pin(counters.daily(bot, &ads, from, to)).await.map(Some)
        };
        tokio::try_join!(totals, days)?
    };
    let text = written(&ads, &totals, days.as_ref());
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

/// Refuses requests for too many daily figures.
fn bounded(ads: usize, from: Date, to: Date) -> Result<(), Problem> {
    let days = from.until(to).map_or(0, |span| span.get_days()).unsigned_abs() as usize + 1;
    if ads * days <= DAYS_MAX {
        return Ok(());
    }
    let detail = format!(
        "{ads} ads and {days} days are {} figures; the maximum is {DAYS_MAX} per request, so ask for fewer ads or days",
        ads * days
    );
    Err(Problem::field("ids", detail))
}

fn written(ads: &[AdId], totals: &Totals, days: Option<&Days>) -> Vec<u8> {
    let room: usize = ads.iter().map(|ad| ad.as_str().len() + TOTAL_BYTES).sum();
    let mut text = Vec::with_capacity(room + 32);
    let shown = Shown {
        totals: ByAd { ads, totals: &totals.totals },
        stale: totals.stale || days.is_some_and(|days| days.stale),
        days: days.map(|days| DaysByAd { ads, days: &days.of_ads }),
    };
    // Strings and numbers always serialise, and writes to a vector cannot fail.
    let _ = serde_json::to_writer(&mut text, &shown);
    text
}

/// Removes repeated ads, because the keys of a JSON object must be unique.
fn without_repetitions(mut ids: Vec<AdId>) -> Vec<AdId> {
    let mut seen = HashSet::with_capacity(ids.len());
    ids.retain(|id| seen.insert(id.clone()));
    ids
}

/// Parses `a,b,c`.
fn listed(ids: &str) -> Result<Vec<AdId>, Problem> {
    let count = ids.split(',').count();
    if count > IDS_MAX {
        let detail = format!("there are {count}; ask for at most {IDS_MAX} per request");
        return Err(Problem::field("ids", detail));
    }
    let mut ads = Vec::with_capacity(count);
    for (at, id) in ids.split(',').enumerate() {
        let ad = AdId::parse(id);
        ads.push(ad.map_err(|error| Problem::field(&format!("ids[{at}]"), error.to_string()))?);
    }
    Ok(ads)
}

/// Stops at the first ad beyond the maximum.
fn up_to_most<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<AdId>, D::Error> {
    struct UpToMost;

    impl<'de> Visitor<'de> for UpToMost {
        type Value = Vec<AdId>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of the ids of ads")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut ids = Vec::new();
            while let Some(id) = list.next_element()? {
                if ids.len() == IDS_MAX {
                    let detail = format!("there are more than {IDS_MAX}; split the request");
                    return Err(serde::de::Error::custom(detail));
                }
                ids.push(id);
            }
            Ok(ids)
        }
    }

    deserializer.deserialize_seq(UpToMost)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ads(ids: &[&str]) -> Vec<AdId> {
        ids.iter().map(|id| AdId::parse(id).unwrap()).collect()
    }

    fn told(ids: &[&str], totals: &[Option<u64>], stale: bool) -> String {
        let totals = Totals { totals: totals.to_vec(), stale };
        String::from_utf8(written(&ads(ids), &totals, None)).unwrap()
    }

    #[test]
    fn days_are_written_by_ad_and_bounded() {
        let (first, second) = (jiff::civil::date(2026, 11, 1), jiff::civil::date(2026, 11, 2));
        let totals = Totals { totals: vec![Some(4), Some(0)], stale: false };
        let of_ads = vec![vec![(first, 3), (second, 1)], vec![(first, 0), (second, 0)]];
        let mut days = Days { of_ads, stale: false };
        let told = |days: &Days| {
            String::from_utf8(written(&ads(&["b", "a"]), &totals, Some(days))).unwrap()
        };
        assert_eq!(
            told(&days),
            r#"{"totals":{"b":4,"a":0},"days":{"b":[{"day":"2026-11-01","views":3},{"day":"2026-11-02","views":1}],"a":[{"day":"2026-11-01","views":0},{"day":"2026-11-02","views":0}]}}"#
        );
        days.stale = true;
        let stale = told(&days);
        assert!(stale.starts_with(r#"{"totals":{"b":4,"a":0},"stale":true,"days""#), "{stale}");
        let month = jiff::civil::date(2026, 10, 31);
        let october = jiff::civil::date(2026, 10, 1);
        assert!(bounded(1_000, october, month).is_ok());
        assert!(bounded(1_000, october, first).is_err());
        assert!(bounded(42, october, october.saturating_add(jiff::Span::new().days(737))).is_ok());
        assert!(bounded(42, october, october.saturating_add(jiff::Span::new().days(738))).is_err());
    }

    #[test]
    fn totals_are_written_in_the_order_that_was_asked() {
        assert_eq!(
            told(&["b", "a", "q\"\\ü"], &[Some(12), None, Some(0)], false),
            r#"{"totals":{"b":12,"a":null,"q\"\\ü":0}}"#
        );
        assert_eq!(
            told(&["a"], &[Some(u64::MAX)], true),
            r#"{"totals":{"a":18446744073709551615},"stale":true}"#
        );
        assert_eq!(told(&[], &[], false), r#"{"totals":{}}"#);
    }

    #[test]
    fn an_ad_that_is_asked_for_twice_is_answered_once() {
        assert_eq!(without_repetitions(ads(&["b", "a", "b", "b", "c"])), ads(&["b", "a", "c"]));
    }

    #[test]
    fn a_list_of_ads_is_read_and_a_fault_is_reported_for_its_ad() {
        assert_eq!(listed("a,b c,ü").unwrap(), ads(&["a", "b c", "ü"]));
        assert_eq!(listed(&["a"; IDS_MAX].join(",")).unwrap().len(), IDS_MAX);
        let refused = |ids: &str| {
            let problem = serde_json::to_value(listed(ids).unwrap_err()).unwrap();
            let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
            (text(&problem["errors"][0]["field"]), text(&problem["errors"][0]["detail"]))
        };
        for (ids, field, detail) in [
            (String::new(), "ids[0]", "the id of the ad is empty"),
            ("a,,b".to_owned(), "ids[1]", "the id of the ad is empty"),
            ("a,b,c\u{1f}".to_owned(), "ids[2]", "control characters are not allowed"),
            ("x".repeat(10_000), "ids[0]", "has 10000 bytes; at most 128 are allowed"),
            (
                ["a"; IDS_MAX + 1].join(","),
                "ids",
                "there are 1001; ask for at most 1000 per request",
            ),
        ] {
            let (where_, what) = refused(&ids);
            assert_eq!(where_, field, "{what}");
            assert!(what.contains(detail), "{what}");
        }
    }

    #[test]
    fn a_body_with_too_many_ads_is_refused() {
        let read = |ids: usize| {
            let body = serde_json::json!({ "ids": vec!["a"; ids] }).to_string();
            serde_json::from_str::<Asked>(&body).map(|read| read.ids.len())
        };
        assert_eq!(read(IDS_MAX).unwrap(), IDS_MAX);
        assert!(read(IDS_MAX + 1).unwrap_err().to_string().contains("more than 1000"));
        assert_eq!(read(0).unwrap(), 0);
    }
}
