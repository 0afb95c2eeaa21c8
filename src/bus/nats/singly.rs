//! Messages that the client cannot parse.
//!
//! Any producer can store a message whose headers the client cannot parse: then the client gives up the
//! connection. After two such losses at one place, the next messages are read one by one by calls of the
//! API, whose answers can be read in any case. Many of them often follow each other, so this lasts
//! until a number of usual messages have followed.

use serde::Deserialize;
use serde_json::json;

use super::reading::{BATCH_BYTES_MAX, Reading};
use super::received::{Messages, Received, Stored};
use super::{NatsSource, lock};
use crate::bus::BusError;
use crate::id::Offset;

/// A message that breaks the connection this many times is read by a call of the API.
const BREAKS: u32 = 2;
/// After such a message, this many usual ones are read so too.
const CALM: u32 = 64;
/// Maximum number of messages of one fetch.
const FETCH_MAX: usize = 64;

/// How often the connection broke at the next message.
#[derive(Debug, Default)]
pub(super) struct Breaks {
    after: Offset,
    count: u32,
    /// Number of usual messages that are still read one by one.
    singly: u32,
}

impl Breaks {
    pub(super) fn broke(&mut self, after: Offset) {
        self.count = if self.after == after { self.count + 1 } else { 1 };
        self.after = after;
    }

    /// Whether the message behind `after` is read by itself.
    fn is_single(&self, after: Offset) -> bool {
        self.singly > 0 || self.is_stuck(after)
    }

    fn is_stuck(&self, after: Offset) -> bool {
        self.after == after && self.count >= BREAKS
    }

    /// The message behind `after` is read.
    fn passed(&mut self, after: Offset, is_usual: bool) {
        let usual = is_usual && !self.is_stuck(after);
        self.singly = if usual { self.singly.saturating_sub(1) } else { CALM };
        self.count = 0;
    }
}

impl NatsSource {
    /// Reads the next messages one by one, if the connection broke there. `None`: the consumer goes on.
    pub(super) async fn read_singly(
        &self,
        reading: &Reading,
        max: usize,
    ) -> Result<Option<Messages>, BusError> {
        let (mut at, mut bytes) = (reading.at, 0);
        let mut received: Vec<Received> = Vec::new();
        while received.len() < max.min(FETCH_MAX) && bytes < BATCH_BYTES_MAX {
            let after = reading.stream.reached(at);
            if !lock(&self.breaks).is_single(after) {
                break;
            }
            let Some(next) = self.read_one(reading, at).await? else {
                // The consumer waits for the next one.
                lock(&self.breaks).singly = 0;
                break;
            };
            lock(&self.breaks).passed(after, next.is_parsable());
            (at, bytes) = (next.seq, bytes + next.len());
            received.push(next);
        }
        let Some(last) = received.last() else { return Ok(None) };
        self.check_gaps(reading, reading.at, &received).await?;
        self.has_read(&reading.stream, last);
        self.close().await;
        let (connected, stream) = (reading.connected.clone(), reading.stream.clone());
        let again = Reading::begin(connected, &self.link, stream, at).await?;
        let messages = self.messages(&again.stream, received, at);
        self.now_reads(again);
        Ok(Some(messages))
    }

    /// Reads the message behind `at`.
    async fn read_one(&self, reading: &Reading, at: u64) -> Result<Option<Received>, BusError> {
        #[derive(Deserialize)]
        struct Answer {
            message: Stored,
        }
        let every = [">".to_owned()];
        let subjects = match self.link.settings.subjects.as_slice() {
            [] => &every,
            subjects => subjects,
        };
        let name = format!("STREAM.MSG.GET.{}", self.link.settings.stream);
        let mut next: Option<Received> = None;
        for subject in subjects {
            let body = json!({ "seq": at + 1, "next_by_subj": subject });
            // Without such a message, or without the right, the consumer goes on.
            let Ok(answer) = reading.connected.ask::<Answer>(&name, &body).await? else { continue };
            let found = Received::stored(answer.message);
            if next.as_ref().is_none_or(|next| found.seq < next.seq) {
                next = Some(found);
            }
        }
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seq: u64) -> Offset {
        Offset { ms: 1, seq }
    }

    #[test]
    fn messages_are_read_singly_until_usual_ones_have_followed() {
        let mut breaks = Breaks::default();
        assert!(!breaks.is_single(at(0)), "nothing broke");
        breaks.broke(at(4));
        assert!(!breaks.is_single(at(4)));
        breaks.broke(at(4));
        assert!(breaks.is_single(at(4)) && !breaks.is_single(at(5)));
        // The reason may not show.
        breaks.passed(at(4), true);
        for seq in 5..5 + u64::from(CALM) {
            assert!(breaks.is_single(at(seq)), "{seq}");
            breaks.passed(at(seq), true);
        }
        assert!(!breaks.is_single(at(99)));
        breaks.broke(at(99));
        breaks.broke(at(99));
        breaks.passed(at(99), false);
        breaks.passed(at(100), true);
        breaks.passed(at(101), false);
        assert_eq!(breaks.singly, CALM, "another one begins anew");
    }
}
