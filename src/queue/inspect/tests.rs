use super::*;

fn text(text: &str) -> Value {
    Value::BulkString(text.as_bytes().to_vec())
}

fn list(values: Vec<Value>) -> Value {
    Value::Array(values)
}

fn shard(depth: i64, paused: Value) -> Vec<Value> {
    let names = |names: &[&str]| list(names.iter().map(|name| text(name)).collect());
    vec![
        list(vec![text(&depth.to_string()), paused, text("3"), text("4")]),
        Value::Int(5),
        Value::Int(6),
        Value::Int(13),
        Value::Int(8),
        Value::Int(9),
        Value::Int(10),
        Value::Int(2),
        names(&["a", ""]),
        names(&[]),
        names(&["b"]),
    ]
}

fn looked(depth: i64, paused: Value) -> (PipelineView, i64, Vec<BotId>) {
    look(&mut Reply::new(list(shard(depth, paused))).unwrap()).unwrap()
}

#[test]
fn a_shard_is_counted_and_its_bots_are_sampled() {
    let (view, depth, bots) = looked(11, Value::Nil);
    let expected = PipelineView {
        depth: 11,
        ready: 5,
        leased: 6,
        open: 3,
        parked: 7,
        paused: 8,
        set_aside: 4,
        delayed: 9,
        dead: 10,
        throttled: 2,
        ..PipelineView::default()
    };
    assert_eq!((view, depth), (expected, 11));
    assert_eq!(bots, ["a", "b"].map(|bot| BotId::parse(bot).unwrap()));
    let (view, depth, _) = looked(-2, text(""));
    assert_eq!((view.depth, depth, view.stopped), (0, -2, true));
}

#[test]
fn the_counts_of_shards_add_up_and_one_paused_shard_stops_the_pipeline() {
    let (shard, ..) = looked(11, Value::Nil);
    let mut sum = PipelineView::default();
    sum.add(&shard);
    sum.add(&PipelineView { stopped: true, ..shard.clone() });
    sum.add(&shard);
    let expected = PipelineView {
        depth: 33,
        ready: 15,
        leased: 18,
        open: 9,
        parked: 21,
        paused: 24,
        set_aside: 12,
        delayed: 27,
        dead: 30,
        throttled: 6,
        stopped: true,
        ..PipelineView::default()
    };
    assert_eq!(sum, expected);
}

/// What Redis knows of a bot.
#[derive(Default)]
struct Known {
    depth: i64,
    ready: bool,
    until: Option<&'static str>,
    own: &'static str,
    attempts: &'static str,
    paused: bool,
    slow: Option<&'static str>,
    aside: Option<&'static str>,
}

fn view(first: u64, known: &Known) -> BotView {
    let optional = |value: Option<&str>| value.map_or(Value::Nil, text);
    let values = vec![
        Value::Int(known.depth),
        optional(known.ready.then_some("7")),
        optional(known.until),
        text(known.own),
        text(known.attempts),
        Value::Int(i64::from(known.paused)),
        Value::Nil,
        optional(known.slow),
        optional(known.aside),
        Value::Nil,
    ];
    let mut reply = Reply::new(list(values)).unwrap();
    let bot = BotId::parse("b").unwrap();
    view_bot(&bot, first, &mut reply, Duration::from_secs(10)).unwrap()
}

#[test]
fn a_bot_is_leased_or_parked_or_paused_or_ready_or_idle_in_this_order() {
    let all = || Known {
        ready: true,
        until: Some("1000"),
        own: "7|run",
        paused: true,
        ..Known::default()
    };
    let state = |known: Known| view(0, &known).state;
    assert_eq!(state(all()), BotState::Leased);
    assert_eq!(state(Known { own: "", ..all() }), BotState::Parked);
    assert_eq!(state(Known { own: "", until: None, ..all() }), BotState::Paused);
    assert_eq!(state(Known { ready: true, ..Known::default() }), BotState::Ready);
    assert_eq!(state(Known::default()), BotState::Idle);
}

#[test]
fn a_bot_has_its_lease_its_attempts_and_its_events_in_lanes_too() {
    let known = Known {
        depth: 3,
        until: Some("12000"),
        own: "42|run",
        attempts: "1|2|3|4",
        slow: Some("9000"),
        aside: Some("5"),
        ..Known::default()
    };
    let found = view(8_000_000, &known);
    assert_eq!((found.depth, found.set_aside, found.attempts), (8, 5, 5));
    assert_eq!(
        (found.fence, found.until_ms, found.throttled_since_ms),
        (Some(42), Some(12_000), Some(9_000))
    );
    assert_eq!(found.oldest_age_ms, 2_000);
    let found = view(0, &Known { slow: Some("9000"), ..Known::default() });
    assert_eq!((found.oldest_age_ms, found.throttled_since_ms), (0, None), "it has no events");
    assert_eq!(view(11_000_000, &known).oldest_age_ms, 0, "its clock is ahead");
}
