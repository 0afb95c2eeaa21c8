//! What names a lease to a receiver outside: `{lease}` of `/v1/leases/{lease}/…`.
//!
//! base64url of a `MessagePack` array and the first 16 bytes of its HMAC-SHA256. It cannot be
//! guessed, needs no record anywhere, and every process on one Redis can read it: they share the
//! key ([`crate::keyspace::keys::LEASE_KEY`]). It allows nothing but to end or extend this lease,
//! and nothing at all once that is gone.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::id::{BotId, PipelineName};

/// Bytes of the key.
pub(crate) const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
/// Longest text that is looked at: the longest bot id and pipeline name take about 500 bytes.
const TEXT_MAX: usize = 1_024;

/// Of which lease, and what its holder knew when it was given out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capability {
    pub(crate) pipeline: PipelineName,
    pub(crate) bot: BotId,
    /// The run of the server that gave the lease.
    pub(crate) run: String,
    pub(crate) fence: u64,
    /// Events of the slice.
    pub(crate) n: usize,
    /// How long the lease lasts from a 202 or an extension, ms.
    pub(crate) ttl_ms: u64,
}

/// The key that signs.
#[derive(Clone)]
pub(crate) struct LeaseKey([u8; KEY_BYTES]);

impl LeaseKey {
    pub(crate) fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// The text that names a lease. Safe in a path.
    pub(crate) fn issue(&self, capability: &Capability) -> String {
        let mut bytes = rmp_serde::to_vec(capability)
            .expect("a Vec takes every byte, and texts and numbers always encode");
        let tag = self.mac(&bytes).finalize().into_bytes();
        bytes.extend_from_slice(&tag[..TAG_BYTES]);
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// What a text names; `None` when we did not issue it.
    pub(crate) fn read(&self, text: &str) -> Option<Capability> {
        if text.len() > TEXT_MAX {
            return None;
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (payload, tag) = bytes.split_at_checked(bytes.len().checked_sub(TAG_BYTES)?)?;
        self.mac(payload).verify_truncated_left(tag).ok()?;
        rmp_serde::from_slice(payload).ok()
    }

    fn mac(&self, payload: &[u8]) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.0);
        mac.expect("HMAC takes keys of any length").chain_update(payload)
    }
}

impl fmt::Debug for LeaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeaseKey(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capability(bot: &str) -> Capability {
        Capability {
            pipeline: PipelineName::parse(&"p".repeat(64)).unwrap(),
            bot: BotId::parse(bot).unwrap(),
            run: "0123abcd".to_owned(),
            fence: 1_760_000_000_000_001,
            n: 5_000,
            ttl_ms: 3_600_000,
        }
    }

    #[test]
    fn a_capability_is_read_back_by_every_process_that_has_the_key() {
        for bot in ["b", "|1|2|", "日本/..?%00#", &"x".repeat(256)] {
            let text = LeaseKey::new([7; 32]).issue(&capability(bot));
            let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
            assert!(text.chars().all(legal) && text.len() <= TEXT_MAX, "{text}");
            assert_eq!(LeaseKey::new([7; 32]).read(&text), Some(capability(bot)));
            assert_eq!(LeaseKey::new([8; 32]).read(&text), None);
        }
    }

    #[test]
    fn what_was_changed_anywhere_or_cut_is_not_read() {
        let key = LeaseKey::new([7; 32]);
        let text = key.issue(&capability("b"));
        for at in 0..text.len() {
            let mut forged = text.clone().into_bytes();
            forged[at] = if forged[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(key.read(&String::from_utf8(forged).unwrap()), None, "at {at}");
            assert_eq!(key.read(&text[..at]), None, "cut at {at}");
        }
        for other in ["", "A", "no such lease", &"A".repeat(22), &"A".repeat(5_000)] {
            assert_eq!(key.read(other), None, "{other}");
        }
        assert_eq!(key.read(&format!("{text}=")), None);
    }
}
