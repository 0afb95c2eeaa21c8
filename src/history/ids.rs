//! The events of an attempt, as short hashes of their ids: enough to find the attempts of an event.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::ser::{Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_64;

/// Maximum number of events of a note. A longer slice is found by its first and last event only.
const MAX: usize = 512;

/// Hashes of ids, of 4 bytes each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ids(Vec<u8>);

impl Ids {
    /// The hashes of these ids; none if there are too many.
    pub(crate) fn of<'a>(ids: impl ExactSizeIterator<Item = &'a str>) -> Self {
        if ids.len() > MAX {
            return Self::default();
        }
        let mut hashes = Vec::with_capacity(ids.len() * size_of::<u32>());
        for id in ids {
            hashes.extend_from_slice(&hash(id).to_be_bytes());
        }
        Self(hashes)
    }

    /// Whether the id is one of them, with a probability of an error of `MAX` to 2^32.
    pub(crate) fn contain(&self, id: &str) -> bool {
        let hash = hash(id).to_be_bytes();
        self.0.chunks_exact(hash.len()).any(|one| one == hash)
    }

    /// Adds the ids of a note. Returns whether there was room.
    pub(crate) fn join(&mut self, other: &Self) -> bool {
        let fits = self.0.len() + other.0.len() <= MAX * size_of::<u32>();
        if fits {
            self.0.extend_from_slice(&other.0);
        }
        fits
    }
}

fn hash(id: &str) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "a short hash")]
    let short = xxh3_64(id.as_bytes()) as u32;
    short
}

impl Serialize for Ids {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Ids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("hashes of ids")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Ids, E> {
                Ok(Ids(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_found_among_those_of_a_note_and_joined_ones() {
        let mut ids = Ids::of(["a", "b"].into_iter());
        assert!(ids.contain("a") && ids.contain("b") && !ids.contain("c"));
        assert!(ids.join(&Ids::of(["c"].into_iter())) && ids.contain("c"));
        let many: Vec<String> = (0..MAX).map(|n| n.to_string()).collect();
        let full = Ids::of(many.iter().map(String::as_str));
        assert!(full.contain("511") && !ids.join(&full) && !ids.contain("511"));
        let packed = rmp_serde::to_vec(&ids).unwrap();
        assert_eq!(packed.len(), 2 + 12);
        assert_eq!(rmp_serde::from_slice::<Ids>(&packed).unwrap(), ids);
    }
}
