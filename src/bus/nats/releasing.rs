//! The lag, and the deletion of what is copied.

use std::sync::PoisonError;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;
use tracing::warn;

use super::facts::{Facts, missing};
use super::reading::facts as consumer_facts;
use super::{NatsSource, Open, lock};
use crate::bus::BusError;
use crate::bus::source::{Progress, Released};
use crate::telemetry::PerReason;

/// Interval of deletions.
const TRIM_EVERY: Duration = Duration::from_secs(5);
/// After a question without an answer, the lag is asked for again after this time: reading waits for it.
const LAG_AGAIN: Duration = Duration::from_secs(15);
/// When it was last logged that the server refused to delete, or did not tell the lag.
static REFUSED: PerReason = PerReason::new();

impl NatsSource {
    pub(super) async fn progress(&self, of: &[Progress]) -> Result<Vec<Released>, BusError> {
        let Some(progress) = of.first() else { return Ok(Vec::new()) };
        if lock(&self.lag_failed).is_some_and(|failed| failed.elapsed() < LAG_AGAIN) {
            return Ok(vec![Released::default()]);
        }
        match self.look_back(progress).await {
            Ok(released) => Ok(vec![released]),
            // Reading goes on, and would tell if the connection is broken.
            Err(error @ (BusError::Connect { .. } | BusError::Unknown { .. })) => {
                *lock(&self.lag_failed) = Some(Instant::now());
                if let Some(suppressed) = REFUSED.take("lag") {
                    warn!(stream = &*self.log, %error, suppressed, "the lag is not known now");
                }
                Ok(vec![Released::default()])
            }
            Err(error) => Err(error),
        }
    }

    async fn look_back(&self, progress: &Progress) -> Result<Released, BusError> {
        let open = lock(&self.open).clone();
        let open = open.ok_or_else(|| self.link.unknown("the log is not open"))?;
        let seen = Instant::now();
        let facts = Facts::of(&open.connected, &self.link).await?;
        let moved = |cause: String| BusError::Moved {
            log: self.log.to_string(),
            after: progress.read,
            cause,
        };
        let facts = facts.ok_or_else(|| moved(missing(&self.link)))?;
        if facts.created() != open.stream.created() {
            return Err(moved("the stream was made anew".to_owned()));
        }
        let last = facts.state.last_seq;
        if last < open.fetched.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(moved("the stream lost its last messages".to_owned()));
        }
        if facts.config.num_replicas <= 1 && facts.config.mirror.is_none() {
            // The oldest one counts until a pull has shown that there is nothing before it.
            let mut known = open.last.lock().unwrap_or_else(PoisonError::into_inner);
            if known.is_none_or(|(_, at)| seen.duration_since(at) >= super::SETTLED * 2) {
                *known = Some((last, seen));
            }
        }
        let read = open.stream.next(progress.read) - 1;
        let behind = last.saturating_sub(read);
        let lag = match consumer_facts(&open.connected, &self.link, &open.consumer).await? {
            Some(consumer) => {
                let fetched = consumer.delivered.stream_seq.saturating_sub(read);
                behind.min(consumer.num_pending.saturating_add(fetched))
            }
            None => behind,
        };
        let deleted = self.trim(&open, &facts, progress).await?;
        Ok(Released { lag: Some(lag), deleted, ..Released::default() })
    }

    /// Deletes what every shard has and what is old enough, if that is configured.
    async fn trim(&self, open: &Open, facts: &Facts, to: &Progress) -> Result<u64, BusError> {
        let (Some(age), Some(keep)) = (self.link.settings.trim, to.keep) else { return Ok(0) };
        let now = Instant::now();
        {
            let mut trimmed = lock(&self.trimmed);
            if trimmed.is_some_and(|at| now.duration_since(at) < TRIM_EVERY) {
                return Ok(0);
            }
            *trimmed = Some(now);
        }
        let copied = open.stream.next(to.copied);
        let mut until = open.stream.from(keep).min(copied).min(facts.state.last_seq + 1);
        let old_ms = crate::clock::millis(self.clock.0.now().saturating_sub(age));
        if !age.is_zero() {
            if facts.first_ms() >= i64::try_from(old_ms).unwrap_or(i64::MAX) {
                return Ok(0);
            }
            let young = self.first_since(&open.connected, old_ms.saturating_mul(1_000_000)).await?;
            until = until.min(young);
        }
        if facts.state.messages == 0 || until <= facts.first() {
            return Ok(0);
        }
        self.purge(open, until).await
    }

    /// Deletes all messages before this sequence.
    async fn purge(&self, open: &Open, until: u64) -> Result<u64, BusError> {
        #[derive(Deserialize)]
        struct Purged {
            purged: u64,
        }
        let name = format!("STREAM.PURGE.{}", self.link.settings.stream);
        let refused = match open.connected.ask::<Purged>(&name, &json!({ "seq": until })).await {
            Ok(Ok(Purged { purged })) => return Ok(purged),
            Ok(Err(error)) => error.to_string(),
            Err(BusError::Refused { cause, .. }) => cause,
            Err(error) => return Err(error),
        };
        // Reading goes on.
        if let Some(suppressed) = REFUSED.take("purge") {
            warn!(
                stream = &*self.log,
                error = refused,
                suppressed,
                "copied messages cannot be deleted; permit it, or set `trim` of the source to false"
            );
        }
        Ok(0)
    }
}
