//! The profile of a subscriber, built from the events of a bot.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::event::Event;
use crate::id::is_plain;

/// Maximum length of the name of a tag or field, in bytes.
pub const NAME_MAX_BYTES: usize = 64;
/// Maximum number of tags of a subscriber.
pub const TAGS_MAX: usize = 1_000;
/// Maximum number of fields of a subscriber.
pub const FIELDS_MAX: usize = 200;
/// Maximum size of the value of a field, in bytes of JSON.
pub const VALUE_MAX_BYTES: usize = 1_024;
/// Maximum nesting of a value.
const VALUE_MAX_DEPTH: usize = 16;
/// Names that no field may have, because filters use them for other values.
const RESERVED: [&str; 2] = ["id", "tags"];

/// The subscriber got a tag.
pub const TAG_APPLIED: &str = "tag.applied";
/// The subscriber lost a tag.
pub const TAG_REMOVED: &str = "tag.removed";
/// A field of the subscriber was set.
pub const FIELD_CHANGED: &str = "field.changed";
/// The whole profile of the subscriber was replaced.
pub const REPLACED: &str = "subscriber.replaced";
/// The profile of the subscriber was deleted.
pub const DELETED: &str = "subscriber.deleted";
/// The prefix of all other event types about profiles.
const SUBSCRIBER: &str = "subscriber.";

/// The attribute of an event that reports a rule's change: the profile already contains it.
pub const APPLIED: &str = "automationapplied";

/// The profile of a subscriber.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The tags.
    #[serde(default)]
    #[schema(max_items = 1000, example = json!(["vip"]))]
    pub tags: BTreeSet<String>,
    /// The fields.
    #[serde(default)]
    #[schema(value_type = Object, example = json!({ "gender": "female", "age": 31 }))]
    pub fields: BTreeMap<String, Json>,
}

/// One change of a profile.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Add this tag.
    Tag(String),
    /// Remove this tag.
    NoTag(String),
    /// Set a field to this value; `null` removes the field.
    Field(String, Json),
    /// Replace the profile by the following changes.
    Clear,
}

/// Whether an event may change a profile. A change by a rule is already in it.
#[must_use]
pub fn changes_any(event: &Event) -> bool {
    may_change(event.kind()) && event.extension(APPLIED).is_none()
}

/// Whether events of a type change profiles, unless a rule emitted them.
#[must_use]
pub fn may_change(kind: &str) -> bool {
    matches!(kind, TAG_APPLIED | TAG_REMOVED | FIELD_CHANGED) || kind.starts_with(SUBSCRIBER)
}

/// Checks the name of a tag.
///
/// # Errors
/// The problem.
pub fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > NAME_MAX_BYTES || !name.chars().all(is_plain) {
        let shown: String = name.chars().take(NAME_MAX_BYTES).collect();
        return Err(format!(
            "{shown:?} is no name: use 1 to {NAME_MAX_BYTES} of A-Z, a-z, 0-9, '_', '.' and '-'"
        ));
    }
    Ok(())
}

/// Checks the name of a field.
///
/// # Errors
/// The problem.
pub fn check_field(name: &str) -> Result<(), String> {
    check_name(name)?;
    if RESERVED.contains(&name) {
        return Err(format!("{name:?} is not a field: filters use that name for another value"));
    }
    Ok(())
}

/// Checks the value of a field.
///
/// # Errors
/// The problem.
pub fn check_value(value: &Json) -> Result<(), String> {
    let bytes = value.to_string().len();
    if bytes > VALUE_MAX_BYTES {
        return Err(format!("it has {bytes} bytes of JSON; at most {VALUE_MAX_BYTES} are allowed"));
    }
    let problem = "it nests deeper than 16, or a name in it holds a NUL";
    if is_plain_value(value, 0) { Ok(()) } else { Err(problem.to_owned()) }
}

/// Whether MongoDB can store the value.
fn is_plain_value(value: &Json, depth: usize) -> bool {
    if depth > VALUE_MAX_DEPTH {
        return false;
    }
    match value {
        Json::Array(list) => list.iter().all(|value| is_plain_value(value, depth + 1)),
        Json::Object(map) => {
            map.iter().all(|(name, value)| !name.contains('\0') && is_plain_value(value, depth + 1))
        }
        _ => true,
    }
}

