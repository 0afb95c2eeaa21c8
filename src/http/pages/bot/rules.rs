//! The rules of a bot as a table.

use maud::{Markup, html};

use super::super::super::automations::Shown;
use super::super::grouped;
use super::{encoded, path, short};
use crate::id::{BotId, RuleId};

/// Maximum number of actions of a rule that the table shows.
const ACTIONS: usize = 3;

/// The path of the page with all rules.
pub(in super::super) fn path_of_all(bot: &BotId) -> String {
    format!("{}/rules", path(bot))
}

/// The path of the editor of a rule; without one, of a new rule.
pub(in super::super) fn path_of_editor(bot: &BotId, rule: Option<&RuleId>) -> String {
    let rule = rule.map_or_else(String::new, |rule| format!("?id={}", encoded(rule.as_str())));
    format!("{}/rule{rule}", path(bot))
}

/// The table. `edits`: with links to the editor.
pub(in super::super) fn table(bot: &BotId, rules: &[Shown], edits: bool) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label="Rules" {
            table {
                thead {
                    tr {
                        th scope="col" { "Rule" }
                        th scope="col" { "On" }
                        th scope="col" { "Filter" }
                        th scope="col" { "Actions" }
                        th.number scope="col" { "Matched" }
                        th.number scope="col" { "Actions decided" }
                        th.number scope="col" { "Errors" }
                        th scope="col" { "Last error" }
                    }
                }
                tbody { @for rule in rules { (row(bot, rule, edits)) } }
            }
        }
    }
}

fn row(bot: &BotId, Shown { id, rule, stats }: &Shown, edits: bool) -> Markup {
    html! {
        tr data-key=(id) {
            th.text scope="row" {
                @if edits { a href=(path_of_editor(bot, Some(id))) { (id) } } @else { (id) }
                @if !rule.name.is_empty() { br; span.none { (rule.name) } }
                @if !rule.enabled { br; span.off { "off" } }
            }
            td.text {
                @for kind in rule.on.iter().take(ACTIONS) { code { (short(kind)) } br; }
                (and_more(rule.on.len()))
            }
            td.text { @if let Some(filter) = &rule.filter { code { (short(filter)) } } @else { span.none { "all" } } }
            td.text {
                @for action in rule.actions.iter().take(ACTIONS) { code { (short(&spoken_action(action))) } br; }
                (and_more(rule.actions.len()))
            }
            @for n in [stats.matched, stats.actions, stats.errors] {
                td.number.zero[n == 0] { (grouped(n)) }
            }
            td.text {
                @if let Some(last) = &stats.last_error {
                    time datetime=(last.at) { (last.at) } br;
                    (short(&last.reason)) br;
                    span.none { "event " (short(&last.event)) }
                }
            }
        }
    }
}

fn and_more(all: usize) -> Markup {
    html! { @if all > ACTIONS { span.none { "and " (all - ACTIONS) " more" } } }
}

/// An action in a short notation: its name and its parameters.
fn spoken_action(action: &crate::automations::rule::Action) -> String {
    let Ok(serde_json::Value::Object(map)) = serde_json::to_value(action) else {
        return action.name().to_owned();
    };
    let parts = map.values().next().and_then(serde_json::Value::as_object);
    let parts = parts.into_iter().flatten().map(|(key, value)| match value {
        serde_json::Value::String(text) => format!("{key}={text}"),
        other => format!("{key}={other}"),
    });
    let parts: Vec<String> = parts.collect();
    format!("{} {}", action.name(), parts.join(" "))
}
