//! The attempts that are kept for operators: how each one ended, which events it had, what the
//! receiver answered.

use std::time::Duration;

use fairlane::history::{Attempt, AttemptResult};
use serde_json::{Value, json};

use crate::support::config::SHARDS;
use crate::support::http::Client;
use crate::support::push::{LONG, Push};
use crate::support::receiver::{Call, Reply};
use crate::support::served::Served;
use crate::support::wait::eventually;

/// The attempts of a bot, the newest first.
async fn attempts(served: &Served, bot: &str) -> Vec<Attempt> {
    let path = format!("/v1/pipelines/test/bots/{bot}/attempts");
    let response = Client::new(&served.http()).get(&path).await;
    assert_eq!(response.code, 200, "{response:?}");
    serde_json::from_value(response.json()["attempts"].take()).unwrap()
}

/// Waits until the newest attempt of a bot has ended this way.
async fn last(served: &Served, bot: &str, result: AttemptResult) -> Attempt {
    let what = format!("the last attempt of {bot} is {result:?}");
    eventually(LONG, &what, async || {
        attempts(served, bot).await.first().is_some_and(|last| last.result == result)
    })
    .await;
    attempts(served, bot).await.remove(0)
}

async fn answer(call: Call) -> Reply {
    let first = call.json()["attempt"] == 1;
    match call.text("bot").as_str() {
        "failing" => Reply::new(500, "oops"),
        "partial" if call.ids().len() == 3 => Reply::new(200, r#"{"ack":2}"#),
        "away" => Reply::new(503, "closed").with("retry-after", "60"),
        "late" if first => std::future::pending().await,
        "later" => Reply::new(202, ""),
        _ => Reply::new(200, "fine"),
    }
}

#[tokio::test]
async fn each_attempt_is_kept_with_its_end_its_events_and_the_answer_of_the_receiver() {
    let settings =
        [("pipelines.test.handler_timeout", "\"4s\""), ("pipelines.test.max_attempts", "2")];
    let push = Push::new(&settings, answer).await;
    for bot in ["good", "failing", "away", "late", "later"] {
        push.publish(bot, 0..1).await;
    }
    push.publish("partial", 0..3).await;
    let served = push.serve().await;

    let done = last(&served, "good", AttemptResult::Done).await;
    assert_eq!((done.status, done.answer, done.reason), (Some(200), None, None));
    assert_eq!((done.events, done.settled, done.attempt, done.slices), (1, 1, 1, 1));
    assert_eq!((done.first_id.as_str(), done.last_id.as_str()), ("0", "0"));
    assert!(done.duration_us.is_some_and(|us| us > 0) && done.time_ms > 0);
    assert!(done.process.ends_with(&format!(" {}", served.id())), "{}", done.process);

    last(&served, "failing", AttemptResult::Dead).await;
    let all = attempts(&served, "failing").await;
    let ends: Vec<_> = all.iter().map(|one| (one.result, one.attempt, one.status)).collect();
    let expected = [(AttemptResult::Dead, 2, Some(500)), (AttemptResult::Failed, 1, Some(500))];
    assert_eq!(ends, expected);
    assert_eq!(all[1].answer.as_deref(), Some("oops"));
    assert!(all[1].reason.as_deref().is_some_and(|reason| reason.contains("500")), "{all:?}");
    assert!(all[1].retry_ms.is_some() && all[0].retry_ms.is_none(), "{all:?}");

    last(&served, "partial", AttemptResult::Done).await;
    let partial = attempts(&served, "partial").await.remove(1);
    assert_eq!(partial.result, AttemptResult::Partial);
    assert_eq!((partial.events, partial.settled), (3, 2));
    assert_eq!((partial.first_id.as_str(), partial.last_id.as_str()), ("0", "2"));

    let away = last(&served, "away", AttemptResult::Unavailable).await;
    assert_eq!((away.status, away.answer.as_deref()), (Some(503), Some("closed")));
    assert!(away.retry_ms.is_some_and(|ms| ms > 50_000), "{away:?}");

    last(&served, "late", AttemptResult::Done).await;
    let late = attempts(&served, "late").await.remove(1);
    assert_eq!((late.result, late.status), (AttemptResult::Timeout, None));
    assert!(late.reason.as_deref().is_some_and(|why| why.contains("handler_timeout")), "{late:?}");

    last(&served, "later", AttemptResult::Accepted).await;
    assert!(attempts(&served, "nobody").await.is_empty());
}

#[tokio::test]
async fn a_lease_that_a_receiver_ends_later_is_kept_when_it_ends() {
    let push = Push::new(&[], answer).await;
    push.publish("later", 7..8).await;
    let served = push.serve().await;
    last(&served, "later", AttemptResult::Accepted).await;
    let lease = push.calls(1).await[0].text("lease");
    let said = crate::support::push::post(
        &served.http(),
        &format!("/v1/leases/{lease}/fail"),
        json!({ "reason": "no stock", "retry_after": 60 }),
    )
    .await;
    assert_eq!(said.status, 204, "{said:?}");
    let failed = last(&served, "later", AttemptResult::Failed).await;
    assert_eq!((failed.reason.as_deref(), failed.duration_us), (Some("no stock"), None));
    assert_eq!((failed.events, failed.first_id.as_str()), (1, "7"));
}

#[tokio::test]
async fn the_attempt_after_a_killed_process_tells_that_a_worker_vanished() {
    let push = Push::new(&[], |call| async move {
        if call.number == 0 {
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        Reply::new(200, "")
    })
    .await;
    push.publish("b", 0..1).await;
    let mut first = push.serve().await;
    push.calls(1).await;
    // Only a lease that was renewed counts as lost.
    let mut connection = push.server.connection().await;
    eventually(LONG, "its lease is renewed", async || {
        let mut pipe = redis::Pipeline::new();
        for shard in 0..SHARDS {
            pipe.hget(format!("fl:{{test:{shard}}}:own"), "b");
        }
        let owners: Vec<Option<String>> = pipe.query_async(&mut connection).await.unwrap();
        owners.into_iter().flatten().any(|owner| !owner.ends_with("|0"))
    })
    .await;
    first.kill9();
    let second = push.serve().await;
    let done = last(&second, "b", AttemptResult::Done).await;
    assert_eq!((done.lost, done.attempt), (1, 2), "{done:?}");
}

#[tokio::test]
async fn nothing_is_kept_with_history_switched_off() {
    let push = Push::new(&[("pipelines.test.history.slices", "0")], answer).await;
    push.publish("failing", 0..1).await;
    push.publish("good", 0..1).await;
    let served = push.serve().await;
    push.calls(3).await;
    // What is kept would be there by now.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut connection = push.server.connection().await;
    let keys: Vec<String> =
        redis::cmd("KEYS").arg("fl:*history*").query_async(&mut connection).await.unwrap();
    assert_eq!(keys, [""; 0]);
    assert!(attempts(&served, "failing").await.is_empty());
}

#[tokio::test]
async fn wrong_requests_get_a_problem_with_a_detail() {
    let push = Push::new(&[], answer).await;
    let served = push.serve().await;
    let client = Client::new(&served.http());
    for (path, status) in [
        ("/v1/pipelines/test/bots/b/attempts?limit=0", 400),
        ("/v1/pipelines/none/bots/b/attempts", 404),
        ("/v1/pipelines/test/bots/b/attempts?wrong=1", 400),
    ] {
        let response = client.get(path).await;
        assert_eq!(response.code, status, "{path}: {response:?}");
        assert_ne!(response.json()["detail"], Value::Null);
    }
}
