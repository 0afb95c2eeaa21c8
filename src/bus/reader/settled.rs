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

use crate::id::Offset;

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
