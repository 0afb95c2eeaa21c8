//! Push handlers that answer 202 and complete the lease later, at any process.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::support::push::{LONG, Push, Said, losses, metric, post};
use crate::support::receiver::{Call, Reply};
use crate::support::served::Served;
use crate::support::wait::eventually;

/// A short lease. `slice_time` may be at most a third of it.
const SECOND: (&str, &str) = ("pipelines.test.lease_ttl", "\"1s\"");

async fn accepting(settings: &[(&str, &str)]) -> Push {
    Push::new(settings, |_| async { Reply::new(202, "") }).await
}

/// Sends `complete`, `fail` or `extend` for the lease of a call to a process.
async fn say(served: &Served, call: &Call, what: &str, body: Value) -> Said {
    post(&served.http(), &format!("/v1/leases/{}/{what}", call.text("lease")), body).await
}

/// The last part of a problem's type.
fn problem(said: &Said) -> &str {
    said.body["type"].as_str().unwrap_or_default().trim_start_matches("urn:fairlane:problem:")
}

fn attempt(call: &Call) -> u64 {
    call.json()["attempt"].as_u64().unwrap()
}

fn fence(call: &Call) -> u64 {
    call.json()["fence"].as_u64().unwrap()
}

fn texts(ids: impl IntoIterator<Item = u32>) -> Vec<String> {
    ids.into_iter().map(|id| id.to_string()).collect()
}

/// Waits until `count` leases are handed over.
async fn handed_over(push: &Push, count: u64) {
    eventually(LONG, "the leases are handed over", async || push.open().await == count).await;
}

#[tokio::test]
async fn a_lease_is_completed_at_another_process_and_only_then_the_bot_goes_on() {
    let push = accepting(&[]).await;
    push.publish("b", 0..3).await;
    let served = push.serve().await;
    // This process neither reads the bus nor handles events.
    let other = Served::start_as(&push.config, "http").await;
    let first = push.calls(1).await[0].clone();
    assert_eq!(first.ids(), texts(0..3));
    handed_over(&push, 1).await;
    push.publish("b", 3..4).await;
    push.publish("c", 4..5).await;
    let second = push.calls(2).await[1].clone();
    assert_eq!(second.text("bot"), "c", "the worker is free, and the bot is not");
    eventually(LONG, "both are counted", async || {
        let counts =
            [metric(&served, "async_leases", &[]).await, metric(&other, "async_leases", &[]).await];
        counts.iter().sum::<u64>() == 2
    })
    .await;
    assert_eq!(metric(&served, "workers", &[("state", "busy")]).await, 0);

    let said = say(&other, &first, "complete", Value::Null).await;
    assert_eq!((said.status, said.body), (204, Value::Null));
    let third = push.calls(3).await[2].clone();
    assert_eq!((third.ids(), attempt(&third)), (texts([3]), 1));
    assert!(fence(&third) > fence(&first));
    assert_eq!(say(&other, &second, "complete", json!({"ack": 1})).await.status, 204);
    assert_eq!(say(&served, &third, "complete", json!({})).await.status, 204);
    push.drains(&served).await;
    assert_eq!((push.open().await, push.receiver.called()), (0, 3));
    let done = [("outcome", "done")];
    assert_eq!(metric(&other, "events_total", &done).await, 4, "counted where it was said");
    assert_eq!(metric(&served, "events_total", &done).await, 1);
    let dwell = metric(&other, "dwell_seconds_count", &[]).await;
    assert_eq!((dwell, losses(&served).await), (4, 0));
}

