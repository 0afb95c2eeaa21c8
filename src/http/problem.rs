//! Problem documents (RFC 9457): the answers to requests that fail.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tracing::{error, warn};
use utoipa::ToSchema;

use super::admit::SHED_REASON;
use super::partly::partly;
use crate::breaker::Unanswered;
use crate::bus::BusError;
use crate::counters::CountersError;
use crate::mongo::client::MongoError;
use crate::pipeline::Protected;
use crate::quotas::{KEY_BYTES, QuotaExceeded};
use crate::redis::RedisError;
use crate::telemetry::OncePerMinute;

/// The media type of a problem.
pub(crate) const PROBLEM_JSON: &str = "application/problem+json";

/// Maximum number of entries in [`Problem::errors`]; a batch has at most as many events.
const ERRORS_MAX: usize = 1_000;
/// `Retry-After` while Redis or MongoDB is unavailable, in seconds.
const AWAY_SECONDS: u32 = 1;
/// `Retry-After` while Redis is full or the bus refuses events, in seconds.
const FULL_SECONDS: u32 = 5;

/// The kind of a problem. Its URN is part of the contract: clients distinguish problems by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A parameter or the body is not valid.
    InvalidRequest,
    /// Some events are not valid; none was stored.
    InvalidEvents,
    /// The token is missing or unknown.
    Unauthorized,
    /// The token lacks a permission.
    Forbidden,
    /// A web page of another site sent the request.
    CrossSite,
    /// The host name of the request is not allowed.
    UnknownHost,
    /// The path does not exist.
    NoRoute,
    /// The pipeline does not exist.
    NoPipeline,
    /// Nothing is known of the event.
    NoEvent,
    /// The dead letter does not exist.
    NoDeadLetter,
    /// The process does not reload its configuration.
    NoReload,
    /// The replay does not exist.
    NoReplay,
    /// The pipeline cannot be replayed, or the id belongs to another replay.
    ReplayRefused,
    /// The lease does not exist.
    NoLease,
    /// The counters do not run.
    NoCounters,
    /// The automations do not run.
    NoAutomations,
    /// The rule does not exist.
    NoRule,
    /// The subscriber is unknown.
    NoSubscriber,
    /// The rule has another version than the caller expects.
    RuleChanged,
    /// The bot has the maximum number of rules.
    TooManyRules,
    /// The token has set something for the maximum number of bots.
    TooManyBots,
    /// The notifications do not run.
    NoNotifications,
    /// The notification does not exist.
    NoNotification,
    /// The notification is in flight or has ended.
    NotificationOver,
    /// The lease was completed, revoked or has expired.
    LeaseGone,
    /// The kind of the pipeline forbids to purge it. See [`Problem::protected`].
    Protected,
    /// `ack` is higher than the number of events in the slice.
    AckTooHigh,
    /// The path does not support the method.
    Method,
    /// The body did not arrive in time.
    BodyTooSlow,
    /// The body is too large.
    BodyTooLarge,
    /// The media type of the body is not supported.
    MediaType,
    /// Earlier lines of an import are missing.
    ImportGap,
    /// Redis has no memory left.
    Full,
    /// The process has not started yet.
    Starting,
    /// Redis is unavailable.
    Unavailable,
    /// MongoDB is unavailable.
    MongoAway,
    /// The bus is unavailable.
    BusAway,
    /// The request was shed because other requests had priority.
    Busy,
    /// The request was shed because of overload.
    Overloaded,
    /// The caller exceeded its fair share or its quota, or the bot holds as much as its quota.
    Quota,
    /// The deadline passed, or is too short for the request.
    Deadline,
    /// An internal error.
    Internal,
}

