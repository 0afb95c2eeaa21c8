//! Copy first: while the bus is far behind, bots gather events before they are claimed. A visit of a
//! bot costs the same for one event and for ten, so a backlog drains faster, and all events behind it
//! are handled sooner.
//!
//! If hardly a bot of the backlog has more than one event, waiting gains nothing. Then each copy leases
//! its bots at once, as without a backlog: their events need no claim and no read.
//!
//! ```text
//! idle ── a copy is late, more is available ─▶ deferring ── caught up, in time, or enough ─▶ working
//!   ▲                                              │                                       ▲    │
//!   │                              one event a bot └─▶ sparse ── caught up, or few leases ─┘    │
//!   └────────────────────────── the pool finds nobody ready ◀───────────────────────────────────┘
//! ```
//!
//! Only the process that reads the bus knows that it is behind. It tells the others while it defers, so
//! that they leave the bots alone, too. What it tells holds for a moment only: it may vanish.

use std::hash::BuildHasher as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxBuildHasher;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::id::BotId;
use crate::queue::Queue;

/// Events that are less late are never deferred.
const LATE: Duration = Duration::from_millis(200);
/// From this lateness on there is a true backlog, and claims are deferred for up to twice the lateness of
/// the first event; below, for up to its lateness. The copy of a backlog takes about as long as its
/// events were added, and all of it should be copied before the first claim.
const BACKLOG: Duration = Duration::from_millis(500);
/// Claims are never deferred for longer than this.
const MAX: Duration = Duration::from_secs(5);
/// When this number of bytes is copied, the bots are claimed: queues need more memory than the bus.
const BYTES_MAX: usize = 256 << 20;
/// Number of events that show how many events a bot has.
const SAMPLE: usize = 32_768;
/// After this number of copies in a row that got few leases, the backlog is not sparse any more. A single
/// one only shows that places were short for a moment.
const POOR_MAX: u32 = 8;
/// Interval at which other processes are told of a deferral.
const TELL: Duration = Duration::from_millis(200);
/// For how long that holds.
const HOLDS: Duration = Duration::from_millis(500);
/// The bots of a sample are counted with this number of bits.
const BITS: usize = 1 << 18;

/// Counts the different bots among events, almost exactly: of the bits that random numbers select, the
/// share that is not selected tells how many numbers there were.
#[derive(Debug)]
struct Sample {
    bits: Vec<u64>,
    events: usize,
}

impl Sample {
    fn new() -> Self {
        Self { bits: vec![0; BITS / 64], events: 0 }
    }

    fn add(&mut self, bot: &BotId) {
        let bit = usize::try_from(FxBuildHasher.hash_one(bot) >> 32).unwrap_or(0) % BITS;
        self.bits[bit / 64] |= 1 << (bit % 64);
        self.events += 1;
    }

    /// Whether the sample is large enough, and only one event in 50 is not the first of its bot.
    #[expect(clippy::cast_precision_loss, reason = "counts below 2^20")]
    fn is_sparse(&self) -> bool {
        let set: u32 = self.bits.iter().map(|word| word.count_ones()).sum();
        let bots = -(BITS as f64) * (1.0 - f64::from(set) / BITS as f64).ln();
        bots > self.events as f64 * 0.98
    }
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    Deferring {
        until: Instant,
        bytes: usize,
        sample: Sample,
    },
    Working,
    Sparse {
        /// Number of copies in a row that got few leases.
        poor: u32,
    },
}

/// The deferral of the claims of one pool.
#[derive(Debug, Default)]
pub(super) struct Deferral {
    state: Mutex<State>,
    /// Until when another process defers, as far as it told.
    other: Mutex<Option<Instant>>,
    ended: Notify,
    /// A deferral of this process began or ended.
    turned: Notify,
}

impl Deferral {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn other(&self) -> MutexGuard<'_, Option<Instant>> {
        self.other.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a deferral of this process, or what it became.
    fn end(&self, state: &mut State, next: State) {
        *state = next;
        self.ended.notify_one();
        self.turned.notify_one();
    }

