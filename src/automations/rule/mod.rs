//! A bot's rule: the events it concerns, a condition, and the actions.

mod check;
mod memory;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value as Json;
use utoipa::ToSchema;

pub use self::check::Unusable;
use crate::expression::{Filter, FilterError, Glob};
use crate::id::RuleId;

/// Maximum number of rules of a bot.
pub const RULES_MAX: usize = 1_000;
/// Maximum length of the name of a rule, in bytes.
pub const NAME_MAX_BYTES: usize = 200;
/// Maximum number of type patterns of a rule.
pub const TYPES_MAX: usize = 50;
/// Maximum length of a type pattern, and of an emitted type, in bytes.
pub const TYPE_MAX_BYTES: usize = 256;
/// Maximum number of actions of a rule.
pub const ACTIONS_MAX: usize = 20;
/// Maximum size of emitted `data`, in bytes of JSON.
pub const DATA_MAX_BYTES: usize = 16 * 1_024;
/// Maximum size of a rule, in bytes of JSON.
pub const RULE_MAX_BYTES: usize = 64 * 1_024;
/// Maximum size of all rules of a bot together, in bytes of JSON.
pub const RULES_MAX_BYTES: usize = 4 << 20;
/// Maximum size of all rules of a bot together in the memory of a process, by [`Rule::memory`], after one of
/// them is written.
pub const RULES_MAX_MEMORY: usize = 32 << 20;
/// The same for the stored rules that are evaluated: earlier versions wrote more.
pub const RULES_MAX_STORED_MEMORY: usize = 64 << 20;
/// Maximum number of `*` in a type pattern.
pub const STARS_MAX: usize = 4;

/// A rule as people write it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// What people call it.
    #[serde(default)]
    #[schema(max_length = 200, example = "Welcome women over 30")]
    pub name: String,
    /// Types of the events that it is about; `*` stands for any text, dots included.
    #[schema(min_items = 1, max_items = 50, example = json!(["tag.applied"]))]
    pub on: Vec<String>,
    /// A CEL expression over `event` and `subscriber`; left out, every event of these types
    /// matches. The subscriber is as the event left it: `subscriber.id`, `subscriber.tags`, and
    /// each field by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        max_length = 4096,
        example = "event.data.tag == \"vip\" && subscriber.gender == \"female\" && subscriber.age > 30"
    )]
    pub filter: Option<String>,
    /// What is done, in this order.
    #[schema(min_items = 1, max_items = 20)]
    pub actions: Vec<Action>,
    /// Whether it is in force.
    #[serde(default = "yes")]
    #[schema(default = true)]
    pub enabled: bool,
}

fn yes() -> bool {
    true
}

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// The subscriber gets a tag, and `tag.applied` is put on the bus if that is news.
    SetTag(Tag),
    /// The subscriber loses a tag, and `tag.removed` is put on the bus if that is news.
    RemoveTag(Tag),
    /// A field of the subscriber is set (`null` removes it), and `field.changed` is put on the bus
    /// if that is news.
    SetField(SetField),
    /// An event of the bot and the subscriber is put on the bus, now or later.
    Emit(Emit),
    /// A URL is called, as `/send_delayed` does it.
    Notify(Notify),
    /// Views of an ad are counted.
    Count(Count),
    /// The event is sent to a URL, in its own time: a slow receiver delays no other bot.
    Push(Push),
}

/// Which tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Tag {
    /// The tag.
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$", example = "vip")]
    pub tag: String,
}

/// Which field, and what it is from then on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetField {
    /// The field.
    #[schema(pattern = "^[A-Za-z0-9_.-]{1,64}$", example = "stage")]
    pub field: String,
    /// Its value.
    #[schema(example = "welcomed")]
    pub value: Json,
}

/// What is put on the bus.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Emit {
    /// Its type.
    #[serde(rename = "type")]
    #[schema(min_length = 1, max_length = 256, example = "welcome.check")]
    pub kind: String,
    /// Its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Json>,
    /// After how long: seconds, or a text such as `"10m"`.
    #[serde(default, skip_serializing_if = "Delay::is_none")]
    pub delay: Delay,
}

/// What is sent to a URL.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Notify {
    /// The URL that is called: http or https, at a public address or in `callbacks.allow_nets`.
    #[schema(max_length = 2048, example = "https://example.com/remind")]
    pub url: String,
    /// What it is called in the statistics.
    #[serde(rename = "type", default = "none", skip_serializing_if = "is_none")]
    #[schema(max_length = 64, default = "none")]
    pub kind: String,
    /// After how long: seconds, or a text such as `"10m"`.
    #[serde(default, skip_serializing_if = "Delay::is_none")]
    pub delay: Delay,
    /// For which user; the event's subscriber if left out. One user gets one notification in
    /// `notifications.user_poll_threshold`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256)]
    pub uid: Option<String>,
    /// GET, POST, PUT, PATCH or DELETE; POST if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "POST")]
    pub method: Option<String>,
    /// What is sent; if left out, `{"botid", "subject", "rule", "event"}` in JSON, with GET and
    /// DELETE nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Json>,
    /// This URL must answer `ok` before each attempt, else nothing is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 2048)]
    pub recheck_url: Option<String>,
    /// Once due it waits until `/user_online` tells that the user is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[schema(default = false)]
    pub send_than_online: bool,
    /// It is given up so long after it was due; a day if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in: Option<Delay>,
    /// The set of `callbacks.headers` that is sent with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 64)]
    pub headers_from: Option<String>,
}

