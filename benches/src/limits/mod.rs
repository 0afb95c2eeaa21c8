//! `fairlane-bench limits`: whether each bot gets its rate, and never more, over several processes of
//! which one is killed, and what that costs others.
//!
//! 1. Processes of the service start on one Redis. They push to a receiver in this process, which
//!    notes when each event arrives.
//! 2. The commands of Redis are counted while nothing happens, and while every bot of a pipeline with
//!    one event a minute waits for its next one, and while that pipeline is paused.
//! 3. Quiet bots, of a pipeline without a rate, are measured alone.
//! 4. A pipeline with a rate has events for the whole run, and is resumed. The quiet bots are measured
//!    beside it until one process is killed and replaced, halfway.
//!
//! A killed process may have slices under way. Their bots rest until their leases are taken over. So
//! windows over such a rest do not count for the rate; they do count for the bucket and the order.

mod figures;
mod fleet;
mod receiver;

use std::time::Duration;

use fairlane::event::{Event, EventError};
use fairlane::id::BotId;
use fairlane::sandbox::{Rig, drained, quantile_ms, waits};
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::time::Instant;

pub(crate) use self::figures::Report;
use self::figures::{Measured, Rates};
use self::fleet::Fleet;
use self::receiver::Receiver;
use crate::error::BenchError;
use crate::probe;

/// Number of quiet bots, and their events per second together.
const QUIET_BOTS: u64 = 50;
const QUIET_RATE: u64 = 100;
/// The processes come to rest within this time.
const REST: Duration = Duration::from_secs(3);
/// Maximum duration of the phases other than the main one.
const PHASE_MAX: u64 = 10;
/// The killed process is replaced after this time, as a supervisor would.
const RESTART: Duration = Duration::from_secs(1);
/// How much longer than the measurement the events last, in seconds.
const SPARE: u64 = 5;

/// The options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Number of bots with a rate.
    pub(crate) bots: u64,
    /// Events per second of each of them.
    pub(crate) rate: u64,
    /// Duration.
    pub(crate) seconds: u64,
    /// Number of processes.
    pub(crate) processes: usize,
}

/// Runs the bench.
///
/// # Errors
/// If the private Redis or a process fails, or nothing moves for a minute.
pub(crate) async fn run(
    options: Options,
    watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    Rig::with(async |rig| measure(rig, options, watch).await).await
}

async fn measure(
    rig: &Rig,
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let Options { bots, rate, seconds, processes } = options;
    let phase = seconds.min(PHASE_MAX);
    let receiver = Receiver::start().await?;
    watch("starting the processes", 0);
    let mut fleet = Fleet::start(rig, options, receiver.address, processes).await?;

    // The first work of a process takes longer.
    let mut quiet = Quiet { rig, receiver: &receiver, next: 0, late: waits() };
    quiet.send(1, || Ok(())).await?;
    tokio::time::sleep(REST).await;
    watch("commands while idle", 0);
    let idle_commands = commands(rig, phase).await?;
    watch("commands while all bots wait", 0);
    publish(rig, "parked", (0..3).flat_map(|id| (0..bots).map(move |bot| (bot, id)))).await?;
    drained(|| receiver.parked(), bots, |_| {}).await?;
    tokio::time::sleep(REST).await;
    let parked_commands = commands(rig, phase).await?;
    // The same events, of which none may be handed out.
    watch("commands while the pipeline is paused", 0);
    fleet.set_paused("parked", true).await?;
    tokio::time::sleep(REST).await;
    let paused_commands = commands(rig, phase).await?;

    watch("quiet bots alone", 0);
    receiver.take_quiet();
    let alone_sent = quiet.send(phase, || Ok(())).await?;
    let alone = settled(&receiver, alone_sent).await;

    fleet.set_paused("limited", true).await?;
    let each = rate * (seconds + SPARE + 1);
    let events = (0..each).flat_map(|id| (0..bots).map(move |bot| (bot, id)));
    watch("publishing", each * bots);
    publish(rig, "limited", events).await?;
    fleet.queued(each * bots).await?;
    // Copying has its share of the processors until here.
    tokio::time::sleep(Duration::from_secs(1)).await;
    receiver.take_quiet();
    quiet.late.reset();
    let begun = receiver.now();
    fleet.set_paused("limited", false).await?;
    let at = Instant::now() + Duration::from_secs(seconds) / 2;
    let (mut killed, mut replaced) = (None, false);
    let sent = quiet
        .send(seconds + 1, || {
            watch("events within their rates", receiver.limited());
            if killed.is_none() && Instant::now() >= at {
                // The kill delays others however many bots have a rate.
                killed = Some((receiver.now(), receiver.take_quiet()));
                fleet.kill();
            }
            if killed.is_some() && !replaced && Instant::now() >= at + RESTART {
                replaced = true;
                fleet.replace()?;
            }
            Ok(())
        })
        .await?;
    let (killed_us, beside) = killed.unwrap_or_else(|| (receiver.now(), receiver.take_quiet()));
    let after_kill = settled(&receiver, sent.saturating_sub(beside.len())).await;
    let measured = Measured {
        limited: receiver.take_limited(),
        begun_us: begun,
        killed_us,
        idle_commands,
        parked_commands,
        paused_commands,
        lost: (alone_sent + sent).saturating_sub(alone.len() + beside.len() + after_kill.len()),
        alone,
        beside,
        after_kill,
        sender_late_max_ms: quantile_ms(&quiet.late, 1.0),
    };
    Ok(Report::new(options, &measured))
}

