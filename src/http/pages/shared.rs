//! What pages show of the whole, read once for all viewers.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{FutureExt as _, OptionFuture, TryFutureExt as _};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::super::Api;
use super::super::auth::Caller;
use super::super::pipelines::{Pipeline, all};
use super::super::problem::{Kind, Problem};
use super::lines::Range;
use crate::clock::millis;
use crate::id::PipelineName;
use crate::presence::{self, BusView, Process};
use crate::problems::fullest;
use crate::queue::{BotOrder, BotView};
use crate::redis::{ServerInfo, StreamView};
use crate::trend::{self, Point, Series};

/// Maximum age of the shown data, regardless of the number of viewers.
const FRESH: Duration = Duration::from_millis(1_500);
/// Interval between two searches for the busiest bots.
const BUSIEST_FRESH: Duration = Duration::from_secs(5);
/// Number of busiest bots shown.
const BUSIEST: usize = 10;
/// With more bots than this in a pipeline, ranking them for the overview is too expensive.
const RANKED_MAX: u64 = 50_000;
/// The points of the last 24 hours change every minute.
const MINUTES_FRESH: Duration = Duration::from_secs(15);

/// The part that every token sees.
pub(crate) struct Overview {
    pub(super) pipelines: Vec<Pipeline>,
    /// The last 15 minutes.
    pub(super) trend: Arc<Vec<Point>>,
    pub(super) processes: Vec<Process>,
    pub(super) redis: ServerInfo,
    /// The Redis stream that events are published to, if any.
    pub(super) bus: Option<StreamView>,
    /// The buses beside Redis.
    pub(super) buses: Vec<BusView>,
    pub(super) now_ms: u64,
}

/// The longest queues among the bots of the caller.
pub(crate) struct Busiest {
    pub(super) bots: Vec<(PipelineName, BotView)>,
    /// Pipelines with too many bots to rank.
    pub(super) left_out: Vec<PipelineName>,
    pub(super) now_ms: u64,
}

/// A read for all pages that show it. It is locked while it is read.
pub(super) type Slot<T> = Arc<Mutex<Option<Kept<T>>>>;

/// A result, and until when it is shown.
type Kept<T> = (Instant, Arc<T>);

/// The content of a slot, at most `fresh` old, or as old as reading it takes.
///
/// # Cancel safety
/// The read goes on, so with a slow Redis a later page has it.
async fn kept<T, R>(
    slot: &Slot<T>,
    fresh: Duration,
    read: impl FnOnce() -> R,
) -> Result<Arc<T>, Problem>
where
    T: Send + Sync + 'static,
    R: Future<Output = Result<T, Problem>> + Send + 'static,
{
    // While another page reads it, this one waits. If that read fails, this one tries.
    let mut kept = Arc::clone(slot).lock_owned().await;
    if let Some((until, known)) = &*kept
        && Instant::now() < *until
    {
        return Ok(Arc::clone(known));
    }
    let (reading, begun) = (read(), Instant::now());
    #[expect(clippy::disallowed_methods, reason = "a page need not wait for it")]
    let reading = tokio::spawn(async move {
        let known = Arc::new(reading.await?);
        let until = Instant::now() + fresh.max(begun.elapsed());
        *kept = Some((until, Arc::clone(&known)));
        Ok(known)
    });
    reading.await.unwrap_or_else(|ended| match ended.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(_) => Err(Problem::new(Kind::Unavailable, "the process stops")),
    })
}

impl Api {
    /// The part that every token sees.
    pub(super) async fn overview(self: &Arc<Self>) -> Result<Arc<Overview>, Problem> {
        let api = Arc::clone(self);
        kept(&self.live.overview, FRESH, || async move { api.read_overview().await }).await
    }

    async fn read_overview(&self) -> Result<Overview, Problem> {
        let link = self.queues.link();
        let pipelines = async {
            let processes = presence::processes(link).await?;
            Ok::<_, Problem>((all(self, &processes).await?, processes))
        };
        // `None`: events are published to another bus.
        let stream = self.streams.iter().find(|stream| *stream == self.bus.name());
        let bus = OptionFuture::from(stream.map(|stream| StreamView::read(link, stream)));
        // Side by side: with a slow Redis, one after the other would exceed the limit of the page.
        let ((pipelines, processes), trend, redis, bus) = tokio::try_join!(
            pipelines,
            trend::read(link, Series::Recent).map_err(Problem::from),
            fullest(link).map_err(Problem::from),
            bus.map(|bus| bus.transpose().map_err(Problem::from)),
        )?;
        Ok(Overview {
            pipelines,
            trend: Arc::new(trend),
            buses: self.buses.iter().map(|bus| BusView::of(bus, &processes)).collect(),
            processes,
            redis,
            bus,
            now_ms: millis(self.clock.now()),
        })
    }

    /// The points of the charts of a time span.
    pub(super) async fn trend(
        self: &Arc<Self>,
        overview: &Overview,
        range: Range,
    ) -> Result<Arc<Vec<Point>>, Problem> {
        if range.series() == Series::Recent {
            return Ok(Arc::clone(&overview.trend));
        }
        let api = Arc::clone(self);
        let read = || async move {
            trend::read(api.queues.link(), Series::Minutes).await.map_err(Problem::from)
        };
        kept(&self.live.minutes, MINUTES_FRESH, read).await
    }

    /// The longest queues among the bots that the caller may see.
    pub(super) async fn busiest(
        self: &Arc<Self>,
        caller: &Caller,
        overview: &Arc<Overview>,
    ) -> Result<Arc<Busiest>, Problem> {
        let (api, of, overview) = (Arc::clone(self), caller.clone(), Arc::clone(overview));
        let read = || async move { api.read_busiest(&of, &overview).await };
        kept(&self.live.busiest(caller.name()), BUSIEST_FRESH, read).await
    }

    async fn read_busiest(&self, caller: &Caller, overview: &Overview) -> Result<Busiest, Problem> {
        let _turn = self.live.rankings.acquire().await;
        let is_ranked = |Pipeline { view, .. }: &&Pipeline| {
            view.ready + view.leased + view.parked + view.paused <= RANKED_MAX
        };
        let (ranked, left_out): (Vec<_>, Vec<_>) = overview.pipelines.iter().partition(is_ranked);
        let wanted = |bot: &crate::id::BotId| caller.covers(bot);
        let mut bots = Vec::new();
        // One after the other: each listing has several calls side by side.
        for of in ranked {
            if of.view.depth == 0 {
                continue;
            }
            let (queue, now) = (self.queues.of(&of.name), self.clock.now());
            let page = queue.list_bots(BotOrder::Depth, None, BUSIEST, &wanted, now).await?;
            bots.extend(page.bots.into_iter().map(|bot| (of.name.clone(), bot)));
        }
        let left_out = left_out.into_iter().map(|of| of.name.clone()).collect();
        bots.retain(|(_, bot)| bot.depth > 0);
        bots.sort_by_key(|(_, bot)| std::cmp::Reverse(bot.depth));
        bots.truncate(BUSIEST);
        Ok(Busiest { bots, left_out, now_ms: millis(self.clock.now()) })
    }
}