fn none() -> String {
    crate::notifications::record::NO_KIND.to_owned()
}

fn is_none(kind: &str) -> bool {
    kind == crate::notifications::record::NO_KIND
}

/// What is counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Count {
    /// The ad.
    #[schema(min_length = 1, max_length = 128, example = "welcome-sent")]
    pub ad: String,
    /// How many views.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    pub n: u64,
}

fn one() -> u64 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_one(n: &u64) -> bool {
    *n == 1
}

/// Where the event is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Push {
    /// The URL: http or https, at a public address or in `callbacks.allow_nets`. It gets the event
    /// as CloudEvents JSON by POST.
    #[schema(max_length = 2048, example = "https://example.com/events")]
    pub url: String,
}

/// A time span: seconds, or a text such as `"10m"`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delay(pub Duration);

impl Delay {
    fn is_none(&self) -> bool {
        self.0.is_zero()
    }

    /// The end of the time span if it begins at `time`. A stored one may be beyond the maximum.
    #[must_use]
    pub fn after(self, time: Duration) -> Duration {
        time.saturating_add(self.0)
    }
}

impl Serialize for Delay {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.subsec_nanos() == 0 {
            serializer.serialize_u64(self.0.as_secs())
        } else {
            serializer.serialize_f64(self.0.as_secs_f64())
        }
    }
}

impl<'de> Deserialize<'de> for Delay {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let unusable = |given: &dyn fmt::Display| {
            serde::de::Error::custom(format!(
                "{given} is no time span; write seconds, or a text such as \"10m\""
            ))
        };
        match Json::deserialize(deserializer)? {
            Json::Number(number) => number
                .as_f64()
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .map(Self)
                .ok_or_else(|| unusable(&number)),
            Json::String(text) => {
                humantime::parse_duration(&text).map(Self).map_err(|_| unusable(&text))
            }
            other => Err(unusable(&other)),
        }
    }
}

impl utoipa::PartialSchema for Delay {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{SchemaType, Type};
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(SchemaType::from_iter([Type::Number, Type::String]))
            .minimum(Some(0))
            .examples([serde_json::json!(600)])
            .description(Some("Seconds, or a text such as `\"10m\"`; at most 366 days"))
            .into()
    }
}

impl ToSchema for Delay {}

impl Action {
    /// The names of all actions.
    pub const NAMES: [&str; 7] =
        ["set_tag", "remove_tag", "set_field", "emit", "notify", "count", "push"];

    /// Its name in rules.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let [set_tag, remove_tag, set_field, emit, notify, count, push] = Self::NAMES;
        match self {
            Self::SetTag(_) => set_tag,
            Self::RemoveTag(_) => remove_tag,
            Self::SetField(_) => set_field,
            Self::Emit(_) => emit,
            Self::Notify(_) => notify,
            Self::Count(_) => count,
            Self::Push(_) => push,
        }
    }
}

impl Rule {
    /// Its size as JSON.
    #[must_use]
    pub fn bytes(&self) -> usize {
        serde_json::to_string(self).map_or(usize::MAX, |text| text.len())
    }
}

impl Notify {
    /// Its method; by default `POST`.
    #[must_use]
    pub fn method(&self) -> String {
        self.method.as_deref().map_or_else(|| "POST".to_owned(), str::to_ascii_uppercase)
    }
}

/// The body to send: a text unchanged, any other value as JSON.
#[must_use]
pub fn text_of(body: &Json) -> String {
    match body {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A rule that can be evaluated.
#[derive(Debug, Clone)]
pub struct Ready {
    /// Its id.
    pub id: RuleId,
    /// The rule.
    pub rule: Rule,
    types: Vec<Glob>,
    /// Or why the rule is not usable: an older version accepted it.
    filter: Option<Result<Arc<Filter>, String>>,
}

impl Ready {
    /// Compiles a rule. `compile` may use a cached filter.
    #[must_use]
    pub fn new(
        id: RuleId,
        rule: Rule,
        compile: impl FnOnce(&str) -> Result<Arc<Filter>, FilterError>,
    ) -> Self {
        let filter = rule.filter.as_deref().map(compile);
        let filter = filter.map(|compiled| compiled.map_err(|error| error.to_string()));
        Self { id, types: types(&rule), rule, filter }
    }

    /// A rule that is not usable, and why. It keeps only its types.
    #[must_use]
    pub fn refused(id: RuleId, rule: Rule, why: String) -> Self {
        let rule = Rule { name: String::new(), filter: None, actions: Vec::new(), ..rule };
        Self { id, types: types(&rule), rule, filter: Some(Err(why)) }
    }

    /// Whether it concerns events of this type.
    #[must_use]
    pub fn takes(&self, kind: &str) -> bool {
        self.types.iter().any(|glob| glob.matches(kind))
    }

    /// The filter, if the rule has one.
    ///
    /// # Errors
    /// Why the rule is not usable.
    pub fn filter(&self) -> Result<Option<&Filter>, String> {
        self.filter.as_ref().map(Result::as_deref).transpose().map_err(String::clone)
    }
}

fn types(rule: &Rule) -> Vec<Glob> {
    rule.on.iter().map(|pattern| Glob::new(pattern)).collect()
}

#[cfg(test)]
mod tests;
