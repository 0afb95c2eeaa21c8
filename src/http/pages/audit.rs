//! The audit trail as a page.

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::audit::actions;
use super::super::auth::Caller;
use super::super::extract::Query;
use super::super::problem::Problem;
use super::{Refusal, bot, headline, page, pipeline, spoken};
use crate::clock::{millis, rfc3339};
use crate::id::{BotId, PipelineName};
use crate::trail::{Filter, Noted, Page, Position};

/// Number of actions per page.
const ACTIONS: usize = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    /// A form sends empty fields for any bot and pipeline.
    #[serde(default)]
    bot: String,
    #[serde(default)]
    pipeline: String,
    cursor: Option<String>,
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    asked: Result<Query<Asked>, Problem>,
) -> Result<Response, Refusal> {
    let Query(asked) = asked?;
    let (of, name) = (asked.bot.trim(), asked.pipeline.trim());
    let wrong = |field: &'static str, error: String| Problem::field(field, error);
    let bot = (!of.is_empty()).then(|| BotId::parse(of)).transpose();
    let bot = bot.map_err(|error| wrong("bot", error.to_string()))?;
    let pipeline = (!name.is_empty()).then(|| PipelineName::parse(name)).transpose();
    let pipeline = pipeline.map_err(|error| wrong("pipeline", error.to_string()))?;
    let cursors = &api.gate.cursors;
    let before: Option<Position> = cursors.read(uri.path(), asked.cursor.as_deref())?;
    let filter = Filter { bot, pipeline, since_ms: 0 };
    let found = actions(&api, &caller, &filter, before, ACTIONS).await?;
    let next = found.next.as_ref().map(|next| cursors.write(uri.path(), next));
    let content = html! {
        (headline("Audit trail", caller.has_token()))
        p { "What operators did, the newest first." }
        form.ask method="get" action="/audit" {
            label for="of" { "Bot" }
            input id="of" name="bot" maxlength="256" placeholder="any" value=(of);
            label for="pipeline" { "Pipeline" }
            input id="pipeline" name="pipeline" maxlength="64" placeholder="any" value=(name);
            button type="submit" { "Show" }
        }
        (shown(&found, millis(api.clock.now())))
        @if let Some(next) = next {
            @let query = format!("?bot={}&pipeline={}&cursor={}", bot::encoded(of), bot::encoded(name), bot::encoded(&next));
            p { a href=(query) rel="next" { "Older actions" } }
        }
    };
    Ok(page("Audit trail", &content))
}

fn shown(found: &Page, now_ms: u64) -> Markup {
    if found.actions.is_empty() {
        return html! { p.none { "No action of an operator is kept." } };
    }
    html! {
        div.wide tabindex="0" role="region" aria-label="Actions of operators" {
            table {
                thead { tr {
                    th scope="col" { "When" } th scope="col" { "Who" } th scope="col" { "Action" }
                    th scope="col" { "Pipeline" } th scope="col" { "Bot" } th scope="col" { "Result" }
                    th scope="col" { "Details" }
                } }
                tbody { @for noted in &found.actions { (row(noted, now_ms)) } }
            }
        }
    }
}

fn row(Noted { time_ms, action }: &Noted, now_ms: u64) -> Markup {
    let ago = spoken(now_ms.saturating_sub(*time_ms) / 1_000 * 1_000);
    let address = action.address.map(|address| address.to_string());
    html! {
        tr {
            td.when { time datetime=(rfc3339(*time_ms)) title=(rfc3339(*time_ms)) { (ago) " ago" } }
            td title=[address] { (action.who) }
            th scope="row" { (action.action) }
            td { @if let Some(name) = &action.pipeline { a href=(pipeline::path(name)) { (name) } } @else { "–" } }
            td { @if let Some(of) = &action.bot { a href=(bot::path(of)) { (of) } } @else { "–" } }
            td { (action.result) }
            td { (action.about()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trail::{Action, Reason};

    #[test]
    fn text_of_operators_and_tenants_is_escaped() {
        let action = Action::new("<b>")
            .by("<i>", Some([192, 0, 2, 7].into()))
            .of_bot(BotId::parse("<u>").ok().as_ref())
            .in_pipeline(&PipelineName::parse("p").unwrap())
            .target("<s>")
            .details("<q>")
            .reason(Some(&Reason::parse("<em>").unwrap()))
            .ended("<a>");
        let found = Page { actions: vec![Noted { time_ms: 1_000, action }], next: None };
        let text = shown(&found, 61_000).into_string();
        for tag in ["<b>", "<i>", "<u>", "<s>", "<q>", "<em>", "<a>"] {
            assert!(!text.contains(tag), "{tag}: {text}");
        }
        assert!(text.contains("1 min ago") && text.contains("192.0.2.7"), "{text}");
        assert!(text.contains("&lt;s&gt;; &lt;q&gt;; reason: &lt;em&gt;"), "{text}");
    }
}
