use std::pin::pin;

use futures_util::future::join_all;
use futures_util::poll;
use mongodb::bson::{deserialize_from_document, doc};
use mongodb::error::{CommandError, Error, ErrorKind};
use tokio::sync::mpsc;

use super::*;
use crate::config::MongoUrl;

const PAUSE: Duration = Duration::from_secs(1);
const RULES: BatchLimits = BatchLimits { items_max: 500, in_flight: 1, pause: Duration::ZERO };

/// The groups under test, and the server behind them. Each group waits for a permit of the server,
/// which answers with the items of the request.
struct Server {
    groups: Coalescer<u32, Vec<u32>>,
    answers: Arc<Semaphore>,
    asked: mpsc::UnboundedReceiver<usize>,
}

/// Fails while `up` is 0.
fn server(rules: BatchLimits, up: &Arc<Semaphore>) -> Server {
    failing(rules, up, silent)
}

/// [`server`] that fails with this error.
fn failing(rules: BatchLimits, up: &Arc<Semaphore>, error: fn() -> MongoError) -> Server {
    let (log, asked) = mpsc::unbounded_channel();
    let answers = Arc::new(Semaphore::new(0));
    let (gate, up) = (Arc::clone(&answers), Arc::clone(up));
    let groups = Coalescer::new(rules, move |items: Vec<u32>, _| {
        let (gate, up) = (Arc::clone(&gate), Arc::clone(&up));
        log.send(items.len()).unwrap();
        async move {
            gate.acquire().await.unwrap().forget();
            if up.available_permits() == 0 { Err(error()) } else { Ok(items) }
        }
        .boxed()
    });
    Server { groups, answers, asked }
}

fn url() -> MongoUrl {
    MongoUrl::parse("mongodb://127.0.0.1:1").unwrap()
}

fn silent() -> MongoError {
    MongoError::Silent { url: url(), command: "find", within: PAUSE, met: None }
}

fn unreachable() -> MongoError {
    let source = Box::new(Error::from(std::io::Error::from(std::io::ErrorKind::NotConnected)));
    MongoError::Away { url: url(), reason: "none".to_owned(), source }
}

/// The error of the server if a command exceeds `maxTimeMS`.
fn time_limit() -> MongoError {
    let reply = doc! { "code": 50, "codeName": "MaxTimeMSExpired", "errmsg": "too long" };
    let error: CommandError = deserialize_from_document(reply).unwrap();
    let source = Box::new(Error::from(ErrorKind::Command(error)));
    MongoError::Interrupted { url: url(), command: "update", reason: "too long".to_owned(), source }
}

impl Server {
    fn asked(&mut self) -> Vec<usize> {
        std::iter::from_fn(|| self.asked.try_recv().ok()).collect()
    }
}

#[tokio::test]
async fn a_caller_during_a_running_group_shares_the_next() {
    let mut server = server(RULES, &Arc::new(Semaphore::new(1)));
    let groups = server.groups.clone();
    let mut calls = pin!(join_all((0..200).map(|n| {
        let groups = groups.clone();
        async move { (n, groups.join(vec![n, n]).await.unwrap()) }
    })));
    assert!(poll!(&mut calls).is_pending());
    server.answers.add_permits(2);
    for (n, (result, place)) in calls.await {
        assert_eq!(result[place], [n, n]);
    }
    assert_eq!(server.asked(), [2, 398]);
}

#[tokio::test]
async fn a_group_takes_no_more_than_its_bound_and_no_call_that_must_be_alone() {
    let rules = BatchLimits { items_max: 4, ..RULES };
    let mut server = server(rules, &Arc::new(Semaphore::new(1)));
    let groups = server.groups.clone();
    let mut first = pin!(groups.join(vec![0]));
    assert!(poll!(&mut first).is_pending());
    let mut calls = Vec::new();
    for items in [vec![1, 2], vec![3; 9], vec![4, 5, 6], vec![7]] {
        calls.push(groups.join(items).boxed());
    }
    calls.push(groups.alone(vec![8]).boxed());
    calls.push(groups.join(vec![]).boxed());
    let mut calls = pin!(join_all(calls));
    assert!(poll!(&mut calls).is_pending());
    server.answers.add_permits(99);
    assert_eq!(first.await.unwrap(), (Arc::new(vec![0]), 0..1));
    assert!(calls.await.iter().all(Result::is_ok));
    let mut asked = server.asked();
    assert_eq!(asked.split_off(2), [2, 9, 4], "in this order");
    assert_eq!(asked, [1, 1], "the call that is alone has a permit of its own");
}

