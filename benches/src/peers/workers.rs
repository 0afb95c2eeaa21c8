//! The two sides of a system: one adds events, the other handles them.

use std::sync::Arc;
use std::time::Duration;

use fairlane::app::App;
use fairlane::clock::{Clock, SystemClock, micros};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::sandbox::{Producer, Rig, STREAM};
use redis::Pipeline;
use serde::Deserialize;
use tokio::time::Instant;

use super::floor::Floor;
use super::judge::Entry;
use super::node::{About, Program, Programs};
use super::system::{BATCH, HANDLING, Measure, System};
use super::tally::{Seen, Tally};
use super::work::{Work, due_at};
use crate::error::BenchError;

/// A worker that completes nothing for this long has lost the remaining events.
pub(super) const IDLE: Duration = Duration::from_secs(15);
/// How often the progress of a worker in this process is looked at.
const POLL: Duration = Duration::from_millis(2);

/// What a system does in one run.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) system: System,
    pub(super) measure: Measure,
    /// Number of events of each tenant.
    pub(super) per_tenant: Vec<u32>,
    /// Events per second, if they are added by the clock.
    pub(super) rate: u32,
}

/// What a worker has done.
#[derive(Debug)]
pub(super) struct Worked {
    pub(super) log: Vec<Entry>,
    /// Number of different events that were completed.
    pub(super) done: u64,
    /// Time until the last of them.
    pub(super) seconds: f64,
}

/// The side that adds events.
pub(super) enum Adder<'a> {
    Node(Box<Program>),
    Stream(Producer, &'a Work),
    /// Each event when it is due, at this rate per second.
    Paced(Producer, &'a Work, u32),
}

/// The side that handles events.
pub(super) enum Worker {
    Node(Box<Program>),
    Fairlane(Box<App>, Arc<Tally>),
    Floor(Floor, Arc<Tally>),
}

impl Plan {
    pub(super) fn total(&self) -> u64 {
        self.per_tenant.iter().copied().map(u64::from).sum()
    }
}

impl Worked {
    /// Fails if nothing was done.
    pub(super) fn new(
        system: System,
        total: u64,
        done: u64,
        seconds: f64,
        log: Vec<Entry>,
    ) -> Result<Self, BenchError> {
        if done == 0 {
            let problem = format!("it handled none of {total} events within {IDLE:?}");
            return Err(BenchError::Peer { system: system.name(), problem });
        }
        Ok(Self { log, done, seconds })
    }

    #[expect(clippy::cast_precision_loss, reason = "a count of events")]
    pub(super) fn per_second(&self) -> f64 {
        self.done as f64 / self.seconds
    }
}

impl<'a> Adder<'a> {
    /// Connects. Nothing is added yet.
    pub(super) async fn prepare(
        rig: &Rig,
        programs: Option<&Programs>,
        plan: &Plan,
        work: &'a Work,
        is_paced: bool,
    ) -> Result<Self, BenchError> {
        Ok(match (programs, is_paced) {
            (Some(programs), true) => Self::Node(Box::new(programs.pace(rig, plan, work).await?)),
            (Some(programs), false) => Self::Node(Box::new(programs.add(rig, plan, work).await?)),
            (None, true) => Self::Paced(rig.producer(), work, plan.rate),
            (None, false) => Self::Stream(rig.producer(), work),
        })
    }

    /// The versions and the settings.
    pub(super) fn about(&self) -> About {
        let of = |settings: &str| About { settings: settings.to_owned(), ..About::default() };
        match self {
            Self::Node(program) => program.about.clone(),
            Self::Stream(..) => of(&format!("XADD, {BATCH} events at a time")),
            Self::Paced(..) => of("XADD of the due events"),
        }
    }

    /// Adds all events. Returns the rate per second.
    #[expect(clippy::cast_precision_loss, reason = "counts of events")]
    pub(super) async fn run(self) -> Result<f64, BenchError> {
        match self {
            Self::Node(program) => {
                let (added, seconds) = program.added().await?;
                Ok(added as f64 / seconds)
            }
            Self::Stream(producer, work) => {
                let started = Instant::now();
                for events in work.events.chunks(BATCH) {
                    producer.send(&adding(events)).await?;
                }
                Ok(work.len() as f64 / started.elapsed().as_secs_f64())
            }
            Self::Paced(producer, work, rate) => {
                let (origin, origin_us) = (Instant::now(), micros(SystemClock.now()));
                let due = |at: usize| Duration::from_secs(1).mul_f64(at as f64 / f64::from(rate));
                let mut at = 0;
                while at < work.len() {
                    tokio::time::sleep_until(origin + due(at)).await;
                    let first = at;
                    while at < work.len() && due(at) <= origin.elapsed() {
                        at += 1;
                    }
                    // The clock of the timers is a little ahead.
                    if first == at {
                        continue;
                    }
                    let with_due =
                        |at: usize| due_at(&work.events[at], origin_us + micros(due(at)));
                    let events: Vec<_> = (first..at).map(with_due).collect();
                    producer.send(&adding(&events)).await?;
                }
                Ok(work.len() as f64 / origin.elapsed().as_secs_f64())
            }
        }
    }
}

fn adding(events: &[Vec<u8>]) -> Pipeline {
    let mut batch = Pipeline::new();
    for event in events {
        batch.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event);
    }
    batch
}

