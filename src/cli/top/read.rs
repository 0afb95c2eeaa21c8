//! Reads the figures, again and again.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::rows::Snapshot;
use super::state::{BotSort, Wanted};
use crate::cli::session::Session;
use crate::cli::status::CliSite;
use crate::clock::{Clock as _, SystemClock};
use crate::id::BotId;
use crate::problems::{Facts, PipelineFacts};
use crate::queue::{BotOrder, BotView};
use crate::redis::RedisError;

/// Maximum number of bots that are read of each pipeline.
const BOTS: usize = 100;
/// Number of pipelines whose bots are read concurrently.
const CONCURRENT: usize = 4;
/// The pause after a reading is at least this many times as long as the reading.
const PAUSE: u32 = 4;

/// The figures, or why Redis does not answer.
pub(super) type Reading = Result<Snapshot, String>;

/// Reads the figures.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    session: &'a Session,
    interval: Duration,
    wanted: watch::Sender<Wanted>,
    readings: mpsc::Sender<Reading>,
}

/// Tells the reader what to read.
#[derive(Debug)]
pub(super) struct Wishes(watch::Sender<Wanted>);

impl Wishes {
    /// Reads this immediately, and from now on.
    pub(super) fn want(&self, wanted: Wanted) {
        self.0.send_replace(wanted);
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(session: &'a Session, interval: Duration) -> (Self, mpsc::Receiver<Reading>) {
        let (readings, receiver) = mpsc::channel(1);
        let wanted = watch::Sender::new(Wanted::default());
        (Self { session, interval, wanted, readings }, receiver)
    }

    pub(super) fn wishes(&self) -> Wishes {
        Wishes(self.wanted.clone())
    }

    /// Reads until nothing takes the readings.
    pub(super) async fn run(&self) {
        let mut wanted = self.wanted.subscribe();
        loop {
            let began = Instant::now();
            let wish = wanted.borrow_and_update().clone();
            let reading = self.read(&wish).await;
            if self.readings.send(reading).await.is_err() {
                return;
            }
            let next = Instant::now() + self.interval.max(began.elapsed() * PAUSE);
            tokio::select! {
                () = sleep_until(next) => {}
                _ = wanted.changed() => {}
            }
        }
    }

    async fn read(&self, wanted: &Wanted) -> Reading {
        let facts = Box::pin(Facts::read(&CliSite(self.session))).await;
        if let Some(error) = facts.only_error() {
            return Err(error.to_owned());
        }
        let pipelines = facts.pipelines.iter();
        let pipelines: Vec<_> = pipelines
            .filter(|facts| wanted.only.as_ref().is_none_or(|only| *only == facts.name))
            .collect();
        let mut bots = Vec::new();
        for pipelines in pipelines.chunks(CONCURRENT) {
            let reads = pipelines.iter().map(|facts| self.bots(facts, wanted));
            for (facts, views) in pipelines.iter().zip(join_all(reads).await) {
                match views {
                    Ok(views) => {
                        bots.extend(views.into_iter().map(|view| (facts.name.clone(), view)));
                    }
                    Err(error) if error.is_passing() => return Err(error.to_string()),
                    // The other pipelines are shown. `status` says the same about this one.
                    Err(_) => {}
                }
            }
        }
        Ok(Snapshot::new(&facts, bots))
    }

    /// The first bots of a pipeline.
    async fn bots(
        &self,
        facts: &PipelineFacts,
        wanted: &Wanted,
    ) -> Result<Vec<BotView>, RedisError> {
        let takes = |bot: &BotId| bot.as_str().starts_with(&wanted.prefix);
        let (queue, now) = (self.session.view(&facts.name), SystemClock.now());
        let order = match wanted.sort {
            BotSort::Depth => BotOrder::Depth,
            BotSort::Age => BotOrder::Age,
            BotSort::Failing => {
                let failing = facts.failing.iter().flat_map(|failing| &failing.bots);
                let failing: Vec<BotId> =
                    failing.filter(|bot| takes(bot)).take(BOTS).cloned().collect();
                return queue.view_each(&failing, now).await;
            }
        };
        Ok(queue.list_bots(order, None, BOTS, &takes, now).await?.bots)
    }
}
