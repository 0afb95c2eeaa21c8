//! The state of an event in one pipeline.

use std::time::Duration;

use redis::Value;
use serde::Serialize;
use tokio::time::Instant;
use utoipa::ToSchema;

use super::OnBus;
use crate::config::PipelineConfig;
use crate::event::Event;
use crate::expression::{Facts, Filter, Glob, Sees};
use crate::history::{Attempt, AttemptResult};
use crate::id::{BotId, Lane, LetterId, Offset, PipelineName};
use crate::queue::{BotState, Queue, Search};
use crate::redis::{RedisError, Reply, keys};

/// The start of the reasons of dead letters that were too old.
const TOO_OLD: [&str; 2] = ["its expirytime has passed", "it is older than max_age"];

/// Where an event is in a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EventState {
    /// The pipeline is disabled, or has left the configuration.
    Disabled,
    /// The pipeline takes no events of this type.
    OtherType,
    /// The filter of the pipeline excludes it.
    FilteredOut,
    /// It was published before the pipeline started to read the bus.
    BeforeStart,
    /// It is on the bus and not copied yet.
    OnBus,
    /// It waits in the queue of its bot, or is being handled.
    Waiting,
    /// Its bot rests: in backoff, waiting to batch, or without tokens.
    Parked,
    /// Its bot or its pipeline is paused.
    Paused,
    /// It is at the head of the queue, and a handler has it.
    InFlight,
    /// It is delayed until its due time.
    Delayed,
    /// It became a dead letter.
    Dead,
    /// It was too old, and became a dead letter.
    Expired,
    /// It was handled.
    Done,
    /// It was copied and has left the queue; no attempt at it is kept. It was handled, or dropped or
    /// purged, or the pipeline did not want it for its bot.
    Left,
    /// It is not among the first events that were read.
    Unknown,
}

/// An event in a pipeline.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct InPipeline {
    /// The pipeline.
    pub(crate) pipeline: PipelineName,
    /// The bot.
    pub(crate) bot: BotId,
    /// Where it is.
    pub(crate) state: EventState,
    /// Its place in the queue, from 1.
    pub(crate) place: Option<u64>,
    /// The number of queued events of the bot.
    pub(crate) depth: Option<u64>,
    /// When it was handled, is due, became a dead letter, or when its bot is handed out again, ms since
    /// 1970.
    pub(crate) time_ms: Option<u64>,
    /// Why it is a dead letter, or is tried again.
    pub(crate) reason: Option<String>,
    /// Its dead letter.
    #[schema(value_type = Option<String>)]
    pub(crate) letter: Option<LetterId>,
    /// The attempts at it that are kept, the newest first.
    pub(crate) attempts: Vec<Attempt>,
}

impl InPipeline {
    /// Whether the pipeline knows the event.
    pub(super) fn known(&self) -> bool {
        !matches!(
            self.state,
            EventState::Disabled
                | EventState::OtherType
                | EventState::FilteredOut
                | EventState::BeforeStart
                | EventState::Unknown
                | EventState::Left
        )
    }
}

/// A pipeline to look into.
pub(super) struct Place<'a> {
    pub(super) queue: &'a Queue,
    pub(super) config: Option<&'a PipelineConfig>,
    /// The time, since 1970.
    pub(super) now: Duration,
    /// What is not found until then is unknown.
    pub(super) deadline: Instant,
}

