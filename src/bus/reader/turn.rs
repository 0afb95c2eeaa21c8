//! Which shards a session reads for.
//!
//! A session has one place in each log, the lowest position of its shards. A shard that is far behind
//! would keep all others waiting until it has caught up: its primary was unavailable for an hour, or
//! its pipeline starts with the first entry. So they take turns. A session that does not reach the
//! others within [`SLICE`] ends. The next one leaves out the shards that it read for, and begins where
//! the others stand. Once it has read everything, a session for all shards follows. With shards at
//! several distances, each session of such a round leaves out more of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::super::source::Log;
use super::session::OpenLog;
use crate::fanout::{Positions, Range};
use crate::id::Offset;

/// How long a session reads for shards that are far behind, while others wait. It doubles up to the maximum
/// if these shards do not catch up: the bus gets new entries nearly as fast as they are read.
const SLICE: Duration = Duration::from_secs(1);
const SLICE_MAX: Duration = Duration::from_secs(60);
/// A session reads at least this number of entries, so that it gets on with a slow server.
const ENTRIES_MIN: usize = 256;
/// Maximum duration of a session that leaves shards out, from its first entries.
const OTHERS: Duration = Duration::from_secs(4);
/// The same without any entry.
const SILENT: Duration = Duration::from_secs(10);
/// Number of sessions of a round that leave out only what the one before read for. The next one leaves
/// out all shards that are not at the front.
const LEVELS: usize = 2;

/// Per log by its name, the offset up to which shards are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Floors {
    /// The number of sessions of the round before.
    level: usize,
    below: Vec<(Arc<str>, Offset)>,
}

impl Floors {
    fn of(&self, log: &Arc<str>) -> Option<Offset> {
        self.below.iter().find(|(name, _)| name == log).map(|of| of.1)
    }

    /// For the log: which one is behind, and where.
    pub(super) fn first(&self) -> Option<&(Arc<str>, Offset)> {
        self.below.first()
    }
}

/// A session ends: it is the turn of other shards.
#[derive(Debug)]
pub(super) struct Turned {
    /// What the next session leaves out.
    floors: Floors,
    /// Whether the session read for all shards.
    for_all: bool,
    /// How far the logs that are behind were from their ends.
    behind: u128,
    /// Up to where each log is copied.
    read: Vec<(Arc<str>, Offset)>,
}

/// The turns of a reader.
#[derive(Debug)]
pub(super) struct Turns {
    floors: Floors,
    slice: Duration,
    /// How far behind the last session for all shards was at its end.
    behind: Option<u128>,
    /// Up to where the last session without the shards that are behind has read.
    front: Vec<(Arc<str>, Offset)>,
    known: Mutex<Known>,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            floors: Floors::default(),
            slice: SLICE,
            behind: None,
            front: Vec::new(),
            known: Mutex::default(),
        }
    }
}

impl Turns {
    /// A session has ended, and nothing is known of the next one.
    pub(super) fn over(&mut self) {
        let known = std::mem::take(&mut self.known);
        *self = Self { known, ..Self::default() };
    }

    /// What the next session leaves out.
    pub(super) fn turn(&mut self, turned: Turned) -> &Floors {
        if turned.for_all {
            if self.behind.is_some_and(|before| turned.behind >= before) {
                self.slice = (self.slice * 2).min(SLICE_MAX);
            }
            self.behind = Some(turned.behind);
        } else if turned.floors.below.is_empty() {
            self.front = turned.read;
        }
        self.floors = turned.floors;
        &self.floors
    }

    /// Notes what is copied of each log. Shards that are left out, or that are missing, get it later.
    pub(super) fn copied(&self, logs: &[OpenLog]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for log in logs {
            known.add(&log.name, (log.began, log.copied.0));
        }
    }

    /// What was read of each log, and is read again for shards that are behind.
    pub(super) fn known(&self, logs: &[Log], positions: &Positions) -> Vec<Vec<Range>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |(place, log): (usize, &Log)| {
            // A missing shard may stand anywhere.
            let lowest = positions.lowest(place).filter(|_| positions.missing() == 0);
            // What no shard has was lost by Redis: it is copied again, and put aside again.
            let highest = positions.highest(place).unwrap_or_default();
            known.of(&log.name, (lowest.unwrap_or_default(), highest))
        };
        logs.iter().enumerate().map(of).collect()
    }
}

