//! The audit trail: what operators did, when, to what, why and with which result.
//!
//! An action is noted after it, with its result. The note never makes the action fail: if Redis does
//! not take it in time, the log says so, and the log has the action in any case.
//!
//! The trail has two rings of 1,000 actions each, because what is frequent would push out what is
//! rare. See `Ring`.

mod read;
mod reason;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use tracing::warn;
use utoipa::ToSchema;

pub(crate) use self::read::{Filter, Noted, Page, Position, read};
pub use self::reason::{REASON_MAX, Reason, ReasonError};
use crate::id::{BotId, PipelineName, Prefix};
use crate::metrics;
use crate::redis::scripts::Act;
use crate::redis::{Link, RedisError, keys};

/// Number of actions that a ring keeps.
pub(crate) const KEPT: usize = 1_000;
/// How long an action waits for its note.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum length of a text of an action in bytes; longer ones are cut.
const TEXT_MAX: usize = 512;
/// The same for the name of who acted.
const WHO_MAX: usize = 200;

/// The part of the trail that an action belongs to. Each has its own bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ring {
    /// Actions of the command line, and of tokens for all bots, on pipelines, bots and dead letters.
    Operators,
    /// What may be frequent: actions of tokens for certain bots, and changes of rules, notifications
    /// and counters, which applications make.
    Often,
}

impl Ring {
    const ALL: [Self; 2] = [Self::Operators, Self::Often];

    fn key(self, prefix: &Prefix) -> String {
        match self {
            Self::Operators => keys::audit(prefix),
            Self::Often => keys::audit_often(prefix),
        }
    }
}

/// What an operator did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = OperatorAction)]
#[expect(clippy::struct_field_names, reason = "the names are those of the answer")]
pub(crate) struct Action {
    /// Who did it: the name of a token, or `cli:USER@HOST` for the command line.
    pub(crate) who: String,
    /// The address of the client, for an action over HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(crate) address: Option<IpAddr>,
    /// What was done, such as `pause` or `redrive all`.
    pub(crate) action: String,
    /// The pipeline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pipeline: Option<PipelineName>,
    /// The bot; absent: all bots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bot: Option<BotId>,
    /// The dead letter, rule, notification, ad or replay, by its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) target: Option<String>,
    /// The new values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) details: Option<String>,
    /// Why, if the operator said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// How it ended: `done`, with a number; `nothing changed`; or `failed: …`.
    pub(crate) result: String,
    /// Whether applications do it too, so that it may be frequent. See [`Ring`].
    #[serde(skip)]
    pub(crate) often: bool,
}

impl Action {
    /// An action of somebody who is named later.
    pub(crate) fn new(action: &str) -> Self {
        Self {
            who: String::new(),
            address: None,
            action: action.to_owned(),
            pipeline: None,
            bot: None,
            target: None,
            details: None,
            reason: None,
            result: String::new(),
            often: false,
        }
    }

    /// An action that applications do too.
    pub(crate) fn often(self) -> Self {
        Self { often: true, ..self }
    }

    pub(crate) fn by(self, who: &str, address: Option<IpAddr>) -> Self {
        Self { who: bounded(who, WHO_MAX), address, ..self }
    }

    pub(crate) fn in_pipeline(self, pipeline: &PipelineName) -> Self {
        Self { pipeline: Some(pipeline.clone()), ..self }
    }

    /// The same for a built-in pipeline.
    pub(crate) fn in_built_in(self, pipeline: &str) -> Self {
        Self { pipeline: PipelineName::parse(pipeline).ok(), ..self }
    }

    pub(crate) fn of_bot(self, bot: Option<&BotId>) -> Self {
        Self { bot: bot.cloned(), ..self }
    }

    pub(crate) fn target(self, target: impl fmt::Display) -> Self {
        Self { target: Some(bounded(&target.to_string(), TEXT_MAX)), ..self }
    }

    pub(crate) fn details(self, details: &str) -> Self {
        Self { details: Some(bounded(details, TEXT_MAX)), ..self }
    }

