//! `fairlane demo`: shows Fairlane at work on generated events, with private local servers.
//!
//! A few very busy bots publish campaigns of thousands of events, beside thousands of quiet bots
//! (Zipf distribution). One slice in a hundred fails and is retried in order. At the end the demo
//! checks for lost and reordered events.

mod generator;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use rand::Rng as _;
use serde::Serialize;
use tokio::time::Instant;

use self::generator::sent;
pub(crate) use self::generator::{Generator, Ids};
use crate::app::Roles;
use crate::clock::{Clock, SystemClock, micros};
use crate::handler::{Environment, Failure, Handler, Outcomes, Slice};
use crate::id::{BotId, PipelineName};
use crate::queue::{PipelineView, Queue};
use crate::sandbox::{Interrupt, Meter, Rig, SandboxError, drained, quantile_ms, waits};

/// Number of bots that run campaigns.
pub(crate) const BUSY: usize = 5;
/// Number of workers.
const WORKERS: usize = 16;
/// Time that the handler takes per event. It waits once per slice, like one call of another
/// service.
const HANDLING: Duration = Duration::from_micros(200);
/// Interval between two campaigns.
const CAMPAIGN_EVERY: Duration = Duration::from_secs(4);
/// The number of events of a campaign, at most.
const CAMPAIGN_MAX: u64 = 20_000;
/// While so many events wait, no more are sent. Even one bot with all of them is within its quota, so none
/// becomes a dead letter: the demo checks that all events are handled.
pub(crate) const WAITING_MAX: u64 = 100_000;
const TICK: Duration = Duration::from_millis(10);
const REFRESH: Duration = Duration::from_millis(500);

/// The name of the demo's pipeline.
const PIPELINE: &str = "demo";
/// The address of the web page if it is free: the default of `fairlane serve`.
const PAGE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);

/// The addresses to open.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    /// The web page.
    pub page: Option<SocketAddr>,
    /// `/metrics`.
    pub metrics: Option<SocketAddr>,
}

/// The options of the demo.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Number of bots.
    pub bots: usize,
    /// Events per second without campaigns.
    pub rate: u64,
    /// How long events are sent.
    pub seconds: u64,
}

/// The results of the demo.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Published events.
    pub sent: u64,
    /// Whether fewer were sent than wanted, because too many waited.
    pub held_back: bool,
    /// Whether a signal ended the demo. The events that waited were not handled then.
    pub stopped_early: bool,
    /// Handled and acknowledged events.
    pub handled: u64,
    /// Slices that failed and were retried.
    pub retried: u64,
    /// Events that were never handled; 0 if the demo was stopped early.
    pub lost: u64,
    /// Events that were first handled out of order.
    pub reordered: u64,
    /// Seconds from the first sent event to the last acknowledged one.
    pub seconds: f64,
    /// Median time from sent to handled of the quiet bots' events, ms.
    pub quiet_p50_ms: f64,
    /// The 99th percentile of the same, ms.
    pub quiet_p99_ms: f64,
    /// Median time from sent to handled of the busy bots' events, ms.
    pub busy_p50_ms: f64,
    /// The 99th percentile of the same, ms.
    pub busy_p99_ms: f64,
}

/// A snapshot of the running demo.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// The current stage.
    pub stage: &'static str,
    /// Time since the start.
    pub elapsed: Duration,
    /// Number of events sent so far.
    pub sent: u64,
    /// Number of events acknowledged so far.
    pub handled: u64,
    /// Events per second sent and acknowledged, since the last snapshot.
    pub rates: (f64, f64),
    /// The state of the queues.
    pub view: PipelineView,
    /// For quiet bots since the last snapshot: p50 and p99 of the time from sent to handled, ms.
    pub quiet: (f64, f64),
    /// The same for busy bots.
    pub busy: (f64, f64),
}

#[derive(Debug)]
struct Waits {
    total: [Histogram<u64>; 2],
    recent: [Histogram<u64>; 2],
}

struct Work {
    /// Events that were published, or are about to be.
    sent: AtomicU64,
    held_back: AtomicBool,
    meter: Arc<Meter>,
    waits: Mutex<Waits>,
    retried: AtomicU64,
}

