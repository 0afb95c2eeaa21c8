//! Trace contexts go with an event through every step, and spans of each step reach a collector.

mod receivers;
mod variables;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::automation_rig::{RULES, emitted, event, on_the_bus, put};
use crate::support::collector::{Collector, Seen};
use crate::support::config::{STREAM, config};
use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, get, metric};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(60);
const STRUCTURED: &str = "application/cloudevents+json";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

fn parent(sampled: bool) -> String {
    format!("00-{TRACE}-{CALLER}-0{}", u8::from(sampled))
}

/// Settings of a pipeline `push` that calls `receiver`.
fn pushing(receiver: &Receiver) -> Vec<(&'static str, String)> {
    vec![
        ("pipelines.push.handler", "\"push\"".to_owned()),
        ("pipelines.push.url", format!("{:?}", receiver.url())),
        ("pipelines.push.events", "[\"order.*\", \"rule.*\"]".to_owned()),
        ("pipelines.push.start", "\"earliest\"".to_owned()),
        ("pipelines.push.lease_ttl", "\"3s\"".to_owned()),
        ("pipelines.push.handler_timeout", "\"5s\"".to_owned()),
    ]
}

fn settings<'a>(all: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    all.iter().map(|(key, value)| (*key, &**value)).collect()
}

/// Redis, a receiver of pushes, and a process that exports to `endpoint`, if any.
async fn pushed(endpoint: Option<String>, more: &[(&'static str, &str)]) -> Pushed {
    let redis = RedisServer::start(Options::default());
    let receiver = Receiver::content().await;
    let mut all = pushing(&receiver);
    all.extend(endpoint.map(|endpoint| ("tracing.endpoint", endpoint)));
    let served = Served::start(&config(&redis, "push", &[&*settings(&all), more].concat())).await;
    let client = Client::new(&served.http());
    Pushed { redis, receiver, served, client }
}

struct Pushed {
    redis: RedisServer,
    receiver: Receiver,
    served: Served,
    client: Client,
}

impl Pushed {
    async fn publish(&self, headers: &[(&str, &str)], body: &Value) {
        let all = [&[("content-type", "application/json")], headers].concat();
        let answer =
            self.client.send("POST", "/v1/events", &all, body.to_string().as_bytes()).await;
        assert_eq!(answer.code, 202, "{}", answer.problem());
    }

    /// The pushes, once there are so many.
    async fn pushes(&self, count: usize) -> Vec<Call> {
        eventually(LONG, "the pushes arrive", async || self.receiver.called() >= count).await;
        self.receiver.calls()
    }

    /// The entries of the bus, as they are stored.
    async fn stored(&self) -> Vec<String> {
        type Entry = (String, Vec<(String, String)>);
        let mut command = redis::cmd("XRANGE");
        command.arg(STREAM).arg("-").arg("+");
        let mut connection = self.redis.connection().await;
        let entries: Vec<Entry> = command.query_async(&mut connection).await.unwrap();
        entries.into_iter().map(|(_, mut fields)| fields.remove(0).1).collect()
    }

    async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        metric(&get(&self.served.metrics(), "/metrics").await.1, name, labels)
    }
}

fn named<'a>(spans: &'a [Seen], name: &str) -> &'a Seen {
    let mut found = spans.iter().filter(|span| span.name == name);
    let span = found.next().unwrap_or_else(|| panic!("no span {name}"));
    assert!(found.next().is_none(), "two spans {name}");
    span
}

fn check_attributes_of(publish: &Seen) {
    let expected = [
        ("messaging.system", "fairlane"),
        ("messaging.destination.name", "fairlane:events"),
        ("messaging.operation.name", "publish"),
        ("messaging.operation.type", "send"),
        ("messaging.batch.message_count", "1"),
        ("fairlane.bot", "shop"),
    ];
    for (name, value) in expected {
        assert_eq!(publish.attributes[name], value, "{name}");
    }
}

