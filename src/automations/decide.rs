//! What a bot's rules decide on one event.
//!
//! 1. The event changes the profile of its subscriber.
//! 2. The rules for its type are gone through in the order of their ids. Each sees the profile as
//!    the rules before it left it.
//! 3. What they do to the profile is done to it at once, everything else is an [`Effect`] that is
//!    carried out once the decision is kept.
//!
//! It is pure: the same event, profile and rules make the same decision.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use sha2::{Digest as _, Sha256};

use super::profile::{self, APPLIED, Change, FIELD_CHANGED, Profile, TAG_APPLIED, TAG_REMOVED};
use super::rule::{Action, Count, Delay, Notify, Push, Ready, SetField, Tag};
use crate::event::{Event, EventError};
use crate::filter::Facts;
use crate::id::{BotId, RuleId};

/// How many events may follow from each other: none emits a seventeenth.
pub const DEPTH_MAX: u64 = 16;
/// Most effects of one event.
pub const EFFECTS_MAX: usize = 1_000;
/// Most bytes of what is decided on one event, as JSON.
pub const DECISION_MAX_BYTES: usize = 1 << 20;
/// How many events this one follows from, on what a rule emitted.
pub const DEPTH: &str = "automationdepth";
/// How many events may follow from this one, on what a rule emitted: those that follow from one
/// event share what it may.
pub const SHARE: &str = "automationshare";
/// How many events may follow from one that no rule emitted, directly and by way of others.
pub const SHARE_MAX: u64 = 1_000;
/// The rule that emitted it.
pub const RULE: &str = "automationrule";
/// On an event that waits for its time: it goes to the bus then.
pub const DUE: &str = "automationdue";
/// The source of what rules emit.
pub const SOURCE: &str = "fairlane/automations";
/// Types whose rules are remembered.
const TYPES_MAX: usize = 1_000;

/// The rules of a bot, those in force.
#[derive(Debug, Default)]
pub struct RuleSet {
    rules: Vec<Ready>,
    /// Which of them take a type.
    by_type: Mutex<HashMap<Box<str>, Arc<[usize]>>>,
    /// Whether the bot has any rule at all.
    any: bool,
}

impl RuleSet {
    /// Of rules in the order of their ids. Those that are not in force count only for whether there
    /// are any.
    #[must_use]
    pub fn new(rules: Vec<Ready>) -> Self {
        let any = !rules.is_empty();
        let rules = rules.into_iter().filter(|rule| rule.rule.enabled).collect();
        Self { rules, by_type: Mutex::default(), any }
    }

    /// Whether the bot has any rule, in force or not: then profiles are kept.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.any
    }

    fn for_type(&self, kind: &str) -> Arc<[usize]> {
        let mut by_type = self.by_type.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(places) = by_type.get(kind) {
            return Arc::clone(places);
        }
        let places = self.rules.iter().enumerate();
        let places: Arc<[usize]> =
            places.filter(|(_, rule)| rule.takes(kind)).map(|(place, _)| place).collect();
        if by_type.len() >= TYPES_MAX {
            by_type.clear();
        }
        by_type.insert(kind.into(), Arc::clone(&places));
        places
    }
}

/// What is done, beside what was done to the profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// By which rule.
    #[serde(rename = "r")]
    pub rule: RuleId,
    /// By which of its actions.
    #[serde(rename = "a")]
    pub action: usize,
    /// What.
    #[serde(rename = "d")]
    pub deed: Deed,
}

/// What is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Deed {
    /// An event is put on the bus.
    Emit {
        /// Its type.
        kind: String,
        /// Its data.
        data: Option<Json>,
        /// After how long.
        delay: Delay,
        /// It tells of a change that is in the profile already.
        applied: bool,
    },
    /// A URL is called.
    Notify(Notify),
    /// Views are counted.
    Count(Count),
    /// The event is sent to a URL.
    Push(Push),
}

/// What was decided on an event.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// What is done, in this order.
    #[serde(rename = "e")]
    pub effects: Vec<Effect>,
    /// How many events may follow from each that it puts on the bus.
    #[serde(rename = "s", default)]
    pub share: u64,
    /// Why the event ends as a dead letter, after all that is done.
    #[serde(rename = "x", default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<String>,
}

impl Decision {
    /// Whether nothing is to be done.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.effects.is_empty() && self.dead.is_none()
    }
}

