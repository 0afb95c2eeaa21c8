//! A number of places that bots share.
//!
//! A bot gets another place only while it holds fewer than are free. A bot alone may hold half of
//! the places, two that want more hold a third each, and so on: however much one bot asks for, a
//! place is free for the next one. Each bot may hold one place as long as any is free. So only as
//! many bots as there are places can take all of them. The rule is that of the dynamic thresholds
//! of shared packet buffers (Choudhury and Hahne, 1998); it needs no list of those that wait.
//!
//! A refused request gets a time to return, spread by the speed of its bot. So ten thousand requests
//! of a bot do not return in one burst, and those of another bot do not return after them. Each return
//! costs Redis some calls: a bot whose requests are slow returns few of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::id::BotId;

/// The shortest and, for the spread, the longest time until a refused request returns.
pub(super) const AGAIN_MIN: Duration = Duration::from_millis(50);
const AGAIN_MAX: Duration = Duration::from_secs(300);
/// The time between two requests that return after the pause of a breaker, and on average between all
/// those of a bot. How fast the hosts will answer then is not known.
pub(super) const AFTER_BREAKER: Duration = Duration::from_millis(3);
/// While no request of a bot starts or ends, a refused one returns after as long as that has lasted:
/// places that are held for long are not asked for again and again. At most this.
const STALLED_MAX: Duration = Duration::from_secs(2);
/// The turns that are left move up if new ones need less than one part in this many of the time that
/// those got. The average duration of requests to a host that stays the same varies by less.
const MUCH_FASTER: u32 = 8;
/// One part in this many of the moving average comes from the newest duration.
const WEIGHT: u32 = 8;
/// The average duration of a request before the first one ended.
const USUAL: Duration = Duration::from_millis(20);
/// A refused request that has not returned within twice this was started by another process, or
/// never will be. Longer than any request waits.
const LOST: Duration = AGAIN_MAX.saturating_add(Duration::from_secs(60));
/// Multiples of the golden ratio, without their whole parts, are spread evenly between 0 and 1.
const GOLDEN: f64 = 0.618_033_988_749_895;

/// Whether a bot with `own` places may get another one while `free` are free.
pub(super) fn may_take(own: usize, free: usize) -> bool {
    own < free || (own == 0 && free > 0)
}

/// The number of requests that were refused and have not started since.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Those refused since `turned`, and those refused in the `LOST` before.
    counts: [u32; 2],
    turned: Instant,
}

impl Waiting {
    pub(super) fn new(now: Instant) -> Self {
        Self { counts: [0; 2], turned: now }
    }

    /// A request was refused; `again`: not for the first time.
    pub(super) fn refuse(&mut self, again: bool, now: Instant) {
        self.turn(now);
        if !again {
            self.counts[0] = self.counts[0].saturating_add(1);
        } else if self.counts[1] > 0 {
            self.counts = [self.counts[0] + 1, self.counts[1] - 1];
        }
    }

    /// One that returned has started.
    pub(super) fn remove(&mut self, now: Instant) {
        self.turn(now);
        let [recent, before] = &mut self.counts;
        let from = if *before > 0 { before } else { recent };
        *from = from.saturating_sub(1);
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.counts[0].saturating_add(self.counts[1])
    }

    fn turn(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.turned);
        if since >= LOST {
            let before = if since < LOST * 2 { self.counts[0] } else { 0 };
            (self.counts, self.turned) = ([0, before], now);
        }
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cause {
    /// Its bot has as many places as it may.
    Places,
    /// The host has as many requests as its rate allows.
    Rate,
    /// A breaker is open until then; and the request's turn among those that any breaker refused.
    Breaker(Instant, Instant),
}

/// A request that is refused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Refused {
    pub(super) now: Instant,
    pub(super) cause: Cause,
    /// Whether it was refused before.
    pub(super) again: bool,
    /// Maximum number of concurrent requests of its bot.
    pub(super) places: usize,
    /// Minimum interval between two requests of its bot.
    pub(super) interval: Duration,
    /// Minimum interval between two requests of all bots to the host.
    pub(super) of_host: Duration,
    /// The time that all waiting requests to the host need at its rate.
    pub(super) all: Duration,
}

