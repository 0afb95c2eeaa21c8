//! One attempt, and how it ended.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Ids;

/// Maximum length of an answer and of a reason, in bytes.
const TEXT_MAX: usize = 512;
/// Maximum length of the id of an event that is kept, in bytes.
const ID_MAX: usize = 256;

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttemptResult {
    /// All its events are done.
    Done,
    /// Some of its events are done; the others are tried again.
    Partial,
    /// The handler failed; the events are tried again.
    Failed,
    /// The handler took longer than `handler_timeout`; the events are tried again.
    Timeout,
    /// A store or target is unavailable. The bot is parked, and no attempt is counted.
    Unavailable,
    /// At least one of its events became a dead letter.
    Dead,
    /// The lease ended before the handler did. Another worker hands the events out again.
    LeaseLost,
    /// A receiver answered 202, and completes the lease later.
    Accepted,
}

impl AttemptResult {
    /// Its name in the API and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Partial => "partial",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
            Self::Dead => "dead",
            Self::LeaseLost => "lease_lost",
            Self::Accepted => "accepted",
        }
    }

    /// Whether it is kept with the failures.
    #[must_use]
    pub fn is_failure(self) -> bool {
        !matches!(self, Self::Done | Self::Accepted)
    }
}

/// One attempt at a slice, or several consecutive ones that were done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attempt {
    /// When its handler started, ms since 1970.
    pub time_ms: u64,
    /// How long its handler ran, µs; of several slices: their sum. `null`: a receiver reported the end
    /// of its lease, and `time_ms` is the time of the report.
    pub duration_us: Option<u64>,
    /// How it ended.
    pub result: AttemptResult,
    /// The number of the attempt at its first event, from 1.
    pub attempt: u32,
    /// Number of workers that vanished while they handled that event.
    pub lost: u32,
    /// Number of slices: above 1 only if they are done.
    pub slices: u32,
    /// Number of events.
    pub events: u32,
    /// Number of events that left the queue.
    pub settled: u32,
    /// The id of the first event, up to 256 bytes.
    pub first_id: String,
    /// The id of the last event, up to 256 bytes.
    pub last_id: String,
    /// The sequence of the first event.
    pub first_sequence: u64,
    /// The sequence of the last event.
    pub last_sequence: u64,
    /// The status code of the receiver.
    pub status: Option<u16>,
    /// Why it is not done, up to 512 bytes.
    pub reason: Option<String>,
    /// The start of the answer of the receiver, up to 512 bytes, if it is not done.
    pub answer: Option<String>,
    /// How long the events rest before the next attempt, ms.
    pub retry_ms: Option<u64>,
    /// The process that ran it: its machine and process id.
    pub process: String,
    /// Its events, to find the attempts of one.
    #[serde(skip)]
    #[schema(ignore)]
    pub(crate) ids: Ids,
}

impl Attempt {
    /// Adds the slice that followed, if both are done.
    pub(super) fn join(&mut self, next: &Self) -> bool {
        let joins = self.result == AttemptResult::Done
            && next.result == AttemptResult::Done
            && self.status == next.status
            && next.attempt == 1
            && self.last_sequence < next.first_sequence
            && self.ids.join(&next.ids);
        if joins {
            let took = self.duration_us.zip(next.duration_us);
            self.duration_us = took.map(|(one, other)| one.saturating_add(other));
            self.slices += next.slices;
            self.events = self.events.saturating_add(next.events);
            self.settled = self.settled.saturating_add(next.settled);
            self.last_id.clone_from(&next.last_id);
            self.last_sequence = next.last_sequence;
        }
        joins
    }

    /// When it ended, ms since 1970.
    #[must_use]
    pub fn end_ms(&self) -> u64 {
        self.time_ms.saturating_add(self.duration_us.unwrap_or_default() / 1_000)
    }

    /// Whether it is an attempt at the event with this id. Of a slice of more than 512 events, only the
    /// first and the last one are known.
    #[must_use]
    pub fn concerns(&self, id: &str) -> bool {
        self.ids.contain(id) || [&self.first_id, &self.last_id].contains(&&kept_id(id))
    }
}

/// The id of an event as it is kept.
pub(crate) fn kept_id(id: &str) -> String {
    cut(id, ID_MAX)
}

/// An answer or a reason as it is kept.
pub(crate) fn kept_text(text: &str) -> String {
    cut(text, TEXT_MAX)
}

/// The start of a text, up to this number of bytes.
fn cut(text: &str, bytes: usize) -> String {
    let end = (0..=bytes.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    text[..end.unwrap_or_default()].to_owned()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A slice of one event that is done.
    pub(in crate::history) fn done(sequence: u64) -> Attempt {
        Attempt {
            time_ms: 1_000 + sequence,
            duration_us: Some(10),
            result: AttemptResult::Done,
            attempt: 1,
            lost: 0,
            slices: 1,
            events: 1,
            settled: 1,
            first_id: format!("e{sequence}"),
            last_id: format!("e{sequence}"),
            first_sequence: sequence,
            last_sequence: sequence,
            status: None,
            reason: None,
            answer: None,
            retry_ms: None,
            process: "host 1".to_owned(),
            ids: Ids::of([format!("e{sequence}").as_str()].into_iter()),
        }
    }

    #[test]
    fn slices_that_are_done_share_a_note() {
        let mut first = done(1);
        assert!(first.join(&done(2)));
        assert_eq!((first.slices, first.events, first.duration_us), (2, 2, Some(20)));
        assert_eq!((first.first_id.as_str(), first.last_id.as_str()), ("e1", "e2"));
        assert!(first.concerns("e1") && first.concerns("e2") && !first.concerns("e3"));
        let other = |change: fn(&mut Attempt)| {
            let mut next = done(3);
            change(&mut next);
            next
        };
        for next in [
            other(|next| next.result = AttemptResult::Failed),
            other(|next| next.attempt = 2),
            other(|next| next.status = Some(200)),
            other(|next| next.first_sequence = 2),
        ] {
            assert!(!first.clone().join(&next), "{next:?}");
        }
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(kept_text(&"x".repeat(600)).len(), 512);
        assert_eq!(kept_text(&"é".repeat(400)), "é".repeat(256));
        assert_eq!(kept_id(&"i".repeat(1_000)).len(), 256);
    }
}
