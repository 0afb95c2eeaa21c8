//! What a session notes and tells the bus: once a second, at its start, and at its end.

use tokio::time::Instant;
use tracing::{debug, error};

use super::super::BusError;
use super::error::ReadError;
use super::session::Session;
use super::{KEEP, Reader};
use crate::fanout::Positions;
use crate::id::Offset;
use crate::redis::scripts::Note;
use crate::redis::{Link, RedisError, keys};

impl Reader {
    /// Updates the lag, moves idle shards forward, notes the positions, and releases the entries.
    pub(super) async fn checkpoint(
        &self,
        session: &mut Session,
        positions: &mut Positions,
    ) -> Result<(), ReadError> {
        // No copy is in progress, so all shards have the same positions.
        let logs = session.logs.iter().enumerate();
        let moved = logs.filter(|(_, log)| Some(log.copied.0) != log.checkpointed);
        let moved: Vec<_> = moved.map(|(place, log)| (place, log.copied.0)).collect();
        if !moved.is_empty() {
            self.fanout.checkpoint(&moved, positions).await?;
        }
        if session.turn.leaves_out() {
            // What is noted is read for all shards.
            for (place, offset) in moved {
                session.logs[place].checkpointed = Some(offset);
            }
            session.checkpointed = Instant::now();
            return Ok(());
        }
        let keeps = if session.kept.elapsed() >= KEEP {
            session.kept = Instant::now();
            self.keeps(positions, session).await?
        } else {
            vec![None; session.logs.len()]
        };
        let problem = self.release(session, &keeps).await?.or_else(|| session.left_out.clone());
        self.watch.fails_partly(problem.as_ref());
        if let Some(error) = problem
            && let Some(suppressed) = self.partial.take()
        {
            error!(bus = self.bus(), %error, suppressed, "a part of the bus cannot be read");
        }
        if !self.share.is_held() {
            // Another process may have noted later positions. The next checkpoint notes these, if not.
            session.checkpointed = Instant::now();
            return Ok(());
        }
        let read: Vec<_> = moved
            .iter()
            .map(|(place, _)| keys::read(self.link.prefix(), &session.logs[*place].name))
            .collect();
        let notes: Vec<_> = moved
            .iter()
            .zip(&read)
            .map(|(&(place, offset), key)| Note {
                key,
                offset,
                entries: session.logs[place].copied.1,
                lag: session.logs[place].lag,
            })
            .collect();
        let written = note(&self.link, &notes).await?;
        for ((place, offset), is_written) in moved.into_iter().zip(written) {
            if is_written {
                session.logs[place].checkpointed = Some(offset);
            }
        }
        session.checkpointed = Instant::now();
        Ok(())
    }

    /// Tells the bus how far its logs are copied, and shows how much is not read yet. Returns why a part of
    /// the bus cannot be read, if that is so.
    pub(super) async fn release(
        &self,
        session: &mut Session,
        keeps: &[Option<Offset>],
    ) -> Result<Option<BusError>, ReadError> {
        let progress: Vec<_> =
            session.logs.iter().zip(keeps).map(|(log, keep)| log.progress(*keep)).collect();
        let released = self.source.release(&progress).await?;
        let lags = released.iter().map(|released| released.lag);
        if let Some(lag) = total(lags.zip(session.logs.iter().map(|log| log.lag))) {
            self.watch.lags(lag);
        }
        let mut problem = None;
        for (log, released) in session.logs.iter_mut().zip(released) {
            problem = problem.or(released.problem);
            if let Some(entries) = released.entries {
                log.entries = entries;
                if log.copied.0 == log.end {
                    log.copied.1 = entries;
                }
            }
            if let Some(lag) = released.lag {
                log.lag = Some(lag);
                #[expect(clippy::cast_precision_loss, reason = "a count of entries in memory")]
                log.metrics.lag.set(lag as f64);
            }
            log.metrics.trimmed.increment(released.deleted);
        }
        Ok(problem)
    }
}

/// Notes read positions; returns which are written. In a cluster, the server of a note may be unavailable
/// alone: the next checkpoint tries it again.
async fn note(link: &Link, notes: &[Note<'_>]) -> Result<Vec<bool>, RedisError> {
    let is_written = |reply: Result<(), RedisError>| match reply {
        Err(error) if error.is_passing() => {
            debug!(%error, "a read position is not noted");
            Ok(false)
        }
        reply => reply.map(|()| true),
    };
    match link.call_all(notes).await {
        Ok(replies) => replies.into_iter().map(is_written).collect(),
        Err(error) => is_written(Err(error)).map(|written| vec![written; notes.len()]),
    }
}

/// How much is not read yet, of the lags now and before. Of a log whose lag is not known now, the last one
/// counts. `None` if none is known now: then all the last ones are shown.
fn total(mut lags: impl Iterator<Item = (Option<u64>, Option<u64>)> + Clone) -> Option<u64> {
    let sum = lags.clone().filter_map(|(now, before)| now.or(before)).sum();
    lags.any(|(now, _)| now.is_some()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::Queue;

    #[tokio::test]
    async fn a_note_whose_server_is_unavailable_is_written_later() {
        let queue = Queue::unreachable("p", 1);
        let of = |key| Note { key, offset: Offset::default(), entries: 7, lag: None };
        let written = note(queue.link(), &[of("a"), of("b")]).await;
        assert_eq!(written.unwrap(), [false, false]);
        assert_eq!(note(queue.link(), &[]).await.unwrap(), [false; 0]);
    }

    #[test]
    fn a_lag_that_is_not_known_keeps_no_other_from_being_shown() {
        let of = |lags: &[(Option<u64>, Option<u64>)]| total(lags.iter().copied());
        assert_eq!(of(&[(Some(3), Some(9)), (Some(4), None)]), Some(7));
        assert_eq!(of(&[(Some(3), Some(9)), (None, Some(5)), (None, None)]), Some(8));
        assert_eq!(of(&[(None, Some(9)), (None, Some(5))]), None);
        assert_eq!(of(&[]), None, "nothing is read");
    }
}