impl Kind {
    /// Status, the last part of the URN, title.
    fn parts(self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::InvalidRequest => (S::BAD_REQUEST, "invalid-request", "Invalid request"),
            Self::InvalidEvents => (S::BAD_REQUEST, "invalid-events", "Invalid events"),
            Self::Unauthorized => (S::UNAUTHORIZED, "unauthorized", "A token is needed"),
            Self::Forbidden => (S::FORBIDDEN, "forbidden", "The token does not allow this"),
            Self::CrossSite => (S::FORBIDDEN, "cross-site", "Another site's request"),
            Self::UnknownHost => (S::MISDIRECTED_REQUEST, "unknown-host", "Unknown host"),
            Self::NoRoute => (S::NOT_FOUND, "no-route", "No such path"),
            Self::NoEvent => (S::NOT_FOUND, "no-event", "No such event"),
            Self::NoPipeline => (S::NOT_FOUND, "no-pipeline", "No such pipeline"),
            Self::NoDeadLetter => (S::NOT_FOUND, "no-dead-letter", "No such dead letter"),
            Self::NoReload => (S::NOT_FOUND, "no-reload", "This process does not reload"),
            Self::NoReplay => (S::NOT_FOUND, "no-replay", "No such replay"),
            Self::ReplayRefused => (S::CONFLICT, "replay-refused", "The replay is refused"),
            Self::NoLease => (S::NOT_FOUND, "no-lease", "No such lease"),
            Self::NoCounters => (S::NOT_FOUND, "no-counters", "The counters do not run here"),
            Self::NoAutomations => (S::NOT_FOUND, "no-automations", "Rules are not evaluated here"),
            Self::NoRule => (S::NOT_FOUND, "no-rule", "No such rule"),
            Self::NoSubscriber => (S::NOT_FOUND, "no-subscriber", "No such subscriber"),
            Self::RuleChanged => (S::PRECONDITION_FAILED, "rule-changed", "Another version"),
            Self::TooManyRules => (S::CONFLICT, "too-many-rules", "Too many rules"),
            Self::TooManyBots => (S::CONFLICT, "too-many-bots", "Too many bots"),
            Self::NoNotifications => {
                (S::NOT_FOUND, "no-notifications", "Notifications do not run here")
            }
            Self::NoNotification => (S::NOT_FOUND, "no-notification", "No such notification"),
            Self::NotificationOver => {
                (S::CONFLICT, "notification-over", "The notification cannot be changed any more")
            }
            Self::LeaseGone => (S::CONFLICT, "lease-gone", "The lease is gone"),
            Self::Protected => (S::CONFLICT, "protected", "The queue is not purged"),
            Self::AckTooHigh => (S::UNPROCESSABLE_ENTITY, "ack-too-high", "Too much acknowledged"),
            Self::Method => (S::METHOD_NOT_ALLOWED, "method", "Method not allowed"),
            Self::BodyTooSlow => (S::REQUEST_TIMEOUT, "body-too-slow", "The body is too slow"),
            Self::BodyTooLarge => (S::PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large"),
            Self::MediaType => (S::UNSUPPORTED_MEDIA_TYPE, "media-type", "Unsupported media type"),
            Self::ImportGap => (S::CONFLICT, "import-gap", "Lines are missing"),
            Self::Full => (S::SERVICE_UNAVAILABLE, "full", "Redis is full"),
            Self::Starting => (S::SERVICE_UNAVAILABLE, "starting", "Not ready yet"),
            Self::Unavailable => (S::SERVICE_UNAVAILABLE, "unavailable", "Redis is unavailable"),
            Self::MongoAway => (S::SERVICE_UNAVAILABLE, "mongodb-away", "MongoDB is unavailable"),
            Self::BusAway => (S::SERVICE_UNAVAILABLE, "bus-away", "The bus is unavailable"),
            Self::Busy => (S::SERVICE_UNAVAILABLE, "busy", "Busy"),
            Self::Overloaded => (S::SERVICE_UNAVAILABLE, "overloaded", "Overloaded"),
            Self::Quota => (S::TOO_MANY_REQUESTS, "quota", "Too many requests"),
            Self::Deadline => (S::GATEWAY_TIMEOUT, "deadline", "The deadline passed"),
            Self::Internal => (S::INTERNAL_SERVER_ERROR, "internal", "Internal error"),
        }
    }
}