/// The changes that an event makes to the profile of its subscriber.
///
/// # Errors
/// The invalid part; then nothing is changed.
pub fn changes(event: &Event) -> Result<Vec<Change>, String> {
    #[derive(Deserialize)]
    struct Tag {
        tag: String,
    }
    #[derive(Deserialize)]
    struct Field {
        field: String,
        value: Json,
    }
    if event.extension(APPLIED).is_some() {
        return Ok(Vec::new());
    }
    let unreadable = |error: serde_json::Error| format!("data: {error}");
    match event.kind() {
        TAG_APPLIED => Ok(vec![Change::Tag(event.data_as::<Tag>().map_err(unreadable)?.tag)]),
        TAG_REMOVED => Ok(vec![Change::NoTag(event.data_as::<Tag>().map_err(unreadable)?.tag)]),
        FIELD_CHANGED => {
            let Field { field, value } = event.data_as().map_err(unreadable)?;
            Ok(vec![Change::Field(field, value)])
        }
        "subscriber.created" | "subscriber.updated" => of_subscriber(event),
        REPLACED => {
            let mut changes = vec![Change::Clear];
            changes.extend(of_subscriber(event)?);
            Ok(changes)
        }
        DELETED => Ok(vec![Change::Clear]),
        _ => Ok(Vec::new()),
    }
}

/// Reads `{"tags": […], "fields": {…}}`, or the fields themselves.
fn of_subscriber(event: &Event) -> Result<Vec<Change>, String> {
    let data = event.data_as::<Json>().map_err(|error| format!("data: {error}"))?;
    let data = match data {
        Json::Null => return Ok(Vec::new()),
        Json::Object(map) => map,
        _ => return Err("data: it is not an object of fields".to_owned()),
    };
    let is_apart = data.keys().all(|key| matches!(&**key, "tags" | "fields"))
        && data.get("fields").is_none_or(Json::is_object)
        && data.get("tags").is_none_or(Json::is_array);
    if !is_apart {
        return Ok(data.into_iter().map(|(field, value)| Change::Field(field, value)).collect());
    }
    let profile: Profile =
        serde_json::from_value(Json::Object(data)).map_err(|error| format!("data: {error}"))?;
    let tags = profile.tags.into_iter().map(Change::Tag);
    let fields = profile.fields.into_iter().map(|(field, value)| Change::Field(field, value));
    Ok(tags.chain(fields).collect())
}

impl Profile {
    /// Whether it has neither tags nor fields.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tags.is_empty() && self.fields.is_empty()
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// The field, and its problem.
    pub fn check(&self) -> Result<(), (String, String)> {
        let counted = |field: &str, count: usize, most: usize| {
            if count > most {
                let problem = format!("has {count} entries; at most {most} are allowed");
                return Err((field.to_owned(), problem));
            }
            Ok(())
        };
        counted("tags", self.tags.len(), TAGS_MAX)?;
        counted("fields", self.fields.len(), FIELDS_MAX)?;
        for tag in &self.tags {
            check_name(tag).map_err(|problem| ("tags".to_owned(), problem))?;
        }
        for (field, value) in &self.fields {
            check_field(field)
                .and_then(|()| check_value(value))
                .map_err(|problem| (format!("fields.{field}"), problem))?;
        }
        Ok(())
    }

    /// Applies a change. Returns whether the profile changed.
    ///
    /// # Errors
    /// If it exceeds a bound; then nothing is changed.
    pub fn apply(&mut self, change: Change) -> Result<bool, String> {
        match change {
            Change::Tag(tag) => {
                check_name(&tag)?;
                if self.tags.len() >= TAGS_MAX && !self.tags.contains(&tag) {
                    return Err(format!("the subscriber has {TAGS_MAX} tags, the maximum"));
                }
                Ok(self.tags.insert(tag))
            }
            Change::NoTag(tag) => Ok(self.tags.remove(&tag)),
            Change::Field(field, Json::Null) => Ok(self.fields.remove(&field).is_some()),
            Change::Field(field, value) => {
                check_field(&field)?;
                check_value(&value)?;
                if self.fields.len() >= FIELDS_MAX && !self.fields.contains_key(&field) {
                    return Err(format!("the subscriber has {FIELDS_MAX} fields, the maximum"));
                }
                if self.fields.get(&field) == Some(&value) {
                    return Ok(false);
                }
                self.fields.insert(field, value);
                Ok(true)
            }
            Change::Clear => {
                let was_known = !self.is_empty();
                *self = Self::default();
                Ok(was_known)
            }
        }
    }

