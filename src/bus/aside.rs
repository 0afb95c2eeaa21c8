//! Keeps entries that are no events, for operators.
//!
//! In a cluster, the server that has the stream of these entries may be unavailable alone. Then the entries
//! wait in the memory of the process and the bus is read on: other shards need not wait for that server. A
//! process that stops or is killed meanwhile loses the copies that wait. The bus has the entries.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Pipeline;
use tracing::{debug, warn};

use super::{BusError, Entry};
use crate::fanout::{Range, is_in};
use crate::id::Offset;
use crate::metrics;
use crate::redis::{Link, RedisError};
use crate::telemetry::{OncePerMinute, PerReason};

/// Approximate number of unreadable entries that are kept, and the maximum of bytes of each: one
/// producer can write many, and they must not fill Redis. The bus has the whole entry.
const MAX: usize = 10_000;
const BYTES_MAX: usize = 4 * 1_024;
/// Maximum number of entries that wait. With more, reading waits too.
const WAITING_MAX: usize = 1_000;
/// Number of entries in one write.
const WRITE_MAX: usize = 100;
/// Interval of storing the entries that wait.
const AGAIN: Duration = Duration::from_millis(500);
/// When entries that are no events were last logged, by reason: each producer can write many.
static INVALID: PerReason = PerReason::new();
/// Limits the log line about entries that wait.
static WAITS: OncePerMinute = OncePerMinute::new();

/// An entry that is no event.
#[derive(Debug)]
struct Invalid {
    log: Arc<str>,
    offset: Offset,
    label: &'static str,
    reason: String,
    /// The beginning of it.
    raw: Vec<u8>,
}

/// The entries of one bus that are put aside.
#[derive(Debug, Default)]
pub(super) struct Aside(Mutex<Waiting>);

/// Entries that are not stored yet, by log and offset.
type Waiting = BTreeMap<(Arc<str>, Offset), Arc<Invalid>>;

impl Aside {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the entries of a log that are no events, except for those in the `known` ranges. May store
    /// one twice after an error. In a cluster, they may wait.
    ///
    /// # Errors
    /// If Redis refuses, or is unavailable and the entries cannot wait.
    pub(super) async fn put(
        &self,
        link: &Link,
        log: &Arc<str>,
        known: &[Range],
        entries: &[Entry],
    ) -> Result<(), BusError> {
        let invalid = |entry: &Entry| {
            let invalid = entry.event.as_ref().err().filter(|_| !is_in(known, entry.offset))?;
            let (label, reason) = (invalid.error.label(), invalid.error.to_string());
            let (log, offset, raw) = (Arc::clone(log), entry.offset, kept(&invalid.raw).to_vec());
            Some(Arc::new(Invalid { log, offset, label, reason, raw }))
        };
        let mut invalid: Vec<_> = entries.iter().filter_map(invalid).collect();
        let (some_wait, has_room) = {
            let waiting = self.waiting();
            // What an interrupted session did not copy is read again.
            invalid.retain(|one| !waiting.contains_key(&(Arc::clone(&one.log), one.offset)));
            (!waiting.is_empty(), waiting.len() + invalid.len() <= WAITING_MAX)
        };
        if invalid.is_empty() {
            return Ok(());
        }
        // Its server does not answer: another wait for it would hold up the reading.
        let mut waits = some_wait && has_room;
        if !waits {
            match store(link, &invalid).await {
                Err(error) if has_room && link.target().is_cluster() && error.is_passing() => {
                    if let Some(suppressed) = WAITS.take() {
                        warn!(stream = &**log, %error, suppressed,
                            "entries of the bus that are no events cannot be stored now; trying again");
                    }
                    waits = true;
                }
                stored => stored?,
            }
        }
        // Also those that wait: a process that stops may lose them.
        for one in &invalid {
            metrics::bus_invalid(one.label);
        }
        if waits {
            let invalid = invalid.into_iter().map(|one| ((Arc::clone(&one.log), one.offset), one));
            self.waiting().extend(invalid);
        }
        Ok(())
    }

    /// Stores the entries that wait; never returns.
    ///
    /// # Cancel safety
    /// Those of the write in progress may be stored twice.
    pub(super) async fn keep_trying(&self, link: &Link) {
        loop {
            tokio::time::sleep(AGAIN).await;
            if let Err(error) = self.try_again(link).await {
                debug!(%error, "entries that are no events cannot be stored yet");
            }
        }
    }

