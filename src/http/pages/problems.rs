//! The panel of the problems, and what a new installation shows instead of empty tables.

use maud::{Markup, html};

use super::super::Api;
use super::super::auth::Caller;
use super::times::since;
use super::{pipeline, publish};
use crate::config::Scope;
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
                @if let Some(at) = since_ms {
                    span.none { " (for " (since(*at, now_ms)) ")" }
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
    html! {
        section.first {
            h2 { "Publish a first event" }
            @if let Some(kind) = publish::example(api) {
                @let event = format!(r#"{{"specversion":"1.0","id":"1","source":"try","type":"{kind}","botid":"bot-1"}}"#);
                @if caller.check_scope(Scope::Publish).is_ok() {
                    p { "Nothing was published yet. Publish an event here, and see what happens to it:" }
                    (publish::form_for(kind))
                    p { "Or run this command in the directory of the configuration:" }
                } @else {
                    p { "Nothing was published yet. Run this command in the directory of the configuration:" }
                }
                pre { code { "echo '" (event) "' | fairlane publish" } }
                p { "Or send it over HTTP, to the address of this page:" }
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