/// What happened to a rule, for its statistics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// It matched, and so many of its actions were decided.
    Matched {
        /// Which.
        rule: RuleId,
        /// The names of these actions.
        actions: Vec<&'static str>,
    },
    /// It could not be evaluated, or an action of it could not be done.
    Failed {
        /// Which; `None`: the event itself cannot be applied.
        rule: Option<RuleId>,
        /// Why.
        why: String,
    },
}

/// Of one event.
#[derive(Debug, Default)]
pub struct Decided {
    /// What is to be done.
    pub decision: Decision,
    /// What happened to the rules.
    pub notes: Vec<Note>,
    /// Whether the profile is another one now.
    pub changed: bool,
}

/// Decides on an event, and changes the profile of its subscriber.
#[must_use]
pub fn decide(event: &Event, profile: &mut Profile, rules: &RuleSet) -> Decided {
    let mut decided = Decided::default();
    // What is known by hand is kept also where no rule is yet; everything else came in doubt.
    if !rules.is_any() && event.kind() != profile::REPLACED {
        return decided;
    }
    if event.subject().is_some() {
        match changed(event, profile) {
            Ok(changed) => decided.changed = changed,
            Err(why) => {
                let why = format!("{} changes nothing: {why}", event.kind());
                decided.notes.push(Note::Failed { rule: None, why });
            }
        }
    }
    let places = rules.for_type(event.kind());
    let mut view = View { event, facts: None, stale: false };
    let (depth, share, mut emits) = (depth(event) + 1, share(event), 0);
    let mut bytes = 0;
    for &place in &*places {
        let rule = &rules.rules[place];
        match view.matches(rule, profile) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(why) => {
                decided.notes.push(Note::Failed { rule: Some(rule.id.clone()), why });
                continue;
            }
        }
        let mut done = Vec::new();
        for (at, action) in rule.rule.actions.iter().enumerate() {
            let deed = match deed(event, profile, action) {
                Ok((deed, changed)) => {
                    decided.changed |= changed;
                    view.stale |= changed;
                    done.push(action.name());
                    deed
                }
                Err(why) => {
                    let why = format!("actions[{at}].{}: {why}", action.name());
                    decided.notes.push(Note::Failed { rule: Some(rule.id.clone()), why });
                    continue;
                }
            };
            let Some(deed) = deed else { continue };
            if let (Deed::Emit { kind, .. }, true) = (&deed, depth > DEPTH_MAX) {
                decided.decision.dead.get_or_insert_with(|| {
                    format!(
                        "rule {:?} would emit {kind:?} as number {depth} of a chain of events that rules emitted; chains end at {DEPTH_MAX}, so that no loop goes on for ever",
                        rule.id.as_str()
                    )
                });
                continue;
            }
            if let Deed::Emit { kind, .. } = &deed {
                if emits == share {
                    decided.decision.dead.get_or_insert_with(|| {
                        format!(
                            "rule {:?} would emit {kind:?}, and {SHARE_MAX} events follow from one by way of rules already, or may",
                            rule.id.as_str()
                        )
                    });
                    continue;
                }
                emits += 1;
            }
            let effect = Effect { rule: rule.id.clone(), action: at, deed };
            bytes += serde_json::to_string(&effect).map_or(0, |text| text.len());
            if decided.decision.effects.len() == EFFECTS_MAX || bytes > DECISION_MAX_BYTES {
                decided.decision.dead.get_or_insert_with(|| {
                    format!(
                        "rules ask for more than {EFFECTS_MAX} actions or {DECISION_MAX_BYTES} bytes of them on one event: what rule {:?} asks for, and what follows, is not done",
                        rule.id.as_str()
                    )
                });
                continue;
            }
            decided.decision.effects.push(effect);
        }
        decided.notes.push(Note::Matched { rule: rule.id.clone(), actions: done });
    }
    decided.decision.share = (share - emits).checked_div(emits).unwrap_or(0);
    decided
}

/// Does to the profile what the event says: all of it or nothing.
fn changed(event: &Event, profile: &mut Profile) -> Result<bool, String> {
    let changes = profile::changes(event)?;
    if changes.is_empty() {
        return Ok(false);
    }
    let mut next = profile.clone();
    let mut any = false;
    for change in changes {
        any |= next.apply(change)?;
    }
    *profile = next;
    Ok(any)
}