/// A problem document (RFC 9457).
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Problem {
    /// The type of the problem: a stable URN such as `urn:fairlane:problem:no-pipeline`.
    #[serde(rename = "type")]
    #[schema(example = "urn:fairlane:problem:invalid-request")]
    kind: String,
    /// The type in words; constant for each type.
    title: &'static str,
    /// The HTTP status of the answer.
    #[schema(example = 400)]
    status: u16,
    pub(super) detail: String,
    /// The individual errors, if known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<Flaw>,
    #[serde(skip)]
    pub(super) headers: Vec<(header::HeaderName, HeaderValue)>,
}

/// One error.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Flaw {
    /// The index of the event in the batch, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    /// The name of the parameter, field or attribute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) field: Option<String>,
    /// The reason of the error.
    pub(crate) detail: String,
}

impl Problem {
    /// A problem. `detail` names the fault of this request, and the remedy.
    pub(crate) fn new(kind: Kind, detail: impl Into<String>) -> Self {
        let (status, urn, title) = kind.parts();
        Self {
            kind: format!("urn:fairlane:problem:{urn}"),
            title,
            status: status.as_u16(),
            detail: detail.into(),
            errors: Vec::new(),
            headers: Vec::new(),
        }
    }

    /// A purge that the kind of the pipeline forbids. The product names the type of the problem.
    pub(crate) fn protected(kept: Protected) -> Self {
        let kind = format!("urn:fairlane:problem:{}", kept.code);
        Self { kind, title: kept.title, ..Self::new(Kind::Protected, kept.to_string()) }
    }

    /// An invalid parameter or field.
    pub(crate) fn field(field: &str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        let problem = Self::new(Kind::InvalidRequest, format!("{field}: {detail}"));
        problem.errors(vec![Flaw { index: None, field: Some(field.to_owned()), detail }])
    }

    pub(crate) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    pub(crate) fn title(&self) -> &'static str {
        self.title
    }

    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// A problem without a type of its own.
    pub(crate) fn of_status(status: StatusCode) -> Self {
        let title = status.canonical_reason().unwrap_or("Error");
        Self {
            kind: "about:blank".to_owned(),
            title,
            status: status.as_u16(),
            detail: title.to_lowercase(),
            errors: Vec::new(),
            headers: Vec::new(),
        }
    }

    /// Adds the individual errors, at most [`ERRORS_MAX`].
    pub(crate) fn errors(mut self, mut errors: Vec<Flaw>) -> Self {
        errors.truncate(ERRORS_MAX);
        self.errors = errors;
        self
    }

    /// Adds a header to the answer.
    pub(crate) fn header(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// MongoDB did not answer a read in time, or is known to be slow.
    fn mongo_hangs() -> Self {
        let detail = "nothing was done: MongoDB does not answer in time; retry later";
        Self::new(Kind::MongoAway, detail).retry_after(AWAY_SECONDS)
    }

    /// Adds `Retry-After`, in seconds.
    pub(crate) fn retry_after(self, seconds: u32) -> Self {
        self.header(header::RETRY_AFTER, seconds.into())
    }
}

impl From<BusError> for Problem {
    /// Addresses and texts of the bus belong in the log, not in answers.
    fn from(error: BusError) -> Self {
        static AWAY: OncePerMinute = OncePerMinute::new();
        static REFUSED: OncePerMinute = OncePerMinute::new();
        let error = match error {
            BusError::Redis(error) => return error.into(),
            error => error,
        };
        if !error.is_passing() {
            if let Some(suppressed) = REFUSED.take() {
                error!(%error, suppressed, "an HTTP request failed");
            }
            let detail = "the bus refused the events; the log of this server has the reason";
            return Self::new(Kind::BusAway, detail).retry_after(FULL_SECONDS);
        }
        if let Some(suppressed) = AWAY.take() {
            warn!(%error, suppressed, "an HTTP request failed: the bus is unavailable");
        }
        let detail = match error {
            BusError::Connect { .. } => "nothing was done: the bus does not answer; retry",
            BusError::Partly { .. } => {
                "the bus stored only a part of the events; with bus.dedup, publishing all of them again is safe"
            }
            _ => {
                "the bus did not answer in time: the events may or may not be stored; with bus.dedup, publishing them again is safe"
            }
        };
        Self::new(Kind::BusAway, detail).retry_after(AWAY_SECONDS)
    }
}

