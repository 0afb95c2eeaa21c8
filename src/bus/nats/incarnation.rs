//! Offsets of a stream: when it was made (ms since 1970), and the sequence.
//!
//! A stream that is made anew is later, so its offsets are. But a stream can also lose its last
//! messages: after a power cut, and when a backup is restored. It then assigns their sequences
//! again, and shards would take the new messages for copied ones. `JetStream` can raise the next
//! sequence only by deleting all messages, which belong to others too. So the messages after such a
//! fall belong to a new *incarnation*: their offsets begin 1 ms after those of the one before.
//!
//! A shard stores only its position, so the falls must be stored with the stream: see
//! [`super::falls`].

use crate::id::Offset;

/// A time at which a stream lost its last messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fall {
    /// The number of the incarnation that begins with it, from 1.
    pub(super) number: u64,
    /// The last sequence that was left.
    pub(super) after: u64,
}

/// What is needed to convert between offsets and sequences of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Incarnations {
    /// When the stream was made, ms since 1970.
    created: u64,
    /// In ascending order of both fields.
    falls: Vec<Fall>,
}

impl Incarnations {
    /// The falls may have any order.
    pub(super) fn new(created: u64, falls: impl IntoIterator<Item = Fall>) -> Self {
        let mut all: Vec<_> = falls.into_iter().collect();
        all.sort_by_key(|fall| fall.number);
        let new = Self { created, falls: Vec::new() };
        all.into_iter().fold(new, Self::with)
    }

    /// When the stream was made, ms since 1970.
    pub(super) fn created(&self) -> u64 {
        self.created
    }

    pub(super) fn falls(&self) -> &[Fall] {
        &self.falls
    }

    /// The offset of the message with this sequence.
    pub(super) fn offset(&self, seq: u64) -> Offset {
        self.at(seq, |fall| fall.after < seq)
    }

    /// The position of a reader that has read up to this sequence. It is behind the last message
    /// before a fall and also behind those that were lost then.
    pub(super) fn reached(&self, seq: u64) -> Offset {
        self.at(seq, |fall| fall.after <= seq)
    }

    fn at(&self, seq: u64, began: impl Fn(&&Fall) -> bool) -> Offset {
        let number = self.falls.iter().rev().find(began).map_or(0, |fall| fall.number);
        Offset { ms: self.created.saturating_add(number), seq }
    }

    /// The first sequence whose offset is later than `position`: 1 if it is of an older stream.
    pub(super) fn next(&self, position: Offset) -> u64 {
        let Some(number) = position.ms.checked_sub(self.created) else { return 1 };
        let fall = self.falls.iter().find(|fall| fall.number > number);
        fall.map_or(position.seq, |fall| position.seq.min(fall.after)).saturating_add(1)
    }

    /// The first sequence whose offset is not before `position`.
    pub(super) fn from(&self, position: Offset) -> u64 {
        let before = Offset { seq: position.seq.saturating_sub(1), ..position };
        if position.ms < self.created { 1 } else { self.next(before) }
    }

    /// The fall that the positions of the shards prove, and that is not known. `lowest` and `highest`
    /// are positions of shards, `last` is the last sequence of the stream.
    pub(super) fn unknown_fall(&self, lowest: Offset, highest: Offset, last: u64) -> Option<Fall> {
        let number = highest.ms.checked_sub(self.created)?;
        let known = self.falls.last().map_or(0, |fall| fall.number);
        if number <= known {
            return (self.next(highest) - 1 > last)
                .then_some(Fall { number: known + 1, after: last });
        }
        if number > NUMBER_MAX {
            // The clock of the server went back before the stream was made anew: all is new.
            return Some(Fall { number: number + 1, after: 0 });
        }
        if highest.seq > last {
            // A backup from before that fall was restored.
            return Some(Fall { number: number + 1, after: last });
        }
        // The record of the fall is lost. It was below the highest position, and not above the
        // lowest one if both are of this incarnation.
        let before = highest.seq.saturating_sub(1);
        let after = if lowest.ms == highest.ms { lowest.seq } else { lowest.seq.min(before) };
        Some(Fall { number, after: after.min(highest.seq) })
    }

    /// With another fall, the latest one.
    #[must_use]
    pub(super) fn with(mut self, fall: Fall) -> Self {
        // What came after it is lost, and so are falls there.
        self.falls.retain(|earlier| earlier.after < fall.after && earlier.number < fall.number);
        self.falls.push(fall);
        if self.falls.len() > FALLS_MAX {
            self.falls.remove(0);
        }
        self
    }
}

