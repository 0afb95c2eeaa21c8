use serde_json::Value;

use super::*;
use crate::automations::rule::Rule;
use crate::expression::Sees;

fn event(kind: &str, data: &Value) -> Event {
    let bot = BotId::parse("b").unwrap();
    Event::builder(kind, &bot).id("1").subject("u").data(data).unwrap().build().unwrap()
}

fn set(rules: &Value) -> RuleSet {
    let rules: Vec<Rule> = serde_json::from_value(rules.clone()).unwrap();
    let ready = rules.into_iter().enumerate().map(|(at, rule)| {
        let id = RuleId::parse(&format!("r{at}")).unwrap();
        Ready::new(id, rule, |text| Filter::compile(text, Sees::Subscriber).map(Arc::new))
    });
    RuleSet::new(ready.collect())
}

fn matched(decided: &Decided) -> Vec<&str> {
    let matched = decided.notes.iter().filter_map(|note| match note {
        Note::Matched { rule, .. } => Some(rule.as_str()),
        Note::Failed { .. } => None,
    });
    matched.collect()
}

#[test]
fn women_over_30_with_a_tag_match_once_all_three_are_known_in_every_order() {
    let rules = set(&json!([{
        "on": ["tag.applied", "field.changed"],
        "filter": "'x' in subscriber.tags && has(subscriber.gender) && subscriber.gender == 'female' && has(subscriber.age) && subscriber.age > 30 && !('done' in subscriber.tags)",
        "actions": [{ "set_tag": { "tag": "done" } }, { "emit": { "type": "welcome" } }],
    }]));
    let field = |field: &str, value: Value| {
        event("field.changed", &json!({ "field": field, "value": value }))
    };
    let tag = event("tag.applied", &json!({ "tag": "x" }));
    let people = [("female", 31, 1), ("female", 30, 0), ("male", 31, 0), ("female", 99, 1)];
    for (gender, age, expected) in people {
        let events = [tag.clone(), field("gender", json!(gender)), field("age", json!(age))];
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut profile = Profile::default();
            let decided: Vec<Decided> =
                order.iter().map(|&at| decide(&events[at], &mut profile, &rules)).collect();
            let matches: usize = decided.iter().map(|decided| matched(decided).len()).sum();
            assert_eq!(matches, expected, "{gender} {age} {order:?}");
            assert_eq!(profile.tags.contains("done"), expected == 1);
            if expected == 1 {
                let kinds: Vec<&str> = decided[2]
                    .decision
                    .effects
                    .iter()
                    .map(|effect| match &effect.deed {
                        Deed::Emit { kind, .. } => kind.as_str(),
                        other => panic!("{other:?}"),
                    })
                    .collect();
                assert_eq!(kinds, ["tag.applied", "welcome"]);
            }
        }
    }
}

#[test]
fn each_rule_sees_the_effects_of_the_rules_before_it() {
    let rules = set(&json!([
        { "on": ["*"], "filter": "'a' in subscriber.tags", "actions": [{ "count": { "ad": "0" } }] },
        { "on": ["sale"], "actions": [{ "set_tag": { "tag": "a" } }] },
        { "on": ["sale"], "filter": "'a' in subscriber.tags", "actions": [{ "remove_tag": { "tag": "a" } }, { "set_field": { "field": "n", "value": 1 } }] },
        { "on": ["sale"], "filter": "subscriber.n == 1", "enabled": false, "actions": [{ "count": { "ad": "3" } }] },
        { "on": ["s*"], "filter": "subscriber.n == 1", "actions": [{ "count": { "ad": "4" } }] },
    ]));
    let mut profile = Profile::default();
    let decided = decide(&event("sale", &json!({})), &mut profile, &rules);
    assert_eq!(matched(&decided), ["r1", "r2", "r4"]);
    assert!(decided.changed && profile.tags.is_empty());
    let again = decide(&event("sale", &json!({})), &mut profile, &rules);
    let emits = again.decision.effects.iter().filter(|e| matches!(e.deed, Deed::Emit { .. }));
    assert_eq!(emits.count(), 2, "the tag comes and goes, the field stays: {again:?}");
}

#[test]
fn a_filter_that_fails_is_no_match_and_the_others_go_on() {
    let rules = set(&json!([
        { "on": ["sale"], "filter": "event.data.price > 3", "actions": [{ "count": { "ad": "0" } }] },
        { "on": ["sale"], "actions": [{ "count": { "ad": "1" } }] },
    ]));
    let decided = decide(&event("sale", &json!({ "price": "x" })), &mut Profile::default(), &rules);
    assert_eq!(matched(&decided), ["r1"]);
    let Note::Failed { rule, why } = &decided.notes[0] else { panic!("{decided:?}") };
    assert_eq!(rule.as_ref().unwrap().as_str(), "r0");
    assert!(why.contains("cannot be evaluated"), "{why}");
}

