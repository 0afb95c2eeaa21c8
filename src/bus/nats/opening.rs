//! Where reading begins, and what is lost.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::json;
use tracing::warn;

use super::facts::{Facts, missing};
use super::falls;
use super::incarnation::Incarnations;
use super::link::Connected;
use super::reading::{Reading, consumer_name, create, delete};
use super::received::Stored;
use super::{NatsSource, lock};
use crate::bus::BusError;
use crate::bus::source::{Opened, Standing};
use crate::id::Offset;

/// The server deletes a consumer that only finds a sequence after this time.
const FINDER_INACTIVE: std::time::Duration = std::time::Duration::from_secs(5);

impl NatsSource {
    pub(super) async fn begin(&self, from: &[Standing]) -> Result<Vec<Opened>, BusError> {
        self.close().await;
        let standing = match from {
            [] => return Ok(Vec::new()),
            [standing] if standing.log.name == self.log => standing,
            _ => return Err(self.link.refused(format_args!("only {} can be opened", self.log))),
        };
        let connected = self.link.connected().await?;
        let facts = Facts::of(&connected, &self.link).await?;
        let facts = Arc::new(facts.ok_or_else(|| self.link.unknown(missing(&self.link)))?);
        facts.check(&self.link)?;
        // Another process may have found a fall.
        let stream = falls::read(&connected, &self.link, facts.created()).await?;
        let (stream, fallen) = self.find_fall(&connected, &facts, stream, standing).await?;
        let stream = Arc::new(stream);
        self.learn(&facts, &stream);
        let (next, missed) = self.first_to_read(&facts, &stream, standing.lowest);
        let reading =
            Reading::begin(connected.clone(), &self.link, Arc::clone(&stream), next - 1).await?;
        // The consumer could be one of a stream that was made anew meanwhile.
        let now = Facts::of(&connected, &self.link).await?;
        if now.is_none_or(|now| {
            now.created() != facts.created() || now.state.last_seq < facts.state.last_seq
        }) {
            return Err(self.link.unknown("the stream changed while it was opened"));
        }
        self.now_reads(reading);
        let at = stream.reached(next - 1).max(standing.lowest);
        Ok(vec![Opened { at, entries: next - 1, lost: missed + fallen, noted: None }])
    }

    /// The sequence to begin with, and the number of messages that are gone before it.
    fn first_to_read(&self, facts: &Facts, stream: &Incarnations, lowest: Offset) -> (u64, u64) {
        let (next, first) = (stream.next(lowest), facts.first().max(1));
        if lowest == Offset::default() {
            return (next.max(first), 0);
        }
        let trimmed = first.saturating_sub(next.max(facts.base()));
        let former = if lowest.ms < stream.created() {
            // Its last sequence, if this process has seen it; otherwise nobody knows.
            let former = lock(&self.known).former.filter(|(created, _)| *created == lowest.ms);
            former.map_or(1, |(_, last)| last.saturating_sub(lowest.seq))
        } else {
            0
        };
        (next.max(first), trimmed + former)
    }

    /// Finds out whether the stream lost its last messages, and stores that. Returns the number of
    /// messages that are gone and that not every shard has.
    async fn find_fall(
        &self,
        connected: &Connected,
        facts: &Facts,
        stream: Incarnations,
        standing: &Standing,
    ) -> Result<(Incarnations, u64), BusError> {
        let Standing { lowest, highest, .. } = *standing;
        let last = self.last_kept(connected, facts).await?;
        let Some(fall) = stream.unknown_fall(lowest, highest, last) else { return Ok((stream, 0)) };
        let stream = stream.with(fall);
        falls::write(connected, &self.link, &stream).await?;
        let seen = {
            let mut known = lock(&self.known);
            known.read = None;
            let same =
                known.stream.as_ref().is_some_and(|(_, at, _)| at.created() == facts.created());
            let seen = if same { known.highest } else { 0 };
            known.highest = facts.state.last_seq;
            seen
        };
        // What some shards have, and what nobody has read.
        let copied =
            if lowest < highest { highest.seq.saturating_sub(lowest.seq.max(last)) } else { 0 };
        let unread = seen.saturating_sub(highest.seq.max(last));
        warn!(stream = &*self.log, %highest, last, lost = copied + unread,
            "the stream lost its last messages, of which shards have copies; continuing after them");
        Ok((stream, copied + unread))
    }

    /// The last sequence that the stream did not lose since this process has read it. It may have
    /// assigned the sequences of lost messages again before anybody looked.
    async fn last_kept(&self, connected: &Connected, facts: &Facts) -> Result<u64, BusError> {
        #[derive(Deserialize)]
        struct Answer {
            message: Stored,
        }
        let last = facts.state.last_seq;
        let read = lock(&self.known).read.filter(|read| read.created == facts.created());
        let Some(read) = read.filter(|read| read.seq >= facts.first()) else { return Ok(last) };
        if read.seq > last {
            // What is left may be new.
            let first_new = self.first_since(connected, read.time_ns + 1).await?;
            return Ok(first_new.saturating_sub(1).min(last));
        }
        let name = format!("STREAM.MSG.GET.{}", self.link.settings.stream);
        match connected.ask::<Answer>(&name, &json!({ "seq": read.seq })).await? {
            Ok(answer) if answer.message.time_ns() != read.time_ns => {
                let first_new = self.first_since(connected, read.time_ns + 1).await?;
                Ok(first_new.saturating_sub(1).min(last))
            }
            // It is deleted, or the right is missing.
            Ok(_) | Err(_) => Ok(last),
        }
    }

    /// The sequence of the first message at or after this time, in ns since 1970. Without one the
    /// next sequence.
    pub(super) async fn first_since(
        &self,
        connected: &Connected,
        time_ns: u64,
    ) -> Result<u64, BusError> {
        let time = jiff::Timestamp::from_nanosecond(time_ns.into()).unwrap_or(jiff::Timestamp::MAX);
        let start =
            json!({ "deliver_policy": "by_start_time", "opt_start_time": time.to_string() });
        let name = consumer_name();
        let found = create(connected, &self.link, &name, &[], FINDER_INACTIVE, start).await?;
        delete(connected, &self.link, &name).await?;
        Ok(found.delivered.stream_seq + 1)
    }
}
