//! Signed opaque tokens: lease capabilities, list cursors and sessions of browsers. A token is the base64url of its
//! content and of the first 16 bytes of its HMAC-SHA256.
//!
//! Tokens cannot be guessed and need no record. Every process on one Redis can verify them, because
//! all share the key ([`crate::redis::keys::signing_key`]).

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// Length of the key, in bytes.
pub(crate) const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
/// Maximum length of a token: the longest bot id and pipeline name take about 500 bytes.
pub(crate) const TEXT_MAX: usize = 1_024;

/// The purpose of a token. A token signed for another purpose is not accepted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose<'a> {
    /// A lease capability.
    Lease,
    /// A cursor of the list at this path.
    Cursor(&'a str),
    /// A session of the bearer of the token with this digest.
    Session(&'a [u8; 32]),
}

/// The signing key. Clones share it, also after it was replaced.
#[derive(Clone)]
pub(crate) struct SigningKey(Arc<RwLock<Keys>>);

#[derive(Clone, Copy)]
struct Keys {
    current: [u8; KEY_BYTES],
    /// The one before: its tokens are still accepted.
    former: Option<[u8; KEY_BYTES]>,
}

impl SigningKey {
    pub(crate) fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Arc::new(RwLock::new(Keys { current: bytes, former: None })))
    }

    /// The key that new tokens are signed with.
    pub(crate) fn current(&self) -> [u8; KEY_BYTES] {
        self.keys().current
    }

    /// Signs with this key from now on. Tokens of the one before stay valid.
    pub(crate) fn replace(&self, bytes: [u8; KEY_BYTES]) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *keys = Keys { current: bytes, former: Some(keys.current) };
    }

    fn keys(&self) -> Keys {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The token for `payload`. Safe in a path and in a query.
    pub(crate) fn issue(&self, purpose: Purpose<'_>, mut payload: Vec<u8>) -> String {
        let tag = mac(&self.current(), purpose, &payload).finalize().into_bytes();
        payload.extend_from_slice(&tag[..TAG_BYTES]);
        URL_SAFE_NO_PAD.encode(payload)
    }

    /// The content of a token; `None` if it was not signed with this key for this purpose.
    pub(crate) fn read(&self, purpose: Purpose<'_>, text: &str) -> Option<Vec<u8>> {
        let (payload, tag) = parts(text)?;
        let Keys { current, former } = self.keys();
        let is_signed =
            |key: &[u8; KEY_BYTES]| mac(key, purpose, &payload).verify_truncated_left(&tag).is_ok();
        [Some(current), former].iter().flatten().any(is_signed).then_some(payload)
    }

    /// The content of a token that is not verified: only to find what it must be verified for.
    pub(crate) fn unverified(text: &str) -> Option<Vec<u8>> {
        parts(text).map(|(payload, _)| payload)
    }
}

fn mac(key: &[u8; KEY_BYTES], purpose: Purpose<'_>, payload: &[u8]) -> Hmac<Sha256> {
    let mac = Hmac::<Sha256>::new_from_slice(key);
    let mac = mac.expect("HMAC takes keys of any length");
    match purpose {
        // A MessagePack array, whose first byte differs from that of any other purpose.
        Purpose::Lease => mac,
        Purpose::Cursor(path) => mac.chain_update("cursor ").chain_update(path).chain_update("\n"),
        Purpose::Session(digest) => mac.chain_update("session ").chain_update(digest),
    }
    .chain_update(payload)
}

/// The content and the tag of a token.
fn parts(text: &str) -> Option<(Vec<u8>, Vec<u8>)> {
    if text.len() > TEXT_MAX {
        return None;
    }
    let mut payload = URL_SAFE_NO_PAD.decode(text).ok()?;
    let tag = payload.split_off(payload.len().checked_sub(TAG_BYTES)?);
    Some((payload, tag))
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> SigningKey {
        SigningKey::new([7; KEY_BYTES])
    }

    #[test]
    fn a_text_is_read_back_by_every_process_that_has_the_key_and_for_its_purpose_only() {
        for payload in [&b""[..], b"\x00", b"|1|2|", &[0xff; 700]] {
            let text = key().issue(Purpose::Cursor("/a"), payload.to_vec());
            let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
            assert!(text.chars().all(legal) && text.len() <= TEXT_MAX, "{text}");
            assert_eq!(key().read(Purpose::Cursor("/a"), &text).as_deref(), Some(payload));
            assert_eq!(key().read(Purpose::Cursor("/b"), &text), None);
            assert_eq!(key().read(Purpose::Lease, &text), None);
            assert_eq!(key().read(Purpose::Session(&[7; 32]), &text), None);
            assert_eq!(SigningKey::new([8; KEY_BYTES]).read(Purpose::Cursor("/a"), &text), None);
        }
    }

    #[test]
    fn a_replaced_key_signs_and_tokens_of_the_one_before_stay_valid() {
        let (shared, clone) = (key(), key());
        let clone_of_shared = shared.clone();
        let old = shared.issue(Purpose::Lease, b"a".to_vec());
        shared.replace([8; KEY_BYTES]);
        assert_eq!(clone_of_shared.read(Purpose::Lease, &old).as_deref(), Some(&b"a"[..]));
        let new = clone_of_shared.issue(Purpose::Lease, b"b".to_vec());
        assert_eq!(SigningKey::new([8; KEY_BYTES]).read(Purpose::Lease, &new).unwrap(), b"b");
        assert_eq!(clone.read(Purpose::Lease, &new), None);
        shared.replace([9; KEY_BYTES]);
        assert_eq!(shared.read(Purpose::Lease, &old), None, "two keys ago");
    }

    #[test]
    fn a_session_is_of_one_token() {
        let text = key().issue(Purpose::Session(&[1; 32]), b"until".to_vec());
        assert_eq!(key().read(Purpose::Session(&[1; 32]), &text).as_deref(), Some(&b"until"[..]));
        assert_eq!(key().read(Purpose::Session(&[2; 32]), &text), None);
        assert_eq!(key().read(Purpose::Lease, &text), None);
    }

    #[test]
    fn a_changed_or_cut_text_is_not_read() {
        let text = key().issue(Purpose::Lease, b"a lease".to_vec());
        for at in 0..text.len() {
            let mut forged = text.clone().into_bytes();
            forged[at] = if forged[at] == b'A' { b'B' } else { b'A' };
            let forged = String::from_utf8(forged).unwrap();
            assert_eq!(key().read(Purpose::Lease, &forged), None, "at {at}");
            assert_eq!(key().read(Purpose::Lease, &text[..at]), None, "cut at {at}");
        }
        for other in ["", "A", "no such text", &"A".repeat(22), &"A".repeat(5_000)] {
            assert_eq!(key().read(Purpose::Lease, other), None, "{other}");
        }
        assert_eq!(key().read(Purpose::Lease, &format!("{text}=")), None);
    }
}
