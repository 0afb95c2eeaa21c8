//! Push handlers that answer immediately: the effect of each answer on the events.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use fairlane::outbound::sign::{self, MessageId, Secret};

use crate::support::bus::event;
use crate::support::push::{LONG, Push, losses, metric, publish, pushing};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::{PROGRAM, Served};
use crate::support::wait::eventually;

const CONTENT: fn(Call) -> std::future::Ready<Reply> = |_| std::future::ready(Reply::new(200, ""));

/// The ids of all calls in order.
fn ids(calls: &[Call]) -> Vec<String> {
    calls.iter().flat_map(Call::ids).collect()
}

fn texts(ids: impl IntoIterator<Item = u32>) -> Vec<String> {
    ids.into_iter().map(|id| id.to_string()).collect()
}

/// The secrets that `fairlane secret` prints for a bot.
fn printed(config: &str, bot: &str) -> Vec<Secret> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("f.toml");
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(PROGRAM);
    let output = command.args(["secret", "--bot", bot, "--config"]).arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| Secret::parse(line).unwrap()).collect()
}

#[tokio::test]
async fn a_slice_is_posted_in_order_and_signed_with_the_bots_key_of_every_secret() {
    const SECRETS: &str =
        "[\"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\", \"whsec_bmV4dCBzZWNyZXQgbmV4dCBzZWNyZXQh\"]";
    let push = Push::new(&[("callbacks.secrets", SECRETS)], CONTENT).await;
    push.publish("bot-7", 0..5).await;
    push.publish("bot-8", 5..6).await;
    let process = push.serve().await;
    push.drains(&process).await;
    assert!(!process.log().contains("pushes are not signed"));
    assert!(!process.log().contains("whsec_"));

    let calls = push.receiver.calls();
    let mut of_7 = Vec::new();
    let mut deliveries = BTreeSet::new();
    for call in &calls {
        let (body, headers) = (call.json(), &call.headers);
        let mut fields: Vec<_> = body.as_object().unwrap().keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(fields, ["attempt", "bot", "events", "fence", "lease", "pipeline"]);
        assert_eq!((&body["pipeline"], &body["attempt"]), (&"test".into(), &1.into()));
        assert!(body["fence"].as_u64().is_some() && body["lease"].as_str().is_some());
        assert_eq!(call.line, "POST /hook HTTP/1.1");
        assert_eq!(headers["content-type"], "application/json");
        let left: u64 = headers["x-deadline-ms"].parse().unwrap();
        assert!((3_000..=5_000).contains(&left), "{left} ms of handler_timeout");
        let id = MessageId::parse(&headers[sign::ID]).expect("an id without a dot");
        let at = headers[sign::TIMESTAMP].parse().unwrap();
        assert!(call.at.as_secs().abs_diff(at) <= 5);
        assert!(deliveries.insert(headers[sign::ID].clone()), "a new id per delivery");
        let bot = call.text("bot");
        let keys = printed(&push.config, &bot);
        assert_eq!(keys.len(), 2);
        assert_eq!(headers[sign::SIGNATURE], sign::sign(&keys, &id, at, &call.body));
        assert_eq!(headers[sign::SIGNATURE].split(' ').count(), 2);
        let event = &body["events"][0];
        assert_eq!((&event["specversion"], &event["botid"]), (&"1.0".into(), &bot.clone().into()));
        if bot == "bot-7" {
            of_7.extend(call.ids());
        }
    }
    assert_eq!(of_7, texts(0..5));
    assert_ne!(printed(&push.config, "bot-7"), printed(&push.config, "bot-8"));
    let done = metric(&process, "events_total", &[("outcome", "done")]).await;
    assert_eq!((done, losses(&process).await), (6, 0));
}

