//! One dead letter: inspect, redrive, drop.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{Redirect, Response};
use maud::{Markup, html};

use super::super::super::Api;
use super::super::super::auth::Caller;
use super::super::super::dead::LetterPath;
use super::super::super::extract::{Path, Query};
use super::super::super::parameters::Parameters;
use super::super::super::problem::Problem;
use super::super::{Refusal, bot, grouped, headline, page, pipeline};
use super::filter::{PageQuery, path};
use crate::clock::rfc3339;
use crate::config::Scope;
use crate::id::PipelineName;
use crate::queue::{DeadLetter, Deed, Swept};

pub(in super::super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    let (_, letter) = at.find(&api, &caller).await?;
    let title = format!("Dead letter {}", letter.id);
    Ok(page(&title, &shown(&at.pipeline, &letter, &wish, &caller)))
}

/// `wish` is the list in which the caller saw the letter.
pub(super) fn shown(
    pipeline: &PipelineName,
    letter: &DeadLetter,
    wish: &PageQuery,
    caller: &Caller,
) -> Markup {
    let one = format!("{}/{}", path(pipeline), letter.id);
    // An event always serialises.
    let event = letter.event.as_ref().map(serde_json::to_string_pretty);
    html! {
        (headline(&format!("Dead letter {}", letter.id), caller.has_token()))
        p {
            "Of pipeline " a href=(pipeline::path(pipeline)) { (pipeline) } ", bot " a href=(bot::path(&letter.bot)) { (letter.bot) } ". "
            "Back to " a href=(wish.list(pipeline)) { @if wish.is_empty() { "all dead letters of the pipeline" } @else { "the dead letters " (wish.scope(pipeline)) } } "."
        }
        table {
            tbody {
                tr { th scope="row" { "Died" } td { time datetime=(rfc3339(letter.time_ms)) { (rfc3339(letter.time_ms)) } } }
                tr { th scope="row" { "Reason" } td.text { (letter.reason) } }
                tr { th scope="row" { "Attempts" } td { (grouped(letter.attempts.into())) } }
            }
        }
        section {
            h2 { "Event" }
            @match event {
                Some(Ok(text)) => pre tabindex="0" { (text) },
                _ => p.none { "Its record cannot be read." }
            }
        }
        @if caller.check_scope(Scope::Operate).is_ok() {
            div.actions {
                form method="post" action={ (one) "/redrive" } { (wish.hidden()) button type="submit" { "Redrive" } }
                details {
                    summary { "Drop…" }
                    form method="post" action={ (one) "/drop" } {
                        (wish.hidden())
                        p { "It is deleted for good: the event is not handled." }
                        button.danger type="submit" { "Drop this dead letter" }
                    }
                }
            }
        }
    }
}

/// Back to the list in which the caller saw the letter, with a message.
fn back(pipeline: &PipelineName, mut fields: Parameters, deed: Deed) -> Redirect {
    let wish = PageQuery::take(&mut fields);
    Redirect::to(&wish.after(pipeline, deed.into(), Swept { count: 1, more: false }))
}

pub(in super::super) async fn redrive(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    at.redrive(&api, &caller).await?;
    Ok(back(&at.pipeline, fields, Deed::Redrive))
}

pub(in super::super) async fn drop_one(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    at.discard(&api, &caller).await?;
    Ok(back(&at.pipeline, fields, Deed::Drop))
}