    /// Notes a copy of this number of bytes whose last event is this `late`, with more available.
    /// `bots`: of each event. `brief`: whether handlers take so little time that sparse events may be
    /// leased, if known.
    pub(super) fn behind<'a>(
        &self,
        late: Duration,
        bytes: usize,
        bots: impl Iterator<Item = &'a BotId>,
        brief: Option<bool>,
    ) {
        let mut state = self.state();
        if matches!(*state, State::Idle) && late >= LATE {
            let wait = if late >= BACKLOG { late * 2 } else { late };
            let (until, sample) = (Instant::now() + wait.min(MAX), Sample::new());
            *state = State::Deferring { until, bytes: 0, sample };
            self.turned.notify_one();
        }
        match &mut *state {
            State::Deferring { bytes: copied, sample, .. } => {
                *copied += bytes;
                let judged = sample.events >= SAMPLE;
                if !judged {
                    bots.for_each(|bot| sample.add(bot));
                }
                if late < LATE || *copied > BYTES_MAX {
                    self.end(&mut state, State::Working);
                } else if brief != Some(false)
                    && !judged
                    && sample.events >= SAMPLE
                    && sample.is_sparse()
                {
                    self.end(&mut state, State::Sparse { poor: 0 });
                }
            }
            State::Sparse { .. } if brief == Some(false) => *state = State::Working,
            State::Sparse { .. } | State::Idle | State::Working => {}
        }
    }

    /// Notes entries of other pipelines whose last one is this `late`: the copies are hardly late any more.
    pub(super) fn passed(&self, late: Duration) {
        let mut state = self.state();
        if late < LATE && matches!(*state, State::Deferring { .. }) {
            self.end(&mut state, State::Working);
        }
    }

    /// Whether copies should lease although more entries are available.
    pub(super) fn is_sparse(&self) -> bool {
        matches!(*self.state(), State::Sparse { .. })
    }

    /// Notes that a copy while sparse asked for leases, and how many it got.
    pub(super) fn leased(&self, asked: usize, got: usize) {
        let mut state = self.state();
        let State::Sparse { poor } = &mut *state else { return };
        *poor = if got < asked / 2 { *poor + 1 } else { 0 };
        if *poor >= POOR_MAX {
            *state = State::Working;
        }
    }

    /// Ends the deferral: no more entries are available, or the copier ended.
    pub(super) fn caught_up(&self) {
        let mut state = self.state();
        if matches!(*state, State::Deferring { .. } | State::Sparse { .. }) {
            self.end(&mut state, State::Working);
        }
    }

    /// Until when claims are deferred, but at most until `deadline`: the end of a lease or park is not
    /// deferred.
    pub(super) fn until(&self, deadline: Option<Instant>) -> Option<Instant> {
        let mut state = self.state();
        let until = match *state {
            State::Deferring { until, .. } => until,
            State::Idle => (*self.other())?,
            State::Working | State::Sparse { .. } => return None,
        };
        let until = deadline.map_or(until, |deadline| until.min(deadline));
        if until <= Instant::now() {
            if matches!(*state, State::Deferring { .. }) {
                self.end(&mut state, State::Working);
            }
            return None;
        }
        Some(until)
    }

    /// Notes that another process defers for this long, or not any more. What this process knows itself
    /// counts more.
    pub(super) fn heard(&self, holds: Duration) {
        let is_over = holds.is_zero();
        *self.other() = (!is_over).then(|| Instant::now() + holds.min(HOLDS));
        if is_over {
            self.ended.notify_one();
        }
    }

    /// Tells the other processes of the deferrals of this one. Never returns.
    pub(super) async fn tell(&self, queue: &Queue) {
        loop {
            self.turned.notified().await;
            while matches!(*self.state(), State::Deferring { .. }) {
                queue.tell_deferral(HOLDS).await;
                tokio::select! {
                    () = self.turned.notified() => {}
                    () = tokio::time::sleep(TELL) => {}
                }
            }
            queue.tell_deferral(Duration::ZERO).await;
        }
    }

    /// Returns when a deferral ends before its time.
    pub(super) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// The pool found nobody ready.
    pub(super) fn drained(&self) {
        let mut state = self.state();
        if matches!(*state, State::Working) {
            *state = State::Idle;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn behind(deferral: &Deferral, late: Duration, bytes: usize) {
        deferral.behind(late, bytes, std::iter::empty(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_of_other_pipelines_end_a_deferral_once_they_are_hardly_late() {
        let deferral = Deferral::default();
        deferral.passed(SECOND);
        assert_eq!(deferral.until(None), None, "none of its own events waits");
        behind(&deferral, SECOND, 1);
        deferral.passed(LATE);
        assert!(deferral.until(None).is_some());
        deferral.passed(LATE.saturating_sub(Duration::from_millis(1)));
        assert_eq!(deferral.until(None), None);
    }

    #[tokio::test(start_paused = true)]
    async fn late_events_wait_at_most_twice_as_long_again_and_a_bounded_time() {
        for (late, wait) in [(LATE, LATE), (SECOND, 2 * SECOND), (60 * SECOND, MAX)] {
            let deferral = Deferral::default();
            behind(&deferral, late, 1);
            assert_eq!(deferral.until(None), Some(Instant::now() + wait));
            behind(&deferral, late + SECOND, 1);
            assert_eq!(deferral.until(None), Some(Instant::now() + wait), "not prolonged");
            tokio::time::advance(wait).await;
            assert_eq!(deferral.until(None), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn events_that_are_hardly_late_never_wait() {
        let deferral = Deferral::default();
        behind(&deferral, LATE / 2, 1);
        assert_eq!(deferral.until(None), None);
        behind(&deferral, SECOND, 1);
        behind(&deferral, LATE / 2, 1);
        assert_eq!(deferral.until(None), None);
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_when_all_is_copied_at_a_deadline_and_when_much_is_copied() {
        let ends: [fn(&Deferral) -> Option<Instant>; 3] = [
            |deferral| {
                deferral.caught_up();
                deferral.until(None)
            },
            |deferral| deferral.until(Some(Instant::now())),
            |deferral| {
                behind(deferral, SECOND, BYTES_MAX);
                deferral.until(None)
            },
        ];
        for end in ends {
            let deferral = Deferral::default();
            behind(&deferral, SECOND, 1);
            assert!(deferral.until(None).is_some());
            assert_eq!(end(&deferral), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_deferral_of_another_process_holds_until_it_ends_or_is_not_repeated() {
        let deferral = Deferral::default();
        deferral.heard(MAX);
        assert_eq!(deferral.until(None), Some(Instant::now() + HOLDS));
        assert_eq!(deferral.until(Some(Instant::now())), None, "the end of a lease");
        deferral.heard(Duration::ZERO);
        assert_eq!(deferral.until(None), None);

        deferral.heard(HOLDS);
        tokio::time::advance(HOLDS).await;
        assert_eq!(deferral.until(None), None, "the other process vanished");

        // A process that reads itself knows better.
        behind(&deferral, SECOND, 1);
        deferral.caught_up();
        deferral.heard(HOLDS);
        assert_eq!(deferral.until(None), None);
    }

    /// For a deferral that is over.
    fn assert_begins_only_when_nobody_is_ready(deferral: &Deferral) {
        behind(deferral, SECOND, 1);
        assert_eq!(deferral.until(None), None, "the bots are not claimed yet");
        deferral.drained();
        behind(deferral, SECOND, 1);
        assert!(deferral.until(None).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_one_begins_only_when_nobody_is_ready() {
        let deferral = Deferral::default();
        behind(&deferral, SECOND, 1);
        deferral.caught_up();
        assert_begins_only_when_nobody_is_ready(&deferral);
    }

    #[tokio::test(start_paused = true)]
    async fn bots_with_one_event_are_not_deferred_for_long_if_handlers_are_brief() {
        // Number of bots, whether handlers are brief, whether the backlog is found to be sparse.
        let cases =
            [(usize::MAX, None, true), (30_000, None, false), (usize::MAX, Some(false), false)];
        for (bots, brief, sparse) in cases {
            let deferral = Deferral::default();
            let mut numbers = 0_usize..;
            for _ in 0..SAMPLE.div_ceil(1_000) {
                assert!(!deferral.is_sparse());
                let copied = numbers.by_ref().take(1_000).map(|number| number % bots);
                let copied: Vec<BotId> =
                    copied.map(|bot| BotId::parse(&format!("bot-{bot}")).unwrap()).collect();
                deferral.behind(SECOND, 1, copied.iter(), brief);
            }
            assert_eq!(deferral.is_sparse(), sparse, "{bots} bots, brief: {brief:?}");
            assert_eq!(deferral.until(None).is_some(), !sparse);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_sparse_backlog_ends_when_it_is_copied_and_when_bots_are_not_quiet() {
        let ends: [fn(&Deferral); 3] = [
            Deferral::caught_up,
            |deferral| (0..POOR_MAX).for_each(|_| deferral.leased(100, 49)),
            |deferral| deferral.behind(SECOND, 1, std::iter::empty(), Some(false)),
        ];
        for end in ends {
            let deferral = Deferral::default();
            *deferral.state() = State::Sparse { poor: 0 };
            (1..POOR_MAX).for_each(|_| deferral.leased(100, 49));
            deferral.leased(100, 50); // Few leases in a row are not enough of a sign.
            behind(&deferral, SECOND, 1);
            assert!(deferral.is_sparse());
            end(&deferral);
            assert!(!deferral.is_sparse());
            behind(&deferral, SECOND, 1);
            assert_eq!(deferral.until(None), None, "the bots are not claimed yet");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_true_backlog_waits_twice_its_lateness_and_a_smaller_one_once() {
        let less = BACKLOG.saturating_sub(Duration::from_millis(1));
        for (late, wait) in [(less, less), (BACKLOG, 2 * BACKLOG)] {
            let deferral = Deferral::default();
            behind(&deferral, late, 1);
            assert_eq!(deferral.until(None), Some(Instant::now() + wait));
        }
        let deferral = Deferral::default();
        behind(&deferral, SECOND, BYTES_MAX);
        assert!(deferral.until(None).is_some(), "as much as may be copied");
        behind(&deferral, SECOND, 1);
        assert_eq!(deferral.until(None), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deferral_that_ran_out_is_over_also_for_the_next_copy() {
        let deferral = Deferral::default();
        behind(&deferral, SECOND, 1);
        tokio::time::advance(2 * SECOND).await;
        assert_eq!(deferral.until(None), None);
        assert_begins_only_when_nobody_is_ready(&deferral);
    }

    #[tokio::test(start_paused = true)]
    async fn the_dispatcher_and_the_other_processes_learn_of_an_early_end() {
        use futures_util::FutureExt as _;
        let deferral = Deferral::default();
        let is_over = || deferral.ended().now_or_never().is_some();
        let has_turned = || deferral.turned.notified().now_or_never().is_some();
        behind(&deferral, SECOND, 1);
        assert_eq!((is_over(), has_turned()), (false, true), "it begins");
        deferral.caught_up();
        assert_eq!((is_over(), has_turned()), (true, true), "it ends");
        deferral.caught_up();
        assert_eq!((is_over(), has_turned()), (false, false));
        deferral.heard(HOLDS);
        assert!(!is_over());
        deferral.heard(Duration::ZERO);
        assert_eq!((is_over(), has_turned()), (true, false), "that of another process ends");
    }
}
