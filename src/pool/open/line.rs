//! Lines of calls. A call that waits keeps the place of its request, of which a process has a bounded
//! number. So a bounded number of calls waits, and further ones are refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::LeaseError;
use crate::id::BotId;

/// Maximum number of calls for a bot that wait for the one that runs: as many as a receiver makes that
/// extends a lease while it completes it, and repeats calls.
const WAITING_OF_BOT: usize = 7;
/// Minimum number of bots in the map before bots without a call are removed.
const SWEEP_MIN: usize = 64;

/// Some calls run, and others wait in the order of their arrival.
#[derive(Debug)]
pub(super) struct Line {
    /// Places of the calls that run or wait.
    all: Semaphore,
    running: Semaphore,
}

/// The place of a call that runs, until it is dropped.
#[derive(Debug)]
pub(super) struct Place<'a>(
    #[expect(dead_code, reason = "held until it is dropped")] [SemaphorePermit<'a>; 2],
);

impl Line {
    pub(super) fn new(running: usize, waiting: usize) -> Self {
        Self { all: Semaphore::new(running + waiting), running: Semaphore::new(running) }
    }

    /// Waits until the call may run.
    ///
    /// # Errors
    /// As many calls as may wait do so already.
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(super) async fn take(&self) -> Result<Place<'_>, LeaseError> {
        let waits = self.all.try_acquire().map_err(|_| LeaseError::Busy)?;
        // The semaphore is never closed.
        let runs = self.running.acquire().await.map_err(|_| LeaseError::Busy)?;
        Ok(Place([runs, waits]))
    }
}

/// A line per bot: one call runs.
#[derive(Debug, Default)]
pub(super) struct BotLines(Mutex<Bots>);

#[derive(Debug, Default)]
struct Bots {
    lines: HashMap<BotId, Arc<Line>>,
    /// The number of bots at which those without a call are removed next.
    sweep_at: usize,
}

impl BotLines {
    /// The line of a bot. The caller keeps it until its call has ended.
    pub(super) fn of(&self, bot: &BotId) -> Arc<Line> {
        let mut bots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bots.lines.len() >= bots.sweep_at.max(SWEEP_MIN) {
            bots.lines.retain(|_, line| Arc::strong_count(line) > 1);
            bots.sweep_at = 2 * bots.lines.len();
        }
        let line = bots.lines.entry(bot.clone());
        Arc::clone(line.or_insert_with(|| Arc::new(Line::new(1, WAITING_OF_BOT))))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    #[test]
    fn calls_run_one_after_the_other_and_those_above_the_bound_are_refused() {
        let line = Line::new(1, 2);
        let first = line.take().now_or_never().unwrap().unwrap();
        let (mut second, mut third) = (line.take().boxed(), line.take().boxed());
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        let refused = line.take().now_or_never().expect("it does not wait");
        assert!(matches!(refused, Err(LeaseError::Busy)), "{refused:?}");
        drop(first);
        let second = second.now_or_never().expect("its turn").unwrap();
        assert!(third.as_mut().now_or_never().is_none(), "one runs");
        // The turn of a call that was cancelled goes to the next one.
        let mut fourth = line.take().boxed();
        assert!(fourth.as_mut().now_or_never().is_none());
        drop((second, third));
        assert!(fourth.now_or_never().expect("its turn").is_ok());
        assert_eq!((line.all.available_permits(), line.running.available_permits()), (3, 1));
    }

    #[test]
    fn calls_for_one_bot_do_not_wait_for_those_for_another() {
        let lines = BotLines::default();
        let line = lines.of(&bot("a"));
        let _first = line.take().now_or_never().unwrap().unwrap();
        assert!(lines.of(&bot("a")).take().now_or_never().is_none());
        assert!(lines.of(&bot("b")).take().now_or_never().is_some());
    }

    #[test]
    fn bots_without_a_call_are_forgotten() {
        let lines = BotLines::default();
        let held = lines.of(&bot("held"));
        for number in 0..10 * SWEEP_MIN {
            lines.of(&bot(&format!("bot-{number}")));
        }
        let known = lines.0.lock().unwrap().lines.len();
        assert!(known <= SWEEP_MIN, "{known}");
        assert!(Arc::ptr_eq(&held, &lines.of(&bot("held"))));
    }
}