impl Worker {
    /// Connects. Nothing is handled yet.
    pub(super) async fn prepare(
        rig: &Rig,
        programs: Option<&Programs>,
        plan: &Plan,
    ) -> Result<Self, BenchError> {
        if let Some(programs) = programs {
            return Ok(Self::Node(Box::new(programs.work(rig, plan).await?)));
        }
        let tally = Arc::new(Tally::new(&plan.per_tenant));
        let concurrency = plan.system.concurrency(plan.measure);
        if plan.system == System::Xreadgroup {
            return Ok(Self::Floor(Floor::open(rig, concurrency, plan.measure)?, tally));
        }
        let handler = Recorded { tally: Arc::clone(&tally), measure: plan.measure };
        let app = Box::pin(rig.app(concurrency, |_| {}, handler)).await?;
        Ok(Self::Fairlane(Box::new(app), tally))
    }

    /// The settings, and the versions if they are not those of this program.
    pub(super) fn about(&self, plan: &Plan) -> About {
        let concurrency = plan.system.concurrency(plan.measure);
        let settings = match self {
            Self::Node(program) => return program.about.clone(),
            Self::Fairlane(..) => format!("{concurrency} workers, otherwise the defaults"),
            Self::Floor(floor, _) => {
                format!("readers {concurrency}, COUNT {}, XACK per batch", floor.count())
            }
        };
        About { settings, ..About::default() }
    }

    /// Handles events until all are done or nothing moves, and stops.
    pub(super) async fn run(
        self,
        plan: &Plan,
        watch: impl FnMut(u64),
    ) -> Result<Worked, BenchError> {
        let total = plan.total();
        let tally = match self {
            Self::Node(program) => return program.worked(total, watch).await,
            Self::Fairlane(app, tally) => {
                tally.begin();
                let running = Rig::spawn(*app);
                settled(&tally, total, watch).await;
                running.stop().await?;
                tally
            }
            Self::Floor(floor, tally) => {
                tally.begin();
                let readers = floor.start(&tally);
                settled(&tally, total, watch).await;
                readers.stop().await?;
                tally
            }
        };
        let done = tally.done();
        let (log, seconds) = tally.take();
        Worked::new(plan.system, total, done, seconds, log)
    }
}

/// Waits until `total` events are done, or none for a while.
async fn settled(tally: &Tally, total: u64, mut watch: impl FnMut(u64)) {
    let mut last = (0, Instant::now());
    loop {
        let done = tally.done();
        watch(done);
        if done != last.0 {
            last = (done, Instant::now());
        }
        if done >= total || last.1.elapsed() > IDLE {
            return;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// The handler of Fairlane.
struct Recorded {
    tally: Arc<Tally>,
    measure: Measure,
}

/// The data of an event.
#[derive(Debug, Deserialize)]
pub(super) struct Payload {
    pub(super) sent: u64,
}

impl Recorded {
    fn seen(slice: &Slice) -> impl Iterator<Item = Seen> {
        slice.events.iter().filter_map(|delivery| {
            let payload = delivery.event.data_as::<Payload>().ok()?;
            Seen::new(slice.bot.as_str(), delivery.event.id(), payload.sent)
        })
    }
}

impl Handler for Recorded {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        if self.measure == Measure::Throughput {
            self.tally.handled(Self::seen(slice));
        } else {
            for event in Self::seen(slice) {
                self.tally.started(event);
                tokio::time::sleep(HANDLING).await;
                self.tally.ended(event);
            }
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        let settled = slice.events.iter().take(settled);
        let seen = settled.filter_map(|it| Seen::new(slice.bot.as_str(), it.event.id(), 0));
        self.tally.completed(seen);
    }
}