#[tokio::test]
async fn one_trace_shows_an_event_its_push_and_the_notification_that_a_rule_caused() {
    let stores = Stores::start(Persistence::Always);
    let collector = Collector::start().await;
    let (receiver, notified) = (Receiver::content().await, Receiver::content().await);
    let mut all = pushing(&receiver);
    all.push(("tracing.endpoint", collector.endpoint()));
    let served = Served::start(&stores.direct(&[RULES, &*settings(&all)].concat())).await;
    let client = Client::new(&served.http());
    let rule = json!({ "on": ["order.paid"], "actions": [
        { "notify": { "url": notified.url(), "uid": "" } },
        { "emit": { "type": "rule.fired" } },
    ] });
    assert_eq!(put(&client, "shop", "greet", &rule).await.code, 201);

    let headers =
        [("content-type", STRUCTURED), ("traceparent", &*parent(true)), ("tracestate", "vendor=7")];
    let body = event("shop", "ann", "1", "order.paid", json!({})).to_string();
    let answer = client.send("POST", "/v1/events", &headers, body.as_bytes()).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());
    eventually(LONG, "everything is sent", async || {
        receiver.called() == 2 && notified.called() == 1
    })
    .await;
    let spans = collector
        .until(&[
            "publish fairlane:events",
            "copy fairlane:events",
            "wait push",
            "slice push",
            "call push",
            "commit push",
            "wait automations",
            "slice automations",
            "commit automations",
            "wait notifications",
            "call notifications",
        ])
        .await;
    // The emitted event is pushed too: its spans may still be on the way.
    let mut spans = spans;
    eventually(LONG, "the spans of the emitted event are exported", async || {
        spans = collector.spans();
        spans.iter().filter(|span| span.name == "commit push").count() == 2
    })
    .await;

    assert!(spans.iter().all(|span| span.trace == TRACE), "{spans:#?}");
    assert!(spans.iter().all(|span| span.span.trace_state == "vendor=7"), "{spans:#?}");
    assert!(spans.iter().all(|span| span.service == "fairlane" && !span.is_failed()));
    let ids: BTreeSet<_> = spans.iter().map(|span| &span.id).collect();
    assert_eq!(ids.len(), spans.len(), "each span has its own id");

    let publish = named(&spans, "publish fairlane:events");
    assert_eq!((&*publish.parent, publish.span.kind), (CALLER, 4));
    check_attributes_of(publish);

    // The event and the one that the rule emitted: each has its own steps.
    // The emitted event may go to the rules too, while their index is new.
    let direct: Vec<Seen> = spans
        .iter()
        .filter(|span| span.parent == publish.id && span.name.ends_with("automations"))
        .cloned()
        .collect();
    let slice_of_rules = named(&direct, "slice automations");
    named(&direct, "wait automations");
    let causes = BTreeSet::from([&*publish.id, &*slice_of_rules.id]);
    for name in ["copy fairlane:events", "wait push", "slice push"] {
        let steps = spans.iter().filter(|span| span.name == name);
        assert_eq!(steps.map(|span| &*span.parent).collect::<BTreeSet<_>>(), causes, "{name}");
    }
    let copy = spans.iter().find(|span| {
        span.name == "copy fairlane:events" && span.attributes["messaging.message.id"] == "1"
    });
    let pipelines: BTreeSet<_> =
        copy.unwrap().attributes["fairlane.pipelines"].split(',').collect();
    assert_eq!(pipelines, BTreeSet::from(["automations", "push"]));
    let slices: BTreeSet<_> =
        spans.iter().filter(|span| span.name == "slice push").map(|span| &span.id).collect();
    for name in ["call push", "commit push"] {
        let steps = spans.iter().filter(|span| span.name == name);
        assert_eq!(steps.map(|span| &span.parent).collect::<BTreeSet<_>>(), slices, "{name}");
    }
    let follows: Vec<Seen> =
        spans.iter().filter(|span| span.parent == slice_of_rules.id).cloned().collect();
    for name in ["commit automations", "wait notifications", "call notifications"] {
        named(&follows, name);
    }

    // A receiver's own spans are children of the spans of the calls.
    let of_calls = |name: &str| -> BTreeSet<String> {
        spans.iter().filter(|span| span.name == name).map(Seen::traceparent).collect()
    };
    let told = |receiver: &Receiver| -> BTreeSet<String> {
        receiver.calls().iter().map(|call| call.headers["traceparent"].clone()).collect()
    };
    assert_eq!(told(&receiver), of_calls("call push"));
    assert_eq!(told(&notified), of_calls("call notifications"));
    assert_eq!(notified.calls()[0].headers["tracestate"], "vendor=7");
    let call = spans.iter().find(|span| span.name == "call push").unwrap();
    assert_eq!(call.attributes["http.response.status_code"], "200");
    assert_eq!(call.attributes["server.port"], receiver.address.port().to_string());

    let fired = emitted(&stores, "rule.fired").await;
    assert_eq!(fired[0]["traceparent"], slice_of_rules.traceparent());
    assert_eq!(fired[0]["tracestate"], "vendor=7");
    assert_eq!(on_the_bus(&stores).await[0]["traceparent"], publish.traceparent());
}

