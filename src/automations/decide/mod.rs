//! The decision of a bot's rules on one event.
//!
//! 1. The event changes the profile of its subscriber.
//! 2. The rules for its type are evaluated in the order of their ids. Each one sees the profile as
//!    the rules before it left it.
//! 3. Actions on the profile change it immediately. Every other action becomes an [`Effect`], which
//!    is carried out after the decision is stored.
//!
//! The function is pure: the same event, profile and rules always lead to the same decision.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use sha2::{Digest as _, Sha256};

use super::profile::{self, APPLIED, Change, FIELD_CHANGED, Profile, TAG_APPLIED, TAG_REMOVED};
use super::rule::{Action, Count, Delay, Notify, Push, Ready, SetField, Tag};
use crate::event::{Event, EventError};
use crate::expression::{FILTER_MAX_STEPS, Facts, Filter, Sizes};
use crate::id::{BotId, RuleId};
use crate::replay::MARK;

/// Maximum length of a chain of events that rules emit: there is no seventeenth.
pub const DEPTH_MAX: u64 = 16;
/// Maximum number of effects of one event.
pub const EFFECTS_MAX: usize = 1_000;
/// Maximum size of the decision on one event, in bytes of JSON.
pub const DECISION_MAX_BYTES: usize = 1 << 20;
/// The attribute with the position in a chain of emitted events.
pub const DEPTH: &str = "automationdepth";
/// The attribute with the remaining number of events that may follow from this one. Events that
/// follow from the same event share its number.
pub const SHARE: &str = "automationshare";
/// Maximum number of events that may follow from an event that no rule emitted, directly and
/// indirectly.
pub const SHARE_MAX: u64 = 1_000;
/// The attribute with the rule that emitted the event.
pub const RULE: &str = "automationrule";
/// The attribute of a delayed event that goes to the bus when it is due.
pub const DUE: &str = "automationdue";
/// The source of events that rules emit.
pub const SOURCE: &str = "fairlane/automations";
/// Filters that cost no more steps take up to about 20 ms together, and mostly less than one.
const SHORT_MAX_STEPS: u64 = 300_000;
/// An event and a profile with more bytes of JSON take milliseconds to read.
const SHORT_MAX_BYTES: usize = 64 << 10;
/// The size of a set without its rules, in bytes, and that of a type whose matching rules are cached.
const SET: usize = 512;
const TYPE: usize = 64;
/// All types may take this, and a quarter of the size of the rules.
const TYPES_MIN: usize = 4_096;

/// The enabled rules of a bot.
#[derive(Debug, Default)]
pub struct RuleSet {
    rules: Vec<Ready>,
    by_type: Mutex<ByType>,
    /// Whether the bot has any rule, enabled or not.
    any: bool,
    /// Its size without `by_type`, in bytes.
    bytes: usize,
}

/// The matching rules by type, and their size in bytes.
#[derive(Debug, Default)]
struct ByType {
    places: HashMap<Box<str>, Arc<[usize]>>,
    bytes: usize,
}

impl RuleSet {
    /// The rules of a bot, in the order of their ids. Disabled rules only count for
    /// [`Self::is_any`].
    #[must_use]
    pub fn new(rules: Vec<Ready>) -> Self {
        let any = !rules.is_empty();
        let rules: Vec<_> = rules.into_iter().filter(|rule| rule.rule.enabled).collect();
        let bytes = SET + rules.iter().map(|rule| rule.rule.memory()).sum::<usize>();
        Self { rules, by_type: Mutex::default(), any, bytes }
    }

    /// Its approximate size in memory, in bytes.
    pub(super) fn memory(&self) -> usize {
        self.bytes + self.types_max()
    }

    fn types_max(&self) -> usize {
        TYPES_MIN + self.bytes / 4
    }

    /// Whether the bot has any rule, enabled or not. If so, Fairlane keeps profiles for it.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.any
    }

    fn for_type(&self, kind: &str) -> Arc<[usize]> {
        let mut by_type = self.by_type.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(places) = by_type.places.get(kind) {
            return Arc::clone(places);
        }
        let places = self.rules.iter().enumerate();
        let places: Arc<[usize]> =
            places.filter(|(_, rule)| rule.takes(kind)).map(|(place, _)| place).collect();
        let bytes = TYPE + kind.len() + size_of_val(&*places);
        if by_type.bytes + bytes > self.types_max() {
            *by_type = ByType::default();
        }
        by_type.bytes += bytes;
        by_type.places.insert(kind.into(), Arc::clone(&places));
        places
    }
}

/// An effect of a rule, other than a change of the profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// The rule.
    #[serde(rename = "r")]
    pub rule: RuleId,
    /// The index of the action in the rule.
    #[serde(rename = "a")]
    pub action: usize,
    /// What to do.
    #[serde(rename = "d")]
    pub deed: Deed,
}

/// The action of an effect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Deed {
    /// Emit an event to the bus.
    Emit {
        /// The type of the event.
        kind: String,
        /// The data of the event.
        data: Option<Json>,
        /// The delay.
        delay: Delay,
        /// Whether it reports a change that is already in the profile.
        applied: bool,
    },
    /// Schedule a notification.
    Notify(Notify),
    /// Count views.
    Count(Count),
    /// Push the event to a URL.
    Push(Push),
}

/// The decision on an event.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// The effects, in their order.
    #[serde(rename = "e")]
    pub effects: Vec<Effect>,
    /// How many events may follow from each event that it emits.
    #[serde(rename = "s", default)]
    pub share: u64,
    /// Why the event becomes a dead letter after all effects.
    #[serde(rename = "x", default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<String>,
}

impl Decision {
    /// Whether there is no effect.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.effects.is_empty() && self.dead.is_none()
    }
}

