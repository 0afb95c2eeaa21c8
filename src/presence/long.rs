//! The bots whose slices take long, so that operators see which process handles them. A slice counts
//! once its lease is renewed for the first time, so usual slices cost nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::id::{BotId, PipelineName};

/// Maximum number of slices that a process reports: those that run for longest.
pub(super) const REPORTED_MAX: usize = 20;

/// A slice that takes long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongSlice {
    /// Its pipeline.
    pub pipeline: PipelineName,
    /// Its bot.
    pub bot: BotId,
    /// When it started, ms since 1970.
    pub since_ms: u64,
}

/// The slices of one pipeline that take long, in one process.
#[derive(Debug, Clone, Default)]
pub struct Long(Arc<Mutex<BTreeMap<BotId, u64>>>);

/// Ends the note when it is dropped.
#[derive(Debug)]
pub struct Noted(Long, BotId);

impl Long {
    /// Notes a slice, until the result is dropped.
    #[must_use]
    pub fn note(&self, bot: &BotId, since_ms: u64) -> Noted {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(bot.clone(), since_ms);
        Noted(self.clone(), bot.clone())
    }

    /// The slices, in no order.
    pub(super) fn of(&self, pipeline: &PipelineName) -> Vec<LongSlice> {
        let noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let slice = |(bot, since_ms): (&BotId, &u64)| LongSlice {
            pipeline: pipeline.clone(),
            bot: bot.clone(),
            since_ms: *since_ms,
        };
        noted.iter().map(slice).collect()
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_known_until_it_ends() {
        let (long, bot) = (Long::default(), BotId::parse("b").unwrap());
        let pipeline = PipelineName::parse("p").unwrap();
        let noted = long.note(&bot, 7);
        let expected = LongSlice { pipeline: pipeline.clone(), bot, since_ms: 7 };
        assert_eq!(long.of(&pipeline), [expected]);
        drop(noted);
        assert_eq!(long.of(&pipeline), []);
    }
}