#[tokio::test]
async fn a_context_is_passed_on_without_a_collector() {
    let pushed = pushed(None, &[]).await;
    let own = parent(true).replace(CALLER, "00f067aa0ba90200");
    let mut with_own = event("shop", "ann", "2", "order.paid", json!({}));
    with_own["traceparent"] = json!(own);
    let plain = event("shop", "ann", "1", "order.paid", json!({}));
    let headers = [("traceparent", &*parent(false)), ("tracestate", "a=1,b=2")];
    pushed.publish(&headers, &plain).await;
    let first = &pushed.pushes(1).await[0];
    assert_eq!(first.headers["traceparent"], parent(false));
    assert_eq!(first.headers["tracestate"], "a=1,b=2");
    assert_eq!(first.json()["events"][0]["traceparent"], parent(false));

    // The context of an event wins over that of its request.
    pushed.publish(&headers, &json!([with_own])).await;
    let second = &pushed.pushes(2).await[1];
    assert_eq!(second.headers["traceparent"], own);
    assert!(!second.headers.contains_key("tracestate"));
    assert_eq!(pushed.metric("fairlane_trace_spans_total", &[]).await, None, "nothing is exported");
}

#[tokio::test]
async fn invalid_contexts_are_ignored_and_nothing_is_added_without_one() {
    let pushed = pushed(None, &[("bus.trim", "false")]).await;
    let texts = ["", "00-0-0-01", &parent(true)[..54], &parent(true).to_uppercase()];
    let plain = event("shop", "ann", "1", "order.paid", json!({}));
    pushed.publish(&[], &plain).await;
    for text in texts {
        pushed.publish(&[("traceparent", text), ("tracestate", "a=1")], &plain).await;
    }
    let two = parent(true);
    pushed.publish(&[("traceparent", &two), ("traceparent", &two)], &plain).await;
    let mut odd = plain.clone();
    odd["traceparent"] = json!("odd");
    pushed.publish(&[("traceparent", &two)], &odd).await;
    let stored = pushed.stored().await;
    assert_eq!(stored[..6], vec![plain.to_string(); 6], "not a byte is added");
    assert_eq!(stored[6], odd.to_string());
    eventually(LONG, "all are pushed", async || {
        let calls = pushed.receiver.calls();
        calls.iter().map(|call| call.ids().len()).sum::<usize>() == 7
    })
    .await;
    for call in pushed.receiver.calls() {
        assert!(!call.headers.contains_key("traceparent"), "{:?}", call.headers);
    }

    // An invalid tracestate is dropped alone.
    pushed.publish(&[("traceparent", &two), ("tracestate", "ODD")], &plain).await;
    let stored: Value = serde_json::from_str(&pushed.stored().await[7]).unwrap();
    assert_eq!((&stored["traceparent"], &stored["tracestate"]), (&json!(two), &Value::Null));
}

#[tokio::test]
async fn a_slice_of_several_traces_links_them_and_only_recorded_ones_have_spans() {
    let collector = Collector::start().await;
    let pushed =
        pushed(Some(collector.endpoint()), &[("pipelines.push.linger", "\"500ms\"")]).await;
    let trace = |n: u8| TRACE.replacen("4b", &format!("0{n}"), 1);
    let events: Vec<Value> = (1..=5)
        .map(|n| {
            let mut event = event("shop", "ann", &n.to_string(), "order.paid", json!({}));
            match n {
                // Not recorded, and without a context.
                4 => event["traceparent"] = json!(parent(false)),
                5 => {}
                _ => event["traceparent"] = json!(format!("00-{}-{CALLER}-01", trace(n))),
            }
            event
        })
        .collect();
    pushed.publish(&[], &json!(events)).await;
    pushed.pushes(1).await;
    let spans = collector.until(&["slice push", "call push", "commit push"]).await;
    let slice = named(&spans, "slice push");
    assert_eq!((&*slice.trace, &*slice.parent), (&*trace(1), CALLER));
    let others = [2, 3].map(|n| (trace(n), CALLER.to_owned()));
    assert_eq!(slice.links, BTreeSet::from(others));
    assert_eq!(slice.attributes["messaging.batch.message_count"], "5");
    assert_eq!(slice.attributes["messaging.operation.type"], "process");
    assert_eq!(slice.attributes["fairlane.attempt"], "1");
    for n in 1..=3 {
        let of_trace: Vec<_> = spans.iter().filter(|span| span.trace == trace(n)).collect();
        let wait = of_trace.iter().find(|span| span.name == "wait push").unwrap();
        let links = if n == 1 { vec![] } else { vec![(slice.trace.clone(), slice.id.clone())] };
        assert_eq!(wait.links, links.into_iter().collect());
        let publish = of_trace.iter().find(|span| span.name.starts_with("publish")).unwrap();
        assert_eq!((&*publish.parent, &*wait.parent), (CALLER, CALLER));
    }
    assert!(spans.iter().all(|span| span.trace != TRACE), "an unrecorded trace has spans");
    assert_eq!(
        pushed.receiver.calls()[0].headers["traceparent"],
        named(&spans, "call push").traceparent()
    );
}