impl From<RedisError> for Problem {
    /// The address of Redis and its error texts belong in the log, not in answers.
    fn from(error: RedisError) -> Self {
        static FULL: OncePerMinute = OncePerMinute::new();
        static AWAY: OncePerMinute = OncePerMinute::new();
        static REFUSED: OncePerMinute = OncePerMinute::new();
        let error = match error {
            RedisError::Quota(exceeded) => return exceeded.into(),
            RedisError::Partly(source) => {
                return partly("this is done on some shards", *source, "repeat it for the others");
            }
            error => error,
        };
        if error.is_full() {
            if let Some(suppressed) = FULL.take() {
                warn!(%error, suppressed, "an HTTP request failed: Redis is full");
            }
            let detail = "nothing was done: Redis has no memory left; retry once the queues are drained or its maxmemory is raised";
            return Self::new(Kind::Full, detail).retry_after(FULL_SECONDS);
        }
        if !error.is_passing() {
            if let Some(suppressed) = REFUSED.take() {
                error!(%error, suppressed, "an HTTP request failed");
            }
            let detail = "Redis failed the command; the log of this server has the reason";
            return Self::new(Kind::Internal, detail);
        }
        if let Some(suppressed) = AWAY.take() {
            warn!(%error, suppressed, "an HTTP request failed: Redis is unavailable");
        }
        Self::new(Kind::Unavailable, error.outcome()).retry_after(AWAY_SECONDS)
    }
}

impl From<QuotaExceeded> for Problem {
    fn from(exceeded: QuotaExceeded) -> Self {
        let remedy = match exceeded.name {
            "queued_bytes" => "retry once its queued events are handled",
            "delayed_events" | "delayed_bytes" => "retry once some of its delayed events were due",
            KEY_BYTES => {
                "retry later, as its keys are forgotten an hour after their first use (imports: a week), or send fewer requests with keys"
            }
            _ => "retry once some of its notifications have ended, or cancel some",
        };
        let detail = format!("nothing was done: {exceeded}; {remedy}, or raise the quota");
        let reason = HeaderValue::from_static("quota");
        Self::new(Kind::Quota, detail).header(SHED_REASON, reason).retry_after(FULL_SECONDS)
    }
}

impl From<MongoError> for Problem {
    /// The address of MongoDB and its error texts belong in the log, not in answers.
    fn from(error: MongoError) -> Self {
        static AWAY: OncePerMinute = OncePerMinute::new();
        static REFUSED: OncePerMinute = OncePerMinute::new();
        if error.is_passing() {
            if let Some(suppressed) = AWAY.take() {
                warn!(%error, suppressed, "an HTTP request failed: MongoDB is unavailable");
            }
            if error.is_timeout() && !error.may_have_written() {
                return Self::mongo_hangs();
            }
            let detail = if error.may_have_written() {
                "MongoDB did not confirm this, so it may have been done; check the result, or retry"
            } else {
                "nothing was done: MongoDB is unavailable; retry later"
            };
            return Self::new(Kind::MongoAway, detail).retry_after(AWAY_SECONDS);
        }
        if let Some(suppressed) = REFUSED.take() {
            error!(%error, suppressed, "an HTTP request failed");
        }
        let detail = "MongoDB failed the command; the log of this server has the reason";
        Self::new(Kind::Internal, detail)
    }
}

