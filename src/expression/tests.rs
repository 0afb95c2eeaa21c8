//! Tests of globs and filters.

use super::compile::spoken;
use super::*;
use crate::event::Event;
use proptest::prelude::*;
use serde_json::json;

#[test]
fn a_star_spans_dots_and_everything_else_is_literal() {
    let cases = [
        ("*", "anything.at.all", true),
        ("*", "", true),
        ("tag.*", "tag.applied", true),
        ("tag.*", "tag.", true),
        ("tag.*", "tagxapplied", false),
        ("tag.*", "my.tag.applied", false),
        ("*.applied", "tag.vip.applied", true),
        ("a*b*c", "aXbYbZc", true),
        ("a*b*c", "acb", false),
        ("ab*ba", "aba", false),
        ("tag.applied", "tag.applied", true),
        ("tag.applied", "tag.applied2", false),
        ("", "", true),
        ("", "x", false),
        ("**", "x", true),
    ];
    for (pattern, text, expected) in cases {
        assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern:?} {text:?}");
    }
}

proptest! {
    #[test]
    fn a_pattern_made_from_a_text_matches_it(parts in prop::collection::vec("[a-c.]{0,3}", 1..5), fill in "[a-c.]{0,3}") {
        let glob = Glob::new(&parts.join("*"));
        prop_assert!(glob.matches(&parts.join(&fill)));
    }
}

fn event(data: &str) -> Event {
    let text = format!(
        r#"{{"specversion":"1.0","id":"1","source":"s","type":"sale","botid":"b","subject":"u","data":{data}}}"#
    );
    Event::from_json(text.as_bytes()).unwrap()
}

fn compiled(text: &str) -> Filter {
    Filter::compile(text, Sees::Subscriber).unwrap()
}

fn facts(data: &str) -> Facts {
    let mut facts = Facts::of(&event(data)).unwrap();
    facts.set_subscriber(json!({ "id": "u", "tags": ["vip"], "age": 31 }));
    facts
}

