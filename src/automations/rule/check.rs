//! Checks a rule against its bounds, and reports the place of the first invalid part.

use std::time::Duration;

use super::super::profile::{self, check_name, check_value};
use super::{
    ACTIONS_MAX, Action, Count, DATA_MAX_BYTES, Delay, NAME_MAX_BYTES, Notify, Push,
    RULE_MAX_BYTES, Rule, STARS_MAX, SetField, TYPE_MAX_BYTES, TYPES_MAX, Tag, text_of,
};
use crate::counters::view::{AdId, VIEWS_MAX};
use crate::expression::{Filter, Sees};
use crate::notifications::record::{BODY_MAX_BYTES, DELAY_MAX, KIND_MAX_BYTES, UID_MAX_BYTES};
use crate::outbound::{CheckedUrl, Policy};

/// The methods of a notification.
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

/// Why a rule is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Unusable {
    /// The place, for example `actions[2].emit.type`.
    pub field: String,
    /// The problem and its remedy.
    pub problem: String,
    /// The line and column of a filter.
    pub position: Option<crate::expression::Position>,
}

impl Unusable {
    fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into(), position: None }
    }
}

impl Rule {
    /// Checks every bound; the URLs by `targets`.
    ///
    /// # Errors
    /// The first invalid part.
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
    /// The invalid part, and the problem.
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
