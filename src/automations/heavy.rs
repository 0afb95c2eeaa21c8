//! Turns for decisions that take long: those of a bot whose rules need much time of a processor.
//!
//! A decision does not wait for anything, so it keeps its thread from all other tasks of the process.
//! A decision that may be long is therefore made on a thread of its own, with a low priority: the system
//! interrupts it as soon as something else of the machine has to run. So are all decisions of its bot for
//! a while after a long one. Only some bots do that concurrently, and all of them in turn, one event at a
//! time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::id::BotId;

/// A decision that needs a processor for longer is a long one. A thread of its own costs some 50 µs.
const LONG: Duration = Duration::from_millis(1);
/// How long a long decision is remembered. Short ones in between do not end that: otherwise a bot could
/// alternate.
const REMEMBERED: Duration = Duration::from_secs(10);
/// After a decision that takes longer, other tasks of the thread run first.
const BRIEF: Duration = Duration::from_micros(100);
/// The niceness of their threads: beside others, they get about a tenth of a processor.
#[cfg(target_os = "linux")]
const NICENESS: i32 = 10;
/// Maximum number of bots that are remembered.
const BOTS_MAX: usize = 4_096;

/// The bots with long decisions, and the turns for these.
#[derive(Debug)]
pub(super) struct Heavy {
    /// The end of the last long decision of each.
    bots: Mutex<FxHashMap<BotId, Instant>>,
    turns: Semaphore,
}

impl Heavy {
    /// Leaves at least half of the processors, rounded up, to others.
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { bots: Mutex::default(), turns: Semaphore::new((processors / 2).max(1)) }
    }

    fn bots(&self) -> MutexGuard<'_, FxHashMap<BotId, Instant>> {
        self.bots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the bot had a long decision lately.
    fn is_heavy(&self, bot: &BotId) -> bool {
        let mut bots = self.bots();
        let Some(last) = bots.get(bot) else { return false };
        let is_heavy = last.elapsed() < REMEMBERED;
        if !is_heavy {
            bots.remove(bot);
        }
        is_heavy
    }

    fn remember(&self, bot: &BotId) {
        let mut bots = self.bots();
        if bots.len() >= BOTS_MAX && !bots.contains_key(bot) {
            // Bots with many long decisions stay.
            let oldest = bots.iter().min_by_key(|(_, last)| **last).map(|(bot, _)| bot.clone());
            if let Some(oldest) = oldest {
                bots.remove(&oldest);
            }
        }
        bots.insert(bot.clone(), Instant::now());
    }

    /// Decides on one event of the bot. `None`: there was no turn for it until `until`. A decision that may
    /// be long takes a turn even if it is the first one of its bot: a tenant has any number of bots.
    pub(super) async fn decide<T: Send>(
        &self,
        bot: &BotId,
        until: Instant,
        may_be_long: bool,
        decide: impl FnOnce() -> T + Send,
    ) -> Option<T> {
        let is_heavy = may_be_long || self.is_heavy(bot);
        let turn = if is_heavy {
            let turn = tokio::time::timeout_at(until, self.turns.acquire()).await.ok()?;
            turn.ok() // The semaphore is never closed.
        } else {
            None
        };
        let begun = Instant::now();
        let decide = || measured(decide);
        let (decided, needed) = if is_heavy { beside_the_runtime(decide) } else { decide() };
        drop(turn);
        if needed > LONG {
            self.remember(bot);
        }
        let took = begun.elapsed();
        if took > BRIEF {
            tokio::task::yield_now().await;
        } else {
            tokio::task::consume_budget().await;
        }
        Some(decided)
    }
}

/// Runs `decide`. Returns also how long it needed a processor: on a busy machine, a short decision can
/// take long.
fn measured<T>(decide: impl FnOnce() -> T) -> (T, Duration) {
    let begun = processor_time();
    let decided = decide();
    (decided, processor_time().saturating_sub(begun))
}

