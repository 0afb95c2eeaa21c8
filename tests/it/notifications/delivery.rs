//! Delayed notifications: sent when due, never early, once for each user, by any running process.

use std::collections::BTreeSet;
use std::time::Duration;

use fairlane::app::Roles;
use fairlane::clock::{Clock as _, SystemClock};
use fairlane::notifications::SIGNED;
use fairlane::notifications::record::{NewNotification, State, When};
use fairlane::notifications::scripts::{Amended, Amendment};
use fairlane::outbound::{HeaderName, HeaderValue};
use futures_util::future::join_all;
use standardwebhooks::Webhook;

use crate::support::instance::Instance;
use crate::support::notification_rig::{
    LONG, Rig, accept, bot, counted, ends, gated, kept, of, stats, to,
};
use crate::support::receiver::{Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::wait::eventually;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEXT: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

#[tokio::test]
async fn a_notification_is_received_rechecked_and_sent_signed_when_it_is_due() {
    let rig = Rig::new(&[("callbacks.secrets", &format!("[{SECRET:?}, {NEXT:?}]"))]);
    let instance = rig.start().await;
    let receiver = Receiver::start(async |call| {
        Reply::new(200, if call.line.contains("/recheck") { "Ok\n" } else { "" })
    })
    .await;
    let new = NewNotification {
        when: When::After(Duration::from_millis(700)),
        method: "POST".to_owned(),
        body: r#"{"text":"ü"}"#.to_owned(),
        recheck: format!("http://{}/recheck", receiver.address),
        ..of("user", receiver.url())
    };
    let before = SystemClock.now();
    let id = accept(&instance, &new).await;
    let scheduled = kept(&instance, id).await;
    assert_eq!((scheduled.state, scheduled.uid.as_str()), (State::Scheduled, "user"));
    assert_eq!(scheduled.next_ms, Some(scheduled.due_ms));
    let ended = ends(&instance, id, State::Sent).await;
    assert_eq!(ended.attempts, 1);
    let calls = receiver.calls();
    let lines: Vec<&str> = calls.iter().map(|call| call.line.as_str()).collect();
    assert_eq!(lines, ["GET /recheck HTTP/1.1", "POST /hook HTTP/1.1"]);
    for call in &calls {
        assert!(call.at >= before + Duration::from_millis(700), "never early");
    }
    assert_eq!(
        calls[0].headers["webhook-id"],
        id.message().as_str(),
        "the recheck is signed alike"
    );
    assert!(calls[0].headers["webhook-signature"].starts_with("v1,"));
    let sent = &calls[1];
    assert_eq!(sent.body, r#"{"text":"ü"}"#.as_bytes());
    assert_eq!(sent.headers["content-type"], "application/json");
    assert_eq!(sent.headers["webhook-id"], id.message().as_str());
    let headers = sent.headers.iter().map(|(name, value)| {
        (name.parse::<HeaderName>().unwrap(), HeaderValue::try_from(value).unwrap())
    });
    let headers = headers.collect();
    // During a rotation of secrets, a receiver may know either of the two.
    for (secret, of, good) in
        [(SECRET, "shop", true), (NEXT, "shop", true), (SECRET, "other", false)]
    {
        let secret = fairlane::outbound::sign::Secret::parse(secret).unwrap();
        let verifier = Webhook::new(&secret.key(SIGNED, &bot(of)).expose()).unwrap();
        assert_eq!(verifier.verify(&sent.body, &headers).is_ok(), good, "{of}");
    }
    assert_eq!(stats(&instance).await, counted(&[("received", 1), ("sent", 1)]));
    instance.stop().await;
}

#[tokio::test]
async fn two_thousand_over_two_seconds_are_all_sent_and_none_early_by_two_processes() {
    let rig = Rig::new(&[]);
    let (first, second) = (rig.start().await, rig.start().await);
    let receiver = Receiver::content().await;
    let news = (0..2_000u64).map(|at| NewNotification {
        bot: bot(&format!("bot-{}", at % 7)),
        when: When::After(Duration::from_millis(500 + at)),
        url: format!("{}?{at}", receiver.url()),
        ..to("")
    });
    let news: Vec<NewNotification> = news.collect();
    let accepted = join_all(news.iter().map(async |new| {
        let earliest = SystemClock.now();
        let When::After(delay) = new.when else { unreachable!() };
        accept(&first, new).await;
        (new.url.clone(), earliest + delay)
    }))
    .await;
    eventually(LONG, "all are sent", async || receiver.called() >= 2_000).await;
    let calls = receiver.calls();
    assert_eq!(calls.len(), 2_000, "each once");
    for (url, due) in accepted {
        let tail = url.rsplit_once('?').unwrap().1;
        let line = format!("GET /hook?{tail} HTTP/1.1");
        let call = calls.iter().find(|call| call.line == line).expect("it is sent");
        assert!(call.at >= due, "{tail} came {:?} early", due.saturating_sub(call.at));
    }
    let all = counted(&[("received", 2_000), ("sent", 2_000)]);
    eventually(LONG, "all are counted", async || stats(&second).await == all).await;
}

#[tokio::test]
async fn fifty_concurrent_notifications_for_one_user_make_exactly_one_request() {
    let rig = Rig::new(&[]);
    let (first, second) = (rig.start().await, rig.start().await);
    let (gate, receiver) = gated().await;
    let new = of("one", receiver.url());
    join_all((0..50).map(|at| accept(if at % 2 == 0 { &first } else { &second }, &new))).await;
    eventually(LONG, "one is being sent", async || receiver.called() > 0).await;
    gate.close();
    let all = counted(&[("received", 50), ("sent", 1), ("throttled", 49)]);
    eventually(LONG, "all have ended", async || stats(&first).await == all).await;
    assert_eq!(receiver.called(), 1);
}

#[tokio::test]
async fn caps_hold_over_processes_and_those_of_a_bot_or_type_over_the_general_ones() {
    let rig = Rig::new(&[
        ("notifications.user_poll_threshold", "\"0s\""),
        ("notifications.caps", "[\"3/day\"]"),
        ("notifications.bot_caps", "[\"big-* = 5/day\", \"free = none\"]"),
        ("notifications.type_caps", "[\"promo = 1/1h\", \"receipt = none\"]"),
    ]);
    let (first, second) = (rig.start().await, rig.start().await);
    let receiver = Receiver::content().await;
    let (mut ids, mut wanted) = (Vec::new(), 0);
    for (whose, kind, sent) in [
        ("shop", "none", 3),
        ("big-7", "none", 5),
        ("free", "none", 12),
        ("tiny", "promo", 1),
        ("till", "receipt", 12),
    ] {
        wanted += sent;
        for at in 0..12 {
            let url = format!("{}/{whose}", receiver.url());
            let new = NewNotification { bot: bot(whose), kind: kind.to_owned(), ..of("ann", url) };
            ids.push(accept(if at % 2 == 0 { &first } else { &second }, &new).await);
        }
    }
    for id in ids {
        eventually(LONG, "it ends", async || kept(&first, id).await.ended_ms.is_some()).await;
    }
    let sums = stats(&first).await;
    assert_eq!((sums["sent"], sums["throttled"]), (wanted, 60 - wanted));
    for (whose, sent) in [("shop", 3), ("big-7", 5), ("free", 12), ("tiny", 1), ("till", 12)] {
        let to = |line: &str| line.contains(&format!("/{whose} "));
        let calls = receiver.calls().iter().filter(|call| to(&call.line)).count();
        assert_eq!(calls, sent, "{whose}");
    }
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_notification_deferred_by_a_cap_arrives_later_and_no_window_holds_more() {
    let rig = Rig::new(&[
        ("notifications.user_poll_threshold", "\"0s\""),
        ("notifications.caps", "[\"2/2s\"]"),
        ("notifications.on_throttle", "\"defer\""),
    ]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let new = of("ann", receiver.url());
    let ids = join_all((0..6).map(|_| accept(&instance, &new))).await;
    for id in ids {
        ends(&instance, id, State::Sent).await;
    }
    let calls = receiver.calls();
    assert_eq!(calls.len(), 6);
    for three in calls.windows(3) {
        let apart = three[2].after(&three[0]);
        assert!(apart >= Duration::from_secs(2), "three within {apart:?}");
    }
    instance.stop().await;
}

#[tokio::test]
async fn a_recheck_may_say_ok_in_two_parts_and_one_that_hangs_is_tried_again() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let parts = Receiver::start(async |_| {
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n";
        Reply::Drip(head.as_bytes().to_vec(), b"1\r\nK\r\n0\r\n\r\n".to_vec())
    })
    .await;
    let hangs = Receiver::start(async |_| std::future::pending().await).await;
    let ask = async |recheck: String| {
        accept(&instance, &NewNotification { recheck, ..to(receiver.url()) }).await
    };
    let (said, hung) = (ask(parts.url()).await, ask(hangs.url()).await);
    ends(&instance, said, State::Sent).await;
    eventually(LONG, "it is put off", async || {
        kept(&instance, hung).await.reason == "no answer within 5 s"
    })
    .await;
    let hung = kept(&instance, hung).await;
    assert_eq!((hung.state, hung.attempts), (State::Scheduled, 1), "{hung:?}");
    assert_eq!(receiver.called(), 1);
}

#[tokio::test]
async fn a_recheck_that_does_not_say_ok_is_final_and_one_that_fails_is_tried_again() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::start(async |call| {
        let status = if call.line.contains("/500") { 500 } else { 200 };
        let body = if call.line.contains("/empty") {
            ""
        } else if call.line.contains("/Error") {
            "Error"
        } else {
            "OK"
        };
        Reply::new(status, body)
    })
    .await;
    let ask = async |path: &str| {
        let recheck = format!("http://{}{path}", receiver.address);
        accept(&instance, &NewNotification { recheck, ..to(receiver.url()) }).await
    };
    for path in ["/empty", "/Error"] {
        let id = ask(path).await;
        let ended = ends(&instance, id, State::Refused).await;
        assert!(ended.reason.starts_with("the recheck: the receiver answered 200"), "{ended:?}");
    }
    let failed = ask("/500").await;
    eventually(LONG, "it is put off", async || {
        let now = kept(&instance, failed).await;
        now.state == State::Scheduled && now.attempts == 1
    })
    .await;
    let kept = kept(&instance, failed).await;
    let pause = kept.next_ms.unwrap() - kept.due_ms;
    assert!((4_000..8_000).contains(&pause), "{pause}");
    assert_eq!(kept.reason, "the recheck: the receiver answered 500: OK");
    ends(&instance, ask("/ok").await, State::Sent).await;
    let sent = receiver.calls().iter().filter(|call| call.line.contains("/hook")).count();
    assert_eq!(sent, 1);
}

#[tokio::test]
async fn a_failed_send_is_tried_again_under_the_same_id_until_it_is_gone() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::start(async |call| match call.number {
        0 => Reply::new(503, "busy").with("retry-after", "1"),
        1 => Reply::new(200, ""),
        _ => Reply::new(410, "gone"),
    })
    .await;
    let id = accept(&instance, &to(receiver.url())).await;
    assert_eq!(ends(&instance, id, State::Sent).await.attempts, 2);
    let calls = receiver.calls();
    assert_eq!(calls[0].headers["webhook-id"], calls[1].headers["webhook-id"]);
    assert!(calls[1].after(&calls[0]) >= Duration::from_secs(4));
    let gone = accept(&instance, &to(receiver.url())).await;
    let ended = ends(&instance, gone, State::Dead).await;
    assert_eq!(ended.reason, "the receiver answered 410: gone");
    let queue = instance.queue("notifications");
    let dead = queue.list_dead_letters(None, &|_| true, None, 10).await.unwrap().letters;
    assert_eq!(dead.len(), 1);
    // After a redrive it is sent anew.
    assert!(queue.redrive(&dead[0].bot, dead[0].id).await.unwrap());
    eventually(LONG, "it is tried once more", async || receiver.called() == 4).await;
    let all = counted(&[("received", 2), ("sent", 1), ("retried", 1), ("dead", 2)]);
    eventually(LONG, "and dead again", async || stats(&instance).await == all).await;
}

#[tokio::test]
async fn no_connection_is_made_to_an_internal_address_and_no_redirect_is_followed() {
    let rig = Rig::new(&[("callbacks.allow_nets", "[\"127.0.0.1\"]")]);
    let instance = rig.start().await;
    let secret =
        Receiver::start_at(([127, 0, 0, 2], 0).into(), async |_| Reply::new(200, "")).await;
    let port = secret.address.port();
    for host in ["127.0.0.2", "0x7f000002", "2130706434", "127.2", "[::ffff:127.0.0.2]"] {
        let id = accept(&instance, &to(format!("http://{host}:{port}/"))).await;
        let ended = ends(&instance, id, State::Dead).await;
        assert!(ended.reason.contains("not public"), "{host}: {ended:?}");
    }
    for url in ["ftp://example.com/", "http://user@127.0.0.1/", "nonsense"] {
        ends(&instance, accept(&instance, &to(url)).await, State::Dead).await;
    }
    let elsewhere = format!("http://127.0.0.2:{port}/");
    let redirecting = Receiver::start(move |_| {
        let elsewhere = elsewhere.clone();
        async move { Reply::new(302, "").with("location", &elsewhere) }
    })
    .await;
    let id = accept(&instance, &to(redirecting.url())).await;
    eventually(LONG, "it is put off", async || {
        kept(&instance, id).await.reason.contains("redirects are not followed")
    })
    .await;
    assert_eq!((secret.connections(), redirecting.called()), (0, 1));
}

#[tokio::test]
async fn destinations_that_hang_or_are_dead_delay_no_other_of_the_same_bot() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let quick = Receiver::content().await;
    let mut hanging = Vec::new();
    for _ in 0..3 {
        hanging.push(Receiver::start(async |_| std::future::pending().await).await);
    }
    // No server listens on this port.
    let dead = format!("http://127.0.0.1:{}/", crate::support::redis::free_port());
    let blocked = hanging.iter().map(Receiver::url).chain([dead.clone()]);
    let blocked: Vec<NewNotification> =
        blocked.flat_map(|url| (0..500).map(move |_| to(url.clone()))).collect();
    join_all(blocked.iter().map(|new| accept(&instance, new))).await;
    let begun = SystemClock.now();
    let others: Vec<NewNotification> = (0..100u64)
        .map(|at| NewNotification {
            when: When::After(Duration::from_millis(20 * at)),
            ..to(quick.url())
        })
        .collect();
    let ids = join_all(others.iter().map(|new| accept(&instance, new))).await;
    eventually(LONG, "the others are sent", async || quick.called() == 100).await;
    let last = quick.calls().iter().map(|call| call.at).max().unwrap();
    // Timeouts are 15 s, so a send that waited for one would be later than this.
    let took = last.saturating_sub(begun);
    assert!(took < Duration::from_secs(10), "{took:?}");
    for id in ids {
        ends(&instance, id, State::Sent).await;
    }
    for hanging in &hanging {
        assert!(hanging.max_concurrent() <= 16, "{}", hanging.max_concurrent());
    }
    let sums = stats(&instance).await;
    assert_eq!((sums["received"], sums["sent"]), (2_100, 100));
    assert!(!sums.contains_key("dead"), "{sums:?}");
    assert!(sums["retried"] < 200, "the breaker spares the dead one: {sums:?}");
}

