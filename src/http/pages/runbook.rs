//! The runbook as a page, so that a finding leads to its section without another site.

use axum::response::Response;
use maud::{Markup, html};

use super::page;

const RUNBOOK: &str = include_str!("../../../docs/runbook.md");

pub(super) async fn show() -> Response {
    page("Runbook", &body(RUNBOOK))
}

/// Renders what the runbook uses of Markdown: headings, paragraphs, code, bold text, links.
fn body(text: &str) -> Markup {
    let headings = text.lines().filter_map(|line| line.strip_prefix("## "));
    let mut sections = text.split("\n## ");
    let first = sections.next().unwrap_or_default().trim_start_matches("# Runbook");
    html! {
        h1 { "Runbook" }
        (blocks(first))
        nav aria-label="Sections" {
            ul.contents {
                @for heading in headings { li { a href={ "#" (anchor(heading)) } { (heading) } } }
            }
        }
        @for section in sections {
            @let (heading, rest) = section.split_once('\n').unwrap_or((section, ""));
            section id=(anchor(heading)) {
                h2 { (heading) }
                (blocks(rest))
            }
        }
    }
}

/// The anchor of a heading, as code hosts write it.
pub(super) fn anchor(heading: &str) -> String {
    heading.trim().to_lowercase().replace(' ', "-")
}

fn blocks(text: &str) -> Markup {
    html! {
        @for (nth, part) in text.split("\n```").enumerate() {
            @if nth % 2 == 1 {
                @let (_language, code) = part.split_once('\n').unwrap_or(("", part));
                pre { code { (code) } }
            } @else {
                @for block in part.split("\n\n").map(str::trim).filter(|block| !block.is_empty()) {
                    @if block.starts_with('|') {
                        pre { (block) }
                    } @else if block.starts_with("* ") {
                        ul {
                            @for item in format!("\n{block}").split("\n* ").skip(1) { li { (inline(item)) } }
                        }
                    } @else {
                        p { (inline(block)) }
                    }
                }
            }
        }
    }
}

/// Text with `code` and **bold** parts. Links to other documents become their text.
fn inline(text: &str) -> Markup {
    html! {
        @for (nth, part) in text.split('`').enumerate() {
            @if nth % 2 == 1 { code { (part) } } @else {
                @for (nth, part) in without_links(part).split("**").enumerate() {
                    @if nth % 2 == 1 { strong { (part) } } @else { (part) }
                }
            }
        }
    }
}

fn without_links(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let Some((_, after)) = after.split_once(')') else { break };
        match before.rsplit_once('[') {
            Some((before, name)) => plain.extend([before, name]),
            None => plain.push_str(before),
        }
        rest = after;
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problems::Code;

    #[test]
    fn every_finding_leads_to_a_section() {
        let page = body(RUNBOOK).into_string();
        for code in Code::ALL {
            let anchor = code.runbook().strip_prefix("docs/runbook.md#").unwrap();
            assert!(page.contains(&format!("<section id=\"{anchor}\">")), "{code:?}: {anchor}");
            assert!(page.contains(&format!("href=\"#{anchor}\"")), "{code:?}: {anchor}");
        }
    }

    #[test]
    fn marks_become_elements() {
        let page =
            body("# Runbook\n\n## A b\n\n**Do** `x < 1`, see [there](a.md#b).\n\n```sh\nls\n```\n");
        let page = page.into_string();
        for part in [
            "<section id=\"a-b\"><h2>A b</h2>",
            "<p><strong>Do</strong> <code>x &lt; 1</code>, see there.</p>",
            "<pre><code>ls</code></pre>",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