#[test]
fn a_chain_of_events_ends_at_its_depth_and_other_actions_are_still_done() {
    let rules = set(&json!([{
        "on": ["ping"],
        "actions": [{ "emit": { "type": "ping" } }, { "count": { "ad": "a" } }],
    }]));
    let mut event = event("ping", &json!({}));
    for depth in 1..=DEPTH_MAX {
        let decided = decide(&event, &mut Profile::default(), &rules);
        assert_eq!(decided.decision.dead, None);
        let next = emitted(
            &event,
            &decided.decision.effects[0],
            ("ping", None),
            (false, decided.decision.share),
            Duration::ZERO,
        );
        event = next.unwrap();
        assert_eq!(event.extension(DEPTH), Some(&json!(depth)));
    }
    let last = decide(&event, &mut Profile::default(), &rules).decision;
    assert!(last.dead.unwrap().contains("as number 17 of a chain"));
    assert_eq!(last.effects.len(), 1);
    assert!(matches!(last.effects[0].deed, Deed::Count(_)));
    for forged in [json!("many"), json!(u64::MAX), json!(-1), json!(null)] {
        let forged = event.clone().with_extension(DEPTH, Some(forged));
        assert!(decide(&forged, &mut Profile::default(), &rules).decision.dead.is_some());
    }
}

#[test]
fn a_chain_that_spreads_ends_when_a_thousand_events_follow_from_one() {
    let rules = set(&json!([{ "on": ["x"],
        "actions": [{ "emit": { "type": "x" } }, { "emit": { "type": "x" } }, { "emit": { "type": "x" } }] }]));
    let (mut waiting, mut all, mut dead) = (vec![event("x", &json!({}))], 0, 0);
    while let Some(event) = waiting.pop() {
        let decision = decide(&event, &mut Profile::default(), &rules).decision;
        dead += u32::from(decision.dead.is_some());
        for effect in &decision.effects {
            let told = ("x", None);
            let next = emitted(&event, effect, told, (false, decision.share), Duration::ZERO);
            waiting.push(next.unwrap());
            all += 1;
        }
    }
    assert!((300..=1_000).contains(&all) && dead > 100, "{all} events, {dead} dead letters");
}

#[test]
fn an_effect_has_one_name_and_no_other_has_it() {
    let effect = |rule: &str, action| Effect {
        rule: RuleId::parse(rule).unwrap(),
        action,
        deed: Deed::Count(Count { ad: "a".to_owned(), n: 1 }),
    };
    let bot = BotId::parse("b").unwrap();
    let first = event("x", &json!(1));
    let same = name(&bot, &first, &effect("r", 0));
    assert_eq!(same, name(&bot, &event("x", &json!(2)), &effect("r", 0)));
    assert_eq!(same.len(), 32);
    let other = Event::builder("x", &bot).id("2").build().unwrap();
    let replayed = |id: &str| first.clone().with_extension(MARK, Some(json!(id)));
    let again = name(&bot, &replayed("one"), &effect("r", 0));
    assert_eq!(again, name(&bot, &replayed("one"), &effect("r", 0)), "the slice is repeated");
    assert_ne!(again, name(&bot, &replayed("two"), &effect("r", 0)));
    for another in [
        again,
        name(&bot, &first, &effect("r", 1)),
        name(&bot, &first, &effect("r1", 0)),
        name(&bot, &other, &effect("r", 0)),
        name(&BotId::parse("b2").unwrap(), &first, &effect("r", 0)),
    ] {
        assert_ne!(same, another);
    }
}

#[test]
fn an_event_without_a_subscriber_has_no_profile_and_effects_without_one() {
    let rules = set(&json!([{
        "on": ["*"],
        "actions": [{ "set_tag": { "tag": "a" } }, { "emit": { "type": "y" } }],
    }]));
    let event = Event::builder("x", &BotId::parse("b").unwrap()).build().unwrap();
    let mut profile = Profile::default();
    let decided = decide(&event, &mut profile, &rules);
    assert_eq!((decided.changed, decided.decision.effects.len()), (false, 1));
    assert!(matches!(&decided.notes[0], Note::Failed { why, .. } if why.contains("no subscriber")));
}

#[test]
fn without_any_rule_only_values_set_by_hand_are_kept() {
    let rules = RuleSet::default();
    let mut profile = Profile::default();
    let _ = decide(&event("tag.applied", &json!({ "tag": "x" })), &mut profile, &rules);
    assert_eq!(profile, Profile::default());
    let _ = decide(&event("subscriber.replaced", &json!({ "tags": ["x"] })), &mut profile, &rules);
    assert!(profile.tags.contains("x"));
}