#[tokio::test]
async fn one_that_waits_for_its_user_is_sent_when_the_user_is_online() {
    let rig = Rig::new(&[("notifications.online_threshold", "\"1s\"")]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let waits = NewNotification { waits: true, ..of("user", receiver.url()) };
    let (first, second) = (accept(&instance, &waits).await, accept(&instance, &waits).await);
    assert_eq!(kept(&instance, first).await.state, State::Waiting);
    let online = async || instance.notifications().online(&bot("shop"), "user").await.unwrap();
    assert_eq!((online().await, online().await), (1, 0));
    eventually(LONG, "the first one is sent", async || receiver.called() == 1).await;
    eventually(LONG, "another call releases the next", async || online().await == 1).await;
    for id in [first, second] {
        ends(&instance, id, State::Sent).await;
    }
    assert_eq!(online().await, 0);
}

#[tokio::test]
async fn a_purge_of_notifications_is_refused_and_takes_none() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let later = When::After(Duration::from_millis(500));
    let id = accept(&instance, &NewNotification { when: later, ..to(receiver.url()) }).await;
    let path = "/v1/pipelines/notifications/bots/shop/queue";
    let answer = instance.client().send("DELETE", path, &[], b"").await;
    assert_eq!((answer.code, answer.problem().as_str()), (409, "keeps-notifications"));
    ends(&instance, id, State::Sent).await;
}

