//! What is answered when a request cannot be done: RFC 9457 problem documents.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tracing::{error, warn};
use utoipa::ToSchema;

use crate::breaker::Unanswered;
use crate::counters::CountersError;
use crate::keyspace::StoreError;
use crate::pool::open::LeaseError;
use crate::store::mongo::MongoError;
use crate::telemetry::OncePerMinute;

/// The media type of a problem.
pub(crate) const PROBLEM_JSON: &str = "application/problem+json";

/// Entries of [`Problem::errors`] that are shown; a batch has at most as many events.
const ERRORS_MAX: usize = 1_000;
/// When to come again while Redis or MongoDB is unavailable, in seconds.
const AWAY_SECONDS: u32 = 1;
/// When to come again while Redis is full, in seconds.
const FULL_SECONDS: u32 = 5;

/// What went wrong. Its URN is part of the contract: clients tell problems apart by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A parameter or the body cannot be used.
    InvalidRequest,
    /// Some events cannot be used; none was stored.
    InvalidEvents,
    /// No token, or an unknown one.
    Unauthorized,
    /// The token does not allow it.
    Forbidden,
    /// A web page of another site sent it.
    CrossSite,
    /// Nothing is served under this name.
    UnknownHost,
    /// There is no such path.
    NoRoute,
    /// There is no such pipeline.
    NoPipeline,
    /// There is no such dead letter.
    NoDeadLetter,
    /// There is no such lease.
    NoLease,
    /// Views are not counted here.
    NoCounters,
    /// Rules are not evaluated here.
    NoAutomations,
    /// There is no such rule.
    NoRule,
    /// Nothing is known of this subscriber.
    NoSubscriber,
    /// The rule is not the one that the caller knows.
    RuleChanged,
    /// The bot has as many rules as a bot may have.
    TooManyRules,
    /// Notifications do not run here.
    NoNotifications,
    /// There is no such notification.
    NoNotification,
    /// The notification is being sent or has ended.
    NotificationOver,
    /// The lease ended or ran out.
    LeaseGone,
    /// The queue holds views.
    KeepsViews,
    /// The queue holds notifications.
    KeepsNotifications,
    /// More is acknowledged than the slice has.
    AckTooHigh,
    /// The path has no such method.
    Method,
    /// The body did not come in time.
    BodyTooSlow,
    /// The body is too large.
    BodyTooLarge,
    /// The body is of a kind that is not read here.
    MediaType,
    /// Lines before the first of an import are missing.
    ImportGap,
    /// Redis has no memory left.
    Full,
    /// The process has not started yet.
    Starting,
    /// Redis does not answer.
    Unavailable,
    /// MongoDB does not answer.
    MongoAway,
    /// Others are served just now.
    Busy,
    /// More requests come than can be answered in time.
    Overloaded,
    /// The caller had its share, or its quota.
    Quota,
    /// The time that the caller gave is over, or too short.
    Deadline,
    /// A fault of this program or of its surroundings.
    Internal,
}

impl Kind {
    /// Status, the last part of the URN, title.
    /// The last part of its URN.
    pub(crate) fn code(self) -> &'static str {
        self.parts().1
    }

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
            Self::NoPipeline => (S::NOT_FOUND, "no-pipeline", "No such pipeline"),
            Self::NoDeadLetter => (S::NOT_FOUND, "no-dead-letter", "No such dead letter"),
            Self::NoLease => (S::NOT_FOUND, "no-lease", "No such lease"),
            Self::NoCounters => (S::NOT_FOUND, "no-counters", "The counters do not run here"),
            Self::NoAutomations => (S::NOT_FOUND, "no-automations", "Rules are not evaluated here"),
            Self::NoRule => (S::NOT_FOUND, "no-rule", "No such rule"),
            Self::NoSubscriber => (S::NOT_FOUND, "no-subscriber", "No such subscriber"),
            Self::RuleChanged => (S::PRECONDITION_FAILED, "rule-changed", "Another version"),
            Self::TooManyRules => (S::CONFLICT, "too-many-rules", "Too many rules"),
            Self::NoNotifications => {
                (S::NOT_FOUND, "no-notifications", "Notifications do not run here")
            }
            Self::NoNotification => (S::NOT_FOUND, "no-notification", "No such notification"),
            Self::NotificationOver => {
                (S::CONFLICT, "notification-over", "The notification cannot be changed any more")
            }
            Self::LeaseGone => (S::CONFLICT, "lease-gone", "The lease is gone"),
            Self::KeepsViews => (S::CONFLICT, "keeps-views", "Views are not purged"),
            Self::KeepsNotifications => {
                (S::CONFLICT, "keeps-notifications", "Notifications are not purged")
            }
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
    /// What went wrong, a stable URN such as `urn:fairlane:problem:no-pipeline`.
    #[serde(rename = "type")]
    #[schema(example = "urn:fairlane:problem:invalid-request")]
    kind: String,
    /// The same in words, always the same for one type.
    title: &'static str,
    /// The status of the answer.
    #[schema(example = 400)]
    status: u16,
    /// What is wrong with this request, and what helps.
    detail: String,
    /// What exactly, where it can be told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<Flaw>,
    #[serde(skip)]
    headers: Vec<(header::HeaderName, HeaderValue)>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Flaw {
    /// Which event of a batch, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    /// Which parameter, field or attribute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) field: Option<String>,
    /// What is wrong with it.
    pub(crate) detail: String,
}

