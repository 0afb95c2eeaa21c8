//! Turns for decisions that take long: those of a bot whose rules need much time of a processor.
//!
//! A decision does not wait for anything, so it keeps its thread from all other tasks of the process.
//! A bot whose last decision was long therefore decides on a thread of its own, with a low priority:
//! the system interrupts it as soon as something else of the machine has to run. Only some bots do
//! that concurrently, and all of them in turn, one event at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashSet;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::id::BotId;

/// A longer decision is a long one. A thread of its own costs some 50 µs.
const LONG: Duration = Duration::from_millis(1);
/// After a decision that takes longer, other tasks of the thread run first.
const BRIEF: Duration = Duration::from_micros(100);
/// The niceness of their threads: beside others, they get about a tenth of a processor.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;
/// Maximum number of bots that are remembered.
const BOTS_MAX: usize = 1_024;

/// The bots with long decisions, and the turns for these.
#[derive(Debug)]
pub(super) struct Heavy {
    bots: Mutex<FxHashSet<BotId>>,
    turns: Semaphore,
}

impl Heavy {
    /// Leaves at least half of the processors, rounded up, to others.
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { bots: Mutex::default(), turns: Semaphore::new((processors / 2).max(1)) }
    }

    fn bots(&self) -> MutexGuard<'_, FxHashSet<BotId>> {
        self.bots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on one event of the bot. `None`: there was no turn for it until `until`.
    pub(super) async fn decide<T: Send>(
        &self,
        bot: &BotId,
        until: Instant,
        decide: impl FnOnce() -> T + Send,
    ) -> Option<T> {
        let was_long = self.bots().contains(bot);
        let turn = if was_long {
            let turn = tokio::time::timeout_at(until, self.turns.acquire()).await.ok()?;
            turn.ok() // The semaphore is never closed.
        } else {
            None
        };
        let begun = Instant::now();
        let decided = if was_long { beside_the_runtime(decide) } else { decide() };
        drop(turn);
        let took = begun.elapsed();
        let is_long = took > LONG;
        if is_long != was_long {
            let mut bots = self.bots();
            if is_long {
                if bots.len() >= BOTS_MAX {
                    bots.clear();
                }
                bots.insert(bot.clone());
            } else {
                bots.remove(bot);
            }
        }
        if took > BRIEF {
            tokio::task::yield_now().await;
        } else {
            tokio::task::consume_budget().await;
        }
        Some(decided)
    }
}

/// Runs `decide` on a thread of its own, while other threads continue the tasks of this one. Compared to
/// a long decision, a new thread costs little; and only a thread that ends can have a low priority,
/// because a process without privileges may not raise it again.
fn beside_the_runtime<T: Send>(decide: impl FnOnce() -> T + Send) -> T {
    let beside = || at_low_priority(decide);
    if can_leave_the_runtime() { tokio::task::block_in_place(beside) } else { beside() }
}

/// Runs `work` on a thread of its own with a low priority, and waits for it.
pub(crate) fn at_low_priority<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let (mut work, mut done) = (Some(work), None);
    let run = || {
        lower_priority();
        done = work.take().map(|work| work());
    };
    let joined = std::thread::scope(|threads| {
        let thread = std::thread::Builder::new().spawn_scoped(threads, run).ok()?;
        Some(thread.join())
    });
    if let Some(Err(panic)) = joined {
        std::panic::resume_unwind(panic);
    }
    // If the system had no thread left, the work runs here, and delays others more.
    let done = done.or_else(|| work.map(|work| work()));
    let Some(done) = done else { unreachable!("one of the two ran") };
    done
}

/// Without it, the thread only delays others more.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
}

/// Whether other threads continue the tasks of this one.
fn can_leave_the_runtime() -> bool {
    Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    fn bot(name: usize) -> BotId {
        BotId::parse(&format!("bot-{name}")).unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn few_long_decisions_run_concurrently_and_short_ones_do_not_wait_for_them() {
        let (heavy, running, most) = (Heavy::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        let long = async |name: usize| {
            let bot = bot(name);
            let decide = || {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                std::thread::sleep(LONG * 4);
                running.fetch_sub(1, Ordering::SeqCst);
            };
            heavy.decide(&bot, soon(), decide).await.unwrap();
        };
        for name in 0..4 {
            long(name).await; // From now on it is known.
        }
        most.store(0, Ordering::SeqCst);
        join_all((0..4).map(&long)).await;
        assert!(most.load(Ordering::SeqCst) <= heavy.turns.available_permits());
        let turns = u32::try_from(heavy.turns.available_permits()).unwrap();
        let all = heavy.turns.acquire_many(turns).await.unwrap();
        assert_eq!(heavy.decide(&bot(9), soon(), || 7).await, Some(7), "it needs no turn");
        assert_eq!(heavy.decide(&bot(0), Instant::now() + LONG, || 7).await, None);
        drop(all);
        assert_eq!(heavy.bots().len(), 4);
        // On a busy machine, a decision without work can take long too.
        let (until, mut left) = (soon(), true);
        while left && Instant::now() < until {
            heavy.decide(&bot(0), soon(), || ()).await.unwrap();
            left = heavy.bots().contains(&bot(0));
        }
        assert!(!left, "its last decision was short");
    }

    #[tokio::test]
    async fn a_runtime_with_one_thread_decides_too_and_a_bounded_number_of_bots_is_remembered() {
        let heavy = Heavy::new();
        *heavy.bots() = (0..BOTS_MAX).map(bot).collect();
        for _ in 0..2 {
            let decide = || std::thread::sleep(LONG * 4);
            heavy.decide(&bot(BOTS_MAX), soon(), decide).await.unwrap();
        }
        assert_eq!(heavy.bots().len(), 1);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_long_decision_has_a_low_priority_and_its_runtime_keeps_its_own() {
        let niceness = || rustix::process::getpriority_process(Some(rustix::thread::gettid()));
        let (heavy, own) = (Heavy::new(), niceness().unwrap());
        let decide = || {
            std::thread::sleep(LONG * 2);
            niceness().unwrap()
        };
        assert_eq!(heavy.decide(&bot(1), soon(), decide).await, Some(own), "it is not known yet");
        assert_eq!(heavy.decide(&bot(1), soon(), decide).await, Some(own.max(NICENESS)));
        assert_eq!(niceness().unwrap(), own);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    #[should_panic(expected = "as it was")]
    async fn a_panic_of_a_long_decision_is_the_panic_of_its_caller() {
        let heavy = Heavy::new();
        heavy.decide(&bot(1), soon(), || std::thread::sleep(LONG * 2)).await.unwrap();
        let _ = heavy.decide(&bot(1), soon(), || panic!("as it was")).await;
    }
}