#[tokio::test]
async fn a_failed_call_and_its_slice_are_marked_and_each_attempt_has_its_spans() {
    let (redis, collector) = (RedisServer::start(Options::default()), Collector::start().await);
    let receiver = Receiver::start(async |call: Call| {
        Reply::new(if call.json()["attempt"] == 1 { 500 } else { 200 }, "")
    });
    let receiver = receiver.await;
    for ordering in ["bot", "subject"] {
        let before = collector.spans().len();
        let mut all = pushing(&receiver);
        all.push(("tracing.endpoint", collector.endpoint()));
        all.push(("pipelines.push.order_by", format!("{ordering:?}")));
        let served = Served::start(&config(&redis, "push", &settings(&all))).await;
        let client = Client::new(&served.http());
        let headers = [("content-type", STRUCTURED), ("traceparent", &*parent(true))];
        let body = event("shop", "ann", ordering, "order.paid", json!({})).to_string();
        client.send("POST", "/v1/events", &headers, body.as_bytes()).await;
        eventually(LONG, "the attempts are exported", async || {
            let spans = collector.spans().split_off(before);
            spans.iter().filter(|span| span.name == "slice push").count() == 2
        })
        .await;
        let spans = collector.spans().split_off(before);
        let outcomes = |name: &str| -> BTreeSet<bool> {
            let spans = spans.iter().filter(|span| span.name == name);
            spans.map(Seen::is_failed).collect()
        };
        let expected = BTreeSet::from([false, true]);
        assert_eq!(outcomes("slice push"), expected, "{ordering}");
        assert_eq!(outcomes("call push"), expected, "{ordering}");
        assert_eq!(outcomes("commit push"), [false].into(), "{ordering}");
        assert_eq!(spans.iter().filter(|span| span.name == "wait push").count(), 1, "{ordering}");
    }
}