impl Place<'_> {
    /// The state of an event of `bot`. `None`: nothing is known of it here. `entry`: its entry of the
    /// bus, if it is still there.
    pub(super) async fn look(
        &self,
        bot: &BotId,
        id: &str,
        entry: Option<(&OnBus, &Event)>,
    ) -> Result<Option<InPipeline>, RedisError> {
        let attempts = self.queue.attempts_at(bot, id).await?;
        let mut found = InPipeline {
            pipeline: self.queue.name().clone(),
            bot: bot.clone(),
            state: EventState::Unknown,
            place: None,
            depth: None,
            time_ms: None,
            reason: None,
            letter: None,
            attempts,
        };
        let queued = self.queue.place_of(bot, None, id, self.deadline).await?;
        let complete = queued.is_complete();
        if let Search::Found(place) = queued {
            self.queued(&mut found, place).await?;
            return Ok(Some(found));
        }
        let aside = self.among_set_aside(bot, id).await?;
        let complete = complete && aside.is_complete();
        if aside.found().is_some() {
            self.queued(&mut found, 0).await?;
            (found.state, found.place) = (EventState::Parked, None);
            return Ok(Some(found));
        }
        let letter = self.queue.letter_of(bot, id, self.deadline).await?;
        let complete = complete && letter.is_complete();
        if let Some(letter) = letter.found() {
            let too_old = TOO_OLD.iter().any(|start| letter.reason.starts_with(start));
            found.state = if too_old { EventState::Expired } else { EventState::Dead };
            (found.time_ms, found.letter) = (Some(letter.time_ms), Some(letter.id));
            found.reason = Some(letter.reason);
            return Ok(Some(found));
        }
        let due = self.queue.due_of(bot, id, self.deadline).await?;
        let complete = complete && due.is_complete();
        if let Some(due) = due.found() {
            (found.state, found.time_ms) = (EventState::Delayed, Some(due));
            return Ok(Some(found));
        }
        // It may also be where the search did not get to: after a failed attempt it is tried again.
        if let Some(last) = found.attempts.first().filter(|_| complete) {
            let took_ms = last.duration_us.unwrap_or_default() / 1_000;
            found.time_ms = Some(last.time_ms + took_ms);
            found.state = left_after(last);
            return Ok(Some(found));
        }
        let Some((on_bus, event)) = entry else {
            return Ok((!complete).then_some(found));
        };
        found.state = self.of_entry(bot, on_bus, event, complete).await?;
        Ok(Some(found))
    }

    /// Completes what is known of a queued event.
    async fn queued(&self, found: &mut InPipeline, place: u64) -> Result<(), RedisError> {
        let view = self.queue.view_bot(&found.bot, self.now).await?;
        (found.place, found.depth) = (Some(place + 1), Some(view.depth));
        found.state = match view.state {
            BotState::Paused => EventState::Paused,
            BotState::Parked => EventState::Parked,
            BotState::Leased if place == 0 => EventState::InFlight,
            BotState::Leased | BotState::Ready | BotState::Idle => EventState::Waiting,
        };
        if view.state == BotState::Parked {
            found.time_ms = view.until_ms;
        }
        if self.is_stopped(&found.bot).await? {
            found.state = EventState::Paused;
        }
        found.reason = self.queue.last_failure(&view).await?.map(|failure| failure.reason);
        Ok(())
    }

    /// Whether the whole pipeline is paused.
    async fn is_stopped(&self, bot: &BotId) -> Result<bool, RedisError> {
        let shard = self.queue.keys(self.queue.shard_of(bot));
        let command = redis::Cmd::hget(shard.meta(), "paused");
        let paused = self.queue.link().command("HGET", command).await?;
        Ok(!matches!(paused, Value::Nil))
    }

    /// Searches the lists of the lanes that are set aside.
    async fn among_set_aside(&self, bot: &BotId, id: &str) -> Result<Search<()>, RedisError> {
        let mut search = Search::Absent;
        if self.queue.view_bot(bot, self.now).await?.set_aside == 0 {
            return Ok(search);
        }
        for lane in Lane::all() {
            match self.queue.place_of(bot, Some(lane), id, self.deadline).await? {
                Search::Found(_) => return Ok(Search::Found(())),
                Search::Unknown => search = Search::Unknown,
                Search::Absent => {}
            }
        }
        Ok(search)
    }

    /// The state of an event that is on the bus and nowhere in the pipeline.
    async fn of_entry(
        &self,
        bot: &BotId,
        on_bus: &OnBus,
        event: &Event,
        complete: bool,
    ) -> Result<EventState, RedisError> {
        let Some(config) = self.config.filter(|config| config.enabled) else {
            return Ok(EventState::Disabled);
        };
        if !config.events.iter().any(|glob| Glob::new(glob).matches(event.kind())) {
            return Ok(EventState::OtherType);
        }
        if config.filter.as_deref().is_some_and(|filter| excludes(filter, event)) {
            return Ok(EventState::FilteredOut);
        }
        let (link, stream) = (self.queue.link(), on_bus.stream.as_str());
        let shard = self.queue.keys(self.queue.shard_of(bot));
        let start =
            redis::Cmd::hget(keys::starts(link.prefix(), stream), self.queue.name().as_str());
        let start = self.offset(link.command("HGET", start).await?)?;
        if start.is_some_and(|start| on_bus.offset <= start) {
            return Ok(EventState::BeforeStart);
        }
        let copied = redis::Cmd::hget(&shard.offsets, stream);
        let copied = self.offset(link.command("HGET", copied).await?)?;
        Ok(match copied {
            Some(copied) if on_bus.offset <= copied && complete => EventState::Left,
            Some(copied) if on_bus.offset <= copied => EventState::Unknown,
            _ => EventState::OnBus,
        })
    }

    fn offset(&self, value: Value) -> Result<Option<Offset>, RedisError> {
        let text = Reply::single(value).and_then(|mut reply| reply.bytes());
        let text = text.map_err(|source| self.queue.link().misread("HGET", source))?;
        Ok(text.and_then(|text| String::from_utf8_lossy(&text).parse().ok()))
    }

    /// Looks for an event whose bot is unknown: among the dead letters and the attempts of all bots.
    pub(super) async fn look_for_bot(&self, id: &str) -> Result<Search<InPipeline>, RedisError> {
        let by_attempt = self.queue.bot_of_attempt(id, self.deadline).await?;
        let complete = by_attempt.is_complete();
        let bot = match by_attempt.found() {
            Some(bot) => Search::Found(bot),
            None => self.queue.bot_of_letter(id, self.deadline).await?,
        };
        match bot {
            Search::Found(bot) => {
                let found = self.look(&bot, id, None).await?;
                Ok(found.map_or(Search::Absent, Search::Found))
            }
            Search::Absent if complete => Ok(Search::Absent),
            Search::Absent | Search::Unknown => Ok(Search::Unknown),
        }
    }
}

/// The state of an event that is nowhere any more, after the last attempt at it.
fn left_after(last: &Attempt) -> EventState {
    match last.result {
        AttemptResult::Done | AttemptResult::Partial | AttemptResult::Accepted => EventState::Done,
        // Another event of the slice has the dead letter, or it was dropped.
        AttemptResult::Dead if last.events > 1 => EventState::Done,
        AttemptResult::Dead => EventState::Dead,
        // It was purged, or dropped by another version.
        _ => EventState::Left,
    }
}

/// Whether the filter excludes the event. A filter that cannot be evaluated matches nothing.
fn excludes(filter: &str, event: &Event) -> bool {
    let Ok(filter) = Filter::compile(filter, Sees::Event) else { return false };
    !Facts::of(event).and_then(|facts| filter.matches(&facts)).unwrap_or(false)
}
