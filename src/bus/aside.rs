//! Keeps entries that are no events, for operators.

use redis::Pipeline;
use tracing::warn;

use super::{BusError, Entry};
use crate::fanout::{Range, is_in};
use crate::metrics;
use crate::redis::Link;
use crate::telemetry::PerReason;

/// Approximate number of unreadable entries that are kept, and the maximum of bytes of each: one
/// producer can write many, and they must not fill Redis. The bus has the whole entry.
const MAX: usize = 10_000;
const BYTES_MAX: usize = 4 * 1_024;
/// When entries that are no events were last logged, by reason: each producer can write many.
static INVALID: PerReason = PerReason::new();

/// Stores the entries of a log that are no events, except for those in the `known` ranges. May store
/// one twice after an error.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(super) async fn put(
    link: &Link,
    log: &str,
    known: &[Range],
    entries: &[Entry],
) -> Result<(), BusError> {
    let invalid = || {
        let invalid = move |entry: &'_ Entry| entry.event.is_err() && !is_in(known, entry.offset);
        entries.iter().filter(move |entry| invalid(entry))
    };
    if invalid().next().is_none() {
        return Ok(());
    }
    let stream = link.prefix().invalid_stream();
    let mut pipe = Pipeline::new();
    for Entry { offset, event } in invalid() {
        let Err(invalid) = event else { continue };
        pipe.cmd("XADD").arg(&stream).arg("MAXLEN").arg("~").arg(MAX).arg("*");
        pipe.arg("stream").arg(log).arg("offset").arg(offset.to_string());
        pipe.arg("reason").arg(invalid.error.to_string()).arg("entry").arg(kept(&invalid.raw));
    }
    link.run_lasting("XADD", &pipe).await?;
    for Entry { offset, event } in invalid() {
        let Err(invalid) = event else { continue };
        let reason = invalid.error.label();
        metrics::bus_invalid(reason);
        if let Some(suppressed) = INVALID.take(reason) {
            warn!(stream = log, %offset, reason, error = %invalid.error, suppressed,
                "an entry of the bus is no event; kept in {stream}");
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
    use super::*;

    #[test]
    fn of_a_long_entry_its_beginning_is_kept() {
        assert_eq!(kept(b"short"), b"short");
        let long = [vec![b'a'; BYTES_MAX], vec![b'b'; 100]].concat();
        assert_eq!(kept(&long), vec![b'a'; BYTES_MAX]);
    }
}
