//! Positions that Redis does not lose any more if its machine fails.
//!
//! Redis writes its file once a second (`appendfsync everysec`). If its machine fails, the positions of the
//! last moments are lost together with the copies. A bus on another server would not have these events
//! any more, if it had deleted them already. So an entry is deleted only some time after its copy.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::debug;

use super::error::ReadError;
use super::session::Session;
use crate::fanout::Positions;
use crate::id::Offset;
use crate::redis::RedisError;

/// Redis waits up to two seconds for a slow disk.
const ON_DISK: Duration = Duration::from_secs(4);

/// Per log, what was not needed some time ago.
#[derive(Debug, Default)]
pub(super) struct Settled(Mutex<HashMap<Arc<str>, Known>>);

#[derive(Debug)]
struct Known {
    /// What was not needed at that time.
    seen: (Instant, Offset),
    settled: Option<Offset>,
}

impl Settled {
    /// The offset before which entries may be deleted. No entry before `keep` is needed now.
    pub(super) fn of(&self, log: &Arc<str>, keep: Offset, now: Instant) -> Option<Offset> {
        let mut logs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match logs.entry(Arc::clone(log)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert(Known { seen: (now, keep), settled: None });
                return None;
            }
        };
        if keep < known.seen.1 {
            // A position moved back: Redis lost it, or a pipeline was added.
            known.settled = known.settled.map(|settled| settled.min(keep));
            known.seen = (now, keep);
        } else if now.duration_since(known.seen.0) >= ON_DISK {
            known.settled = Some(known.seen.1);
            known.seen = (now, keep);
        }
        known.settled
    }
}

impl super::Reader {
    /// Per log, the offset before which no pipeline needs an entry, even if Redis loses its last writes
    /// and the bus does not; `None`: not known now.
    pub(super) async fn keeps(
        &self,
        positions: &Positions,
        session: &Session,
    ) -> Result<Vec<Option<Offset>>, ReadError> {
        let mut keeps = vec![None; session.logs.len()];
        // The positions of missing shards are unknown.
        if positions.missing() > 0 {
            return Ok(keeps);
        }
        // Read after the positions: a pipeline that is added later starts after them.
        let names = positions.logs();
        let elsewhere = self.source.deletes_elsewhere();
        let needed = async {
            let needed = self.fanout.needed_elsewhere(names, elsewhere).await?;
            let stored = if elsewhere { self.fanout.stored(names).await? } else { Vec::new() };
            Ok::<_, RedisError>((needed, stored))
        };
        match needed.await {
            Ok((needed, stored)) => {
                for (place, (log, needed)) in session.logs.iter().zip(needed).enumerate() {
                    let keep = positions.lowest(place).unwrap_or(log.end);
                    let stored = stored.get(place).copied().flatten();
                    let keep = needed.into_iter().chain(stored).fold(keep, Offset::min);
                    keeps[place] = if elsewhere {
                        self.settled.of(&log.name, keep, Instant::now())
                    } else {
                        Some(keep)
                    };
                }
            }
            Err(error) if error.is_passing() => {
                debug!(bus = self.bus(), %error,
                    "what other processes need is not known; nothing is deleted");
            }
            Err(error) => return Err(error.into()),
        }
        Ok(keeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_may_be_deleted_once_their_positions_are_on_disk() {
        let (settled, log, start) = (Settled::default(), Arc::from("log"), Instant::now());
        let at = |ms| Offset { ms, seq: 0 };
        let of = |seconds: f64, keep| {
            let now = start + Duration::from_secs_f64(seconds);
            settled.of(&log, at(keep), now).map(|offset| offset.ms)
        };
        assert_eq!([of(0.0, 10), of(3.9, 20)], [None, None]);
        assert_eq!(of(4.0, 30), Some(10));
        assert_eq!([of(7.9, 40), of(8.0, 50)], [Some(10), Some(30)]);
        assert_eq!([of(9.0, 5), of(9.5, 60)], [Some(5); 2], "it is needed again");
        assert_eq!([of(12.9, 60), of(13.0, 60), of(17.0, 60)], [Some(5), Some(5), Some(60)]);
        assert_eq!(settled.of(&Arc::from("other"), at(1), start), None);
    }
}
