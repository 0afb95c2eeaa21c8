//! What rules would do on an event.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::{Body, OfAutomations};
use super::super::extract::{self, Path};
use super::super::problem::Problem;
use super::BotPath;
use crate::automations::decide::{Deed, Note, RuleSet, decide};
use crate::automations::profile::Profile;
use crate::automations::rule::{Ready, Rule};
use crate::automations::store::Stored;
use crate::event::Event;
use crate::filter::{Filter, Sees};
use crate::id::{BotId, RuleId};

/// What is tried.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AutomationTrial)]
#[serde(deny_unknown_fields)]
pub(super) struct Trial {
    /// The event. What CloudEvents asks for and is not told here is filled in, `type` aside.
    #[schema(value_type = Object, example = json!({ "type": "tag.applied", "subject": "u1", "data": { "tag": "vip" } }))]
    event: serde_json::Map<String, Value>,
    /// The subscriber before the event; if left out, what is known of the event's `subject`.
    subscriber: Option<Profile>,
    /// The rule; if left out, those of the bot that are in force.
    rule: Option<Rule>,
}

/// What would happen.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationOutcome)]
pub(super) struct Outcome {
    /// The rules that match, in their order.
    matched: Vec<Match>,
    /// What could not be evaluated or done.
    errors: Vec<Fault>,
    /// What would be done, in its order; what is done to the subscriber shows there.
    effects: Vec<Done>,
    /// The subscriber after it.
    subscriber: Profile,
    /// Why the event would end as a dead letter.
    #[serde(skip_serializing_if = "Option::is_none")]
    dead: Option<String>,
}

/// A rule that matches.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationMatch)]
struct Match {
    /// Which; `rule` for the one that was sent.
    rule: RuleId,
    /// Its actions.
    actions: Vec<&'static str>,
}

/// What could not be evaluated or done.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationFault)]
struct Fault {
    /// By which rule; none: the event cannot be applied to the subscriber.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<RuleId>,
    /// Why.
    reason: String,
}

/// What would be done.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationEffect)]
struct Done {
    /// By which rule.
    rule: RuleId,
    /// By which of its actions, from 0.
    action: usize,
    /// What: `emit`, `notify`, `count` or `push` with their parameters.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    what: Value,
}

/// Try rules
///
/// On an event that is made up: nothing is done and nothing is kept.
#[utoipa::path(
    post, path = "/v1/bots/{bot}/automations/test", tag = "automations",
    operation_id = "testAutomations", params(BotPath), request_body = Trial,
    responses((status = 200, description = "What would happen", body = Outcome), OfAutomations, Body)
)]
pub(super) async fn test(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    extract::Json(trial): extract::Json<Trial>,
) -> Result<Json<Outcome>, Problem> {
    let editor = api.automations_of(&bot, &caller)?;
    let Trial { event, subscriber, rule } = trial;
    let event = sample(event, &bot)?;
    let rules = match rule {
        Some(rule) => {
            rule.check(&api.targets).map_err(|mut unusable| {
                unusable.field.insert_str(0, "rule.");
                unusable
            })?;
            let id =
                RuleId::parse("rule").map_err(|error| Problem::field("rule", error.to_string()))?;
            vec![Stored { id, rule: Rule { enabled: true, ..rule }, version: String::new() }]
        }
        None => editor.rules(&bot).await?,
    };
    let mut profile = match (subscriber, event.subject()) {
        (Some(profile), _) => {
            profile.check().map_err(|(field, detail)| {
                Problem::field(&format!("subscriber.{field}"), detail)
            })?;
            profile
        }
        (None, Some(subject)) => editor.subscriber(&bot, subject).await?.profile,
        (None, None) => Profile::default(),
    };
    // A thousand rules take their time.
    let tried = tokio::task::spawn_blocking(move || {
        let compile = |text: &str| Filter::compile(text, Sees::Subscriber).map(Arc::new);
        let ready = rules.into_iter();
        let ready = ready.map(|Stored { id, rule, .. }| Ready::new(id, rule, compile));
        let decided = decide(&event, &mut profile, &RuleSet::new(ready.collect()));
        (decided, profile)
    });
    let (decided, subscriber) = tried.await.map_err(|_| {
        Problem::new(super::Kind::Internal, "the rules could not be tried; the log says why")
    })?;
    let (mut matched, mut errors) = (Vec::new(), Vec::new());
    for note in decided.notes {
        match note {
            Note::Matched { rule, actions } => matched.push(Match { rule, actions }),
            Note::Failed { rule, why } => errors.push(Fault { rule, reason: why }),
        }
    }
    let effects = decided.decision.effects.into_iter().map(|effect| Done {
        rule: effect.rule,
        action: effect.action,
        what: shown(&effect.deed),
    });
    let (effects, dead) = (effects.collect(), decided.decision.dead);
    Ok(Json(Outcome { matched, errors, effects, subscriber, dead }))
}

/// As a rule would write it.
fn shown(deed: &Deed) -> Value {
    match deed {
        Deed::Emit { kind, data, delay, .. } => {
            serde_json::json!({ "emit": { "type": kind, "data": data, "delay": delay } })
        }
        Deed::Notify(notify) => serde_json::json!({ "notify": notify }),
        Deed::Count(count) => serde_json::json!({ "count": count }),
        Deed::Push(push) => serde_json::json!({ "push": push }),
    }
}

fn sample(mut event: serde_json::Map<String, Value>, bot: &BotId) -> Result<Event, Problem> {
    let flaw = |detail: String| Problem::field("event", detail);
    if event.get("botid").is_some_and(|other| other.as_str() != Some(bot.as_str())) {
        return Err(flaw("its botid is not the bot of the path; leave it out".to_owned()));
    }
    event.insert("botid".to_owned(), bot.as_str().into());
    for (name, value) in [("specversion", "1.0"), ("id", "test"), ("source", "test")] {
        event.entry(name).or_insert_with(|| value.into());
    }
    let text = serde_json::to_vec(&event).map_err(|error| flaw(error.to_string()))?;
    Event::from_json(&text).map_err(|error| flaw(error.to_string()))
}
