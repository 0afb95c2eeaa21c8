use std::collections::HashSet;

use futures_util::future::BoxFuture;

use super::gather::{GATHERED_BATCHES, GATHERED_BYTES, GATHERED_EVENTS, Wanted};
use super::*;
use crate::event::entry::Entry;
use crate::expression::Sees;
use crate::id::BotId;

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

/// A pipeline with these types, whose Redis is never reached.
fn route(name: &str, types: &[&str], interest: Option<Arc<dyn Interest>>) -> Route {
    let queue = Queue::unreachable(name, 4);
    let metrics = PipelineMetrics::new(queue.name());
    Route {
        queue,
        types: types.iter().map(|pattern| Glob::new(pattern)).collect(),
        filter: None,
        interest,
        from_earliest: true,
        places: None,
        metrics,
        meter: Arc::default(),
        warned: OncePerMinute::new(),
        full: OncePerMinute::new(),
    }
}

fn fanout(routes: Vec<Route>, window: Duration) -> Fanout {
    Fanout::new(routes, Arc::default(), Tracer::default(), window)
}

fn entry(at: u64, kind: &str, id: &str) -> Entry {
    let bot = BotId::parse("b").unwrap();
    let event = Event::builder(kind, &bot).source("s").id(id).build().unwrap();
    Entry { offset: Offset { ms: at, seq: 0 }, event: Ok(event) }
}

fn gather(fanout: &Fanout, entries: &[Entry]) -> Gathered {
    gather_again(fanout, entries, &[])
}

/// The `known` ranges were read before.
fn gather_again(fanout: &Fanout, entries: &[Entry], known: &[Range]) -> Gathered {
    let mut gathered = Gathered::default();
    let end = entries.last().map_or(Offset::default(), |entry| entry.offset);
    let tombstones = [entry(1, "a", "1"), entry(9, "a", "1")].map(|entry| entry.offset);
    let read = Read { log: 0, end, known, tombstones: &tombstones };
    fanout.gather(read, entries, &mut Matches::default(), &mut gathered);
    gathered
}

#[test]
fn each_pipeline_wants_the_events_of_its_types_and_each_is_encoded_once() {
    let routes = vec![route("sales", &["order.*"], None), route("paid", &["order.paid"], None)];
    let fanout = fanout(routes, Duration::ZERO);
    let entries = [
        entry(1, "order.paid", "1"),
        entry(2, "order.sent", "2"),
        entry(3, "page.seen", "3"),
        entry(4, "order.paid", "4"),
    ];
    let gathered = gather(&fanout, &entries);
    assert_eq!(gathered.wanted, [vec![0, 1, 2], vec![0, 2]]);
    let offsets: Vec<u64> = gathered.events.iter().map(|wanted| wanted.offset.ms).collect();
    assert_eq!(offsets, [1, 2, 4]);
    let bytes = |wanted: &Wanted| wanted.encoded.as_ref().map_or(0, Vec::len);
    assert_eq!(gathered.bytes, gathered.events.iter().map(bytes).sum::<usize>());
    assert!(gathered.bytes > 0);
    let covered: Vec<_> = gathered.covers().map(|(log, of)| (log, of.end.ms, of.entries)).collect();
    assert_eq!(covered, [(0, 4, 4)]);
    assert_eq!(gathered.batches, 1);
}

#[test]
fn a_log_that_was_not_read_is_not_covered() {
    let fanout = fanout(vec![route("all", &["*"], None)], Duration::ZERO);
    let (mut gathered, mut matches) = (Gathered::default(), Matches::default());
    for (log, at) in [(2, 1), (2, 2), (0, 7)] {
        let entries = [entry(at, "a", "1")];
        fanout.gather(
            Read { log, end: entries[0].offset, known: &[], tombstones: &[] },
            &entries,
            &mut matches,
            &mut gathered,
        );
    }
    let covered: Vec<_> = gathered.covers().map(|(log, of)| (log, of.end.ms, of.entries)).collect();
    assert_eq!(covered, [(0, 7, 1), (2, 2, 2)]);
    let logs: Vec<usize> = gathered.events.iter().map(|wanted| wanted.log).collect();
    assert_eq!((logs, gathered.batches), (vec![2, 2, 0], 3));
}

#[test]
fn repetitions_in_what_is_gathered_are_dropped_if_they_are_to_be() {
    let entries = [entry(1, "a", "1"), entry(2, "a", "2"), entry(3, "a", "1"), entry(4, "b", "1")];
    let offsets = |window| {
        let gathered = gather(&fanout(vec![route("all", &["a"], None)], window), &entries);
        let names = gathered.names.len();
        (gathered.events.iter().map(|wanted| wanted.offset.ms).collect::<Vec<_>>(), names)
    };
    assert_eq!(offsets(Duration::ZERO), (vec![1, 2, 3], 0));
    assert_eq!(offsets(Duration::from_secs(1)), (vec![1, 2], 2));
}

