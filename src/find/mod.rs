//! Where an event is: on the bus, in a queue, delayed, dead, done, or nowhere any more. For operators:
//! a search reads a bounded part of the bus and of each queue, and says what it left out.

mod bus;
mod pipeline;
mod words;

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;
use utoipa::ToSchema;

pub(crate) use self::bus::{OnBus, Searched, Unreadable};
pub(crate) use self::pipeline::{EventState, InPipeline};
use crate::config::PipelineConfig;
use crate::event::Event;
use crate::id::BotId;
use crate::queue::Queue;
use crate::redis::{Link, RedisError};

/// The wanted event.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// Its id.
    pub(crate) id: String,
    /// Its source. `None`: any.
    pub(crate) source: Option<String>,
    /// Its bot. `None`: unknown.
    pub(crate) bot: Option<BotId>,
    /// Entries of the bus before this time are not read, since 1970.
    pub(crate) since: Option<Duration>,
}

/// Where to look.
pub(crate) struct Places<'a> {
    pub(crate) link: &'a Link,
    /// The streams of the bus.
    pub(crate) streams: &'a [String],
    /// The known pipelines, and the settings of the configured ones.
    pub(crate) pipelines: Vec<(Queue, Option<PipelineConfig>)>,
    /// The time, since 1970.
    pub(crate) now: Duration,
    /// The search ends after this time.
    pub(crate) within: Duration,
    /// Whether the caller may see entries that are not events: they may be of any bot.
    pub(crate) sees_all: bool,
}

/// What was found about an event.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Found {
    /// The wanted id.
    pub(crate) id: String,
    /// Whether it was found anywhere.
    pub(crate) known: bool,
    /// Its bot, if known.
    pub(crate) bot: Option<BotId>,
    /// Its entry of the bus.
    pub(crate) bus: Option<OnBus>,
    /// The event, if the bus still has it.
    pub(crate) event: Option<Event>,
    /// Its entry of the stream of entries that cannot be read.
    pub(crate) unreadable: Option<Unreadable>,
    /// Its state in each pipeline that may have had it, by name.
    pub(crate) pipelines: Vec<InPipeline>,
    /// What was read.
    pub(crate) searched: Searched,
}

/// Finds an event.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn find(places: &Places<'_>, wanted: &Wanted) -> Result<Found, RedisError> {
    let deadline = Instant::now() + places.within;
    let (bus, mut searched) = bus::search(places, wanted, deadline).await?;
    let (bus, event) = bus.unzip();
    let bot = event.as_ref().map(|event: &Event| event.bot().clone()).or(wanted.bot.clone());
    let mut unreadable = None;
    if event.is_none() && places.sees_all {
        unreadable = bus::search_unreadable(places.link, &wanted.id, deadline).await?;
    }
    let mut pipelines = Vec::new();
    // The bus may have taken all of the time. What the queues have is told all the same.
    let deadline = Instant::now() + places.within;
    for (queue, config) in &places.pipelines {
        let place = pipeline::Place { queue, config: config.as_ref(), now: places.now, deadline };
        let entry = bus.as_ref().zip(event.as_ref());
        if let Some(bot) = &bot {
            pipelines.extend(place.look(bot, &wanted.id, entry).await?);
        } else if unreadable.is_none() {
            let found = place.look_for_bot(&wanted.id).await?;
            searched.attempts_complete &= found.is_complete();
            pipelines.extend(found.found());
        }
    }
    let bot = bot.or_else(|| pipelines.first().map(|found: &InPipeline| found.bot.clone()));
    let known = event.is_some() || unreadable.is_some() || pipelines.iter().any(InPipeline::known);
    Ok(Found { id: wanted.id.clone(), known, bot, bus, event, unreadable, pipelines, searched })
}
