//! A dry run of rules on an event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::{Body, OfAutomations};
use super::super::extract::{self, Path};
use super::super::problem::{Kind, Problem};
use super::{BotPath, checking};
use crate::automations::decide::{Deed, Note, RuleSet, decide};
use crate::automations::profile::Profile;
use crate::automations::rule::{Ready, Rule};
use crate::automations::stats::shortened;
use crate::automations::store::Stored;
use crate::event::Event;
use crate::expression::{Filter, Sees};
use crate::id::{BotId, RuleId};

/// Maximum time in which a dry run compiles filters.
const COMPILING_MAX: Duration = Duration::from_secs(1);

/// The input of the dry run.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AutomationTrial)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct Trial {
    /// The event. Missing CloudEvents attributes get defaults, except `type`.
    #[schema(value_type = Object, example = json!({ "type": "tag.applied", "subject": "u1", "data": { "tag": "vip" } }))]
    pub(in super::super) event: serde_json::Map<String, Value>,
    /// The subscriber before the event. Default: the profile of the event's `subject`.
    pub(in super::super) subscriber: Option<Profile>,
    /// The rule to test. Default: the current rules of the bot.
    pub(in super::super) rule: Option<Rule>,
}

/// The result of the dry run.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationOutcome)]
pub(in super::super) struct Outcome {
    /// The matching rules, in their order.
    pub(in super::super) matched: Vec<Match>,
    /// Failures of filters and actions.
    pub(in super::super) errors: Vec<Fault>,
    /// The effects, in their order. Changes of the subscriber are in `subscriber` instead.
    pub(in super::super) effects: Vec<Done>,
    /// The subscriber after the event.
    pub(in super::super) subscriber: Profile,
    /// The reason why the event would become a dead letter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in super::super) dead: Option<String>,
}

/// A matching rule.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationMatch)]
pub(in super::super) struct Match {
    /// Its id; `rule` for the rule in the request.
    rule: RuleId,
    /// Its actions.
    pub(in super::super) actions: Vec<&'static str>,
}

/// A failure of a filter or an action.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationFault)]
pub(in super::super) struct Fault {
    /// The rule that failed; absent if the event cannot be applied to the subscriber.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<RuleId>,
    /// The reason.
    pub(in super::super) reason: String,
}

/// An effect.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationEffect)]
pub(in super::super) struct Done {
    /// The rule that causes it.
    rule: RuleId,
    /// The index of the action in the rule, from 0.
    action: usize,
    /// The effect: `emit`, `notify`, `count` or `push` with their parameters.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    pub(in super::super) what: Value,
}

/// Test rules
///
/// A dry run on an example event: it has no effects and changes nothing. If the filters of the bot take
/// more than a second to compile, the answer is 503, and the next request continues.
#[utoipa::path(
    post, path = "/v1/bots/{bot}/automations/test", tag = "automations",
    operation_id = "testAutomations", params(BotPath), request_body = Trial,
    responses((status = 200, description = "The result of the dry run", body = Outcome), OfAutomations, Body)
)]
pub(super) async fn test(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    extract::Json(trial): extract::Json<Trial>,
) -> Result<Json<Outcome>, Problem> {
    run((&api, &caller), &bot, trial).await.map(Json)
}

/// What rules decide about an event. Nothing is done.
pub(in super::super) async fn run(
    (api, caller): (&Api, &Caller),
    bot: &BotId,
    Trial { event, subscriber, rule }: Trial,
) -> Result<Outcome, Problem> {
    let editor = api.automations_of(bot, caller)?;
    let event = sample(event, bot)?;
    let (rules, are_stored) = match rule {
        Some(rule) => {
            checking::check((api, caller), &rule)
                .await
                .map_err(|refused| refused.within("rule"))?;
            let id =
                RuleId::parse("rule").map_err(|error| Problem::field("rule", error.to_string()))?;
            let rule = Rule { enabled: true, ..rule };
            (vec![Stored { id, rule, version: String::new() }], false)
        }
        None => (editor.rules(bot).await?, true),
    };
    let mut profile = match (subscriber, event.subject()) {
        (Some(profile), _) => {
            profile.check().map_err(|(field, detail)| {
                Problem::field(&format!("subscriber.{field}"), detail)
            })?;
            profile
        }
        (None, Some(subject)) => editor.subscriber(bot, subject).await?.profile,
        (None, None) => Profile::default(),
    };
    let (editor, of) = (editor.clone(), bot.clone());
    // A thousand rules take long to compile and to evaluate.
    let tried = checking::apart((&api.trials, caller), move |ended| {
        let begun = Instant::now();
        let goes_on = || !ended.is_set() && begun.elapsed() < COMPILING_MAX;
        let rules = if are_stored {
            editor.compile(&of, rules, goes_on)?
        } else {
            let compile = |text: &str| Filter::compile(text, Sees::Subscriber).map(Arc::new);
            let ready = |Stored { id, rule, .. }| Ready::new(id, rule, compile);
            Arc::new(RuleSet::new(rules.into_iter().map(ready).collect()))
        };
        Some((decide(&event, &mut profile, &rules), profile))
    });
    let Some((decided, subscriber)) = tried.await? else {
        let detail = "nothing was tested: the filters of this bot take more than a second to compile; retry, and the next request continues";
        return Err(Problem::new(Kind::Busy, detail).retry_after(1));
    };
    let (mut matched, mut errors) = (Vec::new(), Vec::new());
    for note in decided.notes {
        match note {
            Note::Matched { rule, actions } => matched.push(Match { rule, actions }),
            Note::Failed { rule, why } => errors.push(Fault { rule, reason: shortened(why) }),
        }
    }
    let effects = decided.decision.effects.into_iter().map(|effect| Done {
        rule: effect.rule,
        action: effect.action,
        what: shown(&effect.deed),
    });
    let (effects, dead) = (effects.collect(), decided.decision.dead);
    Ok(Outcome { matched, errors, effects, subscriber, dead })
}

/// An effect in the notation of a rule's action.
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