#[test]
fn what_was_read_for_other_shards_before_is_counted_once() {
    let filter = Filter::compile("event.data.vip", Sees::Event).unwrap();
    let routes = vec![
        route("all", &["*"], None),
        Route { filter: Some(filter), ..route("vips", &["a"], None) },
    ];
    let fanout = fanout(routes, Duration::from_secs(1));
    let entries = [entry(1, "a", "1"), entry(2, "a", "1"), entry(9, "a", "9"), entry(10, "a", "9")];
    let of = |known: &[Range]| {
        let gathered = gather_again(&fanout, &entries, known);
        let (_, covered) = gathered.covers().next().unwrap();
        let counts: Vec<_> =
            gathered.counts.iter().map(|counts| (counts.repeated, counts.filter_errors)).collect();
        (counts, covered.tombstones, covered.new)
    };
    assert_eq!(of(&[]), (vec![(2, 0), (0, 4)], 2, 4), "no event has data");
    let at = |ms| Offset { ms, seq: 0 };
    assert_eq!(of(&[(at(0), at(5))]), (vec![(1, 0), (0, 2)], 1, 2));
    assert_eq!(of(&[(at(0), at(10))]), (vec![(0, 0); 2], 0, 0));
}

/// A shard that gets the event later has a span of its own.
#[test]
fn a_copy_is_traced_for_the_pipelines_whose_shards_get_it_now() {
    let names = ["has-it", "gets-it", "is-missing", "is-lost", "wants-none"];
    let routes =
        names.map(|name| route(name, &[if name == "wants-none" { "b" } else { "a" }], None));
    let fanout = fanout(routes.into(), Duration::ZERO);
    let gathered = gather(&fanout, &[entry(3, "b", "0"), entry(5, "a", "1")]);
    let positions = |stands: [Option<u64>; 5]| {
        let of = |ms: Option<u64>| vec![ms.map(|ms| [Offset { ms, seq: 0 }].into()); 4];
        Positions::new([Arc::from("log")].into(), stands.map(of).into())
    };
    let before = positions([Some(5), Some(4), None, Some(1), Some(1)]);
    let lacking = fanout.lacking(&gathered, 1, &before);
    assert_eq!(lacking, [1, 3]);
    let after = positions([Some(5), Some(5), None, None, Some(5)]);
    let got = fanout.got(&gathered, 1, &lacking, &after);
    assert_eq!(got.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["gets-it"]);
    // The server of the others answers again, and the event is read for them.
    let later = positions([Some(5), Some(5), Some(2), Some(1), Some(5)]);
    assert_eq!(fanout.lacking(&gathered, 1, &later), [2, 3]);
}

/// Wants nothing of the types whose names begin with `no`.
#[derive(Debug)]
struct Picky;

impl Interest for Picky {
    fn wants(&self, event: &Event) -> bool {
        !event.kind().starts_with("no")
    }

    fn takes(&self, _: &BotId, kind: &str) -> bool {
        !kind.starts_with("no")
    }

    fn known(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn a_pipeline_without_interest_in_an_event_does_not_get_it() {
    let routes = vec![route("picky", &["*"], Some(Arc::new(Picky)))];
    let fanout = fanout(routes, Duration::ZERO);
    let gathered = gather(&fanout, &[entry(1, "yes", "1"), entry(2, "no", "2")]);
    assert_eq!(gathered.wanted, [vec![0]]);
    // It does not know its bots yet, so the first copy waits for it, but not for ever.
    let started = Instant::now();
    fanout.ready(Duration::from_secs(2)).await;
    assert_eq!(started.elapsed(), Duration::from_secs(2));
    assert!(!fanout.is_empty());
    assert!(super::tests::fanout(Vec::new(), Duration::ZERO).is_empty());
}

#[test]
fn very_many_types_do_not_fill_the_memory() {
    let routes = [route("all", &["*"], None), route("one", &["type-7"], None)];
    let mut matches = Matches::default();
    for number in 0..TYPES_MAX {
        let both = usize::from(number == 7);
        assert_eq!(matches.of(&routes, &format!("type-{number}")).len(), 1 + both);
    }
    assert_eq!(matches.0.len(), TYPES_MAX);
    assert_eq!(matches.of(&routes, "type-7"), [0, 1], "it is known");
    assert_eq!(matches.0.len(), TYPES_MAX);
    matches.of(&routes, "one-more");
    assert_eq!(matches.0.len(), 1);
}
