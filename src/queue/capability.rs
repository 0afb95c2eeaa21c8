//! The capability of a lease for a receiver: `{lease}` in `/v1/leases/{lease}/…`.
//!
//! It is a signed token ([`crate::signed_token`]) that contains a `MessagePack` array. It permits
//! only ending or extending this lease, and nothing after the lease has ended.

use serde::{Deserialize, Serialize};

use crate::id::{BotId, PipelineName};
use crate::signed_token::{Purpose, SigningKey};

/// The lease, and its state when the capability was issued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capability {
    pub(crate) pipeline: PipelineName,
    pub(crate) bot: BotId,
    /// The run id of the Redis server that granted the lease.
    pub(crate) run: String,
    pub(crate) fence: u64,
    /// Number of events in the slice.
    pub(crate) n: usize,
    /// The duration of the lease after a 202 or an extension, ms.
    pub(crate) ttl_ms: u64,
}

impl Capability {
    /// The token, safe in a URL path.
    pub(crate) fn issue(&self, key: &SigningKey) -> String {
        let bytes = rmp_serde::to_vec(self)
            .expect("writing to a Vec cannot fail, and strings and numbers always serialise");
        key.issue(Purpose::Lease, bytes)
    }

    /// Parses a token; `None` if this deployment did not issue it.
    pub(crate) fn read(key: &SigningKey, text: &str) -> Option<Self> {
        rmp_serde::from_slice(&key.read(Purpose::Lease, text)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signed_token::TEXT_MAX;

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