#[test]
fn a_decision_reads_back_as_it_was_kept() {
    let rules = set(&json!([{ "on": ["x"], "actions": [
        { "emit": { "type": "y", "data": { "$a.b": [1.5, null] }, "delay": 0.25 } },
        { "notify": { "url": "https://example.com", "body": { "a": 1 } } },
        { "push": { "url": "https://example.com" } }, { "count": { "ad": "a", "n": 7 } },
        { "set_tag": { "tag": "t" } },
    ] }]));
    let decision = decide(&event("x", &json!({})), &mut Profile::default(), &rules).decision;
    assert_eq!(decision.effects.len(), 5);
    let text = serde_json::to_string(&decision).unwrap();
    assert_eq!(serde_json::from_str::<Decision>(&text).unwrap(), decision);
}

#[test]
fn a_profile_that_changes_before_each_filter_is_read_until_the_steps_are_used_up() {
    let filter = json!([{ "on": ["x"], "filter": "subscriber.id != ''", "actions": [{ "count": { "ad": "a" } }] }]);
    let (rules, event) = (set(&filter), event("x", &json!({})));
    let values: Json = json!(vec![json!([]); 300]);
    let fields = (0..200).map(|field| (format!("f{field}"), values.clone()));
    let profile = Profile { fields: fields.collect(), ..Profile::default() };
    let mut view = View { event: &event, facts: None, stale: false };
    let (mut reads, mut why) = (0, None);
    for _ in 0..1_000 {
        view.stale = true;
        match view.matches(&rules.rules[0], &profile) {
            Ok(matched) => assert!(matched),
            Err(error) => why = Some(error),
        }
        reads += usize::from(!view.stale);
    }
    assert!((10..50).contains(&reads), "it was read {reads} times");
    assert!(why.unwrap().contains("used up their 2000000 steps"));
}

#[test]
fn a_decision_may_be_long_if_its_filters_have_long_loops_or_much_to_read() {
    let nested = "event.data.list.exists(x, event.data.list.exists(y, x + y == -1))";
    let loops = "event.data.list.exists(x, x > event.data.limit)";
    let profile = Profile::default();
    let is_long = |filter: Option<&str>, number: usize, data: Value| {
        let rule =
            json!({ "on": ["a"], "filter": filter, "actions": [{ "count": { "ad": "a" } }] });
        let rules = set(&json!(vec![rule; number]));
        assert!(!may_be_long(&event("b", &data), &profile, &rules), "no rule is for this type");
        may_be_long(&event("a", &data), &profile, &rules)
    };
    let list = |entries: usize| json!({ "list": vec![1; entries], "limit": 7 });
    let large = json!({ "text": "x".repeat(100_000) });
    assert!(is_long(Some(nested), 1, list(60)));
    assert!(!is_long(Some(nested), 1, list(5)));
    assert!(!is_long(Some(nested), 1, list(1_000)), "it does not run");
    assert!(!is_long(Some(loops), 10, list(20)));
    assert!(is_long(Some(loops), 10, list(300)));
    assert!(!is_long(Some("subscriber.id == 'u' && event.data.limit > 3"), 100, list(20)));
    assert!(is_long(Some("event.data.text == 'x'"), 1, large.clone()));
    assert!(!is_long(None, 10, large));
}

#[test]
fn a_decision_may_be_long_if_its_filters_read_a_large_profile_often() {
    let rule = json!({ "on": ["a"], "filter": "subscriber.id != ''", "actions": [{ "count": { "ad": "a" } }] });
    let rules = |number: usize| set(&json!(vec![rule.clone(); number]));
    let fields = (0..200).map(|field| (format!("f{field}"), json!(vec![json!([]); 50])));
    let profile = Profile { fields: fields.collect(), ..Profile::default() };
    assert!(!may_be_long(&event("a", &json!({})), &profile, &rules(2)));
    assert!(may_be_long(&event("a", &json!({})), &profile, &rules(50)));
}

#[test]
fn what_is_known_of_types_takes_a_part_of_the_memory_of_the_rules() {
    let rule = json!({ "on": ["*"], "actions": [{ "count": { "ad": "a" } }] });
    let rules = set(&json!(vec![rule; 500]));
    for number in 0..300 {
        assert_eq!(rules.for_type(&format!("type-{number}")).len(), 500);
        let known = rules.by_type.lock().unwrap();
        let bytes = known.places.iter().map(|(kind, places)| kind.len() + 8 * places.len());
        let bytes: usize = bytes.sum();
        assert!(bytes <= rules.types_max() && 3 * rules.types_max() < rules.memory());
    }
}
