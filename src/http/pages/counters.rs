//! The page of a bot's counters: totals of ads, and the days of one ad.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use futures_util::StreamExt as _;
use jiff::ToSpan as _;
use jiff::civil::Date;
use maud::{Markup, html};
use serde::Deserialize;
use tokio::time::Instant;

use super::super::Api;
use super::super::auth::Caller;
use super::super::counters::export_places;
use super::super::extract::Query;
use super::super::problem::Problem;
use super::{Refusal, bot, grouped, headline, page};
use crate::counters::exports::{Broken, Turn};
use crate::counters::view::AdId;
use crate::counters::{self, Counters, Totals};
use crate::id::BotId;

/// Maximum number of ads per lookup.
const ADS: usize = 100;
/// Number of days shown for an ad, including today.
const DAYS: i32 = 30;
/// Number of top ads, and bounds of the search for them.
const TOP: usize = 20;
const TOP_ADS_MAX: usize = 10_000;
const TOP_TIME: Duration = Duration::from_secs(2);
/// Time limit of the first ads, which may not be in the memory of MongoDB.
const FIRST_TIME: Duration = Duration::from_secs(5);
/// Shown if no store returns a total.
const UNKNOWN: &str = "unknown: MongoDB is unavailable, or a change of this ad is being written";
/// Shown if views may be missing.
const STALE: &str = "Views may be missing: views of this bot wait to be written to MongoDB, or Redis does not answer.";
/// Shown if no turn is free.
const BUSY: &str = "Busy: this process already exports the views of this bot, or as many days as it may for this token or for all tokens. Reload the page in some seconds.";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    #[serde(default)]
    bot: String,
    /// Ads, separated by commas.
    #[serde(default)]
    ads: String,
}

/// The counters of the requested ads.
struct Found {
    bot: BotId,
    totals: Vec<(AdId, Option<u64>)>,
    /// The ads with the most views today, if no ad is requested; or the reason why they are unavailable.
    top: Option<Result<Top, String>>,
    /// The days, if exactly one ad is requested; or the reason why they are unavailable.
    days: Option<Result<Vec<(Date, u64)>, String>>,
    /// Whether views may be missing.
    stale: bool,
}

/// The ads with the most views today.
struct Top {
    /// The most viewed ones first.
    ads: Vec<(AdId, u64)>,
    /// Whether more ads have views than were read.
    more: bool,
    /// Whether older views than those of the last seconds may be missing.
    stale: bool,
}

impl Top {
    /// Reads an export, so it needs the turn of one.
    async fn of(counters: &Counters, bot: &BotId, turn: Turn) -> Result<Self, Broken> {
        // Asked first: MongoDB then has what does not wait any more.
        let stale = counters.is_behind(bot).await;
        let mut views = counters.export(bot, counters.today(), turn, FIRST_TIME).await?;
        let deadline = Instant::now() + TOP_TIME;
        let mut top = Self { ads: Vec::new(), more: false, stale };
        for _ in 0..TOP_ADS_MAX {
            let Ok(next) = tokio::time::timeout_at(deadline, views.next()).await else {
                top.more = true;
                break;
            };
            let Some(view) = next else { return Ok(top) };
            top.add(view?);
        }
        // One more would have to be read to know better.
        top.more = true;
        Ok(top)
    }

    fn add(&mut self, (ad, views): (AdId, u64)) {
        let at = self.ads.partition_point(|(_, other)| *other >= views);
        if at < TOP {
            self.ads.insert(at, (ad, views));
            self.ads.truncate(TOP);
        }
    }
}

/// The path of the page with the top ads of a bot.
pub(super) fn path_of(bot: &BotId) -> String {
    format!("/counters?bot={}", bot::encoded(bot.as_str()))
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    let found = find(&api, &caller, &wish).await?;
    let content = match api.services.of::<Counters>(counters::PIPELINE) {
        Err(why) => html! {
            (headline("Counters", caller.has_token()))
            p.none { "Views are not counted here: " (why) "." }
        },
        Ok(_) => body(&wish, found.as_ref(), caller.has_token()),
    };
    Ok(page("Counters", &content))
}

