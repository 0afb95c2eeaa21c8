//! The notifications of a bot that have not ended: when they are due, cancel, send now.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{Redirect, Response};
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::extract::{Path, Query};
use super::super::notifications::NotificationPath;
use super::super::problem::Problem;
use super::{Refusal, bot, grouped, headline, page, spoken};
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::id::BotId;
use crate::notifications::record::{Kept, NotificationId, State as Stage, When};
use crate::notifications::scripts::Amendment;
use crate::queue::Holdings;

/// Number of notifications per page.
const NOTIFICATIONS: usize = 50;
/// Maximum number of characters of a text in the table.
const TEXT_MAX: usize = 200;

#[derive(Debug, Deserialize)]
pub(super) struct BotPath {
    bot: BotId,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    cursor: Option<String>,
    done: Option<Done>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Done {
    Cancelled,
    Sent,
}

/// The path of the list.
pub(super) fn path(bot: &BotId) -> String {
    format!("{}/scheduled", bot::path(bot))
}

struct View {
    bot: BotId,
    holds: Holdings,
    found: Vec<Kept>,
    next: Option<String>,
    done: Option<Done>,
    now_ms: u64,
    may: bool,
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    wish: Result<Query<ListQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(ListQuery { cursor, done }) = wish?;
    caller.check_bot(&bot)?;
    let (cursors, path) = (&api.gate.cursors, path(&bot));
    let after: Option<(u64, String)> = cursors.read(&path, cursor.as_deref())?;
    let after = after.and_then(|(ms, id)| Some((ms, id.parse::<NotificationId>().ok()?)));
    let queue = api.notifications()?.queue().clone();
    // It may read the due times of all bots of the shard.
    let _turn = api.large_reads.take(caller.name()).await?;
    let pending = queue.pending_of(&bot, after, NOTIFICATIONS).await?;
    let next = pending.next.map(|(ms, id)| cursors.write(&path, &(ms, id.to_string())));
    let view = View {
        holds: queue.holdings(&bot).await?,
        bot,
        found: pending.found,
        next,
        done,
        now_ms: millis(api.clock.now()),
        may: caller.check_scope(Scope::Operate).is_ok(),
    };
    Ok(page("Scheduled notifications", &body(&view, caller.has_token())))
}

fn body(view: &View, has_token: bool) -> Markup {
    let View { bot, holds, found, next, done, may, .. } = view;
    html! {
        (headline(&format!("Scheduled notifications of {bot}"), has_token))
        p {
            (grouped(holds.pending)) @if holds.pending == 1 { " notification has" } @else { " notifications have" }
            " not ended. In the order of their next times. Those that are due wait in the queue of " a href=(bot::path(bot)) { "the bot" } "."
        }
        @match done {
            None => {},
            Some(Done::Cancelled) => p.said role="status" { "Cancelled 1 notification." },
            Some(Done::Sent) => p.said role="status" { "1 notification is due now. It is sent in the order of its bot; one that waits for its user is sent when the user is online." },
        }
        @if found.is_empty() {
            p.none { @if next.is_some() { "None among the next due times of the shard; the next page goes on." } @else { "None." } }
        } @else {
            div.wide tabindex="0" role="region" aria-label="Scheduled notifications" {
                table.letters {
                    thead {
                        tr {
                            th scope="col" { "Due" }
                            th scope="col" { "State" }
                            th scope="col" { "User" }
                            th scope="col" { "Type" }
                            th scope="col" { "URL" }
                            th.number scope="col" { "Attempts" }
                            th scope="col" { "Last failure" }
                            @if *may { th scope="col" { "Action" } }
                        }
                    }
                    tbody { @for one in found { (row(view, one)) } }
                }
            }
        }
        @if let Some(next) = next {
            p { a href={ "?cursor=" (next) } { "Next " (NOTIFICATIONS) } }
        }
    }
}

fn row(view: &View, one: &Kept) -> Markup {
    let left = one.due_ms.saturating_sub(view.now_ms);
    let ago = view.now_ms.saturating_sub(one.due_ms);
    let is_open = matches!(one.state, Stage::Scheduled | Stage::Waiting);
    let button = |deed: &str, text: &str| {
        html! {
            form method="post" action={ "/notifications/" (one.id) "/" (deed) } {
                button type="submit" aria-label={ (text) " " (one.id) } { (text) }
            }
        }
    };
    html! {
        tr data-key=(one.id) {
            td.when {
                time datetime=(rfc3339(one.due_ms)) title=(rfc3339(one.due_ms)) {
                    @if left > 0 { "in " (spoken(whole(left))) } @else { (spoken(whole(ago))) " ago" }
                }
            }
            td { (one.state) @if one.waits { br; span.none { "until the user is online" } } }
            td.text { (short(&one.uid)) }
            td.text { (short(&one.kind)) }
            td.text { a href={ "/v1/notifications/" (one.id) } { (short(&one.url)) } }
            td.number.zero[one.attempts == 0] { (one.attempts) }
            td.text { (short(&one.reason)) }
            @if view.may {
                td { @if is_open { div.actions { (button("send", "Send now")) (button("cancel", "Cancel")) } } }
            }
        }
    }
}

fn whole(ms: u64) -> u64 {
    if ms < 1_000 { ms } else { ms / 1_000 * 1_000 }
}

fn short(text: &str) -> String {
    let mut shown: String = text.chars().take(TEXT_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

pub(super) async fn cancel(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<NotificationPath>,
) -> Result<Redirect, Refusal> {
    let bot = of.amend(&api, &caller, ("cancel notification", Amendment::Cancel)).await?;
    Ok(Redirect::to(&format!("{}?done=cancelled", path(&bot))))
}

/// Makes it due now. It is still sent in the order of its bot.
pub(super) async fn send(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<NotificationPath>,
) -> Result<Redirect, Refusal> {
    let amendment = Amendment::Move(When::After(Duration::ZERO));
    let bot = of.amend(&api, &caller, ("send notification", amendment)).await?;
    Ok(Redirect::to(&format!("{}?done=sent", path(&bot))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_tenants_are_escaped_and_short() {
        let hostile = format!("<script>alert(1)</script>\"'{}", "x".repeat(2_000));
        let one = |state| Kept {
            id: "3.0192f1b0c1d27c3e8f00112233445566".parse().unwrap(),
            bot: BotId::parse("b").unwrap(),
            uid: hostile.clone(),
            kind: hostile.clone(),
            state,
            due_ms: 61_000,
            expires_ms: 99_000,
            created_ms: 0,
            ended_ms: None,
            next_ms: None,
            waits: true,
            attempts: 2,
            reason: hostile.clone(),
            url: hostile.clone(),
            label: String::new(),
            key: String::new(),
        };
        let view = View {
            bot: BotId::parse("<i>").unwrap(),
            holds: Holdings { pending: 1_234, ..Holdings::default() },
            found: vec![one(Stage::Scheduled), one(Stage::Sending)],
            next: Some("c".to_owned()),
            done: Some(Done::Cancelled),
            now_ms: 1_000,
            may: true,
        };
        let page = body(&view, true).into_string();
        assert!(!page.contains("<script") && !page.contains("<i>"), "{page}");
        assert!(page.len() < 10_000, "{} bytes", page.len());
        for shown in ["1,234 notifications have", "in 1 min", "Send now", "Cancelled 1", "Next 50"]
        {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
        assert_eq!(page.matches("/send\"").count(), 1, "one that is being sent has no buttons");
    }
}