#[tokio::test]
async fn a_hanging_collector_delays_neither_events_nor_the_stop_and_its_losses_are_counted() {
    let collector = Collector::hanging().await;
    let settings = [("tracing.buffer", "16"), ("tracing.timeout", "\"60s\"")];
    let mut pushed = pushed(Some(collector.endpoint()), &settings).await;
    let events: Vec<Value> = (0..100)
        .map(|n| {
            let mut event = event(&format!("b{n}"), "ann", "1", "order.paid", json!({}));
            event["traceparent"] = json!(parent(true));
            event
        })
        .collect();
    let started = Instant::now();
    for _ in 0..5 {
        pushed.publish(&[], &json!(events)).await;
    }
    eventually(LONG, "all are pushed", async || {
        let calls = pushed.receiver.calls();
        calls.iter().map(|call| call.ids().len()).sum::<usize>() == 500
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    eventually(LONG, "losses are counted", async || {
        let dropped =
            pushed.metric("fairlane_trace_spans_dropped_total", &[("reason", "buffer_full")]).await;
        dropped.unwrap() > 100.0
    })
    .await;
    assert_eq!(pushed.metric("fairlane_trace_spans_total", &[]).await, Some(0.0));
    assert_eq!(collector.called(), 1, "the collector has one call, which hangs");
    let stopping = Stopwatch::start();
    pushed.served.sigterm();
    let status = pushed.served.wait_exit(Duration::from_secs(20)).expect("it stops");
    stopping.within(Duration::from_secs(4), "the stop");
    assert!(status.success(), "{}", pushed.served.log());
    assert!(pushed.served.log().contains("the collector of spans took too long at the stop"));
}

#[tokio::test]
async fn a_stop_sends_the_last_spans_and_a_busy_collector_gets_them_again() {
    let collector = Collector::refusing(1, 503).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("headers");
    std::fs::write(&file, "Authorization: Bearer abc\n").unwrap();
    let file = format!("{:?}", file.display().to_string());
    let more = [("tracing.headers_file", &*file), ("tracing.service_name", "\"orders\"")];
    let mut pushed = pushed(Some(collector.endpoint()), &more).await;
    let plain = event("shop", "ann", "1", "order.paid", json!({}));
    pushed.publish(&[("traceparent", &parent(true))], &plain).await;
    let spans = collector.until(&["commit push"]).await;
    assert!(spans.iter().all(|span| span.service == "orders"));
    eventually(LONG, "the spans are taken", async || collector.called() >= 2).await;
    pushed.publish(&[("traceparent", &parent(true))], &plain).await;
    pushed.pushes(2).await;
    pushed.served.sigterm();
    // Does not block the thread: the collector of this test runs on it.
    eventually(LONG, "it stops", async || !pushed.served.is_running()).await;
    // The first batch came twice.
    let commits = collector.spans().iter().filter(|span| span.name == "commit push").count();
    assert!(commits >= 3, "{commits}");
    let headers = collector.headers();
    assert!(headers.iter().all(|headers| headers["authorization"] == "Bearer abc"));
}

#[tokio::test]
async fn a_part_of_requests_without_a_context_starts_a_trace_if_that_is_configured() {
    let collector = Collector::start().await;
    let pushed = pushed(Some(collector.endpoint()), &[("tracing.root_ratio", "1.0")]).await;
    pushed.publish(&[], &event("shop", "ann", "1", "order.paid", json!({}))).await;
    let spans = collector.until(&["publish fairlane:events", "commit push"]).await;
    let publish = named(&spans, "publish fairlane:events");
    assert_eq!(publish.parent, "", "it is the first span");
    assert!(spans.iter().all(|span| span.trace == publish.trace));
    // An unrecorded request stays unrecorded.
    pushed
        .publish(
            &[("traceparent", &parent(false))],
            &event("shop", "ann", "2", "order.paid", json!({})),
        )
        .await;
    let last = pushed.pushes(2).await.pop().unwrap();
    assert_eq!(last.headers["traceparent"], parent(false));
}

#[tokio::test]
async fn a_notification_continues_the_trace_of_the_request_that_schedules_it() {
    let collector = Collector::start().await;
    let more =
        [("pipelines.notifications.enabled", "true"), ("callbacks.allow_nets", "[\"127.0.0.1\"]")];
    let pushed = pushed(Some(collector.endpoint()), &more).await;
    let notified = Receiver::start(async |call: Call| {
        Reply::new(if call.number == 1 { 410 } else { 200 }, "ok")
    });
    let notified = notified.await;
    let url: String = url::form_urlencoded::byte_serialize(notified.url().as_bytes()).collect();
    let path = format!("/send_delayed?delay=0&url={url}&recheck_url={url}&bot=shop");
    let headers = [("traceparent", &*parent(true)), ("tracestate", "a=1")];
    let answer = pushed.client.send("GET", &path, &headers, b"").await;
    assert_eq!(answer.code, 200, "{}", answer.problem());
    eventually(LONG, "both calls are exported", async || {
        let spans = collector.spans();
        spans.iter().filter(|span| span.name == "call notifications").count() == 2
    })
    .await;
    let spans = collector.until(&["publish notifications", "wait notifications"]).await;
    let publish = named(&spans, "publish notifications");
    assert_eq!((&*publish.trace, &*publish.parent), (TRACE, CALLER));
    assert_eq!(publish.attributes["fairlane.bot"], "shop");
    assert_eq!(named(&spans, "wait notifications").parent, publish.id);
    let calls: Vec<_> = spans.iter().filter(|span| span.name.starts_with("call")).collect();
    assert!(calls.iter().all(|call| call.parent == publish.id));
    // The recheck, and the call that the receiver refuses.
    assert_eq!(calls.iter().map(|call| call.is_failed()).collect::<Vec<_>>(), [false, true]);
    for (seen, call) in notified.calls().iter().zip(calls) {
        assert_eq!(seen.headers["traceparent"], call.traceparent());
        assert_eq!(seen.headers["tracestate"], "a=1");
    }
}