async fn find(api: &Api, caller: &Caller, wish: &PageQuery) -> Result<Option<Found>, Problem> {
    if wish.bot.is_empty() {
        return Ok(None);
    }
    let bot = BotId::parse(&wish.bot);
    let bot = bot.map_err(|error| Problem::field("bot", error.to_string()))?;
    let counters = api.counters_of(&bot, caller)?;
    let ads = wish.ads.split(',').map(str::trim).filter(|ad| !ad.is_empty()).map(AdId::parse);
    let ads: Result<Vec<AdId>, _> = ads.collect();
    let ads = ads.map_err(|error| Problem::field("ads", error.to_string()))?;
    if ads.is_empty() {
        let top = match counters.begin_page(caller.name(), export_places(caller), &bot) {
            Some(turn) => Top::of(counters, &bot, turn).await.map_err(|broken| match broken {
                Broken::Counters(error) => Problem::from(error).detail().to_owned(),
                Broken::Overtaken(_) => BUSY.to_owned(),
            }),
            None => Err(BUSY.to_owned()),
        };
        let stale = top.as_ref().is_ok_and(|top| top.stale);
        return Ok(Some(Found { bot, totals: Vec::new(), top: Some(top), days: None, stale }));
    }
    if ads.len() > ADS {
        let detail = format!("name 1 to {ADS} ads, separated by commas");
        return Err(Problem::field("ads", detail));
    }
    let Totals { totals, mut stale } = counters.totals(&bot, &ads).await?;
    let days = if ads.len() == 1 {
        let today = counters.today();
        let from = today.saturating_sub((DAYS - 1).days());
        let days = counters.daily(&bot, &ads, from, today).await;
        let days = days.map(|mut days| {
            stale |= days.stale;
            days.of_ads.pop().unwrap_or_default()
        });
        Some(days.map_err(|error| Problem::from(error).detail().to_owned()))
    } else {
        None
    };
    let totals = ads.into_iter().zip(totals).collect();
    Ok(Some(Found { bot, totals, top: None, days, stale }))
}

fn body(wish: &PageQuery, found: Option<&Found>, has_token: bool) -> Markup {
    html! {
        (headline("Counters", has_token))
        p { "Total views of ads. For a single ad, also the views per day. Without an ad, the top ads of the bot." }
        form.ask method="get" action="/counters" role="search" {
            label for="bot" { "Bot" }
            input id="bot" name="bot" required maxlength="256" value=(wish.bot);
            label for="ads" { "Ads" }
            input id="ads" name="ads" maxlength="4096" value=(wish.ads) aria-describedby="many";
            button type="submit" { "Show" }
            span.none #many { "one ad, or several separated by commas" }
        }
        @if found.is_some_and(|found| found.stale) { p.none { (STALE) } }
        @if let Some(top) = found.and_then(|found| Some((&found.bot, found.top.as_ref()?))) { (top_ads(top)) }
        @if let Some(found) = found.filter(|found| found.top.is_none()) { (totals(found)) }
        @if let Some(days) = found.and_then(|found| found.days.as_ref()) { (by_day(days)) }
    }
}

fn top_ads((bot, top): (&BotId, &Result<Top, String>)) -> Markup {
    html! {
        section #top {
            h2 { "Top ads of " a href=(bot::path(bot)) { (bot) } " today" }
            @match top {
                Err(why) => p.none { (why) },
                Ok(Top { ads, .. }) if ads.is_empty() => p.none { "No views today." },
                Ok(Top { ads, more, .. }) => {
                    @let most = ads.first().map_or(1, |(_, views)| *views).max(1);
                    table.bars {
                        thead { tr { th scope="col" { "Ad" } th.number scope="col" { "Views" } th scope="col" { "Share" } } }
                        tbody {
                            @for (ad, views) in ads {
                                tr {
                                    th.text scope="row" { a href={ (path_of(bot)) "&ads=" (bot::encoded(ad.as_str())) } { (ad) } }
                                    td.number { (grouped(*views)) }
                                    td { meter min="0" max=(most) value=(views) aria-hidden="true" {} }
                                }
                            }
                        }
                    }
                    @if *more { p.fine { "Of the first 10,000 ads with views, in the order of their names, as far as 2 seconds suffice." } }
                }
            }
            p.fine { "The views in MongoDB. Those of the last seconds may be missing." }
        }
    }
}

