//! The decisions that are stored with a profile.

use crate::automations::decide::Decision;
use crate::automations::subscribers::Kept;
use crate::id::Sequence;

/// How long decisions are kept after their slice, µs. When Redis loses its last writes, about a
/// second at most, it hands out events again whose effects are done.
const KEPT_US: u64 = 5_000_000;
/// Maximum number and bytes of decisions that are kept for that purpose.
const KEPT_MAX: usize = 200;
const KEPT_MAX_BYTES: usize = 256 << 10;

/// The stored decision about an event, and its bytes.
pub(super) fn decided_before(kept: &Kept, sequence: Sequence) -> Result<(Decision, usize), String> {
    let found = kept.decided.iter().find(|(decided, _)| *decided == sequence);
    let Some((_, text)) = found else { return Ok((Decision::default(), 0)) };
    let decision = serde_json::from_str(text);
    let decision =
        decision.map_err(|error| format!("the stored decision cannot be read: {error}"))?;
    Ok((decision, text.len()))
}

/// Drops decisions that cannot be needed any more: `first` is the first event that is not done.
pub(super) fn forget(decided: &mut Vec<(Sequence, String)>, first: u64) {
    decided.retain(|(sequence, _)| sequence.get() >= first.saturating_sub(KEPT_US));
    let done = decided.partition_point(|(sequence, _)| sequence.get() < first);
    let mut bytes = 0;
    let fits = |(_, text): &&(Sequence, String)| {
        bytes += text.len();
        bytes <= KEPT_MAX_BYTES
    };
    let kept = decided[..done].iter().rev().take(KEPT_MAX).take_while(fits).count();
    decided.drain(..done - kept);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_kept_for_the_slice_and_some_seconds_and_a_bounded_number_of_them() {
        let mut decided: Vec<_> = (0..1_000_u64)
            .map(|n| (Sequence::new(10_000_000 + n * 10_000), String::new()))
            .collect();
        // The slice starts at the 900th; five seconds are 500 events.
        let first = 10_000_000 + 900 * 10_000;
        forget(&mut decided, first);
        assert_eq!(decided.len(), 100 + KEPT_MAX);
        assert_eq!(decided.last().unwrap().0.get(), 10_000_000 + 999 * 10_000);
        for (_, text) in &mut decided {
            *text = "x".repeat(KEPT_MAX_BYTES / 3);
        }
        forget(&mut decided, first);
        assert_eq!(decided.len(), 100 + 3);
        forget(&mut decided, first + 60_000_000);
        assert!(decided.is_empty());
    }
}
