//! Servers that are full, forget their scripts or are restarted.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::id::Offset;
use fairlane::quotas::NO_QUOTAS;
use fairlane::redis::scripts::{
    Claim, Claimed, Complete, Completion, Enqueue, Enqueued, Limits, Mode, Note, Pause, Push,
    Resume, Span, Take, Verdict,
};
use fairlane::redis::{Link, RedisError, Target};
use futures_util::StreamExt;
use redis::AsyncCommands;

use super::{LIMITS, SLICE_US, bot, claim_all, completion, dead, keys};
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::wait::eventually;

fn link(server: &RedisServer) -> Link {
    let target = Target::new(&server.url()).unwrap();
    Link::new(target, vec![keys("p")], SLICE_US, Duration::from_secs(10))
}

async fn push(link: &Link, events: &[&str]) -> Result<u64, RedisError> {
    let events: Vec<Vec<u8>> = events.iter().map(|event| event.as_bytes().to_vec()).collect();
    let (keys, bot) = (&keys("p"), &bot("a"));
    let call = Push { keys, limits: LIMITS, bot, events: &events, due_ms: 0, idempotency: None };
    Ok(link.call(&call).await?.queued.appended)
}

async fn claim(link: &Link) -> Claimed {
    link.call(&claim_all(&keys("p"))).await.unwrap()
}

async fn complete(link: &Link, item: Completion) -> Result<Verdict, RedisError> {
    let (keys, items) = (&keys("p"), &[item]);
    let quotas = &NO_QUOTAS;
    Ok(link.call(&Complete { keys, dead_max: 9, quotas, ledger: false, items }).await?.verdicts[0])
}

/// Every key with its content.
async fn everything(server: &RedisServer) -> BTreeMap<String, Vec<u8>> {
    let mut connection = server.connection().await;
    let mut found = BTreeMap::new();
    for key in connection.keys::<_, Vec<String>>("*").await.unwrap() {
        let held = redis::cmd("DUMP").arg(&key).query_async(&mut connection).await.unwrap();
        found.insert(key, held);
    }
    found
}

#[tokio::test]
async fn a_full_server_refuses_new_events_whole_and_still_empties() {
    let server = RedisServer::start(Options::default());
    let (link, keys, a) = (link(&server), &keys("p"), &bot("a"));
    push(&link, &["1", "2", "3"]).await.unwrap();
    let config = |bytes: u64| {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("maxmemory").arg(bytes);
        command
    };
    let mut connection = server.connection().await;
    config(1).exec_async(&mut connection).await.unwrap();
    let before = everything(&server).await;

    let (prev, last) = (Offset::default(), Offset { ms: 1, seq: 1 });
    let bots = || vec![(a.clone(), vec![&b"4"[..], b"5"]), (bot("b"), vec![b"6"])];
    let limits = Limits { max_queue: 4, ..LIMITS };
    let enqueue = Enqueue {
        keys,
        spans: vec![Span { log: "s", prev, last }],
        repeats: None,
        limits,
        quotas: &NO_QUOTAS,
        bots: bots(),
        postings: None,
        take: Take::default(),
    };
    let refused = link.call(&enqueue).await.unwrap_err();
    assert!(refused.is_full() && refused.is_passing(), "{refused}");
    assert!(push(&link, &["4"]).await.unwrap_err().is_full());
    assert_eq!(everything(&server).await, before, "nothing half written");

    let claimed = claim(&link).await;
    let keep = completion(&claimed, 0, 1, Mode::Keep { ttl_ms: 30_000 });
    assert_eq!(complete(&link, keep).await.unwrap(), Verdict::Ok);
    let park = completion(&claimed, 0, 1, Mode::Park { ms: 0 });
    let park = Completion { before: 1, exceptions: vec![dead(0)], ..park };
    assert_eq!(complete(&link, park).await.unwrap(), Verdict::Ok);
    assert!(link.call(&Pause { keys, bot: Some(a), note: "", replaces: false }).await.unwrap());
    let resume = Resume { keys, bot: Some(a), slice_us: SLICE_US };
    assert!(link.call(&resume).await.unwrap());
    let claimed = claim(&link).await;
    let release = completion(&claimed, 0, 1, Mode::Release);
    assert_eq!(complete(&link, release).await.unwrap(), Verdict::Ok);

    config(0).exec_async(&mut connection).await.unwrap();
    let taken = link.call(&enqueue).await.unwrap();
    assert!(matches!(taken, Enqueued::Ok(done, _) if done.appended == 3), "{taken:?}");
}

