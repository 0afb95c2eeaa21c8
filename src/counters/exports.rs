//! Allows one export at a time. A client that reads nothing must not block the next export forever.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// An export whose client reads nothing for this long gives way to the next one.
const STALLED: Duration = Duration::from_secs(30);

/// Another export has taken the turn.
#[derive(Debug, thiserror::Error)]
#[error("its client read nothing for {STALLED:?}, and another export started")]
pub(crate) struct Overtaken;

/// Grants turns to exports, one at a time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Exports(Arc<Mutex<Latest>>);

#[derive(Debug, Default)]
struct Latest {
    /// Number of exports so far.
    number: u64,
    /// When the client last read data; `None`: the export has ended.
    moved: Option<Instant>,
}

impl Exports {
    /// A turn, unless another export has it.
    pub(crate) fn begin(&self) -> Option<Turn> {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.moved.is_some_and(|moved| moved.elapsed() < STALLED) {
            return None;
        }
        latest.number += 1;
        latest.moved = Some(Instant::now());
        Some(Turn { exports: self.clone(), number: latest.number })
    }
}

/// The right to export. It ends when it is dropped, or when another export starts because the
/// client stalled.
#[derive(Debug)]
pub(crate) struct Turn {
    exports: Exports,
    number: u64,
}

impl Turn {
    /// Records that the client has read all data so far.
    pub(crate) fn go_on(&self) -> Result<(), Overtaken> {
        let mut latest = self.exports.0.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.number != self.number {
            return Err(Overtaken);
        }
        latest.moved = Some(Instant::now());
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut latest = self.exports.0.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.number == self.number {
            latest.moved = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_export_runs_at_a_time_and_one_whose_client_stalls_gives_way() {
        let exports = Exports::default();
        let first = exports.begin().unwrap();
        assert!(exports.begin().is_none());
        drop(first);
        let second = exports.begin().unwrap();
        tokio::time::advance(STALLED / 2).await;
        second.go_on().unwrap();
        tokio::time::advance(STALLED / 2).await;
        assert!(exports.begin().is_none(), "it went on meanwhile");
        tokio::time::advance(STALLED / 2).await;
        let third = exports.begin().unwrap();
        assert!(matches!(second.go_on(), Err(Overtaken)));
        drop(second);
        assert!(exports.begin().is_none(), "what was overtaken ends nobody else's turn");
        third.go_on().unwrap();
    }
}