#[tokio::test]
async fn unacknowledged_events_are_retried_in_order() {
    let push = Push::new(&[], |call| async move {
        match call.number {
            0 => Reply::new(200, r#"{"ack":2}"#),
            _ => Reply::new(204, ""),
        }
    })
    .await;
    push.publish("b", 0..5).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    assert_eq!(calls[0].ids(), texts(0..5));
    assert_eq!(calls[1].ids(), ["2"], "after a failure one alone");
    assert_eq!(calls[1].json()["attempt"], 2);
    assert_eq!(ids(&calls[1..]), texts(2..5));
    let fences: Vec<u64> = calls.iter().map(|c| c.json()["fence"].as_u64().unwrap()).collect();
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    assert_eq!(metric(&process, "events_total", &[("outcome", "retried")]).await, 1);
    assert!(process.log().contains("pushes are not signed"), "and the operator is told");
}

#[tokio::test]
async fn errors_are_retried_in_order_until_the_culprit_is_a_dead_letter() {
    let push = Push::new(&[("pipelines.test.max_attempts", "3")], |call| async move {
        let poison = call.ids().contains(&"2".to_owned());
        Reply::new(if poison { 500 } else { 200 }, "no\nway")
    })
    .await;
    push.publish("b", 0..5).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    assert_eq!(calls[0].ids(), texts(0..5));
    let small: Vec<_> = calls[1..].iter().map(|call| call.ids().join(" ")).collect();
    // One event after a failure or a dead letter, then twice as many. Failures of the slices with 0 and 1
    // in front do not count as attempts of 2.
    assert_eq!(small, ["0", "1 2", "1", "2 3", "2", "2", "3", "4"]);
    let attempts: Vec<_> = calls[4..7].iter().map(|call| call.json()["attempt"].clone()).collect();
    assert_eq!(attempts, [1, 2, 3]);
    let reason = "the receiver answered 500: no way".to_owned();
    assert_eq!(push.dead().await, [("2".to_owned(), reason, 3)]);
}

#[tokio::test]
async fn after_one_failure_the_slices_grow_again_with_each_success() {
    let push = Push::new(&[("pipelines.test.batch", "100")], |call| async move {
        Reply::new(if call.number == 0 { 500 } else { 200 }, "")
    })
    .await;
    push.publish("b", 0..300).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    let sizes: Vec<_> = calls.iter().map(|call| call.ids().len()).collect();
    assert_eq!(sizes[1], 1, "{sizes:?}");
    assert!(sizes[1..].windows(2).all(|pair| pair[1] <= 2 * pair[0]), "{sizes:?}");
    assert!(sizes.len() < 20, "{sizes:?}");
    let handled: Vec<_> = calls[1..].iter().flat_map(Call::ids).collect();
    assert_eq!(handled, texts(0..300));
}

#[tokio::test]
async fn a_bot_whose_receiver_asks_for_a_pause_rests_alone_and_no_attempt_is_counted() {
    let refused = Mutex::new(0);
    let push = Push::new(&[("pipelines.test.max_attempts", "2")], move |call| {
        let busy = call.text("bot") == "busy" && {
            let mut refused = refused.lock().unwrap();
            *refused += 1;
            *refused <= 3
        };
        let status = if call.number % 2 == 0 { 429 } else { 503 };
        std::future::ready(if busy {
            Reply::new(status, "later").with("retry-after", "1")
        } else {
            Reply::new(200, "")
        })
    })
    .await;
    push.publish("busy", 0..1).await;
    push.publish("quiet", 1..2).await;
    let process = push.serve().await;
    push.calls(2).await;
    push.publish("quiet", 2..3).await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    let of = |bot: &str| -> Vec<Call> {
        calls.iter().filter(|call| call.text("bot") == bot).cloned().collect()
    };
    let busy = of("busy");
    assert_eq!(busy.len(), 4);
    assert!(busy.iter().all(|call| call.json()["attempt"] == 1));
    for pair in busy.windows(2) {
        assert!(pair[1].after(&pair[0]) >= Duration::from_secs(1));
    }
    let quiet = of("quiet");
    assert_eq!(ids(&quiet), texts(1..3));
    assert!(quiet[1].at < busy[2].at, "nobody waits for the busy one");
    assert_eq!(push.dead().await, []);
    assert_eq!(metric(&process, "events_total", &[("outcome", "retried")]).await, 3);
}

#[tokio::test]
async fn the_rest_of_a_slice_comes_in_order_after_the_pause_in_the_answer_and_no_attempt_is_counted()
 {
    let push = Push::new(&[("pipelines.test.max_attempts", "2")], |call| {
        let rests = call.text("bot") == "slow" && call.ids().len() > 1;
        std::future::ready(if rests {
            Reply::new(200, r#"{"ack":1,"retry_after":0.5}"#)
        } else {
            Reply::new(200, "")
        })
    })
    .await;
    push.publish("slow", 0..5).await;
    push.publish("quick", 5..6).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    let slow: Vec<Call> = calls.iter().filter(|call| call.text("bot") == "slow").cloned().collect();
    let rest: Vec<_> = slow.iter().map(|call| call.ids()[0].clone()).collect();
    assert_eq!(rest, texts(0..5), "each call begins behind the acknowledged event");
    assert_eq!(slow[0].ids(), texts(0..5));
    assert!(slow.iter().all(|call| call.json()["attempt"] == 1));
    for pair in slow.windows(2) {
        assert!(pair[1].after(&pair[0]) >= Duration::from_millis(500));
    }
    assert_eq!(push.dead().await, []);
    assert_eq!(metric(&process, "events_total", &[("outcome", "done")]).await, 6);
}

#[tokio::test]
async fn an_unavailable_receiver_costs_no_attempt_and_no_event() {
    let server = RedisServer::start(Options::default());
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    drop(gone);
    let settings = [("pipelines.test.max_attempts", "1")];
    let config = pushing(&server, &format!("http://{address}/hook"), &settings);
    for bot in ["a", "b", "c"] {
        publish(&server, bot, 0..4).await;
    }
    let process = Served::start(&config).await;
    eventually(LONG, "each was refused several times", async || {
        metric(&process, "events_total", &[("outcome", "retried")]).await >= 12
    })
    .await;
    let receiver = Receiver::start_at(address, CONTENT).await;
    eventually(LONG, "everything arrives", async || {
        ids(&receiver.calls()).len() >= 12
            && metric(&process, "events_total", &[("outcome", "done")]).await == 12
    })
    .await;
    let calls = receiver.calls();
    for bot in ["a", "b", "c"] {
        let of: Vec<_> = calls.iter().filter(|call| call.text("bot") == bot).cloned().collect();
        assert_eq!(ids(&of), texts(0..4), "{bot}");
        assert!(of.iter().all(|call| call.json()["attempt"] == 1), "{bot}");
    }
    assert_eq!(metric(&process, "events_total", &[("outcome", "dead")]).await, 0);
}

#[tokio::test]
async fn silence_ends_with_the_handlers_time_and_is_retried() {
    let settings = [("pipelines.test.handler_timeout", "\"3s\"")];
    let push = Push::new(&settings, |call| async move {
        match call.number {
            0 => std::future::pending().await,
            1 => Reply::Nothing,
            _ => Reply::new(200, ""),
        }
    })
    .await;
    push.publish("b", 0..1).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let calls = push.receiver.calls();
    let attempts: Vec<_> = calls.iter().map(|call| call.json()["attempt"].clone()).collect();
    assert_eq!(attempts, [1, 2, 3], "silence and a broken connection are attempts");
    let left: u64 = calls[0].headers["x-deadline-ms"].parse().unwrap();
    assert!((1_000..=3_000).contains(&left), "{left}");
    let waited = calls[1].after(&calls[0]);
    // The first call may arrive late.
    assert!(waited >= Duration::from_millis(left * 5 / 6), "{waited:?} of {left} ms");
    assert_eq!(losses(&process).await, 0);
}

/// `ack` counts events, so an event that the receiver never saw must not lie among them.
#[tokio::test]
async fn events_that_expired_are_no_gap_in_a_slice() {
    let push = Push::new(&[], |call| async move {
        Reply::new(200, format!(r#"{{"ack":{}}}"#, call.ids().len()))
    })
    .await;
    let expired = |id: u32| {
        let event = event("b", "test.event", id);
        event.replacen('{', r#"{"expirytime":"2020-01-01T00:00:00Z","#, 1)
    };
    let fresh = |id: u32| event("b", "test.event", id);
    let events = [expired(0), expired(1), fresh(2), fresh(3), expired(4), fresh(5)];
    push.publish_events(&events).await;
    let process = push.serve().await;
    push.drains(&process).await;
    let slices: Vec<_> = push.receiver.calls().iter().map(Call::ids).collect();
    assert_eq!(slices, [texts([2, 3]), texts([5])]);
    let dead: Vec<_> = push.dead().await.into_iter().map(|(id, ..)| id).collect();
    assert_eq!(dead, texts([0, 1, 4]));
    assert_eq!(metric(&process, "events_total", &[("outcome", "expired")]).await, 3);
}

#[tokio::test]
async fn a_push_pipeline_without_a_url_is_refused_at_start() {
    let server = RedisServer::start(Options::default());
    let config = pushing(&server, "", &[]);
    let mut process = Served::spawn(&config, "work");
    let status = process.wait_exit(LONG).expect("it does not start");
    assert_eq!(status.code(), Some(64), "{}", process.log());
    assert!(process.log().contains("pipelines.test.url is not set"), "{}", process.log());
}