/// The turn of a session.
#[derive(Debug)]
pub(super) struct Turn {
    floors: Floors,
    slice: Duration,
    front: Vec<(Arc<str>, Offset)>,
    opened: Instant,
    /// When the first entries came, and how many did.
    began: Option<Instant>,
    entries: usize,
    /// Per log, the position of the shard that is farthest.
    farthest: Vec<Offset>,
    /// Per log, its end when the session began.
    ends: Vec<Offset>,
}

impl Turn {
    /// The turn of the next session, and the positions of its shards. It leaves none out if no other
    /// shard is available.
    pub(super) fn new(turns: &Turns, ends: Vec<Offset>, positions: Positions) -> (Self, Positions) {
        let below: Vec<_> = positions.logs().iter().map(|log| turns.floors.of(log)).collect();
        let (floors, positions) = match positions.above(&below) {
            Some(others) => (turns.floors.clone(), others),
            None => (Floors::default(), positions),
        };
        let farthest = ends
            .iter()
            .enumerate()
            // Behind its end, the log lost what the shards have.
            .map(|(log, end)| positions.highest(log).map_or(*end, |highest| highest.min(*end)))
            .collect();
        let turn = Self {
            floors,
            slice: turns.slice,
            front: turns.front.clone(),
            opened: Instant::now(),
            began: None,
            entries: 0,
            farthest,
            ends,
        };
        (turn, positions)
    }

    /// Whether shards are left out that could be read for.
    pub(super) fn leaves_out(&self) -> bool {
        !self.floors.below.is_empty()
    }

    /// The source is open. A slow one takes its time for that.
    pub(super) fn opens(&mut self) {
        self.opened = Instant::now();
    }

    /// So many entries were read.
    pub(super) fn reads(&mut self, entries: usize) {
        if entries > 0 {
            self.began.get_or_insert_with(Instant::now);
            self.entries += entries;
        }
    }

    /// The source knows that nothing more is there to read.
    pub(super) fn read_all(&mut self) {
        self.farthest.fill(Offset::default());
        self.ends.fill(Offset::default());
    }

    /// What the next session leaves out, if this one has to end now.
    pub(super) fn next(&self, logs: &[OpenLog]) -> Option<Floors> {
        let reached = |goals: &[Offset]| logs.iter().zip(goals).all(|(log, goal)| log.end >= *goal);
        let lasts = self.began.map(|began| began.elapsed());
        if !reached(&self.farthest) {
            let reads = lasts.is_none_or(|lasts| lasts < self.slice) || self.entries < ENTRIES_MIN;
            // A bus may hang where it is read for these shards only.
            if reads && self.opened.elapsed() < SLICE_MAX {
                return None;
            }
            let level = self.floors.level + 1;
            let floors = logs.iter().zip(&self.farthest).filter_map(|(log, farthest)| {
                if log.end >= *farthest {
                    return self.floors.of(&log.name).map(|floor| (Arc::clone(&log.name), floor));
                }
                let front = self.front.iter().find(|(name, _)| *name == log.name);
                let below_front = front.filter(|_| level > LEVELS).map(|(_, at)| before(*at));
                let floor = below_front.map_or(log.end, |below| below.max(log.end));
                Some((Arc::clone(&log.name), floor))
            });
            return Some(Floors { level, below: floors.collect() });
        }
        let is_over = || {
            reached(&self.ends)
                || lasts.is_some_and(|lasts| lasts >= OTHERS)
                || self.opened.elapsed() >= SILENT && self.entries == 0
        };
        (self.leaves_out() && is_over()).then(Floors::default)
    }

    /// The end of the session, for the turns that follow.
    pub(super) fn ends(&self, floors: Floors, logs: &[OpenLog]) -> Turned {
        let read = logs.iter().map(|log| (Arc::clone(&log.name), log.copied.0));
        let behind = logs.iter().zip(self.farthest.iter().zip(&self.ends));
        let behind = behind.filter(|(log, (farthest, _))| log.end < **farthest);
        let behind = behind.map(|(log, (_, end))| distance(log.end, *end));
        Turned { floors, for_all: !self.leaves_out(), behind: behind.sum(), read: read.collect() }
    }
}

