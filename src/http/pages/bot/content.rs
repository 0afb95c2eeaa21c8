//! The content of the page of a bot.

use maud::{Markup, html};

use super::super::super::automations::Shown;
use super::super::overview::bytes as sized;
use super::super::{attempts, grouped, headline, pipeline, reason_field, spoken};
use super::settings::Form;
use super::{OfBot, View, chart, encoded, path, rules, short};
use crate::automations::profile::Profile;
use crate::automations::subscribers::Kept;
use crate::clock::rfc3339;
use crate::condition::Tone;
use crate::id::BotId;
use crate::queue::{BotState, LaneAside, LastFailure};

/// Maximum number of rules on the page of the bot.
const RULES: usize = 20;

/// The form that asks for a bot.
pub(super) fn which(bot: Option<&BotId>) -> Markup {
    html! {
        form.ask method="get" action="/bots" role="search" {
            label for="bot" { "Bot" }
            input id="bot" name="bot" required maxlength="256" value=[bot.map(BotId::as_str)];
            button type="submit" { "Show" }
        }
    }
}

pub(super) fn body(view: &View, has_token: bool) -> Markup {
    html! {
        (headline(&format!("Bot {}", view.bot), has_token))
        (which(Some(&view.bot)))
        (states(view))
        @if !view.queues.is_empty() {
            section {
                h2 { "Queues" }
                @for of in &view.queues { (queue(view, of)) }
            }
        }
        section #rules {
            div.title {
                h2 { "Rules" }
                @if view.may_operate && view.rules.is_ok() {
                    a href=(rules::path_of_editor(&view.bot, None)) { "New rule" }
                }
            }
            (rules_of(view, &view.rules))
        }
        @if view.may_set {
            section {
                h2 { "Operators" }
                // The trail is long, and this page is refreshed all the time.
                p { a href={ "/audit?bot=" (encoded(view.bot.as_str())) } { "What operators did to " (view.bot) } }
            }
        }
        @if view.counts {
            section {
                h2 { "Counters" }
                p { a href=(super::super::counters::path_of(&view.bot)) { "Top ads of " (view.bot) " today" } }
            }
        }
        @if view.rules.is_ok() {
            section #subscriber {
                h2 { "Subscriber" }
                form.ask method="get" action="#subscriber" {
                    label for="of" { "Subscriber" }
                    input id="of" name="subscriber" required maxlength="1024"
                        value=[view.subscriber.as_ref().map(|(id, _)| id)];
                    button type="submit" { "Show" }
                }
                @if let Some((id, kept)) = &view.subscriber { (known(id, kept)) }
            }
        }
    }
}

/// The state in words, for each pipeline that knows the bot.
fn states(view: &View) -> Markup {
    html! {
        ul.states {
            @if view.queues.is_empty() {
                li data-tone="none" { (view.unseen) ": no queued events, no attempts and no dead letters." }
            }
            @for of in &view.queues {
                @let tone = match of.tone { Tone::Good => "good", Tone::Waits => "waits", Tone::Bad => "bad" };
                li data-key=(of.pipeline) data-tone=(tone) {
                    a href={ "#" (of.pipeline) } { (of.pipeline) } ": " (of.words) "."
                }
            }
        }
    }
}

