//! Push handlers with an ordering key.

use std::collections::BTreeSet;

use super::event;
use crate::support::push::Push;
use crate::support::receiver::{Call, Reply};

const SUBJECTS: [&str; 4] = ["ann", "bob", "bad", "eve"];

fn events(count: usize) -> Vec<String> {
    (0..count).map(|id| event("shop", SUBJECTS[id % 4], id)).collect()
}

fn subjects(call: &Call) -> BTreeSet<String> {
    let body = call.json();
    let events = body["events"].as_array().unwrap();
    events.iter().map(|event| event["subject"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn each_key_is_a_call_of_its_own_and_keeps_its_order_though_calls_fail() {
    let settings = [
        ("pipelines.test.order_by", "\"subject\""),
        ("pipelines.test.concurrency", "4"),
        ("pipelines.test.max_attempts", "1000"),
    ];
    let failing = std::sync::atomic::AtomicU32::new(0);
    let push = Push::new(&settings, move |call: Call| {
        let bad = subjects(&call).contains("bad");
        let fails = bad && failing.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 5;
        std::future::ready(if fails {
            Reply::new(200, r#"{"ack":0}"#)
        } else {
            Reply::new(200, "")
        })
    })
    .await;
    push.publish_events(&events(80)).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    for call in &calls {
        assert_eq!(subjects(call).len(), 1, "one key a call");
        assert_eq!(call.text("lease"), "", "it cannot be completed later");
    }
    for subject in SUBJECTS {
        let mut ids: Vec<usize> = Vec::new();
        for call in calls.iter().filter(|call| subjects(call).contains(subject)) {
            ids.extend(call.ids().iter().map(|id| id.parse::<usize>().unwrap()));
        }
        let mut first = Vec::new();
        ids.retain(|id| {
            !first.contains(id) && {
                first.push(*id);
                true
            }
        });
        assert!(ids.is_sorted() && ids.len() == 20, "{subject}: {ids:?}");
    }
}

#[tokio::test]
async fn an_answer_of_202_is_a_failure_with_a_clear_reason() {
    let settings =
        [("pipelines.test.order_by", "\"subject\""), ("pipelines.test.max_attempts", "2")];
    let push = Push::new(&settings, |_| std::future::ready(Reply::new(202, ""))).await;
    push.publish_events(&events(1)).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let queue = crate::support::instance::queue(&push.config, "test").await;
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.len(), 1);
    assert!(
        letters[0].reason.contains("with order_by it must answer when it is done"),
        "{letters:?}"
    );
    assert_eq!(push.open().await, 0);
}