/// A note for the statistics of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// The rule matched and caused actions.
    Matched {
        /// The rule.
        rule: RuleId,
        /// The names of the actions.
        actions: Vec<&'static str>,
    },
    /// The rule could not be evaluated, or one of its actions failed.
    Failed {
        /// The rule; `None`: the event itself cannot be applied to the profile.
        rule: Option<RuleId>,
        /// The reason.
        why: String,
    },
}

/// The result for one event.
#[derive(Debug, Default)]
pub struct Decided {
    /// The decision.
    pub decision: Decision,
    /// The notes for the statistics.
    pub notes: Vec<Note>,
    /// Whether the profile changed.
    pub changed: bool,
}

/// Whether the decision on an event may take long, by the cost of its filters. The profile is that before
/// the event.
#[must_use]
pub fn may_be_long(event: &Event, profile: &Profile, rules: &RuleSet) -> bool {
    let places = rules.for_type(event.kind());
    let filters = places.iter().filter_map(|&place| rules.rules[place].filter().ok().flatten());
    let filters: Vec<&Filter> = filters.collect();
    if filters.is_empty() {
        return false;
    }
    let bytes = bytes_of(event).saturating_add(bytes_of(profile));
    if bytes > SHORT_MAX_BYTES {
        return true;
    }
    let are_long = |sizes: &Sizes, runs: fn(u64) -> bool| {
        let steps = filters.iter().map(|filter| filter.steps(sizes)).filter(|steps| runs(*steps));
        // Before each filter, a rule may have changed the profile.
        let steps = steps.map(|steps| steps.saturating_add(sizes.subscriber()));
        steps.fold(0, u64::saturating_add) > SHORT_MAX_STEPS
    };
    // Mostly, the number of bytes is enough to know.
    if !are_long(&Sizes::at_most(bytes), |_| true) {
        return false;
    }
    let seen = profile.seen(event.subject().unwrap_or_default());
    Sizes::of(event, &seen).is_ok_and(|sizes| are_long(&sizes, |steps| steps <= FILTER_MAX_STEPS))
}

/// The size of a value as JSON.
fn bytes_of(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(usize::MAX, |json| json.len())
}

/// Decides on an event, and changes the profile of its subscriber.
#[must_use]
pub fn decide(event: &Event, profile: &mut Profile, rules: &RuleSet) -> Decided {
    let mut decided = Decided::default();
    // Explicit changes of profiles are kept even for a bot without rules. Other events of such a
    // bot arrived only because the index was outdated.
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
                        "rule {:?} would emit {kind:?} as number {depth} of a chain of events that rules emitted; chains end at {DEPTH_MAX}, so that loops end",
                        rule.id.as_str()
                    )
                });
                continue;
            }
            if let Deed::Emit { kind, .. } = &deed {
                if emits == share {
                    decided.decision.dead.get_or_insert_with(|| {
                        format!(
                            "rule {:?} would emit {kind:?}, but rules have used up the {SHARE_MAX} events that may follow from one event",
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
                        "rules exceed the maximum of {EFFECTS_MAX} actions or {DECISION_MAX_BYTES} bytes of actions on one event: the actions of rule {:?} and of the rules after it are not done",
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

/// Applies the event to the profile: all of it or nothing.
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

/// Applies an action to the profile. Returns its effect, and whether the profile changed.
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

/// The values for filters, created for the first filter.
struct View<'a> {
    event: &'a Event,
    facts: Option<Facts>,
    /// Whether the profile has changed since.
    stale: bool,
}

impl View<'_> {
    fn matches(&mut self, rule: &Ready, profile: &Profile) -> Result<bool, String> {
        let Some(filter) = rule.filter()? else { return Ok(true) };
        let look = || profile.seen(self.event.subject().unwrap_or_default());
        let facts = match &mut self.facts {
            Some(facts) => {
                if self.stale {
                    // A large profile takes as long as many steps of a filter.
                    facts.has_steps_left().map_err(|error| error.to_string())?;
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

/// The position of the event in a chain of emitted events.
fn depth(event: &Event) -> u64 {
    told(event, DEPTH, 0, DEPTH_MAX).min(DEPTH_MAX)
}

/// The number of events that may follow from it.
fn share(event: &Event) -> u64 {
    told(event, SHARE, SHARE_MAX, 0).min(SHARE_MAX)
}

/// A number in an attribute of an emitted event; `none` if the attribute is absent, `odd` if it is
/// not a number.
fn told(event: &Event, name: &str, none: u64, odd: u64) -> u64 {
    event.extension(name).map_or(none, |value| match value {
        Json::Number(number) => number.as_u64().unwrap_or(odd),
        Json::String(text) => text.parse().unwrap_or(odd),
        _ => odd,
    })
}

/// The name of an effect, equal for every repetition: derived from the source and id of the event,
/// the rule and the action. A replay is no repetition: its effects have other names than those of the
/// first time.
#[must_use]
pub fn name(bot: &BotId, event: &Event, effect: &Effect) -> String {
    let mut hash = Sha256::new();
    for part in [bot.as_str(), event.source(), event.id(), effect.rule.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.update((effect.action as u64).to_be_bytes());
    if let Some(replay) = event.extension(MARK) {
        hash.update(replay.to_string());
    }
    let digest = hash.finalize();
    let (half, _) = digest.split_at(16);
    uuid::Uuid::from_slice(half).map_or_else(|_| String::new(), |id| id.simple().to_string())
}

/// The event that an effect emits at `now`.
///
/// # Errors
/// If it violates a bound of events.
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
    // A delay beyond every time has none.
    let time = now.try_into().ok().and_then(|now| jiff::Timestamp::from_duration(now).ok());
    if let Some(time) = time {
        builder = builder.time(time);
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
