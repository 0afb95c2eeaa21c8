//! Listens to the wake channels of every pipeline and shard.
//!
//! After each connection, listeners scan everything, because they may have missed messages.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt;
use redis::Value;
use tracing::{debug, info, warn};

use super::Queue;
use crate::caught::caught;
use crate::id::{BotId, Shard};
use crate::lifecycle::Shutdown;
use crate::redis::{Link, RedisError, parse_score, timed_out};
use crate::telemetry::{Outage, Recovered};

const RECONNECT: Duration = Duration::from_millis(100);
/// The longest wait between attempts to subscribe. While a cluster is down, each one asks all its primaries.
const RECONNECT_MAX: Duration = Duration::from_millis(500);
/// How long the answer to a subscription may take.
const SUBSCRIBED_WITHIN: Duration = Duration::from_secs(3);
/// Interval of pings. A ping is also sent when another connection of the process times out: a dead
/// connection receives no published message and reports no error.
const ALIVE: Duration = Duration::from_secs(2);
/// Timeout of a ping.
const ALIVE_WITHIN: Duration = Duration::from_secs(1);
/// Timeout of a ping after another connection timed out.
const DOUBTED_WITHIN: Duration = Duration::from_millis(250);

/// A message from a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wake {
    /// The lowest score of the shard fell to this value.
    Ready(i64),
    /// Its next lease or park ends at this time, ms since 1970.
    Deadline(u64),
    /// Its next delayed event is due at this time, ms since 1970.
    Due(u64),
    /// The process that reads the bus is behind, and defers its claims for this long; zero: not any more.
    Defer(Duration),
    /// A message of a product about a bot: the product's name for the message, and the bot.
    Told(Box<str>, BotId),
}

impl Wake {
    fn parse(payload: &str) -> Option<Self> {
        let (what, rest) = payload.split_once(' ')?;
        let number = || parse_score(rest);
        match what {
            "ready" => number().map(Self::Ready),
            "deadline" => Some(Self::Deadline(u64::try_from(number()?).ok()?)),
            "due" => Some(Self::Due(u64::try_from(number()?).ok()?)),
            "defer" => Some(Self::Defer(Duration::from_millis(u64::try_from(number()?).ok()?))),
            _ => BotId::parse(rest).ok().map(|bot| Self::Told(what.into(), bot)),
        }
    }
}

/// A receiver of the messages about one pipeline. A call that panics is logged, and the next one is made
/// all the same.
pub trait Listener: Send + Sync + 'static {
    /// A shard published a message.
    fn heard(&self, shard: Shard, wake: &Wake);
    /// Messages may have been missed.
    fn missed(&self);
}

impl Queue {
    /// Tells the processes of this pipeline that this one defers its claims for so long, or, with zero,
    /// not any more. Without it they claim as always, so an error only shows in the log.
    pub(crate) async fn tell_deferral(&self, holds: Duration) {
        let Some(shard) = self.shard_count().shards().next() else { return };
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.keys(shard).wake()).arg(format!("defer {}", holds.as_millis()));
        if let Err(error) = self.link().command("PUBLISH", command).await {
            debug!(pipeline = %self.name(), %error, "cannot tell of deferred claims");
        }
    }
}

/// Listens until the soft stop.
pub(crate) async fn listen(pipelines: Vec<(Queue, Vec<Box<dyn Listener>>)>, shutdown: Shutdown) {
    let mut channels: HashMap<String, (usize, Shard)> = HashMap::new();
    for (index, (queue, _)) in pipelines.iter().enumerate() {
        for shard in queue.shard_count().shards() {
            channels.insert(queue.keys(shard).wake().to_owned(), (index, shard));
        }
    }
    let Some(link) = pipelines.first().map(|(queue, _)| queue.link()) else { return };
    let outage = Outage::new(Duration::ZERO);
    let mut pause = RECONNECT;
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            result = session(link, &channels, &pipelines, &outage) => {
                pause = pause_after(&result, pause);
                let suppressed = outage.failed();
                match (result, suppressed) {
                    (Err(error), Some(suppressed)) => {
                        warn!(%error, suppressed, "cannot subscribe to the wake channels; using periodic scans instead");
                    }
                    (Ok(()), Some(suppressed)) => {
                        warn!(suppressed, "lost the subscription to the wake channels; reconnecting");
                    }
                    (_, None) => {}
                }
            }
        }
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// The wait before the next attempt, which grows while no subscription can be made.
fn pause_after(result: &Result<(), RedisError>, pause: Duration) -> Duration {
    if result.is_ok() { RECONNECT } else { (pause * 2).min(RECONNECT_MAX) }
}

