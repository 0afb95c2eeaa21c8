//! What a fault in one place may hold up, and for how long; and what may never happen meanwhile.

use std::time::{Duration, Instant};

use fairlane::app::Roles;
use fairlane::event::Event;
use fairlane::handler::Outcomes;
use fairlane::id::BotId;
use fairlane::queue::{CLAIM_TTL, PushOptions};
use tokio::sync::watch;

use crate::support::config::config;
use crate::support::http::{get, metric};
use crate::support::instance::{Instance, queue};
use crate::support::proxy::{Proxy, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::trap::Deed;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const WORK: Roles = Roles { ingest: false, work: true, http: false, schedule: false };

/// A slow machine may need more than one try: a lease that ran out meanwhile shows nothing.
const TRIES: usize = 10;

#[tokio::test]
async fn after_a_redis_restart_no_handler_starts_under_a_lease_that_was_revoked() {
    // The answer to the claim, and the events themselves, reach the process when Redis has
    // restarted and another process has the bot.
    for needle in ["}:weight", "}:q:"] {
        let mut shown = false;
        for _ in 0..TRIES {
            shown = old_events_arrive_late(needle).await;
            if shown {
                break;
            }
        }
        assert!(shown, "{needle}: the machine was too slow in every one of {TRIES} tries");
    }
}

/// Whether the late process still believed in its lease when the events came.
async fn old_events_arrive_late(needle: &'static str) -> bool {
    let options = Options { tcp: true, persistence: Persistence::Always, ..Options::default() };
    let mut server = RedisServer::start(options);
    let proxy = Proxy::start(server.tcp_addr()).await;
    let name = "late-start";
    let settings = [("pipelines.late-start.workers.max", "1"), ("redis.shards", "1")];
    let direct = config(&server, name, &settings);
    let (late_log, log) = (Log::default(), Log::default());
    let through_proxy = direct.replace(&server.url(), &proxy.url());
    let trap = proxy.trap(holds([needle, "{late-start:"]), 1, Deed::HoldReply);
    let queued = queue(&direct, name).await;
    let bot = BotId::parse("b").unwrap();
    let event = Event::builder("test", &bot).build().unwrap();
    queued.push(&bot, &[event], PushOptions::default()).await.unwrap();
    let started = Instant::now();
    let late = Instance::start_as(WORK, &through_proxy, late_log.content()).await;
    let lost = async |instance: &Instance| {
        let text = get(&instance.address.to_string(), "/metrics").await.1;
        metric(&text, "fairlane_leases_lost_total", &[("pipeline", name)]).unwrap_or_default()
    };
    let lost_before = lost(&late).await;
    assert!(trap.springs(LONG).await, "{needle}: the reply is held");

    server.restart();
    let (done, may_end) = watch::channel(false);
    let holding = log.handler(move |_| {
        let mut may_end = may_end.clone();
        async move {
            let _ = may_end.wait_for(|done| *done).await;
            Ok(Outcomes::done())
        }
    });
    let other = Instance::start_as(WORK, &direct, holding).await;
    eventually(LONG, "another process has the bot", async || log.len() == 1).await;
    let in_time = started.elapsed() < CLAIM_TTL.mul_f64(0.8);
    trap.release();
    eventually(LONG, "the late process has dealt with it", async || {
        late_log.len() > 0 || lost(&late).await > lost_before || started.elapsed() > 2 * CLAIM_TTL
    })
    .await;
    assert_eq!(late_log.len(), 0, "{needle}: started below the fence of {:?}", log.all());
    done.send_replace(true);
    eventually(LONG, "it is done", async || {
        queued.next_events(&bot, 1).await.is_ok_and(|events| events.is_empty())
    })
    .await;
    assert_eq!((late_log.len(), log.len()), (0, 1), "once");
    late.stop().await;
    other.stop().await;
    in_time
}
