//! Measures parts of the hot path separately. `fairlane-bench` measures the whole.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fairlane::admission::{
    Admission, Class, Decision, Operation, Request as AdmissionRequest, Settings, system_ticks,
};
use fairlane::event::Event;
use fairlane::expression::{Facts, Filter, Glob, Sees};
use fairlane::id::{BotId, ShardCount};
use fairlane::pool::scale::{Load, wanted};

const JSON: &str = r#"{"specversion":"1.0","id":"0190-7f3a","source":"shop","type":"tag.applied","botid":"bot-4711","subject":"subscriber-7","data":{"tag":"vip","channel":"telegram","price":12.5,"note":"some text that fills"}}"#;

fn events(criterion: &mut Criterion) {
    let bot = BotId::parse("bot-4711").expect("a legal id");
    let event = Event::from_json(JSON.as_bytes()).expect("an event");
    let mut record = vec![0x93, 1, 0xcf, 0, 0, 0, 0, 0, 0, 0, 1];
    record.extend(event.encode());
    let mut group = criterion.benchmark_group("event");
    group.throughput(Throughput::Elements(1));
    group.bench_function("from_json", |bench| {
        bench.iter(|| Event::from_json(black_box(JSON.as_bytes())));
    });
    group.bench_function("encode", |bench| bench.iter(|| black_box(&event).encode()));
    group.bench_function("decode", |bench| {
        bench.iter(|| Event::decode(black_box(&record), &bot));
    });
    group.finish();
}

fn matching(criterion: &mut Criterion) {
    let event = Event::from_json(JSON.as_bytes()).expect("an event");
    let glob = Glob::new("tag.*");
    let filter =
        Filter::compile(r#"event.data.tag == "vip" && event.data.price > 10.0"#, Sees::Event)
            .expect("a legal filter");
    let shards = ShardCount::new(16).expect("a legal count");
    let mut group = criterion.benchmark_group("fanout");
    group.throughput(Throughput::Elements(1));
    group.bench_function("glob", |bench| bench.iter(|| glob.matches(black_box("tag.applied"))));
    let of = |event| Facts::of(event).expect("facts");
    group.bench_function("facts", |bench| bench.iter(|| of(black_box(&event))));
    let facts = of(&event);
    group.bench_function("filter", |bench| bench.iter(|| filter.matches(black_box(&facts))));
    group.bench_function("shard", |bench| bench.iter(|| black_box(event.bot()).shard(shards)));
    group.finish();
}

fn scaling(criterion: &mut Criterion) {
    let slice = std::time::Duration::from_millis(3);
    let load = Load { ready: 20, busy: 8, slice, ..Load::default() };
    criterion.bench_function("scale/wanted", |bench| bench.iter(|| wanted(black_box(load))));
}

fn admission(criterion: &mut Criterion) {
    let ask = |class| AdmissionRequest {
        places: 1,
        class,
        operation: Operation(1),
        continues: false,
        caller: 7,
        asks_again: false,
        is_stranger: false,
        deadline: Some(Duration::from_secs(3_600)),
    };
    let mut group = criterion.benchmark_group("admission");
    let free = Admission::new(Settings::default(), system_ticks());
    group.bench_function("begin_and_end", |bench| {
        bench.iter(|| match free.ask(black_box(&ask(Class::P2))) {
            Decision::Begin(permit) => permit.answered(),
            other => panic!("there is room: {other:?}"),
        });
    });
    // The maximum number of requests is in flight, and the queue is full too.
    let full = Admission::new(Settings::default(), system_ticks());
    let mut held = Vec::new();
    while !matches!(held.last(), Some(Decision::Shed(_))) {
        held.push(full.ask(&ask(Class::P2)));
    }
    group.bench_function("shed", |bench| {
        bench.iter(|| assert!(matches!(full.ask(black_box(&ask(Class::P3))), Decision::Shed(_))));
    });
    group.finish();
}

criterion_group!(parts, events, matching, scaling, admission);
criterion_main!(parts);