/// One subscription; returns without an error when the connection ends, or no messages reach it any more.
async fn session(
    link: &Link,
    channels: &HashMap<String, (usize, Shard)>,
    pipelines: &[(Queue, Vec<Box<dyn Listener>>)],
    outage: &Outage,
) -> Result<(), RedisError> {
    let target = link.target();
    let (mut subscriber, server) = link.subscriber().await?;
    let names: Vec<&String> = channels.keys().collect();
    // A server that is frozen accepts connections, and answers nothing.
    let answer = tokio::time::timeout(SUBSCRIBED_WITHIN, subscriber.subscribe(names)).await;
    answer.unwrap_or_else(|_| Err(timed_out())).map_err(|source| target.unknown(source))?;
    for (queue, listeners) in pipelines {
        for listener in listeners {
            caught(queue.name(), "Listener::missed", || listener.missed());
        }
    }
    if let Some(Recovered { lasted, failures }) = outage.succeeded() {
        info!(?lasted, failures, "subscribed to the wake channels again");
    }
    let (mut asking, mut messages) = subscriber.split();
    let hearing = async {
        while let Some(message) = messages.next().await {
            let Some(&(index, shard)) = channels.get(message.get_channel_name()) else { continue };
            let payload = String::from_utf8_lossy(message.get_payload_bytes());
            if let Some(wake) = Wake::parse(&payload) {
                let (queue, listeners) = &pipelines[index];
                for listener in listeners {
                    caught(queue.name(), "Listener::heard", || listener.heard(shard, &wake));
                }
            } else {
                debug!(%payload, "an unknown message on a wake channel");
            }
        }
    };
    let silent = async {
        loop {
            let within = tokio::select! {
                () = tokio::time::sleep(ALIVE) => ALIVE_WITHIN,
                () = target.doubted() => DOUBTED_WITHIN,
            };
            let given_up = async {
                tokio::select! {
                    () = tokio::time::sleep(within) => {}
                    () = async {
                        target.doubted().await;
                        tokio::time::sleep(DOUBTED_WITHIN).await;
                    } => {}
                }
            };
            tokio::select! {
                alive = asking.ping::<Value>() => if alive.is_err() {
                    return;
                },
                () = given_up => return,
            }
            if !link.hears(&server).await {
                info!(%server, "it left the cluster, or the cluster is down for it; subscribing anew");
                return;
            }
        }
    };
    tokio::select! {
        () = hearing => {}
        () = silent => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_grows_only_while_no_subscription_can_be_made() {
        let failed = Err(RedisError::Connect { target: "a:1".to_owned(), source: timed_out() });
        let mut pause = RECONNECT;
        let mut waits = Vec::new();
        for result in [&failed, &failed, &failed, &failed, &Ok(()), &failed] {
            pause = pause_after(result, pause);
            waits.push(pause.as_millis());
        }
        assert_eq!(waits, [200, 400, 500, 500, 100, 200]);
    }

    #[test]
    fn messages_are_read_and_malformed_ones_passed_over() {
        let cases = [
            ("ready -2803599627370496", Some(Wake::Ready(-2_803_599_627_370_496))),
            ("ready 0", Some(Wake::Ready(0))),
            ("deadline 1700000000000", Some(Wake::Deadline(1_700_000_000_000))),
            ("due 5", Some(Wake::Due(5))),
            ("due -5", None),
            ("defer 500", Some(Wake::Defer(Duration::from_millis(500)))),
            ("defer x", None),
            ("news a b|c", Some(Wake::Told("news".into(), BotId::parse("a b|c").unwrap()))),
            ("news ", None),
            ("ready", None),
            ("news", None),
            ("", None),
        ];
        for (payload, expected) in cases {
            assert_eq!(Wake::parse(payload), expected, "{payload:?}");
        }
    }
}
