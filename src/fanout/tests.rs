use super::*;

fn event(bot: &str, source: &str, id: &str) -> Event {
    let bot = BotId::parse(bot).unwrap();
    Event::builder("t", &bot).source(source).id(id).build().unwrap()
}

#[test]
fn an_event_is_known_by_its_bot_its_source_and_its_id() {
    let of = |bot, source, id| name(&event(bot, source, id));
    assert_eq!(of("b", "s", "1"), of("b", "s", "1"));
    let all =
        [("b", "s", "1"), ("c", "s", "1"), ("b", "t", "1"), ("b", "s", "2"), ("bs", "1", "x")];
    let names: HashSet<EventName> = all.map(|(bot, source, id)| of(bot, source, id)).into();
    assert_eq!(names.len(), all.len());
    // No part can be moved from one field to the next.
    assert_ne!(of("ab", "c", "d"), of("a", "bc", "d"));
    assert_ne!(of("a", "bc", "d"), of("a", "b", "cd"));
}

#[test]
fn events_are_copied_when_many_are_gathered_or_they_are_large() {
    let wanted = || Wanted {
        log: 0,
        offset: Offset::default(),
        bot: BotId::parse("b").unwrap(),
        encoded: None,
        name: EventName::default(),
    };
    let events = |n| Gathered {
        events: std::iter::repeat_with(wanted).take(n).collect(),
        ..Gathered::default()
    };
    let bytes = |bytes| Gathered { bytes, ..Gathered::default() };
    let batches = |batches| Gathered { batches, ..Gathered::default() };
    for (gathered, is_full) in [
        (events(GATHERED_EVENTS - 1), false),
        (events(GATHERED_EVENTS), true),
        (bytes(GATHERED_BYTES - 1), false),
        (bytes(GATHERED_BYTES), true),
        (batches(GATHERED_BATCHES - 1), false),
        (batches(GATHERED_BATCHES), true),
    ] {
        assert_eq!(gathered.is_full(), is_full);
    }
    assert_eq!([batches(0).is_empty(), batches(1).is_empty()], [true, false]);
}

#[test]
fn a_refusal_for_lack_of_memory_is_told_apart() {
    let refused = |message: &str| {
        let (command, target) = ("enqueue", "localhost".to_owned());
        FanoutError::Store(RedisError::Refused { command, target, message: message.to_owned() })
    };
    assert!(refused("OOM command not allowed when used memory > 'maxmemory'.").is_full());
    assert!(!refused("READONLY You can't write against a read only replica.").is_full());
    assert!(!FanoutError::Missing(1).is_full());
}
