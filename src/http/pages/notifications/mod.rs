//! The page of the notifications: statistics, lateness, hosts with an open circuit breaker, dead
//! letters.

mod chart;

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::{Redirect, Response};
use futures_util::future::join_all;
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::dead::LetterPath;
use super::super::extract::{Path, Query};
use super::super::notifications::stats::{By, Row, tallies};
use super::super::problem::Problem;
use super::{Refusal, grouped, page, place, spoken};
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::id::{BotId, LetterId};
use crate::notifications::queue::{Stats, Tally};
use crate::notifications::record::Kept;
use crate::outbound::breakers::Breaker;
use crate::presence;
use crate::queue::{LetterOfBot, Queue};

/// Number of dead letters on the page.
const LETTERS: usize = 20;
/// Number of days or hours shown.
const DAYS: u64 = 14;
const HOURS: u64 = 24;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    by: Option<By>,
}

/// The content of the page.
struct View {
    by: By,
    /// Number of scheduled notifications, and for how many ms the first one has been due.
    due: (u64, u64),
    /// The start and the counts of each day or hour, oldest first.
    times: Vec<(String, Stats)>,
    breakers: Vec<(String, Breaker)>,
    letters: Vec<(BotId, LetterOfBot, Option<Kept>)>,
    now_ms: u64,
    may_redrive: bool,
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    // Only for tokens of all bots: type names and hosts belong to tenants.
    caller.check_all_bots()?;
    let Query(wish) = wish?;
    let by = wish.by.unwrap_or_default();
    let queue = queue(&api)?;
    let mut times = tallies(&api, by, if by == By::Day { DAYS } else { HOURS }).await?;
    times.reverse();
    let processes = presence::processes(api.queues.link()).await?;
    let breakers = processes.into_iter().flat_map(|process| {
        let name = format!("{} ({})", process.host, process.pid);
        process.breakers.into_iter().map(move |breaker| (name.clone(), breaker))
    });
    let dead = queue.glimpse_dead_letters(None, &|_| true, None, LETTERS).await?;
    let letters = join_all(dead.letters.into_iter().map(async |(bot, letter)| {
        let kept = match letter.event.as_deref().and_then(|id| id.parse().ok()) {
            Some(id) => queue.notification(id).await.ok().flatten(),
            None => None,
        };
        (bot, letter, kept)
    }));
    let letters = letters.await;
    // Due times are those of Redis: the clock of this process may be wrong.
    let now = api.queues.time().await?;
    let (look, now_ms) = (queue.view(now).await?, millis(now));
    let first_due = queue.first_due_ms().await?;
    let overdue_ms = first_due.map_or(0, |first| now_ms.saturating_sub(first));
    let view = View {
        by,
        due: (look.delayed, overdue_ms.max(look.oldest_age_ms)),
        times,
        breakers: breakers.collect(),
        letters,
        now_ms,
        may_redrive: caller.check_scope(Scope::Operate).is_ok(),
    };
    Ok(page("Notifications", &body(&view, place(&uri), caller.has_token())))
}

fn queue(api: &Api) -> Result<Queue, Problem> {
    Ok(api.notifications()?.queue().clone())
}

pub(super) async fn redrive(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(id): Path<LetterId>,
) -> Result<Redirect, Refusal> {
    let pipeline = queue(&api)?.name().clone();
    LetterPath { pipeline, id }.redrive(&api, &caller).await?;
    Ok(Redirect::to("/notifications#dead"))
}

fn body(view: &View, place: &str, has_token: bool) -> Markup {
    let mut types = Stats::new();
    for (kind, tally) in view.times.iter().flat_map(|(_, stats)| stats) {
        types.entry(kind.clone()).or_default().add(tally);
    }
    let all = Tally::sum(types.values());
    html! {
        div.title {
            h1 { "Notifications" }
            nav.choice aria-label="Period" {
                (choice(view.by == By::Day, "?by=day", "14 days"))
                (choice(view.by == By::Hour, "?by=hour", "24 hours"))
                a href=(place) { "Refresh" }
            }
            @if has_token {
                form method="post" action="/logout" { button type="submit" { "Log out" } }
            }
        }
        (cards(view, &all))
        section {
            h2 { "Sent, by type" }
            (chart::sent(view.by, &view.times))
        }
        section {
            h2 { "By type" }
            (table("Type", &rows(types)))
        }
        section {
            h2 { @if view.by == By::Day { "By day" } @else { "By hour" } }
            (table(if view.by == By::Day { "Day (UTC)" } else { "Hour (UTC)" }, &by_time(view)))
        }
        (breakers(&view.breakers))
        (letters(view))
    }
}