/// Maximum number of falls that are kept. Older ones only matter to shards that have read nothing
/// since.
const FALLS_MAX: usize = 32;
/// Maximum number of an incarnation. A higher difference between two times of creation means two
/// streams.
const NUMBER_MAX: u64 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    const MADE: u64 = 1_700_000_000_000;

    fn at(ms: u64, seq: u64) -> Offset {
        Offset { ms: MADE + ms, seq }
    }

    fn stream(falls: &[(u64, u64)]) -> Incarnations {
        Incarnations::new(MADE, falls.iter().map(|&(number, after)| Fall { number, after }))
    }

    #[test]
    fn offsets_ascend_with_the_sequence_and_lead_back_to_it() {
        for falls in [&[][..], &[(1, 5)], &[(1, 5), (2, 9)], &[(1, 9), (2, 5)], &[(1, 0)]] {
            let stream = stream(falls);
            for seq in 1..15 {
                assert!(stream.offset(seq) < stream.offset(seq + 1), "{falls:?}");
                assert!(stream.offset(seq) <= stream.reached(seq), "{falls:?}");
                assert!(stream.reached(seq) < stream.offset(seq + 1), "{falls:?}");
                assert_eq!(stream.next(stream.offset(seq)), seq + 1, "{falls:?}");
                assert_eq!(stream.next(stream.reached(seq)), seq + 1, "{falls:?}");
                assert_eq!(stream.from(stream.offset(seq)), seq, "{falls:?}");
            }
            assert_eq!(stream.next(Offset::default()), 1);
            assert_eq!(stream.from(Offset::default()), 1);
            assert_eq!(stream.next(Offset { ms: MADE - 1, seq: 700 }), 1);
        }
    }

    #[test]
    fn after_a_fall_each_shard_gets_what_it_does_not_have() {
        let stream = stream(&[]);
        assert_eq!(stream.unknown_fall(at(0, 850), at(0, 900), 900), None);
        let fall = stream.unknown_fall(at(0, 850), at(0, 1_000), 900).unwrap();
        assert_eq!(fall, Fall { number: 1, after: 900 });
        let stream = stream.with(fall);
        assert_eq!(stream.next(at(0, 850)), 851);
        assert_eq!(stream.next(at(0, 1_000)), 901);
        // What the highest shard has is before its position, and what is new is behind it.
        assert!(stream.offset(900) < at(0, 1_000) && stream.offset(901) > at(0, 1_000));
        // It is known now, also when new messages were read.
        assert_eq!(stream.unknown_fall(at(0, 850), at(0, 1_000), 900), None);
        assert_eq!(stream.unknown_fall(at(0, 850), at(1, 905), 910), None);
        // Another one, below the first.
        let fall = stream.unknown_fall(at(1, 903), at(1, 905), 880).unwrap();
        assert_eq!(stream.with(fall).falls(), [Fall { number: 2, after: 880 }]);
    }

    #[test]
    fn a_lost_record_of_a_fall_is_made_again_from_the_positions() {
        let stream = stream(&[]);
        let fall = stream.unknown_fall(at(1, 903), at(1, 905), 950).unwrap();
        assert_eq!(fall, Fall { number: 1, after: 903 });
        let stream = stream.with(fall);
        assert_eq!((stream.next(at(1, 903)), stream.next(at(1, 905))), (904, 906));
        // Together with another fall.
        let fall = self::stream(&[]).unknown_fall(at(1, 903), at(1, 905), 880).unwrap();
        assert_eq!(fall, Fall { number: 2, after: 880 });
        // A shard that has read nothing since gets at least what is behind its position.
        let fall = self::stream(&[]).unknown_fall(at(0, 850), at(1, 905), 950).unwrap();
        assert_eq!(fall, Fall { number: 1, after: 850 });
        // Nothing was left then, and nothing was read since.
        let fall = self::stream(&[]).unknown_fall(at(0, 850), at(1, 0), 5).unwrap();
        assert_eq!(fall, Fall { number: 1, after: 0 });
    }

    #[test]
    fn a_stream_made_anew_is_new_even_if_the_clock_went_back() {
        let stream = stream(&[]);
        let fall = stream.unknown_fall(at(3_600_000, 5), at(3_600_000, 9), 20).unwrap();
        let stream = stream.with(fall);
        assert_eq!(stream.next(at(3_600_000, 9)), 1);
        assert!(stream.offset(1) > at(3_600_000, 9));
        assert_eq!(stream.unknown_fall(at(3_600_000, 9), at(3_600_000, 9), 20), None);
    }
}
