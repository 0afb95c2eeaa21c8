//! Tests of the content of the page and of its path.

use serde_json::json;

use super::super::super::automations::Happened;
use super::*;
use crate::id::{RuleId, Sequence};
use crate::queue::LetterOfBot;

fn waiting() -> BotView {
    BotView {
        bot: BotId::parse("b").unwrap(),
        state: BotState::Ready,
        depth: 1_234,
        set_aside: 0,
        oldest_age_ms: 61_000,
        fence: None,
        until_ms: None,
        attempts: 0,
        weight: crate::rate::Weight::ONE,
        rate: None,
        burst: None,
        throttled_since_ms: None,
        pause: None,
    }
}

fn view(rules: Result<Vec<Shown>, String>) -> View {
    let mut kept = Kept { sequence: Some(Sequence::new(1)), ..Kept::default() };
    kept.profile.fields.insert("name".to_owned(), json!("<script>"));
    View {
        bot: BotId::parse("<b>&\"").unwrap(),
        rules,
        queues: vec![OfBot {
            pipeline: PipelineName::parse("automations").unwrap(),
            look: waiting(),
            failure: Some(LastFailure { reason: "<b>no</b>".to_owned(), time_ms: 0, since_ms: 0 }),
            dead: DeadOfBot {
                count: 1_002,
                at_least: true,
                newest: vec![LetterOfBot {
                    id: "0.1-0".parse().unwrap(),
                    event: Some("<i>".to_owned()),
                    kind: Some("<s>".to_owned()),
                    reason: "<em>never</em>".to_owned(),
                    attempts: 3,
                    time_ms: 0,
                }],
            },
            holds: Holdings { queued_bytes: 3 << 20, ..Holdings::default() },
            quotas: Holdings { queued_bytes: 64 << 20, ..Holdings::default() },
            attempts: Vec::new(),
            next: Vec::new(),
            lanes: Vec::new(),
            kept: None,
        }],
        now_ms: 0,
        may_operate: true,
        may_set: true,
        subscriber: Some(("<i>".to_owned(), Some(kept))),
    }
}

#[test]
fn text_of_tenants_is_escaped_and_figures_are_shown() {
    let rule = json!({ "name": "<u>", "on": ["<s>"], "filter": "event.type == '<em>'", "enabled": false,
        "actions": [{ "emit": { "type": "<a>", "delay": 600 } }] });
    let stats = Happened { matched: 12_345, actions: 7, errors: 1, last_error: None };
    let id = RuleId::parse("10-x").unwrap();
    let rules = vec![Shown { id, rule: serde_json::from_value(rule).unwrap(), stats }];
    let page = body(&view(Ok(rules)), true).into_string();
    for tag in ["<b>", "<u>", "<s>", "<em>", "<a>", "<i>", "<script"] {
        assert!(!page.contains(tag), "{tag}: {page}");
    }
    for shown in [
        "12,345",
        "1,234",
        "3.0 MiB of 64.0 MiB",
        "1 min",
        "Delete the queued events of &lt;b&gt;",
        "/pipelines/automations/dead?bot=%3Cb%3E%26%22\">At least 1,002 dead letters",
        "&lt;em&gt;never",
        "emit delay=600 type=&lt;a&gt;",
        ">off<",
        "Log out",
    ] {
        assert!(page.contains(shown), "{shown} is missing in {page}");
    }
}

#[test]
fn without_rules_the_page_gives_the_remedy_or_the_reason() {
    let page = body(&view(Ok(Vec::new())), false).into_string();
    assert!(page.contains("PUT /v1/bots/BOT/automations/RULE"), "{page}");
    let page = body(&view(Err("MongoDB is unavailable".to_owned())), false).into_string();
    assert!(page.contains("MongoDB is unavailable") && !page.contains("subscriber"), "{page}");
}

#[test]
fn the_form_shows_what_is_set_and_only_to_who_may_set_it() {
    let mut view = view(Ok(Vec::new()));
    view.queues[0].look.weight = "0.5".parse().unwrap();
    view.queues[0].look.rate = Some("30/m".parse().unwrap());
    let page = body(&view, true).into_string();
    for shown in [
        "/automations/set\"",
        "name=\"weight\"",
        "value=\"0.5\"",
        "value=\"30/m\"",
        "Set in automations",
    ] {
        assert!(page.contains(shown), "{shown} is missing in {page}");
    }
    view.may_set = false;
    let page = body(&view, true).into_string();
    assert!(!page.contains("/automations/set") && page.contains("/automations/pause"), "{page}");
}

#[test]
fn the_path_of_a_bot_leads_back_to_it_whatever_its_id_holds() {
    for (id, expected) in [
        ("shop-7", "/bots/shop-7"),
        ("a/b ?#%", "/bots/a%2Fb%20%3F%23%25"),
        ("日", "/bots/%E6%97%A5"),
        ("a&b+c", "/bots/a%26b%2Bc"),
    ] {
        assert_eq!(path(&BotId::parse(id).unwrap()), expected);
    }
}
