//! Which shards a session reads for.
//!
//! A session has one place in each log, the lowest position of its shards. A shard that is far behind
//! would keep all others waiting until it has caught up: its primary was unavailable for an hour, or
//! its pipeline starts with the first entry. So they take turns. A session that does not reach the
//! others within [`SLICE`] ends. The next one leaves out the shards that it read for, and begins where
//! the others stand. Once it has read everything, a session for all shards follows. With shards at
//! several distances, each session of a round leaves out more of them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::session::OpenLog;
use crate::fanout::Positions;
use crate::id::Offset;

/// How long a session reads for shards that are far behind, while others wait.
const SLICE: Duration = Duration::from_secs(1);
/// Maximum duration of a session that leaves shards out.
const OTHERS: Duration = Duration::from_secs(4);

/// Per log by its name, the offset up to which shards are left out.
pub(super) type Floors = Vec<(Arc<str>, Offset)>;

/// The turn of a session.
#[derive(Debug)]
pub(super) struct Turn {
    floors: Floors,
    began: Instant,
    /// Per log, the position of the shard that is farthest.
    farthest: Vec<Offset>,
    /// Per log, its end when the session began.
    ends: Vec<Offset>,
}

impl Turn {
    /// The positions of the shards of a session that leaves out those up to `floors`, and its turn. It
    /// leaves none out if no other shard is available.
    pub(super) fn new(
        floors: &Floors,
        ends: Vec<Offset>,
        positions: Positions,
    ) -> (Self, Positions) {
        let of_log = |log: &Arc<str>| floors.iter().find(|(name, _)| name == log).map(|of| of.1);
        let below: Vec<_> = positions.logs().iter().map(of_log).collect();
        let others = positions.above(&below);
        let (floors, positions) = match others {
            Some(others) => (floors.clone(), others),
            None => (Floors::new(), positions),
        };
        let farthest = ends
            .iter()
            .enumerate()
            // Behind its end, the log lost what the shards have.
            .map(|(log, end)| positions.highest(log).map_or(*end, |highest| highest.min(*end)))
            .collect();
        (Self { floors, began: Instant::now(), farthest, ends }, positions)
    }

    /// Whether shards are left out that could be read for.
    pub(super) fn leaves_out(&self) -> bool {
        !self.floors.is_empty()
    }

    /// Nothing more is there to read.
    pub(super) fn read_all(&mut self) {
        self.farthest.fill(Offset::default());
        self.ends.fill(Offset::default());
    }

    /// What the next session leaves out, if this one has to end now.
    pub(super) fn next(&self, logs: &[OpenLog]) -> Option<Floors> {
        let reached = |goals: &[Offset]| logs.iter().zip(goals).all(|(log, goal)| log.end >= *goal);
        if !reached(&self.farthest) {
            if self.began.elapsed() < SLICE {
                return None;
            }
            let floors = logs.iter().zip(&self.farthest).filter_map(|(log, farthest)| {
                let before = self.floors.iter().find(|(name, _)| *name == log.name);
                if log.end < *farthest {
                    Some((Arc::clone(&log.name), log.end))
                } else {
                    before.cloned()
                }
            });
            return Some(floors.collect());
        }
        let over = || reached(&self.ends) || self.began.elapsed() >= OTHERS;
        (self.leaves_out() && over()).then(Floors::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::source::{Log, Opened};

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
            OpenLog::new(&log, Opened { at: at(end), entries: 0, lost: 0 }, at(end))
        });
        logs.collect()
    }

    fn floors(of: &[(&str, u64)]) -> Floors {
        of.iter().map(|&(name, ms)| (name.into(), at(ms))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn shards_at_several_distances_are_read_in_turns_until_everything_is_read() {
        // Two are far behind in one log, at different places, and one is at the end of both.
        let shards = [[10, 90], [40, 90], [80, 95]];
        let ends = || vec![at(100), at(100)];
        let (turn, all) = Turn::new(&Floors::new(), ends(), positions(&shards));
        assert_eq!((all.lowest(0), turn.leaves_out()), (Some(at(10)), false));
        tokio::time::advance(SLICE).await;
        assert_eq!(turn.next(&read_up_to([80, 95])), None, "it has reached the others");
        let first = turn.next(&read_up_to([30, 95]));
        assert_eq!(first, Some(floors(&[("x", 30)])));

        let shards = [[30, 95], [40, 95], [80, 95]];
        let (turn, others) = Turn::new(&first.unwrap(), ends(), positions(&shards));
        assert_eq!((others.lowest(0), turn.leaves_out()), (Some(at(40)), true));
        assert_eq!(turn.next(&read_up_to([60, 96])), None, "it has some time");
        tokio::time::advance(SLICE).await;
        let second = turn.next(&read_up_to([60, 96]));
        assert_eq!(second, Some(floors(&[("x", 60)])));

        let shards = [[30, 95], [60, 96], [80, 96]];
        let (turn, others) = Turn::new(&second.unwrap(), ends(), positions(&shards));
        assert_eq!(others.lowest(0), Some(at(80)));
        assert_eq!(turn.next(&read_up_to([99, 100])), None, "not everything is read");
        assert_eq!(turn.next(&read_up_to([100, 100])), Some(Floors::new()));
        tokio::time::advance(OTHERS).await;
        assert_eq!(turn.next(&read_up_to([99, 100])), Some(Floors::new()), "others wait");
    }

    #[tokio::test(start_paused = true)]
    async fn a_floor_of_another_log_stays_for_the_next_session() {
        let shards = positions(&[[10, 5], [20, 50], [90, 90]]);
        let (turn, others) = Turn::new(&floors(&[("y", 5)]), vec![at(100); 2], shards);
        assert_eq!(others.lowest(1), Some(at(50)));
        tokio::time::advance(SLICE).await;
        let next = turn.next(&read_up_to([30, 90]));
        assert_eq!(next, Some(floors(&[("x", 30), ("y", 5)])));
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_for_all_shards_lasts_if_none_is_far_behind() {
        let all = || positions(&[[70, 70], [80, 70]]);
        let (mut turn, _) = Turn::new(&Floors::new(), vec![at(100); 2], all());
        tokio::time::advance(OTHERS * 2).await;
        assert_eq!(turn.next(&read_up_to([80, 70])), None);
        assert!(turn.next(&read_up_to([79, 70])).is_some());
        turn.read_all();
        assert_eq!(turn.next(&read_up_to([79, 70])), None, "no entry is there");
        // Of a log that lost its last entries, no session can reach the positions.
        let (turn, _) = Turn::new(&Floors::new(), vec![at(60); 2], all());
        tokio::time::advance(OTHERS).await;
        assert_eq!(turn.next(&read_up_to([70, 70])), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_leaves_nothing_out_if_no_other_shard_is_available() {
        let (turn, all) = Turn::new(&floors(&[("x", 50)]), vec![at(100); 2], positions(&[[40, 1]]));
        assert_eq!((all.lowest(0), turn.leaves_out()), (Some(at(40)), false));
    }
}
