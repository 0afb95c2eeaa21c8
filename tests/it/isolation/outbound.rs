//! Calls to servers of others: one bot calls names that do not resolve, paths that fail and servers
//! that never answer. Another bot's calls arrive as if it were alone.

use std::time::{Duration, Instant};

use fairlane::id::BotId;
use fairlane::notifications::record::{NewNotification, NotificationId, State};
use fairlane::outbound::{
    Answer, CheckedUrl, HeaderMap, Method, Outbound, OutboundError, Policy, Request, Settings,
};
use futures_util::future::join_all;
use tokio::task::JoinSet;

use crate::support::instance::Instance;
use crate::support::name_server::NameServer;
use crate::support::notification_rig::{LONG, Rig, accept, bot, ends, kept, to};
use crate::support::receiver::{Receiver, Reply};
use crate::support::wait::eventually;

/// A quiet bot waits less than this. Before the limits per bot it waited 10 s and more.
const SOON: Duration = Duration::from_secs(5);

fn of(name: &str, url: impl Into<String>) -> NewNotification {
    NewNotification { bot: bot(name), ..to(url) }
}

async fn accept_all(at: &Instance, urls: impl Iterator<Item = String>) -> Vec<NotificationId> {
    let all: Vec<NewNotification> = urls.map(|url| of("hostile", url)).collect();
    join_all(all.iter().map(|new| accept(at, new))).await
}

/// Ten notifications of a quiet bot, one after the other, are each sent soon.
async fn quiet_is_served(at: &Instance, url: &str) {
    for _ in 0..10 {
        let started = Instant::now();
        let id = accept(at, &of("quiet", url)).await;
        ends(at, id, State::Sent).await;
        let took = started.elapsed();
        assert!(took < SOON, "{took:?}");
    }
}

#[tokio::test]
async fn names_that_do_not_resolve_delay_no_other_bot() {
    let names = NameServer::start().await;
    let rig = Rig::new(&[("callbacks.name_servers", &names.setting())]);
    let (instance, receiver) = (rig.start().await, Receiver::content().await);
    let port = receiver.address.port();
    // 32 concurrent look-ups of 3 s each would take these half a minute.
    let silent = (0..300).map(|number| format!("http://host-{number}.silent:{port}/"));
    let hostile = accept_all(&instance, silent).await;
    eventually(LONG, "they are looked up", async || names.asked().len() > 32).await;
    // Those without a place at the resolver wait, and no attempt is counted before they have one.
    eventually(LONG, "some wait for a place", async || {
        let all = join_all(hostile.iter().map(|id| kept(&instance, *id))).await;
        let asked = names.asked();
        let hosts = (0..).map(|number| format!("host-{number}.silent"));
        let mut waiting = all.iter().zip(hosts).filter(|(_, name)| !asked.contains(name));
        for (kept, _) in waiting.clone().filter(|(kept, _)| kept.state != State::Sending) {
            assert_eq!((kept.attempts, kept.ended_ms), (0, None), "{kept:?}");
        }
        waiting.any(|(kept, _)| kept.reason.contains("the maximum of concurrent name look-ups"))
    })
    .await;
    quiet_is_served(&instance, &format!("http://hook.quick:{port}/")).await;
    assert_eq!(receiver.called(), 10);
}

#[tokio::test]
async fn names_that_are_slowly_denied_delay_no_other_bot() {
    let names = NameServer::start().await;
    let rig = Rig::new(&[("callbacks.name_servers", &names.setting())]);
    let (instance, receiver) = (rig.start().await, Receiver::content().await);
    let port = receiver.address.port();
    let slow = (0..1_000).map(|number| format!("http://host-{number}.slow:{port}/"));
    accept_all(&instance, slow).await;
    eventually(LONG, "they are looked up", async || names.asked().len() > 32).await;
    quiet_is_served(&instance, &format!("http://hook.quick:{port}/")).await;
}

async fn get(outbound: &Outbound, bot: &BotId, url: &CheckedUrl) -> Result<Answer, OutboundError> {
    let deadline = tokio::time::Instant::now() + LONG;
    let (method, headers, body) = (Method::GET, HeaderMap::new(), Vec::new());
    outbound
        .call(Request {
            bot,
            method,
            url,
            headers,
            body,
            deadline,
            place_by: deadline,
            keep_connection: false,
            tell_deadline: false,
        })
        .await
}