/// The waits of the quiet bots, when all their events arrived or none does any more.
async fn settled(receiver: &Receiver, sent: u64) -> Histogram<u64> {
    let patience = Instant::now() + Duration::from_secs(10);
    while receiver.quiet() < sent && Instant::now() < patience {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    receiver.take_quiet()
}

/// Commands of Redis a second by name, with those of scripts.
async fn commands(rig: &Rig, seconds: u64) -> Result<Rates, BenchError> {
    let (before, since) =
        (probe::calls_of(&probe::info(rig, "commandstats").await?), Instant::now());
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let after = probe::calls_of(&probe::info(rig, "commandstats").await?);
    let lasted = since.elapsed().as_secs_f64();
    // The bench itself asks with this one.
    let others = after.into_iter().filter(|(name, _)| name != "info");
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    let rate = |(name, calls): (String, u64)| {
        let before = before.get(&name).copied().unwrap_or(0);
        let rate = calls.saturating_sub(before) as f64 / lasted;
        (name, rate)
    };
    Ok(others.map(rate).collect())
}

/// Publishes events of a pipeline: pairs of a bot and a position.
async fn publish(
    rig: &Rig,
    pipeline: &str,
    events: impl Iterator<Item = (u64, u64)>,
) -> Result<(), BenchError> {
    const CHUNK: usize = 10_000;
    let mut chunk = Vec::new();
    for (bot, id) in events {
        chunk.push(make(pipeline, bot, id, 0)?);
        if chunk.len() == CHUNK {
            rig.publish(chunk.iter()).await?;
            chunk.clear();
        }
    }
    Ok(rig.publish(chunk.iter()).await.map(drop)?)
}

/// An event of a pipeline that is due at a time of the receiver.
fn make(pipeline: &str, bot: u64, id: u64, due: u64) -> Result<Vec<u8>, BenchError> {
    #[derive(Serialize)]
    struct Payload {
        due: u64,
    }
    let bot = BotId::parse(&format!("{pipeline}-{bot}"))?;
    let event = Event::builder(format!("{pipeline}.event"), &bot);
    let event = event.id(id.to_string()).source("bench");
    let event = event.data(&Payload { due }).map_err(EventError::Json)?.build()?;
    Ok(serde_json::to_vec(&event).map_err(EventError::Json)?)
}

/// Sends events of the quiet bots by the clock.
struct Quiet<'a> {
    rig: &'a Rig,
    receiver: &'a Receiver,
    next: u64,
    /// How late the events were sent.
    late: Histogram<u64>,
}

impl Quiet<'_> {
    /// Returns the number of events.
    async fn send(
        &mut self,
        seconds: u64,
        mut each: impl FnMut() -> Result<(), BenchError>,
    ) -> Result<u64, BenchError> {
        let step = Duration::from_micros(1_000_000 / QUIET_RATE);
        let (origin, begun, mut sent) = (Instant::now(), self.receiver.now(), 0);
        for due in (0_u32..).map(|n| step * n).take_while(|due| *due < Duration::from_secs(seconds))
        {
            tokio::time::sleep_until(origin + due).await;
            let due_us = begun + fairlane::clock::micros(due);
            self.late.saturating_record(self.receiver.now().saturating_sub(due_us).max(1));
            let event = make("quiet", self.next % QUIET_BOTS, self.next, due_us)?;
            self.next += 1;
            self.rig.publish([&event].into_iter()).await?;
            each()?;
            sent += 1;
        }
        Ok(sent)
    }
}
