//! Pauses of bots and pipelines, each with a note: since when, by whom, and why.

use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Queue;
use crate::id::BotId;
use crate::redis::RedisError;
use crate::redis::scripts::{Pause, Resume};
use crate::trail::Reason;

/// Maximum length of the name of who paused, in bytes.
const BY_MAX: usize = 200;

/// The start of who paused on the command line.
const COMMAND_LINE: &str = "cli:";

/// Who paused a bot or a pipeline, when, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct PauseNote {
    /// Since when, ms since 1970.
    pub since_ms: u64,
    /// Who paused it: the name of a token, or `cli:USER@HOST` for the command line.
    pub by: String,
    /// Why, if the operator said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The stored form, without the time.
#[derive(Serialize, Deserialize)]
struct Stored<'a> {
    by: &'a str,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

#[derive(Deserialize)]
struct Read {
    by: String,
    reason: Option<String>,
}

impl PauseNote {
    /// The note of a pause that starts now.
    #[must_use]
    pub fn new(by: &str, reason: Option<&Reason>) -> Self {
        let end = by.len().min(BY_MAX);
        let end = (0..=end).rfind(|&at| by.is_char_boundary(at)).unwrap_or(0);
        let reason = reason.map(|reason| reason.as_str().to_owned());
        Self { since_ms: 0, by: by[..end].to_owned(), reason }
    }

    /// Leaves out the user and the machine of a command line: they are no tenant's business.
    pub(crate) fn veil(&mut self) {
        if self.by.starts_with(COMMAND_LINE) {
            self.by.truncate(COMMAND_LINE.len() - 1);
        }
    }

    /// The text that the script stores behind the time.
    fn written(&self) -> String {
        let stored = Stored { by: &self.by, reason: self.reason.as_deref() };
        // Texts always serialise.
        serde_json::to_string(&stored).unwrap_or_default()
    }

    /// Reads `<ms> <note>`. `None`: an earlier version paused it, or nobody said who.
    pub(super) fn read(text: &str) -> Option<Self> {
        let (since_ms, note) = text.split_once(' ')?;
        let Read { by, reason } = serde_json::from_str(note).ok()?;
        Some(Self { since_ms: since_ms.parse().ok()?, by, reason })
    }

    /// The note in words: `paused by ops, 12 min ago: …`, with times as `spoken` writes them.
    #[must_use]
    pub fn words(&self, now_ms: u64, spoken: impl Fn(u64) -> String) -> String {
        let ago = spoken(now_ms.saturating_sub(self.since_ms) / 1_000 * 1_000);
        let reason = self.reason.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        format!("paused by {}, {ago} ago{reason}", self.by)
    }
}

impl Queue {
    /// Pauses a bot, or every bot for `None`: no worker gets a new lease. Running slices end
    /// normally. Returns whether the call changed anything.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses; [`RedisError::Partly`] if some shards have done it.
    pub async fn pause(&self, bot: Option<&BotId>) -> Result<bool, RedisError> {
        self.pause_with(bot, ("", false)).await
    }

    /// The same with a note. If it is paused already, a note with a reason replaces that of the pause.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn pause_noting(
        &self,
        bot: Option<&BotId>,
        note: &PauseNote,
    ) -> Result<bool, RedisError> {
        self.pause_with(bot, (&note.written(), note.reason.is_some())).await
    }

    async fn pause_with(
        &self,
        bot: Option<&BotId>,
        (note, replaces): (&str, bool),
    ) -> Result<bool, RedisError> {
        let pause = |keys| Pause { keys, bot, note, replaces };
        let calls: Vec<_> = match bot {
            Some(id) => vec![pause(self.keys_of(id))],
            None => self.shards.iter().map(pause).collect(),
        };
        changed(self.link.call_all(&calls).await?)
    }

    /// Whether the whole pipeline is paused, in any shard.
    pub(crate) async fn is_paused(&self) -> Result<bool, RedisError> {
        let mut pipe = Pipeline::with_capacity(self.shards.len());
        for keys in self.shards.iter() {
            pipe.cmd("HEXISTS").arg(keys.meta()).arg("paused");
        }
        for value in self.link.run(&pipe).await? {
            match value {
                Value::Int(1) | Value::Boolean(true) => return Ok(true),
                // A damaged shard must not hide the others.
                Value::ServerError(error) => {
                    let error = self.link.refused("HEXISTS", &error);
                    if error.is_passing() {
                        return Err(error);
                    }
                }
                _ => {}
            }
        }
        Ok(false)
    }

    /// Undoes [`Self::pause`].
    ///
    /// # Errors
    /// If Redis is unavailable or refuses; [`RedisError::Partly`] if some shards have done it.
    pub async fn resume(&self, bot: Option<&BotId>) -> Result<bool, RedisError> {
        let slice_us = self.limits.slice_us;
        let calls: Vec<_> = match bot {
            Some(id) => vec![Resume { keys: self.keys_of(id), bot, slice_us }],
            None => self.shards.iter().map(|keys| Resume { keys, bot, slice_us }).collect(),
        };
        changed(self.link.call_all(&calls).await?)
    }
}

/// Whether a call on shards changed anything.
fn changed(replies: Vec<Result<bool, RedisError>>) -> Result<bool, RedisError> {
    let changed = replies.iter().any(|reply| matches!(reply, Ok(true)));
    match replies.into_iter().find_map(Result::err) {
        None => Ok(changed),
        Some(error) if changed => Err(RedisError::Partly(Box::new(error))),
        Some(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        for reason in [None, Some("the shop asked: \"ticket\" 7"), Some("日本")] {
            let reason = reason.map(|text| Reason::parse(text).unwrap());
            let note = PauseNote::new("cli:ada@host", reason.as_ref());
            let read = PauseNote::read(&format!("1760000000000 {}", note.written())).unwrap();
            assert_eq!(read, PauseNote { since_ms: 1_760_000_000_000, ..note });
        }
        for other in ["1", "", "x {}", "12 ", "12 {\"by\":1}"] {
            assert_eq!(PauseNote::read(other), None, "{other:?}");
        }
        assert_eq!(PauseNote::new(&"日".repeat(100), None).by.len(), 198);
    }

    #[test]
    fn a_call_that_fails_on_one_shard_says_whether_others_did_it() {
        let full = || {
            let (target, message) = ("127.0.0.1:6379".to_owned(), "OOM command".to_owned());
            Err(RedisError::Refused { target, command: "pause", message })
        };
        assert!(changed(vec![Ok(false), Ok(true)]).unwrap());
        assert!(!changed(vec![Ok(false), Ok(false)]).unwrap());
        let nothing = changed(vec![Ok(false), full()]).unwrap_err();
        assert!(matches!(nothing, RedisError::Refused { .. }), "{nothing}");
        // Also behind the one that failed.
        let some = changed(vec![Ok(false), full(), Ok(true)]).unwrap_err();
        assert!(matches!(some, RedisError::Partly(_)), "{some}");
        assert!(some.is_full() && some.is_passing() && some.may_have_run());
    }

    #[test]
    fn a_note_says_who_when_and_why() {
        let note = PauseNote { since_ms: 1_000, by: "ops".to_owned(), reason: None };
        let spoken = |ms| format!("{} min", ms / 60_000);
        assert_eq!(note.words(721_000, spoken), "paused by ops, 12 min ago");
        let note = PauseNote { reason: Some("too loud".to_owned()), ..note };
        assert_eq!(note.words(721_500, spoken), "paused by ops, 12 min ago: too loud");
    }
}