#[tokio::test]
async fn each_bot_has_places_at_the_resolver_and_operators_have_their_own() {
    let (names, receiver) = (NameServer::start().await, Receiver::content().await);
    let settings = Settings {
        name_servers: [names.address].into(),
        allow_nets: ["127.0.0.1/32".parse().unwrap()].into(),
        // A look-up of a silent name lasts as long.
        connect_timeout: Duration::from_secs(30),
        ..Settings::default()
    };
    let outbound = Outbound::new(&settings).unwrap();
    let port = receiver.address.port();
    let tenants = |name: &str| {
        CheckedUrl::parse(&format!("http://{name}:{port}/"), outbound.tenants()).unwrap()
    };
    let mut silent = JoinSet::new();
    let mut look_up = |name: &str, number: usize| {
        let (outbound, url) = (outbound.clone(), tenants(&format!("host-{number}.silent")));
        let bot = bot(name);
        silent.spawn(async move { get(&outbound, &bot, &url).await });
    };
    (0..100).for_each(|number| look_up("hostile", number));
    eventually(LONG, "its names are looked up", async || names.asked().len() >= 64).await;
    let busy = get(&outbound, &bot("hostile"), &tenants("other.silent")).await.unwrap_err();
    assert!(matches!(busy, OutboundError::Lookups { .. }) && busy.is_unreached(), "{busy}");
    for _ in 0..3 {
        let answer = get(&outbound, &bot("quiet"), &tenants("hook.quick")).await;
        assert_eq!(answer.unwrap().status, 200);
    }
    // As many bots as there are places take all of them.
    let mut bots = 0;
    eventually(LONG, "all places are taken", async || {
        look_up(&format!("bot-{bots}"), 100 + bots);
        bots += 1;
        let busy = get(&outbound, &bot("late"), &tenants("late.quick")).await;
        matches!(busy, Err(OutboundError::Lookups { .. }))
    })
    .await;
    let operators = CheckedUrl::parse(&format!("http://hook.quick:{port}/"), &Policy::Operator);
    let answer = get(&outbound, &bot("quiet"), &operators.unwrap()).await;
    assert_eq!(answer.unwrap().status, 200);
    silent.abort_all();
    while silent.join_next().await.is_some() {}
    // A look-up that was cancelled holds no place.
    assert_eq!(get(&outbound, &bot("late"), &tenants("late.quick")).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_name_is_looked_up_again_only_after_its_time() {
    let (names, receiver) = (NameServer::start().await, Receiver::content().await);
    let settings = Settings { name_servers: [names.address].into(), ..Settings::default() };
    let outbound = Outbound::new(&settings).unwrap();
    let port = receiver.address.port();
    let url = |name: &str| {
        CheckedUrl::parse(&format!("http://{name}:{port}/"), &Policy::Operator).unwrap()
    };
    for _ in 0..20 {
        let denied = get(&outbound, &bot("b"), &url("hook.gone")).await.unwrap_err();
        assert!(denied.is_unreached() && denied.to_string().contains("no such name"), "{denied}");
    }
    assert!(names.asked().len() <= 4, "an address and one of IPv6: {:?}", names.asked());
    // This machine is not asked for.
    let answer = get(&outbound, &bot("b"), &url("localhost")).await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(!names.asked().iter().any(|name| name.contains("localhost")));
}

/// A tenant decides how many addresses its name has.
#[tokio::test]
async fn of_a_name_with_many_addresses_16_are_used_and_kept() {
    let (names, receiver) = (NameServer::start().await, Receiver::content().await);
    let settings = Settings {
        name_servers: [names.address].into(),
        allow_nets: ["127.0.0.1/32".parse().unwrap()].into(),
        ..Settings::default()
    };
    let outbound = Outbound::new(&settings).unwrap();
    let url = format!("http://hook.many:{}/", receiver.address.port());
    let url = CheckedUrl::parse(&url, outbound.tenants()).unwrap();
    for _ in 0..5 {
        // Those behind the 16th would be refused.
        assert_eq!(get(&outbound, &bot("b"), &url).await.unwrap().status, 200);
    }
    let asked = names.asked();
    assert!((1..=2).contains(&asked.len()), "an address and one of IPv6: {asked:?}");
}

#[tokio::test]
async fn a_failing_path_of_a_shared_host_delays_no_other_bot() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let shared = Receiver::start(async |call| {
        Reply::new(if call.line.contains("/broken") { 500 } else { 200 }, "")
    })
    .await;
    let broken = format!("http://{}/broken", shared.address);
    accept_all(&instance, (0..50).map(|_| broken.clone())).await;
    eventually(LONG, "it fails often enough", async || shared.called() >= 5).await;
    quiet_is_served(&instance, &shared.url()).await;
    // Several bots of the tenant open the breaker of the host. It lets those pass that do not fail.
    for name in ["first", "second", "third", "fourth"] {
        for _ in 0..5 {
            accept(&instance, &of(name, &*broken)).await;
        }
    }
    let failed = async || shared.calls().iter().filter(|call| call.line.contains("broken")).count();
    eventually(LONG, "they fail too", async || failed().await >= 12).await;
    quiet_is_served(&instance, &shared.url()).await;
    let page = instance.client().get("/notifications").await;
    let shown = String::from_utf8(page.body).unwrap();
    assert!(!shown.contains("hostile"), "no bot is named");
}

#[tokio::test]
async fn servers_that_never_answer_delay_no_other_bot() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let tarpit = || Receiver::start(async |_| std::future::pending::<Reply>().await);
    let tarpits = join_all((0..75).map(|_| tarpit())).await;
    let urls = tarpits.iter().flat_map(|tarpit| std::iter::repeat_n(tarpit.url(), 16));
    accept_all(&instance, urls).await;
    let held = || tarpits.iter().map(Receiver::now).sum::<usize>();
    eventually(LONG, "it holds all places that it can get", async || held() >= 500).await;
    quiet_is_served(&instance, &receiver.url()).await;
}