/// Turns, one after the other.
#[derive(Debug)]
pub(super) struct Turns {
    next: Instant,
    /// The longest time between two of the turns that are left.
    step: Duration,
    /// The place of the last request without a turn, from 0 to 1.
    part: f64,
}

impl Turns {
    pub(super) fn new(now: Instant) -> Self {
        Self { next: now, step: Duration::ZERO, part: 0.0 }
    }

    /// When a request returns: `own` after its turn, which is not before `earliest` and `step` before
    /// the next one. Those without a turn within [`AGAIN_MAX`] are spread over the second half of it:
    /// few return too early, and they form no burst. The turns of a time at which the bot was slow are
    /// shortened when it is fast again, or new requests would wait for minutes behind them.
    pub(super) fn take(&mut self, earliest: Instant, own: Duration, step: Duration) -> Instant {
        let left = self.next.saturating_duration_since(earliest);
        if step.saturating_mul(MUCH_FASTER) < self.step {
            self.next = earliest + left.mul_f64(step.div_duration_f64(self.step));
            self.step = step;
        }
        self.step = if left.is_zero() { step } else { self.step.max(step) };
        let turn = self.next.max(earliest);
        if turn > earliest + AGAIN_MAX {
            return earliest + AGAIN_MAX.mul_f64(f64::midpoint(1.0, self.part()));
        }
        self.next = turn + step;
        turn + own.min(step)
    }

    /// Any place from 0 to 1, spread evenly.
    fn part(&mut self) -> f64 {
        self.part = (self.part + GOLDEN).fract();
        self.part
    }
}

/// The times at which the refused requests of one bot return.
#[derive(Debug)]
pub(super) struct Line {
    /// The average duration of a request.
    average: Duration,
    /// The turns of refused requests.
    turns: Turns,
    /// The turns of those that the rate refused again: it does not refuse more of them than it lets
    /// pass.
    again: Turns,
    /// The first refusal since a request started or ended.
    stalled: Option<Instant>,
    waiting: Waiting,
}

impl Line {
    pub(super) fn new(now: Instant) -> Self {
        let (turns, again) = (Turns::new(now), Turns::new(now));
        Self { average: USUAL, turns, again, stalled: None, waiting: Waiting::new(now) }
    }

    /// The time until a refused request may return: after those refused before, at the speed of the bot.
    /// While none of its requests ends, each is expected to take as long as that has lasted. Requests
    /// that found no place at a host before return twice as often as places become free, so that few stay
    /// free.
    ///
    /// After another refusal by the rate a request gets any place among those that wait. At the end of the
    /// line the bots that were refused more often than others would be the only ones left, each at the
    /// speed of its part, and the rate of the host would not be used.
    pub(super) fn turn_away(&mut self, refused: Refused) -> Duration {
        let Refused { now, cause, again, places, interval, of_host, all } = refused;
        let places = u32::try_from(places).unwrap_or(u32::MAX).max(1);
        let step = (self.average / places).max(interval);
        let stalled = now.saturating_duration_since(*self.stalled.get_or_insert(now));
        let stalled = stalled.min(STALLED_MAX);
        let from = if let Cause::Breaker(until, _) = cause { until } else { now };
        let earliest = from.max(now + stalled) + AGAIN_MIN;
        self.waiting.refuse(again, now);
        let until = match cause {
            Cause::Places => {
                let apart = step.max(stalled / places);
                self.turns.take(earliest, step, if again { apart / 2 } else { apart })
            }
            Cause::Rate if again => {
                let own = step.saturating_mul(self.waiting.count().max(1));
                let spread = own.min(all.max(step)).min(AGAIN_MAX);
                let place = earliest + spread.mul_f64(self.again.part());
                place.max(self.again.take(now, of_host, of_host))
            }
            Cause::Rate => self.turns.take(earliest, step, step),
            Cause::Breaker(_, turn) => self.turns.take(earliest, step, AFTER_BREAKER).max(turn),
        };
        until.saturating_duration_since(now)
    }

