//! What is there before a phase: of the quiet bots before both, of the hostile ones before the
//! second.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::attack::{Target, event};
use super::client::{Client, with_body};
use super::deployment::{Deployment, EVENTS, FAILING, HOSTILE, PATIENCE, QUIET, until};
use super::figures::Phase;
use super::quiet::{BOTS, bot};
use super::resource::Resource;
use crate::error::BenchError;

/// Events of the hostile backlog, at most, and for each second of a phase.
const BACKLOG: u64 = 100_000;
const BACKLOG_PER_SECOND: u64 = 20_000;
/// Events that a slice of it has, at most.
const BATCH: u64 = 100;
/// Bots of the hostile tenant whose leases are never completed. A pipeline hands 10,000 over to all bots
/// together, so more of them would take the places of the quiet ones; the documentation says so.
const LEASES: u64 = 8_000;
/// Large dead letters.
const LARGE_LETTERS: u64 = 24;
/// Dead letters of the quiet bots.
const QUIET_LETTERS: u64 = 20;
/// Heavy rules of the hostile bot.
const RULES: u64 = 50;
/// Ads of the hostile bot, and those in one request.
const ADS: u64 = 1_000;
const ADS_PER_REQUEST: u64 = 250;
/// The day of the imported views.
pub(super) const DAY: &str = "2026-11-01";
/// A filter near the bound of steps for a list of this length.
const HEAVY: &str = "event.data.list.exists(x, event.data.list.exists(y, x + y == -1))";
const HEAVY_LIST: u64 = 50;