#[tokio::test]
async fn requests_that_a_shared_host_does_not_answer_delay_no_other_bot() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let shared = Receiver::start(async |call| {
        if call.line.contains("/tarpit") {
            std::future::pending::<()>().await;
        }
        Reply::new(200, "")
    })
    .await;
    let tarpit = format!("http://{}/tarpit", shared.address);
    accept_all(&instance, (0..200).map(|_| tarpit.clone())).await;
    eventually(LONG, "it holds its places", async || shared.now() == 16).await;
    quiet_is_served(&instance, &shared.url()).await;
}

/// Each look costs Redis about as much as an event.
#[tokio::test]
async fn notifications_that_wait_for_a_slow_host_are_rarely_looked_at() {
    const WAITING: usize = 600;
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let tarpit = Receiver::start(async |_| std::future::pending::<Reply>().await).await;
    let url = tarpit.url();
    let hostile = accept_all(&instance, (0..WAITING).map(|_| url.clone())).await;
    eventually(LONG, "it holds its places", async || tarpit.now() == 16).await;
    let next_looks = async || {
        let all = join_all(hostile.iter().map(|id| kept(&instance, *id))).await;
        all.iter().map(|kept| kept.next_ms).collect::<Vec<_>>()
    };
    tokio::time::sleep(Duration::from_secs(4)).await;
    let before = next_looks().await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let after = next_looks().await;
    let looked_at = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    // Without turns, each would return within two seconds as long as no place is free.
    assert!(looked_at < WAITING / 2, "{looked_at} of {WAITING} in 4 s");
}

#[tokio::test]
async fn a_bot_that_uses_up_the_rate_of_a_host_delays_no_other_bot() {
    let rig = Rig::new(&[("notifications.host_rate", "20")]);
    let instance = rig.start().await;
    let shared = Receiver::content().await;
    let hostile = format!("http://{}/hostile", shared.address);
    accept_all(&instance, (0..1_000).map(|_| hostile.clone())).await;
    eventually(LONG, "it uses the rate", async || shared.called() > 10).await;
    quiet_is_served(&instance, &shared.url()).await;
}