#[tokio::test]
async fn no_call_needs_no_answer() {
    let server = RedisServer::start(Options::default());
    let answers = link(&server).call_all::<Note<'_>>(&[]).await.unwrap();
    assert_eq!(answers.len(), 0);
}

#[tokio::test]
async fn forgotten_scripts_are_loaded_again_unnoticed() {
    let server = RedisServer::start(Options::default());
    let link = link(&server);
    push(&link, &["1", "2"]).await.unwrap();
    let claimed = claim(&link).await;
    let mut connection = server.connection().await;
    redis::cmd("SCRIPT").arg("FLUSH").exec_async(&mut connection).await.unwrap();
    let release = completion(&claimed, 0, 1, Mode::Release);
    assert_eq!(complete(&link, release).await.unwrap(), Verdict::Ok, "the lease is still held");
    assert_eq!(push(&link, &["3"]).await.unwrap(), 1);
}

#[tokio::test]
async fn a_lease_of_an_older_run_commits_nothing() {
    let options = Options { persistence: Persistence::Always, ..Options::default() };
    let mut server = RedisServer::start(options);
    let link = link(&server);
    push(&link, &["1", "2"]).await.unwrap();
    let old = claim(&link).await;
    server.restart();
    // The first call notices the broken connection.
    let (none, patience) = (redis::pipe().cmd("PING").clone(), Duration::from_secs(10));
    eventually(patience, "a new connection", async || link.run(&none).await.is_ok()).await;
    let late = || completion(&old, 0, 1, Mode::Release);
    assert_eq!(complete(&link, late()).await.unwrap(), Verdict::Stale);
    let new = claim(&link).await;
    assert_eq!(new.leases.len(), 1, "ready again at once");
    assert_ne!(new.run, old.run);
    assert_eq!(complete(&link, late()).await.unwrap(), Verdict::Stale);
    // The fence alone does not identify a lease: a server whose clock was set back gives the same
    // fence twice.
    let renamed = Completion { run: old.run.clone(), ..completion(&new, 0, 1, Mode::Release) };
    assert_eq!(complete(&link, renamed).await.unwrap(), Verdict::Stale);
    let mut connection = server.connection().await;
    assert_eq!(connection.llen::<_, u64>(keys("p").queue(&bot("a"))).await.unwrap(), 2);
    let release = completion(&new, 0, 2, Mode::Release);
    assert_eq!(complete(&link, release).await.unwrap(), Verdict::Ok);
}

#[tokio::test]
async fn a_subscriber_of_the_wake_channel_hears_that_a_bot_is_ready() {
    let server = RedisServer::start(Options::default());
    let (link, keys) = (link(&server), keys("p"));
    let (mut subscriber, _) = link.subscriber().await.unwrap();
    subscriber.subscribe(keys.wake()).await.unwrap();
    push(&link, &["1"]).await.unwrap();
    let heard = subscriber.on_message().next().await.unwrap();
    let payload: String = heard.get_payload().unwrap();
    let low = link.call(&Claim { max: 0, ..claim_all(&keys) }).await.unwrap().low.unwrap();
    assert_eq!(payload, format!("ready {low}"));
}

#[tokio::test]
async fn a_note_without_a_lag_keeps_the_one_that_was_known_last() {
    let server = RedisServer::start(Options::default());
    let mut connection = server.connection().await;
    let key = "fl:{events}:read";
    let mut seen = Vec::new();
    for (seq, lag) in [(1, None), (2, Some(7)), (3, None), (4, Some(0))] {
        let note = Note { key, offset: Offset { ms: 1, seq }, entries: seq, lag };
        link(&server).call(&note).await.unwrap();
        let noted: BTreeMap<String, String> = connection.hgetall(key).await.unwrap();
        assert_eq!(noted["offset"], format!("1-{seq}"));
        seen.push(noted.get("lag").cloned());
    }
    assert_eq!(seen, [None, Some("7".to_owned()), Some("7".to_owned()), Some("0".to_owned())]);
}
