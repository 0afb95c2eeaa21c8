//! A bot's rule: which events it is about, for whom, and what is done then.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value as Json;
use utoipa::ToSchema;

use super::profile::{self, check_name, check_value};
use crate::counters::view::{AdId, VIEWS_MAX};
use crate::filter::{Filter, FilterError, Glob, Sees};
use crate::id::RuleId;
use crate::notifications::record::{BODY_MAX_BYTES, DELAY_MAX, KIND_MAX_BYTES, UID_MAX_BYTES};
use crate::outbound::{CheckedUrl, Policy};

/// Most rules of a bot.
pub const RULES_MAX: usize = 1_000;
/// Longest name of a rule, in bytes.
pub const NAME_MAX_BYTES: usize = 200;
/// Most type patterns of a rule.
pub const TYPES_MAX: usize = 50;
/// Longest type pattern, and longest type that is emitted, in bytes.
pub const TYPE_MAX_BYTES: usize = 256;
/// Most actions of a rule.
pub const ACTIONS_MAX: usize = 20;
/// Largest `data` that is emitted, in bytes of JSON.
pub const DATA_MAX_BYTES: usize = 16 * 1_024;
/// Largest rule, in bytes of JSON.
pub const RULE_MAX_BYTES: usize = 64 * 1_024;
/// Largest rules of a bot together, in bytes of JSON.
pub const RULES_MAX_BYTES: usize = 4 << 20;
/// Most `*` of a type pattern.
pub const STARS_MAX: usize = 4;
/// How a notification may be sent.
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

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
    /// The event is sent to a URL, in its own time: a slow receiver holds nobody.
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
    /// Every name of an action.
    pub const NAMES: [&str; 7] =
        ["set_tag", "remove_tag", "set_field", "emit", "notify", "count", "push"];

    /// Its name, as rules write it.
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

/// Why a rule cannot be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Unusable {
    /// Where, for example `actions[2].emit.type`.
    pub field: String,
    /// What is wrong there, and what helps.
    pub problem: String,
    /// The line and column of a filter.
    pub position: Option<crate::filter::Position>,
}

impl Unusable {
    fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into(), position: None }
    }
}

impl Rule {
    /// Its size as JSON.
    #[must_use]
    pub fn bytes(&self) -> usize {
        serde_json::to_string(self).map_or(usize::MAX, |text| text.len())
    }

    /// Checks every bound; the URLs by `targets`.
    ///
    /// # Errors
    /// With the first thing that cannot be kept.
    pub fn check(&self, targets: &Policy) -> Result<(), Unusable> {
        if self.name.len() > NAME_MAX_BYTES {
            let problem =
                format!("has {} bytes; at most {NAME_MAX_BYTES} are allowed", self.name.len());
            return Err(Unusable::new("name", problem));
        }
        counted("on", "type pattern", self.on.len(), TYPES_MAX)?;
        for (at, pattern) in self.on.iter().enumerate() {
            check_type(&format!("on[{at}]"), pattern)?;
            if pattern.matches('*').count() > STARS_MAX {
                let problem = format!("has more than {STARS_MAX} `*`; write fewer");
                return Err(Unusable::new(format!("on[{at}]"), problem));
            }
        }
        if let Some(filter) = &self.filter {
            Filter::compile(filter, Sees::Subscriber).map_err(|error| Unusable {
                position: error.position(),
                ..Unusable::new("filter", error.to_string())
            })?;
        }
        counted("actions", "action", self.actions.len(), ACTIONS_MAX)?;
        let bytes = self.bytes();
        if bytes > RULE_MAX_BYTES {
            let problem =
                format!("the rule has {bytes} bytes; at most {RULE_MAX_BYTES} are allowed");
            return Err(Unusable::new("actions", problem));
        }
        for (at, action) in self.actions.iter().enumerate() {
            action.check(targets).map_err(|(part, problem)| {
                Unusable::new(format!("actions[{at}].{}.{part}", action.name()), problem)
            })?;
        }
        Ok(())
    }
}

fn counted(field: &str, what: &str, count: usize, most: usize) -> Result<(), Unusable> {
    match count {
        0 => Err(Unusable::new(field, format!("is empty; write at least one {what}"))),
        count if count > most => {
            Err(Unusable::new(field, format!("has {count} entries; at most {most} are allowed")))
        }
        _ => Ok(()),
    }
}

fn check_type(field: &str, text: &str) -> Result<(), Unusable> {
    type_problem(text).map_or(Ok(()), |problem| Err(Unusable::new(field, problem)))
}