/// How much there is to read. It only shrinks if reading is faster than the log grows. First the times
/// count, and then the numbers: those of NATS and Kafka have nearly all the same time.
fn distance(from: Offset, to: Offset) -> u128 {
    let ms = to.ms.saturating_sub(from.ms);
    let numbers = if ms > 0 { u64::MAX - from.seq } else { to.seq.saturating_sub(from.seq) };
    u128::from(ms) << 64 | u128::from(numbers)
}

/// The offset before this one.
fn before(Offset { ms, seq }: Offset) -> Offset {
    match (ms, seq.checked_sub(1)) {
        (ms, Some(seq)) => Offset { ms, seq },
        (0, None) => Offset::default(),
        (ms, None) => Offset { ms: ms - 1, seq: u64::MAX },
    }
}

/// What was read in turns: it is read again for other shards, but counted and put aside only once.
#[derive(Debug, Default)]
struct Known(HashMap<Arc<str>, Vec<Range>>);

impl Known {
    /// A session has read this range of a log.
    fn add(&mut self, log: &Arc<str>, (after, up_to): Range) {
        let ranges = self.0.entry(Arc::clone(log)).or_default();
        ranges.push((after, up_to));
        ranges.sort_unstable();
        ranges.dedup_by(|next, one| {
            let adjoins = next.0 <= one.1;
            if adjoins {
                one.1 = one.1.max(next.1);
            }
            adjoins
        });
    }

