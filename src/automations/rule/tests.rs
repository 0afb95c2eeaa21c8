//! Tests of the form of rules and of their check.

use super::*;
use crate::outbound::Policy;

fn rule(text: &str) -> Result<Rule, String> {
    let rule: Rule = serde_json::from_str(text).map_err(|error| error.to_string())?;
    rule.check(&Policy::Tenant(Arc::default())).map_err(|error| error.to_string())?;
    Ok(rule)
}

#[test]
fn a_rule_reads_back_as_it_was_written() {
    let text = r#"{"name":"Welcome","on":["tag.applied","sale.*"],"filter":"subscriber.age > 30","actions":[{"set_tag":{"tag":"a"}},{"remove_tag":{"tag":"b"}},{"set_field":{"field":"stage","value":{"x":[1,2.5,null]}}},{"emit":{"type":"welcome.check","data":{"n":1},"delay":600}},{"notify":{"url":"https://example.com/x","type":"hello","delay":0.5}},{"count":{"ad":"a"}},{"push":{"url":"https://example.com/events"}}],"enabled":false}"#;
    let read = rule(text).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), text);
    let names: Vec<&str> = read.actions.iter().map(Action::name).collect();
    assert_eq!(names, Action::NAMES);
    let short = rule(r#"{"on":["*"],"actions":[{"emit":{"type":"x","delay":"10m"}}]}"#).unwrap();
    assert!(short.enabled);
    let Action::Emit(emit) = &short.actions[0] else { panic!("{short:?}") };
    assert_eq!(emit.delay, Delay(Duration::from_secs(600)));
}

#[test]
fn a_stored_time_span_beyond_every_time_has_an_end() {
    let (now, second) = (Duration::from_secs(1_800_000_000), Duration::from_secs(1));
    assert_eq!(Delay(second).after(now), now + second);
    let endless: Delay = serde_json::from_str("18446744073709549568").unwrap();
    assert_eq!(endless.after(now), Duration::MAX);
}

#[test]
fn an_invalid_rule_is_refused_with_the_place() {
    let with = |action: &str| format!(r#"{{"on":["x"],"actions":[{action}]}}"#);
    let long = "x".repeat(300);
    let cases = [
        (r#"{"on":[],"actions":[{"count":{"ad":"a"}}]}"#.to_owned(), "on: is empty"),
        (r#"{"on":["x"],"actions":[]}"#.to_owned(), "actions: is empty"),
        (format!(r#"{{"on":["{long}"],"actions":[]}}"#), "on[0]: has 300 bytes"),
        (
            r#"{"on":["x"],"filter":"subscriber.age >","actions":[{"count":{"ad":"a"}}]}"#
                .to_owned(),
            "filter: the filter is not valid CEL: line 1, column 17",
        ),
        (with(r#"{"set_tag":{"tag":"a b"}}"#), "actions[0].set_tag.tag: "),
        (with(r#"{"set_field":{"field":"tags","value":1}}"#), "actions[0].set_field.field: "),
        (with(r#"{"emit":{"type":""}}"#), "actions[0].emit.type: is empty"),
        (with(r#"{"emit":{"type":"x","delay":"soon"}}"#), "soon is no time span"),
        (with(r#"{"emit":{"type":"x","delay":-1}}"#), "-1 is no time span"),
        (with(r#"{"emit":{"type":"x","delay":99999999}}"#), "emit.delay: is more than 366 days"),
        (with(r#"{"notify":{"url":"http://127.0.0.1/"}}"#), "actions[0].notify.url: "),
        (
            with(r#"{"notify":{"url":"https://example.com","recheck_url":"http://[::1]/"}}"#),
            "notify.recheck_url: ",
        ),
        (
            with(r#"{"notify":{"url":"https://example.com","method":"GET","body":"x"}}"#),
            "notify.body: is not sent with GET",
        ),
        (
            with(r#"{"notify":{"url":"https://example.com","expires_in":0}}"#),
            "notify.expires_in: is 0",
        ),
        (with(r#"{"push":{"url":"ftp://example.com"}}"#), "actions[0].push.url: "),
        (with(r#"{"count":{"ad":"a","n":1001}}"#), "actions[0].count.n: is 1001"),
        (with(r#"{"send":{"url":"x"}}"#), "unknown variant `send`"),
        (with(r#"{"emit":{"type":"x","when":1}}"#), "unknown field `when`"),
    ];
    for (text, part) in cases {
        let error = rule(&text).unwrap_err();
        assert!(error.contains(part), "{text}: {error}");
    }
}