    /// A request started; `again`: it was refused before.
    pub(super) fn started(&mut self, again: bool, now: Instant) {
        self.stalled = None;
        if again {
            self.waiting.remove(now);
        }
    }

    /// A request took this long.
    pub(super) fn took(&mut self, took: Duration) {
        self.average = (self.average * (WEIGHT - 1) + took) / WEIGHT;
        self.stalled = None;
    }

    /// Requests refused from now on need not return after those refused before.
    pub(super) fn clear(&mut self, now: Instant) {
        self.turns.next = now;
    }
}

/// The places of one kind in a process.
#[derive(Debug)]
pub(crate) struct Places {
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    /// Bots with a place or with refused requests.
    bots: HashMap<BotId, Share>,
    /// The number of bots at which those without either are removed next.
    sweep_at: usize,
}

#[derive(Debug)]
struct Share {
    taken: usize,
    line: Line,
}

impl Places {
    /// Allows `max` places.
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, state: Mutex::default() })
    }

    /// Number of places, taken or free.
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    /// A place for a request of `bot`, or the time after which to ask again.
    pub(crate) fn take(self: &Arc<Self>, bot: &BotId, now: Instant) -> Result<Place, Duration> {
        let mut state = self.state();
        let free = self.max - state.taken;
        state.sweep(self.max, now);
        let share = state.bots.entry(bot.clone());
        let share = share.or_insert_with(|| Share { taken: 0, line: Line::new(now) });
        if !may_take(share.taken, free) {
            let no_rate = Duration::ZERO;
            return Err(share.line.turn_away(Refused {
                now,
                cause: Cause::Places,
                // Not known. So they return as often as places become free.
                again: false,
                places: share.taken,
                interval: no_rate,
                of_host: no_rate,
                all: no_rate,
            }));
        }
        share.taken += 1;
        share.line.started(false, now);
        state.taken += 1;
        Ok(Place { places: Arc::clone(self), bot: bot.clone(), since: Some(now) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Forgets unused bots, as often as their number doubles.
    fn sweep(&mut self, max: usize, now: Instant) {
        if self.bots.len() >= self.sweep_at.max(2 * max) {
            self.bots.retain(|_, share| share.taken > 0 || share.line.turns.next > now);
            self.sweep_at = 2 * self.bots.len();
        }
    }
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    bot: BotId,
    /// `None`: the request says nothing about the usual duration of a request.
    since: Option<Instant>,
}

impl Place {
    /// Gives the place back unused.
    pub(crate) fn unused(mut self) {
        self.since = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut state = self.places.state();
        state.taken -= 1;
        if let Some(share) = state.bots.get_mut(&self.bot) {
            share.taken -= 1;
            if let Some(since) = self.since {
                share.line.took(now.saturating_duration_since(since));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    fn take_all(places: &Arc<Places>, name: &str) -> Vec<Place> {
        std::iter::from_fn(|| places.take(&bot(name), Instant::now()).ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_bot_alone_gets_half_and_each_next_one_half_of_the_rest() {
        let places = Places::new(1_000);
        let first = take_all(&places, "a");
        let second = take_all(&places, "b");
        let third = take_all(&places, "c");
        assert_eq!((first.len(), second.len(), third.len()), (500, 250, 125));
        drop(first);
        assert_eq!(take_all(&places, "c").len(), 250, "half of what the other one leaves");
        drop((second, third));
    }

    #[tokio::test(start_paused = true)]
    async fn a_bot_without_a_place_gets_one_as_long_as_one_is_free() {
        let places = Places::new(8);
        let mut held = Vec::new();
        for number in 0..8 {
            let taken = take_all(&places, &format!("bot-{number}"));
            held.extend(taken);
        }
        assert_eq!(held.len(), 8, "all are taken: 4, 2, 1 and 1");
        assert!(places.take(&bot("late"), Instant::now()).is_err());
        drop(held.pop());
        assert!(places.take(&bot("bot-0"), Instant::now()).is_err(), "it holds some");
        assert!(places.take(&bot("late"), Instant::now()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn the_refused_requests_of_a_bot_return_one_by_one_and_before_those_of_another() {
        let places = Places::new(2);
        let held = take_all(&places, "a");
        assert_eq!(held.len(), 1);
        let now = Instant::now();
        let refused = || places.take(&bot("a"), now).unwrap_err();
        let times: Vec<Duration> = (0..1_000).map(|_| refused()).collect();
        assert!(times.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(times[0] >= AGAIN_MIN && times[999] < AGAIN_MAX, "{times:?}");
        let other = take_all(&places, "b");
        assert_eq!(other.len(), 1);
        let after = places.take(&bot("b"), now).unwrap_err();
        assert!(after < AGAIN_MIN * 2, "{after:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn while_all_its_places_are_held_the_requests_of_a_bot_return_ever_later() {
        let places = Places::new(2);
        let held = take_all(&places, "a");
        let mut times = Vec::new();
        for _ in 0..8 {
            let after = places.take(&bot("a"), Instant::now()).unwrap_err();
            times.push(after.as_millis());
            tokio::time::advance(after).await;
        }
        // One was refused above.
        assert_eq!(times[..4], [90, 160, 320, 640]);
        assert_eq!(times[7], (STALLED_MAX + AGAIN_MIN + USUAL).as_millis());
        drop(held);
        assert!(places.take(&bot("a"), Instant::now()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_bot_that_is_fast_again_does_not_wait_behind_the_turns_of_its_slow_time() {
        let places = Places::new(2);
        let refused = || places.take(&bot("a"), Instant::now()).unwrap_err();
        let use_for = async |millis, times| {
            for _ in 0..times {
                let held = places.take(&bot("a"), Instant::now()).unwrap();
                tokio::time::advance(Duration::from_millis(millis)).await;
                drop(held);
            }
        };
        use_for(10_000, 40).await;
        let held = take_all(&places, "a");
        let last = (0..20).map(|_| refused()).max().unwrap();
        assert!(last > Duration::from_secs(150), "{last:?}");
        drop(held);
        use_for(20, 50).await;
        let _held = take_all(&places, "a");
        let after = refused();
        assert!(after < Duration::from_secs(1), "{after:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn bots_without_a_place_are_forgotten() {
        let places = Places::new(4);
        let held = places.take(&bot("held"), Instant::now()).unwrap();
        for number in 0..1_000 {
            drop(places.take(&bot(&format!("bot-{number}")), Instant::now()));
        }
        let state = places.state();
        assert!(state.bots.len() <= 8 && state.bots.contains_key(&bot("held")), "{state:?}");
        drop(state);
        drop(held);
        assert_eq!(places.state().taken, 0);
    }

    #[test]
    fn requests_that_another_process_started_are_forgotten() {
        let mut now = Instant::now();
        let mut waiting = Waiting::new(now);
        (0..10).for_each(|_| waiting.refuse(false, now));
        now += LOST;
        (0..4).for_each(|_| waiting.refuse(true, now));
        waiting.remove(now);
        assert_eq!(waiting.count(), 9);
        now += LOST;
        waiting.refuse(true, now);
        assert_eq!(waiting.count(), 4, "those that came back in the meantime");
        now += LOST * 2;
        waiting.refuse(false, now);
        assert_eq!(waiting.count(), 1);
    }
}
