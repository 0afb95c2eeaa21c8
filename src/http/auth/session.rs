//! Sessions of browsers: what a browser keeps instead of its token.
//!
//! A session contains the time of its end and the name of its token, signed for the digest of that
//! token with the key that all processes on one Redis share. So every process accepts it, without
//! a record; and it ends after [`HOURS`], when the token is removed, or when its text changes. The
//! token cannot be computed from it.

use std::sync::OnceLock;
use std::time::Duration;

use super::{Access, Caller};
use crate::clock::SharedClock;
use crate::signed_token::{Purpose, SigningKey};

/// Duration of a session.
pub(in super::super) const HOURS: u32 = 12;

/// Signs and verifies sessions.
#[derive(Default)]
pub(super) struct Sessions(OnceLock<(SigningKey, SharedClock)>);

impl Access {
    /// Sets the key that all processes on one Redis share, once. Before, there are no sessions.
    pub(crate) fn sign_sessions(&self, key: SigningKey, clock: SharedClock) {
        let _ = self.sessions.0.set((key, clock));
    }

    /// A new session of the bearer of a known token.
    pub(in super::super) fn open_session(&self, token: &str) -> Option<String> {
        let (digest, caller) = self.known(token.as_bytes())?;
        let (key, clock) = self.sessions.0.get()?;
        let end = clock.now() + Duration::from_secs(u64::from(HOURS) * 3_600);
        let mut content = end.as_secs().to_be_bytes().to_vec();
        content.extend_from_slice(caller.name().as_bytes());
        Some(key.issue(Purpose::Session(digest), content))
    }

    /// The caller of a session that has not ended.
    pub(super) fn of_session(&self, text: &str) -> Option<&Caller> {
        let (key, clock) = self.sessions.0.get()?;
        let content = SigningKey::unverified(text)?;
        let (end, name) = content.split_first_chunk()?;
        let is_named = |(_, caller): &&([u8; 32], Caller)| caller.name().as_bytes() == name;
        let (digest, caller) = self.tokens.iter().find(is_named)?;
        key.read(Purpose::Session(digest), text)?;
        (clock.now().as_secs() < u64::from_be_bytes(*end)).then_some(caller)
    }
}
