//! Dead letters that the campaign puts back.

use fairlane::event::Event;
use serde_json::Value;

use super::worker::{lane, position};

/// A dead letter that an operator put back.
#[derive(Debug, Clone)]
pub(crate) struct PutBack {
    /// The bot, or the bot and its key, as in the histories.
    pub(crate) lane: String,
    pub(crate) event: u32,
    /// It was a dead letter then, see [`super::worker::now_us`].
    pub(crate) at: u64,
    /// Why, with `n` for each number.
    pub(crate) reason: String,
}

impl PutBack {
    /// A dead letter as the API lists it.
    pub(super) fn read(pipeline: &str, letter: &Value, at: u64) -> Option<Self> {
        let event = Event::from_json(letter["event"].to_string().as_bytes()).ok()?;
        let lane = lane(pipeline, letter["bot"].as_str()?, &event);
        let reason = without_numbers(letter["reason"].as_str().unwrap_or_default());
        Some(Self { lane, event: position(&event)?, at, reason })
    }
}

/// The text with `n` for each number, so that equal reasons can be counted.
fn without_numbers(text: &str) -> String {
    let mut short = String::new();
    let mut in_number = false;
    for letter in text.chars().take(100) {
        let is_digit = letter.is_ascii_digit();
        if !is_digit {
            short.push(letter);
        } else if !in_number {
            short.push('n');
        }
        in_number = is_digit;
    }
    short
}

#[test]
fn reasons_that_differ_in_numbers_are_the_same() {
    assert_eq!(without_numbers("acknowledged 10 of 214 events"), "acknowledged n of n events");
}