#[test]
fn a_filter_reads_attributes_data_and_the_subscriber() {
    let filter = compiled(
        r#"event.type == "sale" && event.data.price > 10 && "vip" in event.data.tags && event.botid == "b" && subscriber.age > 30"#,
    );
    assert!(filter.matches(&facts(r#"{"price":11,"tags":["vip"]}"#)).unwrap());
    assert!(!filter.matches(&facts(r#"{"price":9,"tags":["vip"]}"#)).unwrap());
    // Numbers of events and of filters have one type.
    for text in ["subscriber.age + 1 == 32", "subscriber.age % 2 == 1", "subscriber.age - 40 < 0"] {
        assert!(compiled(text).matches(&facts("{}")).unwrap(), "{text}");
    }
    let mut older = facts("{}");
    let filter = compiled("subscriber.age == 32");
    assert!(!filter.matches(&older).unwrap());
    older.set_subscriber(json!({ "age": 32 }));
    assert!(filter.matches(&older).unwrap());
}

#[test]
fn a_filter_that_cannot_be_used_says_why_and_where() {
    let many = |part: &str, times: usize| part.repeat(times);
    let cases = [
        ("event.data.x >".to_owned(), "line 1, column 15"),
        ("true &&\n  event.data.x ==== 1".to_owned(), "line 2, column 18"),
        (many("(", 40) + "true" + &many(")", 40), "deeper than 32"),
        (many("(", 500) + "true" + &many(")", 500), "deeper than 32"),
        (many("!", 500) + "true", "deeper than 32"),
        (many("-", 501) + "1 == 1", "deeper than 32"),
        (many("true ? true : ", 60) + "true", "deeper than 32"),
        ("event".to_owned() + &many(".a", 500), "deeper than 32"),
        (many("1 * ", 500) + "1 == 1", "deeper than 32"),
        (many("1 == ", 500) + "1", "deeper than 32"),
        ("true".to_owned() + &many(" ", 10_000), "10004 bytes; at most 4096"),
        (many("1 + ", 17) + "1 == 18", "17 additions; at most 16"),
        ("evnt.data.price > 3".to_owned(), "names \"evnt\" at line 1, column 1"),
        (
            "event.type == 'x' &&\n person.age > 3".to_owned(),
            "names \"person\" at line 2, column 2",
        ),
        ("fetch('x')".to_owned(), "names \"fetch\" at line 1, column 1"),
        ("subscriber.name.lower() == 'x'".to_owned(), "names \"lower\" at line 1, column 17"),
        ("event.type == 'x' && now() > 3".to_owned(), "names \"now\" at line 1, column 22"),
        ("1 + 1".to_owned(), "must answer true or false"),
        (
            "[1].all(a, [1].all(b, [1].all(c, true)))".to_owned(),
            "nests macros (all, exists, exists_one, filter, map) deeper than 2",
        ),
    ];
    for (text, part) in cases {
        let error = Filter::compile(&text, Sees::Subscriber).unwrap_err().to_string();
        assert!(error.contains(part), "{text:.60}: {error}");
        assert!(!error.contains("expecting") && !error.contains("EOF"), "{error}");
    }
    let error = Filter::compile("subscriber.age > 3", Sees::Event).unwrap_err();
    assert_eq!(error.position(), Some(Position { line: 1, column: 1 }));
}

#[test]
fn an_error_of_the_parser_quotes_the_written_text() {
    let cases = [
        ("Syntax error: mismatched input '<EOF>' expecting {'[', NUM_INT}", "unexpected end"),
        ("Syntax error: extraneous input '==' expecting {'['}", "unexpected '=='"),
        ("Syntax error: mismatched input ',' expecting ')'", "unexpected ',', ')' was expected"),
        ("Syntax error: token recognition error at: '#'", "unexpected '#'"),
        ("Syntax error: missing ')' at '<EOF>'", "missing ')' at the end"),
        ("ERROR: something else\n", "ERROR: something else"),
    ];
    for (problem, said) in cases {
        assert_eq!(spoken(problem), said);
    }
    for text in ["event.data.x >", "true ==== 1", "'x", "(true", "true)", "a b", "[1, 2", "#"] {
        let error = Filter::compile(text, Sees::Event).unwrap_err().to_string();
        assert!(error.contains(": unexpected ") || error.contains(": missing "), "{error}");
    }
}

#[test]
fn a_field_that_an_event_lacks_is_an_error_of_that_event() {
    let lacking = compiled("event.data.x > 1");
    assert!(matches!(lacking.matches(&facts("{}")), Err(FilterError::Evaluation(_))));
    let number = compiled("event.data.x");
    assert!(matches!(number.matches(&facts("{\"x\":1}")), Err(FilterError::NotBoolean(_))));
    let careful = compiled("has(event.data.x) && event.data.x > 1");
    assert!(!careful.matches(&facts("{}")).unwrap());
}

#[test]
fn usual_filters_are_within_the_bounds() {
    let tags = (0..60).map(|tag| format!("event.data.tag == \"t{tag}\""));
    compiled(&tags.collect::<Vec<_>>().join(" || "));
    compiled("event.data.orders.map(o, o.price).exists(p, p > 10)");
    for text in [
        "event.data.tags.exists(tag, tag == \"vip\")",
        "event.data.orders.exists(o, o.lines.all(l, l.price * 1.2 > 3.0 && l.name.startsWith(\"x\")))",
        "event.data.tags.filter(t, t != \"a\").map(t, t + \"b\").size() > 0",
        "type(event.data.x) == int",
        "event.data.text == \"((((((((((((((((((((((((((((((((((((((((((((((((((\"",
        "event.data.mail.matches(\"^[^@]+@example[.]com$\")",
        "subscriber.tags.exists_one(t, t in [\"a\", \"b\"]) ? true : has(subscriber.age)",
    ] {
        compiled(text);
    }
}

#[test]
fn a_filter_whose_values_could_grow_without_end_is_refused() {
    let chain = |of: &str, map: &str| format!("{of}{}.size() == 1", map.repeat(8));
    for (text, part) in [
        (chain("[1]", ".map(a,[a,a,a,a])"), "lists out of lists"),
        (chain("event.data.l", ".map(a,a+a)"), "lists out of lists"),
        (chain("[1]", ".map(a,{'x':a,'y':a})"), "lists out of lists"),
        ("[1].map(a, [1].map(b, [a, b])).size() == 1".to_owned(), "lists out of lists"),
        ("[[1].map(a,[a,a])].exists(x, true)".to_owned(), "lists out of lists"),
        ("event.data.x.matches(event.data.y)".to_owned(), "regular expression that is no text"),
        (
            "event.data.x.matches('(')".to_owned(),
            "regular expression that is not valid: error: unclosed group",
        ),
        (r#"event.data.x.matches("(\\w{200}){50}")"#.to_owned(), "repeats too much"),
    ] {
        let error = Filter::compile(&text, Sees::Subscriber).unwrap_err().to_string();
        assert!(error.contains(part), "{text:.60}: {error}");
    }
}

#[test]
fn all_filters_on_an_event_have_a_bound_together() {
    let facts = facts(&format!("{{\"l\":{:?}}}", vec![1; 300]));
    let filter = compiled("event.data.l.all(a, a == 1)");
    let ran = (0..1_000).take_while(|_| filter.matches(&facts).is_ok()).count();
    assert!((10..900).contains(&ran), "{ran} ran");
}

#[test]
fn a_filter_that_would_take_long_on_an_event_is_not_run() {
    let list = |n: usize| format!("{{\"l\":{:?}}}", vec![1; n]);
    let one = compiled("event.data.l.all(a, a == 1)");
    assert!(one.matches(&facts(&list(1_000))).unwrap());
    let two = compiled("event.data.l.all(a, event.data.l.all(b, a == b))");
    assert!(two.matches(&facts(&list(50))).unwrap());
    assert!(matches!(two.matches(&facts(&list(1_000))), Err(FilterError::TooDear(_))));
    assert!(matches!(one.matches(&facts(&list(100_000))), Err(FilterError::TooDear(_))));
}

#[test]
fn a_filter_that_would_copy_much_of_an_event_is_not_run() {
    let repeated = |part: &str, separator: &str| vec![part; 32].join(separator);
    let lists = |of: &str| format!("[{}]", vec![of; 40].join(","));
    let all = repeated("event", ",");
    for entry in ["{}", "[]", "null"] {
        // Many entries in lists that are short, so that loops over them are cheap.
        let facts = facts(&format!("{{\"l\":{}}}", lists(&lists(&lists(entry)))));
        for text in [
            format!("[{all}].size() > 0"),
            format!("{{{}}}.size() > 0", all.replace("event", "'a': event.data.l")),
            format!("({}).size() > 0", ["event.data.l"; 8].join("+")),
            repeated("event - event", "||"),
            repeated("event.data.l[0.5]", "||"),
            vec!["1 < event"; 100].join("||"),
            repeated("event.data >= 'x'", "||"),
            repeated("event in event", "||"),
            "[1, 1, 1].map(x, event).size() > 0".to_owned(),
            "[[event, event, event]].exists(x, [x, x, x, x, x].size() == 1)".to_owned(),
            "event.data.l.map(x, event).filter(x, true).size() > 0".to_owned(),
        ] {
            let answer = compiled(&text).matches(&facts);
            assert!(matches!(answer, Err(FilterError::TooDear(_))), "{entry} {text}: {answer:?}");
        }
    }
    // In a loop too, where no list is long.
    let nested = (0..15).fold("[]".to_owned(), |of, _| format!("[{of},{of}]"));
    for compared in ["event", "event.data.l[0]", "event['data']"] {
        let all = vec![format!("1 < {compared}"); 4].join("||");
        let text = format!("[1].exists(x, {all})");
        let answer = compiled(&text).matches(&facts(&format!("{{\"l\":{nested}}}")));
        assert!(matches!(answer, Err(FilterError::TooDear(_))), "{text}: {answer:?}");
    }
    // What literals make can grow too.
    let more = |of: &str| format!("[[{}]]", vec![lists(of); 5].join(","));
    let (one, two, three) = (more("1"), more("a"), more("b"));
    let text = format!("{one}.exists(a, {two}.exists(b, {three}.size() > 0))");
    let refused = Filter::compile(&text, Sees::Subscriber);
    assert!(matches!(refused, Err(FilterError::TooDear(_))), "{refused:?}");
}

#[test]
fn usual_filters_copy_little_of_an_event_with_long_lists() {
    let order = |id: usize| json!({ "id": format!("o-{id}"), "price": 12.5, "name": "an order" });
    let orders: Vec<_> = (0..100).map(order).collect();
    let data = json!({ "orders": orders, "limit": 10.5, "text": "x".repeat(2_000) }).to_string();
    for text in [
        "event.data.orders.filter(o, o.price > 10.0).map(o, o.name + \"!\").size() > 0",
        "event.data.orders.exists(o, o.price * 1.2 > event.data.limit + 1.0)",
        "event.data.orders.all(o, !(o.id in [\"a\", \"b\"]) && o.price - event.data.limit > 1.0)",
        "[event.data.limit, event.data.orders[0].price].exists(p, p + 1.0 > 13.0)",
    ] {
        assert_eq!(compiled(text).matches(&facts(&data)), Ok(true), "{text}");
    }
}

#[test]
fn a_number_costs_little_in_a_loop_over_a_long_list() {
    let values = vec![1; 1_200];
    let data = json!({ "values": values, "limit": 10, "limits": { "low": 0 } }).to_string();
    for text in [
        "event.data.values.exists(v, v > event.data.limit * 2)",
        "event.data.values.exists(v, v > event.data['limit'])",
        "event.data.values.exists(v, v * 2 < event.data.limits.low)",
        "event.data.values.exists(v, v - subscriber.age > 0)",
        "event.data.values.exists(v, v > event.data.values.size())",
    ] {
        assert_eq!(compiled(text).matches(&facts(&data)), Ok(false), "{text}");
    }
    // An entry of a list counts as large as the list.
    let entry = compiled("event.data.values.exists(v, v > event.data.values[0])");
    assert!(matches!(entry.matches(&facts(&data)), Err(FilterError::TooDear(_))));
}

#[test]
fn an_error_shows_only_the_beginning_of_a_large_event() {
    for character in ["x", "ü"] {
        let facts = facts(&json!({ "s": character.repeat(500_000) }).to_string());
        for text in ["event - event", "event.data.s", "event.data[event.data.s]", "event.data + 1"]
        {
            let error = compiled(text).matches(&facts).unwrap_err().to_string();
            assert!(error.chars().count() < 550 && error.ends_with('…'), "{text}: {error:.900}");
        }
    }
}

#[test]
fn a_subscriber_that_is_set_again_counts_as_large_as_it_is() {
    let mut facts = facts("{}");
    let filter = compiled("subscriber.tags.size() > 0");
    let tags: Vec<_> = (0..1_000).map(|tag| format!("tag-{tag}")).collect();
    let subscriber = json!({ "id": "u", "tags": tags });
    for _ in 0..100 {
        facts.set_subscriber(subscriber.clone());
        assert_eq!(filter.matches(&facts), Ok(true));
    }
}
