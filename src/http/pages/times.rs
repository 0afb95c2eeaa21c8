//! Times for people: how long ago in the text, and the exact time in a hint and for programs.

use maud::{Markup, html};

use super::spoken;
use crate::clock::rfc3339;

/// A time in the past: `3 min ago`.
pub(super) fn ago(at_ms: u64, now_ms: u64) -> Markup {
    html! { (since(at_ms, now_ms)) " ago" }
}

/// The time since then: `3 min`.
pub(super) fn since(at_ms: u64, now_ms: u64) -> Markup {
    time(at_ms, &spoken(now_ms.saturating_sub(at_ms) / 1_000 * 1_000))
}

/// An age, measured a moment before `now_ms`.
pub(super) fn aged(age_ms: u64, now_ms: u64) -> Markup {
    if age_ms == 0 {
        return html! { (spoken(0)) };
    }
    // In whole seconds, so that a page that updates itself does not change without a reason.
    time((now_ms.saturating_sub(age_ms) + 500) / 1_000 * 1_000, &spoken(age_ms))
}

fn time(at_ms: u64, text: &str) -> Markup {
    let exact = rfc3339(at_ms);
    html! { time datetime=(exact) title=(exact) { (text) } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_time_stands_beside_the_age() {
        let time =
            "<time datetime=\"1970-01-01T00:01:00Z\" title=\"1970-01-01T00:01:00Z\">2 min</time>";
        assert_eq!(ago(60_000, 180_999).into_string(), format!("{time} ago"));
        assert_eq!(aged(120_000, 180_000).into_string(), time);
        assert_eq!(aged(0, 180_000).into_string(), "0 s");
        // A clock that is behind shows no negative age.
        assert!(ago(60_000, 0).into_string().ends_with(">0 s</time> ago"));
    }
}
