//! The room of a bot for one more rule.
//!
//! Several processes may check the rules of a bot together, and then write. So each new rule takes one of
//! [`RULES_MAX`] places, and a unique index refuses a place that another rule has. Rules of earlier versions
//! have no place. For each of them, one of the last places is not given away.

use mongodb::bson::RawDocumentBuf;
use rand::seq::IteratorRandom as _;

use super::rule::{RULES_MAX, RULES_MAX_BYTES};
use super::store::{SEPARATOR, WriteError};
use crate::id::BotId;

/// A free place for a rule of `bytes` beside the `others` of its bot. Chosen at random, so that processes that
/// write together rarely choose the same one.
pub(super) fn free_place<'a>(
    bot: &BotId,
    bytes: usize,
    others: impl Iterator<Item = &'a RawDocumentBuf>,
) -> Result<String, WriteError> {
    let (mut count, mut sum) = (1, bytes);
    let (mut taken, mut without) = ([false; RULES_MAX], 0);
    for other in others {
        count += 1;
        sum += usize::try_from(other.get_i64("bytes").unwrap_or(0)).unwrap_or(0);
        match place_of(other).and_then(|place| taken.get_mut(place)) {
            Some(place) => *place = true,
            None => without += 1,
        }
    }
    if count > RULES_MAX {
        return Err(WriteError::TooMany);
    }
    if sum > RULES_MAX_BYTES {
        return Err(WriteError::TooLarge(sum));
    }
    let free = (0..RULES_MAX - without).filter(|place| !taken[*place]);
    let place = free.choose(&mut rand::rng()).ok_or(WriteError::TooMany)?;
    Ok(format!("{bot}{SEPARATOR}{place}"))
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
}
