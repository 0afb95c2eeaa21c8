//! Why a bot of a list is not simply handled, in a few words.

use std::time::Duration;

use redis::Pipeline;
use serde::Serialize;
use utoipa::ToSchema;

use super::{BotState, BotView, LastFailure, Queue};
use crate::clock::millis;
use crate::redis::{RedisError, Reply};

/// Maximum length of a reason of a handler in a list, in characters.
const CAUSE_MAX: usize = 60;

/// A bot of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ListedBot {
    /// The bot.
    #[serde(flatten)]
    pub view: BotView,
    /// Its dead letters.
    pub dead_letters: u64,
    /// Why it is not simply handled, in a few words; absent: there is nothing to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Queue {
    /// Adds to the bots of a list why they are not simply handled, with times as `spoken` writes them.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn explain(
        &self,
        views: Vec<BotView>,
        now: Duration,
        spoken: impl Fn(u64) -> String,
    ) -> Result<Vec<ListedBot>, RedisError> {
        if views.is_empty() {
            return Ok(Vec::new());
        }
        let failures = self.last_failures(&views).await?;
        let mut pipe = Pipeline::with_capacity(views.len());
        for view in &views {
            let field = format!("d{}", view.bot.as_str());
            pipe.cmd("HGET").arg(self.keys_of(&view.bot).held()).arg(field);
        }
        let values = self.link().run_checked("HGET", &pipe).await?;
        let mut dead = self.read("HGET", Reply::new(redis::Value::Array(values)))?;
        let mut listed = Vec::with_capacity(views.len());
        for (view, failure) in views.into_iter().zip(failures) {
            let dead_letters = self.read("HGET", dead.optional())?.unwrap_or(0);
            let reason = reason(&view, failure.as_ref(), dead_letters, millis(now), &spoken);
            listed.push(ListedBot { view, dead_letters, reason });
        }
        Ok(listed)
    }
}

fn reason(
    view: &BotView,
    failure: Option<&LastFailure>,
    dead_letters: u64,
    now_ms: u64,
    spoken: &impl Fn(u64) -> String,
) -> Option<String> {
    let mut parts = Vec::new();
    // Whole seconds from one second on.
    let left = view.until_ms.map_or(0, |until| until.saturating_sub(now_ms));
    let left = if left > 1_000 { left / 1_000 * 1_000 } else { left };
    match (&view.pause, view.state, failure) {
        (Some(note), BotState::Paused, _) => parts.push(format!("paused by {}", note.by)),
        (None, BotState::Paused, _) => parts.push("paused".to_owned()),
        (_, BotState::Parked, Some(failure)) => {
            parts.push(format!("retrying in {}: {}", spoken(left), cause(failure)));
        }
        (_, _, Some(failure)) => parts.push(format!("retrying: {}", cause(failure))),
        (_, BotState::Parked, None) if view.throttled_since_ms.is_none() => {
            parts.push(format!("waiting for {}", spoken(left)));
        }
        _ => {}
    }
    if view.throttled_since_ms.is_some() {
        parts.push("throttled".to_owned());
    }
    if view.set_aside > 0 {
        parts.push(format!("lanes aside: {}", events(view.set_aside)));
    }
    if dead_letters > 0 {
        parts.push(format!("dead letters: {dead_letters}"));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn events(count: u64) -> String {
    format!("{count} event{}", if count == 1 { "" } else { "s" })
}

/// The start of the reason of a handler.
fn cause(failure: &LastFailure) -> String {
    let reason = failure.reason.trim();
    if reason.chars().count() <= CAUSE_MAX {
        return reason.to_owned();
    }
    reason.chars().take(CAUSE_MAX - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::super::PauseNote;
    use super::*;
    use crate::id::BotId;
    use crate::rate::Weight;

    fn view(state: BotState) -> BotView {
        BotView {
            bot: BotId::parse("b").unwrap(),
            state,
            depth: 3,
            set_aside: 0,
            oldest_age_ms: 0,
            fence: None,
            until_ms: Some(181_500),
            attempts: 1,
            weight: Weight::ONE,
            rate: None,
            burst: None,
            throttled_since_ms: None,
            pause: None,
        }
    }

    fn told(view: &BotView, failure: Option<&str>, dead_letters: u64) -> Option<String> {
        let failure = failure.map(|reason| LastFailure {
            reason: reason.to_owned(),
            time_ms: 0,
            since_ms: 0,
        });
        reason(view, failure.as_ref(), dead_letters, 1_000, &|ms| format!("{} s", ms / 1_000))
    }

    #[test]
    fn the_reason_of_a_bot_is_told_in_a_few_words() {
        let parked = view(BotState::Parked);
        assert_eq!(told(&parked, Some("500"), 0).unwrap(), "retrying in 180 s: 500");
        assert_eq!(told(&parked, None, 0).unwrap(), "waiting for 180 s");
        assert_eq!(
            told(&parked, Some("500"), 3).unwrap(),
            "retrying in 180 s: 500; dead letters: 3"
        );
        assert_eq!(told(&view(BotState::Leased), Some("500"), 0).unwrap(), "retrying: 500");
        let slow = BotView { throttled_since_ms: Some(1), ..parked.clone() };
        assert_eq!(told(&slow, None, 0).unwrap(), "throttled");
        let aside = BotView { set_aside: 2, ..view(BotState::Ready) };
        assert_eq!(told(&aside, None, 0).unwrap(), "lanes aside: 2 events");
        let note = PauseNote { since_ms: 0, by: "ops".to_owned(), reason: None };
        let paused = BotView { pause: Some(note), ..view(BotState::Paused) };
        assert_eq!(told(&paused, Some("500"), 0).unwrap(), "paused by ops");
        assert_eq!(told(&view(BotState::Paused), None, 0).unwrap(), "paused");
        for state in [BotState::Ready, BotState::Leased, BotState::Idle] {
            assert_eq!(told(&view(state), None, 0), None, "{state:?}");
        }
        let cause_of = |length| {
            let reason = "ä".repeat(length);
            cause(&LastFailure { reason, time_ms: 0, since_ms: 0 })
        };
        assert_eq!(cause_of(CAUSE_MAX), "ä".repeat(CAUSE_MAX));
        assert_eq!(cause_of(CAUSE_MAX + 1), "ä".repeat(CAUSE_MAX - 1) + "…");
    }

    #[test]
    fn a_wait_is_told_in_whole_seconds_from_a_second_on() {
        let told = |until_ms| {
            let view = BotView { until_ms, ..view(BotState::Parked) };
            reason(&view, None, 0, 1_000, &|ms| format!("{ms} ms")).unwrap()
        };
        let waits = [Some(1_999), Some(2_000), Some(4_900), Some(900), None].map(told);
        let expected = ["999 ms", "1000 ms", "3000 ms", "0 ms", "0 ms"];
        assert_eq!(waits, expected.map(|wait| format!("waiting for {wait}")));
    }
}