/// What an action asks for, once it was done to the profile, and whether that changed.
fn deed(
    event: &Event,
    profile: &mut Profile,
    action: &Action,
) -> Result<(Option<Deed>, bool), String> {
    let mut change = |change: Change, kind: &str, data: Json| {
        if event.subject().is_none() {
            return Err("the event names no subscriber".to_owned());
        }
        let changed = profile.apply(change)?;
        let delay = Delay::default();
        let emit = Deed::Emit { kind: kind.to_owned(), data: Some(data), delay, applied: true };
        Ok((changed.then_some(emit), changed))
    };
    Ok((
        Some(match action {
            Action::SetTag(Tag { tag }) => {
                return change(Change::Tag(tag.clone()), TAG_APPLIED, json!({ "tag": tag }));
            }
            Action::RemoveTag(Tag { tag }) => {
                return change(Change::NoTag(tag.clone()), TAG_REMOVED, json!({ "tag": tag }));
            }
            Action::SetField(SetField { field, value }) => {
                let data = json!({ "field": field, "value": value });
                return change(Change::Field(field.clone(), value.clone()), FIELD_CHANGED, data);
            }
            Action::Emit(emit) => Deed::Emit {
                kind: emit.kind.clone(),
                data: emit.data.clone(),
                delay: emit.delay,
                applied: false,
            },
            Action::Notify(notify) => Deed::Notify(notify.clone()),
            Action::Count(count) => Deed::Count(count.clone()),
            Action::Push(push) => Deed::Push(push.clone()),
        }),
        false,
    ))
}

/// What filters see, made when the first one looks.
struct View<'a> {
    event: &'a Event,
    facts: Option<Facts>,
    /// The profile has changed since.
    stale: bool,
}

impl View<'_> {
    fn matches(&mut self, rule: &Ready, profile: &Profile) -> Result<bool, String> {
        let Some(filter) = rule.filter()? else { return Ok(true) };
        let look = || profile.seen(self.event.subject().unwrap_or_default());
        let facts = match &mut self.facts {
            Some(facts) => {
                if self.stale {
                    facts.set_subscriber(look());
                    self.stale = false;
                }
                facts
            }
            none => {
                let mut facts = Facts::of(self.event).map_err(|error| error.to_string())?;
                facts.set_subscriber(look());
                self.stale = false;
                none.insert(facts)
            }
        };
        filter.matches(facts).map_err(|error| error.to_string())
    }
}

/// How many events this one follows from.
fn depth(event: &Event) -> u64 {
    told(event, DEPTH, 0, DEPTH_MAX).min(DEPTH_MAX)
}

/// How many events may follow from it.
fn share(event: &Event) -> u64 {
    told(event, SHARE, SHARE_MAX, 0).min(SHARE_MAX)
}

/// A number that an event of a rule carries; `none` where nothing is written there, `odd` where
/// something else is.
fn told(event: &Event, name: &str, none: u64, odd: u64) -> u64 {
    event.extension(name).map_or(none, |value| match value {
        Json::Number(number) => number.as_u64().unwrap_or(odd),
        Json::String(text) => text.parse().unwrap_or(odd),
        _ => odd,
    })
}

/// The name of an effect, the same however often it is repeated: of the event, by its source and
/// id, the rule and the action.
#[must_use]
pub fn name(bot: &BotId, event: &Event, effect: &Effect) -> String {
    let mut hash = Sha256::new();
    for part in [bot.as_str(), event.source(), event.id(), effect.rule.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.update((effect.action as u64).to_be_bytes());
    let digest = hash.finalize();
    let (half, _) = digest.split_at(16);
    uuid::Uuid::from_slice(half).map_or_else(|_| String::new(), |id| id.simple().to_string())
}

/// The event that an effect puts on the bus at `now`.
///
/// # Errors
/// When it breaks a bound of events.
pub fn emitted(
    event: &Event,
    effect: &Effect,
    (kind, data): (&str, Option<&Json>),
    (applied, share): (bool, u64),
    now: Duration,
) -> Result<Event, EventError> {
    let bot = event.bot();
    let mut builder = Event::builder(kind, bot)
        .id(name(bot, event, effect))
        .source(SOURCE)
        .extension(DEPTH, json!(depth(event) + 1))
        .extension(SHARE, json!(share))
        .extension(RULE, json!(effect.rule));
    if let Ok(now) = jiff::Timestamp::from_duration(now.try_into().unwrap_or_default()) {
        builder = builder.time(now);
    }
    if let Some(subject) = event.subject() {
        builder = builder.subject(subject);
    }
    if let Some(data) = data {
        builder = builder.data(data).map_err(EventError::Json)?;
    }
    if applied {
        builder = builder.extension(APPLIED, json!(true));
    }
    if let Some(trace) = event.extension("traceparent") {
        builder = builder.extension("traceparent", trace.clone());
    }
    builder.build()
}

#[cfg(test)]
mod tests;
