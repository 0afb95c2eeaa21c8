//! For `crate::fuzzing`: reads notes and dead letters.

use super::failure::{self, Streak};
use super::letters;
use super::pause::PauseNote;
use crate::id::{LetterId, Shard};
use crate::redis::scripts::RawLetter;

/// Reads a text as each kind of note.
pub(crate) fn note(text: &str) {
    if let Some(note) = PauseNote::read(text) {
        let _ = note.words(u64::MAX, |ms| ms.to_string());
    }
    if let Some(streak) = Streak::read(text) {
        assert_eq!(Streak::read(&streak.written()), Some(streak));
    }
    if let Some((time_ms, reason)) = failure::read(text) {
        assert_eq!(failure::read(&failure::written(time_ms, reason)), Some((time_ms, reason)));
    }
}

/// Reads a dead letter.
pub(crate) fn letter(raw: RawLetter) {
    let shard = Shard::from_digits("3").expect("a shard");
    let id = LetterId::new(shard, raw.entry);
    if let Ok(letter) = letters::decode(id, raw) {
        assert!(serde_json::to_string(&letter).is_ok());
    }
}