#[tokio::test]
async fn a_caller_that_leaves_cancels_no_other() {
    let mut server = server(RULES, &Arc::new(Semaphore::new(1)));
    let groups = server.groups.clone();
    let mut leaver = groups.join(vec![1]).boxed();
    assert!(poll!(&mut leaver).is_pending());
    let (mut second, mut third) = (groups.join(vec![2]).boxed(), groups.join(vec![3]).boxed());
    assert!(poll!(&mut second).is_pending());
    assert!(poll!(&mut third).is_pending());
    // The first call was in flight in a group of its own. The second call drives the group that it
    // shares with the third.
    drop(leaver);
    assert!(poll!(&mut third).is_pending());
    drop(second);
    server.answers.add_permits(1);
    assert_eq!(*third.await.unwrap().0, [2, 3]);
    // A call does not join a group without members.
    let mut fourth = groups.join(vec![4]).boxed();
    assert!(poll!(&mut fourth).is_pending());
    let mut fifth = groups.join(vec![5]).boxed();
    assert!(poll!(&mut fifth).is_pending());
    drop((fourth, fifth));
    server.answers.add_permits(1);
    assert_eq!(*groups.join(vec![6]).await.unwrap().0, [6]);
    assert_eq!(server.asked(), [1, 2, 1, 1]);
}

#[tokio::test]
async fn an_unreachable_server_fails_all_waiting_callers_and_the_next_tries_again() {
    let up = Arc::new(Semaphore::new(0));
    let mut server = failing(RULES, &up, unreachable);
    let groups = server.groups.clone();
    // The last one waits for a permit of its own kind.
    let calls = [groups.alone(vec![1]).boxed(), groups.alone(vec![2]).boxed()];
    let mut calls = pin!(join_all(calls));
    assert!(poll!(&mut calls).is_pending());
    server.answers.add_permits(1);
    assert!(calls.await.iter().all(Result::is_err));
    assert_eq!(server.asked(), [1]);
    up.add_permits(1);
    server.answers.add_permits(1);
    assert!(groups.join(vec![3]).await.is_ok());
}

#[tokio::test]
async fn a_group_that_takes_too_long_fails_no_waiting_caller() {
    for error in [silent, time_limit] {
        let up = Arc::new(Semaphore::new(0));
        let server = failing(RULES, &up, error);
        let groups = server.groups.clone();
        let mut slow = groups.join(vec![1]).boxed();
        let mut long = groups.alone(vec![2]).boxed();
        assert!(poll!(&mut slow).is_pending() && poll!(&mut long).is_pending());
        let (mut waiting, mut behind) =
            (groups.join(vec![3]).boxed(), groups.alone(vec![4]).boxed());
        assert!(poll!(&mut waiting).is_pending() && poll!(&mut behind).is_pending());
        server.answers.add_permits(2);
        assert!(slow.await.is_err() && long.await.is_err());
        up.add_permits(1);
        server.answers.add_permits(2);
        assert_eq!(*waiting.await.unwrap().0, [3]);
        assert_eq!(*behind.await.unwrap().0, [4]);
    }
}

#[tokio::test]
async fn groups_that_are_alone_wait_only_for_each_other() {
    let mut server = server(RULES, &Arc::new(Semaphore::new(1)));
    let groups = server.groups.clone();
    let (mut long, mut other) =
        (groups.alone(vec![1, 1, 1]).boxed(), groups.alone(vec![2, 2]).boxed());
    assert!(poll!(&mut long).is_pending() && poll!(&mut other).is_pending());
    let mut short = groups.join(vec![3]).boxed();
    assert!(poll!(&mut short).is_pending());
    assert_eq!(server.asked(), [3, 1], "the short group is in flight beside the long one");
    server.answers.add_permits(3);
    assert!(short.await.is_ok() && long.await.is_ok() && other.await.is_ok());
    assert_eq!(server.asked(), [2]);
}

#[tokio::test(start_paused = true)]
async fn a_time_limit_of_the_server_starts_no_pause() {
    let up = Arc::new(Semaphore::new(0));
    let server = failing(BatchLimits { pause: PAUSE, ..RULES }, &up, time_limit);
    server.answers.add_permits(2);
    assert!(server.groups.join(vec![1]).await.is_err());
    up.add_permits(1);
    assert!(server.groups.join(vec![2]).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn after_a_failure_all_calls_fail_immediately_until_a_trial_succeeds() {
    let up = Arc::new(Semaphore::new(0));
    let mut server = server(BatchLimits { pause: PAUSE, in_flight: 4, ..RULES }, &up);
    let groups = server.groups.clone();
    server.answers.add_permits(1);
    assert!(groups.join(vec![1]).await.is_err());
    tokio::time::advance(PAUSE.mul_f64(0.9)).await;
    assert!(groups.join(vec![2]).await.is_err());

    tokio::time::advance(PAUSE.mul_f64(0.1)).await;
    let mut probe = groups.join(vec![3]).boxed();
    assert!(poll!(&mut probe).is_pending());
    assert!(groups.join(vec![4]).await.is_err(), "the probe is under way");
    drop(probe);
    let mut probe = groups.join(vec![5]).boxed();
    assert!(poll!(&mut probe).is_pending());
    server.answers.add_permits(1);
    assert!(probe.await.is_err());
    assert!(groups.join(vec![6]).await.is_err(), "the pause begins again");

    tokio::time::advance(PAUSE).await;
    up.add_permits(1);
    server.answers.add_permits(2);
    for n in [7, 8] {
        assert!(groups.join(vec![n]).await.is_ok(), "{n}");
    }
    assert_eq!(server.asked(), [1, 1, 1, 1, 1]);
}