impl Problem {
    /// A problem. `detail` says what is wrong with this request, and what helps.
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

    /// A parameter or field that cannot be used.
    pub(crate) fn field(field: &str, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        let problem = Self::new(Kind::InvalidRequest, format!("{field}: {detail}"));
        problem.errors(vec![Flaw { index: None, field: Some(field.to_owned()), detail }])
    }

    /// The status of the answer.
    pub(crate) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// What is wrong, in a few words.
    pub(crate) fn title(&self) -> &'static str {
        self.title
    }

    /// What is wrong with this request, and what helps.
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// A problem that has no type of its own.
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

    /// With what exactly is wrong, at most [`ERRORS_MAX`].
    pub(crate) fn errors(mut self, mut errors: Vec<Flaw>) -> Self {
        errors.truncate(ERRORS_MAX);
        self.errors = errors;
        self
    }

    /// With a header.
    pub(crate) fn header(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// MongoDB does not answer a reader in time, or is known not to.
    fn mongo_hangs() -> Self {
        let detail = "nothing was done: MongoDB does not answer in time; come again";
        Self::new(Kind::MongoAway, detail).retry_after(AWAY_SECONDS)
    }

    /// With the seconds after which it can be tried again.
    pub(crate) fn retry_after(self, seconds: u32) -> Self {
        self.header(header::RETRY_AFTER, seconds.into())
    }
}

impl From<StoreError> for Problem {
    /// The address of Redis and its words are for the log, not for callers.
    fn from(error: StoreError) -> Self {
        static FULL: OncePerMinute = OncePerMinute::new();
        static AWAY: OncePerMinute = OncePerMinute::new();
        static REFUSED: OncePerMinute = OncePerMinute::new();
        if error.is_full() {
            if let Some(suppressed) = FULL.take() {
                warn!(%error, suppressed, "an HTTP request cannot be done: Redis is full");
            }
            let detail = "nothing was done: Redis has no memory left; come again once the queues are drained or its maxmemory is raised";
            return Self::new(Kind::Full, detail).retry_after(FULL_SECONDS);
        }
        if !error.is_passing() {
            if let Some(suppressed) = REFUSED.take() {
                error!(%error, suppressed, "an HTTP request cannot be done");
            }
            let detail = "Redis did not do what it was asked; the log of this server says why";
            return Self::new(Kind::Internal, detail);
        }
        if let Some(suppressed) = AWAY.take() {
            warn!(%error, suppressed, "an HTTP request cannot be done: Redis is unavailable");
        }
        let detail = match error {
            StoreError::Unknown { .. } => {
                "Redis did not answer in time, so it is unknown whether this was done; look, or come again"
            }
            _ => "nothing was done: Redis is unavailable; come again",
        };
        Self::new(Kind::Unavailable, detail).retry_after(AWAY_SECONDS)
    }
}

impl From<MongoError> for Problem {
    /// The address of MongoDB and its words are for the log, not for callers.
    fn from(error: MongoError) -> Self {
        static AWAY: OncePerMinute = OncePerMinute::new();
        static REFUSED: OncePerMinute = OncePerMinute::new();
        if error.is_passing() {
            if let Some(suppressed) = AWAY.take() {
                warn!(%error, suppressed, "an HTTP request cannot be done: MongoDB is unavailable");
            }
            let detail = "nothing was done: MongoDB is unavailable; come again";
            return Self::new(Kind::MongoAway, detail).retry_after(AWAY_SECONDS);
        }
        if let Some(suppressed) = REFUSED.take() {
            error!(%error, suppressed, "an HTTP request cannot be done");
        }
        let detail = "MongoDB did not do what it was asked; the log of this server says why";
        Self::new(Kind::Internal, detail)
    }
}

impl From<CountersError> for Problem {
    fn from(error: CountersError) -> Self {
        match error {
            CountersError::Redis(error) => error.into(),
            CountersError::Mongo(error) => error.into(),
            CountersError::RedisHangs => {
                let detail = "nothing was done: Redis does not answer in time; come again";
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

impl From<LeaseError> for Problem {
    fn from(error: LeaseError) -> Self {
        let detail = error.to_string();
        match error {
            LeaseError::NoSuch => Self::new(Kind::NoLease, detail),
            LeaseError::Gone => Self::new(Kind::LeaseGone, detail),
            LeaseError::Ack { .. } => {
                let field = Some("ack".to_owned());
                let errors = vec![Flaw { index: None, field, detail: detail.clone() }];
                Self::new(Kind::AckTooHigh, detail).errors(errors)
            }
            LeaseError::Store(error) => error.into(),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(mut self) -> Response {
        let status = self.status();
        let headers = std::mem::take(&mut self.headers);
        // Texts and numbers always encode.
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

    fn refused(message: &str) -> StoreError {
        let (target, message) = ("secret-host:6379".to_owned(), message.to_owned());
        StoreError::Refused { target, command: "XADD", message }
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
    fn a_problem_tells_nobody_where_redis_is() {
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
