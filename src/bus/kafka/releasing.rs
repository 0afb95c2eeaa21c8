//! Commits how far the partitions are copied, for other tools, and finds out the lag.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use super::counting::Next;
use super::position::{Committed, next};
use super::{FAILED, KafkaSource, Partition, lock};
use crate::bus::BusError;
use crate::bus::source::{Progress, Released};
use crate::id::Offset;

/// Offsets are committed again after this time even if they stay: brokers forget them after days.
const COMMIT_AGAIN: Duration = Duration::from_secs(3_600);

/// What is to be committed.
pub(super) struct Mark {
    pub(super) partition: Partition,
    /// The offset of the next entry.
    pub(super) next: i64,
    pub(super) metadata: String,
}

impl KafkaSource {
    /// What is to be committed of these logs.
    fn marks(&self, progress: &[Progress]) -> Vec<Mark> {
        let logs = lock(&self.logs);
        let mut marks = Vec::new();
        for Progress { log, copied, keep, .. } in progress {
            let Some(keep) = keep else { continue };
            let Some(log) = logs.iter().find(|open| open.name == *log) else { continue };
            // The entry at `keep` is still needed, and is one before Kafka's number of it.
            let until = (*copied).min(Offset { ms: keep.ms, seq: keep.seq.saturating_sub(1) });
            if until.ms != log.incarnation {
                continue;
            }
            let next = next(until);
            let due = log.committed.is_none_or(|(committed, since)| {
                committed != next || since.elapsed() >= COMMIT_AGAIN
            });
            if let Some(newest_ms) = log.newest_ms
                && due
            {
                let metadata = Committed::metadata(log.incarnation, newest_ms);
                marks.push(Mark { partition: log.partition.clone(), next, metadata });
            }
        }
        marks
    }

    /// Commits in the background. What cannot be committed is tried again by the next call.
    async fn commit(&self, progress: &[Progress]) -> Result<(), BusError> {
        let marks = self.marks(progress);
        if marks.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let marked: Vec<_> = marks.iter().map(|mark| (mark.partition.clone(), mark.next)).collect();
        self.asker().await?.commit(marks).await?;
        for log in lock(&self.logs).iter_mut() {
            if let Some((_, next)) =
                marked.iter().find(|(partition, _)| *partition == log.partition)
            {
                log.committed = Some((*next, now));
            }
        }
        Ok(())
    }

    /// Reading does not end because of what only tools and operators look at.
    pub(super) async fn progress(&self, progress: &[Progress]) -> Result<Vec<Released>, BusError> {
        if let Err(error) = self.commit(progress).await
            && let Some(suppressed) = FAILED.take("commit")
        {
            warn!(source = self.settings.name, %error, suppressed, "cannot commit offsets");
        }
        let partitions: Vec<_> = progress
            .iter()
            .map(|progress| {
                let log = &progress.log;
                self.partition(log).ok_or_else(|| self.refused(format!("{log} is no log of it")))
            })
            .collect::<Result<_, _>>()?;
        let nexts = self.nexts(&partitions).await;
        let failed = lock(&self.failed).clone();
        // Of the topics that are not read, the first log tells.
        let mut forbidden = lock(&self.problem).clone();
        let released = nexts.into_iter().zip(progress).zip(&partitions);
        let released = released.map(|((end, progress), partition)| {
            let behind = |end: i64| end.saturating_sub(next(progress.read));
            let (lag, waits) = match end {
                Next::At(end) => (Some(u64::try_from(behind(end)).unwrap_or(0)), None),
                Next::Unknown => (None, None),
                Next::Waits(error) => (None, Some(error)),
            };
            let failed = failed.iter().find(|(of, _)| of == partition);
            let problem = failed.map(|(_, error)| error.clone()).or(waits);
            let problem = problem.or_else(|| forbidden.take());
            Released { lag, deleted: 0, entries: None, problem }
        });
        Ok(released.collect())
    }
}
