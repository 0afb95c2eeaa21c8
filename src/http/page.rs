//! Paged lists: the page size and the cursor.

use std::sync::OnceLock;

use axum::http::Uri;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::problem::Problem;
use crate::signed_token::{Purpose, SigningKey};

/// The bounds of the parameter `limit`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub(super) default: u32,
    pub(super) least: u32,
    pub(super) most: u32,
}

impl Limit {
    /// The requested page size, if it is within the bounds.
    pub(super) fn of(self, asked: Option<u32>) -> Result<usize, Problem> {
        let Self { default, least, most } = self;
        let limit = asked.unwrap_or(default);
        if !(least..=most).contains(&limit) {
            let detail = format!("it is {limit}; write a whole number from {least} to {most}");
            return Err(Problem::field("limit", detail));
        }
        Ok(limit as usize)
    }
}

/// Signs and verifies list cursors. Under load, a request with a valid cursor has priority over a
/// request for a first page. So clients must not be able to forge a cursor, or use it for another
/// list.
#[derive(Debug, Default)]
pub(crate) struct Cursors(OnceLock<SigningKey>);

impl Cursors {
    /// The key that all processes on one Redis share. Until it is set, a key of this process signs.
    pub(crate) fn sign_with(&self, key: SigningKey) {
        let _ = self.0.set(key);
    }

    fn key(&self) -> &SigningKey {
        self.0.get_or_init(|| SigningKey::new(rand::random()))
    }

    /// The cursor for a place in the list at `path`.
    pub(super) fn write(&self, path: &str, place: &impl Serialize) -> String {
        // Numbers and strings always serialise.
        let payload = serde_json::to_vec(place).unwrap_or_default();
        self.key().issue(Purpose::Cursor(path), payload)
    }

    /// The place in a cursor that [`Self::write`] made for this path.
    pub(super) fn read<T: DeserializeOwned>(
        &self,
        path: &str,
        cursor: Option<&str>,
    ) -> Result<Option<T>, Problem> {
        let Some(cursor) = cursor else { return Ok(None) };
        let place = self.key().read(Purpose::Cursor(path), cursor);
        let place = place.and_then(|place| serde_json::from_slice(&place).ok());
        let detail = "it is not a cursor of this list; leave it out to start from the first page";
        place.map(Some).ok_or_else(|| Problem::field("cursor", detail))
    }

    /// Whether a request continues a list with a cursor.
    pub(super) fn continues(&self, uri: &Uri) -> bool {
        let cursor = uri
            .query()
            .and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("cursor=")));
        cursor.is_some_and(|text| self.key().read(Purpose::Cursor(uri.path()), text).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_back_and_anything_else_is_refused() {
        let cursors = Cursors::default();
        let place = ("日本".to_owned(), u64::MAX);
        let text = cursors.write("/bots", &place);
        assert_eq!(cursors.read("/bots", Some(&text)).unwrap(), Some(place.clone()));
        assert_eq!(cursors.read::<u64>("/bots", None).unwrap(), None);
        for wrong in ["", "!", "x", &cursors.write("/bots", &"text")] {
            assert!(cursors.read::<u64>("/bots", Some(wrong)).is_err(), "{wrong}");
        }
        assert!(cursors.read::<(String, u64)>("/dead", Some(&text)).is_err());
    }

    #[test]
    fn only_a_place_that_was_given_out_for_this_list_goes_on_with_it() {
        let cursors = Cursors::default();
        let text = cursors.write("/bots", &7);
        let continues = |uri: String| cursors.continues(&uri.parse().unwrap());
        assert!(continues(format!("/bots?cursor={text}")));
        assert!(continues(format!("/bots?limit=2&cursor={text}")));
        assert!(!continues("/bots?limit=2".to_owned()) && !continues("/bots".to_owned()));
        assert!(!continues("/bots?cursor=".to_owned()) && !continues("/bots?cursor=Nw".to_owned()));
        assert!(!continues(format!("/events?cursor={text}")));
        assert!(!continues(format!("/bots?cursor={}", Cursors::default().write("/bots", &7))));
    }

    #[test]
    fn a_limit_keeps_within_its_bounds() {
        let limit = Limit { default: 10, least: 1, most: 20 };
        assert_eq!(limit.of(None).unwrap(), 10);
        assert_eq!(limit.of(Some(20)).unwrap(), 20);
        assert!(limit.of(Some(0)).is_err() && limit.of(Some(21)).is_err());
    }
}
