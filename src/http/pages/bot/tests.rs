//! Tests of the content of the page and of its path.

use serde_json::json;

use super::super::super::automations::Happened;
use super::*;
use crate::id::{RuleId, Sequence};
use crate::queue::{BotState, LetterOfBot};

pub(super) fn waiting(bot: &str) -> BotView {
    BotView {
        bot: BotId::parse(bot).unwrap(),
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
            look: waiting("b"),
            words: "Waiting for <em>".to_owned(),
            tone: Tone::Waits,
            flow: Flow::new(&crate::queue::Recent::default(), &[], 0, 0),
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
            holds: Holdings { queued_bytes: 3 << 20, dead_letters: 1_002, ..Holdings::default() },
            quotas: Holdings { queued_bytes: 64 << 20, ..Holdings::default() },
            attempts: Vec::new(),
            next: Vec::new(),
            lanes: Vec::new(),
            kept: None,
        }],
        unseen: "Never seen".to_owned(),
        now_ms: 0,
        may_operate: true,
        may_set: true,
        counts: true,
        subscriber: Some(("<i>".to_owned(), Ok(kept))),
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
        "/pipelines/automations/dead?bot=%3Cb%3E%26%22\">1,002 dead letters",
        "&lt;em&gt;never",
        "emit delay=600 type=&lt;a&gt;",
        "Waiting for &lt;em&gt;.",
        "/counters?bot=%3Cb%3E%26%22",
        "/bots/%3Cb%3E%26%22/rule?id=10-x",
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
fn a_subscriber_that_cannot_be_read_leaves_the_rest_of_the_page() {
    let mut view = view(Ok(Vec::new()));
    view.subscriber = Some(("anna".to_owned(), Err("MongoDB <is> unavailable".to_owned())));
    let page = body(&view, true).into_string();
    assert!(page.contains("MongoDB &lt;is&gt; unavailable") && page.contains("1,234"), "{page}");
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

#[test]
fn many_rules_with_long_texts_make_a_short_page() {
    let long = "x".repeat(4_000);
    let rule = json!({ "name": "n", "on": vec!["a"; 50], "filter": long,
        "actions": vec![json!({ "emit": { "type": "t", "data": long } }); 20] });
    let shown = |n: usize| Shown {
        id: RuleId::parse(&format!("r{n}")).unwrap(),
        rule: serde_json::from_value(rule.clone()).unwrap(),
        stats: Happened::default(),
    };
    let page = body(&view(Ok((0..1_000).map(shown).collect())), true).into_string();
    assert!(page.contains("All 1,000 rules") && page.contains("and 47 more"), "{page}");
    assert!(page.len() < 50_000, "{} bytes", page.len());
}

#[test]
fn a_bot_that_was_never_seen_is_called_so() {
    let mut view = view(Ok(Vec::new()));
    view.queues.clear();
    let page = body(&view, true).into_string();
    assert!(
        page.contains("Never seen: no queued events, no attempts and no dead letters."),
        "{page}"
    );
    assert!(!page.contains("Queues"), "{page}");
}
