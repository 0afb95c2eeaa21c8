//! What names a lease to a receiver outside: `{lease}` of `/v1/leases/{lease}/…`.
//!
//! A signed text ([`crate::signing`]) that holds a `MessagePack` array. It allows nothing but to end
//! or extend this lease, and nothing at all once that is gone.

use serde::{Deserialize, Serialize};

use crate::id::{BotId, PipelineName};
use crate::signing::{Purpose, SigningKey};

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

impl Capability {
    /// The text that names the lease. Safe in a path.
    pub(crate) fn issue(&self, key: &SigningKey) -> String {
        let bytes = rmp_serde::to_vec(self)
            .expect("a Vec takes every byte, and texts and numbers always encode");
        key.issue(Purpose::Lease, bytes)
    }

    /// What a text names; `None` when we did not issue it.
    pub(crate) fn read(key: &SigningKey, text: &str) -> Option<Self> {
        rmp_serde::from_slice(&key.read(Purpose::Lease, text)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signing::TEXT_MAX;

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
    fn a_capability_is_read_back() {
        let key = SigningKey::new([7; 32]);
        for bot in ["b", "|1|2|", "日本/..?%00#", &"x".repeat(256)] {
            let text = capability(bot).issue(&key);
            assert!(text.len() <= TEXT_MAX, "{text}");
            assert_eq!(Capability::read(&key, &text), Some(capability(bot)));
        }
        assert_eq!(Capability::read(&key, &key.issue(Purpose::Lease, b"text".to_vec())), None);
    }
}
