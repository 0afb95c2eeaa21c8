//! How a session begins.

use tracing::error;

use super::super::BusError;
use super::super::source::{Log, Standing};
use super::error::{ReadError, left_out};
use super::session::{OpenLog, Session};
use super::share::Shared;
use super::turn::Turn;
use super::{Reader, end_of};
use crate::fanout::Positions;

impl Reader {
    /// Opens the logs of the share at the lowest positions of the shards.
    pub(super) async fn begin(&self, shared: &Shared) -> Result<(Session, Positions), ReadError> {
        // Also of logs that were known before: the extents must be older than the positions.
        let logs = self.source.logs().await?;
        let logs = logs.into_iter().filter(|log| shared.reads(&log.name));
        let (logs, unknown): (Vec<Log>, Vec<Log>) = logs.partition(|log| log.unknown.is_none());
        let left_out = unknown.first().map(left_out);
        self.share.leaves_out(unknown.into_iter().map(|log| log.name).collect());
        if let (Some(error), true) = (&left_out, logs.is_empty()) {
            return Err(error.clone().into());
        }
        let ends: Vec<_> = logs.iter().map(end_of).collect();
        let positions = self.fanout.positions(&ends).await.map_err(BusError::from)?;
        self.share.waits(positions.waiting().to_vec());
        let known = self.turns.known(&logs, &positions);
        let lasts = logs.iter().map(|log| log.last).collect();
        let (turn, positions) = Turn::new(&self.turns, lasts, positions);
        let standing = |(place, log): (usize, Log)| Standing {
            lowest: positions.lowest(place).unwrap_or(log.last),
            highest: positions.highest(place).unwrap_or(log.last),
            log,
        };
        let standing: Vec<_> = logs.into_iter().enumerate().map(standing).collect();
        let opened = self.source.open(&standing).await?;
        let mut open = Vec::with_capacity(standing.len());
        let known = known.into_iter();
        for ((Standing { log, lowest, .. }, opened), known) in
            standing.iter().zip(opened).zip(known)
        {
            let one = OpenLog { known, ..OpenLog::new(log, opened, *lowest) };
            if opened.lost > 0 {
                one.metrics.gap.increment(1);
                error!(log = &*log.name, start = %lowest, first = ?log.first, missing = opened.lost,
                    "the stream was trimmed beyond what was read: events are missing");
            }
            open.push(one);
        }
        let mut session = Session { left_out, ..Session::new(open, turn) };
        session.turn.opens();
        if session.turn.leaves_out() {
            // Nothing is deleted now. But a round of such sessions may take long, and after a long break it
            // would not be known which pipelines are run.
            let _ = self.fanout.look().await;
            return Ok((session, positions));
        }
        // Releases now: a full Redis lets no session reach its first checkpoint.
        let keeps = self.keeps(&positions, &session).await?;
        self.release(&mut session, &keeps).await?;
        Ok((session, positions))
    }
}