fn queue(view: &View, of: &OfBot) -> Markup {
    let OfBot { pipeline, look, .. } = of;
    html! {
        div.panel id=(pipeline) data-key=(pipeline) {
            div.title {
                h3 { a href=(pipeline::path(pipeline)) { (pipeline) } }
                span.off[look.state == BotState::Paused] { (state(look.state)) }
            }
            dl.facts {
                (chart::facts(&of.flow))
                div { dt { "Events" } dd { (grouped(look.depth)) } }
                div { dt { "Bytes" } dd { (held(of.holds.queued_bytes, of.quotas.queued_bytes)) } }
                div { dt { "Oldest" } dd { (spoken(look.oldest_age_ms)) } }
                div { dt { "Attempts" } dd { (look.attempts) } }
                div { dt { "Weight" } dd { (look.weight) } }
                @if let Some(rate) = look.rate { div { dt { "Rate of its own" } dd { (rate) } } }
                @if let Some(burst) = look.burst { div { dt { "Burst of its own" } dd { (burst) } } }
                @if let Some(since) = look.throttled_since_ms {
                    div {
                        dt { "Held back by its rate for" }
                        dd { (spoken(view.now_ms.saturating_sub(since) / 1_000 * 1_000)) }
                    }
                }
                @if let Some(fence) = look.fence { div { dt { "Fence of the lease" } dd { (fence) } } }
                @if let Some(until) = look.until_ms {
                    div {
                        dt { @if look.fence.is_some() { "Lease ends in" } @else { "Tried again in" } }
                        dd { (spoken(until.saturating_sub(view.now_ms) / 1_000 * 1_000)) }
                    }
                }
            }
            @if let Some(LastFailure { reason, time_ms, since_ms }) = &of.failure {
                @let ago = |ms: u64| spoken(view.now_ms.saturating_sub(ms) / 1_000 * 1_000);
                p { "Every call has failed for " (ago(*since_ms)) ". Last failure " (ago(*time_ms)) " ago: " (reason) }
            }
            (dead(view, of))
            @if of.holds.pending > 0 {
                p {
                    a href=(super::super::scheduled::path(&view.bot)) {
                        (grouped(of.holds.pending)) @if of.holds.pending == 1 { " scheduled notification" } @else { " scheduled notifications" }
                    }
                    ": see due times, cancel, or send now."
                }
            } @else if of.holds.delayed_events > 0 {
                p { (grouped(of.holds.delayed_events)) @if of.holds.delayed_events == 1 { " delayed event" } @else { " delayed events" } ". They are queued when they are due." }
            }
            @if !of.lanes.is_empty() { (lanes(view, &of.lanes)) }
            @if !of.next.is_empty() {
                div.wide tabindex="0" role="region" aria-label="Next events" {
                    table {
                        caption { "Next events" }
                        thead { tr { th.number scope="col" { "Sequence" } th scope="col" { "Type" } th scope="col" { "Id" } th scope="col" { "Data" } } }
                        tbody {
                            @for (sequence, event) in &of.next {
                                tr data-key=(sequence) {
                                    td.number { (sequence) }
                                    @match event {
                                        Some(event) => {
                                            td { code { (event.kind) } }
                                            td.text { (event.id) }
                                            td.text { code { (event.data.as_deref().map_or_else(String::new, short)) } }
                                        }
                                        None => { td.none colspan="3" { "its record cannot be read" } }
                                    }
                                }
                            }
                        }
                    }
                }
            }
            (chart::chart(pipeline, &of.flow))
            @if !of.attempts.is_empty() {
                h4 { "Last attempts" }
                (attempts::table(&of.attempts, view.now_ms, &format!("Last attempts in {pipeline}")))
            }
            @if view.may_operate { (actions(view, of)) }
            @if view.may_set { (Form::of(look).markup(&view.bot, pipeline)) }
        }
    }
}