/// How long this thread has had a processor.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
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

    /// Needs a processor for so long.
    fn work(long: Duration) {
        let begun = processor_time();
        while processor_time().saturating_sub(begun) < long {}
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn few_long_decisions_run_concurrently_and_short_ones_do_not_wait_for_them() {
        let (heavy, running, most) = (Heavy::new(), AtomicUsize::new(0), AtomicUsize::new(0));
        let long = async |name: usize| {
            let bot = bot(name);
            let decide = || {
                let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                most.fetch_max(now, Ordering::SeqCst);
                work(LONG * 4);
                running.fetch_sub(1, Ordering::SeqCst);
            };
            heavy.decide(&bot, soon(), false, decide).await.unwrap();
        };
        for name in 0..4 {
            long(name).await; // From now on it is known.
        }
        most.store(0, Ordering::SeqCst);
        join_all((0..4).map(&long)).await;
        assert!(most.load(Ordering::SeqCst) <= heavy.turns.available_permits());
        let turns = u32::try_from(heavy.turns.available_permits()).unwrap();
        let all = heavy.turns.acquire_many(turns).await.unwrap();
        assert_eq!(heavy.decide(&bot(9), soon(), false, || 7).await, Some(7), "it needs no turn");
        assert_eq!(heavy.decide(&bot(0), Instant::now() + LONG, false, || 7).await, None);
        assert_eq!(heavy.decide(&bot(9), Instant::now() + LONG, true, || 7).await, None);
        drop(all);
        assert_eq!(heavy.bots().len(), 4);
        let last = Instant::now().checked_sub(REMEMBERED).unwrap();
        heavy.bots().insert(bot(0), last);
        let all = heavy.turns.acquire_many(turns).await.unwrap();
        assert_eq!(heavy.decide(&bot(0), soon(), false, || 7).await, Some(7), "that was long ago");
        drop(all);
        assert_eq!(heavy.bots().len(), 3);
    }

    #[tokio::test]
    async fn a_runtime_with_one_thread_decides_too_and_a_bounded_number_of_bots_is_remembered() {
        let heavy = Heavy::new();
        *heavy.bots() = (0..BOTS_MAX).map(|name| (bot(name), Instant::now())).collect();
        let earlier = Instant::now().checked_sub(REMEMBERED / 2).unwrap();
        heavy.bots().insert(bot(7), earlier);
        for _ in 0..2 {
            let decide = || work(LONG * 4);
            heavy.decide(&bot(BOTS_MAX), soon(), false, decide).await.unwrap();
        }
        let bots = heavy.bots();
        assert_eq!(bots.len(), BOTS_MAX);
        assert!(
            !bots.contains_key(&bot(7)) && bots.contains_key(&bot(8)),
            "the oldest is forgotten"
        );
    }

    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_long_decision_has_a_low_priority_and_its_runtime_keeps_its_own() {
        let niceness = || rustix::process::getpriority_process(Some(rustix::thread::gettid()));
        let (heavy, own) = (Heavy::new(), niceness().unwrap());
        let decide = || {
            work(LONG * 2);
            niceness().unwrap()
        };
        let first = heavy.decide(&bot(1), soon(), false, decide).await;
        assert_eq!(first, Some(own), "it is not known yet");
        let second = heavy.decide(&bot(1), soon(), false, decide).await;
        assert_eq!(second, Some(own.max(NICENESS)));
        assert_eq!(niceness().unwrap(), own);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn the_first_decision_of_a_bot_has_a_low_priority_if_it_may_be_long() {
        let niceness = || rustix::process::getpriority_process(Some(rustix::thread::gettid()));
        let (heavy, own) = (Heavy::new(), niceness().unwrap());
        let decide = || niceness().unwrap();
        let first = heavy.decide(&bot(1), soon(), true, decide).await;
        assert_eq!(first, Some(own.max(NICENESS)));
        assert_eq!(heavy.decide(&bot(1), soon(), false, decide).await, Some(own), "it was short");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_bot_with_long_and_short_decisions_keeps_its_low_priority() {
        let niceness = || rustix::process::getpriority_process(Some(rustix::thread::gettid()));
        let (heavy, own) = (Heavy::new(), niceness().unwrap());
        for (long, expected) in
            [(LONG * 2, own), (Duration::ZERO, own.max(NICENESS)), (LONG * 2, own.max(NICENESS))]
        {
            let decide = || {
                work(long);
                niceness().unwrap()
            };
            assert_eq!(heavy.decide(&bot(1), soon(), false, decide).await, Some(expected));
        }
        // Without work, a decision is short, however long it takes.
        let wait = || std::thread::sleep(LONG * 4);
        heavy.decide(&bot(2), soon(), false, wait).await.unwrap();
        assert!(!heavy.is_heavy(&bot(2)));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    #[should_panic(expected = "as it was")]
    async fn a_panic_of_a_long_decision_is_the_panic_of_its_caller() {
        let heavy = Heavy::new();
        heavy.decide(&bot(1), soon(), false, || work(LONG * 2)).await.unwrap();
        let _ = heavy.decide(&bot(1), soon(), false, || panic!("as it was")).await;
    }
}