    /// The profile in the form for filters.
    #[must_use]
    pub fn seen(&self, id: &str) -> Json {
        let mut seen: serde_json::Map<String, Json> =
            self.fields.iter().map(|(field, value)| (field.clone(), value.clone())).collect();
        seen.insert("id".to_owned(), json!(id));
        seen.insert("tags".to_owned(), json!(self.tags));
        Json::Object(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::BotId;

    fn event(kind: &str, data: &Json) -> Event {
        let bot = BotId::parse("b").unwrap();
        Event::builder(kind, &bot).subject("u").data(data).unwrap().build().unwrap()
    }

    /// The profile that the events leave behind.
    fn after(events: &[(&str, Json)]) -> Json {
        let mut profile = Profile::default();
        for (kind, data) in events {
            for change in changes(&event(kind, data)).unwrap() {
                profile.apply(change).unwrap();
            }
        }
        serde_json::to_value(profile).unwrap()
    }

    #[test]
    fn events_are_applied_in_their_order() {
        let tag = |tag: &str| json!({ "tag": tag });
        let field = |field: &str, value: Json| json!({ "field": field, "value": value });
        let seen = after(&[
            ("tag.applied", tag("a")),
            ("tag.applied", tag("b")),
            ("tag.removed", tag("a")),
            ("field.changed", field("age", json!(30))),
            ("field.changed", field("age", json!(31))),
            ("field.changed", field("x", json!(1))),
            ("field.changed", field("x", Json::Null)),
            ("sale.made", json!({ "anything": 1 })),
        ]);
        assert_eq!(seen, json!({ "tags": ["b"], "fields": { "age": 31 } }));
    }

    #[test]
    fn a_subscriber_is_told_of_in_fields_or_in_tags_and_fields() {
        let created = ("subscriber.created", json!({ "gender": "female", "age": 30 }));
        let updated = ("subscriber.updated", json!({ "tags": ["x"], "fields": { "age": 31 } }));
        let both = json!({ "tags": ["x"], "fields": { "gender": "female", "age": 31 } });
        assert_eq!(after(&[created.clone(), updated.clone()]), both);
        let replaced = ("subscriber.replaced", json!({ "fields": { "a": 1 } }));
        let one = json!({ "tags": [], "fields": { "a": 1 } });
        assert_eq!(after(&[created.clone(), updated, replaced.clone()]), one);
        let nothing = json!({ "tags": [], "fields": {} });
        assert_eq!(after(&[replaced, ("subscriber.deleted", Json::Null)]), nothing);
        assert_eq!(after(&[("subscriber.seen", json!(7))]), nothing);
    }

    #[test]
    fn a_value_beyond_a_bound_changes_nothing() {
        for (kind, data, why) in [
            ("tag.applied", json!({}), "missing field `tag`"),
            ("tag.applied", json!({ "tag": "a b" }), "\"a b\" is no name: use 1 to 64"),
            ("tag.applied", json!({ "tag": "x".repeat(65) }), "is no name: use 1 to 64"),
            ("field.changed", json!({ "field": "tags", "value": 1 }), "\"tags\" is not a field"),
            ("field.changed", json!({ "field": "a", "value": "x".repeat(5_000) }), "5002 bytes"),
            ("field.changed", json!({ "field": "a", "value": [{ "a\0": 1 }] }), "holds a NUL"),
            ("subscriber.updated", json!([1]), "not an object of fields"),
        ] {
            let mut profile = Profile::default();
            let applied = changes(&event(kind, &data)).and_then(|changes| {
                changes.into_iter().try_for_each(|c| profile.apply(c).map(drop))
            });
            let error = applied.unwrap_err();
            assert!(error.contains(why), "{error}");
            assert_eq!(profile, Profile::default());
        }
        let mut full = Profile::default();
        for n in 0..TAGS_MAX {
            assert!(full.apply(Change::Tag(n.to_string())).unwrap());
        }
        assert!(full.apply(Change::Tag("more".to_owned())).unwrap_err().contains("1000 tags"));
        assert!(!full.apply(Change::Tag("7".to_owned())).unwrap());
    }

    #[test]
    fn a_change_that_a_rule_made_is_not_applied_again() {
        let made = event("tag.applied", &json!({ "tag": "a" }))
            .with_extension(APPLIED, Some(json!("rule")));
        assert_eq!(changes(&made).unwrap(), []);
    }
}