fn choice(is_on: bool, href: &str, text: &str) -> Markup {
    html! { a href=(href) aria-current=[is_on.then_some("page")] { (text) } }
}

fn cards(view: &View, all: &Tally) -> Markup {
    let (due, overdue_ms) = view.due;
    let late =
        |share| all.late_ms(share).map_or_else(|| "–".to_owned(), |ms| format!("≤ {}", spoken(ms)));
    html! {
        dl.cards {
            (card("Scheduled", &grouped(due), "not yet due, waiting, or being sent"))
            (card("Overdue", &if overdue_ms == 0 { "–".to_owned() } else { spoken(overdue_ms) },
                "delay of the first one that is due"))
            (card("Received", &grouped(all.count("received")), "accepted in this period"))
            (card("Sent", &grouped(all.count("sent")), "answered with success"))
            (card("Late, p50", &late(0.5), "from due to the first attempt"))
            (card("Late, p99", &late(0.99), "1 % were later"))
        }
    }
}

fn card(name: &str, value: &str, about: &str) -> Markup {
    html! { div { dt { (name) } dd { (value) } dd.about { (about) } } }
}

/// The types, ordered by the number of received notifications, largest first.
fn rows(types: Stats) -> Vec<Row> {
    let mut types: Vec<(String, Tally)> = types.into_iter().collect();
    types.sort_by_key(|(kind, tally)| (std::cmp::Reverse(tally.count("received")), kind.clone()));
    types.into_iter().map(|(kind, tally)| Row::new(String::new(), kind, &tally)).collect()
}

/// The days or hours with counts, newest first.
fn by_time(view: &View) -> Vec<Row> {
    let some = view.times.iter().rev().filter(|(_, stats)| !stats.is_empty());
    let rows = some.map(|(begins, stats)| {
        Row::new(String::new(), short(view.by, begins), &Tally::sum(stats.values()))
    });
    rows.collect()
}

/// The label of a day or hour by its start: `2026-11-20` or `11-20 09:00`.
fn short(by: By, begins: &str) -> String {
    let part = match by {
        By::Day => begins.get(..10).map(str::to_owned),
        By::Hour => begins.get(5..16).map(|text| text.replace('T', " ")),
    };
    part.unwrap_or_default()
}

