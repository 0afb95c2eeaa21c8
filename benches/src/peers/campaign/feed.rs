//! The events of a campaign, and the producer of the systems that read a stream.
//!
//! The producer adds each event when it is due, and repeats that until Redis acknowledges it. An event
//! waits for the acknowledgement of the one before it of its tenant, as the order of a tenant requires.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use fairlane::id::BotId;
use fairlane::sandbox::{STREAM, event};
use fairlane_testkit::redis::RedisServer;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::judge::Place;
use crate::error::BenchError;
use crate::faults::worker::now_us;
use crate::peers::work::BYTES;

/// Numbers of tenants.
pub(super) const BUSY: u32 = 20;
pub(super) const QUIET: u32 = 30;
/// Events per second of all busy and of all quiet tenants.
pub(super) const BUSY_RATE: u32 = 80;
pub(super) const QUIET_RATE: u32 = 20;
/// Each tenant gets a last event this long after the time of the faults. It shows whether the tenant is
/// still served.
const LAST: Duration = Duration::from_secs(8);
/// Time before an event is added for the third time, and each later time.
const RETRY: Duration = Duration::from_millis(50);
/// Maximum time for an answer. Redis may be frozen for 3 s.
const PATIENCE: Duration = Duration::from_secs(10);

/// An event, and when it is due after the start.
#[derive(Debug, Clone)]
pub(super) struct Due {
    pub(super) after: Duration,
    pub(super) place: Place,
    pub(super) event: Vec<u8>,
}

/// The events of a campaign of this length, by time. Equal seeds give equal events.
pub(super) fn schedule(seed: u64, length: Duration) -> Result<Vec<Due>, BenchError> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut times: Vec<(Duration, u32)> = Vec::new();
    for (first, count, rate) in [(0, BUSY, BUSY_RATE), (BUSY, QUIET, QUIET_RATE)] {
        let step = Duration::from_secs(1) / rate;
        let mut after = Duration::ZERO;
        while after < length {
            times.push((after, first + random.random_range(0..count)));
            after += step;
        }
    }
    times.extend((0..BUSY + QUIET).map(|tenant| (length + LAST, tenant)));
    times.sort_unstable();
    let mut next = vec![0_u32; (BUSY + QUIET) as usize];
    let mut due = Vec::with_capacity(times.len());
    for (after, tenant) in times {
        let position = &mut next[tenant as usize];
        let bot = BotId::parse(&format!("bot-{tenant}"))?;
        let event = event(&bot, &position.to_string(), "bench", BYTES)?;
        due.push(Due { after, place: (tenant, *position), event });
        *position += 1;
    }
    Ok(due)
}

/// Writes the events for a producer of Node.js.
pub(super) fn write(schedule: &[Due], path: &Path) -> Result<(), BenchError> {
    let mut file = std::io::BufWriter::new(File::create(path)?);
    for Due { after, place: (tenant, position), event } in schedule {
        let event: Value = serde_json::from_slice(event).unwrap_or_default();
        let after = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        let line =
            json!({ "after": after, "tenant": tenant, "position": position, "event": event });
        writeln!(file, "{line}")?;
    }
    Ok(file.flush()?)
}

/// The end of all tasks of the producer. They are cancelled with it.
pub(super) struct Feeding(JoinSet<Result<(), BenchError>>);

impl Feeding {
    /// Waits until every event is acknowledged.
    pub(super) async fn ended(mut self) -> Result<(), BenchError> {
        while let Some(ended) = self.0.join_next().await {
            ended.map_err(|error| BenchError::Campaign(error.to_string()))??;
        }
        Ok(())
    }
}

/// Starts to add the events to the stream. `history` gets those that are acknowledged.
pub(super) fn start(
    schedule: Vec<Due>,
    server: &RedisServer,
    history: &Path,
) -> Result<Feeding, BenchError> {
    let client = redis::Client::open(server.url())?;
    let (started, started_us) = (Instant::now(), now_us());
    let mut tenants: Vec<Vec<Due>> = vec![Vec::new(); (BUSY + QUIET) as usize];
    for due in schedule {
        tenants[due.place.0 as usize].push(due);
    }
    let mut feeding = JoinSet::new();
    for events in tenants {
        let client = client.clone();
        let mut history = File::options().create(true).append(true).open(history)?;
        feeding.spawn(async move {
            let mut connection = None;
            for Due { after, place: (tenant, position), event } in events {
                sleep_until(started + after).await;
                // A connection that was cut since the last event is only noticed now.
                let mut pause = Duration::ZERO;
                while !add(&client, &mut connection, &event).await {
                    connection = None;
                    sleep(pause).await;
                    pause = RETRY;
                }
                let due = started_us + u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
                let line = format!("S\t{tenant}\t{position}\t{due}\t{}\n", now_us());
                history.write_all(line.as_bytes())?;
            }
            Ok(())
        });
    }
    Ok(Feeding(feeding))
}

/// Whether Redis has acknowledged the event.
async fn add(
    client: &redis::Client,
    connection: &mut Option<MultiplexedConnection>,
    event: &[u8],
) -> bool {
    let adding = async {
        let connection = match connection {
            Some(connection) => connection,
            None => connection.insert(connect(client).await?),
        };
        let mut command = redis::cmd("XADD");
        command.arg(STREAM).arg("*").arg("event").arg(event);
        command.query_async::<String>(connection).await
    };
    timeout(PATIENCE, adding).await.is_ok_and(|added| added.is_ok())
}

async fn connect(client: &redis::Client) -> redis::RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    client.get_multiplexed_async_connection_with_config(&config).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_events_and_every_tenant_has_a_last_one() {
        let length = Duration::from_secs(10);
        let places = |seed| -> Vec<Place> {
            schedule(seed, length).unwrap().iter().map(|due| due.place).collect()
        };
        assert_eq!(places(3), places(3));
        assert_ne!(places(3), places(4));
        let all = schedule(3, length).unwrap();
        let tenants = (BUSY + QUIET) as usize;
        assert_eq!(all.len(), 10 * (BUSY_RATE + QUIET_RATE) as usize + tenants);
        assert!(all.iter().rev().take(tenants).all(|due| due.after == length + LAST));
        assert!(all.is_sorted_by_key(|due| due.after));
        let of_one: Vec<u32> =
            all.iter().map(|due| due.place).filter(|place| place.0 == 0).map(|it| it.1).collect();
        assert!(of_one.iter().copied().eq(0..u32::try_from(of_one.len()).unwrap()));
    }
}