#[tokio::test]
async fn one_that_is_cancelled_or_moved_is_not_sent_then() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let soon = NewNotification { when: When::After(Duration::from_secs(3)), ..to(receiver.url()) };
    let (cancelled, moved) = (accept(&instance, &soon).await, accept(&instance, &soon).await);
    let now = kept(&instance, cancelled).await;
    let amend = instance.notifications().amend(&now, Amendment::Cancel).await.unwrap();
    assert_eq!(amend, Amended::Done);
    let far = Amendment::Move(When::After(Duration::from_secs(3_600)));
    let now = kept(&instance, moved).await;
    assert_eq!(instance.notifications().amend(&now, far).await.unwrap(), Amended::Done);
    // When it is sent, the other one would have been, too.
    let soon = Amendment::Move(When::After(Duration::from_millis(3_500)));
    let last = accept(&instance, &to(receiver.url())).await;
    ends(&instance, last, State::Sent).await;
    assert_eq!(instance.notifications().amend(&now, soon).await.unwrap(), Amended::Done);
    ends(&instance, moved, State::Sent).await;
    assert_eq!(receiver.called(), 2);
    let now = kept(&instance, cancelled).await;
    assert_eq!(now.state, State::Cancelled);
    let refused = instance.notifications().amend(&now, Amendment::Cancel).await.unwrap();
    assert_eq!(refused, Amended::Not(State::Cancelled));
}

#[tokio::test]
async fn a_notification_of_a_process_that_was_cut_off_is_sent_by_another_process() {
    let rig = Rig::new(&[]);
    let lost = Instance::start_as(Roles::ALL, &rig.config, Log::default().content()).await;
    let (gate, receiver) = gated().await;
    let news: Vec<NewNotification> =
        (0..16).map(|at| of(&format!("user-{at}"), receiver.url())).collect();
    let ids = join_all(news.iter().map(|new| accept(&lost, new))).await;
    eventually(LONG, "all are being sent", async || receiver.called() == 16).await;
    drop(lost);
    gate.close();
    let other = rig.start().await;
    for id in ids {
        assert_eq!(ends(&other, id, State::Sent).await.attempts, 2);
    }
    let calls = receiver.calls();
    let names: BTreeSet<&String> = calls.iter().map(|call| &call.headers["webhook-id"]).collect();
    assert_eq!((calls.len(), names.len()), (32, 16), "again, and by the same ids");
}