impl Work {
    fn new(bots: usize) -> Arc<Self> {
        Arc::new(Self {
            sent: AtomicU64::new(0),
            held_back: AtomicBool::new(false),
            meter: Meter::new(bots),
            waits: Mutex::new(Waits { total: [waits(), waits()], recent: [waits(), waits()] }),
            retried: AtomicU64::new(0),
        })
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

struct DemoHandler(Arc<Work>);

impl Handler for DemoHandler {
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let count = u32::try_from(slice.events.len()).unwrap_or(u32::MAX);
        tokio::time::sleep(HANDLING.saturating_mul(count)).await;
        let now = micros(environment.clock.now());
        let fails = rand::rng().random_ratio(1, 100);
        let failing = fails.then(|| rand::rng().random_range(0..slice.events.len()));
        for (index, delivery) in slice.events.iter().enumerate() {
            if failing == Some(index) {
                self.0.retried.fetch_add(1, Ordering::Relaxed);
                return Err(Failure::transient(index, "the demo's handler fails now and then"));
            }
            self.0.meter.handled(&slice.bot, &delivery.event);
            let sent = sent(&delivery.event).unwrap_or(now);
            let class = usize::from(is_busy(&slice.bot));
            let mut waits = self.0.waits.lock().unwrap_or_else(PoisonError::into_inner);
            waits.total[class].saturating_record(now.saturating_sub(sent).max(1));
            waits.recent[class].saturating_record(now.saturating_sub(sent).max(1));
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, _: &Slice, settled: usize) {
        self.0.meter.committed(settled);
    }
}

fn is_busy(bot: &BotId) -> bool {
    bot.as_str()
        .strip_prefix("bot-")
        .and_then(|n| n.parse::<usize>().ok())
        .is_some_and(|n| n < BUSY)
}

/// Runs the demo. Calls `show` twice per second. SIGINT, SIGTERM and SIGHUP end it early.
///
/// # Errors
/// If the private Redis fails, or if no event moves for a minute. [`SandboxError::Interrupted`] if a
/// signal arrives before the first event.
pub async fn run(
    options: Options,
    started: impl FnMut(&Addresses),
    show: impl FnMut(&Look),
) -> Result<Summary, SandboxError> {
    let mut interrupt = Interrupt::listen()?;
    let rig = interrupt.or(Box::pin(Rig::start())).await?;
    let result = perform(&rig, &mut interrupt, options, started, show).await;
    let removed = rig.remove();
    let summary = result?;
    removed?;
    Ok(summary)
}

async fn perform(
    rig: &Rig,
    interrupt: &mut Interrupt,
    options: Options,
    mut started: impl FnMut(&Addresses),
    mut show: impl FnMut(&Look),
) -> Result<Summary, SandboxError> {
    let bots = options.bots.max(BUSY + 1);
    let work = Work::new(bots);
    let quick = |pipeline: &mut crate::config::PipelineConfig| {
        pipeline.backoff.initial = Duration::from_millis(50);
        pipeline.max_attempts = std::num::NonZero::new(1_000).unwrap_or(pipeline.max_attempts);
    };
    let name = PipelineName::parse(PIPELINE)?;
    let handler = DemoHandler(Arc::clone(&work));
    let app = rig.app_as(&name, Roles::ALL, page_address(), WORKERS, quick, handler);
    let app = interrupt.or(Box::pin(app)).await?;
    let queue = app.queue(&name);
    let told = |address: std::io::Result<SocketAddr>| address.ok();
    started(&Addresses {
        page: told(app.http_address().and_then(|found| found.ok_or(ErrorKind::NotFound.into()))),
        metrics: told(app.metrics_address()),
    });
    let running = Rig::spawn(app);
    let begun = Instant::now();
    let mut watch = Watcher { begun, last: (begun, 0, 0), work: Arc::clone(&work), queue };
    let all = async {
        send(rig, options, bots, &mut watch, &mut show).await?;
        watch.drain(&mut show).await
    };
    let stopped_early = match interrupt.or(all).await {
        Ok(()) => false,
        Err(SandboxError::Interrupted) => true,
        Err(error) => return Err(error),
    };
    let seconds = begun.elapsed().as_secs_f64();
    if stopped_early {
        running.stop_immediately().await?;
    } else {
        watch.look("done", &mut show).await?;
        running.stop().await?;
    }
    let lost = if stopped_early { 0 } else { work.sent().saturating_sub(work.meter.reached()) };
    let waits = work.waits.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Summary {
        sent: work.sent(),
        held_back: work.held_back.load(Ordering::Relaxed),
        stopped_early,
        handled: work.meter.done(),
        retried: work.retried.load(Ordering::Relaxed),
        lost,
        reordered: work.meter.reordered(),
        seconds,
        quiet_p50_ms: quantile_ms(&waits.total[0], 0.5),
        quiet_p99_ms: quantile_ms(&waits.total[0], 0.99),
        busy_p50_ms: quantile_ms(&waits.total[1], 0.5),
        busy_p99_ms: quantile_ms(&waits.total[1], 0.99),
    })
}

/// The address [`PAGE`], or a free port.
fn page_address() -> SocketAddr {
    let is_free = std::net::TcpListener::bind(PAGE).is_ok();
    if is_free { PAGE } else { SocketAddr::new(PAGE.ip(), 0) }
}

/// Publishes events for the given time.
async fn send(
    rig: &Rig,
    options: Options,
    bots: usize,
    watch: &mut Watcher,
    show: &mut impl FnMut(&Look),
) -> Result<(), SandboxError> {
    let mut generator = Generator::new(bots, Ids::Positions);
    let mut campaigns = 0_u32;
    let campaign = options.rate.clamp(200, CAMPAIGN_MAX);
    let (begun, work) = (watch.begun, Arc::clone(&watch.work));
    loop {
        let elapsed = begun.elapsed();
        if elapsed >= Duration::from_secs(options.seconds) {
            return Ok(());
        }
        let mut batch = Vec::new();
        let so_far = u128::from(options.rate) * elapsed.as_millis() / 1_000
            + u128::from(campaigns) * u128::from(campaign);
        let due = so_far.saturating_sub(work.sent().into());
        let waiting = work.sent().saturating_sub(work.meter.done());
        let room = u128::from(WAITING_MAX.saturating_sub(waiting));
        if due > room {
            work.held_back.store(true, Ordering::Relaxed);
        }
        for _ in 0..due.min(room) {
            let bot = generator.quiet();
            batch.push(generator.event(bot)?);
        }
        if room > 0 && elapsed >= CAMPAIGN_EVERY * campaigns + CAMPAIGN_EVERY / 4 {
            let bot = campaigns as usize % BUSY;
            campaigns += 1;
            for _ in 0..campaign {
                batch.push(generator.event(bot)?);
            }
        }
        // Counted first, because a signal may end this during the call: no more are handled than sent.
        work.sent.fetch_add(batch.len() as u64, Ordering::Relaxed);
        rig.publish(batch.iter()).await?;
        watch.look("sending", show).await?;
        tokio::time::sleep(TICK).await;
    }
}

/// Takes snapshots twice per second.
struct Watcher {
    begun: Instant,
    /// Time, sent events and handled events of the last snapshot.
    last: (Instant, u64, u64),
    work: Arc<Work>,
    queue: Option<Queue>,
}

impl Watcher {
    /// Waits until all sent events are completed.
    async fn drain(&mut self, show: &mut impl FnMut(&Look)) -> Result<(), SandboxError> {
        let work = Arc::clone(&self.work);
        // One for all looks: a new one would start its minute again.
        let mut drained = pin!(drained(|| work.meter.done(), work.sent(), |_| {}));
        loop {
            tokio::select! {
                drained = &mut drained => return drained,
                () = tokio::time::sleep(REFRESH) => {}
            }
            self.look("draining the queues", show).await?;
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of a demo")]
    async fn look(
        &mut self,
        stage: &'static str,
        show: &mut impl FnMut(&Look),
    ) -> Result<(), SandboxError> {
        let since = self.last.0.elapsed();
        if since < REFRESH && stage != "done" {
            return Ok(());
        }
        let (sent, handled) = (self.work.sent(), self.work.meter.done());
        let rate = |now: u64, before: u64| (now - before) as f64 / since.as_secs_f64();
        let view = match &self.queue {
            Some(queue) => queue.view(SystemClock.now()).await?,
            None => PipelineView::default(),
        };
        let [quiet, busy] = {
            let mut waits = self.work.waits.lock().unwrap_or_else(PoisonError::into_inner);
            waits.recent.each_mut().map(|recent| {
                let figures = (quantile_ms(recent, 0.5), quantile_ms(recent, 0.99));
                recent.reset();
                figures
            })
        };
        show(&Look {
            stage,
            elapsed: self.begun.elapsed(),
            sent,
            handled,
            rates: (rate(sent, self.last.1), rate(handled, self.last.2)),
            view,
            quiet,
            busy,
        });
        self.last = (Instant::now(), sent, handled);
        Ok(())
    }
}

/// The lines of one snapshot.
#[must_use]
pub fn draw(look: &Look) -> String {
    let view = &look.view;
    let waits = |(p50, p99): (f64, f64)| {
        if p99 > 0.0 {
            format!("p50 {p50:>9.1} ms   p99 {p99:>9.1} ms")
        } else {
            format!("p50 {:>12}   p99 {:>12}", "-", "-")
        }
    };
    [
        format!("{:>6.1} s   {}", look.elapsed.as_secs_f64(), look.stage),
        format!(
            "events     in {:>10.0}/s   handled {:>9.0}/s   in all {:>9}",
            look.rates.0, look.rates.1, look.handled
        ),
        format!(
            "queues     depth {:>9}   ready bots {:>8}   oldest {:>7.1} s",
            view.depth,
            view.ready,
            Duration::from_millis(view.oldest_age_ms).as_secs_f64()
        ),
        format!("quiet bots {}   (thousands of small ones)", waits(look.quiet)),
        format!("busy bots  {}   ({BUSY} with campaigns)", waits(look.busy)),
    ]
    .map(|line| format!("  {line}\n"))
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[tokio::test(start_paused = true)]
    async fn a_demo_whose_events_are_not_completed_fails_after_a_minute() {
        let (begun, work) = (Instant::now(), Work::new(BUSY + 1));
        work.sent.store(10, Ordering::Relaxed);
        work.meter.committed(9);
        let mut watch = Watcher { begun, last: (begun, 0, 0), work, queue: None };
        let mut looks = 0;
        let mut show = |look: &Look| {
            looks += 1;
            assert_eq!((look.sent, look.handled), (10, 9));
        };
        let drained = Box::pin(watch.drain(&mut show));
        let drained = tokio::time::timeout(Duration::from_secs(120), drained);
        let error = drained.await.expect("it ends").unwrap_err();
        assert_eq!(error.to_string(), "nothing moved for 60s: 9 of 10 events are done");
        assert!(begun.elapsed() < Duration::from_secs(62), "{:?}", begun.elapsed());
        assert!(looks > 100, "{looks}");
    }

    #[test]
    fn one_bot_may_hold_all_events_that_wait() {
        // What the queue adds to an event.
        const RECORD: usize = 32;
        let mut generator = Generator::new(20, Ids::Positions);
        let sizes = (0..1_000).map(|_| generator.event(BUSY).unwrap().len() + RECORD);
        let largest = sizes.max().unwrap() as u64;
        let held = (WAITING_MAX + CAMPAIGN_MAX) * largest;
        let quota = Config::default().quotas.queued_bytes;
        assert!(held < quota, "{held} of {quota}");
    }

    #[test]
    fn figures_stay_in_their_columns_whatever_their_size() {
        let mut look = Look { stage: "sending", ..Look::default() };
        let small: Vec<usize> = draw(&look).lines().map(str::len).collect();
        look.handled = 9_999_999;
        look.rates = (123_456.0, 98_765.0);
        look.view.depth = 1_234_567;
        look.quiet = (12_345.6, 98_765.4);
        look.busy = (0.1, 0.1);
        let large: Vec<usize> = draw(&look).lines().map(str::len).collect();
        assert_eq!(small, large);
    }
}