    pub(crate) fn reason(self, reason: Option<&Reason>) -> Self {
        Self { reason: reason.map(|reason| reason.as_str().to_owned()), ..self }
    }

    /// The target, the new values and the reason in one text, for a table.
    pub(crate) fn about(&self) -> String {
        let reason = self.reason.as_ref().map(|reason| format!("reason: {reason}"));
        let parts = [self.target.clone(), self.details.clone(), reason];
        let parts: Vec<String> =
            parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
        if parts.is_empty() { "-".to_owned() } else { parts.join("; ") }
    }

    pub(crate) fn ended(self, result: &str) -> Self {
        Self { result: bounded(result, TEXT_MAX), ..self }
    }
}

/// The text without control characters, and cut to this many bytes.
fn bounded(text: &str, bytes: usize) -> String {
    let mut kept: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if kept.len() > bytes {
        let room = bytes - '…'.len_utf8();
        kept.truncate((0..=room).rfind(|&at| kept.is_char_boundary(at)).unwrap_or(0));
        kept.push('…');
    }
    kept
}

/// Adds an action to the trail.
///
/// # Errors
/// If Redis is unavailable, refuses, or does not answer within a second. Then the trail may lack it.
pub(crate) async fn note(link: &Link, ring: Ring, action: &Action) -> Result<(), NoteError> {
    let text = serde_json::to_vec(action)?;
    let key = ring.key(link.prefix());
    let act = Act { key: &key, action: &text, kept: KEPT };
    tokio::time::timeout(PATIENCE, link.call(&act)).await.map_err(|_| NoteError::Slow)??;
    Ok(())
}

/// Why an action was not noted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoteError {
    #[error(transparent)]
    Redis(#[from] RedisError),
    #[error("Redis does not answer within 1 s")]
    Slow,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Notes the actions of a process.
#[derive(Debug, Clone)]
pub(crate) struct Trail {
    link: Arc<Link>,
    /// The process waits for its tasks when it stops.
    tasks: TaskTracker,
}

impl Trail {
    pub(crate) fn new(link: Arc<Link>, tasks: TaskTracker) -> Self {
        metrics::audit_lost(0);
        Self { link, tasks }
    }

    /// For actions that go on without their requests.
    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Adds an action to the trail. Takes a second at most; a failure is logged.
    pub(crate) async fn note(&self, ring: Ring, action: &Action) {
        if let Err(error) = note(&self.link, ring, action).await {
            metrics::audit_lost(1);
            let Action { who, action, .. } = action;
            warn!(token = who, action, %error,
                "the audit trail may lack an action; the log has it as \"an operator acted\"");
        }
    }

    /// The same in a task: it ends even if the request that waits for it does not.
    pub(crate) fn note_later(&self, ring: Ring, action: Action) -> JoinHandle<()> {
        let trail = self.clone();
        self.tasks.spawn(async move { trail.note(ring, &action).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_bounded_in_bytes_whatever_its_texts_hold() {
        let long = "日\n".repeat(10_000);
        let action = Action::new("set")
            .by(&long, None)
            .of_bot(BotId::parse(&"日".repeat(85)).ok().as_ref())
            .in_pipeline(&PipelineName::parse(&"p".repeat(64)).unwrap())
            .target(&long)
            .details(&long)
            .reason(Reason::parse(&"日".repeat(REASON_MAX)).ok().as_ref())
            .ended(&long);
        let text = serde_json::to_string(&action).unwrap();
        assert!(text.len() < 4 << 10, "{} bytes", text.len());
        assert!(action.details.as_deref().unwrap().ends_with('…'));
        assert!(!text.contains("\\n"), "{text}");
        assert_eq!(serde_json::from_str::<Action>(&text).unwrap(), action);
    }

    #[test]
    fn a_short_text_stays_as_it_is() {
        assert_eq!(bounded("weight 3, rate 10/s", TEXT_MAX), "weight 3, rate 10/s");
        assert_eq!(bounded("a\u{1b}[2J", TEXT_MAX), "a [2J");
        assert_eq!(bounded("日日", 5), "…");
    }
}