/// Before the quiet bots are measured alone.
pub(super) async fn of_quiet(
    deployment: &Deployment<'_>,
    resource: Resource,
) -> Result<(), BenchError> {
    match resource {
        Resource::DeadLetters => {
            let target = Target::new(deployment);
            let letter = |n| event(&bot(n), "failing.quiet", n, 10);
            target.add((0..QUIET_LETTERS).map(letter)).await?;
            let are_dead = async || quiet_letters(deployment).await == QUIET_LETTERS;
            settled(until(are_dead).await, "the quiet bots' dead letters")
        }
        Resource::Rules => {
            let url = format!("http://{}/event", deployment.receiver.address);
            let rule = json!({ "on": ["ruled"], "actions": [{ "push": { "url": url } }] });
            for n in 0..BOTS {
                put_rule(deployment, &bot(n), "tell", &rule, QUIET).await?;
            }
            Ok(())
        }
        Resource::Exports => {
            let import = "{\"ad\":\"ad-1\",\"total\":7}\n{\"ad\":\"ad-2\",\"total\":8}\n";
            for n in 0..BOTS {
                import_ads(deployment, &bot(n), import, 0, QUIET).await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Before they are measured beside the hostile ones, `lasts` is for how long.
pub(super) async fn of_hostile(
    deployment: &Deployment<'_>,
    resource: Resource,
    lasts: Duration,
) -> Result<(), BenchError> {
    let target = Target::new(deployment);
    let behaviour = &deployment.receiver.behaviour;
    match resource {
        Resource::Queue => {
            let backlog = BACKLOG.min(BACKLOG_PER_SECOND * lasts.as_secs());
            // Its slices take so long that it lasts longer than the phase.
            let lasts = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX) + 10_000;
            behaviour.hold_ms.store(lasts / (backlog / BATCH), Ordering::Relaxed);
            target.add((0..backlog).map(|n| event("hostile", "bench.backlog", n, 20))).await?;
            let is_queued = async || depth(deployment, EVENTS).await >= backlog * 8 / 10;
            settled(until(is_queued).await, "the hostile backlog")
        }
        Resource::Leases => {
            behaviour.status.store(202, Ordering::Relaxed);
            let of_bot = |n| event(&format!("hostile-{n}"), "bench.lease", n, 20);
            target.add((0..LEASES).map(of_bot)).await?;
            stagnates(|| behaviour.hostile.load(Ordering::Relaxed)).await;
            Ok(())
        }
        Resource::Listings => {
            for n in 0..LARGE_LETTERS {
                target.publish(&[event("hostile", "failing.large", n, 1_000_000)]).await;
            }
            let is_drained = async || {
                behaviour.hostile.load(Ordering::Relaxed) > 0
                    && depth(deployment, FAILING).await == 0
            };
            settled(until(is_drained).await, "the hostile dead letters")
        }
        Resource::RedisMemory => {
            let before = deployment.redis_bytes().await?;
            join_all((0..8).map(|_| async {
                let mut refused = 0;
                for _ in 0..400 {
                    refused += u32::from(target.hoard().await != 200);
                    if refused > 5 {
                        break;
                    }
                }
            }))
            .await;
            if deployment.redis_bytes().await? > before {
                return Ok(());
            }
            settled(false, "the hostile notifications")
        }
        Resource::Rules => {
            let rule = json!({ "on": ["heavy"], "filter": HEAVY, "actions": [{ "set_tag": { "tag": "t" } }] });
            for n in 0..RULES {
                put_rule(deployment, "hostile", &format!("heavy-{n}"), &rule, HOSTILE).await?;
            }
            Ok(())
        }
        Resource::Exports => {
            for part in 0..ADS / ADS_PER_REQUEST {
                let ads = part * ADS_PER_REQUEST..(part + 1) * ADS_PER_REQUEST;
                let line = |ad| {
                    format!(
                        "{}\n",
                        json!({ "ad": format!("ad-{ad}"), "total": 7, "days": { DAY: 7 } })
                    )
                };
                let lines = ads.map(line);
                import_ads(deployment, "hostile", &lines.collect::<String>(), part, HOSTILE)
                    .await?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// After a phase: dead letters of the quiet bots that are there no more.
pub(super) async fn removed(deployment: &Deployment<'_>, resource: Resource, phase: &mut Phase) {
    if resource == Resource::DeadLetters {
        phase.lost += QUIET_LETTERS.saturating_sub(quiet_letters(deployment).await);
    }
}

/// An event on which the heavy filter works for long.
pub(super) fn heavy_event() -> String {
    let list: Vec<u64> = (0..HEAVY_LIST).collect();
    json!({ "specversion": "1.0", "id": "1", "source": "bench", "type": "heavy",
        "botid": "hostile", "subject": "ann", "data": { "list": list } })
    .to_string()
}

async fn put_rule(
    deployment: &Deployment<'_>,
    bot: &str,
    rule: &str,
    body: &Value,
    token: &str,
) -> Result<(), BenchError> {
    let path = format!("/v1/bots/{bot}/automations/{rule}");
    let sent = with_body(
        "PUT",
        &path,
        deployment.http,
        Some(token),
        "application/json",
        body.to_string().as_bytes(),
    );
    accepted(deployment, &sent, &[200, 201]).await
}

async fn import_ads(
    deployment: &Deployment<'_>,
    bot: &str,
    lines: &str,
    part: u64,
    token: &str,
) -> Result<(), BenchError> {
    let path = format!("/v1/bots/{bot}/counters/import?line={}", part * ADS_PER_REQUEST + 1);
    let kind = "application/x-ndjson\r\nidempotency-key: bench";
    let sent = with_body("POST", &path, deployment.http, Some(token), kind, lines.as_bytes());
    accepted(deployment, &sent, &[200]).await
}

/// Sends a request of a preparation until it is accepted.
async fn accepted(
    deployment: &Deployment<'_>,
    sent: &[u8],
    good: &[u16],
) -> Result<(), BenchError> {
    let client = Client::new(deployment.http);
    let is_accepted = async || good.contains(&client.status(sent).await);
    settled(until(is_accepted).await, "a request of the preparation")
}

fn settled(is_so: bool, what: &str) -> Result<(), BenchError> {
    let stuck = || BenchError::stuck(PATIENCE, format!("{what}: not there"));
    if is_so { Ok(()) } else { Err(stuck()) }
}

/// Waits until a count does not grow for three seconds, a minute at most.
async fn stagnates(count: impl Fn() -> u64) {
    let (begun, mut last) = (Instant::now(), (count(), Instant::now()));
    while last.1.elapsed() < Duration::from_secs(3) && begun.elapsed() < Duration::from_secs(60) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        if count() > last.0 {
            last = (count(), Instant::now());
        }
    }
}

/// Events that wait in a pipeline.
async fn depth(deployment: &Deployment<'_>, pipeline: &str) -> u64 {
    let shown = deployment.shown(&format!("/v1/pipelines/{pipeline}")).await;
    shown.and_then(|shown| shown["depth"].as_u64()).unwrap_or(0)
}

/// Dead letters of all quiet bots.
async fn quiet_letters(deployment: &Deployment<'_>) -> u64 {
    let mut letters = 0;
    for n in 0..BOTS {
        let path = format!("/v1/pipelines/{FAILING}/dead?bot={}&limit=100", bot(n));
        let shown = deployment.shown(&path).await;
        let found = shown.and_then(|shown| shown["dead_letters"].as_array().map(Vec::len));
        letters += u64::try_from(found.unwrap_or(0)).unwrap_or(0);
    }
    letters
}