impl From<CountersError> for Problem {
    fn from(error: CountersError) -> Self {
        match error {
            CountersError::Redis(error) => error.into(),
            CountersError::Mongo(error) => error.into(),
            CountersError::RedisHangs => {
                let detail = "nothing was done: Redis does not answer in time; retry later";
                Self::new(Kind::Unavailable, detail).retry_after(AWAY_SECONDS)
            }
            CountersError::MongoHangs => Self::mongo_hangs(),
        }
    }
}

impl From<Unanswered<MongoError>> for Problem {
    fn from(unanswered: Unanswered<MongoError>) -> Self {
        match unanswered {
            Unanswered::Failed(error) => error.into(),
            Unanswered::Open | Unanswered::Late(_) => Self::mongo_hangs(),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(mut self) -> Response {
        let status = self.status();
        let headers = std::mem::take(&mut self.headers);
        // Strings and numbers always serialise.
        let body = serde_json::to_vec(&self).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, PROBLEM_JSON)], body).into_response();
        response.headers_mut().extend(headers);
        response
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::MongoUrl;

    fn refused(message: &str) -> RedisError {
        let (target, message) = ("secret-host:6379".to_owned(), message.to_owned());
        RedisError::Refused { target, command: "XADD", message }
    }

    #[test]
    fn a_store_that_comes_back_is_worth_another_try_and_others_are_not() {
        for (message, status, again) in [
            ("OOM command not allowed", 503, Some("5")),
            ("LOADING Redis is loading", 503, Some("1")),
            ("WRONGTYPE Operation against", 500, None),
        ] {
            let response = Problem::from(refused(message)).into_response();
            assert_eq!(response.status(), status, "{message}");
            let retry = response.headers().get(header::RETRY_AFTER);
            assert_eq!(retry.map(|value| value.to_str().unwrap()), again, "{message}");
            assert_eq!(response.headers()[header::CONTENT_TYPE], PROBLEM_JSON);
        }
    }

    #[test]
    fn a_bus_that_refuses_is_asked_again_later() {
        let error = BusError::Refused { bus: "kafka".to_owned(), cause: "too large".to_owned() };
        let response = Problem::from(error).into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()[header::RETRY_AFTER], HeaderValue::from(FULL_SECONDS));
    }

    #[test]
    fn a_problem_does_not_reveal_the_address_of_redis() {
        let problem = serde_json::to_string(&Problem::from(refused("NOPERM"))).unwrap();
        assert!(!problem.contains("secret-host"), "{problem}");
    }

    #[test]
    fn a_mongodb_that_comes_back_is_worth_another_try_and_callers_are_not_told_where_it_is() {
        let url = MongoUrl::parse("mongodb://user:hidden@secret-host:27017").unwrap();
        let old = MongoError::Version { url: url.clone(), version: "4.4".to_owned() };
        let (command, within) = ("secret-find", Duration::from_secs(2));
        let silent = MongoError::Silent { url, command, within, met: Some("secret".to_owned()) };
        for (error, kind, status, again) in
            [(silent, "mongodb-away", 503, Some("1")), (old, "internal", 500, None)]
        {
            let problem = Problem::from(CountersError::from(error));
            let text = serde_json::to_string(&problem).unwrap();
            assert!(text.contains(&format!("urn:fairlane:problem:{kind}")), "{text}");
            assert!(!text.contains("secret") && !text.contains("hidden"), "{text}");
            let response = problem.into_response();
            assert_eq!(response.status(), status, "{text}");
            let retry = response.headers().get(header::RETRY_AFTER);
            assert_eq!(retry.map(|value| value.to_str().unwrap()), again, "{text}");
        }
    }

    #[test]
    fn a_problem_names_the_field() {
        let problem = serde_json::to_value(Problem::field("limit", "it is 0")).unwrap();
        assert_eq!(problem["type"], "urn:fairlane:problem:invalid-request");
        assert_eq!(problem["errors"][0]["field"], "limit");
        assert_eq!(problem["detail"], "limit: it is 0");
    }
}
