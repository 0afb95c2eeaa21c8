//! The rate of a bot whose keys are handled one after the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::handler::Outcomes;
use fairlane::id::BotId;

use super::super::rate::assert_within;
use super::{LONG, event};
use crate::support::bus::add;
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

/// The first slice takes the tokens of 8 keys, and its first key takes as long as the bucket needs to fill again.
#[tokio::test]
async fn keys_that_start_long_after_their_tokens_were_granted_do_not_exceed_the_rate() {
    let server = RedisServer::start(Options::default());
    let (log, is_slow) = (Log::default(), AtomicBool::new(true));
    let handler = log.handler(move |_| {
        let is_slow = is_slow.swap(false, Ordering::Relaxed);
        async move {
            if is_slow {
                tokio::time::sleep(Duration::from_millis(3_800)).await;
            }
            Ok(Outcomes::done())
        }
    });
    let settings = [
        ("pipelines.paced.order_by", "\"subject\""),
        ("pipelines.paced.rate", "\"2/s\""),
        ("pipelines.paced.burst", "8"),
    ];
    let instance = Instance::start(&config(&server, "paced", &settings), handler).await;
    let (queue, shop) = (instance.queue("paced").clone(), BotId::parse("shop").unwrap());
    let depth = async || queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth;
    queue.pause(Some(&shop)).await.unwrap();
    let events: Vec<String> = (0..14).map(|id| event("shop", &format!("user-{id}"), id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || depth().await == 14).await;
    queue.resume(Some(&shop)).await.unwrap();
    eventually(LONG, "all are handled", async || depth().await == 0).await;
    let mut times: Vec<u64> = log.all().into_iter().map(|seen| micros(seen.at)).collect();
    assert_eq!(times.len(), 14, "{times:?}");
    assert_within(&mut times, 2.0, 8.0);
    instance.stop().await;
}