fn table(first: &str, rows: &[Row]) -> Markup {
    let late =
        |ms: Option<u64>| ms.map_or_else(|| "–".to_owned(), |ms| format!("≤ {}", spoken(ms)));
    html! {
        @if rows.is_empty() {
            p.none { "No notifications in this period." }
        } @else {
            div.wide tabindex="0" role="region" aria-label=(first) {
                table {
                    thead {
                        tr {
                            th scope="col" { (first) }
                            @for name in ["Received", "Sent", "Refused", "Throttled", "Expired", "Retried", "Dead", "Cancelled", "Late p50", "Late p99"] {
                                th.number scope="col" { (name) }
                            }
                        }
                    }
                    tbody {
                        @for row in rows {
                            tr {
                                th scope="row" { (row.kind) }
                                @for n in [row.received, row.sent, row.refused, row.throttled, row.expired, row.retried, row.dead, row.cancelled] {
                                    td.number.zero[n == 0] { (grouped(n)) }
                                }
                                td.number { (late(row.late_p50_ms)) }
                                td.number { (late(row.late_p99_ms)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn breakers(breakers: &[(String, Breaker)]) -> Markup {
    html! {
        section {
            h2 { "Hosts with an open circuit breaker" }
            p { "After five consecutive failures a circuit breaker opens for 5 to 60 seconds. Then it lets one probe through. It concerns one bot at the host, or the whole host if it cannot be reached or fails for several bots. The notifications that it holds back wait. Other hosts are not affected." }
            @if breakers.is_empty() {
                p.none { "All hosts are called." }
            } @else {
                table {
                    thead { tr { th scope="col" { "Host" } th.number scope="col" { "Consecutive failures" } th.number scope="col" { "Next probe in" } th scope="col" { "Process" } } }
                    tbody {
                        @for (process, breaker) in breakers {
                            tr {
                                th scope="row" { (breaker.host) }
                                td.number { (breaker.failures) }
                                td.number { @if breaker.seconds == 0 { "now" } @else { (breaker.seconds) " s" } }
                                td { (process) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn letters(view: &View) -> Markup {
    html! {
        section #dead {
            div.title {
                h2 { "Dead letters" }
                @if view.may_redrive && !view.letters.is_empty() {
                    form method="get" action="/notifications/dead/redrive" {
                        button type="submit" { "Redrive all…" }
                    }
                }
            }
            @if view.letters.is_empty() {
                p.none { "No dead letters." }
            } @else {
                p {
                    "The newest " (LETTERS) "; "
                    a href={"/v1/pipelines/" (crate::notifications::PIPELINE) "/dead"} { "all of them" }
                    ". A redriven notification is sent immediately, with a full set of attempts and a new time to expire."
                }
                div.wide tabindex="0" role="region" aria-label="Dead letters" {
                    table {
                        thead { tr { th scope="col" { "Died" } th scope="col" { "Bot" } th scope="col" { "Type" } th scope="col" { "URL" } th.number scope="col" { "Attempts" } th scope="col" { "Reason" } th scope="col" { "Action" } } }
                        tbody { @for letter in &view.letters { (letter_row(view, letter)) } }
                    }
                }
            }
        }
    }
}

fn letter_row(view: &View, (bot, letter, kept): &(BotId, LetterOfBot, Option<Kept>)) -> Markup {
    html! {
        tr {
            td.when { time datetime=(rfc3339(letter.time_ms)) title=(rfc3339(letter.time_ms)) { (spoken(view.now_ms.saturating_sub(letter.time_ms) / 1_000 * 1_000)) " ago" } }
            td { (bot) }
            td { (kept.as_ref().map_or("", |kept| &kept.kind)) }
            td.text {
                @if let Some(kept) = kept {
                    a href={"/v1/notifications/" (kept.id)} { (kept.url) }
                }
            }
            td.number { (letter.attempts) }
            td.text { (letter.reason) }
            td {
                @if view.may_redrive {
                    form method="post" action={"/notifications/dead/" (letter.id) "/redrive"} {
                        button type="submit" aria-label={"Redrive " (letter.id)} { "Redrive" }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(pairs: &[(&str, u64)]) -> Tally {
        let outcomes = pairs.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        Tally { outcomes, late: [(5, 99), (20, 1)].into() }
    }

    fn view(stats: Stats) -> View {
        View {
            by: By::Day,
            due: (1_234, 0),
            times: vec![
                ("2026-11-19T00:00:00Z".to_owned(), Stats::new()),
                ("2026-11-20T00:00:00Z".to_owned(), stats),
            ],
            breakers: vec![(
                "host (1)".to_owned(),
                Breaker { host: "<b>:80".to_owned(), failures: 5, seconds: 0 },
            )],
            letters: Vec::new(),
            now_ms: 0,
            may_redrive: true,
        }
    }

    #[test]
    fn counts_are_shown_and_text_of_others_is_escaped() {
        let hostile = "<script>alert(1)</script>\"'";
        let view = view([(hostile.to_owned(), tally(&[("received", 101), ("sent", 100)]))].into());
        let page = body(&view, "/notifications?\"x", true).into_string();
        assert!(!page.contains("<script") && !page.contains("<b>"), "{page}");
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{page}");
        for shown in ["<dd>1,234</dd>", "<dd>101</dd>", "<dd>≤ 5 ms</dd>", "2026-11-20", "Log out"]
        {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
        assert!(!page.contains("2026-11-19</th>"), "a day without any has no row");
    }

    #[test]
    fn without_anything_the_page_says_so() {
        let mut view = view(Stats::new());
        view.breakers.clear();
        let page = body(&view, "/notifications", false).into_string();
        assert_eq!(page.matches("No notifications in this period.").count(), 3, "{page}");
        assert!(page.contains("All hosts are called."), "{page}");
        assert!(page.contains("No dead letters."), "{page}");
        assert!(!page.contains("NaN") && !page.contains("Log out"), "{page}");
    }
}