fn type_problem(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("is empty; write a type such as \"tag.applied\"".to_owned());
    }
    if text.len() > TYPE_MAX_BYTES {
        return Some(format!("has {} bytes; at most {TYPE_MAX_BYTES} are allowed", text.len()));
    }
    text.chars().any(char::is_control).then(|| "holds a control character; remove it".to_owned())
}

impl Action {
    /// The part that cannot be used, and why.
    fn check(&self, targets: &Policy) -> Result<(), (&'static str, String)> {
        let url = |part, text: &str| {
            CheckedUrl::parse(text, targets).map(drop).map_err(|error| (part, error.to_string()))
        };
        let delay = |part, delay: Delay| {
            let most = DELAY_MAX.as_secs() / 86_400;
            if delay.0 > DELAY_MAX {
                return Err((part, format!("is more than {most} days")));
            }
            Ok(())
        };
        let bytes = |part, count: usize, most: usize| {
            if count > most {
                return Err((part, format!("has {count} bytes; at most {most} are allowed")));
            }
            Ok(())
        };
        match self {
            Self::SetTag(Tag { tag }) | Self::RemoveTag(Tag { tag }) => {
                check_name(tag).map_err(|problem| ("tag", problem))
            }
            Self::SetField(SetField { field, value }) => {
                profile::check_field(field).map_err(|problem| ("field", problem))?;
                check_value(value).map_err(|problem| ("value", problem))
            }
            Self::Emit(emit) => {
                type_problem(&emit.kind).map_or(Ok(()), |problem| Err(("type", problem)))?;
                let data = emit.data.as_ref().map_or(0, |data| data.to_string().len());
                bytes("data", data, DATA_MAX_BYTES)?;
                delay("delay", emit.delay)
            }
            Self::Notify(notify) => {
                url("url", &notify.url)?;
                if let Some(recheck) = &notify.recheck_url {
                    url("recheck_url", recheck)?;
                }
                bytes("type", notify.kind.len(), KIND_MAX_BYTES)?;
                if notify.kind.is_empty() || notify.kind.chars().any(char::is_control) {
                    return Err(("type", "is empty or holds a control character".to_owned()));
                }
                delay("delay", notify.delay)?;
                if let Some(uid) = &notify.uid {
                    bytes("uid", uid.len(), UID_MAX_BYTES)?;
                    if uid.chars().any(char::is_control) {
                        return Err(("uid", "holds a control character; remove it".to_owned()));
                    }
                }
                if let Some(headers) = &notify.headers_from {
                    bytes("headers_from", headers.len(), KIND_MAX_BYTES)?;
                    if headers.is_empty() || headers.chars().any(char::is_control) {
                        let problem = "is empty or holds a control character";
                        return Err(("headers_from", problem.to_owned()));
                    }
                }
                notify.check_body()?;
                let expires = notify.expires_in.unwrap_or(Delay(Duration::from_secs(1)));
                if expires.0.is_zero() {
                    let problem = "is 0, so that it would have expired when it is due";
                    return Err(("expires_in", problem.to_owned()));
                }
                delay("expires_in", expires)
            }
            Self::Count(Count { ad, n }) => {
                AdId::parse(ad).map_err(|error| ("ad", error.to_string()))?;
                if !(1..=VIEWS_MAX).contains(n) {
                    let problem = format!("is {n}; write a whole number from 1 to {VIEWS_MAX}");
                    return Err(("n", problem));
                }
                Ok(())
            }
            Self::Push(Push { url: to }) => url("url", to),
        }
    }
}

impl Notify {
    /// How it is sent.
    #[must_use]
    pub fn method(&self) -> String {
        self.method.as_deref().map_or_else(|| "POST".to_owned(), str::to_ascii_uppercase)
    }

    fn check_body(&self) -> Result<(), (&'static str, String)> {
        let method = self.method();
        if !METHODS.contains(&&*method) {
            let problem = "is none of GET, POST, PUT, PATCH and DELETE";
            return Err(("method", problem.to_owned()));
        }
        let Some(body) = &self.body else { return Ok(()) };
        if method == "GET" {
            return Err(("body", "is not sent with GET; write another method".to_owned()));
        }
        let length = text_of(body).len();
        if length > BODY_MAX_BYTES {
            let problem = format!("has {length} bytes; at most {BODY_MAX_BYTES} are allowed");
            return Err(("body", problem));
        }
        Ok(())
    }
}

/// A body as it is sent: a text as it is, everything else as JSON.
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
    /// What it says.
    pub rule: Rule,
    types: Vec<Glob>,
    /// Or why it cannot be used: it was fine for the version that stored it.
    filter: Option<Result<Arc<Filter>, FilterError>>,
}

