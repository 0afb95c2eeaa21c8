//! Actions that failed after a part of them was done: their answers must not say that nothing was done.

use super::problem::Problem;
use crate::queue::{BulkStopped, Deed};
use crate::redis::RedisError;

/// `done`: what was done before the error. `remedy`: how to do the rest. The kind and the headers are
/// those of the error.
pub(super) fn partly(done: &str, error: RedisError, remedy: &str) -> Problem {
    let detail = format!("{done}; then {}; {remedy}", told(&error));
    let mut problem = Problem::from(error);
    problem.detail = detail;
    problem
}

/// An action on many dead letters stopped early.
pub(super) fn stopped(deed: Deed, BulkStopped { done, source }: BulkStopped) -> Problem {
    if done == 0 {
        return source.into();
    }
    let deed = match deed {
        Deed::Redrive => "queued again",
        Deed::Drop => "dropped",
    };
    let done = format!("at least {done} of the dead letters are {deed}");
    partly(&done, source, "repeat it for the rest")
}

/// What happened. Addresses and texts of Redis belong in the log.
fn told(error: &RedisError) -> String {
    match error {
        RedisError::Quota(exceeded) => exceeded.to_string(),
        RedisError::Partly(source) => told(source),
        RedisError::Unknown { .. } => "Redis did not answer in time".to_owned(),
        RedisError::Unreplicated { .. } => {
            "fewer replicas of Redis than redis.wait_replicas confirmed a write".to_owned()
        }
        _ if error.is_full() => "Redis had no memory left".to_owned(),
        _ if error.is_passing() => "Redis was unavailable".to_owned(),
        _ => "Redis failed a command (the log of this server has the reason)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::header;
    use axum::response::IntoResponse as _;

    use super::*;

    fn refused(message: &str) -> RedisError {
        let (target, message) = ("secret-host:6379".to_owned(), message.to_owned());
        RedisError::Refused { target, command: "redrive", message }
    }

    #[test]
    fn an_answer_does_not_say_that_nothing_was_done_if_some_was() {
        let said = |deed, done, message| {
            let problem = stopped(deed, BulkStopped { done, source: refused(message) });
            let (status, detail) = (problem.status().as_u16(), problem.detail().to_owned());
            let kind = serde_json::to_value(&problem).unwrap()["type"].clone();
            let response = problem.into_response();
            let retry = response.headers().get(header::RETRY_AFTER).cloned();
            (status, kind, retry, detail)
        };
        let (.., detail) = said(Deed::Redrive, 0, "LOADING Redis");
        assert!(detail.starts_with("nothing was done"), "{detail}");
        for (deed, message, done, cause, status, again) in [
            (Deed::Redrive, "LOADING Redis", "queued again", "unavailable", 503, Some("1")),
            (Deed::Drop, "LOADING Redis", "dropped", "unavailable", 503, Some("1")),
            (Deed::Redrive, "OOM command", "queued again", "no memory left", 503, Some("5")),
            (Deed::Drop, "NOPERM secret", "dropped", "failed a command", 500, None),
        ] {
            let (got, kind, retry, detail) = said(deed, 3, message);
            let starts = format!("at least 3 of the dead letters are {done}; then Redis ");
            assert!(detail.starts_with(&starts) && detail.contains(cause), "{detail}");
            assert!(detail.ends_with("; repeat it for the rest"), "{detail}");
            assert!(!detail.contains("secret"), "{detail}");
            assert_eq!(got, status, "{detail}");
            assert_eq!(
                kind,
                serde_json::to_value(Problem::from(refused(message))).unwrap()["type"]
            );
            assert_eq!(retry.as_ref().map(|value| value.to_str().unwrap()), again, "{detail}");
        }
    }

    #[test]
    fn an_action_that_is_done_on_some_shards_says_so() {
        let problem = Problem::from(RedisError::Partly(Box::new(refused("OOM command"))));
        let detail =
            "this is done on some shards; then Redis had no memory left; repeat it for the others";
        assert_eq!((problem.status().as_u16(), problem.detail()), (503, detail));
    }
}
