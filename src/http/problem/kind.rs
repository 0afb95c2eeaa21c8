//! The kinds of problems.

use axum::http::StatusCode;

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
    /// The kind of the pipeline forbids to purge it. See [`super::Problem::protected`].
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
    pub(super) fn parts(self) -> (StatusCode, &'static str, &'static str) {
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
