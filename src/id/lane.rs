//! Lanes: the parts of a bot's events that keep their order.

use std::fmt;

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

/// The number of lanes of a bot. Redis stores lanes, so it never changes.
pub const LANES: u8 = 64;

/// A fixed subset of the ordering keys of a bot: `xxh3(key) % 64`. The events of a lane are handled in
/// order. Redis stores lanes, so the hash never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Lane(u8);

impl Lane {
    /// The lane of an ordering key.
    #[must_use]
    pub fn of(key: &str) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of a u8")]
        Self((xxh3_64(key.as_bytes()) % u64::from(LANES)) as u8)
    }

    /// Every lane.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        (0..LANES).map(Self)
    }

    /// The lane with this number; `None` if there is none.
    #[must_use]
    pub fn from_digits(text: &str) -> Option<Self> {
        text.parse().ok().filter(|number| *number < LANES).map(Self)
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_same_lane_for_ever() {
        assert_eq!(Lane::of(""), Lane::of(""));
        let lanes: Vec<String> =
            ["", "ann", "bob", "日本"].map(|key| Lane::of(key).to_string()).to_vec();
        assert!(lanes.iter().all(|lane| Lane::from_digits(lane).is_some()), "{lanes:?}");
        assert_eq!(Lane::from_digits("64"), None);
    }

    #[test]
    fn many_keys_use_all_lanes() {
        let mut used: Vec<Lane> = (0..2_000).map(|key| Lane::of(&format!("user-{key}"))).collect();
        used.sort_unstable();
        used.dedup();
        assert_eq!(used, Lane::all().collect::<Vec<_>>());
    }
}