impl Ready {
    /// Compiles a rule. `compile` may know the filter already.
    #[must_use]
    pub fn new(
        id: RuleId,
        rule: Rule,
        compile: impl FnOnce(&str) -> Result<Arc<Filter>, FilterError>,
    ) -> Self {
        let types = rule.on.iter().map(|pattern| Glob::new(pattern)).collect();
        let filter = rule.filter.as_deref().map(compile);
        Self { id, rule, types, filter }
    }

    /// Whether it is about events of this type.
    #[must_use]
    pub fn takes(&self, kind: &str) -> bool {
        self.types.iter().any(|glob| glob.matches(kind))
    }

    /// What it asks for.
    ///
    /// # Errors
    /// Why that cannot be used.
    pub fn filter(&self) -> Result<Option<&Filter>, String> {
        let filter = self.filter.as_ref().map(Result::as_deref).transpose();
        filter.map_err(ToString::to_string)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Result<Rule, String> {
        let rule: Rule = serde_json::from_str(text).map_err(|error| error.to_string())?;
        rule.check(&Policy::Tenant(Arc::default())).map_err(|error| error.to_string())?;
        Ok(rule)
    }

    #[test]
    fn a_rule_reads_back_as_it_was_written() {
        let text = r#"{"name":"Welcome","on":["tag.applied","sale.*"],"filter":"subscriber.age > 30","actions":[{"set_tag":{"tag":"a"}},{"remove_tag":{"tag":"b"}},{"set_field":{"field":"stage","value":{"x":[1,2.5,null]}}},{"emit":{"type":"welcome.check","data":{"n":1},"delay":600}},{"notify":{"url":"https://example.com/x","type":"hello","delay":0.5}},{"count":{"ad":"a"}},{"push":{"url":"https://example.com/events"}}],"enabled":false}"#;
        let read = rule(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        let names: Vec<&str> = read.actions.iter().map(Action::name).collect();
        assert_eq!(names, Action::NAMES);
        let short =
            rule(r#"{"on":["*"],"actions":[{"emit":{"type":"x","delay":"10m"}}]}"#).unwrap();
        assert!(short.enabled);
        let Action::Emit(emit) = &short.actions[0] else { panic!("{short:?}") };
        assert_eq!(emit.delay, Delay(Duration::from_secs(600)));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_by_its_place() {
        let with = |action: &str| format!(r#"{{"on":["x"],"actions":[{action}]}}"#);
        let long = "x".repeat(300);
        let cases = [
            (r#"{"on":[],"actions":[{"count":{"ad":"a"}}]}"#.to_owned(), "on: is empty"),
            (r#"{"on":["x"],"actions":[]}"#.to_owned(), "actions: is empty"),
            (format!(r#"{{"on":["{long}"],"actions":[]}}"#), "on[0]: has 300 bytes"),
            (
                r#"{"on":["x"],"filter":"subscriber.age >","actions":[{"count":{"ad":"a"}}]}"#
                    .to_owned(),
                "filter: the filter is not valid CEL: line 1, column 17",
            ),
            (with(r#"{"set_tag":{"tag":"a b"}}"#), "actions[0].set_tag.tag: "),
            (with(r#"{"set_field":{"field":"tags","value":1}}"#), "actions[0].set_field.field: "),
            (with(r#"{"emit":{"type":""}}"#), "actions[0].emit.type: is empty"),
            (with(r#"{"emit":{"type":"x","delay":"soon"}}"#), "soon is no time span"),
            (with(r#"{"emit":{"type":"x","delay":-1}}"#), "-1 is no time span"),
            (
                with(r#"{"emit":{"type":"x","delay":99999999}}"#),
                "emit.delay: is more than 366 days",
            ),
            (with(r#"{"notify":{"url":"http://127.0.0.1/"}}"#), "actions[0].notify.url: "),
            (
                with(r#"{"notify":{"url":"https://example.com","recheck_url":"http://[::1]/"}}"#),
                "notify.recheck_url: ",
            ),
            (
                with(r#"{"notify":{"url":"https://example.com","method":"GET","body":"x"}}"#),
                "notify.body: is not sent with GET",
            ),
            (
                with(r#"{"notify":{"url":"https://example.com","expires_in":0}}"#),
                "notify.expires_in: is 0",
            ),
            (with(r#"{"push":{"url":"ftp://example.com"}}"#), "actions[0].push.url: "),
            (with(r#"{"count":{"ad":"a","n":1001}}"#), "actions[0].count.n: is 1001"),
            (with(r#"{"send":{"url":"x"}}"#), "unknown variant `send`"),
            (with(r#"{"emit":{"type":"x","when":1}}"#), "unknown field `when`"),
        ];
        for (text, part) in cases {
            let error = rule(&text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
