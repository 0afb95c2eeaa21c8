//! Waits until everything that was acknowledged has had its effect.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::time::{Instant, sleep};

use super::load::{Load, PIPELINES};
use super::servers::ask_holder;
use super::verdict;
use super::world::SHARDS;
use crate::error::BenchError;

/// After the last fault, there must be less left within this time. A busy machine needs long for all of it.
const LESS_WITHIN: Duration = Duration::from_secs(60);
/// When there has been no less for this long, an operator looks for bots that are still paused.
const STANDS: Duration = Duration::from_secs(5);
/// Maximum time for all of it.
const DRAINS: Duration = Duration::from_secs(600);
const STREAM: &str = "fairlane:events";
const BUILT_IN: [&str; 3] = ["automations", "counters", "notifications"];
/// What must be so for this long, because a rule may emit a further event.
const QUIET: Duration = Duration::from_millis(2_500);

/// Returns how many dead letters were put back, and what is left if it takes too long.
pub(super) async fn drain(
    load: &Load,
    watch: &impl Fn(&'static str, u64),
) -> Result<(u64, Result<(), String>), BenchError> {
    let mut redriven = 0;
    let until = Instant::now() + DRAINS;
    let (mut least, mut least_since) = (u64::MAX, Instant::now());
    let mut quiet_since: Option<Instant> = None;
    let mut resumed = Instant::now();
    loop {
        redriven += load.redrive().await;
        let left = left(load).await?;
        let count = left.iter().map(|(_, count)| count).sum();
        watch("events left", count);
        if count < least {
            (least, least_since) = (count, Instant::now());
        }
        if left.is_empty() {
            let since = *quiet_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= QUIET {
                return Ok((redriven, Ok(())));
            }
        } else {
            quiet_since = None;
        }
        if !left.is_empty() && least_since.elapsed() >= STANDS && resumed.elapsed() >= STANDS {
            load.resume_all().await;
            resumed = Instant::now();
        }
        let stands = !left.is_empty() && least_since.elapsed() >= LESS_WITHIN;
        if stands || Instant::now() >= until {
            return Ok((redriven, Err(format!("{left:?}"))));
        }
        sleep(Duration::from_millis(250)).await;
    }
}

/// What is queued, leased, not copied, or not counted yet.
async fn left(load: &Load) -> Result<Vec<(String, u64)>, BenchError> {
    let mut primaries = load.world.redis.lock().await.primaries().await;
    let mut left = Vec::new();
    let mut stream = redis::pipe();
    stream.cmd("XINFO").arg("STREAM").arg(STREAM);
    let [last]: [redis::Value; 1] = ask_holder(&mut primaries, &stream).await?;
    let last = last_id(last);
    for pipeline in PIPELINES.iter().map(|(name, ..)| *name).chain(BUILT_IN) {
        for (what, count) in of_pipeline(pipeline, &last, &mut primaries).await? {
            if count > 0 {
                left.push((format!("{pipeline}: {what}"), count));
            }
        }
    }
    let (expected, due) = {
        let acknowledged = load.acknowledged();
        (verdict::totals(&acknowledged), acknowledged.notifications.clone())
    };
    if left.is_empty() {
        for (bot, expected) in expected {
            let ads: Vec<&str> = expected.keys().map(String::as_str).collect();
            let found = load.totals(&bot, &ads).await;
            let missing: u64 = expected
                .iter()
                .map(|(ad, views)| views.saturating_sub(found.get(ad).copied().unwrap_or(0)))
                .sum();
            if missing > 0 {
                left.push((format!("views of {bot}"), missing));
            }
        }
    }
    let called = load.hooks.notified.lock().expect("no task panicked");
    let missing = due.iter().filter(|due| !called.contains_key(&due.id)).count();
    if missing > 0 {
        left.push(("notifications".to_owned(), u64::try_from(missing).unwrap_or(u64::MAX)));
    }
    Ok(left)
}

async fn of_pipeline(
    pipeline: &str,
    last: &str,
    primaries: &mut [MultiplexedConnection],
) -> Result<[(&'static str, u64); 3], BenchError> {
    let (mut depth, mut leased, mut behind) = (0, 0, 0);
    for shard in 0..SHARDS {
        let key = |name: &str| format!("fl:{{{pipeline}:{shard}}}:{name}");
        let mut pipe = redis::pipe();
        pipe.hget(key("meta"), "depth").hlen(key("own")).hget(key("hwm"), STREAM);
        let (queued, owners, copied): (Option<u64>, u64, Option<String>) =
            ask_holder(primaries, &pipe).await?;
        depth += queued.unwrap_or_default();
        leased += owners;
        // Notifications are not copied from the bus.
        behind += u64::from(copied.is_some_and(|copied| copied != last));
    }
    Ok([("queued", depth), ("leased", leased), ("shards behind the bus", behind)])
}

fn last_id(info: redis::Value) -> String {
    let redis::Value::Array(fields) = info else { return String::new() };
    let at = fields.iter().position(|field| text(field) == "last-generated-id");
    at.and_then(|at| fields.get(at + 1)).map(text).unwrap_or_default()
}

fn text(value: &redis::Value) -> String {
    match value {
        redis::Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        redis::Value::SimpleString(text) => text.clone(),
        _ => String::new(),
    }
}
