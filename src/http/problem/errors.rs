//! The problems that errors of the stores and of the bus become.

use axum::http::HeaderValue;
use tracing::{error, warn};

use super::super::admit::SHED_REASON;
use super::super::partly::partly;
use super::{Kind, Problem};
use crate::breaker::Unanswered;
use crate::bus::BusError;
use crate::counters::CountersError;
use crate::mongo::client::MongoError;
use crate::quotas::{KEY_BYTES, QuotaExceeded};
use crate::redis::RedisError;
use crate::telemetry::OncePerMinute;

/// `Retry-After` while Redis or MongoDB is unavailable, in seconds.
const AWAY_SECONDS: u32 = 1;
/// `Retry-After` while Redis is full or the bus refuses events, in seconds.
const FULL_SECONDS: u32 = 5;

impl Problem {
    /// MongoDB did not answer a read in time, or is known to be slow.
    fn mongo_hangs() -> Self {
        let detail = "nothing was done: MongoDB does not answer in time; retry later";
        Self::new(Kind::MongoAway, detail).retry_after(AWAY_SECONDS)
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
        if let MongoError::Crowded(crowded) = error {
            let detail = format!(
                "nothing was done: {crowded}; send fewer concurrent requests, and retry later"
            );
            return Self::new(Kind::Quota, detail).retry_after(AWAY_SECONDS);
        }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::header;
    use axum::response::IntoResponse as _;

    use super::super::PROBLEM_JSON;
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
    fn a_caller_with_too_many_waiting_requests_is_told_so() {
        let crowded = MongoError::from(crate::admission::Crowded);
        let response = Problem::from(Unanswered::Failed(crowded)).into_response();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()[header::RETRY_AFTER], HeaderValue::from(AWAY_SECONDS));
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
}
