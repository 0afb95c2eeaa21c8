//! Signed tokens: capabilities of leases, cursors of lists.

use crate::queue::capability::Capability;
use crate::signed_token::{KEY_BYTES, Purpose, SigningKey, TEXT_MAX};

const PATH: &str = "/v1/pipelines/tags/bots";
const DIGEST: [u8; 32] = [7; 32];
const PURPOSES: [Purpose<'static>; 4] = [
    Purpose::Lease,
    Purpose::Cursor(PATH),
    Purpose::Cursor("/v1/audit"),
    Purpose::Session(&DIGEST),
];

/// A text that claims to be a token, and the content of a token: both are the whole input. Its first two
/// bytes also choose how a good token is spoilt.
///
/// # Panics
/// If a text that was not issued is read, or a token is read for another purpose.
pub fn token(data: &[u8]) {
    let key = SigningKey::new([7; KEY_BYTES]);
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = SigningKey::unverified(text);
        for purpose in PURPOSES {
            if let Some(content) = key.read(purpose, text) {
                assert_eq!(key.issue(purpose, content), text, "a token has one spelling");
            }
        }
        crate::http::fuzzing::cursor(&key, PATH, text);
    }
    let content = &data[..data.len().min(TEXT_MAX / 4 * 3 - 16)];
    let collides = content.starts_with(b"cursor ") || content.starts_with(b"session ");
    for (place, purpose) in PURPOSES.into_iter().enumerate() {
        let text = key.issue(purpose, content.to_vec());
        assert!(text.len() <= TEXT_MAX);
        assert_eq!(key.read(purpose, &text).as_deref(), Some(content));
        assert_eq!(SigningKey::unverified(&text).as_deref(), Some(content));
        assert_eq!(SigningKey::new([8; KEY_BYTES]).read(purpose, &text), None);
        // The content of a lease is an array of MessagePack, never such a word.
        for (other, purpose) in PURPOSES.into_iter().enumerate().filter(|_| !collides) {
            assert_eq!(key.read(purpose, &text).is_some(), other == place);
        }
        assert_eq!(key.read(purpose, &spoilt(&text, data)), None);
    }
    let text = key.issue(Purpose::Lease, content.to_vec());
    if let Some(capability) = Capability::read(&key, &text) {
        let again = Capability::read(&key, &capability.issue(&key));
        assert_eq!(again, Some(capability));
    }
    crate::http::fuzzing::cursor(&key, PATH, &key.issue(Purpose::Cursor(PATH), content.to_vec()));
}

/// The token with another character, without one, or with one more.
fn spoilt(text: &str, data: &[u8]) -> String {
    let byte = |at: usize| usize::from(data.get(at).copied().unwrap_or_default());
    let (at, how) = (byte(0) * 7 % text.len(), byte(1));
    let mut bytes = text.as_bytes().to_vec();
    match how % 3 {
        0 => bytes[at] = if bytes[at] == b'A' { b'-' } else { b'A' },
        1 => drop(bytes.remove(at)),
        _ => bytes.insert(at, b"Az9-_= "[how / 3 % 7]),
    }
    String::from_utf8(bytes).expect("tokens are ASCII")
}