    /// The last try, at the stop of the process: within this time. Says how many entries are lost.
    pub(super) async fn try_last(&self, link: &Link, bus: &str, within: Duration) {
        let tried = tokio::time::timeout(within, self.try_again(link)).await;
        let left = self.waiting().len();
        if left > 0 {
            let error = tried.ok().and_then(Result::err).map(tracing::field::display);
            warn!(
                bus,
                left,
                error,
                "entries of the bus that are no events could not be stored before the stop; the bus has them"
            );
        }
    }

    /// Stores the entries that wait.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. Then they wait on.
    async fn try_again(&self, link: &Link) -> Result<(), RedisError> {
        let waiting: Vec<_> = self.waiting().values().map(Arc::clone).collect();
        for some in waiting.chunks(WRITE_MAX) {
            store(link, some).await?;
            let mut waiting = self.waiting();
            for one in some {
                waiting.remove(&(Arc::clone(&one.log), one.offset));
            }
        }
        Ok(())
    }
}

async fn store(link: &Link, invalid: &[Arc<Invalid>]) -> Result<(), RedisError> {
    let stream = link.prefix().invalid_stream();
    let mut pipe = Pipeline::new();
    for one in invalid {
        pipe.cmd("XADD").arg(&stream).arg("MAXLEN").arg("~").arg(MAX).arg("*");
        pipe.arg("stream").arg(&*one.log).arg("offset").arg(one.offset.to_string());
        pipe.arg("reason").arg(&one.reason).arg("entry").arg(&*one.raw);
    }
    match link.run_lasting("XADD", &pipe).await {
        // They are there. Another write would only add them again.
        Ok(_) | Err(RedisError::Unreplicated { .. }) => {}
        Err(error) => return Err(error),
    }
    for one in invalid {
        if let Some(suppressed) = INVALID.take(one.label) {
            warn!(stream = &*one.log, offset = %one.offset, reason = one.label, error = %one.reason,
                suppressed, "an entry of the bus is no event; kept in {stream}");
        }
    }
    Ok(())
}

/// The part of a text that is kept.
fn kept(text: &[u8]) -> &[u8] {
    &text[..text.len().min(BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use super::super::{EntryError, InvalidEntry};
    use super::*;
    use crate::redis::Target;

    #[test]
    fn of_a_long_entry_its_beginning_is_kept() {
        assert_eq!(kept(b"short"), b"short");
        let long = [vec![b'a'; BYTES_MAX], vec![b'b'; 100]].concat();
        assert_eq!(kept(&long), vec![b'a'; BYTES_MAX]);
    }

    fn at(ms: u64) -> Offset {
        Offset { ms, seq: 0 }
    }

    fn unreadable(ms: std::ops::RangeInclusive<u64>) -> Vec<Entry> {
        let invalid = || InvalidEntry { error: EntryError::Field, raw: b"x".to_vec() };
        ms.map(|ms| Entry { offset: at(ms), event: Err(invalid()) }).collect()
    }

    /// A Redis that cannot be reached.
    fn unreachable(url: &str) -> Link {
        Link::new(Target::new(url).unwrap(), Vec::new(), 0, Duration::from_secs(1))
    }

    #[tokio::test]
    async fn in_a_cluster_entries_wait_while_the_server_of_their_stream_is_unavailable() {
        let (aside, log) = (Aside::default(), Arc::from("log"));
        let link = unreachable("redis+cluster://127.0.0.1:1");
        let put = async |known: &[Range], entries: &[Entry]| {
            aside.put(&link, &log, known, entries).await.is_ok()
        };
        assert!(put(&[], &unreadable(1..=3)).await);
        assert!(put(&[(at(4), at(5))], &unreadable(3..=6)).await);
        let offsets: Vec<u64> = aside.waiting().keys().map(|(_, offset)| offset.ms).collect();
        assert_eq!(offsets, [1, 2, 3, 4, 6], "each once");
        assert!(aside.try_again(&link).await.is_err());
        assert_eq!(aside.waiting().len(), 5);
        assert!(!put(&[], &unreadable(7..=WAITING_MAX as u64 + 2)).await, "too many");
        assert!(put(&[], &unreadable(7..=WAITING_MAX as u64 + 1)).await);
        assert_eq!(aside.waiting().len(), WAITING_MAX);
    }

    #[tokio::test]
    async fn a_single_server_that_is_unavailable_ends_the_session() {
        let (aside, link) = (Aside::default(), unreachable("redis://127.0.0.1:1"));
        let put = aside.put(&link, &Arc::from("log"), &[], &unreadable(1..=1)).await;
        assert!(put.unwrap_err().is_passing());
        assert!(aside.waiting().is_empty());
    }
}