/// The lanes that are set aside, each with its first event.
fn lanes(view: &View, lanes: &[LaneAside]) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label="Lanes set aside" {
            table {
                caption { "Lanes set aside after a failure" }
                thead { tr { th.number scope="col" { "Lane" } th.number scope="col" { "Events" } th.number scope="col" { "Attempts" } th scope="col" { "Next attempt" } th scope="col" { "First event" } th scope="col" { "Subject" } } }
                tbody {
                    @for LaneAside { lane, depth, attempts, due_ms, next } in lanes {
                        tr data-key=(lane) {
                            td.number { (lane) }
                            td.number { (grouped(*depth)) }
                            td.number { (attempts) }
                            td {
                                @match due_ms.saturating_sub(view.now_ms) / 1_000 * 1_000 {
                                    0 => "now",
                                    left => { "in " (spoken(left)) }
                                }
                            }
                            @match next.first().map(|first| &first.event) {
                                Some(Some(event)) => {
                                    td.text { code { (event.kind()) } " " (event.id()) }
                                    td.text { (event.subject().unwrap_or_default()) }
                                }
                                Some(None) => { td.none colspan="2" { "its record cannot be read" } }
                                None => { td.none colspan="2" { "not shown: the events before it are large" } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The bytes it holds, and may hold.
fn held(bytes: u64, quota: u64) -> String {
    match quota {
        0 => sized(bytes),
        quota => format!("{} of {}", sized(bytes), sized(quota)),
    }
}

/// The number of dead letters, and the newest ones.
fn dead(view: &View, OfBot { pipeline, dead, holds, .. }: &OfBot) -> Markup {
    // The newest ones are found among the newest of all bots of a shard.
    let count = holds.dead_letters.max(dead.count);
    html! {
        @if count > 0 {
            p {
                a href=(super::super::dead::path_of(pipeline, view.bot.as_str())) {
                    (grouped(count)) @if count == 1 { " dead letter" } @else { " dead letters" }
                }
                @if !dead.newest.is_empty() { ", the newest:" }
            }
            ul {
                @for letter in &dead.newest {
                    li data-key=(letter.id) {
                        (spoken(view.now_ms.saturating_sub(letter.time_ms) / 1_000 * 1_000)) " ago, "
                        @if let Some(kind) = &letter.kind { code { (kind) } " " }
                        (letter.event.as_deref().map_or_else(|| "its record cannot be read".to_owned(), short)) ": " (short(&letter.reason))
                    }
                }
            }
        }
    }
}

fn actions(view: &View, of: &OfBot) -> Markup {
    let OfBot { pipeline, look, kept, .. } = of;
    let action = |name: &str| format!("{}/{pipeline}/{name}", path(&view.bot));
    let button = |name: &str, text: &str| {
        html! {
            form method="post" action=(action(name)) {
                button type="submit" aria-label={ (text) " in " (pipeline) } { (text) }
            }
        }
    };
    html! {
        div.actions {
            @if look.state == BotState::Paused { (button("resume", "Resume")) } @else {
                form method="post" action=(action("pause")) {
                    (reason_field())
                    " "
                    button type="submit" aria-label={ "Pause in " (pipeline) } { "Pause" }
                }
            }
            @match look.state {
                BotState::Leased => (button("release", "Break the lease")),
                BotState::Parked => (button("release", "Try now")),
                _ => {}
            }
            @if kept.is_none() && look.depth > 0 {
                details {
                    summary { "Purge…" }
                    form method="post" action=(action("purge")) {
                        p { "Its " (grouped(look.depth)) " queued events are deleted for good. Delayed events and dead letters stay." }
                        button.danger type="submit" { "Delete the queued events of " (view.bot) }
                    }
                }
            }
        }
    }
}

/// The first rules, and where the others are.
fn rules_of(view: &View, found: &Result<Vec<Shown>, String>) -> Markup {
    let found = match found {
        Ok(found) => found,
        Err(why) => return html! { p.none { (why) } },
    };
    html! {
        @if found.is_empty() {
            p.none { "No rules. Create one here, or with " code { "PUT /v1/bots/BOT/automations/RULE" } "." }
        } @else {
            p { "In the order in which they are gone through. What happened to them is counted since they were made." }
            (rules::table(&view.bot, &found[..found.len().min(RULES)], view.may_operate))
            @if found.len() > RULES {
                p { a href=(rules::path_of_all(&view.bot)) { "All " (grouped(found.len() as u64)) " rules" } }
            }
        }
    }
}

/// The state of a queue in a word or two, for tables.
pub(in super::super) fn state(state: BotState) -> &'static str {
    match state {
        BotState::Ready => "waits for a worker",
        BotState::Leased => "being handled",
        BotState::Parked => "parked: retrying, or waiting to batch",
        BotState::Paused => "paused",
        BotState::Idle => "idle",
    }
}

fn known(id: &str, kept: &Result<Kept, String>) -> Markup {
    let kept = match kept {
        Ok(kept) => kept,
        Err(why) => return html! { p.none { (why) } },
    };
    let Profile { tags, fields } = &kept.profile;
    let Some(sequence) = kept.sequence else {
        return html! { p.none { "Nothing is known of " (id) ": profiles are kept from the first rule of a bot on." } };
    };
    html! {
        table {
            tbody {
                tr { th scope="row" { "Tags" } td.text { @if tags.is_empty() { span.none { "none" } } @for tag in tags { code { (tag) } " " } } }
                @for (field, value) in fields {
                    tr { th scope="row" { (field) } td.text { code { (value) } } }
                }
                tr { th scope="row" { "Changed" } td { (rfc3339(sequence.get() / 1_000)) } }
            }
        }
    }
}