#[tokio::test]
async fn a_lease_that_is_never_completed_runs_out_and_a_late_completion_changes_nothing() {
    let push = accepting(&[SECOND]).await;
    push.publish("b", 0..3).await;
    let served = push.serve().await;
    let calls = push.calls(2).await;
    let (first, second) = (&calls[0], &calls[1]);
    let rested = second.after(first);
    assert!(rested >= Duration::from_secs(1), "{rested:?} is less than the ttl");
    assert_eq!((first.ids(), second.ids()), (texts(0..3), texts([0])), "in order, one alone");
    assert_eq!((attempt(first), attempt(second)), (1, 2));
    assert!(fence(second) > fence(first));

    let before = push.depth().await;
    for (what, body) in [
        ("complete", Value::Null),
        ("complete", json!({"ack": 1})),
        ("fail", json!({"reason": "late"})),
        ("extend", Value::Null),
    ] {
        let late = say(&served, first, what, body).await;
        assert_eq!((late.status, problem(&late)), (409, "lease-gone"), "{what}");
    }
    assert_eq!((push.depth().await, before), (3, 3));
    assert_eq!(say(&served, second, "complete", Value::Null).await.status, 204);
    let again = say(&served, second, "complete", Value::Null).await;
    assert_eq!(again.status, 409, "it ends once");
    let third = push.calls(3).await[2].clone();
    assert_eq!(third.ids(), texts(1..3), "slices grow again");
    assert_eq!(say(&served, &third, "complete", Value::Null).await.status, 204);
    push.drains(&served).await;
    assert_eq!(push.dead().await, []);
}

