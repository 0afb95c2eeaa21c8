//! Lists page by page: how many, and from where on.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::problem::Problem;

/// The bounds of the parameter `limit`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub(super) default: u32,
    pub(super) least: u32,
    pub(super) most: u32,
}

impl Limit {
    /// What was asked for, within the bounds.
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

/// A place in a list as the text that clients hand back.
pub(super) fn cursor(place: &impl Serialize) -> String {
    // Numbers and texts always encode.
    BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(place).unwrap_or_default())
}

/// The place that [`cursor`] wrote.
pub(super) fn after<T: DeserializeOwned>(cursor: Option<&str>) -> Result<Option<T>, Problem> {
    let Some(cursor) = cursor else { return Ok(None) };
    let place = BASE64_URL_SAFE_NO_PAD.decode(cursor).ok();
    let place = place.and_then(|place| serde_json::from_slice(&place).ok());
    let detail = "it is none that this list gave out; leave it out to begin anew";
    place.map(Some).ok_or_else(|| Problem::field("cursor", detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_back_and_anything_else_is_refused() {
        let place = ("日本".to_owned(), u64::MAX);
        assert_eq!(after(Some(&cursor(&place))).unwrap(), Some(place));
        assert_eq!(after::<u64>(None).unwrap(), None);
        for wrong in ["", "!", "x", &cursor(&"text")] {
            assert!(after::<u64>(Some(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_limit_keeps_within_its_bounds() {
        let limit = Limit { default: 10, least: 1, most: 20 };
        assert_eq!(limit.of(None).unwrap(), 10);
        assert_eq!(limit.of(Some(20)).unwrap(), 20);
        assert!(limit.of(Some(0)).is_err() && limit.of(Some(21)).is_err());
    }
}
