//! The panel of the problems, and what a new installation shows instead of empty tables.

use maud::{Markup, html};

use super::super::Api;
use super::super::auth::Caller;
use super::{pipeline, spoken};
use crate::problems::{Facts, Finding, Severity};
use crate::redis::StreamKind;

/// The findings, the most urgent first.
pub(super) fn panel(found: &[Finding], now_ms: u64) -> Markup {
    html! {
        section.problems aria-label="Problems" {
            h2 { "Problems" }
            @if found.is_empty() {
                p.fine { "Nothing is wrong." }
            } @else {
                ul {
                    @for finding in found { (item(finding, now_ms)) }
                }
            }
        }
    }
}

fn item(finding: &Finding, now_ms: u64) -> Markup {
    let Finding { code, severity, since_ms, pipeline: of, problem, remedy, runbook, .. } = finding;
    let key = of.as_ref().map_or_else(String::new, ToString::to_string);
    let kind = match severity {
        Severity::Critical => "off",
        Severity::Warning => "late",
        Severity::Notice => "none",
    };
    html! {
        li data-key={ (code.as_str()) "/" (key) } {
            p {
                span class={ "mark " (kind) } { (severity.as_str()) }
                " " (problem)
                @if let Some(since) = since_ms {
                    span.none { " (since " (spoken(now_ms.saturating_sub(*since) / 1_000 * 1_000)) ")" }
                }
            }
            p.remedy {
                code { (remedy) }
                " "
                @if let Some(name) = of { a href=(pipeline::path(name)) { (name) } " · " }
                a href={ "/runbook" (runbook.trim_start_matches("docs/runbook.md")) } { "Runbook" }
            }
        }
    }
}

/// Whether nothing was ever published: no bus stream exists, and no pipeline holds anything.
pub(super) fn is_unused(facts: &Facts) -> bool {
    let is_empty = |of: &crate::problems::PipelineFacts| {
        of.view.depth + of.view.dead + of.view.delayed == 0 && of.pace.settled_per_second == 0.0
    };
    !facts.streams.is_empty()
        && facts.streams.iter().all(|view| view.kind == StreamKind::Absent)
        && facts.pipelines.iter().all(is_empty)
}

/// How to publish a first event.
pub(super) fn first_event(api: &Api, caller: &Caller) -> Markup {
    let mut kinds = api.queues.all_configured().filter(|(name, config)| {
        config.enabled && api.queues.takes_of_bus(name) && !crate::config::is_built_in(name)
    });
    let kind = kinds.find_map(|(_, config)| config.events.first());
    let kind = kind.map(|glob| glob.replace('*', "created"));
    html! {
        section.first {
            h2 { "Publish a first event" }
            p { "Nothing was published yet." }
            @if let Some(kind) = &kind {
                @let event = format!(r#"{{"specversion":"1.0","id":"1","source":"try","type":"{kind}","botid":"bot-1"}}"#);
                p { "Run this command in the directory of the configuration:" }
                pre { code { "echo '" (event) "' | fairlane publish" } }
                p { "Or over HTTP, with the address of this page:" }
                pre { code {
                    "curl -i http://127.0.0.1:8080/v1/events -H 'content-type: application/cloudevents+json' "
                    @if caller.has_token() { "-H \"authorization: Bearer $TOKEN\" " }
                    "-d '" (event) "'"
                } }
            } @else {
                p { "No pipeline takes events of the bus. Add a section " code { "[pipelines.NAME]" } " to the configuration, and restart Fairlane." }
            }
        }
    }
}