#[tokio::test]
async fn an_extended_lease_lasts_and_keeps_the_acknowledged_events() {
    // It outlasts a pause of the machine.
    const TTL: Duration = Duration::from_secs(4);
    let push = accepting(&[("pipelines.test.lease_ttl", "\"4s\"")]).await;
    push.publish("b", 0..5).await;
    let served = push.serve().await;
    let call = push.calls(1).await[0].clone();
    handed_over(&push, 1).await;
    let begun = Instant::now();
    let mut acked = 0;
    while begun.elapsed() < TTL * 3 / 2 {
        let said = say(&served, &call, "extend", json!({"ack": acked.min(3)})).await;
        assert_eq!(said.status, 200, "{said:?}");
        assert_eq!(said.body, json!({"expires_in_ms": 4_000, "acked": acked.min(3)}));
        assert_eq!(push.depth().await, 5 - acked.min(3));
        acked += 1;
        // A receiver waits like this between its calls.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(push.receiver.called(), 1, "nobody else got it meanwhile");
    let less = say(&served, &call, "extend", json!({"ack": 1})).await;
    assert_eq!(less.body["acked"], 3, "what is done stays done");
    let beyond = say(&served, &call, "complete", json!({"ack": 6})).await;
    assert_eq!((beyond.status, problem(&beyond)), (422, "ack-too-high"));
    assert_eq!(beyond.body["errors"][0]["field"], "ack");
    // `ack` counts from the start of the slice.
    assert_eq!(say(&served, &call, "complete", json!({"ack": 4})).await.status, 204);
    let rest = push.calls(2).await[1].clone();
    assert_eq!((rest.ids(), attempt(&rest)), (texts([4]), 2), "as after a 200 with ack");
    assert_eq!(say(&served, &rest, "complete", json!({"ack": 1})).await.status, 204);
    push.drains(&served).await;
    let done = metric(&served, "events_total", &[("outcome", "done")]).await;
    assert_eq!((done, losses(&served).await), (5, 0));
}

#[tokio::test]
async fn a_failed_lease_is_retried_in_order_after_the_pause_and_gives_up_at_last() {
    let push = accepting(&[("pipelines.test.max_attempts", "3")]).await;
    push.publish("b", 0..4).await;
    let served = push.serve().await;
    let first = push.calls(1).await[0].clone();
    let failed = json!({"ack": 1, "retry_after": 1, "reason": "no\u{7} luck"});
    assert_eq!(say(&served, &first, "fail", failed).await.status, 204);
    let second = push.calls(2).await[1].clone();
    assert!(second.after(&first) >= Duration::from_secs(1), "not before the pause is over");
    assert_eq!((second.ids(), attempt(&second)), (texts([1]), 2));
    assert_eq!(say(&served, &second, "fail", json!({"reason": "no\u{7} luck"})).await.status, 204);
    let third = push.calls(3).await[2].clone();
    assert_eq!((third.ids(), attempt(&third)), (texts([1]), 3));
    assert_eq!(say(&served, &third, "fail", json!({"reason": "no\u{7} luck"})).await.status, 204);
    let rest = push.calls(4).await[3].clone();
    assert_eq!((rest.ids(), attempt(&rest)), (texts(2..4), 1), "the bot goes on");
    assert_eq!(say(&served, &rest, "complete", Value::Null).await.status, 204);
    push.drains(&served).await;
    assert_eq!(push.dead().await, [("1".to_owned(), "no  luck".to_owned(), 3)]);
    let count = async |outcome| metric(&served, "events_total", &[("outcome", outcome)]).await;
    assert_eq!((count("done").await, count("retried").await, count("dead").await), (3, 2, 1));
}

/// The failure does not say which event caused it, so no event is given up in place of another.
#[tokio::test]
async fn a_failure_of_an_unknown_event_hands_out_the_first_alone_and_then_twice_as_many() {
    let push = accepting(&[("pipelines.test.max_attempts", "1")]).await;
    push.publish("b", 0..3).await;
    let served = push.serve().await;
    let first = push.calls(1).await[0].clone();
    assert_eq!(say(&served, &first, "fail", Value::Null).await.status, 204);
    let slices = [("complete", 0..1), ("fail", 1..3), ("fail", 1..2), ("complete", 2..3)];
    for (place, (what, ids)) in slices.into_iter().enumerate() {
        let call = push.calls(place + 2).await[place + 1].clone();
        assert_eq!(call.ids(), texts(ids));
        assert_eq!(say(&served, &call, what, Value::Null).await.status, 204);
    }
    push.drains(&served).await;
    let reason = "the receiver reported a failure".to_owned();
    assert_eq!(push.dead().await, [("1".to_owned(), reason, 2)]);
}

/// When all places are taken, a worker keeps its lease and waits. That holds back the receiver's
/// next slices.
#[tokio::test]
async fn open_leases_are_bounded_and_workers_wait_for_a_place() {
    let push = accepting(&[("pipelines.test.workers.max", "1")]).await;
    // 10,000 leases over eight shards.
    push.pretend_open(1_250).await;
    push.publish("a", 0..1).await;
    push.publish("b", 1..2).await;
    let served = push.serve().await;
    push.calls(1).await;
    eventually(LONG, "the worker stays", async || {
        metric(&served, "workers", &[("state", "busy")]).await == 1
    })
    .await;
    let held = Instant::now();
    eventually(LONG, "it tried again several times", async || {
        held.elapsed() > Duration::from_millis(800)
    })
    .await;
    assert_eq!((push.receiver.called(), push.open().await), (1, 8 * 1_250));
    // There are places for two leases, also if both belong to one shard.
    push.pretend_open(1_248).await;
    let calls = push.calls(2).await;
    eventually(LONG, "both are out", async || {
        metric(&served, "workers", &[("state", "busy")]).await == 0
    })
    .await;
    assert_eq!(push.open().await, 8 * 1_248 + 2);
    for call in &calls {
        assert_eq!(say(&served, call, "complete", Value::Null).await.status, 204);
    }
    push.drains(&served).await;
    assert_eq!(push.open().await, 8 * 1_248);
}

/// A worker that finds no place before the lease's TTL ends loses the lease, as if the receiver had
/// not answered. Everything that the receiver completes before then still counts.
#[tokio::test]
async fn a_receiver_without_a_place_can_complete_all_the_same() {
    let push = accepting(&[("pipelines.test.workers.max", "1")]).await;
    push.pretend_open(1_250).await;
    push.publish("a", 0..2).await;
    let served = push.serve().await;
    let first = push.calls(1).await[0].clone();
    eventually(LONG, "the worker waits for a place", async || {
        metric(&served, "workers", &[("state", "busy")]).await == 1
    })
    .await;
    let extended = say(&served, &first, "extend", json!({"ack": 1})).await;
    assert_eq!((extended.status, &extended.body["acked"]), (200, &json!(0)), "not taken yet");
    assert_eq!(say(&served, &first, "complete", json!({"ack": 2})).await.status, 204);
    push.drains(&served).await;
    eventually(LONG, "the worker is free", async || {
        metric(&served, "workers", &[("state", "busy")]).await == 0
    })
    .await;
    assert_eq!((push.open().await, losses(&served).await), (8 * 1_250, 0));
}

/// The receiver completes the lease first and answers the push afterwards, with 202 or 200.
#[tokio::test]
async fn a_receiver_that_is_faster_than_its_own_answer_loses_nothing() {
    let (released, _) = tokio::sync::broadcast::channel::<()>(1);
    let release = released.clone();
    let push = Push::new(&[], move |call| {
        let mut waiting = release.subscribe();
        async move {
            let _ = waiting.recv().await;
            Reply::new(if call.number % 2 == 0 { 202 } else { 200 }, "")
        }
    })
    .await;
    let served = push.serve().await;
    for round in 0..4 {
        push.publish("b", round..=round).await;
        let place = usize::try_from(round).unwrap();
        let call = push.calls(place + 1).await[place].clone();
        assert_eq!(call.ids(), texts([round]));
        assert_eq!(say(&served, &call, "complete", Value::Null).await.status, 204);
        assert_eq!((push.depth().await, push.open().await), (0, 0));
        released.send(()).unwrap();
        eventually(LONG, "the worker is free", async || {
            metric(&served, "workers", &[("state", "busy")]).await == 0
        })
        .await;
    }
    push.drains(&served).await;
    let done = metric(&served, "events_total", &[("outcome", "done")]).await;
    assert_eq!((done, push.receiver.called()), (4, 4));
    assert_eq!(losses(&served).await, 0, "nothing was lost");
}

#[tokio::test]
async fn an_unknown_lease_or_a_malformed_call_is_refused_and_changes_nothing() {
    let push = accepting(&[]).await;
    push.publish("b", 0..2).await;
    let served = push.serve().await;
    let call = push.calls(1).await[0].clone();
    handed_over(&push, 1).await;
    let lease = call.text("lease");
    let mut forged = lease.clone().into_bytes();
    forged[10] = if forged[10] == b'A' { b'B' } else { b'A' };
    let forged = String::from_utf8(forged).unwrap();
    let long = "A".repeat(1_500);
    let cut = &lease[..lease.len() - 1];
    for lease in [forged.as_str(), cut, "x", "%00", &long] {
        for what in ["complete", "fail", "extend"] {
            let path = format!("/v1/leases/{lease}/{what}");
            let said = post(&served.http(), &path, Value::Null).await;
            assert_eq!((said.status, problem(&said)), (404, "no-lease"), "{path}");
        }
    }
    for (what, body) in [
        ("complete", json!({"ack": -1})),
        ("complete", json!({"ack": 1.5})),
        ("complete", json!({"ack": "1"})),
        ("complete", json!({"acks": 1})),
        ("complete", json!([1])),
        ("fail", json!({"retry_after": -1})),
        ("fail", json!({"retry_after": "soon"})),
        ("fail", json!({"reason": 1})),
        ("extend", json!("x")),
    ] {
        let said = say(&served, &call, what, body.clone()).await;
        assert_eq!((said.status, problem(&said)), (400, "invalid-request"), "{what} {body}");
    }
    assert_eq!((push.depth().await, push.open().await), (2, 1));
    assert_eq!(say(&served, &call, "complete", Value::Null).await.status, 204);
    push.drains(&served).await;
}