    /// The ranges of a log up to `highest`. Those up to `lowest` are not read again.
    fn of(&mut self, log: &str, (lowest, highest): Range) -> Vec<Range> {
        let Some(ranges) = self.0.get_mut(log) else { return Vec::new() };
        ranges.retain(|(_, up_to)| *up_to > lowest);
        let below = ranges.iter().map(|&(after, up_to)| (after, up_to.min(highest)));
        below.filter(|(after, up_to)| after < up_to).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::source::{Log, Opened};
    use crate::fanout::is_in;

    fn at(ms: u64) -> Offset {
        Offset { ms, seq: 0 }
    }

    /// The shards of one pipeline, with their positions in the logs `x` and `y`.
    fn positions(shards: &[[u64; 2]]) -> Positions {
        let logs: Arc<[Arc<str>]> = ["x", "y"].map(Arc::from).into();
        let shards = shards.iter().map(|stands| Some(stands.map(at).into()));
        Positions::new(logs, vec![shards.collect()])
    }

    fn read_up_to(ends: [u64; 2]) -> Vec<OpenLog> {
        let logs = ["x", "y"].into_iter().zip(ends).map(|(name, end)| {
            let log = Log { name: name.into(), ..Log::default() };
            OpenLog::new(&log, Opened { at: at(end), entries: 0, lost: 0, noted: None }, at(end))
        });
        logs.collect()
    }

    fn floors(level: usize, of: &[(&str, u64)]) -> Floors {
        Floors { level, below: of.iter().map(|&(name, ms)| (name.into(), at(ms))).collect() }
    }

    fn turns(floors: Floors) -> Turns {
        Turns { floors, ..Turns::default() }
    }

    /// The turn of a session that has read entries for a whole slice.
    async fn after_a_slice(turn: &mut Turn) {
        turn.reads(ENTRIES_MIN);
        tokio::time::advance(turn.slice).await;
    }

    #[tokio::test(start_paused = true)]
    async fn shards_at_several_distances_are_read_in_turns_until_everything_is_read() {
        // Two are far behind in one log, at different places, and one is at the end of both.
        let shards = [[10, 90], [40, 90], [80, 95]];
        let ends = || vec![at(100), at(100)];
        let (mut turn, all) = Turn::new(&Turns::default(), ends(), positions(&shards));
        assert_eq!((all.lowest(0), turn.leaves_out()), (Some(at(10)), false));
        after_a_slice(&mut turn).await;
        assert_eq!(turn.next(&read_up_to([80, 95])), None, "it has reached the others");
        let first = turn.next(&read_up_to([30, 95]));
        assert_eq!(first, Some(floors(1, &[("x", 30)])));

        let shards = [[30, 95], [40, 95], [80, 95]];
        let (mut turn, others) = Turn::new(&turns(first.unwrap()), ends(), positions(&shards));
        assert_eq!((others.lowest(0), turn.leaves_out()), (Some(at(40)), true));
        assert_eq!(turn.next(&read_up_to([60, 96])), None, "it has some time");
        after_a_slice(&mut turn).await;
        let second = turn.next(&read_up_to([60, 96]));
        assert_eq!(second, Some(floors(2, &[("x", 60)])));

        let shards = [[30, 95], [60, 96], [80, 96]];
        let (mut turn, others) = Turn::new(&turns(second.unwrap()), ends(), positions(&shards));
        assert_eq!(others.lowest(0), Some(at(80)));
        assert_eq!(turn.next(&read_up_to([99, 100])), None, "not everything is read");
        assert_eq!(turn.next(&read_up_to([100, 100])), Some(Floors::default()));
        turn.reads(1);
        tokio::time::advance(OTHERS).await;
        assert_eq!(turn.next(&read_up_to([99, 100])), Some(Floors::default()), "others wait");
    }

    #[tokio::test(start_paused = true)]
    async fn with_many_distances_the_last_session_of_a_round_reads_only_for_the_front() {
        let shards = || positions(&[[30, 95], [60, 95], [70, 95], [90, 95]]);
        let turns = Turns { front: vec![("x".into(), at(90))], ..turns(floors(2, &[("x", 30)])) };
        let (mut turn, others) = Turn::new(&turns, vec![at(100); 2], shards());
        assert_eq!(others.lowest(0), Some(at(60)));
        after_a_slice(&mut turn).await;
        let next = turn.next(&read_up_to([65, 95])).unwrap();
        assert_eq!(next, Floors { level: 3, below: vec![("x".into(), before(at(90)))] });
        let turns = Turns { floors: next, ..turns };
        assert_eq!(Turn::new(&turns, vec![at(100); 2], shards()).1.lowest(0), Some(at(90)));
        assert_eq!(before(Offset { ms: 4, seq: 7 }), Offset { ms: 4, seq: 6 });
        assert_eq!(before(at(4)), Offset { ms: 3, seq: u64::MAX });
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_reads_some_entries_however_slow_its_server_is() {
        let shards = positions(&[[10, 5], [90, 90]]);
        let (mut turn, _) = Turn::new(&Turns::default(), vec![at(100); 2], shards);
        tokio::time::advance(SLICE * 9).await;
        assert_eq!(turn.next(&read_up_to([10, 5])), None, "nothing has come yet");
        turn.reads(ENTRIES_MIN - 1);
        tokio::time::advance(SLICE).await;
        assert_eq!(turn.next(&read_up_to([11, 6])), None, "hardly anything has come");
        turn.reads(1);
        assert!(turn.next(&read_up_to([12, 6])).is_some());

        let turns = turns(floors(1, &[("x", 10), ("y", 5)]));
        let shards = positions(&[[10, 5], [90, 90]]);
        let (turn, _) = Turn::new(&turns, vec![at(100); 2], shards);
        tokio::time::advance(SILENT.checked_sub(Duration::from_millis(1)).unwrap()).await;
        assert_eq!(turn.next(&read_up_to([90, 90])), None, "its server may be slow");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(turn.next(&read_up_to([90, 90])), Some(Floors::default()));
    }

    #[test]
    fn a_slice_grows_while_the_shards_do_not_catch_up() {
        let mut turns = Turns::default();
        let mut turned = |for_all: bool, behind: u128| {
            turns.turn(Turned { floors: Floors::default(), for_all, behind, read: Vec::new() });
            turns.slice.as_secs()
        };
        assert_eq!([turned(true, 100), turned(false, 900), turned(true, 99)], [1, 1, 1]);
        assert_eq!([turned(true, 99), turned(true, 105), turned(true, 104)], [2, 4, 4]);
        for more in 105..115 {
            turned(true, more);
        }
        assert_eq!(turned(true, 1), SLICE_MAX.as_secs());
        turns.over();
        assert_eq!(turns.slice, SLICE);
    }

    /// Their events may be old, for example if they were imported into the bus.
    #[tokio::test(start_paused = true)]
    async fn shards_that_are_behind_catch_up_with_an_idle_bus_however_old_its_events_are() {
        let all = || positions(&[[10, 90], [90, 90]]);
        let (turn, _) = Turn::new(&Turns::default(), vec![at(100), at(100)], all());
        let behind = |end| turn.ends(Floors::default(), &read_up_to([end, 90])).behind;
        assert!(behind(20) > behind(30) && behind(30) > behind(90), "by time");
        assert_eq!(behind(90), 0);
        let of = |ms, seq| Offset { ms, seq };
        assert_eq!(distance(of(3, 40), of(3, 90)), 50, "numbers of one incarnation");
        assert_eq!(distance(of(3, 90), of(3, 40)), 0);
        let before_a_fall = |seq| distance(of(3, seq), of(4, 90));
        assert!(before_a_fall(50) > before_a_fall(51));
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_for_others_begins_when_its_slow_source_is_open() {
        let turns = turns(floors(1, &[("x", 10), ("y", 5)]));
        let shards = positions(&[[10, 5], [90, 90]]);
        let (mut turn, _) = Turn::new(&turns, vec![at(100); 2], shards);
        tokio::time::advance(SILENT).await;
        turn.opens();
        assert_eq!(turn.next(&read_up_to([90, 90])), None, "nothing could be read yet");
    }

    #[tokio::test(start_paused = true)]
    async fn a_floor_of_another_log_stays_for_the_next_session() {
        let shards = positions(&[[10, 5], [20, 50], [90, 90]]);
        let (mut turn, others) =
            Turn::new(&turns(floors(1, &[("y", 5)])), vec![at(100); 2], shards);
        assert_eq!(others.lowest(1), Some(at(50)));
        after_a_slice(&mut turn).await;
        let next = turn.next(&read_up_to([30, 90]));
        assert_eq!(next, Some(floors(2, &[("x", 30), ("y", 5)])));
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_for_all_shards_lasts_if_none_is_far_behind() {
        let all = || positions(&[[70, 70], [80, 70]]);
        let (mut turn, _) = Turn::new(&Turns::default(), vec![at(100); 2], all());
        after_a_slice(&mut turn).await;
        tokio::time::advance(OTHERS * 2).await;
        assert_eq!(turn.next(&read_up_to([80, 70])), None);
        assert!(turn.next(&read_up_to([79, 70])).is_some());
        turn.read_all();
        assert_eq!(turn.next(&read_up_to([79, 70])), None, "no entry is there");
        // Of a log that lost its last entries, no session can reach the positions.
        let (mut turn, _) = Turn::new(&Turns::default(), vec![at(60); 2], all());
        after_a_slice(&mut turn).await;
        assert_eq!(turn.next(&read_up_to([70, 70])), None);
    }

    #[test]
    fn ranges_that_adjoin_are_one_and_end_at_the_lowest_position() {
        let (mut known, log) = (Known::default(), Arc::from("x"));
        for (after, up_to) in [(80, 90), (10, 20), (20, 30), (90, 95), (85, 97)] {
            known.add(&log, (at(after), at(up_to)));
        }
        let both = [(at(10), at(30)), (at(80), at(97))];
        let end = at(100);
        assert_eq!(known.of("x", (at(25), end)), both);
        assert_eq!(
            known.of("x", (at(25), at(85))),
            [both[0], (at(80), at(85))],
            "the rest was lost"
        );
        assert_eq!(known.of("x", (at(25), at(80))), both[..1]);
        assert!(is_in(&both, at(11)) && is_in(&both, at(30)) && is_in(&both, at(97)));
        assert!(!is_in(&both, at(10)) && !is_in(&both, at(31)) && !is_in(&both, at(98)));
        assert_eq!(known.of("x", (at(30), end)), both[1..]);
        assert_eq!(known.of("y", (at(0), end)), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_leaves_nothing_out_if_no_other_shard_is_available() {
        let turns = turns(floors(1, &[("x", 50)]));
        let (turn, all) = Turn::new(&turns, vec![at(100); 2], positions(&[[40, 1]]));
        assert_eq!((all.lowest(0), turn.leaves_out()), (Some(at(40)), false));
    }
}
