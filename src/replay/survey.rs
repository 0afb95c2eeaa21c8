//! What a replay would put: counts only, nothing is changed.

use std::collections::HashMap;
use std::time::Duration;

use rustc_hash::FxBuildHasher;
use serde::Serialize;
use tokio::time::Instant;
use utoipa::ToSchema;

use super::{Copied, Place, Replay};
use crate::id::BotId;
use crate::redis::{RedisError, pages};

/// Number of bots that are listed.
const TOP: usize = 10;

/// What a replay would put.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Survey {
    /// Number of events that match.
    pub(crate) events: u64,
    /// Number of their bots.
    pub(crate) bots: u64,
    /// The ten bots with the most of these events.
    pub(crate) top: Vec<OfBot>,
    /// When the first of them was published, ms since 1970.
    pub(crate) first_ms: Option<u64>,
    /// When the last of them was published, ms since 1970.
    pub(crate) last_ms: Option<u64>,
    /// Number of further events that match but are not queued for the first time yet: a replay leaves
    /// them alone, because they are still to be handled.
    pub(crate) not_copied: u64,
    /// Number of entries of the bus that were read.
    pub(crate) entries: u64,
    /// The bus no longer has all entries from before this time, ms since 1970, although the replay asks
    /// for them. `null`: the bus has the whole range.
    pub(crate) gone_until_ms: Option<u64>,
    /// Whether the whole range was read. Otherwise the time of the call was used up.
    pub(crate) complete: bool,
}

/// The events of one bot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct OfBot {
    /// The bot.
    pub(crate) bot: BotId,
    /// Number of its events that match.
    pub(crate) events: u64,
}

impl Replay {
    /// Counts the events from `place` on. Returns where it stopped, if `within` was used up.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn survey(
        &self,
        mut place: Place,
        copied: &Copied,
        within: Option<Duration>,
    ) -> Result<(Survey, Option<Place>), RedisError> {
        let deadline = within.map(|within| Instant::now() + within);
        let mut survey =
            Survey { gone_until_ms: self.gone().await?, complete: true, ..Survey::default() };
        let mut bots: HashMap<BotId, u64, FxBuildHasher> = HashMap::default();
        let mut size = pages::FIRST;
        while !self.is_over(place) {
            let (page, stream) = (self.read(place, size).await?, place.stream);
            (place, size) = (page.next, page.size);
            survey.entries += page.entries;
            for found in page.events {
                if !self.is_copied(copied, stream, &found) {
                    survey.not_copied += 1;
                    continue;
                }
                let (offset, event) = found;
                survey.events += 1;
                survey.first_ms = Some(survey.first_ms.map_or(offset.ms, |ms| ms.min(offset.ms)));
                survey.last_ms = survey.last_ms.max(Some(offset.ms));
                *bots.entry(event.bot().clone()).or_default() += 1;
            }
            if deadline.is_some_and(|deadline| Instant::now() > deadline) && !self.is_over(place) {
                survey.complete = false;
                break;
            }
        }
        survey.bots = bots.len() as u64;
        let mut top: Vec<OfBot> =
            bots.into_iter().map(|(bot, events)| OfBot { bot, events }).collect();
        top.sort_by(|one, other| (other.events, &one.bot).cmp(&(one.events, &other.bot)));
        top.truncate(TOP);
        let next = (!survey.complete).then_some(place);
        Ok((Survey { top, ..survey }, next))
    }

    /// The time before which the streams lack entries of the range.
    async fn gone(&self) -> Result<Option<u64>, RedisError> {
        let mut gone = None;
        for stream in &self.streams {
            let extent = stream.extent().await?;
            // The first entries go first.
            let first = extent.first.map_or(extent.last.ms.saturating_add(1), |first| first.ms);
            if extent.added > extent.length && first > self.spec.from_ms {
                gone = gone.max(Some(first.min(self.spec.until_ms)));
            }
        }
        Ok(gone)
    }
}
