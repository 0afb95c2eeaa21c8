//! The room of a bot for one more rule.
//!
//! Several processes may check the rules of a bot together, and then write. So each new rule takes one of
//! [`RULES_MAX`] places, and a unique index refuses a place that another rule has. Rules of earlier versions
//! have no place. For each of them, one of the last places is not given away.

use mongodb::bson::RawDocumentBuf;
use rand::seq::IteratorRandom as _;

use super::rule::{RULES_MAX, RULES_MAX_BYTES, RULES_MAX_MEMORY};
use super::store::{SEPARATOR, WriteError};
use crate::id::BotId;

/// A free place for a rule of this size, in bytes of JSON, beside the `others` of its bot. Chosen at random,
/// so that processes that write together rarely choose the same one.
pub(super) fn free_place<'a>(
    bot: &BotId,
    mut bytes: usize,
    others: impl Iterator<Item = &'a RawDocumentBuf>,
) -> Result<String, WriteError> {
    let (mut count, mut taken, mut without) = (1, [false; RULES_MAX], 0);
    for other in others {
        count += 1;
        bytes += number_in(other, "bytes");
        match place_of(other).and_then(|place| taken.get_mut(place)) {
            Some(place) => *place = true,
            None => without += 1,
        }
    }
    if count > RULES_MAX {
        return Err(WriteError::TooMany);
    }
    if bytes > RULES_MAX_BYTES {
        return Err(WriteError::TooLarge(bytes));
    }
    let free = (0..RULES_MAX - without).filter(|place| !taken[*place]);
    let place = free.choose(&mut rand::rng()).ok_or(WriteError::TooMany)?;
    Ok(format!("{bot}{SEPARATOR}{place}"))
}

/// Refuses a rule with which those of its bot would take too much memory. One that takes no more than it did
/// `before` is accepted, so that a set of an earlier version can become smaller rule by rule.
pub(super) fn check_memory(memory: usize, before: usize, others: usize) -> Result<(), WriteError> {
    let sum = memory + others;
    if memory > before && sum > RULES_MAX_MEMORY {
        return Err(WriteError::TooMuchMemory(sum));
    }
    Ok(())
}

/// A size of a rule; 0 if an earlier version wrote it without.
pub(super) fn number_in(document: &RawDocumentBuf, field: &str) -> usize {
    usize::try_from(document.get_i64(field).unwrap_or(0)).unwrap_or(0)
}

/// The number in a rule's place.
fn place_of(document: &RawDocumentBuf) -> Option<usize> {
    document.get_str("place").ok()?.rsplit(SEPARATOR).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use mongodb::bson::doc;

    use super::*;

    fn bot() -> BotId {
        BotId::parse("b").unwrap()
    }

    fn rule(place: Option<usize>, bytes: i64) -> RawDocumentBuf {
        let mut rule = doc! { "_id": "b\u{1f}r", "bytes": bytes };
        if let Some(place) = place {
            rule.insert("place", format!("b\u{1f}{place}"));
        }
        RawDocumentBuf::try_from(&rule).unwrap()
    }

    #[test]
    fn a_rule_gets_a_place_that_is_free_and_that_no_earlier_rule_needs() {
        let mut rules: Vec<_> = (0..1_000).map(|n| rule(Some(n), 1)).collect();
        assert!(matches!(free_place(&bot(), 1, rules.iter()), Err(WriteError::TooMany)));
        rules.remove(7);
        assert_eq!(free_place(&bot(), 1, rules.iter()).unwrap(), "b\u{1f}7");
        // The last two places are for the two rules without one.
        rules.truncate(997);
        rules.extend([rule(None, 1), rule(None, 1)]);
        assert_eq!(free_place(&bot(), 1, rules.iter()).unwrap(), "b\u{1f}7");
        rules.push(rule(None, 1));
        assert!(matches!(free_place(&bot(), 1, rules.iter()), Err(WriteError::TooMany)));
    }

    #[test]
    fn rules_have_4_mib_together() {
        let rules = [rule(None, 4 << 20)];
        assert!(free_place(&bot(), 0, rules.iter()).is_ok());
        assert!(matches!(free_place(&bot(), 1, rules.iter()), Err(WriteError::TooLarge(_))));
    }

    #[test]
    fn rules_take_32_mib_of_memory_together_and_more_only_if_they_did_before() {
        assert!(check_memory(1 << 20, 0, 31 << 20).is_ok());
        let refused = check_memory((1 << 20) + 1, 0, 31 << 20).unwrap_err();
        assert!(refused.to_string().contains("at most 33554432 are allowed"), "{refused}");
        assert!(check_memory(1 << 20, 1 << 20, 50 << 20).is_ok(), "a disabled one takes as much");
        assert!(check_memory((1 << 20) + 1, 1 << 20, 50 << 20).is_err());
    }
}