fn totals(found: &Found) -> Markup {
    html! {
        section {
            h2 { "Totals" }
            table {
                thead { tr { th scope="col" { "Ad" } th.number scope="col" { "Views" } } }
                tbody {
                    @for (ad, total) in &found.totals {
                        tr {
                            th.text scope="row" {
                                a href={ "/counters?bot=" (bot::encoded(found.bot.as_str())) "&ads=" (bot::encoded(ad.as_str())) } { (ad) }
                            }
                            td.number {
                                @match total {
                                    Some(total) => (grouped(*total)),
                                    None => (UNKNOWN),
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn by_day(days: &Result<Vec<(Date, u64)>, String>) -> Markup {
    html! {
        section {
            h2 { "The last " (DAYS) " days" }
            @match days {
                Err(why) => p.none { (why) },
                Ok(days) => {
                    @let most = days.iter().map(|(_, views)| *views).max().unwrap_or(0).max(1);
                    table.bars {
                        thead { tr { th scope="col" { "Day" } th.number scope="col" { "Views" } th scope="col" { "Compared" } } }
                        tbody {
                            @for (day, views) in days.iter().rev() {
                                tr {
                                    th scope="row" { (day) }
                                    td.number.zero[*views == 0] { (grouped(*views)) }
                                    td { meter min="0" max=(most) value=(views) aria-hidden="true" {} }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_and_days_are_shown_and_names_are_text() {
        let mut found = Found {
            bot: BotId::parse("a&b").unwrap(),
            totals: vec![
                (AdId::parse("<x>").unwrap(), Some(1_234)),
                (AdId::parse("replaced").unwrap(), None),
            ],
            top: None,
            days: Some(Ok(vec![(jiff::civil::date(2026, 11, 22), 7)])),
            stale: false,
        };
        let wish = PageQuery { bot: "\"><b>".to_owned(), ads: "<x>".to_owned() };
        let page = body(&wish, Some(&found), true).into_string();
        for shown in [UNKNOWN, "1,234", "2026-11-22", "/counters?bot=a%26b&amp;ads=%3Cx%3E"] {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
        assert!(!page.contains("<x>") && !page.contains("<b>"), "{page}");
        assert!(!page.contains(STALE), "{page}");
        found.stale = true;
        let page = body(&wish, Some(&found), true).into_string();
        assert!(page.contains(STALE), "{page}");
    }

    #[test]
    fn the_top_ads_are_the_most_viewed_ones_and_their_names_are_text() {
        let mut top = Top { ads: Vec::new(), more: true, stale: false };
        for n in 0..1_000_u64 {
            top.add((AdId::parse(&format!("<i>{n}")).unwrap(), n * 7 % 1_000));
        }
        let views: Vec<u64> = top.ads.iter().map(|(_, views)| *views).collect();
        assert_eq!(views, (980..1_000).rev().collect::<Vec<u64>>());
        let page = top_ads((&BotId::parse("<b>").unwrap(), &Ok(top))).into_string();
        assert!(!page.contains("<i>") && !page.contains("<b>"), "{page}");
        assert!(
            page.contains("999") && page.contains("/counters?bot=%3Cb%3E&amp;ads=%3Ci%3E"),
            "{page}"
        );
        let top = Err("MongoDB is unavailable".to_owned());
        let page = top_ads((&BotId::parse("b").unwrap(), &top)).into_string();
        assert!(page.contains("MongoDB is unavailable"), "{page}");
    }
}
