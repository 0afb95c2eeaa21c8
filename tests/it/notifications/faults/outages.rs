//! Notifications while Redis is restarted, full, killed or frozen.

use std::time::{Duration, Instant};

use fairlane::notifications::record::{NewNotification, State};
use futures_util::future::join_all;

use super::{LASTING, later};
use crate::support::notification_rig::{LONG, Rig, accept, ends, kept};
use crate::support::receiver::{Receiver, Reply};
use crate::support::wait::eventually;

#[tokio::test]
async fn redis_restarts_in_mid_send_and_nothing_is_lost() {
    let mut rig = Rig::on(LASTING, &[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let url = receiver.url();
    let news: Vec<NewNotification> = (0..400)
        .map(|number| later(number, &url, Duration::from_millis(500 + 5 * number as u64)))
        .collect();
    let ids = join_all(news.iter().map(|new| accept(&instance, new))).await;
    eventually(LONG, "some are sent", async || receiver.called() > 50).await;
    rig.redis.kill9();
    rig.redis.restart();
    let find = async |id| instance.notifications().find(id).await;
    eventually(LONG, "Redis answers again", async || find(ids[0]).await.is_ok()).await;
    for id in ids {
        let ended = ends(&instance, id, State::Sent).await;
        assert!(ended.attempts <= 2, "{ended:?}");
    }
    instance.stop().await;
}

/// Sets `maxmemory`. Zero means no limit.
async fn set_max_memory(rig: &Rig, bytes: u64) {
    let mut connection = rig.redis.connection().await;
    let mut command = redis::cmd("CONFIG");
    command.arg("SET").arg("maxmemory").arg(bytes);
    command.exec_async(&mut connection).await.unwrap();
}

#[tokio::test]
async fn a_full_redis_sends_due_notifications_once_and_accepts_no_more() {
    let rig = Rig::on(LASTING, &[("notifications.online_threshold", "\"0s\"")]);
    let instance = rig.start().await;
    let receiver = Receiver::start(async |call| {
        Reply::new(200, if call.line.contains("/recheck") { "ok" } else { "" })
    })
    .await;
    let failing = Receiver::start(async |call| match call.number {
        0 => Reply::new(503, "busy"),
        _ => Reply::new(410, "gone"),
    })
    .await;
    let recheck = format!("http://{}/recheck", receiver.address);
    let news: Vec<NewNotification> = (0..40)
        .map(|n| NewNotification {
            uid: format!("user-{}", n % 37),
            recheck: recheck.clone(),
            ..later(n, &receiver.url(), Duration::from_millis(1_500 + 20 * n as u64))
        })
        .collect();
    let ids = join_all(news.iter().map(|new| accept(&instance, new))).await;
    let failed = accept(&instance, &later(0, &failing.url(), Duration::from_millis(1_500))).await;
    let waits = NewNotification {
        waits: true,
        uid: "user".to_owned(),
        ..later(1, &receiver.url(), Duration::ZERO)
    };
    let waits = accept(&instance, &waits).await;
    let cancelled = accept(&instance, &later(2, &receiver.url(), LONG)).await;
    set_max_memory(&rig, 1).await;
    let path = format!("/send_delayed?delay=0&url={}", receiver.url());
    assert_eq!(instance.client().get(&path).await.code, 503);
    assert_eq!(receiver.called(), 0, "none was due before");

    let mut sent = 0;
    for id in &ids {
        eventually(LONG, "it ends", async || kept(&instance, *id).await.ended_ms.is_some()).await;
        let ended = kept(&instance, *id).await;
        assert!(ended.attempts <= 1, "{ended:?}");
        sent += usize::from(ended.state == State::Sent);
    }
    assert!(sent >= 37, "{sent}: three users got a second one, which came too soon");
    let ended = ends(&instance, failed, State::Dead).await;
    assert_eq!((ended.attempts, failing.called()), (2, 2), "{ended:?}");
    let bot = &kept(&instance, waits).await.bot;
    assert_eq!(instance.notifications().online(bot, "user").await.unwrap(), 1);
    assert_eq!(ends(&instance, waits, State::Sent).await.attempts, 1);
    let cancelling = format!("/v1/notifications/{cancelled}");
    assert_eq!(instance.client().send("DELETE", &cancelling, &[], b"").await.code, 204);
    let hooks = receiver.calls().iter().filter(|call| call.line.contains("/hook")).count();
    assert_eq!(hooks, sent + 1, "each once");
    assert_eq!(instance.client().get(&path).await.code, 503, "it is still full");
    set_max_memory(&rig, 0).await;
    assert_eq!(instance.client().get(&path).await.code, 200);
    instance.stop().await;
}

/// The way in which Redis is unavailable.
#[derive(Debug, Clone, Copy)]
enum Outage {
    Killed,
    Frozen,
}

/// Makes Redis unavailable for `away`, from the calls of some notifications on. Meanwhile the
/// target answers 200 to the first process. A second process runs beside it, and each notification
/// is called once.
async fn once_across(outage: Outage, away: Duration) {
    let mut rig = Rig::on(LASTING, &[]);
    let (first, second) = (rig.start().await, rig.start().await);
    let (gate, receiver) = crate::support::notification_rig::gated().await;
    let news: Vec<NewNotification> =
        (0..12).map(|n| later(n, &receiver.url(), Duration::from_millis(200))).collect();
    let ids = join_all(news.iter().map(|new| accept(&first, new))).await;
    eventually(LONG, "all are called", async || receiver.called() == 12).await;
    match outage {
        Outage::Killed => rig.redis.kill9(),
        Outage::Frozen => rig.redis.sigstop(),
    }
    let since = Instant::now();
    gate.close();
    eventually(LONG, "all are answered", async || receiver.now() == 0).await;
    eventually(away, "Redis is unavailable for a while", async || since.elapsed() >= away).await;
    match outage {
        Outage::Killed => rig.redis.restart(),
        Outage::Frozen => rig.redis.sigcont(),
    }
    let find = async |id| second.notifications().find(id).await;
    eventually(LONG, "Redis answers again", async || find(ids[0]).await.is_ok()).await;
    for id in ids {
        let ended = ends(&second, id, State::Sent).await;
        assert_eq!(ended.attempts, 1, "{outage:?}: {ended:?}");
    }
    assert_eq!(receiver.called(), 12, "{outage:?}");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_send_answered_while_redis_restarted_for_eight_seconds_is_not_repeated() {
    once_across(Outage::Killed, Duration::from_secs(8)).await;
}

#[tokio::test]
async fn a_send_answered_while_redis_was_frozen_for_eight_seconds_is_not_repeated() {
    once_across(Outage::Frozen, Duration::from_secs(8)).await;
}

#[tokio::test]
async fn a_send_answered_while_redis_was_unavailable_for_longer_than_a_hold_is_not_repeated() {
    once_across(Outage::Killed, Duration::from_secs(27)).await;
}
